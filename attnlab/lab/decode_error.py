"""Decode the message of a failed assertion: the sequence, token and kernel of a mismatch."""

import dataclasses
import math
import re
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING

from attnlab.case.case import Case
from attnlab.case.errors import InvalidCase
from attnlab.case.platforms import PLATFORMS, STAGES
from attnlab.case.shown import Document, Shown
from attnlab.contracts.contract import Target
from attnlab.contracts.dispatch import decide, serving

if TYPE_CHECKING:
    from attnlab.contracts.violations import Violation

_COUNT = re.compile(r"Mismatched elements:\s*(\d+)\s*/\s*(\d+)")
_NUMBER = r"(\d+(?:\.\d+)?(?:[eE][-+]?\d+)?|nan|inf)"
_TUPLE = r"\((\d{1,9}(?:,\s*\d{1,9})*)\)"
_GREATEST = re.compile(
    r"(?:Greatest|Max) absolute difference(?: among violations)?:"
    rf"\s*{_NUMBER}(?:\s+at index\s*{_TUPLE})?",
    re.I,
)
_RELATIVE = re.compile(rf"Greatest relative difference:\s*{_NUMBER}\s+at index\s*{_TUPLE}", re.I)
_TEST_ID = re.compile(r"test_\w+\[[^\[\]\s]+\]")
_INDEX = re.compile(r"\((\d{1,9}(?:,\s*\d{1,9}){2,3})\)")
_VALUE = r"(-?\d+(?:\.\d*)?(?:[eE][-+]?\d+)?|-?nan|-?inf)"
_LISTED = re.compile(  # one mismatch in the list of pytest.approx or numpy.testing
    rf"[(\[](\d{{1,9}}(?:,\s*\d{{1,9}})+)[)\]](?:\s*\|\s*|:\s*){_VALUE}(?:\s*\|\s*| \(ACTUAL\), ){_VALUE}"
)
_NAMED_INDEX = re.compile(rf"\bindex\s*:?\s*{_TUPLE}", re.I)
_DTYPES = re.compile(r"expected scalar type (\w+) but found (\w+)")
_ALLCLOSE = re.compile(r"\ballclose\(|Not equal to tolerance|Arrays are not almost equal")


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorText:
    """What the text of a failed test contains; None or "" for what it does not.

    - ``mismatched``, ``total``, ``greatest``: the numbers of ``torch.testing.assert_close``, of
      ``numpy.testing`` or of ``pytest.approx``, wherever they are in the text.
    - ``index``: the index of the greatest difference, or of the greatest in a list of mismatches; without
      these, the first that the text calls an index, or, in a text without these numbers, the first one.
    - ``dtypes``: the dtype that an op expects and the one that it found, in torch's C++ names.
    - ``has_allclose``: the text has a call of allclose, or is an assertion of ``numpy.testing``.
    - ``test_id``: the last pytest id that a Case can be made from.
    - ``refusal``: why the last id that names an attention test cannot be made a Case.
    """

    mismatched: int | None = None
    total: int | None = None
    greatest: float | None = None
    index: tuple[int, ...] | None = None
    dtypes: tuple[str, str] | None = None
    has_allclose: bool = False
    test_id: str | None = None
    refusal: str = ""

    @classmethod
    def read(cls, text: str) -> "ErrorText":
        """Return what a text contains."""
        count, greatest, dtypes = _COUNT.search(text), _GREATEST.search(text), _DTYPES.search(text)
        rest = _RELATIVE.sub("", text)
        named = _NAMED_INDEX.search(rest)
        if named is None and greatest is None and count is None:
            named = _INDEX.search(rest)
        place = greatest[2] if greatest and greatest[2] else named[1] if named else None
        largest = float(greatest[1]) if greatest else None
        listed = [(abs(float(a) - float(b)), at) for at, a, b in _LISTED.findall(text)]
        if listed and not (greatest and greatest[2]):
            largest, place = max(listed, key=lambda one: math.inf if math.isnan(one[0]) else one[0])
        test_id, refusal = _test_id(text)
        return cls(
            mismatched=int(count[1]) if count else None,
            total=int(count[2]) if count else None,
            greatest=largest,
            index=tuple(int(n) for n in place.split(",") if n.strip()) if place else None,
            dtypes=(dtypes[1], dtypes[2]) if dtypes else None,
            has_allclose=_ALLCLOSE.search(text) is not None,
            test_id=test_id,
            refusal=refusal,
        )


def _test_id(text: str) -> tuple[str | None, str]:
    """Return the last id that becomes a Case and "", or None and why the last id does not."""
    refusal = ""
    for test_id in reversed(list(dict.fromkeys(_TEST_ID.findall(text)))):
        try:
            Case.from_test_id(test_id)
        except InvalidCase as error:
            refusal = refusal or str(error)
        else:
            return str(test_id), ""
    return None, refusal


# ErrorAnswer: what follows from the text of a failed test that has no place in an attention output.
#
# These are a dtype error, a failed ``torch.allclose``, and an index in a cache that was written.

_TORCH_NAMES = {
    "Int": "int32",
    "Long": "int64",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Float": "float32",
    "Double": "float64",
    "Byte": "uint8",
}


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ErrorAnswer(Document, Shown):
    """What follows from the text of a failed test, in terms of a Case.

    - ``kind``: "dtype", "allclose" or "cache". ``facts``: what follows, as sentences.
    - ``case``: the Case that the text is read for.
    - ``rejected``: of a dtype error, (stage, kernel, tensor) for each tensor that a kernel of the Case
      rejects with this text.
    - ``slot``, ``block``, ``offset``, ``head``, ``element``: the place in the cache. ``seq``, ``position``:
      the token that the row is compared with; None if no sequence owns the slot or the index does not tell.
    - ``test_id``: the id in the text, if it became the Case. ``command``: the command that goes on.
    - ``refusal``: why an id in the text did not become the Case, or "".
    """

    _more = ("sentences",)

    kind: str
    case: Case
    facts: tuple[str, ...]
    rejected: tuple[tuple[str, str, str], ...] = ()
    slot: int | None = None
    block: int | None = None
    offset: int | None = None
    head: int | None = None
    element: int | None = None
    seq: int | None = None
    position: int | None = None
    test_id: str | None = None
    command: str | None = None
    refusal: str = ""

    def sentences(self) -> list[str]:
        """Return the facts as sentences."""
        return [*self.facts, *refusal_sentences(self.refusal)]


def refusal_sentences(refusal: str) -> list[str]:
    """Return what to say about an id that did not become the Case."""
    if not refusal:
        return []
    return [f"the text names a test that is not the case of this answer: {refusal}"]


def of_dtypes(found: ErrorText, case: Case) -> ErrorAnswer:
    """Return which tensors the kernels of a Case reject with a dtype error, and in which stages."""
    assert found.dtypes is not None
    rejected = [
        (stage, violation.kernel, violation.subject)
        for stage in STAGES
        for violation in _rejections(case.replace(stage=stage), found.dtypes)
    ]
    expected, got = (_TORCH_NAMES.get(name, name) for name in found.dtypes)
    sentences = [f"a kernel expects {expected} and the call has {got}"]
    for kernel in dict.fromkeys(kernel for _, kernel, _ in rejected):
        tensors = ", ".join(dict.fromkeys(t for _, k, t in rejected if k == kernel))
        stages = ", ".join(dict.fromkeys(s for s, k, _ in rejected if k == kernel))
        sentences.append(
            f"{kernel} of {case.op} raises this for {tensors}, in stage {stages} of the test"
        )
    command = None
    if rejected:
        command = _command(found, case, "--stage", rejected[0][0])
    else:
        kernels = ", ".join(decide(case).kernels)
        sentences.append(
            f"no kernel of the case raises it in any stage ({kernels} on {case.platform}): give the test's "
            "own case with --test-id, or --op and --platform"
        )
    facts, stated = tuple(sentences), tuple(rejected)
    return ErrorAnswer(kind="dtype", case=case, facts=facts, rejected=stated, command=command)


def of_allclose(found: ErrorText, case: Case) -> ErrorAnswer:
    """Return how to get an index for a failed ``torch.allclose``."""
    facts = (
        "torch.allclose returns only true or false: the text has no index and no count"
        if found.total is None
        else f"{found.mismatched} of {found.total} elements differ; the text has no index",
        "compare with torch.testing.assert_close in its place, and decode its text; or save the output to a "
        "safetensors file as the tensor 'output', and run attnlab diagnose --output-file",
    )
    command = None if found.test_id is None else _command(found, case)
    return ErrorAnswer(kind="allclose", case=case, facts=facts, command=command)


def of_cache(found: ErrorText, case: Case) -> ErrorAnswer:
    """Return what an index means in the cache that the Case's op writes.

    (block, offset, head, element) is an index of vLLM's key or value cache, (row, head, element) one of
    ``attnlab run``, whose rows are the positions of each sequence, then the slots of no sequence.
    """
    assert found.index is not None
    heads, size, block_size = case.num_kv_heads, case.head_size, case.block_size
    slots = case.total_blocks * block_size
    if len(found.index) not in (3, 4):
        raise InvalidCase(f"text must give an index of 3 or 4 numbers, got {found.index}")
    is_own = len(found.index) == 3
    shape = (slots, heads, 2 * size) if is_own else (case.total_blocks, block_size, heads, size)
    elements = slots * heads * size * (2 if is_own else 1)
    if found.total is not None and found.total != elements:
        sizes = " × ".join(map(str, shape))
        raise InvalidCase(
            f"text must be about a cache of {sizes} = {elements} elements, as in the case, got "
            f"{found.total}; give the test's own case with --test-id, or --num-heads, --num-queries-per-kv, "
            "--head-size, --block-size and --num-blocks"
        )
    if any(n >= length for n, length in zip(found.index, shape, strict=True)):
        raise InvalidCase(f"text must give an index inside {shape}, got {found.index}")
    return _own_row(found.index, case) if is_own else _block_row(found.index, case)


def _own_row(index: tuple[int, ...], case: Case) -> ErrorAnswer:
    """Return the answer for (row, head, element) of ``attnlab run``."""
    row, head, column = index
    which = "value" if column >= case.head_size else "key"
    element = column % case.head_size
    from attnlab.lab.cache_write import slot_lengths

    seq, position = slot_lengths(case).locate(row)
    owned = seq < len(case.lengths.seq_lens)
    where = f"position {position} of sequence {seq}" if owned else "a slot of no sequence"
    column_text = (
        f"block_table[{seq}][{position // case.block_size}], offset {position % case.block_size}"
        if owned
        else "no token may be written there"
    )
    return ErrorAnswer(
        kind="cache",
        case=case,
        facts=(
            f"row {row} of the comparison is {where}: {column_text}",
            f"head {head}, element {element} of the {which}",
            f"{decide(case).kernels[-1]} writes it, through slot_mapping",
        ),
        offset=position % case.block_size if owned else None,
        head=head,
        element=element,
        seq=seq if owned else None,
        position=position if owned else None,
    )


def _block_row(index: tuple[int, ...], case: Case) -> ErrorAnswer:
    """Return the answer for (block, offset, head, element) of a key or value cache."""
    block, offset, head, element = index
    slot = block * case.block_size + offset
    return ErrorAnswer(
        kind="cache",
        case=case,
        facts=(
            f"the index is block {block}, offset {offset}, which is slot {slot}; head {head}, "
            f"element {element}",
            f"{decide(case).kernels[-1]} writes it for the token i with slot_mapping[i] == {slot}; if there "
            "is none, nothing may be written there",
        ),
        slot=slot,
        block=block,
        offset=offset,
        head=head,
        element=element,
    )


def _rejections(case: Case, dtypes: tuple[str, str]) -> "list[Violation]":
    """Return the violations of a Case's call that a kernel rejects because of these dtypes."""
    from attnlab.contracts.violations import find_violations
    from attnlab.tensors.case_call import hollow_call

    found = find_violations(hollow_call(case), Target.of(case), decide(case).kernels)
    got = _TORCH_NAMES.get(dtypes[1], dtypes[1])
    return [v for v in found if v.effect == "rejected" and v.dtype == got]


def _command(found: ErrorText, case: Case, *flags: str) -> str:
    """Return the command that runs the test of the text, or the Case."""
    if found.test_id is not None:
        return shlex.join(["attnlab", "run", "--test-id", found.test_id, *flags])
    return shlex.join([*shlex.split(case.to_cli()), *flags])


_LARGEST_VALUE = {"uniform_1e-3": 1e-3}


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class DecodedError(Document, Shown):
    """The message of a failed assertion, in terms of a Case.

    - ``mismatched``, ``total``, ``max_abs_error``: the numbers of the message, None if it does not have
      them; ``rows_worth`` is None without the first.
    - ``row``, ``head``, ``element``: the index of the greatest difference, or the only one of the text.
    - ``rows_worth``: mismatches divided by the elements of a row: 1.0 is as many as one token has. The text
      does not say which elements they are.
    - ``seq``, ``token``, ``query_len``, ``ctx_len``: the sequence of that row, and the row's token in it.
    - ``kernel``: the kernel that should have written that row.
    - ``newest``: (position, column of the block table, offset in the block) of the newest token that
      the row attends to; None if its kernel does not read it from the cache.
    - ``largest_possible``: the largest difference between two averages of the values; None if the values
      have no bound. Weights that do not sum to 1 give no average.
    - ``platform``: whose rules name the kernel; ``platform_by``: where it is from, as for :func:`decode`.
    - ``refusal``: why a pytest id in the text did not become the Case, or "".
    """

    _more = ("sentences",)

    mismatched: int | None
    total: int | None
    max_abs_error: float | None
    row: int
    head: int
    element: int
    rows_worth: float | None
    seq: int
    token: int
    query_len: int
    ctx_len: int
    kernel: str
    newest: tuple[int, int, int] | None
    largest_possible: float | None
    platform: str
    platform_by: str = "case"
    refusal: str = ""

    def sentences(self) -> list[str]:
        """Return the facts as sentences."""
        which = "its only token" if self.query_len == 1 else f"token {self.token} of its query"
        sentences = [
            platform_text(self.platform, self.platform_by),
            f"row {self.row} is sequence {self.seq}, {which} "
            f"(query_len {self.query_len}, ctx_len {self.ctx_len}); head {self.head}, "
            f"element {self.element}",
        ]
        if self.rows_worth is not None:
            rows = f"as many as {self.rows_worth:g} {'row' if self.rows_worth == 1 else 'rows'}"
            if self.rows_worth < 1:
                rows = "fewer than one row"
            sentences.append(
                f"{self.mismatched} of {self.total} elements are {rows} of all heads; which "
                "rows they are in, the text does not say"
            )
        sentences.append(f"{self.kernel} should have written that row")
        if self.newest is not None:
            position, column, offset = self.newest
            sentences.append(
                f"it reads every key from the cache, the newest at position {position}: "
                f"block_table[{self.seq}][{column}], offset {offset}"
            )
        error, most = self.max_abs_error, self.largest_possible
        if error is not None and most is not None and error > most:
            sentences.append(
                f"if the values are within ±{most / 2:g}, as the case's distribution "
                f"has them, two averages of values differ by at most {most:g}; with "
                f"{error:g}, the row of the output or the expected one is no average: it was "
                "not written, its weights do not sum to 1, or it holds other numbers"
            )
        return sentences + refusal_sentences(self.refusal)


_NO_INDEX = (
    "text must hold an index like (5336, 0, 0), or 'index (5336, 0, 0)' with 'Mismatched elements: … / …' or "
    "'Greatest absolute difference: …', as torch.testing prints them, in any order"
)


def _other_size(total: int, shape: tuple[int, int, int]) -> str:
    """Return that a text is about an output of another size, and which flags to add."""
    tokens, heads, size = shape
    rows, rest = divmod(total, heads * size)
    fits = (
        "" if rest else f"; --query-lens with {rows} tokens in all and as many --ctx-lens would fit"
    )
    return (
        f"text must be about an output of {tokens} × {heads} × {size} = {tokens * heads * size} elements, "
        f"as in the case, got {total}{fits}; give the test's own case with --test-id, or --num-heads, "
        "--head-size, --query-lens and --ctx-lens"
    )


def decode_error(text: str, case: Case) -> DecodedError | ErrorAnswer:
    """Return what the text of a failed test means for the Case.

    Raises InvalidCase as :func:`decode`.
    """
    return decode(ErrorText.read(text), case)


def platform_text(platform: str, platform_by: str) -> str:
    """Return the platform whose rules an answer follows, and where it is from, as for :func:`decode`."""
    name = f"{platform} ({PLATFORMS[platform].example})"
    if platform_by == "assumed":
        return (
            f"platform {name} is assumed: no GPU is seen here, and the text names none; change it "
            "with --platform"
        )
    where = {"case": "of the case", "machine": "of this machine's GPU"}[platform_by]
    return f"platform {name}, {where}"


def decode(
    found: ErrorText, case: Case, *, platform_by: str = "case"
) -> DecodedError | ErrorAnswer:
    """Return the place of an index in the Case's output; without an index, what follows from the text.

    ``platform_by``: where the Case's platform is from: "case" (the user), "machine" (its GPU), or "assumed".
    Raises InvalidCase if the text has nothing to decode, or if its counts or its index are of tensors of
    another size than the Case's.
    """
    if found.index is not None and not case.spec.writes_cache:
        return dataclasses.replace(_place(found, case), platform_by=platform_by)
    if found.index is not None:
        answer = of_cache(found, case)
    elif found.dtypes is not None:
        answer = of_dtypes(found, case)
    elif found.has_allclose:
        answer = of_allclose(found, case)
    else:
        raise InvalidCase(_with_refusal(_NO_INDEX, found))
    facts = (platform_text(case.platform, platform_by), *answer.facts)
    return dataclasses.replace(answer, facts=facts, test_id=found.test_id, refusal=found.refusal)


def _with_refusal(text: str, found: ErrorText) -> str:
    """Return the text of an error, with the reason why an id did not become the Case."""
    return "; ".join([text, *refusal_sentences(found.refusal)])


def _place(found: ErrorText, case: Case) -> DecodedError:
    """Return the place of an index in the Case's output."""
    shape = (case.lengths.num_tokens, case.num_heads, case.head_size)
    mismatched, total, index = found.mismatched, found.total, found.index
    if total is not None and total != shape[0] * shape[1] * shape[2]:
        raise InvalidCase(_with_refusal(_other_size(total, shape), found))
    if index is None or len(index) != 3 or any(n >= m for n, m in zip(index, shape, strict=True)):
        raise InvalidCase(
            _with_refusal(f"text must give an index inside {shape}, got {index}", found)
        )
    row, head, element = index
    seq, token = case.lengths.locate(row)
    query_len, ctx_len = case.lengths.query_lens[seq], case.lengths.ctx_lens[seq]
    decision, source = decide(case), case.spec.new_tokens_from
    from_cache = source == "cache" or (query_len == 1 and decision.decode is not None)
    position = ctx_len + token
    newest = (position, position // case.block_size, position % case.block_size)
    largest = _LARGEST_VALUE.get(case.distribution)
    return DecodedError(
        mismatched=mismatched,
        total=total,
        max_abs_error=found.greatest,
        row=row,
        head=head,
        element=element,
        rows_worth=None if mismatched is None else mismatched / (case.num_heads * case.head_size),
        seq=seq,
        token=token,
        query_len=query_len,
        ctx_len=ctx_len,
        kernel=serving(decision.kernels, query_len)[-1],
        newest=newest if from_cache else None,
        largest_possible=None if largest is None else 2 * largest,
        platform=case.platform,
        refusal=found.refusal,
    )
