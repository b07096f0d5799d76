"""Calls from files of other tools: which format a path has, SGLang's dumper, and plain dicts of tensors."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attnlab.case.errors import InvalidCall
from attnlab.case.ops import OPS
from attnlab.case.output_file import check_input_path
from attnlab.recorder.argument_names import NAMES, read_arguments
from attnlab.recorder.flashinfer_dump import METADATA, read_flashinfer
from attnlab.recorder.reading import call_of_reading
from attnlab.recorder.safe_files import load_tensors, load_torch
from attnlab.tensors.call import KernelCall
from attnlab.tensors.call_file import is_call_file
from attnlab.tensors.origin import Origin


def read_call(
    path: Path, names: Mapping[str, str] | None = None, *, op: str | None = None
) -> KernelCall:
    """Return the call in a file or folder; the format is found out.

    - A file of :meth:`KernelCall.save`.
    - A folder of FlashInfer's level-10 log, with metadata.jsonl.
    - Files of SGLang's dumper, ``{"value": …, "meta": …}``: a folder with one step and layer, or one of the
      files, which stands for those with the same step, rank and layer.
    - A dict of tensors and numbers, as .pt, .npz or safetensors.

    ``names``: for the last two, the key of each field, for example {"query": "q"}; a number instead of a
    key is the value itself. Without it, fields are found by the names that vLLM, FlashAttention and
    FlashInfer use. ``op``: the op that describes the call.

    Nothing in a file is executed. Raises InvalidCall with one line.
    """
    path, names = Path(path), dict(names or {})
    _check_names(names)
    if op is not None and op not in OPS:
        raise InvalidCall(f"op must be one of {', '.join(OPS)}, got {op!r}", field="op")
    if path.is_dir():
        if (path / METADATA).exists():
            return read_flashinfer(path)
        values, origin = _sglang_folder(path)
        return _of_dict(path, values, names, origin, op)
    check_input_path(path)
    if path.suffix not in (".pt", ".pth", ".bin", ".npz") and is_call_file(path):
        call = KernelCall.load(path)
        return call if op is None else dataclasses.replace(call, op=op)
    if path.suffix not in (".pt", ".pth", ".bin", ".npz") and not names:
        return _own_or_dict(path, op)
    values = load_tensors(path)
    if set(values) == {"value", "meta"}:
        values, origin = _sglang_group(path.parent, _key_of(path, values["meta"]))
        return _of_dict(path, values, names, origin, op)
    return _of_dict(path, values, names, Origin(), op)


def _own_or_dict(path: Path, op: str | None) -> KernelCall:
    """Return the call of a safetensors file without attnlab's document."""
    return _of_dict(path, load_tensors(path), {}, Origin(), op)


def parse_names(text: str) -> dict[str, str]:
    """Return {"query": "q", …} of "query=q,…". Raises InvalidCall."""
    names = {}
    for word in text.split(","):
        field, equals, key = word.partition("=")
        if not (equals and field and key):
            raise InvalidCall(f"map must be FIELD=KEY,…, got {word!r:.60}", field="map")
        names[field.strip()] = key.strip()
    _check_names(names)
    return names


def _check_names(names: Mapping[str, str]) -> None:
    for field in names:
        if field not in NAMES:
            raise InvalidCall(f"map must name {', '.join(NAMES)}, got {field!r:.60}", field="map")


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
        raise InvalidCall(f"{path}: {error}", field=error.field) from error


def _number(path: Path, field: str, key: str, values: Mapping[str, Any]) -> Any:
    """Return the value of a map's entry that is no key: a number, or the name of a layout or dtype."""
    if field in ("layout", "kv_cache_dtype", "op"):
        return key
    try:
        return int(key) if key.lstrip("-").isdigit() else float(key)
    except ValueError:
        text = f"map must name keys of {path} ({', '.join(map(str, values))})"
        raise InvalidCall(f"{text}, got {field}={key}", field="map") from None


# SGLang's dumper: one file per tensor.


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
    for path in sorted(folder.glob("*.pt"), key=lambda path: _index(path)):
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
