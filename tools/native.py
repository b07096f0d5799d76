"""Run vLLM's test case at its own size with vLLM's own kernels on this machine's GPU.

python tools/native.py --source vllm-0.33.0.tar.gz --out docs/native.json

Two tables: every stage on an AMD and an NVIDIA platform, and every fill of the cache against every
content of the slots that are never written. A GPU is needed; which one, and the versions, go into the file.
"""

import argparse
import datetime
import itertools
import json
import platform
import sys
from pathlib import Path
from typing import Any

import torch

from attnlab.case.case import Case
from attnlab.case.declaration import DISTRIBUTIONS, EMPTY_SLOTS
from attnlab.case.shown import json_number
from attnlab.case.stages import FILLS
from attnlab.kernels.vllm.source import find_source
from attnlab.lab.lab import Lab
from attnlab.lab.run import stage_table, to_json

SEED_ID = "test_contexted_kv_attention[chunked_prefill_paged_decode-0-cuda:0-auto-dtype0-128-1-64]"


def main() -> int:
    """Run both tables and write them; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--source", type=Path, help="a wheel, an sdist or a checkout of vLLM")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("native.py needs a GPU that torch can use", file=sys.stderr)
        return 2
    import triton

    lab = Lab(source=args.source)
    case = Case.from_test_id(SEED_ID, backend="vllm", platform="sm_90")
    document = {
        "date": datetime.date.today().isoformat(),
        "gpu": torch.cuda.get_device_name(),
        "versions": {
            "vllm": find_source(args.source).version,
            "torch": torch.__version__,
            "triton": triton.__version__,
            "python": platform.python_version(),
        },
        "stages": to_json(case, stage_table(lab, case))["cells"],
        "fills": _fills(lab, case),
    }
    args.out.write_text(json.dumps(document, indent=1) + "\n")
    return 0


def _fills(lab: Lab, case: Case) -> list[dict[str, Any]]:
    """Return a row for each distribution, content of unwritten slots and fill; NaN becomes "nan"."""
    rows = []
    for distribution, empty_slots, fill in itertools.product(DISTRIBUTIONS, EMPTY_SLOTS, FILLS):
        result = lab.run(
            case.replace(distribution=distribution, empty_slots=empty_slots, fill=fill)
        )
        assert result.errors is not None
        *prefill, decode = result.errors.seq_error()
        rows.append(
            {
                "distribution": distribution,
                "empty_slots": empty_slots,
                "fill": fill,
                "decode_error": json_number(decode),
                "prefill_error": max(prefill),
                "mismatched": result.errors.mismatched,
                "backend": result.backend,
            }
        )
        print(rows[-1], flush=True)
    return rows


if __name__ == "__main__":
    sys.exit(main())
