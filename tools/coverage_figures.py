"""Write docs/coverage.json: the coverage figures of a check, without the source text of vLLM.

attnlab check --source vllm-0.33.0.whl --coverage --json > check.json
python tools/coverage_figures.py check.json
"""

import datetime
import importlib.metadata
import json
import sys
from pathlib import Path

TARGET = Path(__file__).parents[1] / "docs" / "coverage.json"


def main() -> None:
    """Write the file."""
    (given,) = sys.argv[1:] or sys.exit("give the document of attnlab check --coverage --json")
    report = json.loads(Path(given).read_text())
    ops = {op: _figures(found) for op, found in report["coverage"].items()}
    document = {
        "source": report["version"],
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "versions": {
            name: importlib.metadata.version(name) for name in ("triton", "torch", "numpy")
        },
        "cases": report["cases"],
        "cases_run": report["cases_run"],
        "ops": ops,
    }
    TARGET.write_text(json.dumps(document, indent=1) + "\n")
    for op, found in ops.items():
        print(op, found["lines"]["percent"], found["branches"]["percent"], found["missing"])


def _figures(found: dict) -> dict:
    """Return the numbers of an op, and its gaps as places."""
    parameters = found["parameters"]
    return {
        "lines": found["lines"],
        "branches": found["branches"],
        "missing": [f"{gap['function']}: {gap['what']}" for gap in found["missing"]],
        "excused": len(found["excused"]),
        "parameters": len(parameters),
        "parameter_gaps": {one["name"]: one["gaps"] for one in parameters if one["gaps"]},
    }


if __name__ == "__main__":
    main()
