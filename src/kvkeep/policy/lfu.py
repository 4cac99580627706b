"""LFU: the chunk that was used least often goes first; among equals, the least recent one.

Chunks stand in buckets by number of uses, and the buckets are linked in ascending order, so every
update is O(1) (Shah, Mitra and Matani, "An O(1) algorithm for implementing the LFU cache eviction
scheme", 2010).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, MutableMapping, Sequence
from typing import ClassVar

from kvkeep.keys import ChunkKey
from kvkeep.policy.base import CachePolicy, V


class _Bucket:
    """The chunks with one number of uses, between the buckets with fewer and with more."""

    __slots__ = ("keys", "next", "previous", "uses")

    def __init__(self, uses: int) -> None:
        self.uses = uses
        self.keys: OrderedDict[ChunkKey, None] = OrderedDict()  # least recent first
        self.previous: _Bucket = self
        self.next: _Bucket = self


class LFUPolicy(CachePolicy[V]):
    """Order of the number of uses; arrival is the first."""

    name: ClassVar[str] = "lfu"

    def __init__(self) -> None:
        self._ring = _Bucket(0)  # always empty; its next has the fewest uses
        self._bucket_of: dict[ChunkKey, _Bucket] = {}

    def init_mutable_mapping(self) -> MutableMapping[ChunkKey, V]:
        """A plain dict; the order is kept in the buckets."""
        return {}

    def note_order(self, keys: Sequence[ChunkKey], mapping: MutableMapping[ChunkKey, V]) -> None:
        """Among equals make the first chunk the most recent one.

        No use is counted, but a chunk with fewer uses than one that follows it gets as many: each
        use of that one was one of its own, and it was away for some of them.
        """
        highest = self._ring
        for key in reversed(keys):
            bucket = self._bucket_of.get(key)
            if bucket is None:
                continue
            if bucket.uses >= highest.uses:
                highest = bucket
                bucket.keys.move_to_end(key)
                continue
            del bucket.keys[key]
            highest.keys[key] = None
            self._bucket_of[key] = highest
            self._unlink_if_empty(bucket)

    def update_on_put(self, key: ChunkKey) -> None:
        """First use."""
        self._insert(key, self._ring, 1)

    def update_on_hit(self, key: ChunkKey, mapping: MutableMapping[ChunkKey, V]) -> None:
        """One use more."""
        bucket = self._bucket_of[key]
        del bucket.keys[key]
        self._insert(key, bucket, bucket.uses + 1)
        self._unlink_if_empty(bucket)

    def update_on_force_evict(self, key: ChunkKey) -> None:
        """Forget the chunk and its uses."""
        bucket = self._bucket_of.pop(key)
        del bucket.keys[key]
        self._unlink_if_empty(bucket)

    def get_evict_candidates(
        self,
        mapping: MutableMapping[ChunkKey, V],
        num_candidates: int,
        can_evict: Callable[[V], bool],
    ) -> list[ChunkKey]:
        """The chunks with the fewest uses."""
        found: list[ChunkKey] = []
        bucket = self._ring.next
        while bucket is not self._ring:
            for key in bucket.keys:
                if len(found) >= num_candidates:
                    return found
                if can_evict(mapping[key]):
                    found.append(key)
            bucket = bucket.next
        return found

    def _insert(self, key: ChunkKey, after: _Bucket, uses: int) -> None:
        """Put ``key`` into the bucket for ``uses``, which stands or must stand after ``after``."""
        bucket = after.next
        if bucket.uses != uses:
            bucket = _Bucket(uses)
            bucket.previous, bucket.next = after, after.next
            after.next.previous = bucket
            after.next = bucket
        bucket.keys[key] = None
        self._bucket_of[key] = bucket

    def _unlink_if_empty(self, bucket: _Bucket) -> None:
        if not bucket.keys:
            bucket.previous.next = bucket.next
            bucket.next.previous = bucket.previous
