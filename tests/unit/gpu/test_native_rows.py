"""The compiled copies beside numpy's: the same bytes, and none beside them."""

from __future__ import annotations

import ctypes.util
import importlib.util
import logging
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.gpu import host_copy
from kvkeep.gpu.host_copy import (
    HostTask,
    How,
    NativeTransfer,
    NumpyTransfer,
    Pieces,
    RowCopier,
    choose_how,
    load_rows,
    plan_transfer,
)

ROOT = Path(__file__).parents[3]
LIBRARY = host_copy.LIBRARY

if load_rows() is None:  # the header of the test run says so
    __test__ = False


def address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def random_bytes(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, count, np.uint8)


def built(folder: Path, options: list[str]) -> RowCopier:
    """The library as other machines have it."""
    spec = importlib.util.spec_from_file_location("build", ROOT / "scripts" / "build_rows.py")
    build_rows = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build_rows)
    library = folder / "rows.so"
    build_rows.build(library, options=options)
    return RowCopier(library)


@pytest.fixture(scope="module", params=["here", "-DHAS_AVX2=0", "-DONLY_PLAIN"])
def copier(request, tmp_path_factory) -> RowCopier:
    if request.param == "here":
        return RowCopier()
    return built(tmp_path_factory.mktemp("rows"), [request.param])


@given(
    seed=st.integers(0, 1 << 32),
    count=st.integers(0, 21),
    pieces=st.integers(1, 5),
    size=st.one_of(
        st.integers(1, 700), st.sampled_from([64, 128, 256, 1024, 4096]), st.integers(1, 40_000)
    ),
    gaps=st.tuples(*3 * [st.sampled_from([0, 0, 1, 16, 63, 64])]),
    offsets=st.tuples(st.integers(0, 130), st.integers(0, 130)),
    order=st.sampled_from(["neighbours", "runs", "shuffled"]),
    how=st.sampled_from(How),
)
def test_rows_arrive_and_nothing_else_changes(
    copier, seed, count, pieces, size, gaps, offsets, order, how
) -> None:
    row_gap, to_gap, from_gap = gaps
    to_step, from_step = size + to_gap, size + from_gap
    to_row, from_row = pieces * to_step + row_gap, pieces * from_step
    random = np.random.default_rng(seed)
    places = np.arange(count)
    if order == "shuffled":
        random.shuffle(places)
    elif order == "runs":
        places = np.roll(places, count // 3)
    source = random_bytes(seed, offsets[0] + count * from_row + 64)
    target = random_bytes(seed + 1, offsets[1] + count * to_row + 64)
    expected = target.copy()
    for row, place in enumerate(places):
        for piece in range(pieces):
            here = offsets[0] + row * from_row + piece * from_step
            there = offsets[1] + place * to_row + piece * to_step
            expected[there : there + size] = source[here : here + size]
    before = source.copy()
    copier.copy(
        address(target) + offsets[1] + places * to_row,
        address(source) + offsets[0] + np.arange(count) * from_row,
        Pieces(pieces, size, to_step, from_step),
        how,
    )
    assert np.array_equal(target, expected)
    assert np.array_equal(source, before)


def test_addresses_must_be_as_many_and_contiguous() -> None:
    some = np.zeros(8, np.int64)
    for to, source in ((some, some[:7]), (some[::2], some[:4]), (some[:4], some[::2])):
        with pytest.raises(ValueError, match="rows"):
            RowCopier().copy(to, source, Pieces(1, 8, 8, 8), How.PLAIN)


def make_caches(seed: int, form: str, num_rows: int, size: int) -> list[tuple[np.ndarray, ...]]:
    """Two layers of two tensors."""
    random = np.random.default_rng(seed)

    def one(*shape: int) -> np.ndarray:
        return random.integers(0, 256, shape, np.uint8)

    if form == "padded":
        return [tuple(one(num_rows, size + 16)[:, :size] for _ in range(2)) for _ in range(2)]
    if form == "of different padding":
        return [tuple(one(num_rows, size + 8 * n)[:, :size] for n in range(2)) for _ in range(2)]
    if form == "heads first":
        return [
            tuple(one(3, num_rows, size).transpose(1, 0, 2) for _ in range(2)) for _ in range(2)
        ]
    return [tuple(one(num_rows, size) for _ in range(2)) for _ in range(2)]


def make_tasks(seed: int, form: str, size: int, lengths: list[int], step: int, to_engine: bool):
    """The same task twice, on memory of its own each."""
    random = np.random.default_rng(seed)
    num_pages = sum(lengths) + 3
    numbers = random.permutation(num_pages)[: sum(lengths)].astype(np.int64)
    if to_engine:
        numbers[random.random(len(numbers)) < 0.2] = -1
    if random.random() < 0.3:
        numbers.sort()
    pages = np.split(numbers, np.cumsum(lengths)[:-1])
    tasks = []
    for _ in range(2):
        layers = make_caches(seed, form, (num_pages - 1) * step + 1, size)
        row = layers[0][0].shape[1:]
        chunks = [
            random_bytes(seed + number, 4 * length * int(np.prod(row))).reshape(2, 2, length, *row)
            for number, length in enumerate(lengths)
        ]
        tasks.append(HostTask(layers, step, pages, chunks, to_engine))
    return tasks


@given(
    seed=st.integers(0, 1 << 32),
    form=st.sampled_from(["straight", "padded", "of different padding", "heads first"]),
    size=st.one_of(st.integers(1, 300), st.sampled_from([64, 256, 2048, 8192, 33_000])),
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    step=st.integers(1, 3),
    to_engine=st.booleans(),
    stream_bytes=st.sampled_from([0, 1 << 40]),
    part=st.tuples(st.integers(0, 5), st.integers(0, 5)),
)
def test_transfers_move_what_numpy_moves(
    seed, form, size, lengths, step, to_engine, stream_bytes, part
) -> None:
    ours, numpys = make_tasks(seed, form, size, lengths, step, to_engine)
    first, last = (min(number, len(lengths)) for number in sorted(part))
    with mock.patch.object(host_copy, "STREAM_BYTES", stream_bytes):
        transfer = plan_transfer(ours, native=True)
        reference = plan_transfer(numpys, native=False)
        assert isinstance(transfer, NativeTransfer)
        assert isinstance(reference, NumpyTransfer)
        assert len(transfer) == len(reference) == len(lengths)
        for some in (transfer, reference):
            some.copy(range(1, 2), range(first, last))
            some.copy(range(2), range(last))
    for left, right in zip(ours.chunks, numpys.chunks, strict=True):
        assert np.array_equal(left, right)
    for ours_layer, numpys_layer in zip(ours.layers, numpys.layers, strict=True):
        assert all(map(np.array_equal, ours_layer, numpys_layer))


def test_a_transfer_of_nothing(caplog) -> None:
    layers = make_caches(1, "straight", 4, 64)
    for pages, chunks in (([], []), ([np.full(2, -1)], [np.zeros((2, 2, 2, 64), np.uint8)])):
        transfer = NativeTransfer(HostTask(layers, 1, pages, chunks, True), RowCopier())
        transfer.copy(range(2), range(len(chunks)))
        assert len(transfer) == len(chunks)


@pytest.mark.parametrize(
    ("pages", "step", "shape", "what"),
    [
        ([0, 4], 1, (2, 2, 2, 64), "page 4 is not in caches of 4 rows"),
        ([0, 2], 2, (2, 2, 2, 64), "page 2 is not in caches of 4 rows"),
        ([0, 1, 2], 1, (2, 2, 2, 64), "pages for chunks"),
        ([0, 1], 1, (2, 2, 2, 65), "a chunk of shape"),
        ([0, 1], 1, (1, 2, 2, 64), "a chunk of shape"),
        ([0, 1], 1, (2, 1, 2, 64), "a chunk of shape"),
    ],
)
def test_what_is_out_of_bounds_is_refused(pages, step, shape, what) -> None:
    layers = make_caches(1, "straight", 4, 64)
    chunk = np.zeros(shape, np.uint8)
    with pytest.raises(ValueError, match=what):
        plan_transfer(HostTask(layers, step, [np.array(pages)], [chunk], True), native=True)


def test_memory_of_another_form_is_refused() -> None:
    pages = [np.array([0, 1])]
    layers = make_caches(1, "straight", 4, 64)
    read_only = np.zeros((2, 2, 2, 64), np.uint8)
    read_only.flags.writeable = False
    apart = np.zeros((2, 2, 2, 128), np.uint8)[..., ::2]
    for chunk in (read_only, apart):
        with pytest.raises(ValueError, match="a chunk of shape"):
            plan_transfer(HostTask(layers, 1, pages, [chunk], True), native=True)
    layers[1] = (layers[1][0], np.zeros((4, 128), np.uint8)[:, ::2])
    with pytest.raises(ValueError, match="strides"):
        good = np.zeros((2, 2, 2, 64), np.uint8)
        plan_transfer(HostTask(layers, 1, pages, [good], True), native=True)


def test_which_rows_are_streamed() -> None:
    large = host_copy.STREAM_BYTES
    row, small, odd = Pieces(1, 65536, 0, 0), Pieces(1, 2048, 0, 0), Pieces(1, 100, 0, 0)
    heads = Pieces(8, 256, 0, 0)
    assert choose_how(large - 1, row, to_engine=True) is How.PLAIN
    for to_engine in (False, True):
        assert choose_how(large, row, to_engine=to_engine) is How.STREAM_FOUR
        assert choose_how(large, odd, to_engine=to_engine) is How.PLAIN
        assert choose_how(large, heads, to_engine=to_engine) is How.STREAM_FOUR
    assert choose_how(large, small, to_engine=False) is How.STREAM_FOUR
    assert choose_how(large, small, to_engine=True) is How.STREAM


@pytest.fixture
def fresh_load():
    load_rows.cache_clear()
    yield
    load_rows.cache_clear()


@pytest.mark.usefixtures("fresh_load")
def test_without_the_library_numpy_copies_and_the_log_says_so_once(
    monkeypatch, caplog, tmp_path
) -> None:
    monkeypatch.setattr(host_copy, "LIBRARY", tmp_path / "none.so")
    with caplog.at_level(logging.INFO, "kvkeep"):
        assert load_rows() is None
        assert load_rows() is None
    [record] = caplog.records
    assert record.levelno == logging.INFO
    assert "without a C compiler" in record.getMessage()
    [task, _] = make_tasks(1, "straight", 64, [2], 1, False)
    assert isinstance(plan_transfer(task, native=True), NumpyTransfer)


@pytest.mark.usefixtures("fresh_load")
def test_a_library_that_does_not_fit_is_not_used(monkeypatch, caplog, tmp_path) -> None:
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"no library")
    monkeypatch.setattr(RowCopier.__init__, "__defaults__", (broken,))
    monkeypatch.setattr(host_copy, "LIBRARY", broken)
    assert load_rows() is None
    assert "install kvkeep again" in caplog.text
    with pytest.raises(ValueError, match="version 0"):
        RowCopier(ctypes.util.find_library("m"))
    monkeypatch.setattr(host_copy, "VERSION", host_copy.VERSION + 1)
    with pytest.raises(ValueError, match=f"version {host_copy.VERSION} is needed"):
        RowCopier(LIBRARY)
