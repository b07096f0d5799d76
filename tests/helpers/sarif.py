"""What SARIF 2.1.0 requires of the objects that the lab writes, as a JSON schema.

The properties that are required and the values that are allowed are those of the schema that OASIS
publishes; properties that the lab does not write are not listed, so that a wrong name is an error.
"""

from typing import Any


def _object(required: tuple[str, ...], **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "required": list(required),
        "properties": properties,
        "additionalProperties": False,
    }


_TEXT = {"type": "string", "minLength": 1}
_MESSAGE = _object(("text",), text=_TEXT)
_LEVEL = {"enum": ["none", "note", "warning", "error"]}
_RULE = _object(
    ("id",),
    id=_TEXT,
    shortDescription=_MESSAGE,
    defaultConfiguration=_object((), level=_LEVEL),
)
_PLACE = _object(
    ("artifactLocation",),
    artifactLocation=_object((), uri=_TEXT, uriBaseId=_TEXT),
    region=_object(("startLine",), startLine={"type": "integer", "minimum": 1}),
)
_LOCATION = _object(
    (),
    physicalLocation=_PLACE,
    logicalLocations={"type": "array", "items": _object((), name=_TEXT, kind=_TEXT)},
)
_RESULT = _object(
    ("message",),
    ruleId=_TEXT,
    ruleIndex={"type": "integer", "minimum": -1},
    level=_LEVEL,
    message=_MESSAGE,
    locations={"type": "array", "items": _LOCATION},
    partialFingerprints={"type": "object", "additionalProperties": _TEXT},
    suppressions={
        "type": "array",
        "items": _object(
            ("kind",), kind={"enum": ["inSource", "external"]}, justification={"type": "string"}
        ),
    },
    properties={"type": "object"},
)
_INVOCATION = _object(
    ("executionSuccessful",),
    executionSuccessful={"type": "boolean"},
    exitCode={"type": "integer"},
    toolExecutionNotifications={
        "type": "array",
        "items": _object(("message",), message=_MESSAGE, level=_LEVEL),
    },
)
_DRIVER = _object(
    ("name",),
    name=_TEXT,
    version=_TEXT,
    rules={"type": "array", "items": _RULE, "uniqueItems": True},
)
_RUN = _object(
    ("tool",),
    tool=_object(("driver",), driver=_DRIVER),
    automationDetails=_object((), id=_TEXT),
    originalUriBaseIds={
        "type": "object",
        "additionalProperties": _object((), uri=_TEXT, description=_MESSAGE),
    },
    invocations={"type": "array", "items": _INVOCATION},
    results={"type": "array", "items": _RESULT},
)
SCHEMA = _object(
    ("version", "runs"),
    **{"$schema": _TEXT},
    version={"const": "2.1.0"},
    runs={"type": "array", "items": _RUN},
)
