"""Tensors from files of other programs. Nothing in a file is executed."""

import pickle
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from attnlab.case.errors import InvalidCall


def load_torch(path: Path) -> Any:
    """Return what ``torch.save`` wrote: tensors, numbers, texts, lists and dicts.

    Raises InvalidCall for a damaged file and for one that would execute code.
    """
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
