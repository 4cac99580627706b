"""References: an owner object for references to memory, so that no exception can leak one.

Use it from one thread at a time.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType

from kvkeep.memory.base import MemoryObj
from kvkeep.memory.batches import batched_ref_count_down


class References:
    """Owns one reference to each of some memory objects and gives them back once.

    >>> with References(backend.batched_get_blocking(keys)) as held:
    ...     copy(held.objects)
    """

    def __init__(self, objects: Iterable[MemoryObj | None] = ()) -> None:
        """Become the owner of references that the caller holds. None entries are skipped."""
        self.objects: list[MemoryObj] = [obj for obj in objects if obj is not None]

    def adopt(self, objects: Iterable[MemoryObj | None]) -> None:
        """Become the owner of more references."""
        self.objects.extend(obj for obj in objects if obj is not None)

    def detach(self) -> list[MemoryObj]:
        """Hand all references to the caller, who must give them back."""
        objects, self.objects = self.objects, []
        return objects

    def release(self) -> None:
        """Give all references back; a second call does nothing.

        Raises:
            OwnershipError: somebody else gave one of them back before; all others were given back.
        """
        batched_ref_count_down(self.detach())

    def __enter__(self) -> References:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()
