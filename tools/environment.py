"""Write environment.yml from pyproject.toml, which is the one list of dependencies.

python tools/environment.py          writes the file
python tools/environment.py --check  exits 1 where the file differs
"""

import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
EXTRAS = ("cpu", "triton", "lab", "vllm", "test")


def environment() -> str:
    """Return the text of environment.yml: Python from conda, everything else by pip as pinned."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [
        "# Made from pyproject.toml by tools/environment.py; change it there.",
        f"name: {project['name']}",
        "channels:",
        "  - conda-forge",
        "dependencies:",
        f"  - python{project['requires-python']},<3.13",
        "  - pip",
        "  - make",
        "  - cxx-compiler",
        "  - pip:",
    ]
    extras = project["optional-dependencies"]
    for title, requirements in (
        ("attnlab itself", project["dependencies"]),
        *((f"extra: {name}", extras[name]) for name in EXTRAS),
    ):
        lines.append(f"      # {title}")
        lines += [f"      - {requirement}" for requirement in requirements]
    lines += ["      - --editable .", ""]
    return "\n".join(lines)


def main() -> int:
    """Write the file, or compare it; return the exit code."""
    path = ROOT / "environment.yml"
    if "--check" in sys.argv[1:]:
        return int(path.read_text() != environment())
    path.write_text(environment())
    return 0


if __name__ == "__main__":
    sys.exit(main())
