"""A Case as text: convert it to JSON, a command line or a test id, and read it back."""

import json
import shlex

from attnlab.case.case import Case
from attnlab.case.errors import InvalidCase
from attnlab.case.flags import Parser, add_case_flags, case_of
from attnlab.case.pytest_id import nearest_id


def case_texts(case: Case) -> dict[str, str]:
    """Return the Case as JSON, as a command line, as a Python expression and as a vLLM test id.

    :func:`read_case` reads all but the expression, which starts from the nearest test id. The test id is
    "" if it cannot express the Case.
    """
    test_id, changes = nearest_id(case)
    arguments = "".join(f", {name}={value!r}" for name, value in changes.items())
    return {
        "JSON": json.dumps(case.changes()),
        "command line": case.to_cli(),
        "from a test id": f'Case.from_test_id("{test_id}"{arguments})',
        "test id": test_id if not changes else "",
    }


def read_case(text: str) -> Case:
    """Return the Case of a text: JSON, a command line of ``attnlab run``, or a vLLM test id.

    Raises InvalidCase.
    """
    text = text.strip()
    if text.startswith("{"):
        return Case.from_json(text)
    if text.startswith("attnlab "):
        return _read_command(text)
    return Case.from_test_id(text)


class _CaseParser(Parser):
    """Parser of the flags of a Case that raises InvalidCase."""

    def error(self, message: str) -> None:  # type: ignore[override]
        raise InvalidCase(f"command line must be that of attnlab run: {message}")


def _read_command(text: str) -> Case:
    parser = _CaseParser(prog="attnlab run", add_help=False)
    add_case_flags(parser)
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise InvalidCase(f"command line must have matching quotes: {error}") from error
    if words[1:2] != ["run"]:
        raise InvalidCase(f"command line must begin with attnlab run, got {text[:40]!r}")
    return case_of(parser.parse_args(words[2:]))
