"""Write environment.yml from the dependencies in pyproject.toml.

python tools/environment.py          write the file
python tools/environment.py --check  exit with 1 if the file is out of date
"""

import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
EXTRAS = ("cpu", "triton", "lab", "vllm", "test", "docs")


def environment() -> str:
    """Return the text of environment.yml: Python from conda, everything else from pip."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [
        "# Generated from pyproject.toml by tools/environment.py. Change pyproject.toml instead.",
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
    """Write or compare the file, and return the exit code."""
    path = ROOT / "environment.yml"
    if "--check" in sys.argv[1:]:
        return int(path.read_text() != environment())
    path.write_text(environment())
    return 0


if __name__ == "__main__":
    sys.exit(main())
