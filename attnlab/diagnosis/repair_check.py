"""Confirm edits of a kernel in further cases, so that an edit that repairs one call by chance is no claim."""

import ast
import dataclasses
import linecache
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice, zip_longest
from typing import Any

import numpy as np
import torch

from attnlab.case.case import Case
from attnlab.case.errors import AttnLabError
from attnlab.case.masks import DATA_OF_LENGTHS
from attnlab.contracts.dispatch import decide
from attnlab.diagnosis.claims import KernelLocation, RepairClaim
from attnlab.diagnosis.diagnosis import Diagnosis
from attnlab.diagnosis.reruns import further_cases, nearby_cases
from attnlab.diagnosis.trials import Repair
from attnlab.kernels.child_process import in_copies, run_in_copy
from attnlab.kernels.control import rows_equal, uncontrolled
from attnlab.kernels.triton.interpreter import cores
from attnlab.kernels.triton.kernel_text import row_starts
from attnlab.kernels.triton.launch_plan import recording_launches
from attnlab.kernels.triton.lockstep.control import live
from attnlab.kernels.triton.probe import Probe, probing
from attnlab.kernels.triton.run_log import Budget, TooLong, other_outside
from attnlab.kernels.triton.source_edits import expression_of, span_of
from attnlab.lab.lab import Lab
from attnlab.weights.conclude import if_allowed

_MOST_EDITS = 6  # that are compared with each other
_MOST_S = 40.0  # processor time; edits that are not confirmed by then are no claim
_MOST_OTHERS_S = 6.0  # for others, which the claim mentions
# Further cases that an edit must make right: of edits with fewer than 7, 4 of 15 were wrong.
_FEWEST = 10
_MOST_CASES = 100  # about as many as there can be
_PROOFS_AT_ONCE = 16  # that are shared by all cores
_MOST_MORE = 40  # cases like those that show the fault, which run if the others are too few
_MOST_STATED_S = 15.0  # for an edit that can be stated, after one that confirms its line alone
# (query_len, ctx_len). In the third, rows from 36 on have a window of 5 that begins after a tile of 16 or 32,
# which other rows of their block read: a tile in which some rows see no key.
_VARIED_LENGTHS: tuple[tuple[int, int], ...] = ((3, 37), (1, 66), (41, 0), (1, 20))
# Of the longest sequence of a Case, which varied cases have, too: more than a tile of any kernel. Of an op
# without context every varied case has one, in which some rows see no key of the first tile.
_MOST_NEW, _MOST_CONTEXT = 140, 300
_FP8 = {"kv_cache_dtype": "fp8", "k_scale": 0.37, "v_scale": 0.59}
_NO_FP8 = {"kv_cache_dtype": "auto", "k_scale": 1.0, "v_scale": 1.0}
# What an edit could hide behind; changes that an op does not know, or that change nothing, are left out.
_VARIATIONS: tuple[dict[str, Any], ...] = (
    {"num_heads": 6, "num_queries_per_kv": 2},
    {"num_heads": 3, "num_queries_per_kv": 1},
    {"num_heads": 6, "num_queries_per_kv": 6},
    {"num_heads": 20, "num_queries_per_kv": 2},  # more query heads than rows of the smallest tile
    {"sliding_window": 5},
    {"sliding_window": 0},
    {"sliding_window": 5, "mask": "causal"},  # a window to the left alone
    {"sliding_window": 5, "mask": "bidirectional"},
    {"sliding_window": 5, "freed": "empty"},
    {"softcap": 3.1},
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
    {"num_splits": 2},
    {"num_splits": 8},
    {"num_splits": 3},
    {"num_splits": 0},
    {"kv_layout": "fused"},  # other strides of keys than of values
    {"kv_layout": "HND"},
    {"op_argument": "gaps"},  # other strides of new values than of new keys
)
# One score of a row is above the others by 307, so that exp of their difference overflows.
_LARGE_SCORES = {"distribution": "dominant_key", "sm_scale": 0.3, "softcap": None}
_OBSERVER = "_attnlab_condition"
# Of a claim, to this process.
_SENT = ("source", "cases", "only_finite", "is_stated", "untouched", "argument")
_GRACE_S = 15.0  # that the search may take longer than its limit: one run
# Of a run with an edit, which may never end; a case that takes longer without it is not used
# (attnlab.diagnosis.lines). Its processor time is at most that of the run without it times a slack.
_MOST_OPERATIONS, _MOST_RUN_S, _LEAST_RUN_S, _SLACK = 2_000_000, 10.0, 1.0, 10.0


def is_right(lab: Lab, case: Case, repair: Repair | None = None) -> bool | None:
    """Answer whether a Case's output and side outputs are right up to rounding, with an edit.

    None if the kernel raises; False for an edit with which it takes too long.
    """
    ran = _run(lab, case, probe_of(repair, set(), _MOST_RUN_S))
    return None if ran is None else ran[0]


def _run(lab: Lab, case: Case, probe: Probe) -> tuple[bool, torch.Tensor] | None:
    """Return whether a Case is right with the edit of a probe, and its output, which is empty if it takes too
    long; None if the kernel raises."""
    try:
        with probing(probe):
            ran = lab.run(case.replace(atol=None, rtol=0.0))
    except TooLong:
        return False, torch.empty(0)
    except AttnLabError:
        return None
    if ran.status == "rejected":
        return None
    # It may be a view of a large buffer; and FP8 cannot be sent to another process.
    output = ran.output.float() if ran.output.element_size() == 1 else ran.output.clone()
    return ran.status == "match", output


def probe_of(repair: Repair | None, condition: set[bool], seconds: float) -> Probe:
    """Return the probe that runs an edit for at most some seconds of processor time; ``condition`` gets the
    values of its condition."""
    if repair is None:
        return Probe()
    limit = Budget(operations=_MOST_OPERATIONS, seconds=seconds)
    names = {_OBSERVER: lambda value: _observed(value, condition)}
    return Probe(texts=repair.texts(_OBSERVER), names=names, budget=limit)


def _observed(value: Any, found: set[bool]) -> Any:
    """Return a value of a kernel; add True or False to ``found`` if it is, or an element is, of type bool."""
    handle = getattr(value, "handle", None)
    plain = getattr(value, "value", value) if handle is None else live(handle.data)
    if isinstance(plain, bool | np.bool_):
        found.add(bool(plain))
    elif isinstance(plain, np.ndarray) and plain.dtype == np.bool_ and len(found) < 2:
        found |= set(np.unique(plain).tolist())
    return value


def with_contents(case: Case, slots: str) -> Case:
    """Return a Case with these contents of empty slots, and with an output buffer that can be recognised.

    An op argument may ask for a buffer of its own, which stays.
    """
    known = case.replace(empty_slots=slots)
    return if_allowed(known, output_init="recycled") or known


def varied_cases(case: Case) -> Iterator[Case]:
    """Yield small cases that differ from a Case in one feature or size each, as far as its op allows it.

    An edit may be right only because a feature is off or a size is what it is: a factor that is 1, a branch
    that is not taken, an index that is 0 with two KV heads.
    """
    return _changed_cases(case, _VARIATIONS)


def large_score_cases(case: Case) -> Iterator[Case]:
    """Yield small cases with large scores, in which a running maximum is needed."""
    return _changed_cases(case, (_LARGE_SCORES,))


def similar_cases(case: Case) -> Iterator[Case]:
    """Yield cases that differ from a Case in its lengths, then cases that differ in one feature or size."""
    yield from nearby_cases(case)
    yield from further_cases(case)
    lengths = {"query_lens": case.lengths.query_lens, "ctx_lens": case.lengths.ctx_lens}
    yield from _changed_cases(case, [{**lengths, **one} for one in _VARIATIONS])


def _changed_cases(case: Case, variations: Iterable[dict[str, Any]]) -> Iterator[Case]:
    """Yield small cases with some changes each, except those that other kernels run."""
    if case.block_table is not None or case.seq_range is not None:
        return
    lengths = zip(case.lengths.query_lens, case.lengths.ctx_lens, strict=True)
    query, ctx = max(lengths, key=sum, default=(0, 0))
    pairs = _VARIED_LENGTHS
    if query + ctx > max(map(sum, pairs)):  # short sequences may not show the fault
        pairs = (*pairs, (min(query, _MOST_NEW), min(ctx, _MOST_CONTEXT)))
    if max(case.lengths.query_lens, default=0) == 1:
        pairs = tuple((1, query + ctx - 1) for query, ctx in pairs)
    if not case.spec.context:
        pairs = (*((query + ctx, 0) for query, ctx in pairs), (_MOST_NEW, 0))
    sizes = ("num_blocks", "max_blocks_per_seq", "max_query_len", "max_seq_len", "kv_head_range")
    small = {
        **dict.fromkeys((*sizes, *DATA_OF_LENGTHS)),
        "query_lens": tuple(query for query, _ in pairs),
        "ctx_lens": tuple(ctx for _, ctx in pairs),
        "first_block": 0,
        "freed": "kept",
    }
    own, done = set(decide(case).kernels), {case}
    for seed, changes in enumerate(variations, 71):
        changed = if_allowed(case, **{**small, "seed": case.seed + seed, **changes})
        if changed and set(decide(changed).kernels) == own:
            plain = changed.replace(seed=case.seed)
            if plain not in done:
                yield changed
            done.add(plain)


def find_claim(lab: Lab, case: Case, repairs: Sequence[Repair]) -> RepairClaim | None:
    """Return the claim of the first edit that holds in a Case and in all of its further cases, or None."""
    claim = claim_among(partial(_proofs_of, lab, case), repairs)
    if claim is None or not case.spec.writes_cache:
        return claim
    return dataclasses.replace(claim, subject="the cache is")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Proofs:
    """Cases that edits must pass.

    ``own``: the case that showed the fault, then further ones like it. ``varied``: small ones that differ in
    one feature or size each. ``large``: with large scores.
    """

    own: Sequence["Proof"]
    varied: Sequence["Proof"] = ()
    large: Sequence["Proof"] = ()


def _proofs_of(lab: Lab, case: Case) -> Proofs:
    lab.shared.keep = max(lab.shared.keep, _MOST_CASES)  # every edit runs the cases again
    further = sorted(further_cases(case), key=lambda one: one.lengths.num_tokens)
    own, varied, large = (
        [_CaseProof(lab=lab, case=one) for one in cases]
        for cases in ((case, *further), varied_cases(case), large_score_cases(case))
    )
    return Proofs(own=own, varied=varied, large=large)


def claim_among(find: Callable[[], Proofs], repairs: Sequence[Repair]) -> RepairClaim | None:
    """Return the claim of the first edit that holds in all cases, or None.

    ``find`` returns the cases. ``repairs``: edits that make a smaller run of the first case right, the best
    first. Those of the test of a branch come last: they may only leave out the branch that has the fault.

    The edited kernels run in a copy of this process. An edit that ends the copy is left out.
    """
    left = sorted(repairs[:_MOST_EDITS], key=lambda one: one.is_in_test)
    while left:
        claim, ended_at = _searched(find, left)
        if claim is not None or ended_at is None:
            return claim
        del left[ended_at]
    return None


def _searched(
    find: Callable[[], Proofs], repairs: Sequence[Repair]
) -> tuple[RepairClaim | None, int | None]:
    """Return the best claim, and the index of the edit that ended the copy of this process, or None."""
    found, at = list[RepairClaim](), 0

    def search(send: Callable[[Any], object]) -> None:
        proofs, end = find(), time.process_time() + _MOST_S
        for number, claim in _Search(proofs=proofs, end=end).claims(repairs):
            others = () if claim is None else [repairs.index(one) for one in claim.others]
            fields = claim and {name: getattr(claim, name) for name in _SENT}
            send((number, fields, claim and claim.repair.edit, others))

    def receive(thing: Any) -> None:
        nonlocal at
        at, fields, edit, others = thing
        if fields is not None:
            named, repair = tuple(repairs[i] for i in others), repairs[at].having(edit)
            found.append(RepairClaim(**fields, repair=repair, others=named))

    ended = run_in_copy(search, receive, _MOST_S + _GRACE_S)
    return (found[-1] if found else None), (at if ended else None)


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class _Search:
    """The search for an edit that holds in all cases.

    ``end``: processor time at which it ends. ``loose``: expressions, each with its line, that any larger
    value may replace. ``more``: proofs by further cases that edits needed.
    """

    proofs: Proofs
    end: float
    loose: set[Any] = dataclasses.field(default_factory=set)
    longer: tuple[int, RepairClaim] | None = None
    more: dict[Any, "Proof"] = dataclasses.field(default_factory=dict)

    def _is_over(self) -> bool:
        return time.process_time() > self.end

    def claims(self, repairs: Sequence[Repair]) -> Iterator[tuple[int, RepairClaim | None]]:
        """Yield the index of each edit before it is tried, then that of the best claim so far with it."""
        others, claim, of_claim = list[Repair](), None, 0
        for number, repair in enumerate(repairs):
            if self._is_over():
                break
            yield number, None
            if claim is not None and not self._can_add(claim, others, repair):
                continue
            found = self._shown(number, repair)
            if self._is_over():
                break  # perhaps before all that could refute it
            if found is None:
                continue
            if claim is None or _is_better(found, claim):
                claim, others, of_claim = self._with_argument(found), [], number
                is_best = found.is_stated and not found.untouched
                left_s = _MOST_OTHERS_S if is_best else _MOST_STATED_S
                self.end = min(self.end, time.process_time() + left_s)
            elif found.is_stated and found.only_finite == claim.only_finite:
                others += [] if _is_better(claim, found) else [repair]
            named = tuple(others) if claim.is_stated else ()
            yield of_claim, dataclasses.replace(claim, others=named)
        if claim is None and self.longer is not None:
            yield self.longer

    def _with_argument(self, claim: RepairClaim) -> RepairClaim:
        """Return the claim with the argument that makes all cases right with another value, if any does."""
        name, repair = claim.repair.of_argument() or ("", None)
        is_so = repair is not None and self._claim(repair) is not None
        return dataclasses.replace(claim, argument=name if is_so else "")

    def _can_add(self, claim: RepairClaim, others: Sequence[Repair], repair: Repair) -> bool:
        """Answer whether an edit may give a better claim, or one of a line that the claim and others lack.

        Of the cases that the edit of the claim leaves wrong, it runs until one shows that it does not.
        """
        own = self.proofs.own
        left = [proof for proof in own if proof.is_untouched(claim.repair)]
        if left and not any(proof.is_untouched(repair) for proof in left):
            return True
        if _is_constant(repair, [*own, *self.proofs.varied]):
            return False  # it cannot be stated
        lines = {one.line for one in (claim.repair, *others)}
        return not claim.is_stated or repair.line not in lines

    def _shown(self, number: int, repair: Repair) -> RepairClaim | None:
        """Return the claim of an edit, or None if another edit shows that the cases do not show this one.

        If what is added only has to be large enough, it may hide a fault elsewhere: a longer loop hides a
        wrong end, whatever made it wrong, and is the claim if there is no other. So may a branch that runs
        where it should not, which an edit shows that leaves out the assignment in the branch. If one
        alternative of a choice can be left out, that is the claim: an edit of the test may be right for this
        reason alone, and the fault in that alternative.
        """
        edit, place = repair.edit, (repair.line, repair.edit.before)
        wider, plain = edit.widened(repair.text), edit.assigned(repair.text)
        if wider is not None and place in self.loose:
            return None
        if repair.is_in_maximum and any(one.refutes(repair) for one in self.proofs.large):
            return None
        found = self._claim(repair)
        if found is None or (repair.is_in_maximum and not self._has_large_scores(found)):
            return None
        if wider is not None and self._claim(repair.having(wider)):
            self.loose.add(place)
            longer = map(self._claim, repair.longer_loops() if self.longer is None else ())
            if (claim := next(filter(None, longer), None)) is not None:
                self.longer = number, dataclasses.replace(claim, is_stated=True)
            return None
        if plain is not None and self._claim(repair.having(plain)):
            return None
        for switch in repair.switches():
            left_out = self._claim(switch)
            if left_out is not None and left_out.untouched <= found.untouched:
                return left_out
        if found.is_stated and any(map(self._claim, _neighbours(repair))):
            return dataclasses.replace(found, is_stated=False)
        return found

    def _claim(self, repair: Repair) -> RepairClaim | None:
        """Return the claim of an edit, or None if it is refuted, if too few further cases are wrong without
        it, or if the time is over."""
        own, varied = self.proofs.own, self.proofs.varied
        every = [*own, *varied]
        if not own[0].accepts(repair):
            return None
        if repair.is_in_test and _is_constant(repair, every):
            return None  # it switches a branch on or off, in which the fault may be
        if not self._holds(repair):
            return None
        leaking = [proof for proof in own if proof.leaks(repair)]
        if leaking and not own[0].is_about_numbers:
            return None
        if not all(proof.has_leak for proof in leaking):
            return None  # the edit removes a mask, which may hide the fault
        cases = self._repaired_cases(repair)
        if cases < _FEWEST:
            return None
        is_constant = _has_one_condition(repair, every)
        if repair.is_in_test and (is_constant or _leaves_a_branch(repair, own[0], varied)):
            return None  # as above
        return RepairClaim(
            repair=repair,
            source=linecache.getline(*repair.line).strip(),
            cases=cases,
            only_finite=bool(leaking),
            is_stated=not (is_constant or _is_constant(repair, every)),
            untouched=sum(proof.is_untouched(repair) for proof in own),
        )

    def _has_large_scores(self, claim: RepairClaim) -> bool:
        """Answer whether cases with large scores support the claim of an edit of a maximum.

        A softmax is right with any maximum, as long as no exponential overflows, and a maximum with a finite
        floor hides what any later line makes of -inf. So such an edit that cannot be stated is no sign of its
        line, either.
        """
        return claim.is_stated and any(one.accepts(claim.repair) for one in self.proofs.large)

    def _holds(self, repair: Repair) -> bool:
        """Answer whether an edit repairs each further case, or changes nothing in it, in time."""
        further = self.proofs.own[1:]
        return all(
            not self._is_over() and proof.allows(repair)
            for proof in _asked(further, lambda one: one.allows(repair) and one.is_decisive(repair))
        )

    def _repaired_cases(self, repair: Repair) -> int:
        """Return how many further cases an edit repairs; 0 if one refutes it, or if the time is over."""
        first, *further = self.proofs.own
        varied = self.proofs.varied
        cases = sum(proof.is_decisive(repair) for proof in further)
        for proof in _asked(
            varied if cases else (), lambda one: one.refutes(repair) or one.is_about_numbers
        ):
            if self._is_over() or _is_refuted(repair, proof, first):
                return 0
            cases += proof.is_repaired(repair)
        if not cases or cases >= _FEWEST:
            return cases
        shown = [one for one in (first, *further, *varied) if one.is_decisive(repair)]
        for proof in _asked(
            islice(_more(shown, self.more), _MOST_MORE),
            lambda one: one.refutes(repair) or one.is_decisive(repair),
        ):
            if self._is_over() or proof.refutes(repair):
                return 0
            cases += proof.is_decisive(repair)
            if cases >= _FEWEST:
                break
        return cases


def _is_better(one: RepairClaim, other: RepairClaim) -> bool:
    """Answer whether an edit repairs more cases than another, or can be stated and the other cannot."""
    if bool(one.untouched) != bool(other.untouched):
        return not one.untouched
    return one.is_stated and not other.is_stated


def _more(shown: Sequence["Proof"], known: dict[Any, "Proof"]) -> Iterator["Proof"]:
    """Yield proofs by cases like those that show a fault, of each of these in turn; ``known`` is extended."""
    done = {proof.case for proof in shown}
    for proofs in zip_longest(*(proof.similar() for proof in shown)):
        for proof in proofs:
            if proof is not None and proof.case not in done:
                done.add(proof.case)
                yield known.setdefault(proof.case, proof)


def _asked(proofs: Iterable["Proof"], ask: Callable[["Proof"], object]) -> Iterator["Proof"]:
    """Yield proofs after the runs that ``ask`` needs, for which some proofs at a time use all cores."""

    def asked(proof: Proof) -> tuple[dict[Any, Any], dict[Any, set[bool]], float]:
        """Return the runs that a proof needs in addition, its conditions, and its seconds."""
        known = set(proof.runs)
        ask(proof)
        more = {key: ran for key, ran in proof.runs.items() if key not in known}
        return more, proof.conditions, proof.seconds

    left = iter(proofs)
    while some := list(islice(left, _PROOFS_AT_ONCE)):
        runs = in_copies(asked, some, cores())
        for proof, (more, conditions, seconds) in zip(some, runs, strict=True):
            proof.runs |= more
            proof.conditions |= conditions
            proof.seconds = seconds
            yield proof


def _leaves_a_branch(repair: Repair, first: "Proof", varied: Sequence["Proof"]) -> bool:
    """Answer whether an edit of a test changes nothing in a wrong case that takes another branch.

    A case with another mask is not asked: a kernel may ignore that.
    """
    return any(
        proof.mask == first.mask
        and proof.is_untouched(repair)
        and proof.conditions.get(repair.key) != first.conditions.get(repair.key)
        for proof in varied
    )


def _is_refuted(repair: Repair, proof: "Proof", first: "Proof") -> bool:
    """Answer whether a case refutes an edit for the first case.

    With another mask than that, a case that is wrong without the edit, too, does not: a kernel may have a
    fault of its own with a mask.
    """
    is_other = proof.mask != first.mask and proof.is_about_numbers
    return not is_other and proof.refutes(repair)


def _neighbours(repair: Repair) -> Iterator[Repair]:
    """Yield simpler edits of the same place: of an operation or a call one operand, of a number the next
    ones.

    If one of them holds in all cases, too, the cases do not show the edit, only its place.
    """
    given, new = expression_of(repair.edit.before), expression_of(repair.edit.after)
    if given is None:
        return
    others: list[ast.expr] = []
    if isinstance(new, ast.BinOp):
        others = [new.left, new.right]
    elif isinstance(new, ast.Call) and len(new.args) == 2:
        others = new.args
    elif isinstance(new, ast.Constant) and type(new.value) is int:
        others = [ast.Constant(new.value + step) for step in (1, -1)]
    for other in others:
        text = ast.unparse(other)
        if text != ast.unparse(given):
            yield repair.having(dataclasses.replace(repair.edit, after=f"({text})"))


def _has_one_condition(repair: Repair, proofs: Sequence["Proof"]) -> bool:
    """Answer whether the condition of an edit is always true or never: it disables a mask or a branch."""
    return len(set().union(*(proof.conditions.get(repair.key, ()) for proof in proofs))) == 1


def _is_constant(repair: Repair, proofs: Sequence["Proof"]) -> bool:
    """Answer whether what an edit adds has one value in all launches, so that they show nothing of it.

    That is a new name of an argument with one value, or an expression of arguments alone with one value. In a
    product with an argument that is always 1, no case separates a new factor from one in place of that
    argument, and no case separates a factor that is left out from an argument that the kernel does not use
    and that is always 1. The edit does not run.
    """
    launches = _arguments(proofs)
    if _may_lack_argument(repair, launches):
        return True
    before, after = (_names(text) for text in (repair.edit.before, repair.edit.after))
    if not after or (after <= before and after & _assigned(repair.text)):
        return False  # nothing is added, and no argument states the value
    for name in after - before:
        if len({values[name] for values in launches if name in values}) == 1:
            return True
    added = after - before
    others = (names - added for names in _factors_at(repair) if names & added)
    for name in set[str]().union(*others):
        if {values[name] for values in launches if name in values} == {1}:
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


def _arguments(proofs: Sequence["Proof"]) -> list[dict[str, Any]]:
    """Return the arguments of the launches of some proofs, which all cores record once."""
    left = [proof for proof in proofs if proof.arguments is None]
    for proof, found in zip(
        left, in_copies(lambda one: one.launches(), left, cores()), strict=True
    ):
        proof.arguments = found
    return [values for proof in proofs for values in proof.arguments or ()]


def _may_lack_argument(repair: Repair, launches: Sequence[dict[str, Any]]) -> bool:
    """Answer whether an edit may stand for an argument with one value that the kernel does not use.

    That is a stride that the edit does not use, either; or any that is always 1, if it leaves out a factor.
    """
    unused = {name for values in launches for name in values} - _names(repair.text)
    one_value = {
        name: next(iter(found))
        for name in unused - _names(repair.edit.after)
        if len(found := {values[name] for values in launches if name in values}) == 1
    }
    if any("stride" in name for name in one_value):
        return True
    given, new = expression_of(repair.edit.before), expression_of(repair.edit.after)
    if not isinstance(given, ast.BinOp) or not isinstance(given.op, ast.Mult) or new is None:
        return False
    if ast.unparse(new) not in (ast.unparse(given.left), ast.unparse(given.right)):
        return False
    return 1 in one_value.values()


def _factors_at(repair: Repair) -> Iterator[set[str]]:
    """Yield the names among the factors of each product that an edited text has in the place of the edit."""
    edit = repair.edit
    text, end = edit.apply(repair.text), edit.start + len(edit.after.encode())
    rows = row_starts(text)
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Mult):
            continue
        first, last = span_of(node, rows)
        if first < end and last > edit.start:
            yield _factors(node)


def _factors(node: ast.expr) -> set[str]:
    """Return the names among the factors of a product."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        return _factors(node.left) | _factors(node.right)
    return {node.id} if isinstance(node, ast.Name) else set()


def _assigned(text: str) -> set[str]:
    """Return the names that a text assigns."""
    nodes = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name))
    return {node.id for node in nodes if isinstance(node.ctx, ast.Store)}


def _names(text: str) -> set[str]:
    """Return the names in an expression or a statement, without those of modules."""
    nodes = list(ast.walk(expression_of(text) or ast.parse(text.strip())))
    modules = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
    return {node.id for node in nodes if isinstance(node, ast.Name) and id(node) not in modules}


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class Proof:
    """A case in which edits must hold, with finite numbers and with NaN in slots without a token.

    With NaN there, the memory outside of all tensors holds NaN, too: an edit may make a kernel read it.
    ``case``: what is equal for equal cases. ``mask``: what a kernel may ignore. ``has_freed``: a window freed
    blocks. ``has_slots``: the case has slots without a token; if not, it runs with NaN outside of all tensors
    alone. ``runs``: what :meth:`run` returned, by the contents of the slots and the edit. ``conditions``:
    the values of the condition of each edit. ``seconds``: processor time of a run without an edit.
    ``arguments``: :meth:`launches`, once they are recorded.
    """

    case: Any
    mask: str = ""
    has_freed: bool = False
    has_slots: bool = True
    runs: dict[tuple[str, Any], tuple[bool, torch.Tensor] | None] = dataclasses.field(
        default_factory=dict
    )
    conditions: dict[Any, set[bool]] = dataclasses.field(default_factory=dict)
    seconds: float = math.inf
    arguments: list[dict[str, Any]] | None = None

    def run(self, slots: str, probe: Probe) -> tuple[bool, torch.Tensor] | None:
        """Return whether the case is right with the edit of a probe, and its output, [rows, …]; None if it
        raises.

        ``slots``: "garbage" or "nan".
        """
        raise NotImplementedError

    def similar(self) -> Iterator["Proof"]:
        """Yield proofs by cases like this one."""
        return iter(())

    def launches(self) -> list[dict[str, Any]]:
        """Return the numbers among the arguments of each launch of the unchanged kernels, by name."""
        raise NotImplementedError

    def _result(self, slots: str, repair: Repair | None) -> tuple[bool, torch.Tensor] | None:
        slots = slots if self.has_slots else "nan"
        key = (slots, None if repair is None else repair.key)
        if key not in self.runs:
            if repair is not None:
                self._result("garbage", None)  # which says how long it may take with an edit
            condition = self.conditions.setdefault(key[1], set())
            limit_s = min(_MOST_RUN_S, max(_LEAST_RUN_S, _SLACK * self.seconds))
            start = time.process_time()
            with other_outside(math.nan if slots == "nan" else 0.0):
                self.runs[key] = self.run(slots, probe_of(repair, condition, limit_s))
            if repair is None:
                self.seconds = min(self.seconds, time.process_time() - start)
        return self.runs[key]

    def _is_right(self, slots: str, repair: Repair | None) -> bool | None:
        """Answer whether the output is right, None if the kernel raises.

        With an edit, what is right with NaN is right with finite numbers, too.
        """
        first = slots if repair is None else "nan"
        ran = self._result(first, repair)
        if slots != first and not (ran is not None and ran[0]):
            ran = self._result(slots, repair)
        return None if ran is None else ran[0]

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

    def allows(self, repair: Repair) -> bool:
        """Answer whether outputs are right with an edit, or the edit changes nothing in a wrong one.

        The same fault may be in several kernels of an op.
        """
        return self.accepts(repair) or self.is_untouched(repair)

    def refutes(self, repair: Repair) -> bool:
        """Answer whether an output is wrong with an edit, unless it has the same bits without it.

        Such an output is wrong for another reason, for example a feature that the kernel ignores. In blocks
        that a window freed, NaN must not reach more elements than without the edit: weights of 0 hide finite
        numbers.
        """
        if self.has_freed and _adds_nan(self._result("nan", repair), self._result("nan", None)):
            return True
        right = self._is_right("garbage", repair)
        if right is None:
            return self._is_right("garbage", None) is not None
        return not (right or self.is_untouched(repair))

    def is_untouched(self, repair: Repair) -> bool:
        """Answer whether an output is wrong, and has the same bits with an edit and without it."""
        if self._is_right("garbage", None) is not False or self._is_right("garbage", repair):
            return False
        edited, plain = (self._result("garbage", one) for one in (repair, None))
        if edited is None or plain is None or edited[1].shape != plain[1].shape:
            return False
        return bool(rows_equal(edited[1], plain[1]).all())

    @property
    def has_leak(self) -> bool:
        """Answer whether NaN in slots without a token reaches the output without an edit."""
        return _adds_nan(self._result("nan", None), self._result("garbage", None))

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


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class _CaseProof(Proof):
    """A Case that runs in a lab."""

    lab: Lab

    def __post_init__(self) -> None:
        self.mask, self.has_freed = self.case.mask, self.case.freed == "empty"

    def run(self, slots: str, probe: Probe) -> tuple[bool, torch.Tensor] | None:
        """Run the Case as :meth:`Proof.run` says."""
        return _run(self.lab, with_contents(self.case, slots), probe)

    def similar(self) -> Iterator[Proof]:
        """Yield proofs by similar cases."""
        return (_CaseProof(lab=self.lab, case=one) for one in similar_cases(self.case))

    def launches(self) -> list[dict[str, Any]]:
        """Return the arguments of launches that are recorded and do not run."""
        with suppress(AttnLabError), uncontrolled(), recording_launches() as launches:
            self.lab.output(with_contents(self.case, "garbage"))
        return [launch.values for launch in launches]


def _adds_nan(
    one: tuple[bool, torch.Tensor] | None, other: tuple[bool, torch.Tensor] | None
) -> bool:
    """Answer whether a run has NaN in elements in which another has none."""
    if one is None or other is None or one[1].shape != other[1].shape:
        return False
    return bool((one[1].float().isnan() & ~other[1].float().isnan()).any())


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
