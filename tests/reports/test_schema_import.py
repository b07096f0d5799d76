"""jsonschema is imported without its slow parser, and notebooks are still validated."""

import subprocess
import sys

CODE = """
import sys
{before}
from attnlab.reports.investigate import import_jsonschema
import_jsonschema()
print("jsonschema" in sys.modules, sys.modules.get("rfc3987_syntax", "absent") == "absent")
import nbformat
try:
    cells = [{{"cell_type": "wrong"}}]
    nbformat.validate({{"nbformat": 4, "nbformat_minor": 5, "metadata": {{}}, "cells": cells}})
except nbformat.ValidationError:
    print("refused")
"""


def printed(before: str) -> list[str]:
    """Return the lines that a new process prints."""
    command = [sys.executable, "-c", CODE.format(before=before)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def test_the_parser_is_left_out_and_a_wrong_notebook_is_refused() -> None:
    assert printed("") == ["True True", "refused"]


def test_a_parser_that_is_there_stays() -> None:
    before = "import types; sys.modules['rfc3987_syntax'] = types.ModuleType('rfc3987_syntax')"
    assert printed(before) == ["False False", "refused"]
