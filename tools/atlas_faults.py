"""Write the faults that come with attnlab: the findings of documents, each at its smallest Case.

python tools/atlas_faults.py docs/releases.json sglang.json lmdeploy.json > attnlab/checker/faults.json

A document is that of attnlab check, releases or atlas with --json. ``attnlab atlas`` runs these Cases.
"""

import json
import sys
from pathlib import Path

from attnlab.case.shown import json_value
from attnlab.checker.atlas import read_faults


def main() -> int:
    """Print the document: each finding once, on a line of its own."""
    found = [one for path in sys.argv[1:] for one in read_faults(Path(path))]
    names = ("op", "kind", "diagnosis", "names", "description", "case")
    lines = [json.dumps(json_value({n: one.to_verdict()[n] for n in names})) for one in found]
    print('{"faults": [\n' + ",\n".join(dict.fromkeys(lines)) + "\n]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
