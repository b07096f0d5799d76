"""Write the recorded times of the hostile cases, which divide shards and estimate the remaining time.

attnlab check --source vllm-0.33.0.whl --out STORE
python tools/costs.py STORE                        rewrites attnlab/checker/costs.json

Other tasks on the machine do not matter: the times are processor times.
"""

import json
import sys
from pathlib import Path

from attnlab.checker import plan


def main() -> None:
    """Write the file."""
    (store,) = sys.argv[1:] or sys.exit("give the store of a check")
    found = plan.costs_of_store(Path(store))
    file = Path(plan.__file__).with_name("costs.json")
    file.write_text(json.dumps(found, indent=0) + "\n")
    print(f"{file}: {len(found)} cases, {sum(found.values()):.0f} s")


if __name__ == "__main__":
    main()
