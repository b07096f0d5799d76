"""An op that no record knows: its arguments are bound by their names, its package is loaded from a source."""

import zipfile
from pathlib import Path

import pytest
from helpers.commands import error_line, strict_json
from helpers.sources import needs_triton

from attnlab.case.errors import InvalidCase
from attnlab.case.fields import is_plugin, split_mapping
from attnlab.checker.check import check
from attnlab.cli.main import main
from attnlab.kernels.by_name import record_of
from attnlab.library.op import Op

PAGES = """
import torch
import triton
from acme.arch import is_cdna
from acme import not_there

UNITS = torch.cuda.get_device_properties(0).multi_processor_count
assert is_cdna() and UNITS == 16


def attention(queries, k_buffer, v_buffer, req_to_token, b_seq_len, sm_scale):
    results = torch.empty(queries.shape, dtype=queries.dtype, device="cuda")
    for i, length in enumerate(b_seq_len.tolist()):
        pages, group = req_to_token[i].long(), queries.shape[1] // k_buffer.shape[2]
        key, value = (one[pages].flatten(0, 1)[:length].float().repeat_interleave(group, 1)
                      for one in (k_buffer, v_buffer))
        scores = torch.einsum("hd,khd->hk", queries[i].float(), key.cuda()) * sm_scale{fault}
        results[i] = torch.einsum("hk,khd->hd", scores.softmax(-1), value)
    return results


def broken(q):
    return not_there(q)
"""
ARCH = """
import triton

def is_cdna():
    return triton.runtime.driver.active.get_current_target().backend == "hip"
"""
OP = "acme.ops.pages:attention"
QUERIES = "queries=query"


def acme(folder: Path, fault: str = "") -> Path:
    """Return a made-up package, whose __init__ needs a package that is not installed."""
    (folder / "acme/ops").mkdir(parents=True)
    files = {"__init__": "import no_such_package", "arch": ARCH}
    files["ops/pages"] = PAGES.replace("{fault}", fault)
    for name, text in files.items():
        (folder / f"acme/{name}.py").write_text(text)
    return folder


def wheel(folder: Path, root: Path) -> Path:
    """Return a wheel of a package."""
    path = folder / "acme-1.5-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file in root.rglob("*.py"):
            archive.write(file, file.relative_to(root))
        archive.writestr("acme-1.5.dist-info/METADATA", "Name: acme\nVersion: 1.5\n")
    return path


@needs_triton
def test_an_op_of_a_package_is_checked(tmp_path):
    """A planted fault is found and named, in a folder and in a wheel, which is not installed."""
    kernel, options = f"{OP}({QUERIES})", {"platform": "gfx942", "engine": "local:1"}
    right = check(kernel, source=acme(tmp_path / "a"), cases=4, **options)
    assert (right.cases_run, right.findings, right.ops) == (4, [], {"pages.attention": 4})
    wrong = wheel(tmp_path, acme(tmp_path / "b", " * 2"))
    report = check(kernel, source=wrong, cases=2, **options)
    (found,) = report.findings
    assert (report.version, found.op, found.diagnosis) == (
        "acme 1.5",
        "pages.attention",
        "scale_doubled",
    )


@needs_triton
def test_the_commands_take_it(tmp_path, capsys):
    wrong = ["--source", str(acme(tmp_path / "b", " * 2")), "--op", OP, "--map", QUERIES]
    case = ["--query-lens", "1,1", "--ctx-lens", "40,7", "--num-heads", "4", "--stage", "sound"]
    case += ["--distribution", "normal", "--platform", "gfx942"]
    call = tmp_path / "call.safetensors"
    assert main(["run", *wrong, *case, "--save-call", str(call)]) == 1
    capsys.readouterr()
    for words in (["diagnose", "--call", str(call)], ["diagnose", *case]):
        assert main([*words, *wrong, "--json"]) == 1
        found = strict_json(capsys.readouterr().out)
        assert (found["status"], found["cause"]["name"]) == ("explained", "scale_doubled")
    assert main(["replay", str(call), *wrong, "--json"]) == 1
    (run,) = strict_json(capsys.readouterr().out)["replays"]
    assert run["status"] == "mismatch"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--op", OP], "add --map queries=… (expressions in query, output,"),
        (["--op", OP, "--map", "querys=query"], "for a parameter of attention (queries, k_buffer,"),
        (["--op", OP, "--map", "queries=qury"], "'qury'; did you mean query?"),
        (["--op", OP, "--map", "queries=)"], "map must be their_name=expression"),
        (["--op", "acme.ops.pages:attend"], "pages of acme unknown has no function attend"),
        (["--op", "acme.ops.page:attention"], "acme unknown has no attention op page"),
        (["--op", "acme.op.pages:attention"], "contains none of acme/op"),
        (["--op", "acme.ops.pages:attention", "--op", "unified_attention"], "must be the only op"),
        (["--op", "unified_atention"], "did you mean unified_attention?"),
    ],
)
@needs_triton
def test_wrong_input_is_one_line(tmp_path, words, text, capsys):
    source = ["--source", str(acme(tmp_path)), "--platform", "gfx942"]
    assert text in error_line(capsys, ["check", *source, *words])


def test_a_call_that_is_replayed_on_an_op_needs_no_source(capsys):
    line = error_line(capsys, ["replay", "call.safetensors", "--op", "acme_ops:attend"])
    assert "module acme_ops of backend cannot be imported" in line


@needs_triton
def test_what_cannot_be_imported_is_named(tmp_path):
    report = check(
        "acme.ops.pages:broken()",
        source=acme(tmp_path),
        platform="gfx942",
        cases=1,
        engine="local:1",
    )
    (entry,) = report.not_run
    assert "acme.not_there was called, but acme of acme unknown cannot be loaded" in entry.reason
    assert "No module named 'no_such_package'" in entry.reason


@needs_triton
def test_a_limit_that_the_op_states_is_no_finding(tmp_path):
    """An assertion of the op refuses a call; one that Python raises in its code is a fault."""
    for text, kind in (("assert not sm_scale", []), ("[][0]", ["fails"])):
        root = acme(tmp_path / text.split()[0].strip("[]0") / "x")
        file = root / "acme/ops/pages.py"
        file.write_text(file.read_text().replace("    results =", f"    {text}\n    results =", 1))
        report = check(
            f"{OP}({QUERIES})", source=root, platform="gfx942", cases=1, engine="local:1"
        )
        assert [one.kind for one in report.findings] == kind


def made() -> Op:
    return Op(
        name="m.f",
        summary="m:f",
        library="m",
        module="m",
        new_tokens_from="cache",
        cache_layout="flash",
    )


def test_names_come_from_the_record_that_is_most_alike():
    """``k`` is a cache with a block table beside it, and new tokens with a cache beside it."""

    def like_unified(
        q, k, v, out, cu_seqlens_q, max_seqlen_q, seqused_k, softmax_scale, block_table
    ):
        pass

    def like_prefill(q, k, v, o, k_cache, v_cache, b_loc, b_start_loc, b_seq_len, max_input_len):
        pass

    unified, prefill = (record_of(one, made(), {}) for one in (like_unified, like_prefill))
    assert (unified.arguments["k"], prefill.arguments["k"]) == ("flash_key_cache", "key")
    assert (unified.cache_layout, unified.prefill) == ("flash", True)
    assert (prefill.cache_layout, prefill.new_tokens_from) == ("x-split", "arguments")
    assert not unified.strided


def test_a_copy_of_an_op_has_its_abilities():
    def copy(q, k_buffer, v_buffer, o, lse, req_to_token, b_seq_len, attn_logits, num_kv_splits):
        pass

    found = record_of(copy, made(), {})
    assert (found.lse, found.prefill, found.min_splits) == ("lse", False, 1)
    assert found.summary == "m:f as those of vLLM's decode_attention_fwd"


def test_a_parameter_without_a_value_is_named():
    with pytest.raises(
        InvalidCase, match=r"^m:f has parameters .* add --map alpha=… --map beta=… \("
    ):
        record_of(lambda q, alpha, beta: None, made(), {})


def test_the_text_of_a_mapping():
    text = "/a folder/mine.py:f(rows=query[:, :2], pages=max(1, len(seq_lens)))"
    name, mapping = split_mapping(text)
    assert name == "/a folder/mine.py:f"
    assert mapping == {"rows": "query[:, :2]", "pages": "max(1, len(seq_lens))"}
    assert is_plugin(text)
    assert split_mapping("mine.py:f") == ("mine.py:f", None)
    assert not is_plugin("mine:(a=b)")


WHOLE = """
import torch


def decode(q, k, v, cu_seqlens, scale):
    out = torch.empty_like(q)  # [1, num_seqs, heads, size]
    for i, (first, end) in enumerate(cu_seqlens.unfold(0, 2, 1).tolist()):
        group = q.shape[2] // k.shape[2]
        key, value = (one[0, first:end].float().repeat_interleave(group, 1) for one in (k, v))
        scores = torch.einsum("hd,khd->hk", q[0, i].float(), key) * scale{fault}
        out[0, i] = torch.einsum("hk,khd->hd", scores.softmax(-1), value)
    return out
"""


@needs_triton
@pytest.mark.parametrize("fault", ["", " * 1.1"])
def test_keys_of_whole_sequences_and_an_output_with_a_leading_one(tmp_path, fault):
    (tmp_path / "whole.py").write_text(WHOLE.replace("{fault}", fault))
    texts = ["q=query[None]", "cu_seqlens=flat_starts", "scale=scale"]
    texts += [
        f"{name}=flat_{whole}.transpose(0, 1)[None]"
        for name, whole in (("k", "keys"), ("v", "values"))
    ]
    words = [word for text in texts for word in ("--map", text)]
    lens = ["--query-lens", "1,1", "--ctx-lens", "20,3", "--distribution", "normal"]
    source = ["--source", str(tmp_path / "whole.py"), "--op", "whole:decode"]
    assert main(["diagnose", *source, *words, *lens, "--no-location"]) == bool(fault)
