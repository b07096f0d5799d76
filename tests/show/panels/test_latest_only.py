"""LatestOnly: only the newest request is worked on and published."""

import gc
import threading
import time

from attnlab.show.panels.progress import Job, LatestOnly


def recording_worker(
    computed: list[int], quiet_s: float = 0.02
) -> tuple[LatestOnly[int], list[int]]:
    """Return a worker that records each request, and the list of published requests."""
    published: list[int] = []

    def work(request: int, job: Job) -> None:
        computed.append(request)
        job.publish(lambda: published.append(request))

    return LatestOnly(work, lambda request, error: None, quiet_s), published


def test_the_first_and_the_last_of_a_series_are_computed() -> None:
    """The first starts at once: a single change need not wait."""
    computed: list[int] = []
    worker, published = recording_worker(computed, quiet_s=0.5)
    for request in range(10):
        worker.submit(request)
        time.sleep(0.02)
    assert worker.wait(10)
    assert (computed, published) == ([0, 9], [0, 9])


def test_no_garbage_is_collected_during_a_job() -> None:
    enabled: list[bool] = []
    worker: LatestOnly[int] = LatestOnly(
        lambda request, job: enabled.append(gc.isenabled()), lambda request, error: None
    )
    worker.submit(1)
    assert worker.wait(10)
    assert (enabled, gc.isenabled()) == ([False], True)


def test_a_new_request_ends_the_running_job() -> None:
    begun, go_on, ended, published = threading.Event(), threading.Event(), [], []

    def work(request: int, job: Job) -> None:
        begun.set()
        assert go_on.wait(10)
        try:
            job.check()
        except BaseException:
            ended.append(request)
            raise
        job.publish(lambda: published.append(request))

    worker: LatestOnly[int] = LatestOnly(work, lambda request, error: None, 0.0)
    worker.submit(1)
    assert begun.wait(10)
    worker.submit(2)
    go_on.set()
    assert worker.wait(10)
    assert (ended, published) == ([1], [2])


def test_a_cancelled_job_publishes_nothing() -> None:
    """Neither a result nor an error, even if the job never checks."""
    begun, go_on, published = threading.Event(), threading.Event(), []

    def work(request: int, job: Job) -> None:
        begun.set()
        assert go_on.wait(10)
        if request == 2:
            raise KeyError("broken")
        job.publish(lambda: published.append(request))

    worker: LatestOnly[int] = LatestOnly(work, lambda request, error: published.append(error), 0.0)
    for request in (1, 2):
        begun.clear()
        go_on.clear()
        worker.submit(request)
        assert begun.wait(10)
        worker.cancel()
        assert worker.is_busy  # until its work has ended
        go_on.set()
        assert worker.wait(10)
    assert published == []
    worker.submit(3)
    assert worker.wait(10)
    assert published == [3]


def test_an_error_is_reported_and_the_worker_continues() -> None:
    events: list[object] = []

    def work(request: int, job: Job) -> None:
        if request == 1:
            raise KeyError("broken")
        job.publish(lambda: events.append(request))

    worker: LatestOnly[int] = LatestOnly(
        work, lambda request, error: events.append((request, error)), 0
    )
    worker.submit(1)
    assert worker.wait(10)
    worker.submit(2)
    assert worker.wait(10)
    assert events[0][0] == 1
    assert isinstance(events[0][1], KeyError)
    assert events[1:] == [2]
