"""Find the defect that explains a kernel's output, or say that none does.

A defect is a change of the reference implementation, such as "the causal mask is strict". Each one
predicts the complete wrong output, number by number, so it can be compared with the actual output. The
steps, with the module of each:

1. ``error_location``: compute the correct output and find the rows and heads whose error is larger than
   the kernel's rounding can be. If there are none, nothing is wrong.
2. ``row_sample``: take the worst rows, and many rows of all sequences, wrong and correct.
3. ``candidates``: compare each defect's prediction with the worst rows ("excluded by value" if it
   differs by more than rounding), then with many rows ("excluded by place" if it changes correct rows or
   misses wrong ones). The widest scope that fits is the defect's: all rows, those of one kernel, or some
   sequences.
4. ``decision``: of the remaining candidates, drop those that fit worse than rounding allows by chance.
   One left: it is the cause. Several: select the one that a contract violation of the call would cause,
   if there is exactly one; otherwise the output is ambiguous. None: it is unexplained.
5. ``reruns``, if the Case can be run again: change the output buffer and the unwritten cache slots. Rows
   that change were not written, or depend on memory that was not written.
6. ``distinction``, for an ambiguous output only: search for a Case in which the explanations differ.

``diagnose`` runs these steps, ``diagnosis`` holds the result, ``files`` reads saved outputs and calls.

Example: two sequences, a decode with 40 cached tokens and a prefill of 17 tokens. The kernel forgets the
newest token of the decode. Step 1 finds row 0 wrong by 0.4, where rounding explains 0.001. In step 3,
"scale_doubled" predicts an error of 0.7 there and is excluded by value. "newest_token_dropped" leaves
0.0005, and its prediction for the prefill differs from the correct rows, so its scope becomes the decode
rows. "causal_minus_one" predicts the same numbers, since the only new token is also the newest. In step
4 neither fits better, so the output is ambiguous. Step 6 proposes a Case in which the two differ.
"""
