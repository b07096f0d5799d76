"""Every supported Triton gives the same findings, each in an environment of its own."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from attnlab.kernels.cache_folder import cache_folder

TOOL = Path(__file__).parents[3] / "tools" / "triton_versions.py"
# Each mask, op argument and dtype of each op occurs in a sample of 130 cases of 0.33.0.
SAMPLES = {"0.33.0": 130, "0.20.2": 40, "0.11.2": 40}


@pytest.mark.releases
@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="needs the triton extra")
@pytest.mark.parametrize("release", SAMPLES)
def test_the_findings_do_not_depend_on_triton(release: str) -> None:
    """Triton 3.6.0, 3.7.1, 3.8.0 and 3.9.0 are installed into the cache folder once."""
    command = [sys.executable, str(TOOL), str(cache_folder() / "triton"), release]
    command += ["--sample", str(SAMPLES[release])]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 cases differ" in done.stdout
    assert "differs:" not in done.stdout
