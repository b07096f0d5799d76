"""Conversion between a pytest id of vLLM's attention tests and the fields of a Case."""

import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any, NoReturn

from attnlab.case.declaration import FIELDS, CaseFields, field_type
from attnlab.case.errors import InvalidCase
from attnlab.case.ops import DECODE_FWD, MERGE, OPS, PREFILL, UNIFIED, WRAPPER, WRITE

# Fields of the Cases of vLLM's attention tests, and what such a Case lacks to be the test.
#
# Each function takes the values of a test's parameters. Data that a test draws from a random generator is
# drawn anew: a Case has the test's distribution, not its numbers.

Values = Mapping[str, Any]
_LDS_BYTES = 64 << 10  # shared memory of a workgroup on gfx90a and gfx942


def _common(values: Values) -> dict[str, Any]:
    """Return what all of these tests have: int32 tables, random data, and random numbers in empty slots."""
    return {
        "stage": "sound",
        "seed": values.get("seed", 0),
        "distribution": "normal",
        "empty_slots": "garbage",
    }


def unified(values: Values) -> dict[str, Any]:
    heads, kv_heads = values["num_heads"]
    lens = values["seq_lens"]
    fields = {
        **_common(values),
        "op": UNIFIED,
        "num_heads": heads,
        "num_queries_per_kv": heads // kv_heads,
        "head_size": values["head_size"],
        "block_size": values["block_size"],
        "dtype": values.get("dtype", "bfloat16"),
        "sliding_window": values.get("sliding_window") or 0,
        "softcap": values.get("soft_cap"),
        "query_lens": tuple(query_len for query_len, _ in lens),
        "ctx_lens": tuple(seq_len - query_len for query_len, seq_len in lens),
        "num_blocks": values["num_blocks"],
        "atol": 1.5e-2,
        "rtol": 1e-2,
    }
    if "seq_threshold_3D" in values:
        fields["num_splits"] = 16 if values["seq_threshold_3D"] else 0
    return fields


def unified_fp8_cache(values: Values) -> dict[str, Any]:
    scales = {"kv_cache_dtype": "fp8", "k_scale": 0.5, "v_scale": 0.25}
    return {**unified(values), **scales, "atol": 0.15, "rtol": 0.15}


def unified_fp8_output(values: Values) -> dict[str, Any]:
    return {**unified({**values, "dtype": "float16"}), "atol": 0.2, "rtol": 0.2}


def decode(values: Values) -> dict[str, Any]:
    """The test compares two page sizes by torch.allclose; a Case compares one with the reference, up to
    rounding. Its table and seq_lens are int64."""
    count, seq_len = values["B"], values["L"]
    return {
        **_common(values),
        "op": DECODE_FWD,
        "num_heads": values["H_Q"],
        "num_queries_per_kv": values["H_Q"] // values["H_KV"],
        "head_size": values["D_QK"],
        "block_size": values["PAGE_SIZE"],
        "dtype": "bfloat16",
        "num_splits": 8,
        "query_lens": (1,) * count,
        "ctx_lens": (seq_len - 1,) * count,
        "num_blocks": values["CACHE_SIZE"] // values["PAGE_SIZE"],
        "block_table_dtype": "int64",
        "seq_lens_dtype": "int64",
        "output_init": "zeros",
    }


def decode_fp8(values: Values) -> dict[str, Any]:
    """The test's scale is the largest of its random numbers, about 5.6, divided by 448."""
    scale = {"kv_cache_dtype": "fp8", "k_scale": 0.0125, "v_scale": 0.0125}
    return {**decode(values), **scale, "atol": 0.5, "rtol": 1e-2}


def decode_missing(values: Values) -> str:
    return "" if values["D_QK"] == values["D_V"] else f"values of width {values['D_V']}"


def merge(values: Values) -> dict[str, Any]:
    """The test merges random numbers; a Case merges the attention to 16 cached keys and to the new ones."""
    dtype, tokens = values.get("input_dtype") or values["output_dtype"], values["num_tokens"]
    lens = [64] * (tokens // 64) + [tokens % 64] * (tokens % 64 > 0)
    return {
        **_common(values),
        "op": MERGE,
        "num_heads": values["num_query_heads"],
        "head_size": values["head_size"],
        "dtype": dtype,
        "query_lens": tuple(lens),
        "ctx_lens": (16,) * len(lens),
        "atol": 1e-3,
        "rtol": 1e-2 if dtype == "bfloat16" else 1e-3,
    }


def merge_missing(values: Values) -> str:
    missing = ["an FP8 output"] if values.get("use_fp8") else []
    if values.get("prefill_tokens_with_context") is not None:
        missing.append("prefill_tokens_with_context")
    return " and ".join(missing)


def write(values: Values) -> dict[str, Any]:
    """Half of num_tokens, each in a block of its own and at another offset, in half of num_blocks."""
    count, block_size = values["num_tokens"] // 2, values["block_size"]
    fields = {
        **_common(values),
        "op": WRITE,
        "num_heads": values["num_heads"],
        "head_size": values["head_size"],
        "block_size": block_size,
        "dtype": values["dtype"],
        "query_lens": (1,) * count,
        "ctx_lens": tuple(5 * i % block_size for i in range(count)),
        "num_blocks": values["num_blocks"] // 2,
    }
    # The largest of its random numbers, about 4, divided by 64.
    if values["kv_cache_dtype"] == "fp8":
        fields |= {"kv_cache_dtype": "fp8", "k_scale": 0.0625, "v_scale": 0.0625}
    if values.get("kv_cache_layout") == "HND":
        fields["kv_layout"] = "HND"
    return fields


def write_missing(values: Values) -> str:
    missing = []
    if values["kv_cache_dtype"] == "nvfp4":
        missing.append("an nvfp4 cache")
    if values.get("kv_scale_type") == "attn_head":
        missing.append("one scale per head")
    if values.get("implementation", "cuda") == "cuda":
        missing.append("vLLM's compiled kernel instead of its Triton kernel")
    elif values["kv_cache_layout"] == "HND":
        missing.append("the Triton kernel with HND, which the test skips")
    return " and ".join(missing)


def paged(values: Values) -> dict[str, Any]:
    """The ROCm decode kernel. The longest sequence fills the shared memory of gfx90a and gfx942."""
    most = _LDS_BYTES // 4 - 512
    rng = random.Random(values["seed"])
    seq_lens = [rng.randint(1, most) for _ in range(values["num_seqs"])]
    seq_lens[-1] = most
    heads, kv_heads = values["num_heads"]
    fields = {
        **_common(values),
        "op": WRAPPER,
        "platform": "gfx942",
        "num_heads": heads,
        "num_queries_per_kv": heads // kv_heads,
        "head_size": values["head_size"],
        "block_size": values["block_size"],
        "alibi": values["use_alibi"],
        "dtype": values["dtype"],
        "query_lens": (1,) * len(seq_lens),
        "ctx_lens": tuple(seq_len - 1 for seq_len in seq_lens),
    }
    if values["kv_cache_dtype"] == "fp8":
        fields["kv_cache_dtype"] = "fp8"
        if "version" not in values:  # 0.33.0; before it both scales were 1
            fields |= {"k_scale": 0.5, "v_scale": 0.25}
    if values.get("use_interleaved_v_cache"):
        fields["interleave_v"] = True
    return fields


def paged_missing(values: Values) -> str:
    version = values.get("version", "rocm")
    if version != "rocm":
        return f"the compiled CUDA kernel paged_attention_{version}"
    if values["head_size"] not in (64, 128):
        return "a head size other than 64 and 128, which the test skips"
    return ""


def unified_missing(values: Values) -> str:
    return "" if values["q_dtype"] is None else "FP8 queries"


def contexted(values: Values) -> dict[str, Any]:
    """The four main tests of test_prefix_prefill.py, after their fix: int32 index tensors, only context
    tokens in the cache, FP8 written by a cast of numbers to uint8, and x = 8.

    Older releases write "auto" as kv_cache_dtype, newer ones the dtype of the model. Both give "auto".
    """
    if not re.fullmatch(r"(cuda|cpu)(:\d+)?", values["device"]):
        raise ValueError(f"device must be like cuda:0, got {values['device']}")
    alibi, kind = "sliding_window" not in values, values["kv_cache_dtype"]
    kind = "auto" if kind == values["dtype"] else kind
    fields = {name: value for name, value in values.items() if name != "device"}
    fields |= {"kv_cache_dtype": kind, "atol": tolerance_of_test(kind, alibi), "alibi": alibi}
    fields |= {"force_decode": not alibi, "stage": "cast_after_cumsum", "x": 8}
    return fields if kind == "auto" else {**fields, "cache_write": "numeric"}


def tolerance_of_test(kv_cache_dtype: str, alibi: bool = False) -> float:
    """Return the atol of test_prefix_prefill.py: 1e-3 for FP8, 1e-6 with ALiBi, else 1e-4."""
    return 1e-3 if kv_cache_dtype != "auto" else 1e-6 if alibi else 1e-4


def nonstandard_blocks(values: Values) -> dict[str, Any]:
    """test_contexted_kv_attention without a window, with fewer blocks than the test allocates."""
    names = ("op", "num_heads", "num_queries_per_kv", "head_size", "block_size", "interleave_v")
    fixed = {"stage": "cast_after_cumsum", "x": 8, "atol": 1e-4}
    return {**{name: values[name] for name in names}, **fixed}


# vLLM's attention tests and their pytest ids.
#
# pytest writes a number, a string, True and None of a parameter as text. It writes any other value as the
# parameter's name and its place in the list of values, such as ``num_heads1``. The lists here are those of
# vLLM 0.11.2 and 0.33.0.

_LITERALS = {"None": None, "True": True, "False": False}


@dataclass(frozen=True, slots=True)
class UpstreamTest:
    """A test of vLLM in one of its releases.

    - ``release``: "" if its Case is one of the default release.
    - ``fields``: makes the fields of the Case from the values.
    - ``parameters``: their names in the order of the id, which is from the last decorator to the first.
    - ``lists``: the values of the parameters that an id writes as a name and a number.
    - ``missing``: names what a Case with these fields lacks to be the test, in words; "" if nothing.
    """

    release: str
    fields: Callable[[Values], dict[str, Any]]
    parameters: tuple[str, ...]
    lists: Mapping[str, tuple[Any, ...]]
    missing: Callable[[Values], str] = lambda values: ""

    def likeness(self, words: list[str]) -> int:
        """Return how many words have the name of their parameter; -1 if their number differs."""
        if len(words) != len(self.parameters):
            return -1
        return sum(w.startswith(name) for name, w in zip(self.parameters, words, strict=True))

    def values(self, words: list[str]) -> dict[str, Any]:
        """Return the value of each parameter; raise ValueError with the reason if a word has none."""
        return {
            name: self._value(name, word) for name, word in zip(self.parameters, words, strict=True)
        }

    def _value(self, name: str, word: str) -> Any:
        match, known = re.fullmatch(rf"{name}(\d{{1,6}})", word), self.lists.get(name, ())
        if match and int(match[1]) < len(known):
            return known[int(match[1])]
        if word in _LITERALS:
            return _LITERALS[word]
        if match or known:
            right = f"at most {name}{len(known) - 1}" if known else "a value, not a number"
            raise ValueError(f"{name} must be {right}, got {word}")
        if re.fullmatch(r"\d{1,6}", word):
            return int(word)
        if re.fullmatch(r"\d{1,6}\.\d{1,6}", word):
            return float(word)
        return word


_UNIFIED = ("block_size", "head_size", "num_heads", "seq_lens")
_CAPPED = ("seq_threshold_3D", "num_blocks", "soft_cap", "sliding_window", *_UNIFIED)
_QUERIES = ("q_dtype", "num_blocks", "soft_cap", "dtype", "sliding_window", *_UNIFIED)
_DECODE = ("PAGE_SIZE", "CACHE_SIZE", "D_V", "D_QK", "H_KV", "H_Q", "L", "B")
_SPLIT = ("seq_threshold_3D", "num_blocks", *_UNIFIED)
_SPLIT_QUERIES = ("seq_threshold_3D", *_QUERIES)
_WRITE = (
    *("kv_cache_dtype", "device", "seed", "dtype", "num_blocks", "block_size"),
    *("head_size", "num_heads", "num_tokens"),
)
_OLD_WRITE = ("implementation", "kv_cache_layout", *_WRITE)
_NEW_WRITE = ("implementation", "kv_scale_type", "kv_cache_layout", *_WRITE)
_MERGE = ("head_size", "num_query_heads", "num_tokens")
_NEW_MERGE = ("input_dtype", *_MERGE, "prefill_tokens_with_context", "use_fp8")
_PAGED = (
    *("device", "seed", "kv_cache_dtype", "dtype", "block_size", "use_alibi"),
    *("head_size", "num_heads", "num_seqs"),
)
_SHAPE = ("head_size", "num_queries_per_kv", "num_heads")
_BLOCKS = (
    *("interleave_v", "op", "device", "dtype"),
    *("num_heads", "num_queries_per_kv", "head_size", "block_size"),
)
_ALIBI = ("op", "device", "kv_cache_dtype", "dtype", *_SHAPE)
_PLAIN = ("op", "sliding_window", "device", "kv_cache_dtype", "dtype", *_SHAPE)


def _prefix_prefill(parameters: tuple[str, ...], dtype: str) -> tuple[UpstreamTest, ...]:
    """Return both forms of a test of test_prefix_prefill.py; 0.33.0 begins with ``interleave_v``."""
    forms = (parameters, ("interleave_v", *parameters))
    return tuple(UpstreamTest("", contexted, names, {"dtype": (dtype,)}) for names in forms)


_SEQ_LENS = (
    ((1, 1328), (5, 18), (129, 463)),
    ((1, 523), (1, 37), (1, 2011)),
    ((1, 1),) * 533,
    ((533, 533),) * 533,
)
_HEADS = ((4, 4), (8, 2), (5, 1))
_BF16, _DTYPES = ("bfloat16",), ("float32", "float16", "bfloat16")
_OF_UNIFIED = {
    "q_dtype": (None, "fp8"),
    "dtype": _BF16,
    "num_heads": _HEADS,
    "seq_lens": _SEQ_LENS[:2],
}
_OLD_UNIFIED = {**_OF_UNIFIED, "num_heads": _HEADS[:2]}
_OF_MERGE = {"output_dtype": _DTYPES, "input_dtype": _DTYPES}
_OF_WRITE = {"dtype": ("bfloat16", "float32")}
_OF_PAGED = {"dtype": ("bfloat16", "float16"), "num_heads": ((32, 8), (40, 40), (64, 8))}
_OLD_PAGED = {"dtype": _BF16, "num_heads": ((40, 40), (64, 8))}
# By the name of the test, one record for each form of its ids.
TESTS: dict[str, tuple[UpstreamTest, ...]] = {
    "test_contexted_kv_attention": _prefix_prefill(_PLAIN, "float16"),
    "test_contexted_kv_attention_alibi": _prefix_prefill(_ALIBI, "float16"),
    "test_contexted_kv_attention_f32": _prefix_prefill(_PLAIN, "float32"),
    "test_contexted_kv_attention_alibi_f32": _prefix_prefill(_ALIBI, "float32"),
    "test_triton_unified_attn": (
        UpstreamTest("0.11.2", unified, _QUERIES, _OLD_UNIFIED, unified_missing),
        UpstreamTest("0.33.0", unified, _SPLIT_QUERIES, _OF_UNIFIED, unified_missing),
    ),
    "test_triton_unified_attn_bf16_query_fp8_kv": (
        UpstreamTest("0.33.0", unified_fp8_cache, _SPLIT, _OF_UNIFIED),
    ),
    "test_triton_unified_attn_fp16_input_fp8_output": (
        UpstreamTest(
            "0.33.0",
            unified_fp8_output,
            _CAPPED,
            {**_OF_UNIFIED, "seq_lens": _SEQ_LENS},
            lambda values: "an FP8 output",
        ),
    ),
    "test_triton_unified_attn_use_td": (
        UpstreamTest(
            "0.33.0", unified, _CAPPED, _OF_UNIFIED, lambda values: "tensor descriptors (use_td)"
        ),
    ),
    "test_decode_attention": (UpstreamTest("0.33.0", decode, _DECODE, {}, decode_missing),),
    "test_decode_attention_fp8": (UpstreamTest("0.33.0", decode_fp8, _DECODE, {}, decode_missing),),
    "test_merge_attn_states": (
        UpstreamTest("0.11.2", merge, ("output_dtype", *_MERGE), _OF_MERGE),
        UpstreamTest("0.33.0", merge, _NEW_MERGE, _OF_MERGE, merge_missing),
    ),
    "test_reshape_and_cache_flash": (
        UpstreamTest("0.11.2", write, _OLD_WRITE, _OF_WRITE, write_missing),
        UpstreamTest("0.33.0", write, _NEW_WRITE, _OF_WRITE, write_missing),
    ),
    "test_paged_attention": (
        UpstreamTest("0.11.2", paged, (*_PAGED, "version"), _OLD_PAGED, paged_missing),
        UpstreamTest(
            "0.33.0", paged, ("use_interleaved_v_cache", *_PAGED), _OF_PAGED, paged_missing
        ),
    ),
    "test_qwen3_nonstandard_block_size": (
        UpstreamTest("0.33.0", nonstandard_blocks, _BLOCKS, {"dtype": ("float16",)}),
    ),
}

# The op that a test of another name is about, by a part of the name. The first one counts.
_OPS_BY_NAME = (
    (r"unified|splitk|mm_prefix|reduce_segments|softcap|fp8_softmax", UNIFIED),
    (r"decode_attention", DECODE_FWD),
    (r"merge_attn", MERGE),
    (r"contexted", PREFILL),
    (r"paged_attention|rocm_backend", WRAPPER),
    (r"reshape_and_cache", WRITE),
)


_ID = re.compile(r"(?:.*::)?(?P<name>\w+)\[(?P<parameters>[^\[\]]+)\]")


def fields_of(test_id: str) -> dict[str, Any]:
    """Return the fields of the Case that a test id of vLLM's attention tests denotes.

    The id may begin with the file's path. Raises InvalidCase with the expected form, or if a Case lacks
    something that the test has; then the text has the flags of the nearest Case.
    """
    if not isinstance(test_id, str):
        raise InvalidCase(f"test_id must be a string, got {test_id!r}")
    match = _ID.fullmatch(test_id.strip())
    if match is None:
        example = f"test_contexted_kv_attention[{'-'.join(_PLAIN)}]"
        raise InvalidCase(f"test_id must be like {example}, got {test_id!r}")
    name, words = match["name"], match["parameters"].split("-")
    if name not in TESTS:
        _refuse_test(name, test_id)
    forms = TESTS[name]
    form = max(forms, key=lambda form: form.likeness(words))
    if form.likeness(words) < 0:
        expected = " or ".join(
            f"{len(form.parameters)} ({'-'.join(form.parameters)})" for form in forms
        )
        raise InvalidCase(
            f"test_id must have as many parameters as in vLLM, {expected}, got {len(words)}: {test_id!r}"
        )
    try:
        values = form.values(words)
        fields = form.fields(values)
    except ValueError as error:
        raise InvalidCase(f"{error} in test_id {test_id!r}", field="test_id") from None
    except (TypeError, IndexError, ZeroDivisionError):
        expected = "-".join(form.parameters)
        raise InvalidCase(
            f"test_id must have values as in vLLM for {expected}, got {test_id!r}"
        ) from None
    if form.release and len(forms) > 1:
        fields["release"] = form.release
    if missing := form.missing(values):
        raise InvalidCase(
            f"test_id must be of a test that a Case can describe, got {test_id!r}, which has {missing}; "
            f"the nearest Case: {_flags(fields)}"
        )
    return fields


def _flags(fields: Mapping[str, Any]) -> str:
    """Return the command-line flags of fields."""
    words = [
        f"--{name.replace('_', '-')} {field_type(name).text(value)}"
        for name, value in fields.items()
        if value != FIELDS[name].default
    ]
    return " ".join(words)


def _refuse_test(name: str, test_id: str) -> NoReturn:
    """Raise InvalidCase for a test that has no Case, with the flags that describe a call of its op."""
    op = next((op for part, op in _OPS_BY_NAME if re.search(part, name)), None)
    if op is None:
        hint = f"attnlab has the ops {', '.join(OPS)}"
    else:
        flags = (
            "--num-heads, --num-queries-per-kv, --head-size, --block-size, --query-lens, --ctx-lens"
        )
        hint = f"describe the call with --op {op}, {flags}"
    tests = ", ".join(TESTS)
    raise InvalidCase(
        f"test_id must be of a test that becomes a Case, got {test_id!r}; {hint} (tests: {tests})"
    )


def nearest_id(case: CaseFields) -> tuple[str, dict[str, Any]]:
    """Return the test id that is nearest to a Case, and the fields in which the Case differs from it.

    ``Case.from_test_id(test_id, **changes)`` is the Case again. If there are no changes, pytest runs the
    Case by this id.
    """
    name = "test_contexted_kv_attention" + ("_alibi" if case.alibi else "")
    name += "_f32" if case.dtype == "float32" else ""
    words = {"device": "cuda:0", "dtype": "dtype0"}
    parts = [words.get(field) or str(getattr(case, field)) for field in TESTS[name][0].parameters]
    test_id = f"{name}[{'True-' if case.interleave_v else ''}{'-'.join(parts)}]"
    base = {name: field.default for name, field in FIELDS.items()} | fields_of(test_id)
    changes = {name: getattr(case, name) for name in base if getattr(case, name) != base[name]}
    return test_id, changes


def vllm_test_ids() -> list[str]:
    """Return the ids of the plain and the ALiBi test of vLLM 0.33.0's test_prefix_prefill.py, 192."""
    name = "test_contexted_kv_attention"
    ops, formats = (WRAPPER, PREFILL), ("auto", "fp8", "fp8_e5m2")
    shapes = [*product(formats, ("dtype0",), (24, 128), (1, 64), (64,))]
    devices, packs = ("cuda:0",), (False, True)
    plain = product(packs, ops, (0, 16, 2048), devices, shapes)
    alibi = product(packs, ops, devices, shapes)
    return [
        f"{test}[{'-'.join(str(word) for word in (*words[:-1], *words[-1]))}]"
        for test, found in ((name, plain), (f"{name}_alibi", alibi))
        for words in found
    ]
