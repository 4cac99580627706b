"""FIFO: the chunk that came in first goes first, however often it was used.

LRU: the chunk that was not used for the longest time goes first.

MRU: the chunk that was used last goes first.

For scans that go round and round through more chunks than fit: LRU then never hits, MRU keeps the
part that it has.

LFU: the chunk that was used least often goes first; among equals, the least recent one.

Chunks stand in buckets by number of uses, and the buckets are linked in ascending order, so every
update is O(1) (Shah, Mitra and Matani, "An O(1) algorithm for implementing the LFU cache eviction
scheme", 2010).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import ClassVar, cast

from kvkeep.hashing import ChunkKey
from kvkeep.policy.base import CachePolicy, V, pick


class FIFOPolicy(CachePolicy[V]):
    """Order of arrival. A chunk arrives at the latest with the last one that follows it.

    The mapping is an OrderedDict, not a plain dict: a plain dict keeps the place of a deleted entry
    until it is rebuilt, so that finding its first entry again and again costs time proportional to
    everything deleted before.
    """

    name: ClassVar[str] = "fifo"

    def __init__(self) -> None:
        """Nothing has arrived yet."""
        self._count = 0
        self._arrived: dict[ChunkKey, int] = {}

    def init_mutable_mapping(self) -> MutableMapping[ChunkKey, V]:
        """An ordered dict in order of arrival."""
        return OrderedDict()

    def note_order(self, keys: Sequence[ChunkKey], mapping: MutableMapping[ChunkKey, V]) -> None:
        """Let chunks arrive anew before which one that follows them came later."""
        ordered = cast("OrderedDict[ChunkKey, V]", mapping)
        latest = 0
        for key in reversed(keys):
            arrived = self._arrived.get(key, latest)
            if arrived < latest:
                ordered.move_to_end(key)
                self.update_on_put(key)
                arrived = self._count
            latest = arrived

    def update_on_put(self, key: ChunkKey) -> None:
        """Count the arrival; the order itself is the mapping's."""
        self._count += 1
        self._arrived[key] = self._count

    def update_on_hit(self, key: ChunkKey, mapping: MutableMapping[ChunkKey, V]) -> None:
        """A hit changes nothing."""

    def update_on_force_evict(self, key: ChunkKey) -> None:
        """Forget when it came."""
        del self._arrived[key]

    def get_evict_candidates(
        self,
        mapping: MutableMapping[ChunkKey, V],
        num_candidates: int,
        can_evict: Callable[[V], bool],
        passed: list[ChunkKey] | None = None,
    ) -> list[ChunkKey]:
        """The oldest chunks."""
        return pick(mapping.items(), num_candidates, can_evict, passed)

    def set_aside(self, keys: Sequence[ChunkKey], mapping: MutableMapping[ChunkKey, V]) -> None:
        """Let them arrive anew: what is in use when its turn comes gets another turn."""
        ordered = cast("OrderedDict[ChunkKey, V]", mapping)
        for key in keys:
            ordered.move_to_end(key)
            self.update_on_put(key)


class LRUPolicy(CachePolicy[V]):
    """Order of the last use; arrival counts as a use."""

    name: ClassVar[str] = "lru"

    def init_mutable_mapping(self) -> MutableMapping[ChunkKey, V]:
        """An ordered dict, least recent first."""
        return OrderedDict()

    def note_order(self, keys: Sequence[ChunkKey], mapping: MutableMapping[ChunkKey, V]) -> None:
        """Make the first chunk the most recent one, then the second, and so on."""
        ordered = cast("OrderedDict[ChunkKey, V]", mapping)
        for key in reversed(keys):
            if key in ordered:
                ordered.move_to_end(key)

    def update_on_put(self, key: ChunkKey) -> None:
        """Nothing to note: a new entry of the mapping is its most recent one."""

    def update_on_hit(self, key: ChunkKey, mapping: MutableMapping[ChunkKey, V]) -> None:
        """Make the chunk the most recent one."""
        cast("OrderedDict[ChunkKey, V]", mapping).move_to_end(key)

    def update_on_force_evict(self, key: ChunkKey) -> None:
        """Nothing to forget."""

    def get_evict_candidates(
        self,
        mapping: MutableMapping[ChunkKey, V],
        num_candidates: int,
        can_evict: Callable[[V], bool],
        passed: list[ChunkKey] | None = None,
    ) -> list[ChunkKey]:
        """The least recent chunks."""
        return pick(mapping.items(), num_candidates, can_evict, passed)

    def set_aside(self, keys: Sequence[ChunkKey], mapping: MutableMapping[ChunkKey, V]) -> None:
        """Make them the most recent ones, which the ends of their pins will do for good."""
        ordered = cast("OrderedDict[ChunkKey, V]", mapping)
        for key in keys:
            ordered.move_to_end(key)


class MRUPolicy(CachePolicy[V]):
    """Order of the last use, backwards; arrival counts as a use."""

    name: ClassVar[str] = "mru"

    def init_mutable_mapping(self) -> MutableMapping[ChunkKey, V]:
        """An ordered dict, most recent last."""
        return OrderedDict()

    def note_order(self, keys: Sequence[ChunkKey], mapping: MutableMapping[ChunkKey, V]) -> None:
        """Make the last chunk the most recent one, since that one goes first."""
        ordered = cast("OrderedDict[ChunkKey, V]", mapping)
        for key in keys:
            if key in ordered:
                ordered.move_to_end(key)

    def update_on_put(self, key: ChunkKey) -> None:
        """Nothing to note: a new entry of the mapping is its most recent one."""

    def update_on_hit(self, key: ChunkKey, mapping: MutableMapping[ChunkKey, V]) -> None:
        """Make the chunk the most recent one."""
        cast("OrderedDict[ChunkKey, V]", mapping).move_to_end(key)

    def update_on_force_evict(self, key: ChunkKey) -> None:
        """Nothing to forget."""

    def get_evict_candidates(
        self,
        mapping: MutableMapping[ChunkKey, V],
        num_candidates: int,
        can_evict: Callable[[V], bool],
        passed: list[ChunkKey] | None = None,
    ) -> list[ChunkKey]:
        """The most recent chunks."""
        ordered = cast("OrderedDict[ChunkKey, V]", mapping)
        return pick(reversed(ordered.items()), num_candidates, can_evict, passed)

    def set_aside(self, keys: Sequence[ChunkKey], mapping: MutableMapping[ChunkKey, V]) -> None:
        """Make them the least recent ones, until the ends of their pins note their use."""
        ordered = cast("OrderedDict[ChunkKey, V]", mapping)
        for key in keys:
            ordered.move_to_end(key, last=False)


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
