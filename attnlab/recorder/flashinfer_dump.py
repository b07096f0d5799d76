"""Calls from FlashInfer's level-10 log: a folder per call, with metadata.jsonl, inputs.pt and outputs.pt.

Tensors have the keys ``arg_0``, …, ``kwarg_name``, ``result`` or ``result_0``, …; other arguments are in the
metadata under the same keys, and so is the function's signature (flashinfer/api_logging.py). A wrapper's call
is spread over three folders with the same process_id and self_id: ``__init__``, ``plan`` and ``run``.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from attnlab.case.errors import InvalidCall
from attnlab.case.ops import UNIFIED
from attnlab.recorder.argument_names import Reading
from attnlab.recorder.other_ops import other_ops
from attnlab.recorder.reading import call_of_reading
from attnlab.recorder.safe_files import load_safetensors, load_torch
from attnlab.tensors.call import KernelCall
from attnlab.tensors.origin import Origin

METADATA = "metadata.jsonl"
_WRAPPERS = ("BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Dump:
    """One folder: the last record of its metadata, and its arguments by the parameters' names."""

    folder: Path
    record: Mapping[str, Any]
    arguments: dict[str, Any]

    @property
    def function(self) -> str:
        """Return the name of the function, "Class.method" for a method."""
        return str(self.record.get("function_name", ""))

    @property
    def owner(self) -> tuple[Any, Any]:
        """Return what is equal for all calls of one wrapper."""
        return self.record.get("process_id"), self.record.get("self_id")


def read_flashinfer(folder: Path) -> KernelCall:
    """Return the call in a folder of FlashInfer's log. Raises InvalidCall with one line."""
    dump = _dump(folder)
    class_, _, method = dump.function.rpartition(".")
    if class_ in _WRAPPERS and method in ("run", "forward"):
        reading = _wrapper_reading(dump)
    else:
        known = {op.function: op for op in other_ops() if op.module.startswith("flashinfer")}
        if dump.function not in known:
            names = ", ".join([*known, *(f"{name}.run" for name in _WRAPPERS)])
            raise InvalidCall(f"{folder} must be a call of {names}, got {dump.function!r:.80}")
        found = known[dump.function].read(dump.arguments)
        if found is None:
            raise InvalidCall(f"{folder} must hold query, kv_cache, block_tables and seq_lens")
        reading = found
    _add_result(dump, reading)
    versions = dump.record.get("versions", {})
    release = versions.get("flashinfer") if isinstance(versions, dict) else None
    name = f"{dump.record.get('module', 'flashinfer')}.{dump.function}"
    origin = Origin(op=name, program="flashinfer", release=release)
    return call_of_reading(reading, origin, op=UNIFIED)


def _dump(folder: Path) -> Dump:
    record = _last_record(folder / METADATA)
    tensors = _tensors(folder, "inputs")
    arguments = record.get("input_metadata")
    names = _parameters(str(record.get("function_signature", "")))
    if not isinstance(arguments, dict):
        raise InvalidCall(f"{folder / METADATA} must have input_metadata, got {arguments!r:.60}")
    values = {key: _value(value, tensors) for key, value in arguments.items()} | {
        key: value for key, value in tensors.items() if "__" not in key
    }
    found = {}
    for key, value in values.items():
        kind, _, rest = key.partition("_")
        if kind == "kwarg":
            found[rest] = value
        elif kind == "arg" and rest.isdigit() and int(rest) < len(names):
            found[names[int(rest)]] = value
    return Dump(folder=folder, record=record, arguments=found)


def _last_record(path: Path) -> dict[str, Any]:
    """Return the last line of a JSON-lines file: it is the most complete."""
    try:
        lines = [line for line in path.read_text().splitlines() if line.strip()]
        record = json.loads(lines[-1])
    except (OSError, UnicodeDecodeError, ValueError, IndexError) as error:
        raise InvalidCall(f"{path} must have a JSON object on its last line: {error}") from error
    if not isinstance(record, dict):
        raise InvalidCall(f"{path} must have a JSON object on its last line, got {record!r:.60}")
    return record


def _tensors(folder: Path, kind: str) -> dict[str, Any]:
    """Return the tensors of inputs or outputs; none if there is no such file."""
    if (folder / f"{kind}.pt").exists():
        found = load_torch(folder / f"{kind}.pt")
        if not isinstance(found, dict):
            raise InvalidCall(f"{folder / kind}.pt must hold a dict, got {type(found).__name__}")
        return found
    if (folder / f"{kind}.safetensors").exists():
        return load_safetensors(folder / f"{kind}.safetensors")
    return {}


def _parameters(signature: str) -> list[str]:
    """Return the names of positional parameters of "(self, q: torch.Tensor, n: int = 1, *, …)"."""
    names, depth, start = [], 0, 1
    for position, character in enumerate(signature):
        depth += (character in "([{") - (character in ")]}")
        ends = depth == 0 or (depth == 1 and character == ",")
        if ends and position >= start:
            name = signature[start:position].partition(":")[0].partition("=")[0].strip()
            start = position + 1
            if name.startswith("*"):
                break
            if name and name != "/":
                names.append(name)
        if depth == 0 and position:
            break
    return names


def _value(value: Any, tensors: Mapping[str, Any]) -> Any:
    """Return an argument of the metadata; lists and tuples may hold tensors of the file."""
    if not isinstance(value, dict):
        return value
    if value.get("type") == "torch.Tensor":
        return tensors.get(str(value.get("tensor_key")))
    if value.get("type") in ("tuple", "list") and isinstance(value.get("items"), list):
        return tuple(_value(item, tensors) for item in value["items"])
    return None


def _wrapper_reading(run: Dump) -> Reading:
    """Return the reading of a wrapper's run, with the page table of its last plan."""
    plan = _before(run, "plan")
    made = _before(run, "__init__", required=False)
    given = {**plan.arguments, **run.arguments}
    pages = _pages(plan)
    query, cache = given.get("q"), given.get("paged_kv_cache")
    if isinstance(cache, torch.Tensor):
        cache = cache.unbind(1)
    if not isinstance(query, torch.Tensor) or not isinstance(cache, (tuple, list)):
        raise InvalidCall(f"{run.folder} must hold the tensors q and paged_kv_cache")
    layout = "NHD" if made is None else made.arguments.get("kv_layout", "NHD")
    window = given.get("window_left", -1)
    scales = [given.get(name) for name in ("q_scale", "k_scale")]
    sm_scale = given.get("sm_scale") or query.shape[-1] ** -0.5
    is_fp8 = cache[0].dtype.itemsize == 1
    reading = Reading(
        fields={
            **pages,
            "query": query,
            "key_cache": cache[0],
            "value_cache": cache[1],
            "sm_scale": sm_scale * math.prod(1.0 if scale is None else scale for scale in scales),
            "v_scale": given.get("v_scale") if is_fp8 else None,
            "sliding_window": 0 if window is None or window < 0 else window + 1,
            "softcap": given.get("logits_soft_cap"),
            "sinks": given.get("sinks"),
            "causal": True if "qo_indptr" not in given else bool(given.get("causal")),
            "layout": "HND" if layout == "HND" else "flash",
        }
    )
    neutral = {"custom_mask": None, "packed_custom_mask": None, "pos_encoding_mode": "NONE"}
    for name, value in neutral.items():
        if given.get(name, value) is not value and given.get(name) != value:
            reading.unmodelled.append(name)
    if query.dtype.itemsize == 1:
        reading.unmodelled.append("query in FP8")  # how weights are rounded is not documented
    if not is_fp8 and given.get("v_scale") not in (None, 1, 1.0):
        reading.unmodelled.append("v_scale")
    return reading


def _before(run: Dump, method: str, *, required: bool = True) -> Any:
    """Return the last call of a method of the same wrapper before ``run``. Folders are named by time."""
    class_ = run.function.rpartition(".")[0]
    for folder in sorted(run.folder.parent.iterdir(), reverse=True):
        if folder.name >= run.folder.name or not (folder / METADATA).exists():
            continue
        record = _last_record(folder / METADATA)
        owner = record.get("process_id"), record.get("self_id")
        if record.get("function_name") == f"{class_}.{method}" and owner == run.owner:
            return _dump(folder)
    if required:
        text = (
            f"{run.folder.parent} must hold the call of {class_}.{method} before {run.folder.name}"
        )
        raise InvalidCall(text)
    return None


def _pages(plan: Dump) -> dict[str, torch.Tensor]:
    """Return block_table, seq_lens and query_start_loc of a plan's lists of pages."""
    given = plan.arguments
    starts = given.get("paged_kv_indptr", given.get("indptr"))
    pages = given.get("paged_kv_indices", given.get("indices"))
    last = given.get("paged_kv_last_page_len", given.get("last_page_len"))
    size = given.get("page_size")
    if (
        not isinstance(starts, torch.Tensor)
        or not isinstance(pages, torch.Tensor)
        or not isinstance(last, torch.Tensor)
        or not isinstance(size, int)
    ):
        raise InvalidCall(f"{plan.folder} must hold the pages of the plan and their size")
    starts, last = starts.long(), last.long()
    if starts.dim() != 1 or last.shape != (len(starts) - 1,) or int(starts[-1]) > len(pages):
        raise InvalidCall(f"{plan.folder} must hold a page list that fits its indptr")
    counts = starts.diff()
    table = torch.zeros(len(counts), max(1, int(counts.max())), dtype=torch.int32)
    for seq, count in enumerate(counts.tolist()):
        table[seq, :count] = pages[int(starts[seq]) : int(starts[seq]) + count]
    lens = torch.where(counts > 0, (counts - 1) * int(size) + last, 0).int()
    found = {"block_table": table, "seq_lens": lens}
    if isinstance(given.get("qo_indptr"), torch.Tensor):
        found["query_start_loc"] = given["qo_indptr"]
    return found


def _add_result(dump: Dump, reading: Reading) -> None:
    """Add the output that the call returned; FlashInfer's log-sum-exp is to base 2."""
    results = _tensors(dump.folder, "outputs")
    output = results.get("result", results.get("result_0"))
    if output is None:
        status = dump.record.get("execution_status", "unknown")
        text = f"{dump.folder} must hold an output, got none (execution_status {status})"
        raise InvalidCall(text, field="output")
    reading.fields["output"] = output
    reading.fields.pop("lse", None)
    lse = results.get("result_1")
    if isinstance(lse, torch.Tensor) and lse.dim() == 2:
        reading.fields["lse"] = lse * math.log(2)
