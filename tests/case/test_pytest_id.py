"""Conversion between vLLM's pytest ids and Cases."""

import ast
import functools
import itertools
import random
import re
import tarfile
from collections.abc import Iterator
from typing import Any

import pytest
from helpers.sources import RELEASES

from attnlab.case.case import Case
from attnlab.case.errors import InvalidCase, Unavailable
from attnlab.case.pytest_id import TESTS
from attnlab.kernels.vllm.source import fetch_sdist


class Opaque:
    """A value that pytest writes as the parameter's name and its place in the list."""


def ids(source: str) -> dict[str, list[str]]:
    """Return the ids of each parametrised test function that a source text defines, by its name.

    A conditional expression counts with each of its values. Devices are cuda:0.
    """
    tree = ast.parse(source)
    constants = {
        node.targets[0].id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    found = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            lists = [
                words
                for decorator in reversed(node.decorator_list)
                if (words := _words(decorator, constants)) is not None
            ]
            if lists:
                found[node.name] = [
                    f"{node.name}[{'-'.join(words)}]" for words in itertools.product(*lists)
                ]
    return found


def _words(decorator: ast.expr, constants: dict[str, ast.expr]) -> list[str] | None:
    """Return the texts of the values of one parametrize decorator; None for another decorator."""
    if not isinstance(decorator, ast.Call) or not ast.unparse(decorator.func).endswith(
        ".parametrize"
    ):
        return None
    names = ast.literal_eval(decorator.args[0])
    names = names.replace(" ", "").split(",") if isinstance(names, str) else list(names)
    found = []
    for i, value in enumerate(_elements(decorator.args[1], constants)):
        if isinstance(value, ast.Starred):  # its ids are not known without running it
            found.append(names[0])
            continue
        if isinstance(value, ast.Call) and ast.unparse(value.func) == "pytest.param":
            named = [k.value for k in value.keywords if k.arg == "id"]
            found.append(str(_text(named[0], "", i, constants)) if named else names[0])
            continue
        parts = value.elts if len(names) > 1 else [value]
        found.append("-".join(_text(p, n, i, constants) for n, p in zip(names, parts, strict=True)))
    return found


def _elements(node: ast.expr, constants: dict[str, ast.expr]) -> Iterator[ast.expr]:
    """Yield the elements of a list expression."""
    if isinstance(node, ast.Name):
        yield from _elements(constants[node.id], constants)
    elif isinstance(node, ast.IfExp):
        longest = max(
            (list(_elements(part, constants)) for part in (node.body, node.orelse)), key=len
        )
        yield from longest
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        yield from _elements(node.left, constants)
        yield from _elements(node.right, constants)
    elif isinstance(node, ast.ListComp) and "cuda" in ast.unparse(node):
        yield ast.Constant("cuda:0")
    elif isinstance(node, ast.List | ast.Tuple):
        yield from node.elts
    else:
        raise AssertionError(f"a list of unknown form: {ast.unparse(node)}")


def _text(node: ast.expr, name: str, place: int, constants: dict[str, ast.expr]) -> str:
    """Return pytest's text of a value."""
    value = _value(node, constants)
    return f"{name}{place}" if isinstance(value, Opaque) else str(value)


def _value(node: ast.expr, constants: dict[str, ast.expr]) -> Any:
    if isinstance(node, ast.Constant) and not isinstance(node.value, bytes):
        return node.value
    if isinstance(node, ast.Name) and node.id not in constants:
        return node.id  # a function: pytest writes its name
    return Opaque()


PLAIN = "test_contexted_kv_attention[chunked_prefill_paged_decode-0-cuda:0-auto-dtype0-128-1-64]"
ALIBI = "test_contexted_kv_attention_alibi[context_attention_fwd-cuda:0-fp8-dtype0-24-64-64]"
F32 = "test_contexted_kv_attention_f32[context_attention_fwd-16-cuda:1-auto-dtype0-128-64-64]"
ALIBI_F32 = (
    "test_contexted_kv_attention_alibi_f32"
    "[chunked_prefill_paged_decode-cuda:0-fp8_e5m2-dtype0-128-1-64]"
)
FILE = "tests/kernels/attention/test_prefix_prefill.py::"


@pytest.mark.parametrize("path", ["", FILE])
@pytest.mark.parametrize(
    ("test_id", "fields"),
    [
        (PLAIN, {"op": "chunked_prefill_paged_decode", "num_queries_per_kv": 1, "alibi": False}),
        (PLAIN, {"dtype": "float16", "head_size": 128, "num_heads": 64, "force_decode": True}),
        (ALIBI, {"op": "context_attention_fwd", "alibi": True, "force_decode": False}),
        (ALIBI, {"kv_cache_dtype": "fp8", "cache_write": "numeric", "head_size": 24}),
        (F32, {"dtype": "float32", "sliding_window": 16, "num_queries_per_kv": 64}),
        (ALIBI_F32, {"dtype": "float32", "alibi": True, "kv_cache_dtype": "fp8_e5m2"}),
    ],
)
def test_ids_of_the_four_tests(test_id, path, fields):
    """Each id gives its Case, with or without the file's path."""
    case = Case.from_test_id(path + test_id)
    assert {name: getattr(case, name) for name in fields} == fields
    assert (case.stage, case.key_x) == ("cast_after_cumsum", 8)


@pytest.mark.parametrize(
    ("test_id", "atol"),
    [
        (PLAIN, 1e-4),
        (ALIBI, 1e-3),
        (F32, 1e-4),
        (PLAIN.replace("_attention[", "_attention_alibi[").replace("-0-cuda", "-cuda"), 1e-6),
    ],
)
def test_the_tolerance_is_the_tests(test_id, atol):
    assert Case.from_test_id(test_id).tolerance == atol


def test_the_ratio_precedes_the_heads():
    """``-1-64]`` means 64 heads with a GQA ratio of 1, not 64."""
    case = Case.from_test_id(PLAIN)
    assert (case.num_queries_per_kv, case.num_heads, case.num_kv_heads) == (1, 64, 64)


@pytest.mark.parametrize(
    ("test_id", "other"),
    [(PLAIN, PLAIN.replace("auto", "float16")), (F32, F32.replace("auto", "float32"))],
)
def test_auto_and_the_models_dtype_are_one(test_id, other):
    """Older ids have auto, newer ones the dtype."""
    assert Case.from_test_id(test_id) == Case.from_test_id(other)


def test_interleave_v_in_front():
    """In 0.33.0 interleave_v is the first parameter."""
    plain = Case.from_test_id(PLAIN)
    assert Case.from_test_id(PLAIN.replace("[", "[False-")) == plain
    assert Case.from_test_id(PLAIN.replace("[", "[True-")) == plain.replace(interleave_v=True)


@pytest.mark.parametrize("window", [0, 16, 2048])
def test_sliding_windows(window):
    """The window is the second parameter of the plain test."""
    case = Case.from_test_id(PLAIN.replace("-0-cuda", f"-{window}-cuda"))
    assert case.sliding_window == window


def test_changes_override_the_id():
    """Changes override the fields of the id."""
    assert Case.from_test_id(PLAIN, stage="int64", seed=3).stage == "int64"


@pytest.mark.parametrize(
    "test_id",
    [
        "",
        "nonsense",
        "test_contexted_kv_attention",
        "test_contexted_kv_attention[]",
        "test_other[" + PLAIN.partition("[")[2],
        PLAIN + "x",
        PLAIN.replace("-64]", "]"),
        PLAIN.replace("-64]", "-64-64]"),
        PLAIN.replace("_attention[", "_attention_alibi["),
        ALIBI.replace("_alibi", ""),
        PLAIN.replace("-128-", "-wide-"),
        PLAIN.replace("-128-", "-²-"),
        PLAIN.replace("-128-", "-" + "9" * 5000 + "-"),
        PLAIN.replace("-0-cuda", "-None-cuda"),
        PLAIN.replace("dtype0", "dtype1"),
        PLAIN.replace("cuda:0", "tpu:0"),
        PLAIN.replace("auto", "int4"),
        PLAIN.replace("chunked_prefill_paged_decode", "other_op"),
        PLAIN.replace("-1-64]", "-3-64]"),
        PLAIN.replace("-", "\n", 1),
        None,
    ],
)
def test_ids_that_are_none(test_id):
    """Any other text is refused with one line."""
    with pytest.raises(InvalidCase) as caught:
        Case.from_test_id(test_id)
    assert " must " in str(caught.value)
    assert "\n" not in str(caught.value)


# Pytest ids of vLLM's other attention tests: each becomes a Case, or the answer names flags.


FOLDER = "tests/kernels/attention"
FILES = (
    "test_prefix_prefill.py",
    "test_triton_unified_attention.py",
    "test_triton_decode_attention.py",
    "test_merge_attn_states.py",
    "test_cache.py",
    "test_attention.py",
)
UNIFIED = "test_triton_unified_attn[8-None-2048-50.0-dtype0-64-16-256-num_heads2-seq_lens0]"
OLD_UNIFIED = "test_triton_unified_attn[None-32768-None-dtype0-None-16-128-num_heads1-seq_lens1]"
DECODE = "test_decode_attention[16-16384-128-128-8-32-1027-5]"
MERGE = "test_merge_attn_states[input_dtype2-96-48-613-None-False]"
OLD_MERGE = "test_merge_attn_states[output_dtype0-96-48-613]"
WRITE = "test_reshape_and_cache_flash[triton-tensor-NHD-fp8-cuda:0-0-dtype1-1024-8-80-8-42]"
OLD_WRITE = "test_reshape_and_cache_flash[triton-NHD-auto-cuda:0-0-dtype0-1024-32-64-8-42]"
PAGED = "test_paged_attention[False-cuda:0-0-fp8-dtype1-16-True-64-num_heads0-7]"
WIDE = "test_qwen3_nonstandard_block_size[True-context_attention_fwd-cuda:0-dtype0-8-4-256-1040]"

# Tests with something in every id that no Case has.
NEVER = {
    "test_triton_unified_attn_fp16_input_fp8_output",
    "test_triton_unified_attn_use_td",
}


@functools.cache
def upstream(version: str) -> dict[str, dict[str, list[str]]]:
    """Return the ids of each file of a release, by test; skip if the sdist is unavailable."""
    try:
        path = fetch_sdist(version)
    except Unavailable as error:
        pytest.skip(str(error))
    found = {}
    with tarfile.open(path) as sdist:
        for member in sdist:
            folder, _, name = member.name.rpartition("/")
            if folder.endswith(FOLDER) and name in FILES:
                file = sdist.extractfile(member)
                found[name] = ids(file.read().decode())
                if len(found) == len(FILES):
                    break
    return found


@pytest.mark.releases
@pytest.mark.parametrize("version", RELEASES)
def test_every_id_becomes_a_case_or_names_flags(version):
    """The parameters of each known test are those of the release; every other id is refused with an op."""
    cases: set[str] = set()
    refused: dict[str, list[str]] = {}
    for file, tests in upstream(version).items():
        for name, found in tests.items():
            for test_id in random.Random(0).sample(found, min(len(found), 60)):
                try:
                    case = Case.from_test_id(f"{FOLDER}/{file}::{test_id}")
                except InvalidCase as error:
                    refused.setdefault(name, []).append(str(error))
                else:
                    cases.add(name)
                    releases = {form.release for form in TESTS[name]}
                    assert len(releases) < 2 or case.release == version
    texts = [text for found in refused.values() for text in found]
    hint = re.compile("the nearest Case: --|--op |has the ops")
    assert [text for text in texts if "as in vLLM" in text or not hint.search(text)] == []
    known = {name for name, forms in TESTS.items() if {version, ""} & {f.release for f in forms}}
    assert known <= cases | refused.keys()
    assert known - cases <= NEVER
    assert len(refused) > 10


@pytest.mark.parametrize(
    ("test_id", "fields"),
    [
        (UNIFIED, {"op": "unified_attention", "num_heads": 5, "num_queries_per_kv": 5}),
        (UNIFIED, {"query_lens": (1, 5, 129), "ctx_lens": (1327, 13, 334), "num_splits": 16}),
        (UNIFIED, {"softcap": 50.0, "sliding_window": 64, "dtype": "bfloat16", "head_size": 256}),
        (UNIFIED, {"atol": 1.5e-2, "rtol": 1e-2, "num_blocks": 2048, "release": "0.33.0"}),
        (UNIFIED.replace("[8-", "[0-"), {"num_splits": 0}),
        (OLD_UNIFIED, {"release": "0.11.2", "num_heads": 8, "num_queries_per_kv": 4}),
        (OLD_UNIFIED, {"query_lens": (1, 1, 1), "sliding_window": 0, "num_splits": None}),
        (DECODE, {"op": "decode_attention_fwd", "query_lens": (1,) * 5, "num_splits": 8}),
        (DECODE, {"seq_lens_dtype": "int64", "block_size": 16, "num_queries_per_kv": 4}),
        (MERGE, {"op": "merge_attn_states", "dtype": "bfloat16", "num_heads": 48, "rtol": 1e-2}),
        (OLD_MERGE, {"dtype": "float32", "head_size": 96, "rtol": 1e-3, "release": "0.11.2"}),
        (WRITE, {"op": "reshape_and_cache_flash", "dtype": "float32", "kv_cache_dtype": "fp8"}),
        (OLD_WRITE, {"dtype": "bfloat16", "num_blocks": 512, "block_size": 32}),
        (PAGED, {"op": "chunked_prefill_paged_decode", "query_lens": (1,) * 7, "alibi": True}),
        (PAGED, {"k_scale": 0.5, "v_scale": 0.25, "num_queries_per_kv": 4, "dtype": "float16"}),
        (WIDE, {"block_size": 1040, "interleave_v": True, "num_heads": 8, "sliding_window": 0}),
    ],
)
def test_the_fields_of_an_id(test_id, fields):
    case = Case.from_test_id(test_id)
    assert {name: getattr(case, name) for name in fields} == fields


@pytest.mark.parametrize("test_id", [MERGE, OLD_MERGE])
def test_the_number_of_tokens(test_id):
    assert Case.from_test_id(test_id).lengths.num_tokens == 613


@pytest.mark.parametrize(
    ("test_id", "words"),
    [
        (
            UNIFIED.replace("-None-2048", "-q_dtype1-2048"),
            ["FP8 queries", "--op unified_attention"],
        ),
        (DECODE.replace("-128-128-", "-512-576-"), ["width 512", "--head-size 576"]),
        (
            MERGE.replace("None-False", "128-True"),
            ["prefill_tokens_with_context", "--head-size 96"],
        ),
        (WRITE.replace("triton", "cuda"), ["compiled", "--op reshape_and_cache_flash"]),
        (WRITE.replace("-fp8-", "-nvfp4-"), ["nvfp4"]),
        ("test_speculative_splitk_matches_reference[None-w2]", ["--op unified_attention"]),
        ("test_concat_and_cache_mla[auto]", ["attnlab has the ops"]),
    ],
)
def test_what_no_case_has_is_named_with_the_nearest_flags(test_id, words):
    with pytest.raises(InvalidCase) as caught:
        Case.from_test_id(test_id)
    assert caught.value.field == "test_id"
    assert "\n" not in str(caught.value)
    assert [word for word in words if word not in str(caught.value)] == []


@pytest.mark.parametrize(
    "test_id",
    [
        UNIFIED.replace("num_heads2", "num_heads3"),
        OLD_UNIFIED.replace("num_heads1", "num_heads2"),
        UNIFIED.replace("dtype0", "dtype1"),
        UNIFIED.replace("-16-256-", "-256-"),
        UNIFIED.replace("seq_lens0", "5"),
        DECODE.replace("-5]", "-999999999]"),
        DECODE.replace("-8-32-", "-0-32-"),
        MERGE.replace("613", "many"),
        PAGED.replace("-7]", "-0]"),
        WIDE.replace("context_attention_fwd", "other"),
    ],
)
def test_values_that_the_test_does_not_have(test_id):
    with pytest.raises(InvalidCase) as caught:
        Case.from_test_id(test_id)
    assert " must " in str(caught.value)


def test_ids_are_collected_from_decorators():
    source = """
SIZES = [1, 2.5]
@pytest.mark.parametrize("a", SIZES)
@pytest.mark.parametrize("b", [torch.half, None] if here else [torch.half])
@pytest.mark.parametrize("c,d", [("x", (1, 2)), ("y", False)])
def test_one(a, b, c, d): ...
def test_two(): ...
"""
    found = ids(source)
    assert list(found) == ["test_one"]
    assert len(found["test_one"]) == 8
    assert found["test_one"][0] == "test_one[x-d0-b0-1]"
    assert found["test_one"][-1] == "test_one[y-False-None-2.5]"
