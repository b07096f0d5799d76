"""A vLLM pytest id and the Case that it stands for."""

import dataclasses
import re
from typing import TYPE_CHECKING, Any

from attnlab.case.errors import InvalidCase

if TYPE_CHECKING:
    from attnlab.case.case import Case

_PLAIN = (
    "op",
    "sliding_window",
    "device",
    "kv_cache_dtype",
    "dtype",
    "head_size",
    "num_queries_per_kv",
    "num_heads",
)
_ALIBI = tuple(name for name in _PLAIN if name != "sliding_window")
_PARAMETERS = {
    "test_contexted_kv_attention": _PLAIN,
    "test_contexted_kv_attention_alibi": _ALIBI,
    "test_contexted_kv_attention_f32": _PLAIN,
    "test_contexted_kv_attention_alibi_f32": _ALIBI,
}
_ID = re.compile(r"(?:.*::)?(?P<name>\w+)\[(?P<parameters>[^\[\]]+)\]")
_INTEGERS = ("sliding_window", "head_size", "num_queries_per_kv", "num_heads")


def fields_of(test_id: str) -> dict[str, Any]:
    """Return the fields of the Case that a test id of test_prefix_prefill.py stands for.

    The id may carry the file's path in front. Newer releases write the model's own dtype where older
    ones write "auto" as kv_cache_dtype; both give "auto". pytest names a dtype by its place in a list
    of one, so ``dtype0`` is float16, or float32 in the ``_f32`` tests. 0.33.0 puts ``interleave_v`` in
    front.

    The Case is the test as it stands since its fix: index tensors int32, context tokens alone in the
    cache, FP8 "written" by converting numbers to uint8, key cache split by x = 8 (vLLM 0.11.2 and
    0.33.0). Raises InvalidCase with the reason and the expected form.
    """
    if not isinstance(test_id, str):
        raise InvalidCase(f"test_id must be a text, got {test_id!r}")
    match = _ID.fullmatch(test_id.strip())
    if match is None or match["name"] not in _PARAMETERS:
        raise InvalidCase(
            f"test_id must be like test_contexted_kv_attention[{'-'.join(_PLAIN)}], got {test_id!r}"
        )
    names, words = _PARAMETERS[match["name"]], match["parameters"].split("-")
    interleave_v = words[0] == "True"
    words = words[1:] if words[0] in ("True", "False") else words
    if len(words) != len(names):
        raise InvalidCase(
            f"test_id must have {len(names)} parameters ({'-'.join(names)}), got {len(words)}: {test_id!r}"
        )
    fields: dict[str, Any] = dict(zip(names, words, strict=True))
    if not re.fullmatch(r"(cuda|cpu)(:\d+)?", fields.pop("device")):
        raise InvalidCase(f"test_id must name a device like cuda:0, got {test_id!r}")
    for name in names:
        if name in _INTEGERS:
            fields[name] = _integer(name, fields[name], test_id)
    fields["dtype"] = _dtype(fields["dtype"], match["name"], test_id)
    if fields["kv_cache_dtype"] == fields["dtype"]:
        fields["kv_cache_dtype"] = "auto"
    alibi = "alibi" in match["name"]
    fields |= {"alibi": alibi, "force_decode": not alibi, "stage": "cast_after_cumsum", "x": 8}
    if interleave_v:
        fields["interleave_v"] = True
    if fields["kv_cache_dtype"] != "auto":
        fields["cache_write"] = "numeric"
    return fields


def _integer(name: str, word: str, test_id: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", word):
        raise InvalidCase(f"{name} must be an integer, got {word!r} in test_id {test_id!r}")
    return int(word)


def _dtype(word: str, test: str, test_id: str) -> str:
    if word != "dtype0":
        raise InvalidCase(f"dtype must be dtype0, got {word!r} in test_id {test_id!r}")
    return "float32" if test.endswith("_f32") else "float16"


def nearest_id(case: "Case") -> tuple[str, dict[str, Any]]:
    """Return the test id that is nearest to a Case, and the fields in which the Case differs from it.

    ``Case.from_test_id(test_id, **changes)`` is the Case again. With no changes the Case is the test's
    own, and pytest runs it by this id.
    """
    name = "test_contexted_kv_attention" + ("_alibi" if case.alibi else "")
    name += "_f32" if case.dtype == "float32" else ""
    words = {"device": "cuda:0", "dtype": "dtype0"}
    parts = [words.get(field) or str(getattr(case, field)) for field in _PARAMETERS[name]]
    test_id = f"{name}[{'True-' if case.interleave_v else ''}{'-'.join(parts)}]"
    there = {field.name: field.default for field in dataclasses.fields(case)} | fields_of(test_id)
    changes = {name: getattr(case, name) for name in there if getattr(case, name) != there[name]}
    return test_id, changes
