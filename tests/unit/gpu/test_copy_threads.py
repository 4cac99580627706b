from __future__ import annotations

import threading

import pytest

from kvkeep.gpu.threads import HEAD_START_BYTES, CopyThreads


def test_jobs_run_at_the_same_time() -> None:
    threads = CopyThreads(3)
    together = threading.Barrier(3, timeout=30)
    threads.run([lambda: (together.wait(), None)[1] for _ in range(3)])
    threads.close()


def test_all_jobs_end_before_a_failure_is_raised() -> None:
    threads = CopyThreads(2)
    ended = threading.Event()
    failed = threading.Event()

    def fails() -> None:
        failed.set()
        raise RuntimeError("copy failed")

    def slow() -> None:
        assert failed.wait(10)
        ended.set()

    for jobs in ([fails, slow], [slow, fails]):
        ended.clear()
        failed.clear()
        if jobs[0] is slow:
            failed.set()
        with pytest.raises(RuntimeError, match="copy failed"):
            threads.run(jobs)
        assert ended.is_set()
    threads.close()


def test_the_next_layer_is_under_way_while_one_is_used() -> None:
    threads = CopyThreads(1)
    started = [threading.Event() for _ in range(3)]
    used = [threading.Event() for _ in range(3)]

    def layer_jobs(layer: int):
        def copy() -> None:
            started[layer].set()
            if layer:
                assert used[layer - 1].wait(10), "layer was copied only when it was asked for"

        return [copy]

    for layer, _ in enumerate(threads.ahead(3, layer_jobs)):
        if layer < 2:
            assert started[layer + 1].wait(10)  # it runs while this layer is "used"
        used[layer].set()
    threads.close()


def test_dropping_waits_for_what_is_under_way() -> None:
    threads = CopyThreads(1)
    begun, release = threading.Event(), threading.Event()
    ended = []

    def layer_jobs(layer: int):
        def copy() -> None:
            if layer == 1:
                begun.set()
                assert release.wait(10)
            ended.append(layer)

        return [copy]

    load = threads.ahead(3, layer_jobs)
    next(load)
    assert begun.wait(10)  # what has not begun is let go instead
    threading.Timer(0.05, release.set).start()
    load.close()
    assert ended == [0, 1]
    threads.close()


def test_a_closed_connector_starts_no_thread() -> None:
    threads = CopyThreads(1)
    threads.close()
    threads.close()
    with pytest.raises(RuntimeError, match="closed"):
        next(threads.ahead(1, lambda layer: [lambda: None]))


@pytest.mark.parametrize("count", [0, 1, 2, 5, 16])
def test_parts_are_even_and_cover_everything(count: int) -> None:
    parts = CopyThreads(3).split(count)
    assert [i for part in parts for i in part] == list(range(count))
    assert all(len(part) > 0 for part in parts)
    sizes = [len(part) for part in parts]
    assert not sizes or max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    ("count", "item_bytes", "sizes"),
    [
        (16, HEAD_START_BYTES // 2, [6, 5, 5]),
        (64, HEAD_START_BYTES // 2, [22, 21, 21]),
        (4, HEAD_START_BYTES, [2, 1, 1]),
        (5, HEAD_START_BYTES // 3, [4, 1]),
        (5, HEAD_START_BYTES // 5, [5]),
        (5, 1, [5]),
        (3, HEAD_START_BYTES * 2, [1, 1, 1]),
        (2, HEAD_START_BYTES * 2, [1, 1]),
        (0, 0, []),
    ],
)
def test_the_calling_thread_has_more_to_do(count: int, item_bytes: int, sizes: list[int]) -> None:
    """By what it copies until another one has woken up; a small layer is all its."""
    parts = CopyThreads(3).split_after(count, item_bytes)
    assert [i for part in parts for i in part] == list(range(count))
    assert [len(part) for part in parts] == sizes
