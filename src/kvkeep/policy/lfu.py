"""LFU: the chunk that was used least often goes first; among equals, the least recent one.

Chunks stand in buckets by number of uses, and the buckets are linked in ascending order, so every
update is O(1) (Shah, Mitra and Matani, "An O(1) algorithm for implementing the LFU cache eviction
scheme", 2010).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import ClassVar

from kvkeep.keys import ChunkKey
from kvkeep.policy.base import CachePolicy, V, pick


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
        self._counted_early: set[ChunkKey] = set()  # set aside, and not used since

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
        if key in self._counted_early:
            self._counted_early.remove(key)
            bucket.keys.move_to_end(key)
            return
        del bucket.keys[key]
        self._insert(key, bucket, bucket.uses + 1)
        self._unlink_if_empty(bucket)

    def update_on_force_evict(self, key: ChunkKey) -> None:
        """Forget the chunk and its uses."""
        self._counted_early.discard(key)
        bucket = self._bucket_of.pop(key)
        del bucket.keys[key]
        self._unlink_if_empty(bucket)

    def get_evict_candidates(
        self,
        mapping: MutableMapping[ChunkKey, V],
        num_candidates: int,
        can_evict: Callable[[V], bool],
        passed: list[ChunkKey] | None = None,
    ) -> list[ChunkKey]:
        """The chunks with the fewest uses."""
        items = ((key, mapping[key]) for key in self._in_order())
        return pick(items, num_candidates, can_evict, passed)

    def set_aside(self, keys: Sequence[ChunkKey], mapping: MutableMapping[ChunkKey, V]) -> None:
        """Count the use that the end of the pin would count; it then counts none."""
        for key in keys:
            if key not in self._counted_early:
                self.update_on_hit(key, mapping)
                self._counted_early.add(key)

    def _in_order(self) -> Iterator[ChunkKey]:
        bucket = self._ring.next
        while bucket is not self._ring:
            yield from bucket.keys
            bucket = bucket.next

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
