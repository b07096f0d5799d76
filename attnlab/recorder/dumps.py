"""Tensors from files of other programs. Nothing in a file is executed."""

import dataclasses
import json
import math
import pickle
import warnings
import zipfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from attnlab.case.errors import InvalidCall
from attnlab.case.ops import OPS, UNIFIED
from attnlab.case.output_file import check_input_path
from attnlab.kernels.by_name import NAMES
from attnlab.recorder.arguments import Reading, call_of_reading, read_arguments
from attnlab.recorder.ops import WRAPPERS, other_ops, read_wrapper
from attnlab.tensors.call import KernelCall, Origin
from attnlab.tensors.call_file import is_call_file


def load_torch(path: Path) -> Any:
    """Return what ``torch.save`` wrote: tensors, numbers, texts, lists and dicts."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of other pickle protocols; the error says enough
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if "Unsupported" in str(error) or "GLOBAL" in str(error):
            text = f"{path} must hold only tensors and plain values: loading it would execute code"
            raise InvalidCall(text) from error
        raise InvalidCall(f"{path} must be a whole file of torch.save: {_line(error)}") from error
    except (OSError, RuntimeError, EOFError, ValueError, KeyError, TypeError) as error:
        raise InvalidCall(f"{path} must be a whole file of torch.save: {_line(error)}") from error


def load_npz(path: Path) -> dict[str, Any]:
    """Return the arrays of an .npz file as tensors. Raises InvalidCall; object arrays are refused."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as held:
            arrays = {name: held[name] for name in held.files}
        return {name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}
    except (OSError, ValueError, TypeError, EOFError, KeyError, zipfile.BadZipFile) as error:
        raise InvalidCall(f"{path} must be a whole .npz file of numbers: {_line(error)}") from error


def load_safetensors(path: Path) -> dict[str, Any]:
    """Return the tensors of a safetensors file. Raises InvalidCall."""
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise InvalidCall(f"{path} must be a whole safetensors file: {_line(error)}") from error


def load_tensors(path: Path) -> dict[str, Any]:
    """Return the dict in a .pt, .npz or safetensors file; the end of the name decides."""
    if path.suffix == ".npz":
        return load_npz(path)
    if path.suffix in (".pt", ".pth", ".bin"):
        found = load_torch(path)
        if not isinstance(found, dict):
            raise InvalidCall(f"{path} must hold a dict, got {type(found).__name__}")
        return found
    return load_safetensors(path)


def _line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 160 else text[:159] + "…"


# Calls from FlashInfer's level-10 log: a folder per call, with metadata.jsonl, inputs.pt and outputs.pt.
#
# Tensors have the keys ``arg_0``, …, ``kwarg_name``, ``result`` or ``result_0``, …; other arguments are in
# the metadata under the same keys, and so is the function's signature (flashinfer/api_logging.py). A
# wrapper's call is spread over three folders with the same process_id and self_id: ``__init__``, ``plan``
# and ``run``.

METADATA = "metadata.jsonl"


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


def read_flashinfer(folder: Path) -> KernelCall:
    """Return the call in a folder of FlashInfer's log. Raises InvalidCall with one line."""
    dump = _dump(folder)
    class_, _, method = dump.function.rpartition(".")
    if class_ in WRAPPERS and method in ("run", "forward"):
        reading = _wrapper_reading(dump)
    else:
        found_ops = (op for op in other_ops() if op.module.startswith("flashinfer"))
        known = {op.function: op for op in found_ops if "." not in op.function}
        if dump.function not in known:
            names = ", ".join([*known, *(f"{name}.run" for name in WRAPPERS)])
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
    for path in (folder / f"{kind}.pt", folder / f"{kind}.safetensors"):
        if path.exists():
            return load_tensors(path)
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
    layout = "NHD" if made is None else made.arguments.get("kv_layout", "NHD")
    given = {**plan.arguments, **run.arguments, "kv_layout": layout}
    reading = Reading(fields={})
    read_wrapper(given, reading)
    if reading.why_not:
        raise InvalidCall(f"{run.folder} must be a call with pages: {reading.why_not}")
    return reading


def _before(run: Dump, method: str, *, required: bool = True) -> Any:
    """Return the last call of a method of the same wrapper before ``run``. Folders are named by time."""
    class_ = run.function.rpartition(".")[0]
    for folder in sorted(run.folder.parent.iterdir(), reverse=True):
        if folder.name >= run.folder.name or not (folder / METADATA).exists():
            continue
        record = _last_record(folder / METADATA)
        is_own = all(record.get(name) == run.record.get(name) for name in ("process_id", "self_id"))
        if record.get("function_name") == f"{class_}.{method}" and is_own:
            return _dump(folder)
    if required:
        text = (
            f"{run.folder.parent} must hold the call of {class_}.{method} before {run.folder.name}"
        )
        raise InvalidCall(text)
    return None


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


# Calls from files of other tools: which format a path has, SGLang's dumper, and plain dicts of tensors.


def read_call(
    path: Path | str, names: Mapping[str, str] | None = None, *, op: str | None = None
) -> KernelCall:
    """Return the call in a file or folder; the format is found out.

    - A file of :meth:`KernelCall.save`.
    - A folder of FlashInfer's level-10 log, with metadata.jsonl.
    - Files of SGLang's dumper, ``{"value": …, "meta": …}``: a folder with one step and layer, or one of the
      files, which stands for those with the same step, rank and layer.
    - A dict of tensors and numbers, as .pt, .npz or safetensors.

    ``names``: for the last two, the key of each field, for example {"query": "q"}; a number instead of a
    key is the value itself. Other fields are found by the names that vLLM, FlashAttention and FlashInfer
    use. ``op``: the op that describes the call.

    Nothing in a file is executed. Raises InvalidCall with one line.
    """
    path, names = Path(path), dict(names or {})
    _check_names(names)
    if op is not None and op not in OPS:
        raise InvalidCall(f"op must be one of {', '.join(OPS)}, got {op!r}")
    if path.is_dir():
        if (path / METADATA).exists():
            _check_no_names(path, names, ())
            return read_flashinfer(path)
        values, origin = _sglang_folder(path)
        return _of_dict(path, values, names, origin, op)
    check_input_path(path)
    if path.suffix not in (".pt", ".pth", ".bin", ".npz") and is_call_file(path):
        call = KernelCall.load(path)
        _check_no_names(path, names, [one for one in NAMES if getattr(call, one, None) is not None])
        return call if op is None else dataclasses.replace(call, op=op)
    values = load_tensors(path)
    if set(values) == {"value", "meta"}:
        values, origin = _sglang_group(path.parent, _key_of(path, values["meta"]))
        return _of_dict(path, values, names, origin, op)
    return _of_dict(path, values, names, Origin(), op)


def parse_names(text: str) -> dict[str, str]:
    """Return {"query": "q", …} of "query=q,…". Raises InvalidCall."""
    names = {}
    for word in text.split(","):
        field, equals, key = word.partition("=")
        if not (equals and field and key):
            raise InvalidCall(f"map must be FIELD=KEY,…, got {word!r:.60}")
        names[field.strip()] = key.strip()
    _check_names(names)
    return names


def _check_names(names: Mapping[str, str]) -> None:
    for field in names:
        if field not in NAMES:
            raise InvalidCall(f"map must name {', '.join(NAMES)}, got {field!r:.60}")


def _check_no_names(path: Path, names: Mapping[str, str], keys: Collection[str]) -> None:
    """Raise InvalidCall if names are given for a file that names its own fields."""
    if names:
        own = f": {', '.join(keys)}" if keys else ""
        raise InvalidCall(f"map must not be given with {path}, which names its own fields{own}")


def _of_dict(
    path: Path, values: Mapping[str, Any], names: Mapping[str, str], origin: Origin, op: str | None
) -> KernelCall:
    """Return the call of tensors and numbers by name."""
    arguments = {key: value for key, value in values.items() if key not in names.values()}
    for field, key in names.items():
        arguments[field] = values[key] if key in values else _number(path, field, key, values)
    reading = read_arguments(arguments)
    try:
        return call_of_reading(reading, origin, op=op)
    except InvalidCall as error:
        keys = f"; its keys are {', '.join(map(str, values))}" if names else ""
        raise InvalidCall(f"{path}: {error}{keys}", field=error.field) from error


def _number(path: Path, field: str, key: str, values: Mapping[str, Any]) -> Any:
    """Return the value of a map's entry that is no key: a number, or the name of a layout or dtype."""
    if field in ("layout", "kv_cache_dtype", "op"):
        return key
    try:
        return int(key) if key.lstrip("-").isdigit() else float(key)
    except ValueError:
        text = f"map must name keys of {path} ({', '.join(map(str, values))})"
        raise InvalidCall(f"{text}, got {field}={key}") from None


def _sglang_folder(folder: Path) -> tuple[dict[str, Any], Origin]:
    """Return the values of a folder that holds one step, rank and layer."""
    keys = {_key_of(path, _sglang_file(path)["meta"]) for path in sorted(folder.glob("*.pt"))}
    if not keys:
        text = f"{folder} must hold {METADATA} or files of SGLang's dumper (*.pt), got neither"
        raise InvalidCall(text)
    if len(keys) > 1:
        shown = "; ".join(
            ", ".join(f"{n} {v}" for n, v in key) for key in sorted(map(tuple, keys), key=str)[:3]
        )
        text = f"{folder} must hold one step and layer, got {len(keys)} ({shown}; …)"
        raise InvalidCall(f"{text}; give one of its files instead")
    return _sglang_group(folder, keys.pop())


def _sglang_group(folder: Path, key: tuple[tuple[str, Any], ...]) -> tuple[dict[str, Any], Origin]:
    """Return the values with a key, by name, the last of each name; and their origin."""
    values = {}
    for path in sorted(folder.glob("*.pt"), key=_index):
        held = _sglang_file(path)
        if _key_of(path, held["meta"]) == key:
            values[str(held["meta"]["name"])] = held["value"]
    known = dict(key)
    layer = known.get("layer_id")
    origin = Origin(
        program="sglang",
        step=known.get("step"),
        rank=known.get("rank"),
        layer=None if layer is None else str(layer),
    )
    return values, origin


def _sglang_file(path: Path) -> dict[str, Any]:
    held = load_torch(path)
    if not isinstance(held, dict) or not isinstance(held.get("meta"), dict) or "value" not in held:
        raise InvalidCall(f"{path} must hold value and meta, as SGLang's dumper writes them")
    return held


def _index(path: Path) -> int:
    index = _sglang_file(path)["meta"].get("dump_index", 0)
    return index if isinstance(index, int) else 0


def _key_of(path: Path, meta: Any) -> tuple[tuple[str, Any], ...]:
    """Return (step, rank, layer_id) of a file as pairs; those that it does not have are left out."""
    if not isinstance(meta, dict) or "name" not in meta:
        raise InvalidCall(f"{path} must have a name in its meta, got {meta!r:.60}")
    found = [(name, meta[name]) for name in ("step", "rank", "layer_id") if name in meta]
    for name, value in found:
        if value is not None and type(value) is not int:
            raise InvalidCall(f"{path} must have a whole number as {name}, got {value!r:.60}")
    return tuple(found)
