"""Run one Case on the backend that is checked."""

import ast
import hashlib
import importlib.metadata
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch

import attnlab
from attnlab.case.case import Case
from attnlab.case.errors import (
    AttnLabError,
    DeviceLost,
    InvalidCase,
    KernelFailed,
    KernelRejected,
    OutOfMemory,
    Unavailable,
    Unsupported,
)
from attnlab.case.op_arguments import NONE
from attnlab.checker.finding import Finding
from attnlab.contracts.contract import Target
from attnlab.contracts.dispatch import decide
from attnlab.contracts.slot_states import EMPTY, STATES, SlotState, readable_states
from attnlab.defects import Defect
from attnlab.diagnosis.claims import DescribedWeights
from attnlab.diagnosis.confirmation import find_rule, is_general, with_second_cases
from attnlab.diagnosis.decision import examine, withdraw
from attnlab.diagnosis.diagnosis import Diagnosis
from attnlab.diagnosis.pattern import Pattern
from attnlab.diagnosis.refinement import confirmed_weights, follows_from
from attnlab.diagnosis.reruns import with_known_contents
from attnlab.kernels.backend import Backend
from attnlab.kernels.binding import scratch_number
from attnlab.kernels.cuda.backend import CudaBackend, source_files
from attnlab.kernels.plugin import PluginBackend
from attnlab.kernels.replaced import setting
from attnlab.kernels.triton.run_log import outside_number
from attnlab.lab.lab import Lab
from attnlab.lab.result import MemoryReport, Result
from attnlab.weights.conclude import xray

# Texts of CUDA and cuBLAS after which nothing runs any more in the process.
_BROKEN_CONTEXT = re.compile(
    r"illegal|misaligned|launch failure|device-side assert|CUBLAS_STATUS_(EXECUTION_FAILED|INTERNAL)"
)
_NO_MEMORY = re.compile(r"out of memory|CUBLAS_STATUS_ALLOC_FAILED")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CaseRun:
    """What a run of a Case gave, with all tensors on the CPU. The fields are those of a Result.

    It does not keep the cache, which may be large on a GPU.
    """

    output: torch.Tensor
    lse: torch.Tensor | None
    padded: torch.Tensor | None
    memory: MemoryReport | None
    wraps: tuple[str, ...]
    outside: tuple[str, ...]
    launches: tuple[str, ...] = ()


_RUNS: ContextVar[dict[tuple[Case, bool, str], CaseRun] | None] = ContextVar("runs", default=None)


def sharing_runs() -> AbstractContextManager[object]:
    """Run a Case once inside the block, on a backend that gives the same output each time."""
    return setting(_RUNS, {})


def run_case(lab: Lab, backend: Backend, case: Case, *, trace_reads: bool = False) -> CaseRun:
    """Return the run of a Case by :func:`made_run`, or of :func:`sharing_runs` that of the same Case before.

    A run that was traced serves a Case that need not be. Do not change its tensors.
    """
    runs = _RUNS.get()
    if runs is None or not (backend.is_interpreted and backend.is_deterministic):
        return made_run(lab, backend, case, trace_reads=trace_reads)
    around = f"scratch {scratch_number()}, outside {outside_number()}"
    found = runs.get((case, True, around)) or runs.get((case, trace_reads, around))
    if found is None:
        found = made_run(lab, backend, case, trace_reads=trace_reads)
        runs[case, trace_reads, around] = found
    return found


def made_run(lab: Lab, backend: Backend, case: Case, *, trace_reads: bool = False) -> CaseRun:
    """Run a Case on the backend, whatever backend it names.

    ``lab`` runs on the CPU; a backend on a GPU has a Lab of its own. ``trace_reads`` records which slots are
    read, if the backend can.

    Raises KernelRejected or KernelFailed with what the kernel raises, Unsupported for a limit that the
    kernel states itself, DeviceLost if the kernel broke the GPU's context.
    """
    case = case if case.backend == backend.name else case.replace(backend=backend.name)
    if backend.device == "cuda":
        result = _run_native((_far_lab if case.first_block else _gpu_lab)(backend), case)
    else:
        is_plain = not case.first_block and case.op_argument == NONE
        trace = trace_reads and backend.traces_reads and is_plain
        result = lab.run(case.replace(trace_reads=trace))
    if result.error is not None and result.failed:
        raise KernelFailed(result.error)
    if result.error is not None and backend.states_limits:
        raise Unsupported(f"the kernel rejects a case: {result.error}")
    if result.error is not None:
        raise KernelRejected(result.error)
    return CaseRun(
        output=result.output.cpu(),
        lse=None if result.lse is None else result.lse.cpu(),
        padded=None if result.padded is None else result.padded.cpu(),
        memory=result.memory,
        launches=result.launches,
        wraps=result.wraps,
        outside=result.outside,
    )


def release_memory() -> None:
    """Free the large caches that a run on a GPU has left for the next run of the same case."""
    _far_lab.cache_clear()


def _run_native(lab: Lab, case: Case) -> Result:
    """Run a Case on the GPU.

    Raises DeviceLost if its kernel broke the GPU's context. The error may surface in the op, in later work
    of the lab, or at Triton's next launch.
    """
    try:
        result = lab.run(case)
        result.output.cpu()  # waits for the kernels
    except (RuntimeError, Unavailable) as error:
        if _NO_MEMORY.search(str(error)):
            raise OutOfMemory(str(error).splitlines()[0]) from error
        if isinstance(error, torch.AcceleratorError) or _BROKEN_CONTEXT.search(str(error)):
            raise DeviceLost(str(error).splitlines()[0]) from error
        raise
    if _BROKEN_CONTEXT.search(str(result.error)):
        raise DeviceLost(str(result.error).splitlines()[0])
    return result


@lru_cache(maxsize=2)
def _gpu_lab(backend: Backend) -> Lab:
    """Return the Lab that runs the backend on the GPU; a Lab on the CPU compares its outputs."""
    return lab_of(backend, "cuda")


@lru_cache(maxsize=1)
def _far_lab(backend: Backend) -> Lab:
    """Return the Lab for blocks beyond 2^31 elements, which keeps only the last of such caches."""
    return lab_of(backend, "cuda", keep=1)


def lab_of(backend: Backend, device: str, keep: int = 3) -> Lab:
    """Return a Lab whose tensors are on a device, with the given backend if that runs there."""
    is_native = backend.device == "cuda"
    lab = Lab(source=backend.path, device=device, keep=keep, is_native=is_native)
    if backend.device == device:
        lab.use(backend)
    return lab


# What a check ran, as a digest: the kernels' sources, and the versions of what ran them.

_PACKAGES = ("torch", "triton", "numpy")
_OF_VERDICTS = (
    *("case", "tensors", "contracts", "kernels", "lab"),
    *("defects", "diagnosis", "checker"),
)


def source_digest(backend: Backend) -> str:
    """Return a digest of the sources of a backend's kernels; "" for the lab's models."""
    if (source := backend.op_source) is not None:
        root, folders = source.root, (source.root / name for name in source.ops_folders)
        return _digest(root, (file for folder in folders for file in folder.glob("*.py")))
    if isinstance(backend, CudaBackend):
        return _digest(backend.source.root, source_files(backend.source.root))
    if isinstance(backend, PluginBackend) and backend.file is not None:
        file = Path(backend.file)
        return _digest(file.parent, with_imports(file))
    return ""


@cache
def versions() -> dict[str, str]:
    """Return the versions of attnlab, with a digest of its code that decides verdicts, and of packages."""
    root = Path(attnlab.__file__).parent
    endings = (".py", ".toml")
    files = (
        file for name in _OF_VERDICTS for file in (root / name).rglob("*") if file.suffix in endings
    )
    found = {"attnlab": f"{attnlab.__version__} ({_digest(root, files)})"}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "none"
    return found


def _digest(root: Path, files: Iterable[Path]) -> str:
    """Return a digest of the names and contents of files below ``root``."""
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(f"{file.relative_to(root)}\0".encode())
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()[:16]


def with_imports(file: Path, folders: Mapping[str, Path] | None = None) -> set[Path]:
    """Return a file and the files that it imports, directly or not: of its folder, and of ``folders``.

    ``folders``: by the name of the package. Raises InvalidCase for a file that is no Python.
    """
    found, new = set[Path](), {file}
    while new:
        path = new.pop()
        found.add(path)
        try:
            tree = ast.parse(path.read_bytes())
        except SyntaxError as error:
            raise InvalidCase(f"{path} is no Python: {error.msg}", field="source") from error
        places = {**(folders or {}), "": path.parent}
        for name in (name for node in ast.walk(tree) for name in _imported(node)):
            package, _, leaf = name.rpartition(".")
            candidate = places[package] / f"{leaf}.py" if package in places else None
            if candidate is not None and candidate.is_file() and candidate not in found:
                new.add(candidate)
    return found


def _imported(node: ast.AST) -> list[str]:
    """Return the modules that an import statement may import; a relative one without its package."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    if node.level:  # "from .name import x" and "from . import name"
        return [node.module] if node.module else [alias.name for alias in node.names]
    base = node.module or ""
    return [base, *(f"{base}.{alias.name}" for alias in node.names)]


# Forms: how many cases of an op ran which kernels, such as unified_attention in one part or in several.
#
# Two forms of one case are not compared with each other. Each is compared with the reference: if both are
# within their bounds, they differ by no more than the sum of the bounds.


def kernels_of(launches: Iterable[str]) -> list[str]:
    """Return the names of the kernels of some launches, each once, in their order."""
    return list(dict.fromkeys(text.partition("[")[0] for text in launches))


def forms_of(verdicts: Iterable[tuple[Mapping[str, Any], str]]) -> dict[str, dict[str, int]]:
    """Return the number of cases of each op by the kernels that they launched, the most frequent first.

    ``verdicts``: of cases, each with its op. Kernels of one case are joined by " + ".
    """
    found: dict[str, Counter[str]] = {}
    for verdict, op in verdicts:
        if verdict.get("kernels"):
            found.setdefault(op, Counter())[" + ".join(verdict["kernels"])] += 1
    return {op: dict(counts.most_common()) for op, counts in found.items()}


# Count slot reads by state, and report those that the contracts do not allow.

# The states that each kind of observation reports, the most serious kind first.
OBSERVED = {
    "reads_foreign_slots": (
        SlotState.OTHER_POSITION,
        SlotState.OTHER_SEQUENCE,
        SlotState.NEVER_MAPPED,
    ),
    "reads_future_slots": (SlotState.OWN_FUTURE,),
    "reads_empty_slots": (SlotState.UNWRITTEN, SlotState.UNWRITTEN_TAIL),
    "reads_outside_window": (SlotState.OUTSIDE_WINDOW,),
}


def never_reads_empty_slots(run: CaseRun) -> bool:
    """Return whether the trace of a run shows that its output cannot depend on empty slots.

    The trace must have seen reads of keys and of values; it does not see interleaved values, for example.
    An access outside every tensor may hit any slot.
    """
    if run.memory is None or run.outside:
        return False
    slots = run.memory.slots
    return len({entry.tensor for entry in slots}) > 1 and not any(
        entry.counts[state] for entry in slots for state in (*EMPTY, SlotState.UNKNOWN)
    )


def read_counts(memory: MemoryReport) -> dict[str, int]:
    """Return how many slots a run read, by state.

    A slot whose key and value are both read counts once per sequence.
    """
    counts = {state.replace(" ", "_"): 0 for state in STATES}
    for (_, state), slots in slots_by_state(memory).items():
        counts[state.replace(" ", "_")] += len(slots)
    return counts


def allowed_reads(case: Case) -> list[str]:
    """Return the states of slots that the contracts of a Case's kernels allow to read, sorted."""
    return sorted(readable_states(decide(case).contracts(Target.of(case), case.op)))


def slots_by_state(memory: MemoryReport) -> dict[tuple[int, SlotState], set[tuple[int, int]]]:
    """Return the slots whose key or value was read, by the sequence they were read for and by state."""
    found: dict[tuple[int, SlotState], set[tuple[int, int]]] = {}
    for entry in memory.slots:
        for state, slots in entry.slots.items():
            if slots:
                found.setdefault((entry.seq, state), set()).update(slots)
    return found


def observations(case: Case, memory: MemoryReport | None) -> Iterable[Finding]:
    """Yield a finding for each kind of OBSERVED that the kernels of a Case read.

    A freed block counts as outside the window: a kernel that ignores the window reads both.
    """
    if memory is None:
        return
    found: dict[tuple[int, SlotState], set[tuple[int, int]]] = {}
    for (seq, state), slots in slots_by_state(memory).items():
        state = SlotState.OUTSIDE_WINDOW if state is SlotState.FREED else state
        found.setdefault((seq, state), set()).update(slots)
    for kind, states in OBSERVED.items():
        at = sorted((seq, state) for seq, state in found if state in states)
        if not at:
            continue
        seq, first = at[0]
        block, slot = min(found[seq, first])
        count = sum(len(found[place]) for place in at)
        text = f"{count} slots; first for sequence {seq}: block {block}, slot {slot} ({first})"
        yield Finding(op=case.op, kind=kind, case=case, evidence=text, diagnosis=str(first))


# Labels of wrong outputs by evidence: a rule about addresses or the softmax, or else that of an X-ray.
#
# A check runs all cases first. Then it names wrong outputs, together those of one op that the same faults
# may explain: what further cases confirmed for one output is tried on the next first. The sets depend on
# the cases of a shard alone, so that any number of workers and an interrupted check state the same.
#
# Two faults with different rules get different labels, and one fault that shows in several cases gets one,
# which the name that an output alone suggests does not ensure.

MOST_SEARCHES = 4  # for rules, while one finding is shrunk or one set of cases is named
_MOST_XRAYS = 2  # of these searches, those that also X-ray the kernel
_UNNAMED = ("described", "unexplained")  # diagnoses without a defect or a rule
# Cases in which a name is tried and not confirmed, while a set of cases is named and one finding is shrunk
_MOST_REFUSALS, _FEW_REFUSALS = 6, 2
_XRAY_S = 3.0  # time for the search for a description
_MOST_WEIGHTS = 1 << 20  # rows × heads × slots of a case that is X-rayed


class Rules:
    """What was found out about cases of one fault; ``confirmed`` and ``label`` mutate it.

    ``found``: rules that further cases confirmed, with their texts; ``weights``: descriptions by X-rays.
    ``names``: defects that further cases confirmed; ``refused``: how often they did not, up to ``refusals``.
    ``searches``, ``xrays``: how often something new may be looked for.
    """

    def __init__(self, searches: int = MOST_SEARCHES, refusals: int = _MOST_REFUSALS) -> None:
        self.found: list[tuple[Defect, str]] = []
        self.weights: list[DescribedWeights] = []
        self.searches, self.refusals = searches, refusals
        self.xrays = min(searches, _MOST_XRAYS)
        self.names = set[str]()
        self.refused = Counter[str]()

    def confirmed(
        self, lab: Lab, case: Case, diagnosis: Diagnosis, rerun: Callable[[Case], torch.Tensor]
    ) -> Diagnosis:
        """Return the diagnosis with the names that further cases confirm, those of an earlier one first."""
        names = {one.name for one in diagnosis.explanations}
        known = names & self.names
        if known:
            return withdraw(
                diagnosis,
                lambda one: one.name not in known,
                "less likely",
                "{names}: not confirmed",
            )
        if names and max(self.refused[name] for name in names) < self.refusals:
            diagnosis = with_second_cases(lab, with_known_contents(case), rerun, diagnosis)
            self.names |= {one.name for one in diagnosis.explanations if one.is_established}
            self.refused.update(names - self.names)
            return diagnosis
        return withdraw(diagnosis, lambda one: True, "excluded by rerun", "{names}: not confirmed")

    def label(
        self, lab: Lab, case: Case, output: torch.Tensor, rerun: Callable[[Case], torch.Tensor]
    ) -> str:
        """Return the text of the rule that explains an output, known or found now, or ""."""
        for known, law in self.found:
            seen = examine(lab, case, output, (known,), Pattern()).diagnosis
            if any(is_general(one) for one in seen.explanations):
                return law
        found = examine(lab, case, output, (), Pattern())
        for described in self.weights:
            if follows_from(described.description, lab, case, output, found):
                return described.said
        if not self.searches:
            return ""
        self.searches -= 1
        return self._new_rule(lab, case, rerun) or self._new_weights(lab, case, rerun)

    def _new_rule(self, lab: Lab, case: Case, rerun: Callable[[Case], torch.Tensor]) -> str:
        rule = find_rule(lab, case, rerun)
        if rule is None:
            return ""
        self.found.append((rule.candidate.defect, rule.law))
        return rule.law

    def _new_weights(self, lab: Lab, case: Case, rerun: Callable[[Case], torch.Tensor]) -> str:
        """Return the rule of an X-ray, about all sequences, that further cases confirm.

        "" for none, or if the case is too large.
        """
        if not self.xrays or weights_of(case) > _MOST_WEIGHTS:
            return ""
        self.xrays -= 1
        seen = xray(case, lab=lab, limit_s=_XRAY_S)
        if seen.status != "described" or not seen.confirmed:
            return ""
        general = [one for one in seen.descriptions if not one.scope.seqs]
        found = confirmed_weights(lab, case, general, rerun)
        if found is None:
            return ""
        self.weights.append(found)
        return found.said


def weights_of(case: Case) -> int:
    """Return how many attention weights an X-ray of a Case measures: rows × heads × slots."""
    slots = case.total_blocks * case.block_size
    return case.lengths.num_tokens * case.num_heads * slots


_REMEMBERED: ContextVar[Rules | None] = ContextVar("remembered", default=None)


def remembering(finding: Finding | None = None) -> AbstractContextManager[Rules]:
    """Within, try on each case first what explained the cases before; all may show one fault.

    Nothing new is looked for in smaller cases of a ``finding`` but the rule that explains it, if one does.
    """
    if finding is None:
        rules = Rules()
    else:
        has_rule = not finding.names and finding.diagnosis not in _UNNAMED
        rules = Rules(MOST_SEARCHES if has_rule else 0, _FEW_REFUSALS)
    return setting(_REMEMBERED, rules)


def _rules() -> Rules:
    """Return what was found out about earlier cases, nothing outside of :func:`remembering`."""
    return _REMEMBERED.get() or Rules()


def confirmed(lab: Lab, backend: Backend, case: Case, diagnosis: Diagnosis) -> Diagnosis:
    """Return the diagnosis of one output with the names that further cases confirm."""
    if not diagnosis.explanations:
        return diagnosis
    return _rules().confirmed(lab, case, diagnosis, lambda one: run_case(lab, backend, one).output)


def evidence_label(
    lab: Lab, backend: Backend, case: Case, output: torch.Tensor, diagnosis: Diagnosis
) -> str:
    """Return the label of a wrong output: a rule that further cases confirm, else the name of its cause,
    else the status of its diagnosis.

    A search for a rule runs the kernel about three times. It is made if the output alone has no explanation.
    """
    if diagnosis.explanations:  # Finding.names joins cases that do not decide with those that do
        return diagnosis.cause.name if diagnosis.cause is not None else diagnosis.status
    try:
        rule = _rules().label(lab, case, output, lambda one: run_case(lab, backend, one).output)
    except AttnLabError:
        rule = ""
    return rule or diagnosis.status


def evidence_fields(
    lab: Lab, case: Case, output: torch.Tensor, diagnosis: Diagnosis, label: str
) -> dict[str, Any]:
    """Return the names, the description, and what separates faults of one label.

    These are ``wrong_in``, ``right_in`` and ``contents``.

    A defect that explains only the rows of one kernel would change the others, too, if that kernel had it.
    """
    explanations = diagnosis.explanations
    kinds = {"decode" if n == 1 else "prefill" for n in case.lengths.query_lens}
    fields: dict[str, Any] = {
        "names": tuple(one.name for one in explanations),
        "description": _description(diagnosis, label),
    }
    if explanations:
        scopes = {one.scope.rows for one in explanations if one.scope is not None}
        wrong = scopes & kinds if scopes <= kinds else set[str]()
        wrong = wrong or (kinds if len(kinds) == 1 else set[str]())
        right = kinds - wrong if scopes and scopes <= kinds else set[str]()
    elif label == diagnosis.status:
        wrong = _kinds_of(lab, case, output)
        right = kinds - wrong
        if diagnosis.pattern.is_complete:
            fields["contents"] = tuple(sorted({fact.kind for fact in diagnosis.pattern.rules}))
    else:
        return fields
    return {**fields, "wrong_in": tuple(sorted(wrong)), "right_in": tuple(sorted(right))}


def _description(diagnosis: Diagnosis, label: str) -> str:
    """Return the text of each defect that explains an output, its rule, or the facts that reproduce it.

    No further case confirms the facts: they are said of this output alone.
    """
    if diagnosis.explanations:
        return "; ".join(f"{one.name}: {one.text}" for one in diagnosis.explanations)
    if label != diagnosis.status:
        return label
    pattern = diagnosis.pattern
    return f"in the smallest case, {pattern.rules_text}" if pattern.is_complete else ""


def _kinds_of(lab: Lab, case: Case, output: torch.Tensor) -> set[str]:
    """Return the kinds of the sequences with wrong rows."""
    rows = examine(lab, case, output, (), Pattern()).evidence.locations.wrong_rows
    starts = torch.tensor(case.lengths.query_lens).cumsum(0)
    seqs = torch.searchsorted(starts, rows.cpu(), right=True).unique().tolist()
    return {"decode" if case.lengths.query_lens[seq] == 1 else "prefill" for seq in seqs}
