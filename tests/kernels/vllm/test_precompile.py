"""Kernels are compiled ahead of their runs: each specialisation once, for a GPU that need not be there."""

import json
import os
import subprocess
import sys

import pytest
from helpers.sources import needs_triton, of_release

pytestmark = [pytest.mark.releases, pytest.mark.slow, needs_triton]

# Triton is in compile mode for a whole process, and the tests use its interpreter.
PROGRAM = """
import json, sys
from attnlab.case.case import Case
from attnlab.kernels.vllm import backend as module
from attnlab.kernels.vllm.source import find_source

small = dict(num_heads=2, head_size=16, block_size=16, backend="vllm", platform="sm_90", stage="sound")
case = Case(op="context_attention_fwd", query_lens=(5, 1), ctx_lens=(20, 30), **small)
same = [case, case.replace(seed=4), case.replace(query_lens=(7, 1))]
source, done = find_source(sys.argv[1]), []
with module._compiling_for("sm_90"):
    different = len(module.specialisations([*same, case.replace(sliding_window=5)], source))
made = module.precompile(same, source, 2, lambda *numbers: done.append(numbers))
print(json.dumps([different, made.kernels, made.failures, done]))
"""


def test_each_specialisation_is_compiled_once(tmp_path):
    """Other numbers and lengths need no other kernel, a sliding window does; the binary is kept."""
    environment = {name: value for name, value in os.environ.items() if "TRITON" not in name}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-c", PROGRAM, str(of_release("0.33.0").path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    different, kernels, failures, progress = json.loads(done.stdout)
    assert different == 2
    assert kernels == {"_fwd_kernel": 1}
    assert not failures
    assert progress == [[1, 1]]
    assert [path.name for path in tmp_path.rglob("*.cubin")] == ["_fwd_kernel.cubin"]
