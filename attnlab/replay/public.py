"""The part of ``import attnlab`` that runs a saved call again."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attnlab.case.case import Case
from attnlab.replay.replay_call import replay_all
from attnlab.replay.replays import Replays
from attnlab.replay.targets import replay_targets
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
    targets = replay_targets([str(one) for one in sources], backends, device)
    return replay_all(call, targets, Case(**changes), tuple(changes))
