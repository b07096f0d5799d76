"""Confirm edits of a kernel in further cases, so that an edit that repairs one call by chance is no claim."""

import ast
import dataclasses
import linecache
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch

from attnlab.case.case import Case
from attnlab.case.errors import AttnLabError, InvalidCase
from attnlab.case.masks import DATA_OF_LENGTHS
from attnlab.contracts.dispatch import decide
from attnlab.diagnosis.diagnosis import Diagnosis
from attnlab.diagnosis.kernel_location import KernelLocation
from attnlab.diagnosis.kernel_trials import Repair
from attnlab.diagnosis.repair_claim import RepairClaim
from attnlab.diagnosis.second_case import further_cases
from attnlab.kernels.control import rows_equal
from attnlab.kernels.triton.limits import Budget, TooLong
from attnlab.kernels.triton.probe import Probe, probing
from attnlab.lab.lab import Lab

_MOST_EDITS = 6  # that are compared with each other
_MOST_S = 40.0  # processor time; edits that are not confirmed by then are no claim
_MOST_OTHERS_S = 6.0  # for others, which the claim mentions
_VARIED_LENGTHS: tuple[tuple[int, int], ...] = (
    (3, 37),
    (1, 66),
    (18, 0),
    (1, 20),
)  # (query_len, ctx_len)
_FP8 = {"kv_cache_dtype": "fp8", "k_scale": 0.37, "v_scale": 0.59}
_NO_FP8 = {"kv_cache_dtype": "auto", "k_scale": 1.0, "v_scale": 1.0}
# What an edit could hide behind; changes that an op does not know, or that change nothing, are left out.
_VARIATIONS: tuple[dict[str, Any], ...] = (
    {"num_heads": 6, "num_queries_per_kv": 2},
    {"num_heads": 3, "num_queries_per_kv": 1},
    {"num_heads": 6, "num_queries_per_kv": 6},
    {"sliding_window": 5},
    {"sliding_window": 0},
    {"softcap": 2.0},
    {"softcap": None},
    {"alibi": True},
    {"alibi": False},
    {"sinks": True},
    {"sinks": False},
    _FP8,
    _NO_FP8,
    {"dtype": "float32"},
    {"dtype": "float16"},
    {"block_size": 32},
    {"block_size": 8},
    {"head_size": 80},
    {"head_size": 32},
    {"sm_scale": 4.0},
    {"num_splits": 4},
    {"num_splits": 0},
    {"kv_layout": "fused"},  # other strides of keys than of values
    {"kv_layout": "HND"},
)
# Of a run with an edit; a case that takes longer without it is not used (attnlab.diagnosis.kernel_lines).
_MOST_OPERATIONS, _MOST_RUN_S = 2_000_000, 10.0


def is_right(lab: Lab, case: Case, repair: Repair | None = None) -> bool | None:
    """Answer whether a Case's output and side outputs are right up to rounding, with an edit.

    None if the kernel raises; False for an edit with which it takes too long.
    """
    ran = _run(lab, case, repair)
    return None if ran is None else ran[0]


def _run(lab: Lab, case: Case, repair: Repair | None) -> tuple[bool, torch.Tensor] | None:
    """Return whether a Case is right with an edit, and its output, which is empty if it takes too long.

    None if the kernel raises.
    """
    probe = Probe()
    if repair is not None:
        limit = Budget(operations=_MOST_OPERATIONS, seconds=_MOST_RUN_S)
        probe = Probe(texts=repair.texts(), budget=limit)
    try:
        with probing(probe):
            ran = lab.run(case.replace(atol=None, rtol=0.0))
    except TooLong:
        return False, torch.empty(0)
    except AttnLabError:
        return None
    if ran.status == "rejected":
        return None
    return ran.status == "match", ran.output.clone()  # it may be a view of a large buffer


def with_contents(case: Case, slots: str) -> Case:
    """Return a Case with these contents of empty slots, and with an output buffer that can be recognised.

    An op argument may ask for a buffer of its own, which stays.
    """
    known = case.replace(empty_slots=slots)
    try:
        return known.replace(output_init="recycled")
    except InvalidCase:
        return known


def varied_cases(case: Case) -> Iterator[Case]:
    """Yield small cases that differ from a Case in one feature or size each, as far as its op allows it.

    An edit may be right only because a feature is off or a size is what it is: a factor that is 1, a branch
    that is not taken, an index that is 0 with two KV heads.
    """
    if case.block_table is not None or case.seq_range is not None:
        return
    pairs = _VARIED_LENGTHS
    if max(case.lengths.query_lens, default=0) == 1:
        pairs = tuple((1, query + ctx - 1) for query, ctx in pairs)
    if not case.spec.context:
        pairs = tuple((query + ctx, 0) for query, ctx in pairs)
    sizes = ("num_blocks", "max_blocks_per_seq", "max_query_len", "max_seq_len", "kv_head_range")
    small = {
        **dict.fromkeys((*sizes, *DATA_OF_LENGTHS)),
        "query_lens": tuple(query for query, _ in pairs),
        "ctx_lens": tuple(ctx for _, ctx in pairs),
        "first_block": 0,
        "freed": "kept",
    }
    own, done = set(decide(case).kernels), {case}
    for seed, changes in enumerate(_VARIATIONS, 71):
        with suppress(InvalidCase):
            changed = case.replace(**{**small, "seed": case.seed + seed, **changes})
            plain = changed.replace(seed=case.seed)
            if plain not in done and set(decide(changed).kernels) == own:
                done.add(plain)
                yield changed


def find_claim(lab: Lab, case: Case, repairs: Sequence[Repair]) -> RepairClaim | None:
    """Return the claim of the first edit that holds in a Case and in all of its further cases, or None.

    ``repairs``: edits that make a smaller run of the Case right, the best first. Those of the test of a
    branch come last: they may only leave out the branch that has the fault.
    """
    end, others = time.process_time() + _MOST_S, list[Repair]()
    further = sorted(further_cases(case), key=lambda one: one.lengths.num_tokens)
    proofs = [_Proof(lab=lab, case=one) for one in (case, *further)]
    varied = [_Proof(lab=lab, case=one) for one in varied_cases(case)]
    claim: RepairClaim | None = None
    for repair in sorted(repairs[:_MOST_EDITS], key=lambda one: one.is_in_test):
        if time.process_time() > end:
            break
        found = _claim_of(proofs, varied, repair, end)
        if found is None:
            continue
        if claim is None or (found.is_stated and not claim.is_stated):
            claim = found
            end = min(end, time.process_time() + _MOST_OTHERS_S)
        elif found.is_stated and found.only_finite == claim.only_finite:
            others.append(repair)
    if claim is None:
        return None
    return dataclasses.replace(claim, others=tuple(others) if claim.is_stated else ())


def _claim_of(
    proofs: Sequence["_Proof"], varied: Sequence["_Proof"], repair: Repair, end: float
) -> RepairClaim | None:
    """Return the claim of an edit, or None if it is refuted, if no further case is wrong without it, or if
    the processor time is over."""
    cases, leaks = 0, False
    for at, proof in enumerate(proofs):
        if time.process_time() > end or not proof.accepts(repair):
            return None
        cases += at > 0 and proof.is_decisive(repair)
        leaks = leaks or proof.leaks(repair)
    if not cases or (leaks and not proofs[0].is_about_numbers):
        return None
    for proof in varied:
        if time.process_time() > end or proof.refutes(repair):
            return None
        cases += proof.is_repaired(repair)
    is_constant = _is_constant(repair, [*proofs, *varied])
    if is_constant and repair.is_in_test:
        return None  # it switches a branch on or off, in which the fault may be
    return RepairClaim(
        repair=repair,
        source=linecache.getline(*repair.line).strip(),
        cases=cases,
        only_finite=leaks,
        is_stated=not is_constant,
    )


def _is_constant(repair: Repair, proofs: Sequence["_Proof"]) -> bool:
    """Answer whether what an edit adds has one value in all launches, so that they show nothing of it.

    That is a new name of an argument with one value, or an expression of arguments alone with one value.
    """
    before, after = (_names(text) for text in (repair.edit.before, repair.edit.after))
    if not after:
        return False
    launches = [values for proof in proofs for values in proof.arguments]
    for name in after - before:
        if len({values[name] for values in launches if name in values}) == 1:
            return True
    results = set[Any]()
    for values in launches:
        if not after <= values.keys():
            continue
        try:
            results.add(eval(repair.edit.after, {"__builtins__": {}}, dict(values)))
        except Exception:  # an expression of tensors, or a statement
            return False
    return len(results) == 1


def _names(text: str) -> set[str]:
    """Return the names in an expression or a statement, without those of modules."""
    nodes = list(ast.walk(ast.parse(text.strip())))
    modules = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
    return {node.id for node in nodes if isinstance(node, ast.Name) and id(node) not in modules}


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class _Proof:
    """A case in which edits must hold, with finite numbers and with NaN in slots without a token.

    ``runs``: what :func:`_run` returned, by the contents of the slots and the edit.
    """

    lab: Lab
    case: Case
    runs: dict[tuple[str, int | None], tuple[bool, torch.Tensor] | None] = dataclasses.field(
        default_factory=dict
    )
    _arguments: list[dict[str, Any]] | None = None

    def _result(self, slots: str, repair: Repair | None) -> tuple[bool, torch.Tensor] | None:
        key = (slots, None if repair is None else id(repair))
        if key not in self.runs:
            self.runs[key] = _run(self.lab, with_contents(self.case, slots), repair)
        return self.runs[key]

    def _is_right(self, slots: str, repair: Repair | None) -> bool | None:
        ran = self._result(slots, repair)
        return None if ran is None else ran[0]

    @property
    def arguments(self) -> list[dict[str, Any]]:
        """Return the numbers among the arguments of each launch of the unchanged kernels, by name."""
        if self._arguments is None:
            self._arguments = []
            with suppress(AttnLabError), probing(Probe(records=True)) as probe:
                self.lab.run(with_contents(self.case, "garbage"))
            for launch in probe.launches:
                values = {
                    name: getattr(one, "value", one) for name, one in launch.arguments.items()
                }
                self._arguments.append(
                    {n: one for n, one in values.items() if isinstance(one, int | float | bool)}
                )
        return self._arguments

    @property
    def is_about_numbers(self) -> bool:
        """Answer whether the output is wrong with finite numbers in slots without a token, too."""
        return self._is_right("garbage", None) is False

    def accepts(self, repair: Repair) -> bool:
        """Answer whether the outputs are right with an edit, or the kernel raises with and without it.

        With NaN, outputs may stay wrong if they are so without the edit: that is another fault.
        """
        right = self._is_right("garbage", repair)
        if not right:
            return right is None and self._is_right("garbage", None) is None
        return self._is_right("nan", repair) is True or self._is_right("nan", None) is not True

    def refutes(self, repair: Repair) -> bool:
        """Answer whether an output is wrong with an edit, unless it has the same bits without it.

        Such an output is wrong for another reason, for example a feature that the kernel ignores.
        """
        edited, plain = (self._result("garbage", one) for one in (repair, None))
        if edited is None:
            return plain is not None
        if edited[0] or plain is None or edited[1].shape != plain[1].shape:
            return not edited[0]
        return not bool(rows_equal(edited[1], plain[1]).all())

    def is_repaired(self, repair: Repair) -> bool:
        """Answer whether the output is wrong without an edit and right with it, with finite numbers."""
        return self._is_right("garbage", repair) is True and self.is_about_numbers

    def is_decisive(self, repair: Repair) -> bool:
        """Answer whether the kernel is wrong without an edit that makes it right."""
        return any(
            self._is_right(slots, repair) and not self._is_right(slots, None)
            for slots in ("garbage", "nan")
        )

    def leaks(self, repair: Repair) -> bool:
        """Answer whether NaN makes an output wrong that is right with finite numbers."""
        return bool(self._is_right("garbage", repair)) and not self._is_right("nan", repair)


def with_repair(lab: Lab, case: Case, diagnosis: Diagnosis, repairs: Sequence[Repair]) -> Diagnosis:
    """Return the diagnosis with the edit that repairs the kernel, if further cases confirm one.

    Names, rules, weights and leaks say what is wrong, and stay first. A weaker description of the output
    becomes an observation about this call.
    """
    claim = find_claim(lab, case, repairs) if repairs else None
    if claim is None:
        return diagnosis
    diagnosis = dataclasses.replace(diagnosis, repair=claim, location=_first(diagnosis, claim))
    if not diagnosis.is_by_repair:
        return diagnosis
    return dataclasses.replace(
        diagnosis,
        status="described",
        observed=() if diagnosis.accesses is None else diagnosis.accesses.facts,
        accesses=None,
        claim=None,
        bad_lines=(),
    )


def with_confirmation(lab: Lab, case: Case, place: KernelLocation) -> KernelLocation:
    """Return a location with the edit that further cases confirm, if there is one."""
    if not place.repairs:
        return place
    return dataclasses.replace(place, confirmed=find_claim(lab, case, place.repairs))


def _first(diagnosis: Diagnosis, claim: RepairClaim) -> KernelLocation | None:
    """Return the location with the line of the claim first."""
    place = diagnosis.location
    if place is None:
        return None
    lines = sorted(place.lines, key=lambda one: (one.file, one.line) != claim.repair.line)
    return dataclasses.replace(place, lines=tuple(lines))
