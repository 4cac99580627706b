"""Tiers that use the CPU tier's memory get what is put without a copy."""

from __future__ import annotations

from kvkeep.backends.reference import DictBackend
from kvkeep.metrics import Metrics
from kvkeep.storage.manager import StorageManager
from kvkeep.testing.chunks import check_found, fill, make_keys, make_pool
from support.disk import make_disk


class Watched(DictBackend):
    """Remembers the objects that it was handed."""

    handed = ()

    def batched_submit_put_task(self, keys, objs, *, on_complete=None):
        self.handed = tuple(objs)
        return super().batched_submit_put_task(keys, objs, on_complete=on_complete)


def test_tiers_of_one_allocator_share_its_memory(tmp_path) -> None:
    pool = make_pool()
    disk = make_disk(pool, tmp_path)
    watched = Watched(pool)
    manager = StorageManager([pool, disk, watched], allocator_backend=pool, metrics=Metrics())
    assert pool.get_allocator_backend() is pool
    assert disk.get_allocator_backend() is pool
    keys = make_keys(3)
    objs = fill(pool, keys)
    manager.batched_put(keys, objs)
    assert all(obj is put for obj, put in zip(objs, watched.handed, strict=True))
    assert pool.memcheck().num_objects == 3
    assert disk.flush(20)
    for location in manager.storage_backends:
        assert all(check_found(keys, manager.batched_get(keys, location)))
    manager.close()
    assert pool.memcheck().num_objects == 0
