"""Dispatch: which kernels vLLM runs for a Case, and why."""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from attnlab.case.case import Case, as_case
from attnlab.case.ops import DECODE_FWD, PREFILL, UNIFIED, WRAPPER
from attnlab.case.shown import Document, Shown
from attnlab.contracts.contract import ROCM_DECODE, TRITON_DECODE, Contract, Target, contracts_of

if TYPE_CHECKING:
    from attnlab.tensors.call import KernelCall


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """One condition of the dispatch predicate: the Case's value, what is allowed, whether it holds."""

    name: str
    value: str
    allowed: str
    holds: bool


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Decision(Document, Shown):
    """Which kernels run, in order, and the predicate that chose the decode kernel.

    ``terms`` is empty for every op but chunked_prefill_paged_decode: these run one kernel.
    """

    _more = ("decode", "reasons")

    platform: str
    release: str
    kernels: tuple[str, ...]
    terms: tuple[Term, ...]
    source: str

    @property
    def decode(self) -> str | None:
        """Return the kernel that computes decode rows from the cache, or None if none runs."""
        decodes = (TRITON_DECODE, ROCM_DECODE, UNIFIED, DECODE_FWD)
        return next((name for name in self.kernels if name in decodes), None)

    @property
    def refused(self) -> tuple[Term, ...]:
        """Return the terms that do not hold: why the ROCm custom kernel does not run."""
        return tuple(term for term in self.terms if not term.holds)

    @property
    def reasons(self) -> list[str]:
        """Return one sentence per term that does not hold, or one sentence if all hold."""
        if not self.terms:
            return [f"{self.kernels[0]} is called directly: nothing is dispatched"]
        if not self.refused:
            return [f"{ROCM_DECODE}: every term of the predicate holds"]
        return [
            f"not {ROCM_DECODE}: {t.name} is {t.value}, allowed: {t.allowed}" for t in self.refused
        ]

    def contracts(self, target: Target, op: str) -> tuple[Contract, ...]:
        """Return the contracts of the kernels that run, in their order."""
        return contracts_of(self.kernels, target, op)


def decide(case: Case) -> Decision:
    """Return which kernels the Case's op runs on its platform and release.

    The predicate is ``use_rocm_custom_paged_attention`` (vllm/platforms/rocm.py) and, in 0.33.0, two
    further conditions of ``chunked_prefill_paged_decode`` itself.
    """
    decided = partial(Decision, platform=case.platform, release=case.release)
    if case.op != WRAPPER:
        return decided(kernels=(case.op,), terms=(), source=case.spec.source(case.release))
    terms = tuple(_terms(case))
    decode = ROCM_DECODE if all(term.holds for term in terms) else TRITON_DECODE
    prefill = (PREFILL,) if case.passed_max_query_len > 1 else ()
    source = f"vllm/platforms/rocm.py use_rocm_custom_paged_attention, vLLM {case.release}"
    return decided(kernels=(*prefill, decode), terms=terms, source=source)


def _terms(case: Case) -> list[Term]:
    """Return the predicate's terms in vLLM's order; without an AMD GPU the platform alone decides."""
    if not case.machine.is_rocm:
        allowed = "gfx90a, gfx942, gfx950, gfx11…, gfx12…"
        return [Term(name="platform", value=case.platform, allowed=allowed, holds=False)]
    rdna = case.machine.family == "rdna"
    terms = [
        Term(name="platform", value=case.platform, allowed="an AMD GPU", holds=True),
        _exactly("sliding_window", case.sliding_window, (0,)),
        _exactly("dtype", case.dtype, ("float16", "bfloat16")),
        _exactly("head_size", case.head_size, (128,) if rdna else (64, 128)),
        _exactly("block_size", case.block_size, (16,) if rdna else (16, 32)),
        _within("num_queries_per_kv", case.num_queries_per_kv, 3 if rdna else 1, 16),
        _within("max_seq_len", case.passed_max_seq_len, 0, 128 * 1024),
    ]
    if rdna:
        terms += [
            _exactly("alibi", case.alibi, (False,)),
            _exactly("kv_cache_dtype", case.kv_cache_dtype, ("auto",)),
        ]
    if case.release == "0.11.2":
        terms.append(_exactly("VLLM_ROCM_CUSTOM_PAGED_ATTN", case.rocm_custom_paged_attn, (True,)))
        if not rdna:
            terms.append(_exactly("AITER paged attention", case.aiter_paged_attn, (False,)))
    terms.append(_exactly("sinks", "given" if case.sinks else "none", ("none",)))
    if case.release != "0.11.2":
        size, is_power = str(case.block_size), case.block_size & (case.block_size - 1) == 0
        terms += [
            Term(name="block_size", value=size, allowed="a power of two", holds=is_power),
            _exactly("cache blocks", "packed", ("packed",)),
        ]
    return terms


def _exactly(name: str, value: object, allowed: tuple[object, ...]) -> Term:
    return Term(
        name=name,
        value=str(value).lower() if isinstance(value, bool) else str(value),
        allowed=" or ".join(str(a).lower() if isinstance(a, bool) else str(a) for a in allowed),
        holds=value in allowed,
    )


def _within(name: str, value: int, least: int, most: int) -> Term:
    return Term(
        name=name, value=str(value), allowed=f"{least} to {most}", holds=least <= value <= most
    )


def serving(kernels: tuple[str, ...], query_len: int) -> tuple[str, ...]:
    """Return those of a Decision's kernels that compute a sequence with ``query_len`` new tokens."""
    if PREFILL in kernels and (query_len > 1 or kernels == (PREFILL,)):
        return (PREFILL,)
    return tuple(name for name in kernels if name != PREFILL)


def explain(case: Case | str, **changes: Any) -> Decision:
    """Return which kernels run for a Case or a pytest id, and each term of the predicate that decides.

    ``changes`` are fields of the Case, such as ``platform="gfx1100"``. No kernel is run.
    """
    return decide(as_case(case, **changes))


def kernels_of(case: Case, call: "KernelCall") -> tuple[str, ...]:
    """Return the kernels that would serve a call on the Case's platform and release."""
    if call.op != WRAPPER:
        return (call.op,)
    _, num_heads, head_size = call.query.shape
    call_case = case.replace(
        op=call.op,
        num_heads=num_heads,
        num_queries_per_kv=call.num_queries_per_kv,
        head_size=head_size,
        block_size=call.block_size,
        dtype=str(call.query.dtype).removeprefix("torch."),
        kv_cache_dtype=call.kv_cache_dtype,
        sliding_window=call.sliding_window,
        alibi=call.alibi_slopes is not None,
        sinks=call.sinks is not None,
        softcap=call.softcap,
        x=call.key_cache.shape[4],
        query_lens=(1,),
        ctx_lens=(0,),
        kv_head_range=None,
        seq_range=None,
        max_seq_len=call.max_seq_len,
        max_query_len=call.max_query_len,
        block_table=None,
        num_blocks=None,
        max_blocks_per_seq=None,
    )
    return decide(call_case).kernels
