"""Every supported Triton gives the same findings, each in an environment of its own."""

import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from attnlab.case.errors import Unavailable
from attnlab.kernels.cache_folder import cache_folder
from attnlab.kernels.triton import interpreter
from attnlab.kernels.vllm.backend import VllmBackend

TOOL = Path(__file__).parents[3] / "tools" / "triton_versions.py"
# Each mask, op argument and dtype of each op occurs in a sample of 130 cases of 0.33.0.
SAMPLES = [("0.33.0", 130), ("0.33.0", None), ("0.20.2", None), ("0.11.2", None)]


@pytest.mark.releases
@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="needs the triton extra")
@pytest.mark.parametrize(("release", "cases"), SAMPLES, ids=lambda one: str(one or "all cases"))
def test_the_findings_do_not_depend_on_triton(release: str, cases: int | None) -> None:
    """Triton 3.6.0, 3.7.1, 3.8.0 and 3.9.0 are installed into the cache folder once.

    All cases of a release take four to ten minutes on two idle cores, so these tests are "long".
    """
    command = [sys.executable, str(TOOL), str(cache_folder() / "triton"), release]
    command += [] if cases is None else ["--sample", str(cases)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 cases differ" in done.stdout
    assert "differs:" not in done.stdout
    (number,) = re.findall(rf"{release}: (\d+) cases", done.stdout)
    assert int(number) == cases or (cases is None and int(number) > 400)


# Which versions of Triton and NumPy the interpreter layer accepts, and that each of them was measured.


if find_spec("triton") is not None:
    triton = interpreter.interpreted_triton()
    tl = triton.language

    @triton.jit
    def loop(out, count):
        for i in range(0, tl.load(count)):
            tl.store(out + i, i + 1)

    @triton.jit
    def caller(out, count):
        loop(out, count)
        for i in range(tl.load(count), 4):
            tl.store(out + i, 9)


TABLE = Path(__file__).parents[3] / "docs" / "interpreter-pairs.json"


def _minor(version: str) -> tuple[int, int]:
    major, minor, *_ = version.split(".")
    return int(major), int(minor)


def test_every_supported_pair_was_measured() -> None:
    """The table has a good row for each minor release of Triton with each of NumPy, and no bad row."""
    rows = json.loads(TABLE.read_text())["pairs"]
    good = {(_minor(row["triton"]), _minor(row["numpy"])) for row in rows if row["good"]}
    for row in rows:
        assert row["good"], row
        interpreter.check_pair(row["triton"], row["numpy"])
    for triton in range(interpreter.TRITON[0][1], interpreter.TRITON[1][1] + 1):
        for numpy in range(interpreter.NUMPY[0][1], interpreter.NUMPY[1][1] + 1):
            assert ((3, triton), (2, numpy)) in good


def test_a_later_numpy_2_is_accepted() -> None:
    """Only public functions of NumPy are used."""
    interpreter.check_pair("3.6.0", "2.5.1")


@pytest.mark.parametrize(
    "pair", [("3.5.1", "2.3.5"), ("3.10.0", "2.3.5"), ("3.9.0", "1.26.4"), ("3.9.0", "3.0.0")]
)
def test_another_pair_is_rejected(pair: tuple[str, str]) -> None:
    """Before anything runs, in one line that names both versions."""
    with pytest.raises(Unavailable) as raised:
        interpreter.check_pair(*pair)
    assert all(version in str(raised.value) for version in pair)
    assert "\n" not in str(raised.value)


def test_a_backend_on_a_cpu_checks_the_pair_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its device is asked for before a source is opened or a process is started."""
    monkeypatch.setattr(interpreter, "_installed", lambda: ("3.5.1", "2.3.5"))
    with pytest.raises(Unavailable):
        _ = VllmBackend(path="no such file", requested_device="cpu").device


@pytest.mark.skipif(find_spec("triton") is None, reason="needs the triton extra")
def test_a_scalar_is_a_loop_bound_with_every_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lab replaces the conversion that fails with Triton 3.6 and NumPy 2.4, also in called functions."""

    def broken(self: object) -> int:
        raise TypeError("only 0-dimensional arrays can be converted to Python scalars")

    from triton.runtime import interpreter as stock

    patch = stock._patch_lang_tensor

    def as_in_3_6(tensor: type, scope: object) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", broken)

    monkeypatch.setattr(stock, "_patch_lang_tensor", as_in_3_6)
    out = torch.zeros(4, dtype=torch.int32)
    caller[(1,)](out, torch.tensor([2]))
    assert out.tolist() == [1, 2, 9, 9]


def test_the_device_decides_whether_triton_interprets():
    """A worker for a GPU may inherit the variable of a process that interprets, and the reverse.

    Afterwards the other way is refused, and the error names the variable to set.
    """
    code = """
import os
from attnlab.case.errors import Unavailable
from attnlab.kernels.triton.interpreter import is_interpreting, load_triton
for wanted in (False, True):
    if os.fork():
        os.wait()
        continue
    os.environ["TRITON_INTERPRET"] = "0" if wanted else "1"
    load_triton(interpret=wanted)
    print(is_interpreting(), end=": ")
    try: load_triton(interpret=not wanted)
    except Unavailable as error: print(error, flush=True)
    os._exit(0)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for wanted, line in zip((False, True), ran.stdout.splitlines(), strict=True):
        assert line.startswith(f"{wanted}: ")
        assert f"set TRITON_INTERPRET={int(not wanted)} before it is imported" in line
