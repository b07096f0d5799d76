"""attnlab diagnose --call: FlashInfer's log, SGLang's dumper, dicts of tensors, and refused files."""

import json
import math
import pickle
import zipfile

import numpy as np
import pytest
import torch
from helpers.cases import hostile
from helpers.commands import document, error_line
from helpers.recorded import KERNEL, batch
from safetensors.torch import save_file

import attnlab
from attnlab.case.errors import InvalidCall
from attnlab.lab.lab import Lab
from attnlab.recorder.dumps import _parameters, parse_names, read_call

NAMES = "query=q,key_cache=k_cache,value_cache=v_cache,output=out,query_start_loc=cu_seqlens_q"
MAP = ["--map", NAMES, "--op", "unified_attention"]
WRAPPER = "BatchDecodeWithPagedKVCacheWrapper"


def computed(factor=1.0):
    """Return the arguments of ``paged`` with its output, times ``factor``."""
    module: dict = {}
    exec(KERNEL, module)
    given = batch()
    module["paged"](**given)
    given["out"] *= factor
    return given


def write_dict(path, values):
    values = {name: tensor.contiguous() for name, tensor in values.items()}
    if path.suffix == ".pt":
        torch.save(values, path)
    elif path.suffix == ".npz":
        np.savez(path, **{name: tensor.numpy() for name, tensor in values.items()})
    else:
        save_file(values, path)


@pytest.mark.parametrize("suffix", [".pt", ".npz", ".safetensors"])
def test_a_dict_of_tensors(capsys, tmp_path, suffix):
    """A correct output has nothing wrong, exit code 0; a doubled one is found, exit code 1."""
    path = tmp_path / f"dump{suffix}"
    write_dict(path, computed())
    found = document(capsys, ["diagnose", "--call", str(path), *MAP], 0)
    assert found["status"] == "nothing wrong"
    assert any("the platform" in text for text in found["unknown"])
    write_dict(path, computed(2.0))
    assert document(capsys, ["diagnose", "--call", str(path), *MAP], 1)["wrong_rows"] == 6


def test_known_names_need_no_map(tmp_path):
    torch.save(computed(), tmp_path / "dump.pt")
    call = read_call(tmp_path / "dump.pt")
    assert attnlab.diagnose(call).status == "nothing wrong"
    assert call.key_cache.stride(0) == 2 * 16 * 2 * 64  # torch.save keeps strides


def test_numbers_in_a_map(tmp_path):
    torch.save({**computed(), "s": torch.tensor(0.25)}, tmp_path / "dump.pt")
    assert read_call(tmp_path / "dump.pt", {"sm_scale": "0.5"}).sm_scale == 0.5
    assert read_call(tmp_path / "dump.pt", {"sm_scale": "s"}).sm_scale == 0.25
    assert read_call(tmp_path / "dump.pt", {"sliding_window": "7"}).sliding_window == 7


# FlashInfer's log.


def write_dump(folder, function, signature, tensors, values, results, **record):
    """Write one call as flashinfer/api_logging.py does: the last line of the metadata counts."""
    folder.mkdir(parents=True)
    torch.save(tensors, folder / "inputs.pt")
    if results:
        torch.save(results, folder / "outputs.pt")
    record = {
        "function_name": function,
        "module": "flashinfer.decode",
        "process_id": 7,
        "function_signature": signature,
        "input_metadata": values,
        "versions": {"flashinfer": "0.4.0"},
        **record,
    }
    lines = [
        {**record, "execution_status": "inputs_saved"},
        {**record, "execution_status": "completed"},
    ]
    (folder / "metadata.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def write_wrapper(root, output, *, lse=None):
    """Write a decode wrapper's three calls, and calls of another wrapper between them."""
    given = computed()
    rows = [4, 5]  # the last new token of each sequence
    lens, table = given["seq_lens"], given["block_table"]
    counts = (lens + 15) // 16
    pages = torch.cat([table[seq, :count] for seq, count in enumerate(counts.tolist())])
    starts = torch.cat([torch.zeros(1), counts.cumsum(0)]).int()
    cache = torch.stack([given["k_cache"], given["v_cache"]], 1)
    me = {"arg_0": {"type": WRAPPER, "repr": "<…>"}}
    init = "(self, float_workspace_buffer: torch.Tensor, kv_layout: str = 'NHD') -> None"
    plan = (
        "(self, indptr: torch.Tensor, indices: torch.Tensor, last_page_len: torch.Tensor, num_qo_heads: int, "
        "num_kv_heads: int, head_dim: int, page_size: int, window_left: int = -1) -> None"
    )
    run = (
        "(self, q: torch.Tensor, paged_kv_cache: Union[torch.Tensor, Tuple[torch.Tensor, torch.Tensor]], "
        "*args, q_scale: Optional[float] = None) -> torch.Tensor"
    )
    tensors = {"arg_1": starts, "arg_2": pages, "arg_3": lens - (counts - 1) * 16}
    sizes = {"arg_4": 4, "arg_5": 2, "arg_6": 64, "arg_7": 16}
    write_dump(root / "1", f"{WRAPPER}.__init__", init, {}, me, None, self_id=3)
    write_dump(root / "2", f"{WRAPPER}.plan", plan, tensors, me | sizes, None, self_id=3)
    write_dump(root / "3", f"{WRAPPER}.plan", plan, {}, me, None, self_id=4)
    results = (
        {"result": output[rows]} if lse is None else {"result_0": output[rows], "result_1": lse}
    )
    tensors = {"arg_1": given["q"][rows], "arg_2": cache}
    return write_dump(root / "4", f"{WRAPPER}.run", run, tensors, me, results, self_id=3)


def test_flashinfers_wrapper(capsys, tmp_path):
    """Plan and run of one wrapper are joined; the plan of another one between them is not used."""
    folder = write_wrapper(tmp_path / "good", computed()["out"])
    assert document(capsys, ["diagnose", "--call", str(folder)], 0)["status"] == "nothing wrong"
    call = read_call(folder)
    assert call.seq_lens.tolist() == [40, 33]
    assert (call.origin.program, call.origin.release) == ("flashinfer", "0.4.0")
    folder = write_wrapper(tmp_path / "bad", computed(2.0)["out"], lse=torch.ones(2, 4))
    assert document(capsys, ["diagnose", "--call", str(folder)], 1)["wrong_rows"] == 2
    assert read_call(folder).lse[0, 0] == pytest.approx(math.log(2))


def test_flashinfers_stateless_call(tmp_path):
    given = computed()
    signature = (
        "(query: torch.Tensor, kv_cache: Union[torch.Tensor, Tuple[torch.Tensor, torch.Tensor]], "
        "workspace_buffer: torch.Tensor, block_tables: torch.Tensor, seq_lens: torch.Tensor, "
        "max_seq_len: int, bmm1_scale: float = 1.0, kv_layout: str = 'HND')"
    )
    tensors = {"arg_0": given["q"][[4, 5]], "arg_2": torch.zeros(1), "arg_3": given["block_table"]}
    tensors |= {"arg_1__0": given["k_cache"], "arg_1__1": given["v_cache"]}
    items = [{"type": "torch.Tensor", "tensor_key": f"arg_1__{i}"} for i in (0, 1)]
    values = {"arg_1": {"type": "tuple", "items": items}, "arg_5": 40}
    values |= {"kwarg_bmm1_scale": 0.125, "kwarg_kv_layout": "NHD"}
    tensors["kwarg_seq_lens"] = given["seq_lens"]
    name = "trtllm_batch_decode_with_kv_cache"
    out = {"result": given["out"][[4, 5]]}
    folder = write_dump(tmp_path / "call", name, signature, tensors, values, out)
    assert attnlab.diagnose(read_call(folder)).status == "nothing wrong"


def test_parameters_of_a_signature():
    text = "(self, a: Dict[str, int] = {}, b: Tuple[int, int]=(1, 2), /, c=None, *, d) -> Tuple[int, int]"
    assert _parameters(text) == ["self", "a", "b", "c"]
    assert _parameters("()") == _parameters("") == []


def wrong_dumps(tmp_path):
    """Yield (name, folder) of folders that are no call."""
    out = computed()["out"]
    folder = write_wrapper(tmp_path / "a", out)
    (folder / "metadata.jsonl").write_text("{")
    yield "no JSON", folder
    folder = write_wrapper(tmp_path / "b", out)
    (folder / "outputs.pt").unlink()
    yield "no output", folder
    folder = write_wrapper(tmp_path / "c", out)
    (folder.parent / "2" / "metadata.jsonl").unlink()
    yield "no plan", folder
    folder = write_wrapper(tmp_path / "d", out)
    data = (folder / "inputs.pt").read_bytes()
    (folder / "inputs.pt").write_bytes(data[: len(data) // 2])
    yield "half a file", folder
    yield "another function", write_dump(tmp_path / "e", "gemm", "(a)", {}, {}, {"result": out})
    folder = write_wrapper(tmp_path / "f", out)
    (folder / "inputs.pt").unlink()
    yield "no inputs", folder
    (tmp_path / "g").mkdir()
    yield "an empty folder", tmp_path / "g"
    yield "no such path", tmp_path / "h"


def test_folders_that_are_no_call(capsys, tmp_path):
    """Each is one line and exit code 2."""
    names = []
    for name, folder in wrong_dumps(tmp_path):
        line = error_line(capsys, ["diagnose", "--call", str(folder)])
        assert str(tmp_path) in line, name
        names.append(name)
    assert len(names) == 8


# SGLang's dumper.


def write_sglang(folder, given, *, layer=3, step=1):
    folder.mkdir(exist_ok=True)
    for index, (name, value) in enumerate(given.items()):
        meta = {"name": name, "step": step, "rank": 0, "layer_id": layer, "dump_index": index}
        path = (
            folder
            / f"step={step}___rank=0___dump_index={index}___layer_id={layer}___name={name}.pt"
        )
        torch.save({"value": value, "meta": meta}, path)
    return path


def test_sglangs_dumper(capsys, tmp_path):
    """A folder of one layer and step, and one file of two layers."""
    folder = tmp_path / "dump"
    file = write_sglang(folder, computed())
    call = read_call(folder)
    assert (call.origin.layer, call.origin.step, call.origin.rank) == ("3", 1, 0)
    assert attnlab.diagnose(call).status == "nothing wrong"
    write_sglang(folder, computed(2.0), layer=4)
    line = error_line(capsys, ["diagnose", "--call", str(folder)])
    assert "one step and layer, got 2" in line
    assert attnlab.diagnose(read_call(file)).status == "nothing wrong"
    other = next(folder.glob("*layer_id=4*"))
    assert attnlab.diagnose(read_call(other)).status != "nothing wrong"


# What is refused.


class Evil:
    """A pickle that would write a file when it is loaded."""

    def __reduce__(self):
        return (open, ("/tmp/attnlab-was-here", "w"))


def test_files_that_would_execute_code(capsys, tmp_path):
    torch.save({**computed(), "evil": Evil()}, tmp_path / "dump.pt")
    np.savez(tmp_path / "dump.npz", q=np.array([Evil()], dtype=object))
    (tmp_path / "plain.pt").write_bytes(
        pickle.dumps({"q": Evil()}, protocol=4)
    )  # torch warns of it
    for name in ("dump.pt", "plain.pt", "dump.npz"):
        error_line(capsys, ["diagnose", "--call", str(tmp_path / name), *MAP])
    for name in ("dump.pt", "plain.pt"):
        with pytest.raises(InvalidCall, match="would execute code"):
            read_call(tmp_path / name)


def damaged(tmp_path):
    """Yield paths of damaged files."""
    for suffix in (".pt", ".npz", ".safetensors"):
        whole = tmp_path / f"whole{suffix}"
        write_dict(whole, computed())
        data = whole.read_bytes()
        for size in (0, 10, len(data) // 2, len(data) - 1):
            path = tmp_path / f"{size}{suffix}"
            path.write_bytes(data[:size])
            yield path
    (tmp_path / "text.pt").write_text("hello")
    yield tmp_path / "text.pt"
    torch.save([1, 2], tmp_path / "list.pt")
    yield tmp_path / "list.pt"
    with zipfile.ZipFile(tmp_path / "zip.npz", "w") as archive:
        archive.writestr("a.npy", b"x")
    yield tmp_path / "zip.npz"


def test_damaged_files(capsys, tmp_path):
    count = 0
    for path in damaged(tmp_path):
        assert str(path) in error_line(capsys, ["diagnose", "--call", str(path), *MAP])
        count += 1
    assert count == 15


@pytest.mark.parametrize(
    ("changes", "arguments", "words"),
    [
        ({"q": None}, [], "query must be among the arguments"),
        ({"q": torch.zeros(3)}, [], "query must have 3 dimensions"),
        ({"q": 5}, [], "query must be a tensor, got int"),
        ({"seq_lens": torch.ones(3, dtype=torch.int32)}, [], "seq_lens must have shape (2,)"),
        ({"v_cache": torch.zeros(1, 2)}, [], "value_cache must be"),
        ({"k_cache": "text"}, [], "key_cache must be a tensor, got str"),
        ({"scale": torch.zeros(2)}, [], "sm_scale must be one float"),
        ({"k_scale": "text"}, [], "k_scale must be one float"),
        ({"k_scale": torch.zeros(5)}, [], "k_scale must be"),
        ({}, ["--map", "query=nothing"], "map must name keys"),
        ({"v_cache": None}, ["--map", "query=q"], "; its keys are q, "),
        ({}, ["--map", "nonsense=q"], "map must name query"),
        ({}, ["--map", "q"], "map must be FIELD=KEY"),
        ({}, ["--op", "nonsense"], "op must be one of"),
        ({}, ["--release", "0.1.0"], "release must be one of"),
        ({}, ["--op", "merge_attn_states"], "merge_attn_states"),
        ({"qq_bias": torch.zeros(2)}, [], "qq_bias"),
        ({}, ["--output-file", "x"], "must not both be given"),
    ],
)
def test_values_that_are_no_call(capsys, tmp_path, changes, arguments, words):
    given = {name: value for name, value in {**computed(), **changes}.items() if value is not None}
    torch.save(given, tmp_path / "dump.pt")
    line = error_line(capsys, ["diagnose", "--call", str(tmp_path / "dump.pt"), *arguments])
    assert words in line


@pytest.mark.parametrize("command", ["diagnose", "xray", "check", "run"])
def test_a_map_without_a_call(capsys, command):
    assert "map must be given with op" in error_line(capsys, [command, "--map", "query=q"])


def test_a_map_of_a_file_that_names_its_fields(capsys, tmp_path):
    Lab().run(hostile()).recorded_call.save(tmp_path / "call")
    for words in (["diagnose", "--call"], ["xray", "--call"], ["replay"], ["page"]):
        line = error_line(capsys, [*words, str(tmp_path / "call"), "--map", "query=nope"])
        assert "map must not be given" in line
        assert "query, key_cache, value_cache" in line


def test_parse_names():
    assert parse_names("query=q, key_cache=k") == {"query": "q", "key_cache": "k"}
