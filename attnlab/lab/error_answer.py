"""ErrorAnswer: what follows from the text of a failed test that has no place in an attention output.

These are a dtype error, a failed ``torch.allclose``, and an index in a cache that was written.
"""

import dataclasses
import shlex
from dataclasses import dataclass
from typing import Any

from attnlab.case.case import Case
from attnlab.case.errors import InvalidCase
from attnlab.case.json import json_value
from attnlab.case.shown import Shown
from attnlab.case.stages import STAGES
from attnlab.contracts.dispatch import decide
from attnlab.contracts.target import Target
from attnlab.contracts.violation import Violation
from attnlab.contracts.violations import find_violations
from attnlab.lab.cache_write import slot_lengths
from attnlab.lab.error_text import ErrorText
from attnlab.tensors.hollow_call import hollow_call

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
class ErrorAnswer(Shown):
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

    def to_dict(self) -> dict[str, Any]:
        """Return the fields and the sentences as values of strict JSON."""
        fields: dict[str, Any] = json_value(dataclasses.asdict(self))
        return {**fields, "sentences": self.sentences()}


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
    return ErrorAnswer(
        kind="dtype",
        case=case,
        facts=tuple(sentences),
        rejected=tuple(rejected),
        test_id=found.test_id,
        command=command,
        refusal=found.refusal,
    )


def of_allclose(found: ErrorText, case: Case) -> ErrorAnswer:
    """Return how to get an index for a failed ``torch.allclose``."""
    sentences = [
        "torch.allclose returns only true or false: the text has no index and no count",
        "compare with torch.testing.assert_close in its place, and decode its text; or save the output to a "
        "safetensors file as the tensor 'output', and run attnlab diagnose --output-file",
    ]
    command = None
    if found.test_id is not None:
        command = _command(found, case)
    return ErrorAnswer(
        kind="allclose",
        case=case,
        facts=tuple(sentences),
        test_id=found.test_id,
        command=command,
        refusal=found.refusal,
    )


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
    place = _own_row(found.index, case) if is_own else _block_row(found.index, case)
    return dataclasses.replace(place, test_id=found.test_id, refusal=found.refusal)


def _own_row(index: tuple[int, ...], case: Case) -> ErrorAnswer:
    """Return the answer for (row, head, element) of ``attnlab run``."""
    row, head, column = index
    which = "value" if column >= case.head_size else "key"
    element = column % case.head_size
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


def _rejections(case: Case, dtypes: tuple[str, str]) -> list[Violation]:
    """Return the violations of a Case's call that a kernel rejects because of these dtypes."""
    found = find_violations(hollow_call(case), Target.of(case), decide(case).kernels)
    got = _TORCH_NAMES.get(dtypes[1], dtypes[1])
    return [v for v in found if v.effect == "rejected" and v.dtype == got]


def _command(found: ErrorText, case: Case, *flags: str) -> str:
    """Return the command that runs the test of the text, or the Case."""
    if found.test_id is not None:
        return shlex.join(["attnlab", "run", "--test-id", found.test_id, *flags])
    return shlex.join([*shlex.split(case.to_cli()), *flags])
