"""Draw the batches of coming Cases in the background, while a Lab runs the Cases before them."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from attnlab.case.case import Case
from attnlab.lab.keys import batch_key
from attnlab.lab.lab import Lab

_AHEAD = 2  # batches that wait for their Cases; a Lab must keep one more


@contextmanager
def drawing_ahead(lab: Lab, cases: Sequence[Case]) -> Iterator[Iterator[Case]]:
    """Yield an iterator over ``cases`` that draws batches of the next ones while the block uses one.

    It helps where another device computes, such as a GPU: batches are drawn by this machine's cores. So
    torch's operations on the CPU use one thread inside the block. Cases that share a batch should be
    neighbours, with the smallest batch first. An error is raised by the run of its Case.
    """
    firsts = [
        i for i, case in enumerate(cases) if i == 0 or batch_key(case) != batch_key(cases[i - 1])
    ]
    room, stop = threading.Semaphore(_AHEAD), threading.Event()

    def draw() -> None:
        for i in firsts:
            room.acquire()
            if stop.is_set():
                return
            try:
                lab.batch(cases[i])
            except Exception:  # the run of this Case raises it, too
                return

    def each() -> Iterator[Case]:
        begun = set(firsts[1:])
        for i, case in enumerate(cases):
            if i in begun:
                room.release()
            yield case

    thread = threading.Thread(target=draw, name="attnlab-drawing", daemon=True)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several would wait for cores that draw
    if lab.keep > _AHEAD:
        thread.start()
    try:
        yield each()
    finally:
        torch.set_num_threads(threads)
        stop.set()
        room.release()
        if thread.ident is not None:
            thread.join()
