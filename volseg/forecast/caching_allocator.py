"""Torch's caching allocator of CUDA memory, as a model: what it takes from the device for a given order of requests.

What a training reserves is more than what its tensors hold at a time, since the allocator keeps what it once took and
hands out pieces of it. The model follows its rules [1]_ block by block, so that a forecast has the same pieces:

- sizes are rounded up to 512 bytes. Up to 1 MiB they come from *small* segments of 2 MiB, others from *large* ones: of
  20 MiB for less than 10 MiB, and of their own size, rounded up to 2 MiB, above;
- of the free blocks of the same pool and stream the smallest that is large enough is taken, of equal ones that at the
  lowest address. What is left over becomes a block of its own, from 512 bytes on in a small segment and above 1 MiB in
  a large one;
- a block that is given back joins its free neighbours of the same segment;
- each stream has its own blocks, and so has each recording, whose segments stay its own;
- where the device has no more, whole free segments are given back to it, and it is asked once more.

The driver takes addresses from the top of what it has downwards, so each new segment lies below those before it. That
decides between free blocks of equal size alone, and by that over segments of hundreds of MiB: of thirty accounts of an
H200 the same requests at falling addresses reserve what was reserved, at rising ones up to 13 % more or less. Holes
above, which the driver fills with what is small, are not modelled.

References
----------
.. [1] c10/cuda/CUDACachingAllocator.cpp of torch 2.8 to 2.13.
"""

from bisect import bisect_left, insort
from collections.abc import Callable
from typing import Any

from volseg.errors import OutOfMemoryError
from volseg.forecast.allocator_settings import AllocatorSettings
from volseg.forecast.memory_blocks import BlockPool, MemoryBlock

__all__ = ["Allocator"]

MIB = 2**20
SMALLEST_BLOCK = 512
LARGEST_SMALL = MIB
SMALL_SEGMENT = 2 * MIB
SMALLEST_OWN_SEGMENT = 10 * MIB
SEGMENT_ROUNDING = 2 * MIB
TOP = 2**56
"""The highest address; the expandable segments of many pools fit below."""


class Allocator:
    """The allocator of one device.

    Parameters
    ----------
    settings : AllocatorSettings
    capacity : int, optional
        Bytes that the device gives; without end by default.
    place : callable, optional
        From the size of a new segment to its address, as a driver chose it; falling addresses by default.

    Attributes
    ----------
    used, reserved : int
        Bytes in blocks that somebody holds, and taken from the device.
    peak_used, peak_reserved : int

    Examples
    --------
    >>> allocator = Allocator()
    >>> allocator.take("a", 3 * 2**20)  # from a segment of 20 MiB
    >>> allocator.used // 2**20, allocator.reserved // 2**20
    (3, 20)
    >>> allocator.give_back("a"); allocator.empty_cache(); allocator.reserved
    0
    """

    def __init__(
        self,
        settings: AllocatorSettings | None = None,
        capacity: int | None = None,
        place: Callable[[int], int] | None = None,
    ) -> None:
        self.settings = settings or AllocatorSettings()
        self.capacity = capacity
        self.used = self.reserved = self.peak_used = self.peak_reserved = 0
        self._place = place or self._place_below
        self._pools: dict[tuple[str, bool, int], BlockPool] = {}
        self._held: dict[Any, MemoryBlock] = {}
        self._left: set[Any] = set()
        self._lowest_address = TOP

    def take(self, name: Any, size: int, stream: int = 0, owner: str = "") -> None:
        """Give a block of ``size`` bytes to ``name``; nothing is taken for no bytes.

        Parameters
        ----------
        name
            Hashable, that of no other block in use.
        size : int
            Bytes that are asked for.
        stream : int
            Whose blocks may serve.
        owner : str
            The recording whose memory it is; empty for the memory of everybody.

        Raises
        ------
        OutOfMemoryError
            If the device has no more, and nothing can be given back to it.
        """
        assert name not in self._held, f"block {name!r} is in use"
        if size == 0:
            return
        rounded = -(-size // SMALLEST_BLOCK) * SMALLEST_BLOCK
        pool = self._find_pool(owner, rounded <= LARGEST_SMALL, stream)
        block = self._find_free(pool, rounded) or self._ask_device(pool, rounded, recording=bool(owner))
        if self._is_divided(block, rounded):
            self._divide(block, rounded)
        block.is_free = False
        self._held[name] = block
        self.used += block.size
        self.peak_used = max(self.peak_used, self.used)

    def give_back(self, name: Any) -> None:
        """Take back the block of ``name``; it stays reserved."""
        block = self._held.pop(name, None)
        if block is None:
            return  # of no bytes
        if name in self._left:
            self._left.remove(name)
        else:
            self.used -= block.size
        block.is_free = True
        self._join_neighbours(block)
        block.pool.add(block)

    def leave(self, name: Any) -> None:
        """Count the block of ``name`` as used no more; another stream still works on it, until it is given back."""
        if name in self._held:
            self.used -= self._held[name].size
            self._left.add(name)

    def empty_cache(self) -> None:
        """Return to the device what is not divided and not a recording's: ``torch.cuda.empty_cache``."""
        self._wait_for_streams()
        # Large segments first, as torch does; with a limit of the device the order decides nothing.
        for (owner, _, _), pool in sorted(self._pools.items(), key=lambda one: one[0][1]):
            if not owner:
                self._release(pool)

    def find_block(self, name: Any) -> tuple[int, int]:
        """Return address and size of the block of ``name``."""
        return self._held[name].address, self._held[name].size

    def _find_pool(self, owner: str, is_small: bool, stream: int) -> BlockPool:
        key = owner, is_small, stream
        if key not in self._pools:
            self._pools[key] = BlockPool(is_small, SMALL_SEGMENT if is_small else self.settings.large_segment)
        return self._pools[key]

    def _find_free(self, pool: BlockPool, size: int) -> MemoryBlock | None:
        """Take the free block that fits best out of its pool; None where none fits."""
        found = next(pool.find(size), None)
        if found is None:
            return None
        if self.settings.expandable_segments:
            found = self._prefer_what_cannot_grow(pool, found, size)
        limit = self.settings.max_split_size
        if limit is not None and size < limit <= found.size:
            return None
        if limit is not None and size >= limit and found.size >= size + self.settings.large_segment:
            return None
        pool.remove(found)
        return found

    def _prefer_what_cannot_grow(self, pool: BlockPool, found: MemoryBlock, size: int) -> MemoryBlock:
        """Return the best fit where a block before addresses without memory counts as large as it can grow."""

        def can_be(block: MemoryBlock) -> int:
            after = block.after
            return block.size + (after.size if after is not None and not after.is_mapped else 0)

        for other in pool.find(size):
            if other is not found:
                if can_be(other) >= can_be(found):
                    break
                found = other
        return found

    def _is_divided(self, block: MemoryBlock, size: int) -> bool:
        left = block.size - size
        if block.pool.is_small or self.settings.expandable_segments:
            return left >= SMALLEST_BLOCK
        limit = self.settings.max_split_size
        return (limit is None or size < limit) and left > LARGEST_SMALL

    def _divide(self, block: MemoryBlock, size: int) -> None:
        """Keep the first ``size`` bytes of a block; the rest is a free block behind it."""
        rest = MemoryBlock(block.address + size, block.size - size, block.pool, before=block, after=block.after)
        if block.after is not None:
            block.after.before = rest
        block.after, block.size = rest, size
        block.pool.add(rest)

    def _join_neighbours(self, block: MemoryBlock) -> None:
        """Let a block, which is in no list, take up its neighbours of the same kind."""
        before, after = block.before, block.after
        if before is not None and before.is_free and before.is_mapped == block.is_mapped:
            self._forget(before)
            block.address, block.size, block.before = before.address, block.size + before.size, before.before
            if block.before is not None:
                block.before.after = block
        if after is not None and after.is_free and after.is_mapped == block.is_mapped:
            self._forget(after)
            block.size, block.after = block.size + after.size, after.after
            if block.after is not None:
                block.after.before = block

    @staticmethod
    def _forget(block: MemoryBlock) -> None:
        if block.is_mapped:
            block.pool.remove(block)
        else:
            del block.pool.unmapped[bisect_left(block.pool.unmapped, block.address, key=lambda one: one[0])]

    def _ask_device(self, pool: BlockPool, size: int, recording: bool) -> MemoryBlock:
        """Return a new block; give cached ones back to the device where it has no more."""
        block = self._try_device(pool, size)
        if block is None and self._release_oversize(pool, size):
            block = self._try_device(pool, size)
        if block is None and not recording:  # nothing may be freed while a recording is made
            self.empty_cache()
            block = self._try_device(pool, size)
        if block is None:
            raise OutOfMemoryError(
                f"{size:,} bytes are asked for, and of the device's {self.capacity:,} bytes {self.reserved:,} are "
                f"reserved, {self.used:,} of them in use"
            )
        return block

    def _wait_for_streams(self) -> None:
        """Take back what other streams still work on: torch waits for them before it returns memory."""
        for name in list(self._left):
            self.give_back(name)

    def _try_device(self, pool: BlockPool, size: int) -> MemoryBlock | None:
        """Return a new block, in no list; None where the device has no more."""
        if self.settings.expandable_segments:
            return self._expand(pool, size)
        wanted = self._find_segment_size(pool, size)
        if not self._reserve(wanted):
            return None
        return MemoryBlock(self._place(wanted), wanted, pool)

    def _find_segment_size(self, pool: BlockPool, size: int) -> int:
        if pool.is_small:
            return SMALL_SEGMENT
        if size < SMALLEST_OWN_SEGMENT:
            return self.settings.large_segment
        return -(-size // SEGMENT_ROUNDING) * SEGMENT_ROUNDING

    def _place_below(self, size: int) -> int:
        self._lowest_address -= size + SEGMENT_ROUNDING
        return self._lowest_address

    def _reserve(self, size: int) -> bool:
        if self.capacity is not None and self.reserved + size > self.capacity:
            return False
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return True

    def _release(self, pool: BlockPool) -> None:
        """Return the whole segments of a pool, and the whole pages of its expandable one."""
        for block in pool.list_free():
            if self.settings.expandable_segments:
                self._unmap(block)
            elif block.is_whole:
                pool.remove(block)
                self.reserved -= block.size

    def _release_oversize(self, pool: BlockPool, size: int) -> bool:
        """Return as many segments of the size that is not divided as are needed; say whether they are enough."""
        limit = self.settings.max_split_size
        if limit is None:
            return False
        wanted = max(size, limit)
        found = next(pool.find(wanted), None)
        oversize = [block for block in reversed(pool.list_free()) if block.size >= limit] if found is None else [found]
        freed = 0
        for block in oversize:
            if freed >= wanted:
                break
            freed += block.size
            pool.remove(block)
            self.reserved -= block.size
        return freed >= wanted

    def _expand(self, pool: BlockPool, size: int) -> MemoryBlock | None:
        """Return a block at the lowest address of the pool's expandable segment that has room for ``size`` bytes."""
        block: MemoryBlock | None = self._find_room(pool, size)
        assert block is not None
        if not block.is_mapped:
            block = self._map(block, min(block.size, size))
        while block is not None and block.size < size:
            following = block.after
            assert following is not None
            block = self._map(following, min(size - block.size, following.size))
        if block is not None:
            pool.remove(block)
        return block

    def _find_room(self, pool: BlockPool, size: int) -> MemoryBlock:
        for _, block in pool.unmapped:
            start = block.before if block.before is not None and block.before.is_free else block
            room = 0
            following: MemoryBlock | None = start
            while following is not None and following.is_free and room < size:
                room, following = room + following.size, following.after
            if room >= size:
                return start
        # As much address space as no device has memory: a segment for all.
        room = 2**40 // pool.page * pool.page
        block = MemoryBlock(self._place(room), room, pool, is_mapped=False)
        pool.base = block.address
        insort(pool.unmapped, (block.address, block), key=lambda one: one[0])
        return block

    def _map(self, block: MemoryBlock, size: int) -> MemoryBlock | None:
        """Put memory behind the first pages of a block; return the free block that it is part of then."""
        pool = block.pool
        size = -(-size // pool.page) * pool.page
        if not self._reserve(size):
            return None
        self._forget(block)
        if size < block.size:
            rest = MemoryBlock(block.address + size, block.size - size, pool, block, block.after, is_mapped=False)
            if block.after is not None:
                block.after.before = rest
            block.after, block.size = rest, size
            insort(pool.unmapped, (rest.address, rest), key=lambda one: one[0])
        block.is_mapped = True
        self._join_neighbours(block)
        pool.add(block)
        return block

    def _unmap(self, block: MemoryBlock) -> None:
        """Return the whole pages of a free block to the device; what is left of it at either end stays."""
        pool = block.pool
        start = block.address + (pool.base - block.address) % pool.page
        end = block.address + block.size
        end -= (end - pool.base) % pool.page
        if start >= end:
            return
        pool.remove(block)
        tail = block.address + block.size - end
        if start > block.address:
            head = MemoryBlock(block.address, start - block.address, pool, block.before, block)
            if block.before is not None:
                block.before.after = head
            block.before = head
            pool.add(head)
        if tail:
            rest = MemoryBlock(end, tail, pool, block, block.after)
            if block.after is not None:
                block.after.before = rest
            block.after = rest
            pool.add(rest)
        block.address, block.size, block.is_mapped = start, end - start, False
        self.reserved -= block.size
        self._join_neighbours(block)
        insort(pool.unmapped, (block.address, block), key=lambda one: one[0])
