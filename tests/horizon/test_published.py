"""The published int32 faults whose sources are packages: found at the published size, silent once fixed."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from attnlab.kernels.cache_folder import private_folder
from attnlab.kernels.vllm.source import fetch_ops

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "tools"))
from horizon_published import CASES, Published, run

sys.path.pop(0)

pytestmark = pytest.mark.releases
PACKAGES = {"sglang": "sglang", "fla_core": "fla-core"}


def unpacked(name: str, package: str, version: str) -> Path:
    """Return a folder with the Python files of a wheel, downloaded once."""
    folder = private_folder("horizon-tests", name)
    if not (folder / ".complete").exists():
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--only-binary",
            ":all:",
        ]
        subprocess.run([*command, "--dest", str(folder), f"{package}=={version}"], check=True)
        for wheel in folder.glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(folder, [n for n in archive.namelist() if n.endswith(".py")])
            wheel.unlink()
        (folder / ".complete").touch()
    return folder


def sources(case: Published, place: Path) -> Path:
    """Return a folder with the sources of a case, by the names that the case gives them."""
    for name in {one.partition("/")[0] for one in (case.fault, case.fixed) if one}:
        package, _, version = name.rpartition("-")
        if not (place / name).exists():
            found = (
                fetch_ops(version)
                if package == "vllm"
                else unpacked(name, PACKAGES[package], version)
            )
            (place / name).symlink_to(found)
    return place


PACKAGED = [one for one in CASES if one.fault.partition("-")[0] in ("vllm", *PACKAGES)]


@pytest.mark.parametrize("case", PACKAGED, ids=lambda one: f"{one.thread} {one.launch}")
def test_a_published_fault(case: Published, tmp_path: Path) -> None:
    (found,) = run(sources(case, tmp_path), (case,))
    assert found["wrong_at"] is not None
    assert case.expected in (None, found["wrong_at"])
    assert found["fixed"] == []
