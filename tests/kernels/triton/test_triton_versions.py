"""Every supported Triton gives the same findings, each in an environment of its own."""

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from attnlab.kernels.cache_folder import cache_folder

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
