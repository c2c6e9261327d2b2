"""Pieces of the segments that torch's allocator has taken, and the free ones among them in order."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field

__all__ = ["BlockPool", "MemoryBlock"]


@dataclass(slots=True, eq=False)
class MemoryBlock:
    """A piece of a segment: in use, free, or an address without memory behind it."""

    address: int
    size: int
    pool: "BlockPool"
    before: "MemoryBlock | None" = None
    after: "MemoryBlock | None" = None
    is_free: bool = True
    is_mapped: bool = True

    @property
    def is_whole(self) -> bool:
        """Whether it is all of its segment."""
        return self.before is None and self.after is None

    @property
    def key(self) -> tuple[int, int]:
        """By which free blocks are ordered."""
        return self.size, self.address


@dataclass(slots=True, eq=False)
class BlockPool:
    """Free blocks of one kind, owner and stream."""

    is_small: bool
    page: int
    """Of an expandable segment, in bytes."""
    keys: list[tuple[int, int]] = field(default_factory=list)
    """Size and address of the free blocks, in order."""
    by_address: dict[int, MemoryBlock] = field(default_factory=dict)
    unmapped: list[tuple[int, MemoryBlock]] = field(default_factory=list)
    """Addresses without memory, in order."""
    base: int = 0
    """Where the expandable segment begins, from which its pages are counted."""

    def add(self, block: MemoryBlock) -> None:
        """Put a free block in its place."""
        insort(self.keys, block.key)
        self.by_address[block.address] = block

    def remove(self, block: MemoryBlock) -> None:
        """Take a free block out."""
        del self.keys[bisect_left(self.keys, block.key)]
        del self.by_address[block.address]

    def find(self, size: int) -> Iterator[MemoryBlock]:
        """Yield the free blocks that are large enough, the smallest first."""
        for place in range(bisect_left(self.keys, (size, -1)), len(self.keys)):
            yield self.by_address[self.keys[place][1]]

    def list_free(self) -> list[MemoryBlock]:
        """Return the free blocks, the smallest first."""
        return [self.by_address[address] for _, address in self.keys]
