"""Load only the attention ops of vLLM or another package, each module with a private ``import``.

An import statement calls ``__import__`` from the builtins of its module. The loader replaces that function
for op modules: those of the package (and, on a CPU, torch and Triton) come from a private table of op modules
of the same source and stubs. So an installed package stays unchanged, sys.modules has nothing new afterwards,
several releases can be loaded in one process, and a module that fails to load leaves nothing in sys.modules.
"""

import ast
import builtins
import contextlib
import functools
import importlib.util
import inspect
import linecache
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from attnlab.case.errors import Unavailable
from attnlab.case.platforms import Platform
from attnlab.kernels.triton.coverage import mark_functions, marks
from attnlab.kernels.vllm.source import Source
from attnlab.library.op import Package
from attnlab.tensors.formats import FORMATS

# Stubs of vLLM's declared kernels (vllm/model_executor/warmup, 0.33.0): a class with a kernel.
#
# vLLM's ``__call__`` returns the grid and some arguments by name; the others have the names of its own
# parameters, with or without "_ptr". The stub launches the kernel with them, without vLLM's warm-up and
# caches.

WARMUP = "vllm.model_executor.warmup"


def warmup_stubs() -> dict[str, dict[str, Any]]:
    """Return the contents of the stub modules, by dotted name."""
    return {
        f"{WARMUP}.jit_warmup": {
            "WarmupIntRange": lambda *args, **kwargs: None,
            "kernel_launcher": _launcher,
        },
        f"{WARMUP}.jit_warmup_triton_helper": {
            "LaunchSpec": tuple,
            "TritonWarmupTensor": lambda *args, **kwargs: None,
            "VllmTritonJitKernel": _DeclaredKernel,
            "triton_scalar_specialization_rep": lambda value: value,
        },
    }


class _DeclaredKernel:
    """Replace VllmTritonJitKernel."""

    def __class_getitem__(cls, key: Any) -> type:
        return cls


def _launcher(declare: Callable[..., Any]) -> Callable[..., None]:
    """Return a method that launches the kernel as ``declare`` states."""
    signature = inspect.signature(declare)

    @functools.wraps(declare)
    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        names = list(inspect.signature(self.kernel.fn).parameters)
        known = SimpleNamespace(arg_names=names, constexprs=())
        grid, stated = declare(SimpleNamespace(kernel=known, _warming=True), *args, **kwargs)
        bound = signature.bind(self, *args, **kwargs)
        given = {**bound.arguments, **stated}
        found = {}
        for name in names:
            key = name if name in given else name.removesuffix("_ptr")
            if key in given:
                found[name] = given[key]
        self.kernel[grid](**found)

    return call


@contextmanager
def _listed(name: str, module: ModuleType) -> Iterator[None]:
    """List a module in sys.modules inside the block, where a dataclass looks for its names."""
    before = sys.modules.get(name)
    sys.modules[name] = module
    try:
        yield
    finally:
        if before is None:
            del sys.modules[name]
        else:
            sys.modules[name] = before


class Stub(ModuleType):
    """A module of a package that is not loaded. Its names exist; calling one raises Unavailable.

    ``why``: why it is not loaded, "" if it has no attention ops. ``run``: executes the ``__init__`` of a
    folder, which happens when a name is first asked for; returns why it cannot, or "".
    """

    def __init__(self, name: str, why: str = "", run: Callable[[ModuleType], str] | None = None):
        super().__init__(name)
        self._why, self._run = why, run

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if self._run is not None:
            run, self._run = self._run, None
            self._why = run(self)
            if name in vars(self):
                return vars(self)[name]
        return Absent(f"{self.__name__}.{name}", self._why)


class Absent:
    """A name in a module that is not loaded; calling it raises Unavailable."""

    def __init__(self, name: str, why: str = "") -> None:
        self._name, self._why = name, why

    def __getattr__(self, name: str) -> "Absent":
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{self._name}.{name}", self._why)

    def __or__(self, other: Any) -> "Absent":
        """Return this: the union of types in an annotation, as in ``Name | None``."""
        return self

    __ror__ = __or__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        package = self._name.partition(".")[0].replace("vllm", "vLLM")
        why = self._why or f"the lab loads only {package}'s attention ops"
        raise Unavailable(f"{self._name} was called, but {why}")


class Loader:
    """Load op modules of a Source.

    - ``stubs``: replace other modules of the package, by dotted name.
    - ``is_marked``: whether the functions record what runs (:mod:`attnlab.kernels.triton.coverage`).
    """

    def __init__(
        self, source: Source, stubs: Mapping[str, ModuleType], is_marked: bool = False
    ) -> None:
        self._source, self._is_marked = source, is_marked
        self._folders = {source.root / folder for folder in source.ops_folders}
        self._modules: dict[str, ModuleType] = dict(stubs)
        self._is_on_cpu = "torch" in self._modules or not torch.cuda.is_available()
        self._ops: dict[str, ModuleType] = {}

    def load(self, op: str) -> ModuleType:
        """Return the op module ``op``; it is loaded once."""
        if op not in self._ops:
            file = self._source.op_file(op)
            name = ".".join(file.relative_to(self._source.root).with_suffix("").parts)
            if name not in self._modules:
                self._run(name, file)
            self._ops[op] = self._import(name)
        return self._ops[op]

    def _import(self, name: str) -> ModuleType:
        """Return the module ``name``: from the table, or load an op module, or make a stub."""
        if name not in self._modules:
            self._modules[name] = self._loaded(name)
        if "." in name:
            folder, _, leaf = name.rpartition(".")
            setattr(self._import(folder), leaf, self._modules[name])
        return self._modules[name]

    def _loaded(self, name: str) -> ModuleType:
        """Return a module that the table does not have."""
        path, is_whole = self._source.root / name.replace(".", "/"), self._source.package.is_whole
        file = path.with_suffix(".py")
        if path.parent not in self._folders and not is_whole:
            return Stub(name)
        if not is_whole:
            file = file if file.is_file() or path.is_dir() else self._source.op_file(path.name)
            return Stub(name) if path.is_dir() else self._run(name, file)
        if file.is_file():
            try:
                return self._run(name, file)
            except Unavailable as error:
                return Stub(name, str(error))
        init = path / "__init__.py"
        why = "" if path.is_dir() else f"{self._source.text()} has no module {name}"
        return Stub(name, why, partial(self._init, init) if init.is_file() else None)

    def _init(self, file: Path, module: ModuleType) -> str:
        try:
            self._run(module.__name__, file, module)
        except Unavailable as error:
            return str(error)
        return ""

    def _run(self, name: str, file: Path, module: ModuleType | None = None) -> ModuleType:
        """Execute a module; it stays in the table only if all of it ran."""
        is_init, module = module is not None, module or ModuleType(name)
        module.__file__ = str(file)
        module.__package__ = name if is_init else name.rpartition(".")[0]
        module.__dict__["__builtins__"] = {**vars(builtins), "__import__": self._importer}
        linecache.checkcache(module.__file__)  # Triton reads the source from there
        tree = ast.parse(file.read_bytes())
        if self._is_marked:
            mark_functions(tree)
            module.__dict__.update(marks(module.__file__))
        code = compile(tree, module.__file__, "exec", dont_inherit=True)
        self._modules[name] = module
        try:
            with _listed(name, module), OnCpu() if self._is_on_cpu else contextlib.nullcontext():
                exec(code, module.__dict__)
        except Exception as error:
            if not is_init:
                del self._modules[name]
            why = f"{type(error).__name__}: {error}"
            text = f"{self._source.package.title} {self._source.version} cannot be loaded: {why}"
            raise Unavailable(f"{name.rpartition('.')[2]} of {text}") from error
        return module

    def _importer(
        self,
        name: str,
        globals: Mapping[str, Any] | None = None,
        locals: Mapping[str, Any] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> ModuleType:
        """Replace ``__import__`` in an op module; the parameters are those of ``__import__``."""
        if level:
            name = importlib.util.resolve_name("." * level + name, (globals or {})["__package__"])
        is_own = name.partition(".")[0] == self._source.package.name
        if not is_own and name not in self._modules:
            return builtins.__import__(name, globals, locals, fromlist or (), 0)
        module = self._import(name)
        if not fromlist:
            return self._import(name.partition(".")[0])
        for part in fromlist:
            if part not in vars(module) and self._is_module(f"{name}.{part}"):
                self._import(f"{name}.{part}")
        return module

    def _is_module(self, name: str) -> bool:
        """Return whether a dotted name is in the table or is a file in the ops folders."""
        path = self._source.root / name.replace(".", "/")
        is_op = self._source.package.is_whole or path.parent in self._folders
        is_file = path.with_suffix(".py").is_file()
        return name in self._modules or (is_op and (is_file or path.is_dir()))


# Stubs for the modules that attention ops import: those of their package, and torch without a GPU.

_RCP_LN2 = 1.4426950216  # 1 / ln(2), as vllm/utils/math_utils.py rounds it (0.33.0)
_CAPABILITY = {"sm_80": (8, 0), "sm_90": (9, 0), "cdna": (9, 4), "rdna": (11, 0)}


@dataclass(slots=True)
class Dispatch:
    """What the stubs return during one call. The backend sets it before the call and resets it after.

    - ``use_custom``: result of vLLM's ``use_rocm_custom_paged_attention``.
    - ``rocm_decode``: replaces ``vllm._custom_ops.paged_attention_rocm``.
    """

    use_custom: bool = False
    rocm_decode: Callable[..., None] = lambda *args, **kwargs: None


def make_stubs(
    platform: Platform, triton: ModuleType, dispatch: Dispatch, interpret: bool
) -> dict[str, ModuleType]:
    """Return the stub modules by dotted name."""
    contents = _vllm_contents(platform, triton, dispatch)
    return _modules(contents, ModuleType, _Current(platform), triton if interpret else None)


def _vllm_contents(
    platform: Platform, triton: ModuleType | None, dispatch: Dispatch
) -> dict[str, dict[str, Any]]:
    """Return what the stubs of vLLM's modules contain."""
    current = _Current(platform)
    quiet = SimpleNamespace(
        **{
            name + once: lambda *args, **kwargs: None
            for name in ("debug", "info", "warning", "error")
            for once in ("", "_once")
        }
    )
    fp8 = FORMATS[platform.fp8_e4m3].dtype
    return {
        "vllm.platforms": {"current_platform": current},
        "vllm.platforms.rocm": {
            "use_rocm_custom_paged_attention": lambda *args, **kwargs: dispatch.use_custom,
            "on_gfx1x": lambda: platform.family == "rdna",
            "on_gfx12x": lambda: platform.name.startswith("gfx12"),
        },
        "vllm._custom_ops": {
            "paged_attention_rocm": lambda *args, **kwargs: dispatch.rocm_decode(*args, **kwargs)
        },
        "vllm.triton_utils": {
            **{"triton": triton, "tl": getattr(triton, "language", None)},
            **{"LOG2E": math.log2(math.e), "LOGE2": math.log(2)},
        },
        "vllm.logger": {"init_logger": lambda name: quiet},
        "vllm.envs": {"VLLM_BATCH_INVARIANT": False},
        "vllm.model_executor.layers.batch_invariant": {"vllm_is_batch_invariant": lambda: False},
        "vllm.model_executor.layers.quantization.utils.quant_utils": {
            "FP8_DTYPE": fp8,
            "get_fp8_min_max": lambda: (torch.finfo(fp8).min, torch.finfo(fp8).max),
        },
        "vllm.utils.math_utils": {
            "RCP_LN2": _RCP_LN2,
            "cdiv": lambda number, size: -(-number // size),
            "largest_power_of_2_divisor": lambda number: number & -number,
            "next_power_of_2": lambda number: 1 << max(0, number - 1).bit_length(),
        },
        "vllm.utils.torch_utils": {"is_quantized_kv_cache": _is_quantized},
        "vllm.v1.kv_cache_interface": {
            "KVQuantMode": _KVQuantMode,
            "is_quantized_kv_cache": _is_quantized,
            "get_kv_quant_mode": lambda dtype: _KVQuantMode(int(_is_quantized(dtype))),
        },
        "vllm.v1.worker.workspace": {
            "current_workspace_manager": None,
            "is_workspace_manager_initialized": lambda: False,
        },
        **warmup_stubs(),
    }


def package_stubs(
    package: Package, platform: Platform, triton: ModuleType | None
) -> dict[str, ModuleType]:
    """Return the stub modules that a package states, whose other names may not be called; ``triton``: what
    replaces Triton."""
    contents = dict(package.stubs(platform))
    if package.name == "vllm":
        contents = {**_vllm_contents(platform, triton, Dispatch()), **contents}
    return _modules(contents, Stub, _Current(platform), triton)


def _modules(
    contents: Mapping[str, Mapping[str, Any]],
    kind: type[ModuleType],
    current: "_Current",
    triton: ModuleType | None,
) -> dict[str, ModuleType]:
    """Return modules with some contents, and under the interpreter a torch and a Triton."""
    made: dict[str, ModuleType] = {name: kind(name) for name in contents}
    for name, content in contents.items():
        vars(made[name]).update(content)
    if triton is None:
        return made
    runtime = _view(triton.runtime, driver=SimpleNamespace(active=current))
    triton = _view(triton, runtime=runtime)
    return {**made, "torch": _torch(current), "triton": triton, "triton.runtime": runtime}


class _KVQuantMode(IntEnum):
    """Modes of cache quantisation with vLLM's numbers (vllm/v1/kv_cache_interface.py, 0.20.2 to 0.33.0)."""

    NONE = 0
    FP8_PER_TENSOR = 1
    INT8_PER_TOKEN_HEAD = 2
    FP8_PER_TOKEN_HEAD = 3
    INT4_PER_TOKEN_HEAD = 4


def _is_quantized(kv_cache_dtype: str) -> bool:
    return kv_cache_dtype.startswith("fp8")


def _torch(current: "_Current") -> ModuleType:
    """Return a torch module for interpreted ops, which run as on a machine without a GPU.

    ``torch.cuda`` describes the simulated platform, and a GPU of this machine is not used: a copy of a
    process that knows of it could not. ``torch.empty`` and ``empty_like`` return NaN, so
    that a read of scratch memory before it is written shows in the output.
    """

    def scratch(make: Callable[..., torch.Tensor], *args: Any, **options: Any) -> torch.Tensor:
        made = make(*args, **options)
        return made.fill_(float("nan")) if made.is_floating_point() else made

    cuda = _view(
        torch.cuda,
        is_available=lambda: False,
        device_count=lambda: 0,
        device=lambda device: contextlib.nullcontext(),
        get_device_capability=current.get_device_capability,
        get_device_name=lambda device=0: current.get_device_properties(device).name,
        get_device_properties=current.get_device_properties,
        current_device=current.get_current_device,
    )
    makers = {one.__name__: partial(scratch, one) for one in (torch.empty, torch.empty_like)}
    return _view(torch, cuda=cuda, **makers)


class OnCpu(TorchFunctionMode):
    """Let code that asks torch for a CUDA device get the CPU: device="cuda", .to("cuda"), .cuda()."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), named: Any = None
    ) -> Any:
        """Call a function of torch with the CPU in place of a CUDA device."""
        if function is torch.Tensor.cuda:
            return args[0]
        named = {name: _on_cpu(value) for name, value in (named or {}).items()}
        return function(*map(_on_cpu, args), **named)


def _on_cpu(value: Any) -> Any:
    is_cuda = isinstance(value, str | torch.device) and str(value).partition(":")[0] == "cuda"
    return torch.device("cpu") if is_cuda else value


def _view(module: ModuleType, **names: Any) -> ModuleType:
    """Return a module with some other names; the rest is the module's."""
    view = ModuleType(module.__name__)
    view.__getattr__ = lambda name: getattr(module, name)  # type: ignore[method-assign]
    vars(view).update(names)
    return view


class _Current:
    """Replace ``vllm.platforms.current_platform``, and Triton's driver; an unknown attribute raises
    AttributeError."""

    def __init__(self, platform: Platform) -> None:
        self._platform = platform
        default = _CAPABILITY.get(platform.family, (0, 0))
        self._capability = _CAPABILITY.get(platform.name, default)

    def fp8_dtype(self) -> torch.dtype:
        return FORMATS[self._platform.fp8_e4m3].dtype

    def is_rocm(self) -> bool:
        return self._platform.is_rocm

    def is_cuda(self) -> bool:
        return self._platform.family == "cuda"

    def is_cuda_alike(self) -> bool:
        return self._platform.family != "cpu"

    def is_cpu(self) -> bool:
        return self._platform.family == "cpu"

    def is_xpu(self) -> bool:
        return False

    is_tpu = is_xpu

    def is_device_capability_family(self, capability: int, device_id: int = 0) -> bool:
        return self._capability[0] == capability // 10

    def get_device_capability(self, device_id: Any = 0) -> tuple[int, int]:
        return self._capability

    def get_current_device(self) -> int:
        return 0

    def get_current_target(self) -> Any:
        """Return Triton's description of the platform."""
        from triton.backends.compiler import GPUTarget

        if self.is_rocm():
            return GPUTarget("hip", self._platform.name, 32 if self._is_rdna else 64)
        return GPUTarget("cuda", 10 * self._capability[0] + self._capability[1], 32)

    def get_device_properties(self, device: Any = 0) -> SimpleNamespace:
        """Return what ops ask of a GPU.

        It has few multiprocessors, so that ops split by it as little as they can: LMDeploy's need several.
        """
        return SimpleNamespace(
            name=self._platform.name,
            major=self._capability[0],
            minor=self._capability[1],
            gcnArchName=self._platform.name,
            warp_size=64 if self.is_rocm() and not self._is_rdna else 32,
            multi_processor_count=16,
        )

    @property
    def _is_rdna(self) -> bool:
        return self._platform.family == "rdna"

    def has_device_capability(self, capability: Any, device_id: int = 0) -> bool:
        return self._capability >= _pair(capability)

    def is_device_capability(self, capability: Any, device_id: int = 0) -> bool:
        return self._capability == _pair(capability)


def _pair(capability: Any) -> tuple[int, ...]:
    return divmod(capability, 10) if isinstance(capability, int) else tuple(capability)
