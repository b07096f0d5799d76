"""Write the faults that come with attnlab: the findings of documents, each at its smallest Case.

python tools/atlas_faults.py docs/releases.json sglang.json lmdeploy.json > faults.json
mv faults.json attnlab/checker/faults.json

A document is that of attnlab check, releases or atlas with --json. ``attnlab atlas`` runs these Cases. The
``line`` of an entry is an expression of the line at fault, written by hand; that of an equal finding stays.
"""

import json
import sys
from pathlib import Path

from attnlab.case.shown import json_value
from attnlab.checker.atlas import packaged_faults, read_faults


def main() -> int:
    """Print the document: each finding once, on a line of its own."""
    names = ("op", "kind", "diagnosis", "names", "description", "case")
    kept = {(one.op, one.kind, one.case): line for one, line in packaged_faults().items() if line}
    found = {}
    for path in sys.argv[1:]:
        for one, line in read_faults(Path(path)).items():
            line = line or kept.get((one.op, one.kind, one.case), "")
            fields = {name: one.to_verdict()[name] for name in names}
            found[json.dumps(json_value(fields | ({"line": line} if line else {})))] = None
    print('{"faults": [\n' + ",\n".join(found) + "\n]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
