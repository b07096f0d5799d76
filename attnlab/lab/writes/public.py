"""The part of ``import attnlab`` that checks cache writes in further formats."""

from pathlib import Path

from attnlab.case.errors import KernelFailed, KernelRejected, Unavailable, Unsupported
from attnlab.kernels.vllm.source import find_source
from attnlab.lab.writes.check_write import check_write, model_write, vllm_write
from attnlab.lab.writes.write_report import WriteReport, WriteResult
from attnlab.lab.writes.write_variants import write_variants


def check_writes(
    *, backend: str = "vllm", source: Path | str | None = None, device: str = "cpu"
) -> WriteReport:
    """Run hostile cache writes in further formats, and compare the bytes of the cache.

    ``backend``: "vllm" for the ops of ``source`` (None: the installed vLLM), or "model". The CUDA ops need an
    sdist or a checkout: their source is compiled, and runs on the emulated device. Raises
    InvalidCase for a source that is no vLLM, and Unavailable if none is installed.
    """
    found = find_source(source) if backend == "vllm" else None
    write = model_write if found is None else vllm_write(found, device)
    results = []
    for name, case in write_variants().items():
        try:
            wrong = check_write(case, write).wrong
            results.append(WriteResult(name=name, case=case, wrong=wrong))
        except KernelFailed as error:
            results.append(WriteResult(name=name, case=case, error=str(error), failed=True))
        except (Unavailable, Unsupported, KernelRejected) as error:
            results.append(WriteResult(name=name, case=case, error=str(error)))
    text = "model" if found is None else found.text()
    return WriteReport(backend=text, results=tuple(results))
