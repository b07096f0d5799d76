"""Start a capture in each Python process of ``attnlab capture --library``, whose PYTHONPATH has this folder.

A sitecustomize that Python would find without this folder runs first.
"""

import importlib.machinery
import importlib.util
import os
import sys


def _run_next() -> None:
    """Run the sitecustomize of the other folders of the path, if there is one, in place of this one."""
    own = os.path.dirname(os.path.abspath(__file__))
    others = [one for one in sys.path if os.path.abspath(one or ".") != own]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


try:
    _run_next()
finally:
    if os.environ.get("ATTNLAB_CAPTURE"):
        try:
            from attnlab.serving.plugin import activate_library
        except ImportError as error:
            print(f"attnlab captures nothing in this process: {error}", file=sys.stderr)
        else:
            activate_library()
