"""The fields of an MlaCase, and what is refused."""

import pytest

from attnlab.case.errors import InvalidCase
from attnlab.mla.mla_case import MlaCase

ONE = (1, 1, 1)
WRONG = [
    ({"path": "encode"}, "path"),
    ({"num_heads": 0}, "num_heads"),
    ({"num_heads": True}, "num_heads"),
    ({"query_lens": ()}, "query_lens"),
    ({"query_lens": (0, 1, 2)}, "query_lens"),
    ({"query_lens": "3,4"}, "query_lens"),
    ({"ctx_lens": (1, 2)}, "ctx_lens"),
    ({"ctx_lens": (1, -2, 3)}, "ctx_lens"),
    ({"ctx_lens": (1 << 30, 0, 0)}, "ctx_lens"),
    ({"chunk_rows": 24}, "chunk_rows"),
    ({"block_size": 48, "chunk_rows": 48}, "block_size"),
    ({"spread": float("nan")}, "spread"),
    ({"output_scale": 0.0}, "output_scale"),
    ({"k_scale": 2.0}, "k_scale"),
    ({"kv_cache_dtype": "fp8", "platform": "sm_80"}, "kv_cache_dtype"),
    (
        {"kv_cache_dtype": "fp8", "path": "decode", "query_lens": ONE, "release": "0.11.2"},
        "kv_cache_dtype",
    ),
    ({"tokens_with_context": True, "ctx_lens": (0, 5, 6)}, "ctx_lens"),
    ({"output_scale": 0.5, "release": "0.11.2"}, "output_scale"),
    ({"padding": 1}, "padding"),
    ({"path": "decode", "query_lens": (1, 2, 1)}, "query_lens"),
    ({"path": "decode", "query_lens": ONE, "num_ranks": 4}, "num_ranks"),
    ({"path": "shards", "query_lens": (2, 2, 2)}, "query_lens"),
    ({"path": "shards", "query_lens": ONE, "num_ranks": 3}, "num_ranks"),
    ({"path": "shards", "query_lens": ONE, "kv_lora_rank": 48}, "kv_lora_rank"),
]


@pytest.mark.parametrize(("fields", "field"), WRONG, ids=lambda one: str(one)[:40])
def test_what_is_refused(fields, field):
    with pytest.raises(InvalidCase) as raised:
        MlaCase(**fields)
    assert raised.value.field == field
    assert "\n" not in str(raised.value)


def test_fields_survive_json():
    case = MlaCase(
        path="decode", query_lens=(2, 2), ctx_lens=(0, 7), kv_cache_dtype="fp8", k_scale=0.5
    )
    assert MlaCase.from_dict(case.to_dict()) == case


def test_an_unknown_field_is_refused():
    with pytest.raises(InvalidCase, match="heads is not a field"):
        MlaCase.from_dict({"heads": 3})
    with pytest.raises(InvalidCase):
        MlaCase().replace(heads=3)
