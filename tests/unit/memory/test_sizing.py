"""How large a pool is: defaults, the first rank, and what stays free."""

from __future__ import annotations

import psutil
import pytest

from kvkeep.memory.placement import (
    DEFAULT_POOL_BYTES,
    WantedSize,
    WorkerPlace,
    available_bytes,
    choose_size,
    default_pool_bytes,
)

GB = 10**9
LATENT = WorkerPlace(rank=0, num_ranks=2, num_local=2, has_same_kv=True)
LATENT_OTHER = WorkerPlace(rank=1, num_ranks=2, num_local=2, has_same_kv=True)


def test_the_default_is_5_gb_or_half_of_the_workers_share() -> None:
    """Eight workers of one machine do not promise four times its memory together."""
    assert default_pool_bytes(64 * GB) == DEFAULT_POOL_BYTES == 5 * GB
    assert default_pool_bytes(6 * GB) == 3 * GB
    assert default_pool_bytes(64 * GB, num_local=8) == 4 * GB
    size, choice = choose_size(WantedSize(), WorkerPlace(num_local=8), 64 * GB)
    assert size == 4 * GB
    assert "default" in choice.why


@pytest.mark.parametrize(
    ("place", "size"),
    [(LATENT, 9 * GB), (LATENT_OTHER, GB), (WorkerPlace(rank=0, num_ranks=2), GB)],
)
def test_the_first_rank_of_a_latent_attention_model_has_its_own_size(place, size) -> None:
    wanted = WantedSize(size_bytes=GB, first_rank_bytes=9 * GB)
    assert choose_size(wanted, place, 64 * GB)[0] == size


def test_a_size_without_effect_is_said() -> None:
    """Fault 46: an option that does nothing here says so."""
    wanted = WantedSize(size_bytes=GB, first_rank_bytes=9 * GB)
    _, choice = choose_size(wanted, WorkerPlace(), 64 * GB)
    assert "cpu.first_rank_size has no effect" in choice.why
    assert "no effect" not in choose_size(wanted, LATENT_OTHER, 64 * GB)[1].why


@pytest.mark.parametrize(
    ("reserve", "num_local", "size"),
    [(4 * GB, 1, 6 * GB), (2 * GB, 1, 8 * GB), (1 * GB, 1, 8 * GB), (4 * GB, 2, 3 * GB)],
)
def test_the_reserve_stays_free(reserve, num_local, size) -> None:
    """Of 10 GB available; two workers share what is left."""
    wanted = WantedSize(size_bytes=8 * GB, reserve_bytes=reserve)
    found, choice = choose_size(wanted, WorkerPlace(num_local=num_local), 10 * GB)
    assert found == size
    assert ("reduced from 8000000000" in choice.why) == (size < 8 * GB)


def test_a_reserve_that_leaves_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"make cpu\.reserve smaller"):
        choose_size(WantedSize(reserve_bytes=11 * GB), WorkerPlace(), 10 * GB)


def test_a_container_has_what_its_limit_leaves(tmp_path) -> None:
    whole = psutil.virtual_memory().available
    assert available_bytes(tmp_path) > whole // 2
    (tmp_path / "memory.max").write_text("max\n")
    assert available_bytes(tmp_path) > whole // 2
    (tmp_path / "memory.max").write_text("5000000\n")
    (tmp_path / "memory.current").write_text("1000000\n")
    assert available_bytes(tmp_path) > whole // 2  # no figures of what it is used for
    (tmp_path / "memory.stat").write_text("anon 400000\nactive_file 200000\ninactive_file 100000\n")
    assert available_bytes(tmp_path) == 4_300_000  # files that were read can go
    (tmp_path / "memory.current").write_text("6000000\n")
    assert available_bytes(tmp_path) == 0
