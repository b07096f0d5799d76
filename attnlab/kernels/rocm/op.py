"""vLLM's torch.ops._rocm_C.paged_attention, compiled from its source for the emulated device."""

import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from attnlab.case.errors import KernelFailed, KernelRejected, Unavailable
from attnlab.case.platforms import Platform
from attnlab.kernels.rocm import device as emulated
from attnlab.kernels.rocm.adapt import Texts, adapted
from attnlab.kernels.rocm.build import CHECKED_FLAGS, OnStep, build, find_compiler
from attnlab.kernels.rocm.findings import Findings, place_of
from attnlab.kernels.rocm.guarded import guarded_tensors

PLATFORM_MACROS = {
    "gfx90a": ("__gfx90a__", "__GFX9__"),
    "gfx942": ("__gfx942__", "__GFX9__"),
    "gfx950": ("__gfx950__", "__GFX9__"),
}
_WRITES = ("out", "exp_sums", "max_logits", "tmp_out")
_SCRATCH = ("exp_sums", "max_logits", "tmp_out")
_ONE_AT_A_TIME = threading.Lock()


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceOptions:
    """How the device runs a call.

    - ``checked``: check every memory access, on one core; see :class:`Findings`.
    - ``order``: the order in which threads run: 0 ascending, 1 descending, other values seed a shuffle. If
      the output depends on it, the kernel has a race.
    - ``faults``: faults planted in the device, for tests.
    """

    checked: bool = False
    order: int = 0
    faults: tuple[str, ...] = ()


PLAIN = DeviceOptions()


@dataclass(slots=True)
class Op:
    """The op of one source on one platform; its libraries are built at the first call.

    ``root`` is the folder that contains ``csrc/``. Raises Unavailable for a platform that the device does
    not emulate.
    """

    root: Path
    platform: Platform
    _texts: Texts | None = None
    _host: emulated.Host | None = None
    _kernels: dict[tuple[str, bool], tuple[Path, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raise Unavailable for a platform that is not emulated."""
        if self.platform.name not in PLATFORM_MACROS:
            raise Unavailable(
                f"platform must be one of {', '.join(PLATFORM_MACROS)} with backend rocm, got "
                f"{self.platform.name}: its kernels need waves of 32 and other matrix instructions"
            )

    def __call__(
        self,
        arguments: Mapping[str, Any],
        options: DeviceOptions = PLAIN,
        on_step: OnStep = lambda text: None,
    ) -> Findings:
        """Call the op with ``arguments`` by name; mutate ``out`` and the scratch tensors.

        All tensors are on the CPU. ``on_step`` is called before each compilation. Returns the findings of a
        checked run, empty otherwise. Raises KernelRejected with the text of the op's host check, and
        KernelFailed if a kernel fails.
        """
        with _ONE_AT_A_TIME:
            self._load_host(on_step)
            names = self._call(arguments, emulated.no_finder()).splitlines()
            kernels = {name: self._kernel(name, options.checked, on_step) for name in names}
            emulated.prepare(options.faults, on_step)
            return self._run(arguments, options, kernels)

    def launched(self, arguments: Mapping[str, Any]) -> list[str]:
        """Return the names of the kernels that the host code launches; raise KernelRejected."""
        with _ONE_AT_A_TIME:
            self._load_host(lambda text: None)
            return self._call(arguments, emulated.no_finder()).splitlines()

    def _run(
        self,
        arguments: Mapping[str, Any],
        options: DeviceOptions,
        kernels: dict[str, tuple[Path, int]],
    ) -> Findings:
        library = emulated.device(options.faults)
        library.attnlab_begin(torch.get_num_threads(), options.checked, options.order)
        files = {name: path for name, (path, _) in kernels.items()}
        find = emulated.finder({name: entry for name, (_, entry) in kernels.items()})
        if not options.checked:
            self._call(arguments, find, library, files)
            return Findings()
        shapes = {}
        with guarded_tensors(library, arguments, ("out",)) as placed:
            for name in emulated.TENSORS:
                if (tensor := placed.get(name)) is not None:
                    shapes[name] = tuple(tensor.shape)
                    library.attnlab_region(
                        name.encode(),
                        tensor.data_ptr(),
                        tensor.untyped_storage().nbytes(),
                        tensor.element_size(),
                        name in _WRITES,
                        name in _SCRATCH,
                    )
            self._call(placed, find, library, files)
        return Findings.collect(library, files, shapes)

    def _call(
        self,
        arguments: Mapping[str, Any],
        find: Any,
        library: Any = None,
        files: Mapping[str, Path] | None = None,
    ) -> str:
        """Call the host code and return its text; raise KernelRejected or KernelFailed."""
        context = emulated.Context(
            None if library is None else library.attnlab_device(),
            64,
            self.platform.name.encode(),
            find,
        )
        assert self._host is not None
        outcome, text = self._host.call(context, emulated.Arguments.of(arguments))
        if outcome == emulated.REJECTED:
            raise KernelRejected(text)
        if outcome == emulated.ABORTED:
            raise KernelFailed(text)
        if outcome == emulated.FAILED:
            raise KernelFailed(place_of(library, files or {}))
        return text

    def _load_host(self, on_step: OnStep) -> None:
        if self._host is None:
            self._texts = adapted(self.root)
            text = f'#include "host.h"\n{self._texts.host}\n#include "call.h"\n'
            text += f"// {self.platform.family}: the source queries the device once and caches the answer\n"
            self._host = emulated.Host(build("host", text, ("-O0",), on_step))

    def _kernel(self, name: str, checked: bool, on_step: OnStep) -> tuple[Path, int]:
        """Return the library of one kernel and the kernel's address in it."""
        if (name, checked) not in self._kernels:
            if checked and not find_compiler(os.environ.get("CXX")).is_gcc:
                raise Unavailable("the checked device needs GCC: set CXX=g++")
            macros = tuple(f"-D{macro}" for macro in PLATFORM_MACROS[self.platform.name])
            flags = (*macros, *(CHECKED_FLAGS if checked else ("-O2",)))
            function = f'extern "C" void* attnlab_kernel() {{ return (void*)&{name}; }}\n'
            assert self._texts is not None
            text = f'#include "kernel.h"\n{self._texts.kernels}\n#line 1 "attnlab"\n{function}'
            short = name.partition("<")[0].removeprefix("paged_attention_ll4mi_")
            path = build(short, text, flags, on_step)
            self._kernels[name, checked] = path, emulated.entry_of(path)
        return self._kernels[name, checked]
