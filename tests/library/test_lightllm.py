"""LightLLM's records: rows of slots of requests, and ops of one name in several models; the text is ours."""

import zipfile
from pathlib import Path

import pytest
import torch
from helpers.sources import needs_triton

from attnlab.case.case import Case
from attnlab.checker.check import check
from attnlab.contracts.contract import Target
from attnlab.diagnosis.diagnose import diagnose
from attnlab.kernels import find_backend
from attnlab.kernels.binding import arguments_of
from attnlab.lab.lab import Lab
from attnlab.library.op import ops_of

CONTEXT, BLOOM, INT8KV = (
    f"lightllm_{name}" for name in ("llama_context", "bloom_context", "llama_context_int8kv")
)
MISTRAL, DECODE = "lightllm_mistral_prefill", "lightllm_llama_gqa_decode"
FILES = {
    "llama/triton_kernel/context_flashattention_nopad": """
import torch

def attend(q, k, v, window=None, slopes=0.0):
    group = q.shape[1] // k.shape[1]
    key, value = (one.float().repeat_interleave(group, 1) for one in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.float(), key) * q.shape[2] ** -0.5
    away = torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))
    scores = scores - slopes * away
    seen = (away >= 0) if window is None else (away >= 0) & (away < window)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), value)

def context_attention_fwd(q, k, v, o, b_req_idx, b_start_loc, b_seq_len, b_prompt_cache_len, max_input_len,
                          req_to_token_indexs):
    for i, request in enumerate(b_req_idx):
        n = b_seq_len[i]
        rows = slice(b_start_loc[i], b_start_loc[i] + n - b_prompt_cache_len[i])
        slots = req_to_token_indexs[{row}, :n].long()
        o[rows] = attend(q[rows], k[slots], v[slots]).to(o.dtype)

def context_attention_fwd_ppl_int8kv(q, k, v, o, b_start_loc, b_seq_len, max_input_len, b_prompt_cache_len):
    for i, n in enumerate(b_seq_len):
        rows = slice(b_start_loc[i], b_start_loc[i] + n - b_prompt_cache_len[i])
        key, value = (one[i, :, :n].transpose(0, 1) for one in (k, v))
        o[rows] = attend(q[rows], key, value).to(o.dtype)
""",
    "llama/triton_kernel/gqa_decode_flashattention_nopad": """
from .context_flashattention_nopad import attend

def gqa_decode_attention_fwd(q, k, v, o, req_to_tokens, b_req_idx, b_seq_len):
    for i, request in enumerate(b_req_idx):
        slots = req_to_tokens[{row}, : b_seq_len[i]].long()
        o[i : i + 1] = attend(q[i : i + 1], k[slots], v[slots]).to(o.dtype)
""",
    "bloom/triton_kernel/context_flashattention_nopad": """
from lightllm.utils.device_utils import is_tesla
from lightllm.models.llama.triton_kernel.context_flashattention_nopad import attend

def context_attention_fwd(q, k, v, o, b_req_idx, alibi, b_start_loc, b_seq_len, b_ready_cache_len,
                          max_input_len, req_to_token_indexs):
    assert k.shape[1] == q.shape[1] and not is_tesla()
    for i, request in enumerate(b_req_idx):
        n = b_seq_len[i]
        rows = slice(b_start_loc[i], b_start_loc[i] + n - b_ready_cache_len[i])
        slots = req_to_token_indexs[request, :n].long()
        o[rows] = attend(q[rows], k[slots], v[slots], None, alibi[:, None, None]).to(o.dtype)
""",
    "mistral/triton_kernel/context_flashattention_nopad": """
from lightllm.models.llama.triton_kernel.context_flashattention_nopad import attend

def context_attention_fwd(q, k, v, o, b_start_loc, b_seq_len, max_input_len, sliding_window):
    for i, n in enumerate(b_seq_len):
        rows = slice(b_start_loc[i], b_start_loc[i] + n)
        o[rows] = attend(q[rows], k[rows], v[rows], sliding_window{window}).to(o.dtype)
""",
}


GROUPS = "one.float().repeat_interleave(group, 1)"
IN_GROUP = "one.float()[:, torch.arange(q.shape[1]) % group]"


def lightllm(folder: Path, row: str = "request", window: str = "", heads: str = GROUPS) -> Path:
    """Return a made-up LightLLM; a fault is another row of the table, another window, or other KV heads."""
    for name, text in FILES.items():
        file = folder / f"lightllm/models/{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(
            text.replace("{row}", row).replace("{window}", window).replace(GROUPS, heads)
        )
    return folder


def arguments(op: str, **fields) -> tuple[Case, dict[str, torch.Tensor]]:
    lens = {"query_lens": (3, 2), "ctx_lens": (20, 5), "block_size": 16, **fields}
    case = Case(op=op, num_heads=2, backend="library:lightllm", **lens)
    return case, arguments_of(Lab().call(case), Target.of(case))


def test_the_rows_of_requests_are_not_in_the_order_of_the_batch():
    case, given = arguments(CONTEXT)
    blocks = Lab().call(case).block_table
    assert given["b_req_idx"].tolist() == [1, 0]
    row = given["req_to_token_indexs"][given["b_req_idx"][0]]
    assert row[:16].tolist() == (blocks[0, 0] * 16 + torch.arange(16)).tolist()
    assert int(row[22]) == int(blocks[0, 1]) * 16 + 6  # its last token
    assert row.dtype == given["b_req_idx"].dtype == torch.int32


def test_a_window_that_no_case_states_is_the_length():
    lens = {"query_lens": (3, 7), "ctx_lens": (0, 0)}
    assert arguments(MISTRAL, **lens)[1]["sliding_window"] == 7
    assert arguments(MISTRAL, sliding_window=2, **lens)[1]["sliding_window"] == 2


def test_each_op_has_the_file_of_its_model(tmp_path):
    source = find_backend("library:lightllm", lightllm(tmp_path)).source
    ops = [op for op in ops_of("lightllm") if "phi3" not in op.name]
    files = {source.op_file(op.module).relative_to(tmp_path).parts[2] for op in ops}
    assert files == {"llama", "bloom", "mistral"}


@needs_triton
def test_ops_that_are_right_have_no_finding(tmp_path):
    ops = [CONTEXT, DECODE, BLOOM, INT8KV, MISTRAL]
    found = check(library="lightllm", source=wheel(tmp_path), ops=ops, cases=3, engine="local:1")
    assert (found.cases_run, found.findings) == (15, [])


def wheel(folder: Path) -> Path:
    """Return a wheel of the made-up LightLLM."""
    root, path = lightllm(folder / "root"), folder / "lightllm-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file in root.rglob("*.py"):
            archive.write(file, file.relative_to(root))
    return path


@needs_triton
@pytest.mark.parametrize(
    ("op", "fault", "lens"),
    [
        (CONTEXT, {"row": "i"}, {"query_lens": (3, 2), "ctx_lens": (20, 5)}),
        (DECODE, {"row": "i"}, {"query_lens": (1, 1), "ctx_lens": (20, 5)}),
        (MISTRAL, {"window": " + 1"}, {"query_lens": (7, 3), "ctx_lens": (0, 0)}),
    ],
)
def test_planted_faults_are_seen(tmp_path, op, fault, lens):
    """Another row of the table, and a window that is one key too wide."""
    window = {"sliding_window": 2} if op == MISTRAL else {}
    case = Case(op=op, backend="library:lightllm", platform="sm_90", **lens, **window)
    right, wrong = lightllm(tmp_path / "a"), lightllm(tmp_path / "b", **fault)
    assert [Lab(source=one).run(case).status for one in (right, wrong)] == ["match", "mismatch"]


@needs_triton
def test_a_name_must_hold_in_other_cases_although_the_op_has_no_scale(tmp_path):
    """Other cases had another scale, which the op refuses: with as many KV heads as query heads per KV head,
    the head within its group is that of another fault."""
    heads = {"num_heads": 4, "num_queries_per_kv": 2, "query_lens": (3, 5), "ctx_lens": (20, 5)}
    case = Case(op=CONTEXT, backend="library:lightllm", platform="sm_90", **heads)
    lab = Lab(source=lightllm(tmp_path, heads=IN_GROUP))
    assert lab.backend(case).fixed_fields(case.op) == ("sm_scale",)
    assert lab.run(case).status == "mismatch"
    assert "kv_head_modulo" not in {one.name for one in diagnose(case, lab=lab).explanations}
