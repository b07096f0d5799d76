"""Report a finding upstream: a script that reproduces it without the lab, and a text for an issue.

The script draws the same bits as the lab, fills a cache, calls the op of the installed vLLM and compares
with float64. It imports only torch, Triton and vLLM.
"""

import math
import platform
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

import torch

from attnlab.case.case import Case
from attnlab.case.masks import CAUSAL, MASK_DATA
from attnlab.case.op_arguments import NONE
from attnlab.case.ops import ENCODER, OPS, TRITON_OPS
from attnlab.case.output_file import make_output_folder, write_text
from attnlab.checker.finding import KINDS, Finding
from attnlab.contracts.kernel_contracts import contract
from attnlab.contracts.rows import cached_lens
from attnlab.contracts.target import Target
from attnlab.kernels.vllm.op_calls import OP_CALLS
from attnlab.lab.lab import Lab
from attnlab.reports.argument_script import (
    SCRIPTED,
    argument_facts,
    has_merge_script,
    merge_facts,
)
from attnlab.reports.ignored_script import has_ignored_script, ignored_facts
from attnlab.reports.mask_script import MASK_TENSORS, mask_facts
from attnlab.tensors.cache import freed_blocks
from attnlab.tensors.call import KernelCall
from attnlab.tensors.formats import written_format

_TEMPLATES = Path(__file__).parent / "templates"
_KNOWN = (  # fields that the script implements or that do not affect it
    *(
        "op",
        "num_heads",
        "num_queries_per_kv",
        "head_size",
        "block_size",
        "dtype",
        "kv_cache_dtype",
    ),
    *(
        "sliding_window",
        "alibi",
        "sm_scale",
        "num_splits",
        "query_lens",
        "ctx_lens",
        "seed",
        "stage",
    ),
    *("max_query_len", "max_seq_len", "fill", "block_table_dtype", "seq_lens_dtype", "platform"),
    *(
        "query_start_loc_dtype",
        "release",
        "backend",
        "trace_reads",
        "num_blocks",
        "max_blocks_per_seq",
    ),
    *(
        "block_table",
        "x",
        "k_scale",
        "v_scale",
        "freed",
        "empty_slots",
        "distribution",
        "output_init",
        "atol",
        "rtol",
    ),
    *("reference_dtype", "sinks", "softcap", "first_block"),
    *("mask", *MASK_DATA, "op_argument"),
)
_FILL = {"nan": 'float("nan")', "zeros": "0.0", "garbage": "garbage"}
_EMPTY = {"nan": "NaN", "zeros": "zeros", "garbage": "finite numbers of 0.5 and more"}
_BUFFER = {"nan": 'float("nan")', "zeros": "0.0", "recycled": "1.5"}


def write_reports(
    findings: list[Finding], folder: Path, version: str, device: str = "cpu"
) -> list[Path]:
    """Write a text and a script for each finding to ``folder``, and return their paths.

    - ``version``: a description of the vLLM that ran.
    - ``device``: "cuda", or "cpu" for Triton's interpreter.

    The folder is created if it is missing. A finding without a script (:func:`has_script`) gets a text
    only. Raises InvalidCase if the folder cannot be created or written.
    """
    written = []
    make_output_folder(folder, "report")
    for number, finding in enumerate(findings, 1):
        name = f"{number:02}_{finding.op}_{finding.kind}"
        facts = {**_facts(finding, version), "name": name}
        facts["how"] = "natively" if device == "cuda" else "under Triton's interpreter on a CPU"
        facts["script"] = _script(finding.case, facts)
        for suffix, text in (("py", facts["script"]), ("md", render("upstream.md.j2", facts))):
            if text:
                write_text(folder / f"{name}.{suffix}", text)
                written.append(folder / f"{name}.{suffix}")
    return written


def _script(case: Case, facts: dict[str, Any]) -> str:
    """Return the script of a finding, "" if it has none."""
    if has_merge_script(case):
        return render("merge_repro.py.j2", {**facts, **merge_facts(case)})
    if has_ignored_script(case):
        return render("ignored_repro.py.j2", {**facts, **_of_case(case)})
    return render("repro.py.j2", facts) if has_script(case) else ""


def has_script(case: Case) -> bool:
    """Answer whether a script can reproduce a Case: an attention op on a complete cache, or without one,
    with fields that the script implements."""
    known = (
        case.op in TRITON_OPS
        and case.op_argument in SCRIPTED
        and (case.spec.attends_to_cache or case.op == ENCODER)
        and case.distribution == "normal"
        and case.staging.fill == "all_rows"
    )
    return known and set(case.changes()) <= set(_KNOWN)


def _facts(finding: Finding, version: str) -> dict[str, Any]:
    """Return the values that the templates use for a finding."""
    case = finding.case
    lens = zip(case.lengths.query_lens, case.lengths.ctx_lens, strict=True)
    facts = {
        "title": f"{finding.op}: {_of_it(finding)}",
        "what": f"`{finding.op}`: {KINDS[finding.kind]}",
        "evidence": finding.evidence.rstrip("."),
        "diagnosis": finding.diagnosis.replace("_", " "),
        "version": version,
        "seen": finding.seen,
        "op": finding.op,
        "function": OPS[finding.op].function,
        "module": OPS[finding.op].module,
        "setting": _setting(case),
        "lengths": ", ".join(f"{q} + {c}" for q, c in lens),
        "empty": _EMPTY[case.empty_slots],
        "packages": {name: version_of(name) for name in ("torch", "triton")},
        "python": platform.python_version(),
    }
    facts |= argument_facts(case) | ignored_facts(case)
    return {**facts, **_of_case(case)} if has_script(case) else facts


def _of_it(finding: Finding) -> str:
    """Return the kind of a finding as part of a title."""
    return KINDS[finding.kind].removeprefix("it ").replace("its output", "output")


def _setting(case: Case) -> str:
    """Return the features of a Case as a phrase."""
    words = [
        f"{case.num_heads} query heads on {case.num_kv_heads} KV heads of {case.head_size}",
        *([] if case.spec.cache_layout is None else [f"blocks of {case.block_size}"]),
        case.dtype,
    ]
    if case.is_fp8:
        words.append(
            f"kv_cache_dtype {case.kv_cache_dtype}, scales {case.k_scale} and {case.v_scale}"
        )
    if case.sliding_window:
        freed = "" if case.freed == "kept" else f", blocks before it freed and {case.freed}"
        words.append(f"a sliding window of {case.sliding_window}{freed}")
    words += [] if case.mask == CAUSAL else [f"mask {case.mask}"]
    words += [] if case.op_argument == NONE else [f"op argument {case.op_argument}"]
    words += ["ALiBi"] if case.alibi else []
    words += ["sinks"] if case.sinks else []
    words += [] if case.softcap is None else [f"a soft cap of {case.softcap:g}"]
    words += [f"blocks from {case.first_block} on"] if case.first_block else []
    words.append("no scale passed" if case.sm_scale is None else f"a scale of {case.sm_scale:g}")
    return ", ".join(words)


def _of_case(case: Case) -> dict[str, Any]:
    """Return the values from which the script builds the call of a Case."""
    lab, plain = Lab(), case.replace(backend="model", trace_reads=False, op_argument=NONE)
    call, target = lab.call(plain), Target.of(plain)
    scale = case.head_size**-0.5 if case.sm_scale is None else case.sm_scale
    kept = [count * case.block_size for count in freed_blocks(case)]
    given = OP_CALLS[case.op].arguments(call, target)
    arguments = {name: expression(name, value, call) for name, value in given.items()}
    cached = cached_lens(contract(case.op, target, case.op), call)
    return {
        "query_lens": list(case.lengths.query_lens),
        "ctx_lens": list(case.lengths.ctx_lens),
        "num_heads": case.num_heads,
        "num_kv_heads": case.num_kv_heads,
        "head_size": case.head_size,
        "block_size": case.block_size,
        "dtype": case.dtype,
        "num_blocks": case.total_blocks - case.first_block,
        "first_block": case.first_block,
        "sinks": None if call.sinks is None else call.sinks.tolist(),
        "softcap": call.softcap,
        "scale": repr(scale) if math.isfinite(scale) else "0.0",
        "sliding_window": case.sliding_window,
        "block_table": call.block_table.tolist(),
        "block_table_dtype": str(call.block_table.dtype).removeprefix("torch."),
        "seeds": [
            (case.seed << 24) + (salt << 20) for salt in range(3)
        ],  # as attnlab.tensors.batch draws
        "fp8": str(written_format(case).dtype).removeprefix("torch.") if case.is_fp8 else "",
        "k_scale": case.k_scale,
        "v_scale": case.v_scale,
        "alibi_slopes": None if call.alibi_slopes is None else call.alibi_slopes.tolist(),
        "first_kept": kept if any(kept) else None,
        "fill": _FILL[case.empty_slots],
        "buffer": _BUFFER[case.output_init],
        "has_cache": case.spec.cache_layout is not None,
        "flash": case.spec.cache_layout == "flash",
        "x": case.key_x,
        "cached": cached.tolist(),
        "arguments": arguments,
        "output": next(name for name, text in arguments.items() if text == "output"),
        **mask_facts(call),
    }


def expression(name: str, value: Any, call: KernelCall) -> str:
    """Return an argument of the op as an expression of the script."""
    names = {"key": "new_keys", "value": "new_values"}
    for field in (
        "query",
        "key",
        "value",
        "output",
        "key_cache",
        "value_cache",
        "alibi_slopes",
        "sinks",
        *MASK_TENSORS,
    ):
        if isinstance(value, torch.Tensor) and value is getattr(call, field):
            return names.get(field, field)
    if value is call.block_table:
        return "block_table"
    if not isinstance(value, torch.Tensor):
        return repr(value)
    if name[0] in "kv" and value.dim() == 4 and value.shape[0] == call.key_cache.shape[0]:
        return "key_cache" if name.startswith("k") else "value_cache"
    if value.is_floating_point() and value.isnan().all():
        return f'torch.full({tuple(value.shape)}, float("nan"))'
    kind = "" if value.is_floating_point() else f", dtype={value.dtype}"
    return f"torch.tensor({value.tolist()}{kind})"


def render(template: str, facts: dict[str, Any]) -> str:
    """Fill a plain-text template."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    texts = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # plain text, without foreign input
    )
    return texts.get_template(template).render(**facts)
