"""open_ranks: a worker's place among the ranks of its engine, from the settings.

Called once, by CacheManager. Settings end here; below are plain values.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from kvkeep.config.ranks import RanksSettings
from kvkeep.errors import ConfigError
from kvkeep.identity import CacheIdentity
from kvkeep.memory.base import MemoryAllocatorInterface
from kvkeep.memory.factory import tensor_pool
from kvkeep.memory.sizing import WorkerPlace
from kvkeep.metrics import Metrics
from kvkeep.ranks.base import RankGroup, RankOptions
from kvkeep.ranks.first import FirstRank
from kvkeep.ranks.follower import FollowerRank


def is_first_rank_only(ranks: RanksSettings, *, has_same_kv: bool, is_one_machine: bool) -> bool:
    """Rank 0 alone stores.

    Args:
        ranks: the settings.
        has_same_kv: the KV of a token is the same on every rank.
        is_one_machine: all ranks can map rank 0's memory.

    Raises:
        ConfigError: the settings want it, and it would give ranks KV that is not theirs.
    """
    can = has_same_kv and is_one_machine
    if ranks.save_only_first_rank and not can:
        why = "each rank has KV of its own" if not has_same_kv else "there are several machines"
        raise ConfigError(f"ranks.save_only_first_rank cannot be on here: {why}")
    return can and ranks.save_only_first_rank is not False


def open_ranks(
    ranks: RanksSettings,
    place: WorkerPlace,
    socket: Path | None,
    identity: CacheIdentity,
    *,
    allocator: MemoryAllocatorInterface,
    metrics: Metrics,
) -> RankGroup | None:
    """This worker's side of its engine's group; None for an engine of one rank.

    Without a socket the ranks do not load together, and whoever drives them has to see to it that
    what one of them lacks is used on none.

    Args:
        ranks: the settings.
        place: the worker.
        socket: where the ranks meet; its directory is private to the user.
        identity: the worker's.
        allocator: its pool.
        metrics: where failures of other ranks are counted.

    Raises:
        ConfigError: rank 0 stores for all, and there is no place to meet.
        RankError: rank 0 cannot listen.
    """
    if socket is None and place.first_rank_only:
        raise ConfigError("ranks that copy out of rank 0's memory need a socket where they meet")
    if socket is None or place.num_ranks == 1:
        return None
    options = RankOptions(
        socket=socket,
        rank=place.rank,
        num_ranks=place.num_ranks,
        shares_kv=place.first_rank_only,
        timeout_s=ranks.timeout,
        identity=replace(identity, rank=0).digest(),
    )
    if place.rank:
        return FollowerRank(options, metrics=metrics)
    arena = tensor_pool(allocator).arena if place.first_rank_only else None
    return FirstRank(options, metrics=metrics, arena=arena)
