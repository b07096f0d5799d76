"""The import of jsonschema, which nbformat needs, without a parser that takes most of its time."""

import sys
from contextlib import suppress
from importlib import import_module

_PARSER = "rfc3987_syntax"


def import_jsonschema() -> None:
    """Import jsonschema without its checks of IRIs, unless it is imported already.

    The parser of IRIs builds 38 grammars when it is imported, which takes 1.4 s. The schema of notebooks
    has none, and jsonschema works without the parser.
    """
    if {"jsonschema", _PARSER} & set(sys.modules):
        return
    sys.modules[_PARSER] = None  # type: ignore[assignment]  # its import raises ImportError
    try:
        with suppress(ImportError):  # nbformat reports what is missing
            import_module("jsonschema")
    finally:
        del sys.modules[_PARSER]
