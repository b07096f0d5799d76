"""vLLM's attention tests other than the four main ones of test_prefix_prefill.py, and their pytest ids.

pytest writes a number, a string, True and None of a parameter as text. It writes any other value as the
parameter's name and its place in the list of values, such as ``num_heads1``. The lists here are those of
vLLM 0.11.2 and 0.33.0.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from attnlab.case import upstream_fields as make
from attnlab.case.declaration import FIELDS, field_type
from attnlab.case.errors import InvalidCase
from attnlab.case.ops import DECODE_FWD, MERGE, OPS, PREFILL, UNIFIED, WRAPPER, WRITE
from attnlab.case.upstream_fields import Values

_LITERALS = {"None": None, "True": True, "False": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamTest:
    """A test of vLLM in one of its releases.

    - ``release``: where the parameters were read.
    - ``parameters``: their names in the order of the id, which is from the last decorator to the first.
    - ``lists``: the values of the parameters that an id writes as a name and a number.
    - ``fields``: makes the fields of the Case from the values.
    - ``missing``: names what a Case with these fields lacks to be the test, in words; "" if nothing.
    """

    release: str
    parameters: tuple[str, ...]
    lists: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    fields: Callable[[Values], dict[str, Any]]
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
        if match := re.fullmatch(rf"{name}(\d{{1,6}})", word):
            known = self.lists.get(name, ())
            if int(match[1]) < len(known):
                return known[int(match[1])]
            last = f"{name}{len(known) - 1}" if known else "a value, not a number in a list"
            raise ValueError(f"{name} must be at most {last}, got {word}")
        if word in _LITERALS:
            return _LITERALS[word]
        if re.fullmatch(r"\d{1,6}", word):
            return int(word)
        if re.fullmatch(r"\d{1,6}\.\d{1,6}", word):
            return float(word)
        return word


_UNIFIED = ("block_size", "head_size", "num_heads", "seq_lens")
_CAPPED = ("seq_threshold_3D", "num_blocks", "soft_cap", "sliding_window", *_UNIFIED)
_QUERIES = ("q_dtype", "num_blocks", "soft_cap", "dtype", "sliding_window", *_UNIFIED)
_DECODE = ("PAGE_SIZE", "CACHE_SIZE", "D_V", "D_QK", "H_KV", "H_Q", "L", "B")
_WRITE = (
    *("kv_cache_dtype", "device", "seed", "dtype", "num_blocks", "block_size"),
    *("head_size", "num_heads", "num_tokens"),
)
_MERGE = ("head_size", "num_query_heads", "num_tokens")
_PAGED = (
    *("device", "seed", "kv_cache_dtype", "dtype", "block_size", "use_alibi"),
    *("head_size", "num_heads", "num_seqs"),
)
_SEQ_LENS = (
    ((1, 1328), (5, 18), (129, 463)),
    ((1, 523), (1, 37), (1, 2011)),
    ((1, 1),) * 533,
    ((533, 533),) * 533,
)
_HEADS = ((4, 4), (8, 2), (5, 1))
_BF16, _DTYPES = ("bfloat16",), ("float32", "float16", "bfloat16")


def _always(text: str) -> Callable[[Values], str]:
    return lambda values: text


# By the name of the test, one record for each form of its ids.
TESTS: dict[str, tuple[UpstreamTest, ...]] = {
    "test_triton_unified_attn": (
        UpstreamTest(
            release="0.11.2",
            parameters=_QUERIES,
            lists={
                "q_dtype": (None, "fp8"),
                "dtype": _BF16,
                "num_heads": _HEADS[:2],
                "seq_lens": _SEQ_LENS[:2],
            },
            fields=make.unified,
            missing=make.unified_missing,
        ),
        UpstreamTest(
            release="0.33.0",
            parameters=("seq_threshold_3D", *_QUERIES),
            lists={
                "q_dtype": (None, "fp8"),
                "dtype": _BF16,
                "num_heads": _HEADS,
                "seq_lens": _SEQ_LENS[:2],
            },
            fields=make.unified,
            missing=make.unified_missing,
        ),
    ),
    "test_triton_unified_attn_bf16_query_fp8_kv": (
        UpstreamTest(
            release="0.33.0",
            parameters=("seq_threshold_3D", "num_blocks", *_UNIFIED),
            lists={"num_heads": _HEADS, "seq_lens": _SEQ_LENS[:2]},
            fields=make.unified_fp8_cache,
        ),
    ),
    "test_triton_unified_attn_fp16_input_fp8_output": (
        UpstreamTest(
            release="0.33.0",
            parameters=_CAPPED,
            lists={"num_heads": _HEADS, "seq_lens": _SEQ_LENS},
            fields=make.unified_fp8_output,
            missing=_always("an FP8 output"),
        ),
    ),
    "test_triton_unified_attn_use_td": (
        UpstreamTest(
            release="0.33.0",
            parameters=_CAPPED,
            lists={"num_heads": _HEADS, "seq_lens": _SEQ_LENS[:2]},
            fields=make.unified,
            missing=_always("tensor descriptors (use_td)"),
        ),
    ),
    "test_decode_attention": (
        UpstreamTest(
            release="0.33.0", parameters=_DECODE, fields=make.decode, missing=make.decode_missing
        ),
    ),
    "test_decode_attention_fp8": (
        UpstreamTest(
            release="0.33.0",
            parameters=_DECODE,
            fields=make.decode_fp8,
            missing=make.decode_missing,
        ),
    ),
    "test_merge_attn_states": (
        UpstreamTest(
            release="0.11.2",
            parameters=("output_dtype", *_MERGE),
            lists={"output_dtype": _DTYPES},
            fields=make.merge,
        ),
        UpstreamTest(
            release="0.33.0",
            parameters=("input_dtype", *_MERGE, "prefill_tokens_with_context", "use_fp8"),
            lists={"input_dtype": _DTYPES},
            fields=make.merge,
            missing=make.merge_missing,
        ),
    ),
    "test_reshape_and_cache_flash": (
        UpstreamTest(
            release="0.11.2",
            parameters=("implementation", "kv_cache_layout", *_WRITE),
            lists={"dtype": ("bfloat16", "float32")},
            fields=make.write,
            missing=make.write_missing,
        ),
        UpstreamTest(
            release="0.33.0",
            parameters=("implementation", "kv_scale_type", "kv_cache_layout", *_WRITE),
            lists={"dtype": ("bfloat16", "float32")},
            fields=make.write,
            missing=make.write_missing,
        ),
    ),
    "test_paged_attention": (
        UpstreamTest(
            release="0.11.2",
            parameters=(*_PAGED, "version"),
            lists={"dtype": _BF16, "num_heads": ((40, 40), (64, 8))},
            fields=make.paged,
            missing=make.paged_missing,
        ),
        UpstreamTest(
            release="0.33.0",
            parameters=("use_interleaved_v_cache", *_PAGED),
            lists={
                "dtype": ("bfloat16", "float16"),
                "num_heads": ((32, 8), (40, 40), (64, 8)),
            },
            fields=make.paged,
            missing=make.paged_missing,
        ),
    ),
    "test_qwen3_nonstandard_block_size": (
        UpstreamTest(
            release="0.33.0",
            parameters=(
                *("interleave_v", "op", "device", "dtype"),
                *("num_heads", "num_queries_per_kv", "head_size", "block_size"),
            ),
            lists={"dtype": ("float16",)},
            fields=make.nonstandard_blocks,
        ),
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


def fields_of_test(name: str, words: list[str], test_id: str) -> dict[str, Any]:
    """Return the fields of the Case of a test id of ``TESTS``.

    ``words`` are the id's parameters. Raises InvalidCase if they do not fit, or if a Case lacks something
    that the test has; then the text has the flags of the nearest Case.
    """
    forms = TESTS[name]
    form = max(forms, key=lambda form: form.likeness(words))
    if form.likeness(words) < 0:
        expected = " or ".join(
            f"{len(form.parameters)} ({'-'.join(form.parameters)})" for form in forms
        )
        raise InvalidCase(
            f"test_id must have as many parameters as in vLLM, {expected}, got {len(words)}: {test_id!r}",
            field="test_id",
        )
    try:
        values = form.values(words)
        fields = form.fields(values)
    except ValueError as error:
        raise InvalidCase(f"{error} in test_id {test_id!r}", field="test_id") from None
    except (TypeError, IndexError, ZeroDivisionError):
        expected = "-".join(form.parameters)
        raise InvalidCase(
            f"test_id must have values as in vLLM for {expected}, got {test_id!r}", field="test_id"
        ) from None
    if len(forms) > 1:
        fields["release"] = form.release
    if missing := form.missing(values):
        raise InvalidCase(
            f"test_id must be of a test that a Case can describe, got {test_id!r}, which has {missing}; "
            f"the nearest Case: {_flags(fields)}",
            field="test_id",
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


def refuse_test(name: str, test_id: str, known: tuple[str, ...]) -> NoReturn:
    """Raise InvalidCase for a test that has no Case, with the flags that describe a call of its op."""
    op = next((op for part, op in _OPS_BY_NAME if re.search(part, name)), None)
    if op is None:
        hint = f"attnlab has the ops {', '.join(OPS)}"
    else:
        flags = (
            "--num-heads, --num-queries-per-kv, --head-size, --block-size, --query-lens, --ctx-lens"
        )
        hint = f"describe the call with --op {op}, {flags}"
    tests = ", ".join(known)
    raise InvalidCase(
        f"test_id must be of a test that becomes a Case, got {test_id!r}; {hint} (tests: {tests})",
        field="test_id",
    )
