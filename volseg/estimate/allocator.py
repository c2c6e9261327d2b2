"""Model torch's caching allocator of CUDA memory: compute the memory that it reserves for a sequence of requests.

A training reserves more memory than its tensors use at a time, since the allocator keeps its segments and hands out
pieces of them. The model follows the allocator's rules [1]_ block by block:

- Sizes are rounded up to 512 bytes. Sizes up to 1 MiB come from *small* segments of 2 MiB, larger ones from *large*
  segments: of 20 MiB for less than 10 MiB, and above of their own size, rounded up to 2 MiB.
- The allocator takes the smallest free block of the same pool and stream that is large enough, at the lowest address
  among equals. The rest becomes a block, from 512 bytes on in a small segment and above 1 MiB in a large one.
- A freed block merges with its free neighbours of the same segment.
- Each stream has its own blocks. So has each recording, and its segments stay private.
- When the device has no memory left, whole free segments are returned to it, and the request is repeated.

The driver assigns addresses from the top downwards, so each new segment is below the earlier ones.
An expandable segment grows by pages at its end, and only free pages at its end are returned.

References
----------
.. [1] c10/cuda/CUDACachingAllocator.cpp of torch 2.8 to 2.13.
"""

import os
from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from volseg.errors import ConfigError, OutOfMemoryError

MIB = 2**20
SMALLEST_BLOCK = 512
LARGEST_SMALL = MIB
SMALL_SEGMENT, LARGE_SEGMENT = 2 * MIB, 20 * MIB
SMALLEST_OWN_SEGMENT = 10 * MIB
SEGMENT_ROUNDING = 2 * MIB
TOP = 2**56
"""The highest address; the expandable segments of many pools fit below."""

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Environment variables; if both are set, torch uses the first, which torch 2.9 introduced."""

WITHOUT_EFFECT = (
    *("pinned_use_cuda_host_register", "pinned_num_register_threads", "pinned_use_background_threads"),
    *("pinned_reserve_segment_size_mb", "release_lock_on_cudamalloc", "graph_capture_record_stream_reuse"),
)
"""Settings that do not change the pieces, as long as no recording's block is used on several streams."""


def has_expandable_segments() -> bool:
    """Return whether a pool's memory is one segment that grows by pages of 2 MiB (small) and 20 MiB (large).

    The setting is read from this process's environment, which a training started from here inherits.

    Raises
    ------
    ConfigError
        If another setting changes the pieces in a way that is not modelled.
    """
    expands = False
    text = next((os.environ[name] for name in VARIABLES if name in os.environ), "")
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = (word.strip() for word in part.partition(":"))
        if name == "expandable_segments" and value in ("True", "False"):
            expands = value == "True"
        elif name not in WITHOUT_EFFECT and (name, value) != ("backend", "native"):
            raise ConfigError(
                f"PYTORCH_CUDA_ALLOC_CONF has {part!r}, but the estimate models only expandable_segments "
                "(True or False) of torch's allocator; estimate without this setting, or measure on the GPU"
            )
    return expands


@dataclass(slots=True, eq=False)
class _Pool:
    """Free pieces of one kind, owner and stream, indexed by size, by start address and by end address."""

    is_small: bool
    page: int
    """Size of a segment that several blocks share, and of a page of an expandable segment."""
    sizes: list[tuple[int, int]] = field(default_factory=list)
    """Size and start address of each piece, sorted."""
    begins: dict[int, int] = field(default_factory=dict)
    """Size by start address."""
    ends: dict[int, int] = field(default_factory=dict)
    """Start address by end address."""
    segments: dict[int, int] = field(default_factory=dict)
    """Size of each segment by its start address; pieces of two segments never merge."""
    end: int = 0
    """End address of an expandable segment."""

    def add(self, address: int, size: int) -> None:
        """Add a free piece, merged with its free neighbours."""
        if address in self.ends and address not in self.segments:
            before = self.ends[address]
            address, size = before, size + self.remove(before)
        if address + size in self.begins and address + size not in self.segments:
            size += self.remove(address + size)
        insort(self.sizes, (size, address))
        self.begins[address], self.ends[address + size] = size, address

    def remove(self, address: int) -> int:
        """Remove the piece at an address, and return its size."""
        size = self.begins.pop(address)
        del self.ends[address + size]
        del self.sizes[bisect_left(self.sizes, (size, address))]
        return size


class Allocator:
    """A model of torch's caching allocator on one device.

    Parameters
    ----------
    expands : bool
        Whether each pool has one expandable segment; see `has_expandable_segments`.
    capacity : int, optional
        Bytes of the device; unlimited by default.
    place : callable, optional
        Maps the size of a new segment to its address, as a driver chose it; by default addresses fall.

    Attributes
    ----------
    used, reserved : int
        Allocated bytes, and reserved bytes.
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
        self, expands: bool = False, capacity: int | None = None, place: Callable[[int], int] | None = None
    ) -> None:
        self.expands = expands
        self.capacity = capacity
        self.used = self.reserved = self.peak_used = self.peak_reserved = 0
        self._place = place or self._place_below
        self._pools: dict[tuple[str, bool, int], _Pool] = {}
        self._held: dict[Any, tuple[_Pool, int, int]] = {}
        self._left: set[Any] = set()
        self._lowest_address = TOP

    def take(self, name: Any, size: int, stream: int = 0, owner: str = "") -> None:
        """Allocate a block of ``size`` bytes for ``name``; a size of 0 allocates nothing.

        Parameters
        ----------
        name
            Hashable name, different from the names of all blocks in use.
        size : int
            Requested bytes.
        stream : int
            Stream whose free blocks may be used.
        owner : str
            Name of the recording that owns the memory; empty for the shared pool.

        Raises
        ------
        OutOfMemoryError
            If the device has no memory left, even after freeing the cache.
        """
        assert name not in self._held, f"block {name!r} is in use"
        if size == 0:
            return
        rounded = -(-size // SMALLEST_BLOCK) * SMALLEST_BLOCK
        is_small = rounded <= LARGEST_SMALL
        if (pool := self._pools.get((owner, is_small, stream))) is None:
            pool = self._pools[owner, is_small, stream] = _Pool(is_small, SMALL_SEGMENT if is_small else LARGE_SEGMENT)
        place = bisect_left(pool.sizes, (rounded, -1))
        if place < len(pool.sizes):
            address = pool.sizes[place][1]
            found = pool.remove(address)
        else:
            address, found = self._ask_device(pool, rounded, recording=bool(owner))
        least = SMALLEST_BLOCK if pool.is_small or self.expands else LARGEST_SMALL + SMALLEST_BLOCK
        if found - rounded >= least:  # the rest becomes a separate piece
            pool.add(address + rounded, found - rounded)
            found = rounded
        self._held[name] = pool, address, found
        self.used += found
        self.peak_used = max(self.peak_used, self.used)

    def give_back(self, name: Any) -> None:
        """Free the block of ``name``; its memory stays reserved."""
        if name not in self._held:
            return  # a block of 0 bytes
        pool, address, size = self._held.pop(name)
        if name in self._left:
            self._left.remove(name)
        else:
            self.used -= size
        pool.add(address, size)

    def leave(self, name: Any) -> None:
        """Stop counting the block of ``name`` as used; it is not free yet, as another stream still works on it."""
        if name in self._held:
            self.used -= self._held[name][2]
            self._left.add(name)

    def wait(self) -> None:
        """Free the blocks passed to `leave`: the other streams are done with them."""
        for name in list(self._left):
            self.give_back(name)

    def empty_cache(self) -> None:
        """Return free whole segments to the device, except those of recordings: ``torch.cuda.empty_cache``."""
        self.wait()  # as torch does before it returns memory
        for (owner, _, _), pool in self._pools.items():
            if not owner:
                self._release(pool)

    def find_block(self, name: Any) -> tuple[int, int]:
        """Return the address and the size of the block of ``name``."""
        return self._held[name][1:]

    def _ask_device(self, pool: _Pool, size: int, recording: bool) -> tuple[int, int]:
        """Return a new piece; free the cache first if the device has no memory left."""
        take = self._expand if self.expands else self._take_segment
        found = take(pool, size)
        if found is None and not recording:  # no segment may be freed during a recording
            self.empty_cache()
            found = take(pool, size)
        if found is None:
            raise OutOfMemoryError(
                f"{size:,} bytes are asked for, and of the device's {self.capacity:,} bytes {self.reserved:,} are "
                f"reserved, {self.used:,} of them in use"
            )
        return found

    def _take_segment(self, pool: _Pool, size: int) -> tuple[int, int] | None:
        """Return a new segment, or None if the device has no memory left."""
        is_own = not pool.is_small and size >= SMALLEST_OWN_SEGMENT
        wanted = -(-size // SEGMENT_ROUNDING) * SEGMENT_ROUNDING if is_own else pool.page
        if not self._reserve(wanted):
            return None
        address = self._place(wanted)
        pool.segments[address] = wanted
        return address, wanted

    def _expand(self, pool: _Pool, size: int) -> tuple[int, int] | None:
        """Grow a pool's expandable segment until ``size`` bytes at its end are free, and return this piece."""
        pool.end = pool.end or self._place(2**40)
        first = pool.ends.get(pool.end, pool.end)
        more = -(-(size - (pool.end - first)) // pool.page) * pool.page
        if not self._reserve(more):
            return None
        if first < pool.end:
            pool.remove(first)
        pool.end += more
        return first, pool.end - first

    def _place_below(self, size: int) -> int:
        self._lowest_address -= size + SEGMENT_ROUNDING
        return self._lowest_address

    def _reserve(self, size: int) -> bool:
        if self.capacity is not None and self.reserved + size > self.capacity:
            return False
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return True

    def _release(self, pool: _Pool) -> None:
        """Release the free whole segments of a pool, or the free pages at the end of its expandable segment."""
        for address in [each for each, size in pool.begins.items() if pool.segments.get(each) == size]:
            self.reserved -= pool.remove(address)
            del pool.segments[address]
        if pool.end in pool.ends:
            first = pool.ends[pool.end]
            size = pool.remove(first)
            kept = size % pool.page
            self.reserved -= size - kept
            pool.end = first + kept
            if kept:
                pool.add(first, kept)
