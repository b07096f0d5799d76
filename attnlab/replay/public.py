"""The part of ``import attnlab`` that runs a saved call again."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attnlab.case.case import Case
from attnlab.kernels.runner import one_backend, runners
from attnlab.replay.probe import Probe, probe
from attnlab.replay.replay_call import Replays, replay_all
from attnlab.replay.shrinking import Judge, Shrunk, shrink
from attnlab.tensors.call import KernelCall


def replay_call(
    call: KernelCall,
    *,
    sources: Sequence[Path | str] = (),
    backends: Sequence[str] = (),
    device: str | None = None,
    **changes: Any,
) -> Replays:
    """Run a saved call on several backends and releases, and compare the verdicts.

    - ``sources``: wheels, sdists and checkouts of vLLM, or versions that ``attnlab fetch`` downloaded.
    - ``backends``: names as in ``Case.backend``, such as "mine.py:fn". Default: the models.
    - ``device``: where the kernels of a vLLM run, "cuda" or "cpu". Default: the GPU if torch can use one.
    - ``changes``: where the call ran, for example ``platform="sm_90"``. Default: the call's origin.

    Raises InvalidCall for a call that is no attention or has arguments without a reference.
    """
    targets = runners([str(one) for one in sources], backends, device)
    return replay_all(call, targets, Case(**changes), tuple(changes))


def shrink_call(
    call: KernelCall,
    *,
    source: Path | str | None = None,
    backend: str | None = None,
    device: str | None = None,
    seconds: float | None = None,
    **changes: Any,
) -> Shrunk:
    """Return the smallest call that still fails in the same way, with fewer and shorter sequences and heads.

    - ``source``, ``backend``, ``device``: what runs the calls, as for :func:`attnlab.replay_call`. Without
      them nothing is run: only sequences, rows, heads and blocks of the recorded output are removed.
    - ``seconds``: after this time, no further call is run.
    - ``changes``: where the call ran, for example ``platform="sm_90"``. Default: the call's origin.

    Raises InvalidCall for a call that is no attention or has arguments without a reference.
    """
    judge = Judge(
        backend=one_backend(source, backend, device), case=Case(**changes), given=tuple(changes)
    )
    return shrink(call, judge, seconds=seconds)


def probe_call(
    call: KernelCall,
    *,
    source: Path | str | None = None,
    backend: str = "model",
    device: str | None = None,
    **changes: Any,
) -> Probe:
    """Decide between corruption and another order of sums: run a call again with variations.

    The variations are: an identical run, each sequence alone, reversed sequences, other split counts, another
    max_seq_len and padding, other blocks, and other contents of foreign slots and of the output buffer.

    ``source``, ``backend``, ``device``, ``changes``: as for :func:`attnlab.shrink_call`.
    """
    name = "vllm" if source is not None and backend == "model" else backend
    found = one_backend(source, name, device)
    assert found is not None
    return probe(call, found, Case(**changes), tuple(changes))
