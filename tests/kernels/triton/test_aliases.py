"""Functions of the language that a module has under a name of its own, and those of a GPU's library."""

from importlib.util import find_spec

import pytest
import torch

from attnlab.case.errors import Unavailable
from attnlab.kernels.triton import interpreter, patches
from attnlab.kernels.triton.launch_plan import LaunchPlan, launching

pytestmark = pytest.mark.skipif(
    find_spec("triton") is None, reason="the interpreter needs the triton extra"
)
tl_log2 = own_tanh = None  # names that a run gives the kernel's module
NUMBERS = torch.tensor([0.25, 0.5, 1.0, 3.0])


def run(lockstep: bool):
    """Return what the alias of a function, and functions of libdevice, compute of NUMBERS."""
    triton = interpreter.interpreted_triton()
    from triton.language.extra import libdevice as general

    tl = triton.language

    @triton.jit
    def kernel(x, out, SIZE: tl.constexpr):
        at = tl.arange(0, SIZE)
        number = tl.load(x + at)
        tl.extra.cuda.gdc_wait()
        tl.store(out + at, tl_log2(number))
        tl.store(out + SIZE + at, own_tanh(number))
        tl.store(out + 2 * SIZE + at, tl.extra.cuda.libdevice.fast_expf(number))
        tl.store(out + 3 * SIZE + at, general.pow(number, number + 1))

    names = {"tl": tl, "tl_log2": tl.log2, "own_tanh": tl.extra.cuda.libdevice.tanh}
    kernel.fn.__globals__.update(names, general=general)
    out = torch.zeros(4, 4)
    with interpreter.interpret(lockstep=lockstep), launching(LaunchPlan()):
        kernel[(1,)](NUMBERS, out, SIZE=4)
    return out


@pytest.mark.parametrize("lockstep", [True, False])
def test_aliases_and_libdevice_compute_what_their_names_say(lockstep):
    expected = [NUMBERS.log2(), NUMBERS.tanh(), NUMBERS.exp(), NUMBERS.pow(NUMBERS + 1)]
    torch.testing.assert_close(run(lockstep), torch.stack(expected))


def test_a_function_of_the_library_that_is_not_known_is_refused(monkeypatch):
    """A planted gap: no function may return what another computes."""
    monkeypatch.delitem(patches._LIBDEVICE, "tanh")
    with pytest.raises(Unavailable, match=r"^__nv_tanhf .* is not interpreted$"):
        run(lockstep=False)


def test_without_the_aliases_a_module_fails(monkeypatch):
    monkeypatch.setattr(patches, "bind_aliases", lambda *args: None)
    with pytest.raises(Exception, match=r"Did you forget to add @triton\.jit"):
        run(lockstep=False)
