"""Report a finding upstream: a script that reproduces it without the lab, and a text for an issue.

The script draws the same bits as the lab, fills a cache, calls the op of the installed vLLM and compares
with float64. It imports only torch, Triton and vLLM.
"""

import base64
import inspect
import math
import platform
import re
import textwrap
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

import torch

from attnlab.case.case import Case
from attnlab.case.errors import Unsupported
from attnlab.case.fields import names_file
from attnlab.case.masks import CAUSAL, MASK_DATA
from attnlab.case.op_arguments import NONE
from attnlab.case.ops import ENCODER, MERGE, OPS, TRITON_OPS, UNIFIED, WRAPPER, WRITE
from attnlab.case.output_file import make_output_folder, write_text
from attnlab.checker.finding import KINDS, Finding
from attnlab.contracts.contract import Target, contract
from attnlab.contracts.slot_states import cached_lens
from attnlab.kernels import model as paged
from attnlab.kernels.backend import Backend
from attnlab.kernels.binding import Values, arguments_of, evaluate, is_default
from attnlab.kernels.by_name import ByName
from attnlab.kernels.plugin import PluginBackend
from attnlab.kernels.vllm.op_arguments import pass_argument
from attnlab.kernels.vllm.source import Source
from attnlab.lab.lab import Lab
from attnlab.library.op import names_in, package_of
from attnlab.linear.state_call import StateCall, make_call
from attnlab.linear.state_case import RECORDS, StateCase
from attnlab.linear.state_plan import right_plan
from attnlab.reports.pages import templates
from attnlab.tensors.cache import freed_blocks
from attnlab.tensors.call import KernelCall
from attnlab.tensors.call_file import Stored, stored_tensors
from attnlab.tensors.case_call import presented
from attnlab.tensors.formats import FORMATS, written_format
from attnlab.tensors.quantised import QUERY_SCALE, has_fp8_query, has_scaled_output

# The mask of a call in a script: its data as plain tensors, and what its rule depends on.

MASK_TENSORS = ("causal", "mm_prefix_range", "rswa_prefix_lens", "qq_bias")


def mask_facts(call: KernelCall) -> dict[str, Any]:
    """Return what the templates need for a mask: ``mask``, its rule; ``mask_data``, its tensors as text.

    ``mask`` is None for a call whose rows see the keys up to their own. Its ``causal`` is None if a tensor
    says which sequences are causal.
    """
    rules = call.visibility
    if rules.is_plain:
        return {"mask": None, "mask_data": {}}
    by_seq = isinstance(rules.causal, torch.Tensor)
    return {
        "mask": {
            "name": " and ".join(one.replace("_", " ") for one in rules.masks),
            "causal": None if by_seq else bool(rules.causal),
            "chunk": max(1, call.sliding_window // (call.chunk_lookback + 1))
            if rules.has_chunks
            else 0,
            "lookback": rules.chunk_lookback,
            "right": rules.window_right if rules.causal is not True else None,
            "prefix": rules.rswa_prefix_lens is not None,
            "ranges": rules.mm_prefix_range is not None,
            "clamp": rules.mm_prefix_clamp_sliding_window and rules.sliding_window > 0,
            "bias": rules.qq_bias is not None,
        },
        "mask_data": {
            name: tensor_text(one)
            for name in MASK_TENSORS
            if isinstance(one := getattr(call, name), torch.Tensor)
        },
    }


def tensor_text(tensor: torch.Tensor) -> str:
    """Return a tensor as an expression, with its dtype."""
    numbers = repr(tensor.tolist()).replace("inf", 'float("inf")')
    return f"torch.tensor({numbers}, dtype={tensor.dtype})"


# By mask: the argument that carries it, and its value in a call without it.
_CARRIED = {
    "ranges_in_window": ("mm_prefix_clamp_sliding_window", False),
    "prefix_and_window": ("rswa_prefix_lens", None),
    "chunks": ("chunk_lookback", -1),
}


def has_ignored_script(case: Case) -> bool:
    """Answer whether a script can show that the op ignores the mask of a Case."""
    return case.op == UNIFIED and case.argument.is_packed and case.mask in _CARRIED


def ignored_facts(case: Case) -> dict[str, Any]:
    """Return what the templates need: the argument, "" without such a script, its other value, the mode."""
    if not has_ignored_script(case):
        return {"ignored": ""}
    name, neutral = _CARRIED[case.mask]
    cache = case.argument.cache
    assert cache is not None
    return {"ignored": name, "neutral": repr(neutral), "mode": cache.mode}


_BLOCK_POINTERS = "block_pointers"
_FP8_QUERY, _INT8 = "fp8_query", "int8_per_token_head"
SCRIPTED = (NONE, "tensor_descriptors", _BLOCK_POINTERS, _FP8_QUERY, _INT8)
_MERGED = ("prefix_output", "prefix_lse", "suffix_output", "suffix_lse")


def has_merge_script(case: Case) -> bool:
    """Answer whether a script can reproduce a Case of merge_attn_states: a merge of two parts alone."""
    plain = case.kv_cache_dtype == "auto" and not case.pad_batch
    return case.op == MERGE and case.op_argument == NONE and plain


def argument_facts(case: Case) -> dict[str, Any]:
    """Return what the templates need for an op argument: its name, "" for none, and names of tensors."""
    none = {"op_argument": "", "names": (), "fp8_query": "", "int8_mode": 0}
    if case.op_argument == NONE:
        return none
    if case.op_argument == _FP8_QUERY:
        dtype = _name(FORMATS[case.machine.fp8_e4m3].dtype)
        return {**none, "op_argument": _FP8_QUERY, "fp8_query": dtype, "query_scale": QUERY_SCALE}
    if case.op_argument == _INT8 and case.argument.cache is not None:
        return {**none, "op_argument": _INT8, "int8_mode": case.argument.cache.mode}
    names: tuple[str, ...] = ()
    if case.op_argument == _BLOCK_POINTERS:
        names = ("key_cache", "block_table") if case.op == WRAPPER else ("k_cache", "b_loc")
    return {**none, "op_argument": case.op_argument, "names": names}


def merge_facts(case: Case) -> dict[str, Any]:
    """Return the parts of a merge as text."""
    plain = case.replace(backend="model", op_argument=NONE, trace_reads=False)
    arguments = arguments_of(Lab().call(plain), Target.of(plain))
    parts: dict[str, torch.Tensor] = {name: arguments[name] for name in _MERGED}
    return {"tensors": {name: tensor_text(one) for name, one in parts.items()}}


def has_write_script(case: Case) -> bool:
    """Answer whether a script can reproduce a Case of reshape_and_cache_flash."""
    return case.op == WRITE and case.argument.cache is None and case.argument.base in _WRITTEN


_WRITTEN = {NONE: "flash", "spaced_values": "flash", "gaps": "flash", "diffkv": "one"}
_WRITTEN |= {"head_major": "turned", "head_major_packed": "packs"}


def write_facts(case: Case) -> dict[str, Any]:
    """Return the call of a cache write as text: its exact arguments, and the cache's layout."""
    plain = case.replace(backend="model", op_argument=NONE, trace_reads=False)
    call, target = Lab().call(plain).cpu().with_buffer(), Target.of(plain)
    given = arguments_of(presented(call), target)
    passed = pass_argument(case, given, {*given, "interleaved_v_pack_factor"})
    used = {name: one for name, one in passed.arguments.items() if name != "output"}
    tensors = {name: _small(one) for name, one in used.items() if isinstance(one, torch.Tensor)}
    storages, stored = stored_tensors(tensors)
    function = passed.function or (OPS[case.op].module, OPS[case.op].function)
    return {
        "module": function[0],
        "function": function[1],
        "storages": {name: _text(one.numpy().tobytes()) for name, one in storages.items()},
        "arguments": {
            name: _placed(stored[name]) if name in stored else repr(one)
            for name, one in used.items()
        },
        "layout": _WRITTEN[case.argument.base],
        "x": 16 // given["value_cache"].element_size(),
        "block_size": case.block_size,
        "num_slots": case.total_blocks * case.block_size,
        "fp8": _name(written_format(case).dtype) if case.is_fp8 else "",
        "scales": [case.k_scale, case.v_scale],
    }


def _placed(one: Stored) -> str:
    """Return the expression of a tensor in a memory of the script."""
    place = f"{one.shape}, {one.stride}, {one.offset}"
    return f'tensor("{one.storage}", torch.{one.dtype}, {place})'


# Fields that the script implements or that do not affect it.
_KNOWN = {*MASK_DATA} | {
    *re.findall(
        r"\w+",
        """
op num_heads num_queries_per_kv head_size block_size dtype kv_cache_dtype sliding_window alibi
sm_scale num_splits query_lens ctx_lens seed stage max_query_len max_seq_len fill block_table_dtype
seq_lens_dtype platform query_start_loc_dtype release backend trace_reads num_blocks
max_blocks_per_seq block_table x k_scale v_scale freed empty_slots distribution output_init atol
rtol reference_dtype sinks softcap first_block mask op_argument
""",
    )
}
_FILL = {"nan": 'float("nan")', "zeros": "0.0", "garbage": "garbage"}
_EMPTY = {"nan": "NaN", "zeros": "zeros", "garbage": "finite numbers of 0.5 and more"}
_BUFFER = {"nan": 'float("nan")', "zeros": "0.0", "recycled": "1.5"}


def write_reports(
    findings: Sequence[Finding],
    folder: Path,
    version: str,
    device: str = "cpu",
    backend: Backend | None = None,
) -> list[Path]:
    """Write a text and a script for each finding to ``folder``, and return their paths.

    - ``version``: a description of the vLLM that ran.
    - ``device``: "cuda", or "cpu" for Triton's interpreter.
    - ``backend``: of another library than vLLM, what runs its ops.

    The folder is created if it is missing. A finding without a script (:func:`has_script`) gets a text
    only, an int32 horizon nothing: it has no Case. Raises InvalidCase if the folder cannot be created or
    written.
    """
    written = []
    make_output_folder(folder, "report")
    of_cases = [finding for finding in findings if not finding.horizon]
    for number, finding in enumerate(of_cases, 1):
        name = f"{number:02}_{finding.op}_{finding.kind}"
        facts = {**_facts(finding, version), "name": name}
        facts["how"] = "natively" if device == "cuda" else "under Triton's interpreter on a CPU"
        facts["script"], facts["no_script"] = "", ""
        if (state := finding.state_case) is not None:
            if backend is not None and backend.op_source is not None:
                facts["script"] = state_script(state, backend.op_source, finding.title)
        elif OPS[finding.op].library != "vllm" and backend is not None:
            facts["script"], facts["no_script"] = _library_script(finding, backend)
        else:
            facts["script"] = _script(finding.case, facts)
        for suffix, text in (("py", facts["script"]), ("md", render("upstream.md.j2", facts))):
            if text:
                write_text(folder / f"{name}.{suffix}", text)
                written.append(folder / f"{name}.{suffix}")
    return written


def _library_script(finding: Finding, backend: Backend) -> tuple[str, str]:
    """Return the script of a finding in an op of another library than vLLM, and why there is none, or ""."""
    case = finding.case.replace(backend=backend.name)
    if case.op_argument != NONE:
        return "", "a script passes no op argument of attnlab"
    call = Lab(source=backend.path, device="cpu").call(case)
    return script_of(call, Target.of(case), backend, finding.evidence)


def _script(case: Case, facts: dict[str, Any]) -> str:
    """Return the script of a finding, "" if it has none."""
    if has_merge_script(case):
        return render("merge_repro.py.j2", {**facts, **merge_facts(case)})
    if has_ignored_script(case):
        return render("ignored_repro.py.j2", {**facts, **_of_case(case)})
    if has_write_script(case):
        return render("write_repro.py.j2", {**facts, **write_facts(case)})
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
    return known and set(case.changes()) <= _KNOWN


def _facts(finding: Finding, version: str) -> dict[str, Any]:
    """Return the values that the templates use for a finding."""
    case, record, kind = finding.case, RECORDS[finding.op], KINDS[finding.kind]
    facts = {
        "title": f"{finding.op}: {kind.removeprefix('it ').replace('its output', 'output')}",
        "what": f"`{finding.op}`: {kind}",
        "evidence": finding.evidence.rstrip("."),
        "diagnosis": finding.title,
        "version": version,
        "package": package_of(record.library).title,
        "seen": finding.seen,
        "op": finding.op,
        "module": record.module,
        "packages": {name: version_of(name) for name in ("torch", "triton")},
        "python": platform.python_version(),
    }
    if (state := finding.state_case) is not None:
        fields = ", ".join(f"{name} {value}" for name, value in state.changes().items())
        lengths = ", ".join(map(str, state.query_lens))
        return {**facts, "setting": fields, "lengths": lengths, "empty": "", "ignored": ""}
    lens = zip(case.lengths.query_lens, case.lengths.ctx_lens, strict=True)
    facts |= {
        "function": OPS[finding.op].function,
        "setting": _setting(case),
        "lengths": ", ".join(f"{q} + {c}" for q, c in lens),
        "empty": _EMPTY[case.empty_slots],
        "writes": case.spec.writes_cache,
    }
    facts |= argument_facts(case) | ignored_facts(case)
    return {**facts, **_of_case(case)} if has_script(case) else facts


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
    given = arguments_of(call, target)
    arguments = {name: expression(name, value, call) for name, value in given.items()}
    cached = cached_lens(contract(case.op, target, case.op), call)
    return {
        **_numbers(call),
        "ctx_lens": list(case.lengths.ctx_lens),
        "num_blocks": case.total_blocks - case.first_block,
        "first_block": case.first_block,
        "scale": repr(scale) if math.isfinite(scale) else "0.0",
        "seeds": [
            (case.seed << 24) + (salt << 20) for salt in range(3)
        ],  # as attnlab.tensors.cache draws
        "fp8": _name(written_format(case).dtype) if case.is_fp8 else "",
        "first_kept": kept if any(kept) else None,
        "fill": _FILL[case.empty_slots],
        "buffer": _BUFFER[case.output_init],
        "has_cache": case.spec.cache_layout is not None,
        "flash": case.spec.cache_layout == "flash",
        "x": case.key_x,
        "cached": cached.tolist(),
        "arguments": arguments,
        "output": next(name for name, text in arguments.items() if text == "output"),
    }


_FIELDS = ("query", "key", "value", "output", "key_cache", "value_cache", "alibi_slopes", "sinks")


def expression(name: str, value: Any, call: KernelCall) -> str:
    """Return an argument of the op as an expression of the script."""
    names = {"key": "new_keys", "value": "new_values"}
    for field in (*_FIELDS, *MASK_TENSORS):
        if isinstance(value, torch.Tensor) and value is getattr(call, field):
            return names.get(field, field)
    if value is call.block_table:
        return "block_table"
    if not isinstance(value, torch.Tensor):
        return repr(value)
    if name[0] in "kv" and value.dim() == 4 and value.shape[0] == call.key_cache.shape[0]:
        return "key_cache" if name.startswith("k") else "value_cache"
    if _is_nan(value):
        return f'torch.full({tuple(value.shape)}, float("nan"))'
    kind = "" if value.is_floating_point() else f", dtype={value.dtype}"
    return f"torch.tensor({value.tolist()}{kind})"


def _is_nan(tensor: torch.Tensor) -> bool:
    """Answer whether all elements are NaN; of a cache whose first blocks are unused, nothing else is read."""
    if not tensor.is_floating_point() or not tensor.numel():
        return False
    return bool(tensor[(0,) * tensor.dim()].isnan()) and bool(tensor.isnan().all())


def render(template: str, facts: dict[str, Any]) -> str:
    """Fill a plain-text template."""
    layout = {"trim_blocks": True, "lstrip_blocks": True, "keep_trailing_newline": True}
    texts = templates().overlay(**layout, autoescape=False)  # plain text, without foreign input
    return str(texts.get_template(template).render(**facts))


# A script that reproduces a wrong call without the lab: it holds the tensors of the call.

_TRITON_DTYPES = {"fp16": "triton.language.float16", "bf16": "triton.language.bfloat16"}
_TRITON_DTYPES |= {"fp32": "triton.language.float32"}
_MOST_BYTES = 4 << 20  # of the tensors of a call, compressed
_MOST_HELD = 1 << 30  # of a storage that a script holds from its first byte on


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptedKernel:
    """What a script calls: vLLM's op, or a user's function.

    ``file``: the text of the function's file, "" for a function of an installed module and for an op.
    ``arguments``: by name; without the output, the function returns it. ``caches``: of an op of another
    library than vLLM, keys and values [num_blocks, block_size, num_kv_heads, head_size].
    """

    function: str
    module: str
    arguments: dict[str, Any]
    file: str = ""
    is_own: bool = False
    caches: tuple[torch.Tensor, ...] = ()

    @classmethod
    def of(cls, call: KernelCall, target: Target, backend: Backend) -> "ScriptedKernel":
        """Return what a backend calls. Raises Unsupported if a script cannot."""
        if backend.name == "vllm":
            if call.op not in TRITON_OPS:
                raise Unsupported(f"a script calls vLLM's Triton ops, and {call.op} is none")
            op = OPS[call.op]
            arguments = arguments_of(call, target)
            return cls(function=op.function, module=op.module, arguments=arguments)
        if not isinstance(backend, PluginBackend):
            raise Unsupported(f"a script has no backend {backend.name}")
        if backend.op_source is not None:
            return cls._of_library(call, target, backend, backend.op_source)
        kernel = backend.kernel
        if not isinstance(kernel, ByName):
            raise Unsupported("a script has no KernelCall, which is the argument of the function")
        arguments = kernel.arguments(call)
        file, _, function = backend.spec.rpartition(":")
        is_file = names_file(backend.spec)
        return cls(
            function=function,
            module=Path(file).stem if is_file else file,
            file=Path(file).expanduser().read_text(encoding="utf-8") if is_file else "",
            arguments=arguments,
            is_own=True,
        )

    @classmethod
    def _of_library(
        cls, call: KernelCall, target: Target, backend: PluginBackend, source: Source
    ) -> "ScriptedKernel":
        """Return an op of a library, whose arguments and caches share their memory as in the call."""
        op = call.spec
        if op.result not in (None, "returned"):
            raise Unsupported(f"a script compares an output, and {call.op} has none")
        file = source.op_file(op.module).relative_to(source.root)
        values = Values(call, target)
        known = inspect.signature(backend.function_of(op, target.platform)).parameters
        found = {
            name: evaluate(text, values) for name, text in op.arguments.items() if name in known
        }
        return cls(
            function=op.function,
            module=".".join(file.with_suffix("").parts),
            arguments={name: one for name, one in found.items() if not is_default(one)},
            caches=values["flash_cache"],
            is_own=True,
        )


def has_scripts(backend: Backend) -> bool:
    """Answer whether a script can call the kernels of a backend."""
    return backend.name == "vllm" or isinstance(backend, PluginBackend)


def script_of(
    call: KernelCall, target: Target, backend: Backend | None, evidence: str
) -> tuple[str, str]:
    """Return the script that reproduces a wrong call without attnlab, and why there is none, or "".

    It calls the op of the installed vLLM, or the user's function, whose file it contains, and compares with
    float64. ``evidence``: what is wrong, in one sentence.
    """
    if backend is None:
        return "", "a script calls a kernel, and --kernel and --source name none"
    call = call.cpu().with_buffer()
    try:
        if not call.spec.attends_to_cache:
            raise Unsupported(f"a script calls an op on a cache, and {call.op} is none")
        if call.interleave_v or call.padding or call.strides != "contiguous":
            raise Unsupported("a script has no interleaved values, padding or strides of the lab")
        if has_fp8_query(call) or has_scaled_output(call):
            raise Unsupported("the reference of a script has no FP8 query and no scaled output")
        if call.query.shape[2] != call.value_cache.shape[2]:
            raise Unsupported("the reference of a script has keys and values of one width")
        if not all(isinstance(scale, float | int) for scale in (call.k_scale, call.v_scale)):
            raise Unsupported("the reference of a script has one scale per cache")
        kernel = ScriptedKernel.of(call, target, backend)
        return _call_script(call, target, kernel, backend, evidence), ""
    except Unsupported as error:
        return "", str(error)


def _call_script(
    call: KernelCall, target: Target, kernel: ScriptedKernel, backend: Backend, evidence: str
) -> str:
    """Return the text of a script. Raises Unsupported for arguments that it cannot hold."""
    if kernel.caches:
        texts, more = _held(kernel.arguments, call)
        caches = dict(zip(("key_cache", "value_cache"), kernel.caches, strict=True))
    else:
        more, named = {}, kernel.arguments.items()
        texts = {name: expression(name, value, call) for name, value in named}
        caches = {
            text: kernel.arguments[name]
            for name, text in texts.items()
            if text in ("key_cache", "value_cache")
        }
    is_plain = len(caches) == 2 and all(_is_flash(one, call) for one in caches.values())
    if kernel.is_own and not is_plain:
        raise Unsupported("a script has caches [num_blocks, block_size, num_kv_heads, head_size]")
    facts = {**_sizes(call), **_tensors(call, target, {**caches, **more})}
    if sum(map(len, facts["storages"].values())) + len(kernel.file) > _MOST_BYTES:
        raise Unsupported("the tensors of the call are too large for a script")
    if "new_keys" in texts.values() and not facts["has_new"]:
        raise Unsupported(
            "the call does not hold the new keys, which are arguments of the function"
        )
    launches = not kernel.is_own or "triton" in kernel.file
    interpreted = "under Triton's interpreter " if launches else ""
    quotes = next((one for one in ("'''", '"""') if one not in kernel.file), '"""')
    escaped = kernel.file.replace("\\", "\\\\").replace(quotes, "\\" + "\\".join(quotes))
    return render(
        "call_repro.py.j2",
        {
            **facts,
            "title": f"{kernel.function if kernel.is_own else call.op}: output is wrong",
            "needs_triton": any("triton." in one for one in texts.values()),
            "evidence": evidence.rstrip("."),
            "version": backend.version,
            "how": "natively" if backend.device == "cuda" else f"{interpreted}on a CPU",
            "may_launch": launches or not kernel.file,
            "kernel": kernel,
            "file": f"{quotes}\\\n{escaped}{quotes}",
            "function": kernel.function,
            "module": kernel.module,
            "arguments": texts,
            "output": next((name for name, text in texts.items() if text == "output"), ""),
        },
    )


def _held(
    arguments: dict[str, Any], call: KernelCall
) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    """Return the arguments of a library's op as expressions, and the tensors that these name."""
    fields: dict[str, Any] = {"query": call.query, "new_keys": call.key, "new_values": call.value}
    fields |= {"output": call.output, "alibi_slopes": call.alibi_slopes, "sinks": call.sinks}
    texts, held = {}, dict[str, torch.Tensor]()
    for name, value in arguments.items():
        field = next((n for n, one in fields.items() if one is value is not None), None)
        if field is not None:
            texts[name] = field
        elif not isinstance(value, torch.Tensor):
            texts[name] = _TRITON_DTYPES.get(str(value), repr(value))
        elif value.dtype.itemsize > 1 and _is_nan(value):
            texts[name] = expression(name, value, call)
        else:
            texts[name], held[f"given_{name}"] = f"given_{name}", value
    return texts, held


def _is_flash(cache: torch.Tensor, call: KernelCall) -> bool:
    """Answer whether a cache is [num_blocks, block_size, num_kv_heads, head_size]."""
    heads, size = call.key.shape[1], call.query.shape[2]
    return cache.dim() == 4 and tuple(cache.shape[1:]) == (call.block_size, heads, size)


def _numbers(call: KernelCall) -> dict[str, Any]:
    """Return what the scripts of a Case and of a call state alike, by the templates' names."""
    return {
        "block_table": call.block_table.tolist(),
        "block_table_dtype": _name(call.block_table.dtype),
        "alibi_slopes": None if call.alibi_slopes is None else call.alibi_slopes.tolist(),
        "sinks": None if call.sinks is None else call.sinks.tolist(),
        "softcap": call.softcap,
        "sliding_window": call.sliding_window,
        "query_lens": call.query_lens.tolist(),
        "num_heads": call.query.shape[1],
        "num_kv_heads": call.key.shape[1],
        "head_size": call.query.shape[2],
        "block_size": call.block_size,
        "dtype": _name(call.query.dtype),
        "k_scale": call.k_scale,
        "v_scale": call.v_scale,
        **mask_facts(call),
    }


def _sizes(call: KernelCall) -> dict[str, Any]:
    """Return the numbers of a call by the template's names."""
    return {
        **_numbers(call),
        "op": call.op,
        "first_block": 0,
        "seq_lens": call.seq_lens.tolist(),
        "starts": call.query_start_loc.tolist(),
        "scale": repr(call.query.shape[2] ** -0.5 if call.sm_scale is None else call.sm_scale),
        "sinks_dtype": None if call.sinks is None else _name(call.sinks.dtype),
        "setting": _call_setting(call),
        "op_argument": "",
    }


def _call_setting(call: KernelCall) -> str:
    """Return the features of a call as a phrase."""
    words = [
        f"{call.query.shape[1]} query heads on {call.key.shape[1]} KV heads of {call.query.shape[2]}",
        f"blocks of {call.block_size}",
        _name(call.query.dtype),
    ]
    words += [] if call.kv_cache_dtype == "auto" else [f"kv_cache_dtype {call.kv_cache_dtype}"]
    words += [f"a sliding window of {call.sliding_window}"] if call.sliding_window else []
    words += [f"mask {name}" for name in call.visibility.masks]
    words += [] if call.alibi_slopes is None else ["ALiBi"]
    words += [] if call.sinks is None else ["sinks"]
    words += [] if call.softcap is None else [f"a soft cap of {call.softcap:g}"]
    return ", ".join(words)


def _tensors(call: KernelCall, target: Target, caches: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return the tensors as text: storages, and the place of each tensor in them.

    ``caches``: key_cache and value_cache as the op gets them.
    """
    cached = cached_lens(contract(call.op, target, call.op), call).tolist()
    contexts = (call.seq_lens.long() - call.query_lens).tolist()
    held = contexts if call.new_tokens == "given" else cached
    read = paged.format_of(call, target)
    tensors = {"query": call.query, **caches}  # and what else the op gets
    if call.new_tokens == "given":
        tensors |= {"new_keys": call.key, "new_values": call.value}
    if call.before is not None:
        tensors["output"] = call.before
    far = {
        name: one for name, one in tensors.items() if one.untyped_storage().nbytes() > _MOST_HELD
    }
    near = {name: _small(one) for name, one in tensors.items() if name not in far}
    storages, stored = stored_tensors(near)
    tails, zeros, placed = _tails(far, call)
    storages, stored = {**storages, **tails}, {**stored, **placed}
    return {
        "tensors": stored,
        "zeros": zeros,
        "storages": {name: _text(one.numpy().tobytes()) for name, one in storages.items()},
        "cached": cached,
        "held": held,
        "has_new": "new_keys" in tensors,
        "flash": caches["key_cache"].dim() == 4,
        "fp8": _name(read.dtype) if read.is_fp8 else "",
    }


def _tails(
    tensors: dict[str, torch.Tensor], call: KernelCall
) -> tuple[dict[str, torch.Tensor], dict[str, int], dict[str, Stored]]:
    """Return the storages of tensors from the first block that the call names on, as uint8; how many bytes
    are before it, which hold zeros; and where each tensor is in the whole storage.

    Before each storage there is room for offsets that wrap in int32, which an interpreter would else read
    outside of its memory.
    """
    groups: dict[int, list[str]] = {}
    for name, one in tensors.items():
        groups.setdefault(one.untyped_storage().data_ptr(), []).append(name)
    first, total = int(call.block_table.min()), call.key_cache.shape[0]
    tails, zeros, placed = dict[str, torch.Tensor](), dict[str, int](), dict[str, Stored]()
    for number, names in enumerate(groups.values()):
        label, own = f"far.{number}", [tensors[name] for name in names]
        starts = [
            int(one.storage_offset() + first * (one.shape[0] // total) * one.stride(0))
            * one.itemsize
            for one in own
        ]
        everything = torch.empty(0, dtype=torch.uint8).set_(own[0].untyped_storage())
        room = (1 << 31) * max(one.itemsize for one in own)
        tails[label], zeros[label] = everything[min(starts) :].clone(), room + min(starts)
        placed |= {
            name: Stored(
                storage=label,
                dtype=_name(one.dtype),
                shape=tuple(one.shape),
                stride=tuple(one.stride()),
                offset=room // one.itemsize + int(one.storage_offset()),
            )
            for name, one in zip(names, own, strict=True)
        }
    return tails, zeros, placed


def _small(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without the rest of its storage, if that is mostly of other tensors."""
    used = tensor.numel() * tensor.element_size()
    return tensor if tensor.untyped_storage().nbytes() <= 4 * used else tensor.clone()


def _text(data: bytes) -> str:
    """Return bytes as lines of text."""
    return "\n".join(textwrap.wrap(_packed(data), 110))


def _packed(data: bytes) -> str:
    """Return bytes, compressed, in base64."""
    return base64.b64encode(zlib.compress(data, 9)).decode()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_FUNCTIONS = {"key_first", "packed", "nan_like", "True", "returned"}


def state_script(case: StateCase, source: Source, title: str) -> str:
    """Return a script that calls the op of an installed package with the call of a case, and compares its
    output and states with the recurrence in float64."""
    op, call = case.record, make_call(case)
    plan = right_plan(call)
    file = source.op_file(op.module).relative_to(source.root)
    used = set[str]().union(*map(names_in, op.arguments.values())) - _FUNCTIONS
    result = names_in(op.result) | names_in(op.states or op.final)
    names = sorted((used | result) - _FUNCTIONS - op.arguments.keys() | (used - {"states"}))
    reference = {
        **{"query": plan.query, "key": plan.key, "value": plan.value, "gate": plan.gate},
        **{"beta": plan.beta, "states": plan.states},
        "skip": torch.zeros(len(call.A_log)) if plan.skip is None else plan.skip,
    }
    stores = [one if plan.stores[i] else () for i, one in enumerate(plan.stores)]
    slots = [slot for one in stores for _, slot in one]
    return render(
        "state_repro.py.j2",
        {
            "title": f"{op.name}: {title}",
            "package": source.text(),
            "module": ".".join(file.with_suffix("").parts),
            "function": op.python_name,
            "tensors": {
                **{name: _packed_tensor(getattr(call, name)) for name in {*names, "states"}},
                **{f"ref_{name}": _packed_tensor(one) for name, one in reference.items()},
            },
            "arguments": op.arguments,
            "result": op.result,
            "states": op.states or op.final,
            "whole": bool(op.states),
            "sequences": [
                ((plan.starts[i], plan.starts[i + 1]), load, stores[i])
                for i, load in enumerate(plan.loads)
            ],
            "delta": plan.delta,
            "scale": repr(plan.scale),
            "rows": _rows(call),
            "slots": slots if op.states else call.tables[:, 0].tolist(),
        },
    )


def _rows(call: StateCall) -> list[int]:
    """Return the rows that a caller reads."""
    seqs = [seq for seq in range(call.num_seqs) if not call.skipped[seq]]
    return [row for seq in seqs for row in call.rows_of(seq)]


def _packed_tensor(value: object) -> str:
    """Return a tensor, or a number, as an expression of the script."""
    if not isinstance(value, torch.Tensor):
        return repr(value)
    data = value.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return f'tensor("{_packed(data)}", {value.dtype}, {", ".join(map(str, value.shape))})'
