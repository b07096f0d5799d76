"""The file of a KernelCall: a safetensors file with storages, and in its metadata a JSON document.

safetensors does not keep strides. So a file of format 2 holds each storage as a one-dimensional uint8 tensor,
and the document has the dtype, shape, stride and offset of every tensor in its storage. Tensors that share
memory share a storage. A file of format 1 holds contiguous tensors and a document without a format number.
docs/call-file.md describes the document; docs/call-file.schema.json is its JSON schema.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from attnlab.case.errors import InvalidCall, InvalidCase
from attnlab.case.output_file import replacing
from attnlab.tensors.storage import Stored, stored_tensors, tensor_of

FORMAT = 2
_KEY = "attnlab_call"  # of the metadata


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CallFile:
    """The contents of a file: ``format``, ``scalars``, ``tensors`` and ``origin``, each by field name.

    ``names_missing``: the file states which tensors were not recorded. An older one does not, and its output
    of NaN alone may stand for none.
    """

    format: int
    scalars: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    origin: dict[str, Any]
    names_missing: bool = False


def write(
    path: Path,
    scalars: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    origin: Mapping[str, Any],
    *,
    missing: Sequence[str] = (),
) -> None:
    """Write a file of format 2; it is replaced at once. ``missing``: the tensors that were not recorded.

    Raises InvalidCall if it cannot be written.
    """
    storages, stored = stored_tensors(tensors)
    document = {
        "format": FORMAT,
        "scalars": dict(scalars),
        "tensors": {name: one.to_dict() for name, one in stored.items()},
        "origin": dict(origin),
        "missing": list(missing),
    }
    try:
        with replacing(Path(path)) as part:
            save_file(storages, part, metadata={_KEY: json.dumps(document)})
    except (InvalidCase, SafetensorError) as error:
        raise InvalidCall(f"{path} must be a file to write to: {error}") from error


def read(path: Path) -> CallFile:
    """Return what a file of format 1 or 2 holds. Raises InvalidCall with one line."""
    try:
        with safe_open(path, framework="pt") as file:
            document = json.loads((file.metadata() or {})[_KEY])
            raw = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise InvalidCall(f"{path} must be a saved KernelCall: {_line(error)}") from error
    if not isinstance(document, dict):
        raise InvalidCall(f"{path} must be a saved KernelCall: its document is not an object")
    if "format" not in document:
        return CallFile(format=1, scalars=document, tensors=raw, origin={})
    if document["format"] != FORMAT:
        text = f"{path} must be of format 1 or {FORMAT}, got {document['format']!r:.40}"
        raise InvalidCall(f"{text}; a newer attnlab wrote it", field="format")
    return _of_document(path, document, raw)


def is_call_file(path: Path) -> bool:
    """Answer whether a file is a safetensors file with the document of a KernelCall."""
    try:
        with safe_open(path, framework="pt") as file:
            return _KEY in (file.metadata() or {})
    except (OSError, SafetensorError):
        return False


def _of_document(path: Path, document: dict[str, Any], raw: dict[str, torch.Tensor]) -> CallFile:
    parts: dict[str, dict[str, Any]] = {}
    for name in ("scalars", "tensors", "origin"):
        part = document.get(name)
        if not isinstance(part, dict):
            raise InvalidCall(f"{path} must have an object {name}, got {part!r:.60}", field=name)
        parts[name] = part
    storages = {name: tensor.clone() for name, tensor in raw.items()}  # each in memory of its own
    tensors = {}
    for name, entry in parts["tensors"].items():
        try:
            tensors[name] = tensor_of(Stored.of_dict(entry), storages)
        except InvalidCall as error:
            raise InvalidCall(f"{path}: tensor {name}: {error}", field=name) from error
    return CallFile(
        format=FORMAT,
        scalars=parts["scalars"],
        tensors=tensors,
        origin=parts["origin"],
        names_missing="missing" in document,
    )


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
