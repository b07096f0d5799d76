"""vLLM's torch.ops._rocm_C.paged_attention: its own source on the emulated device."""

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
from attnlab.kernels.rocm.guarded import apart

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

    - ``checked``: every access to memory is looked at, on one core; see :class:`Findings`.
    - ``order``: the order in which threads take turns: 0 forwards, 1 backwards, else the seed of a
      shuffle. A race shows where the output depends on it.
    - ``faults``: faults planted in the device, for the tests.
    """

    checked: bool = False
    order: int = 0
    faults: tuple[str, ...] = ()


PLAIN = DeviceOptions()


@dataclass(slots=True)
class Op:
    """The op of one source on one platform; what it needs is built when it is first called.

    ``root`` is the folder that holds ``csrc/``. Raises Unavailable for a platform whose kernels need
    what the device does not have.
    """

    root: Path
    platform: Platform
    _texts: Texts | None = None
    _host: emulated.Host | None = None
    _kernels: dict[tuple[str, bool], tuple[Path, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse a platform that is not emulated."""
        if self.platform.name not in PLATFORM_MACROS:
            raise Unavailable(
                f"the emulated device is a gfx9 with waves of 64: {', '.join(PLATFORM_MACROS)}; the "
                f"kernels of {self.platform.name} need waves of 32 and other matrix instructions"
            )

    def __call__(
        self,
        arguments: Mapping[str, Any],
        how: DeviceOptions = PLAIN,
        on_step: OnStep = lambda text: None,
    ) -> Findings:
        """Call the op with its ``arguments`` by name; write its output into ``out``.

        Tensors lie on the CPU; ``on_step`` is told what is built. Returns what a checked run found,
        empty otherwise. Raises KernelRejected with the host code's own text where it refuses,
        KernelFailed where a kernel breaks.
        """
        with _ONE_AT_A_TIME:
            self._load_host(on_step)
            names = self._call(arguments, emulated.no_finder()).splitlines()
            kernels = {name: self._kernel(name, how.checked, on_step) for name in names}
            emulated.prepare(how.faults, on_step)
            return self._run(arguments, how, kernels)

    def launched(self, arguments: Mapping[str, Any]) -> list[str]:
        """Return the kernels that the host code launches, by name; raise KernelRejected."""
        with _ONE_AT_A_TIME:
            self._load_host(lambda text: None)
            return self._call(arguments, emulated.no_finder()).splitlines()

    def _run(
        self, arguments: Mapping[str, Any], how: DeviceOptions, kernels: dict[str, tuple[Path, int]]
    ) -> Findings:
        library = emulated.device(how.faults)
        library.attnlab_begin(torch.get_num_threads(), how.checked, how.order)
        files = {name: path for name, (path, _) in kernels.items()}
        find = emulated.finder({name: entry for name, (_, entry) in kernels.items()})
        if not how.checked:
            self._call(arguments, find, library, files)
            return Findings()
        shapes = {}
        with apart(library, arguments, ("out",)) as placed:
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
        """Call the host code; raise what it or the device raises."""
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
            text += f"// {self.platform.family}: the source keeps what it asks the device once\n"
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
