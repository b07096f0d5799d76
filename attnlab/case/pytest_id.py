"""Conversion between a pytest id of vLLM's attention tests and the fields of a Case.

The four main tests of test_prefix_prefill.py are here, the others in :mod:`attnlab.case.upstream_tests`.
"""

import re
from typing import Any

from attnlab.case.declaration import FIELDS, CaseFields
from attnlab.case.errors import InvalidCase
from attnlab.case.upstream_tests import TESTS, fields_of_test, refuse_test

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
    """Return the fields of the Case that a test id of vLLM's attention tests denotes.

    For test_prefix_prefill.py: the id may begin with the file's path. Differences between releases:

    - Older ones write "auto" as kv_cache_dtype, newer ones the dtype of the model. Both give "auto".
    - pytest numbers a dtype by its place in a list of one, so ``dtype0`` is float16, or float32 in the
      ``_f32`` tests.
    - 0.33.0 begins the parameters with ``interleave_v``.

    The Case is the test after its fix: int32 index tensors, only context tokens in the cache, FP8
    written by a cast of numbers to uint8, and x = 8 (vLLM 0.11.2 and 0.33.0). Raises InvalidCase with
    the expected form.
    """
    name, words, interleave_v = _split(test_id)
    if name in TESTS:
        return fields_of_test(name, words, test_id)
    names = _PARAMETERS[name]
    if len(words) != len(names):
        expected = f"{len(names)} parameters ({'-'.join(names)})"
        raise InvalidCase(f"test_id must have {expected}, got {len(words)}: {test_id!r}")
    fields: dict[str, Any] = dict(zip(names, words, strict=True))
    if not re.fullmatch(r"(cuda|cpu)(:\d+)?", fields.pop("device")):
        raise InvalidCase(f"test_id must name a device like cuda:0, got {test_id!r}")
    for integer in _INTEGERS:
        if integer in names:
            fields[integer] = _integer(integer, fields[integer], test_id)
    fields["dtype"] = _dtype(fields["dtype"], name, test_id)
    if fields["kv_cache_dtype"] == fields["dtype"]:
        fields["kv_cache_dtype"] = "auto"
    alibi = "alibi" in name
    fields["atol"] = tolerance_of_test(fields["kv_cache_dtype"], alibi)
    fields |= {"alibi": alibi, "force_decode": not alibi, "stage": "cast_after_cumsum", "x": 8}
    if interleave_v:
        fields["interleave_v"] = True
    if fields["kv_cache_dtype"] != "auto":
        fields["cache_write"] = "numeric"
    return fields


def tolerance_of_test(kv_cache_dtype: str, alibi: bool = False) -> float:
    """Return the atol of test_prefix_prefill.py: 1e-3 for FP8, 1e-6 with ALiBi, else 1e-4."""
    return 1e-3 if kv_cache_dtype != "auto" else 1e-6 if alibi else 1e-4


def _split(test_id: str) -> tuple[str, list[str], bool]:
    """Return the test's name, its parameters without interleave_v, and interleave_v."""
    if not isinstance(test_id, str):
        raise InvalidCase(f"test_id must be a string, got {test_id!r}")
    match = _ID.fullmatch(test_id.strip())
    if match is None:
        form = f"test_contexted_kv_attention[{'-'.join(_PLAIN)}]"
        raise InvalidCase(f"test_id must be like {form}, got {test_id!r}", field="test_id")
    words = match["parameters"].split("-")
    if match["name"] in TESTS:
        return match["name"], words, False
    if match["name"] not in _PARAMETERS:
        refuse_test(match["name"], test_id, (*_PARAMETERS, *TESTS))
    interleave_v = words[0] == "True"
    return match["name"], words[1:] if words[0] in ("True", "False") else words, interleave_v


def _integer(name: str, word: str, test_id: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", word):
        text = f"{name} must be an integer, got {word!r} in test_id {test_id!r}"
        raise InvalidCase(text, field=name)
    return int(word)


def _dtype(word: str, test: str, test_id: str) -> str:
    if word != "dtype0":
        text = f"dtype must be dtype0, got {word!r} in test_id {test_id!r}"
        raise InvalidCase(text, field="dtype")
    return "float32" if test.endswith("_f32") else "float16"


def nearest_id(case: CaseFields) -> tuple[str, dict[str, Any]]:
    """Return the test id that is nearest to a Case, and the fields in which the Case differs from it.

    ``Case.from_test_id(test_id, **changes)`` is the Case again. If there are no changes, pytest runs the
    Case by this id.
    """
    name = "test_contexted_kv_attention" + ("_alibi" if case.alibi else "")
    name += "_f32" if case.dtype == "float32" else ""
    words = {"device": "cuda:0", "dtype": "dtype0"}
    parts = [words.get(field) or str(getattr(case, field)) for field in _PARAMETERS[name]]
    test_id = f"{name}[{'True-' if case.interleave_v else ''}{'-'.join(parts)}]"
    base = {name: field.default for name, field in FIELDS.items()} | fields_of(test_id)
    changes = {name: getattr(case, name) for name in base if getattr(case, name) != base[name]}
    return test_id, changes
