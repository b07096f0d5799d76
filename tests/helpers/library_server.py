"""A small server: its workers, started by spawn or fork, import an op of a library and call it.

Run as ``python library_server.py FOLDER METHOD LIBRARY``, where FOLDER has the package. Of SGLang, what the
ops import from other modules is replaced by stubs; without a GPU, attnlab's interpreter runs the kernels.
"""

import contextlib
import importlib
import multiprocessing
import os
import sys
from pathlib import Path
from types import ModuleType

LENS = (70, 33, 5)  # tokens of each sequence
SGLANG = "sglang.kernels.ops.attention.decode_attention"
LIGHTLLM = "lightllm.models.llama.triton_kernel.gqa_decode_flashattention_nopad"


def prepare_sglang(folder: Path) -> None:
    """Let Python import the modules of SGLang's ops without the rest of SGLang."""
    import torch

    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"
    from attnlab.case.platforms import PLATFORMS
    from attnlab.kernels.vllm.loader import package_stubs
    from attnlab.library.sglang import PACKAGE

    folders = [SGLANG.rsplit(".", count)[0] for count in range(1, SGLANG.count(".") + 1)]
    made = {name: ModuleType(name) for name in (*folders, "sglang.srt")}
    for name, one in {**made, **package_stubs(PACKAGE, PLATFORMS["sm_90"], None)}.items():
        one.__path__ = [str(folder / name.replace(".", "/"))]
        sys.modules[name] = one


def call_sglang() -> None:
    """Decode three sequences whose slots are lists in a shuffled order."""
    import torch

    from attnlab.kernels.triton.interpreter import interpret

    make = torch.Generator().manual_seed(1)
    heads, kv_heads, size, splits = 4, 2, 64, 2
    slots = torch.randperm(256, generator=make)[: sum(LENS)]
    starts = torch.tensor([0, *LENS]).cumsum(0).int()
    sizes = ((3, heads, size), (256, kv_heads, size), (256, kv_heads, size))
    tensors = [torch.randn(shape, generator=make).half() for shape in sizes]
    logits = torch.full((3, heads, splits, size), float("nan"))
    parts = torch.full((3,), splits, dtype=torch.int32)
    tensors += [torch.zeros_like(tensors[0]), starts, slots, logits, logits[..., 0].clone(), parts]
    has_gpu = torch.cuda.is_available()
    given = [one.cuda() if has_gpu else one for one in tensors]
    op = importlib.import_module(SGLANG).decode_attention_fwd
    with contextlib.nullcontext() if has_gpu else interpret():
        op(*given, splits, 0.125, 1.0, 1.0)


def call_lightllm() -> None:
    """Decode three sequences whose slots are rows of a table of all requests."""
    import torch

    make = torch.Generator().manual_seed(1)
    query, output = (torch.randn(3, 4, 16, generator=make) for _ in range(2))
    key, value = (torch.randn(512, 2, 16, generator=make) for _ in range(2))
    table = torch.randperm(400, generator=make).view(5, 80).int()
    index = torch.tensor([4, 0, 2], dtype=torch.int32)
    op = importlib.import_module(LIGHTLLM).gqa_decode_attention_fwd
    op(query, key, value, output, table, index, torch.tensor(LENS, dtype=torch.int32))


def work(folder: str, library: str) -> None:
    """Be a worker: import the op and call it twice."""
    if library == "sglang":
        prepare_sglang(Path(folder))
    else:
        sys.path.insert(0, folder)
    for _ in range(2):
        if library == "sglang":
            call_sglang()
        else:
            call_lightllm()


if __name__ == "__main__":
    folder, method, library = sys.argv[1:]
    worker = multiprocessing.get_context(method).Process(target=work, args=(folder, library))
    worker.start()
    worker.join()
    sys.exit(worker.exitcode)
