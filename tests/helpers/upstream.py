"""Write the script of a finding and run it on the ops of a source."""

import os
import runpy
import sys
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from types import ModuleType

from attnlab.case.case import Case
from attnlab.case.errors import Unsupported
from attnlab.case.platforms import PLATFORMS
from attnlab.checker.finding import Finding
from attnlab.kernels.triton.interpreter import load_triton
from attnlab.kernels.vllm.backend import Loaded, load_stock
from attnlab.kernels.vllm.source import Source
from attnlab.reports.upstream import write_reports


def outcome_of(run: Callable[[], object]) -> tuple[int, str]:
    """Run a function in a copy of this process; return its exit code and what it prints.

    The code is that of sys.exit, 0 without it, and 1 after any other exception. Whatever the function
    changes, such as sys.modules, stays in the copy.
    """
    with TemporaryFile() as file:
        sys.stdout.flush()
        sys.stderr.flush()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of threads
            child = os.fork()
        if not child:
            _run(run, file.fileno())
        _, status = os.waitpid(child, 0)
        file.seek(0)
        return os.waitstatus_to_exitcode(status), file.read().decode()


def _run(run: Callable[[], object], file: int) -> None:
    """Run the function with both streams in a file, and end this process."""
    code = 1
    try:
        for stream in (1, 2):
            os.dup2(file, stream)
        sys.stdout = sys.stderr = os.fdopen(1, "w", closefd=False)
        warnings.simplefilter("ignore")
        try:
            run()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
    finally:
        os._exit(code)


OPS_MODULES = (
    "chunked_prefill_paged_decode",
    "prefix_prefill",
    "triton_prefill_attention",
    "triton_unified_attention",
    "int4_per_token_head",
    "triton_decode_attention",
    "triton_merge_attn_states",
    "triton_reshape_and_cache_flash",
)


def written(folder: Path, case: Case, kind: str = "reads_unwritten_slots") -> Path:
    """Return the script of a finding at a Case."""
    found = Finding(op=case.op, kind=kind, case=case, evidence="seen", diagnosis="none")
    files = write_reports([found], folder / "out", "vllm 0")
    return next(file for file in files if file.suffix == ".py")


def script_outcome(
    script: Path,
    source: Source,
    load: Callable[[Source], Loaded] = lambda source: load_stock(source, PLATFORMS["sm_90"]),
) -> tuple[int, str]:
    """Run a script on the ops of a source; return its exit code and what it prints.

    The ops are offered as modules of an installed vLLM, on Triton's own interpreter unless ``load`` says
    otherwise.
    """

    load_triton(interpret=True)  # here and not in each copy of this process

    def run() -> None:
        _offer(source, load(source))
        sys.argv = [str(script)]
        runpy.run_path(str(script), run_name="__main__")

    return outcome_of(run)


def _offer(source: Source, loaded: Loaded) -> None:
    """Make the ops importable as ``vllm``."""
    vllm, utils = ModuleType("vllm"), ModuleType("vllm.triton_utils")
    vllm.__version__, vllm.__path__, vllm.triton_utils = source.version, [], utils
    sys.modules |= {"vllm": vllm, "vllm.triton_utils": utils}
    for folder in source.ops_folders:
        for name in OPS_MODULES:
            with suppress(Unsupported):  # an op that the release lacks
                sys.modules[f"{folder.replace('/', '.')}.{name}"] = loaded.loader.load(name)
