"""A lab whose kernels are wrong: they get other arguments, change their output, or are a test's own."""

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

from attnlab.case.case import Case
from attnlab.contracts.contract import Target
from attnlab.contracts.dispatch import decide
from attnlab.kernels import model
from attnlab.kernels.backend import RunOutput
from attnlab.kernels.triton.run_log import Wrap
from attnlab.lab.lab import Lab
from attnlab.tensors.call import KernelCall
from helpers.sources import of_release


def run_models(case: Case, call: KernelCall) -> None:
    """Run the models of the kernels of a Case."""
    model.run(call, Target.of(case), decide(case).kernels)


@dataclasses.dataclass(slots=True)
class FaultyLab(Lab):
    """Run ``kernel`` with the arguments that ``change`` returns for it; then ``spoil`` changes the output.

    ``wraps``: the int32 overflows that each run reports.
    """

    kernel: Callable[[Case, KernelCall], None] = run_models
    change: Callable[[Case, KernelCall], dict[str, object]] = lambda case, call: {}
    spoil: Callable[[Case, KernelCall], None] = lambda case, call: None
    wraps: tuple[Wrap, ...] = ()

    def _run_kernels(self, case: Case, call: KernelCall) -> RunOutput:
        self.kernel(case, dataclasses.replace(call, **self.change(case, call)))
        self.spoil(case, call)
        ran = RunOutput()
        ran.log.wraps.update({(wrap.file, wrap.line): wrap for wrap in self.wraps})
        return ran


def planted_release(folder: Path, module: str, old: str, new: str) -> Lab:
    """Return a lab with the source of 0.33.0, copied into a folder, in which a module has a change."""
    shutil.copytree(of_release("0.33.0").root / "vllm", folder / "vllm")
    file = folder / "vllm/v1/attention/ops" / f"{module}.py"
    text = file.read_text()
    assert text.count(old) == 1
    file.write_text(text.replace(old, new))
    return Lab(source=folder, device="cpu")
