"""Subjects of the sanitizer: the lab's models, a vLLM, or somebody's own function."""

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from attnlab.call import KernelCall
from attnlab.case import KV_CACHE_DTYPES, LIBRARY_OPS, OPS, RELEASES, Case
from attnlab.errors import AttnLabError, InvalidCase, KernelFailed, KernelRejected, Unavailable
from attnlab.kernels.presented import strided
from attnlab.kernels.source import find_source
from attnlab.run import Lab


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ran:
    """What a run left: the output, what the interpreter saw of it, and what the op gave beside it."""

    output: torch.Tensor
    outside: tuple[str, ...] = ()
    wraps: tuple[str, ...] = ()
    lse: torch.Tensor | None = None
    padded: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """Whose kernels are looked at; it can be sent to another process.

    - ``origin``: "model", "vllm", or "plugin".
    - ``source``: the vLLM's path, or "FILE.py:FUNCTION" of a plugin; None is the installed vLLM.
    - ``release``: the rules that hold; ``version``: in words.
    - ``ops``, ``kv_cache_dtypes``: what it is run with.
    """

    origin: str
    source: str | None
    release: str
    version: str
    ops: tuple[str, ...]
    kv_cache_dtypes: tuple[str, ...] = KV_CACHE_DTYPES

    def run(self, lab: Lab, case: Case) -> Ran:
        """Run a Case; raises KernelRejected or KernelFailed with what the kernel raised, Unavailable where
        it says NotImplementedError."""
        if self.origin == "plugin":
            call = strided(lab.call(case))
            try:
                _function(str(self.source))(call)
            except AttnLabError:
                raise
            except NotImplementedError as error:
                raise Unavailable(f"{self.version} does not know it: {error}") from error
            except Exception as error:
                raise KernelFailed(f"{type(error).__name__}: {error}") from error
            return Ran(output=call.output)
        result = lab.run(case)
        if result.error is not None and self.origin == "vllm" and not result.failed:
            raise Unavailable(f"it refuses a case by itself: {result.error}")
        if result.error is not None:
            raise KernelRejected(result.error)
        return Ran(
            output=result.call.output,
            outside=result.outside,
            wraps=result.wraps,
            lse=result.lse,
            padded=result.padded,
        )


def models(release: str) -> Subject:
    """Return the lab's own models under a release's rules."""
    return Subject(
        origin="model",
        source=None,
        release=release,
        version=f"models of {release}",
        ops=LIBRARY_OPS,
    )


def vllm(path: Path | None) -> Subject:
    """Return the vLLM at ``path``, or the installed one; its ops are those that it has."""
    found = find_source(path)
    return Subject(
        origin="vllm",
        source=None if path is None else str(path),
        release=found.rules or "0.33.0",
        version=found.text(),
        ops=LIBRARY_OPS,
    )


def plugin(name: str) -> Subject:
    """Return somebody's function, "FILE.py:FUNCTION".

    It takes a KernelCall and writes ``call.output``. Its attribute ``op`` names the op that it is held to,
    chunked_prefill_paged_decode where it has none; ``kv_cache_dtypes`` those that it knows, all where it
    has none. Raises InvalidCase for what is no such name.
    """
    function = _function(name)
    op = getattr(function, "op", OPS[0])
    if op not in LIBRARY_OPS:
        raise InvalidCase(f"{name}: its op must be one of {', '.join(LIBRARY_OPS)}, got {op!r}")
    known = tuple(getattr(function, "kv_cache_dtypes", KV_CACHE_DTYPES))
    return Subject(
        origin="plugin",
        source=name,
        release=RELEASES[-1],
        version=name,
        ops=(op,),
        kv_cache_dtypes=known,
    )


_LOADED: dict[str, Callable[[KernelCall], Any]] = {}


def _function(name: str) -> Callable[[KernelCall], Any]:
    """Return the function of "FILE.py:FUNCTION", its file run once."""
    if name in _LOADED:
        return _LOADED[name]
    file, _, attribute = name.rpartition(":")
    if not file.endswith(".py") or not Path(file).is_file():
        raise InvalidCase(f"kernel must be FILE.py:FUNCTION of a file that exists, got {name!r}")
    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")  # before the file imports Triton
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise InvalidCase(f"{file} cannot run: {type(error).__name__}: {error}") from error
    found = getattr(module, attribute, None)
    if not callable(found):
        raise InvalidCase(f"{file} must have a function {attribute!r}")
    _LOADED[name] = found
    return _LOADED[name]
