"""Run Triton's interpreter, so that the test needs no GPU. It must be set before triton is imported."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")
