"""Torch's caching allocator of CUDA memory, as a model: what it reserves for a given order of requests.

A training reserves more than its tensors hold at a time, since the allocator keeps what it once took and hands out
pieces of it. The model follows its rules [1]_ block by block:

- sizes are rounded up to 512 bytes. Up to 1 MiB they come from *small* segments of 2 MiB, others from *large* ones: of
  20 MiB for less than 10 MiB, and of their own size, rounded up to 2 MiB, above;
- of the free blocks of the same pool and stream the smallest that is large enough is taken, of equal ones that at the
  lowest address. What is left over becomes a block of its own, from 512 bytes on in a small segment and above 1 MiB in
  a large one;
- a block that is given back joins its free neighbours of the same segment;
- each stream has its own blocks, and so has each recording, whose segments stay its own;
- where the device has no more, whole free segments are given back to it, and it is asked once more.

The driver takes addresses from the top of what it has downwards, so each new segment lies below those before it.
An expandable segment grows by pages at its end, and only free pages at its end are given back.

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

__all__ = ["Allocator", "AllocatorSettings"]

MIB = 2**20
SMALLEST_BLOCK = 512
LARGEST_SMALL = MIB
SMALL_SEGMENT = 2 * MIB
SMALLEST_OWN_SEGMENT = 10 * MIB
SEGMENT_ROUNDING = 2 * MIB
TOP = 2**56
"""The highest address; the expandable segments of many pools fit below."""

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Of the environment; where both are set torch takes the first, which torch 2.9 has brought."""

WITHOUT_EFFECT = (
    *("pinned_use_cuda_host_register", "pinned_num_register_threads", "pinned_use_background_threads"),
    *("pinned_reserve_segment_size_mb", "release_lock_on_cudamalloc", "graph_capture_record_stream_reuse"),
)
"""Settings that leave the pieces as they are, as long as no recording's block is used on several streams."""


@dataclass(frozen=True, kw_only=True)
class AllocatorSettings:
    """What ``PYTORCH_CUDA_ALLOC_CONF`` says of how segments are made and divided."""

    expandable_segments: bool = False
    """Whether a pool's memory is one segment that grows by pages of 2 MiB (small) and 20 MiB (large)."""
    max_split_size: int | None = None
    """Bytes from which on a block is not divided."""
    large_segment: int = 20 * MIB
    """Bytes of a segment for what is smaller than 10 MiB, and of the large pages of an expandable one."""

    @classmethod
    def find(cls) -> "AllocatorSettings":
        """Return what this process's environment says: a training that is started from it has the same settings.

        Raises
        ------
        ConfigError
            See `read`.
        """
        set_here = [os.environ[name] for name in VARIABLES if name in os.environ]
        return cls.read(set_here[0] if set_here else "")

    @classmethod
    def read(cls, text: str) -> "AllocatorSettings":
        """Return what the variable's value means.

        Raises
        ------
        ConfigError
            For a setting that changes the pieces in a way that is not modelled.

        Examples
        --------
        >>> AllocatorSettings.read("expandable_segments:True").expandable_segments
        True
        """
        found: dict[str, Any] = {}
        for part in filter(None, (part.strip() for part in text.split(","))):
            name, _, value = (word.strip() for word in part.partition(":"))
            if name == "expandable_segments" and value in ("True", "False"):
                found["expandable_segments"] = value == "True"
            elif name in ("max_split_size_mb", "large_segment_size_mb") and value.isdecimal() and value != "0":
                found[name.removesuffix("_mb").replace("segment_size", "segment")] = int(value) * MIB
            elif name not in WITHOUT_EFFECT and (name, value) != ("backend", "native"):
                raise ConfigError(
                    f"PYTORCH_CUDA_ALLOC_CONF has {part!r}, and how torch's allocator divides memory by that is not "
                    "modelled (expandable_segments is True or False, sizes are whole MiB); estimate without it, or "
                    "measure on the GPU"
                )
        return cls(**found)


@dataclass(slots=True, eq=False)
class _Pool:
    """Free pieces of one kind, owner and stream: by size, and by the addresses where they begin and end."""

    is_small: bool
    sizes: list[tuple[int, int]] = field(default_factory=list)
    """Size and address of each, in order."""
    begins: dict[int, int] = field(default_factory=dict)
    """Size by address."""
    ends: dict[int, int] = field(default_factory=dict)
    """Address by the end."""
    segments: dict[int, int] = field(default_factory=dict)
    """Size by address of what was taken from the device; pieces of two segments never join."""
    end: int = 0
    """Where an expandable segment ends."""

    def add(self, address: int, size: int) -> None:
        """Put a piece in its place, joined with its free neighbours."""
        if address in self.ends and address not in self.segments:
            before = self.ends[address]
            address, size = before, size + self.remove(before)
        if address + size in self.begins and address + size not in self.segments:
            size += self.remove(address + size)
        insort(self.sizes, (size, address))
        self.begins[address], self.ends[address + size] = size, address

    def remove(self, address: int) -> int:
        """Take the piece at an address out; return its size."""
        size = self.begins.pop(address)
        del self.ends[address + size]
        del self.sizes[bisect_left(self.sizes, (size, address))]
        return size


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
        Bytes in blocks that are held, and taken from the device.
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
        self._pools: dict[tuple[str, bool, int], _Pool] = {}
        self._held: dict[Any, tuple[_Pool, int, int]] = {}
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
        key = owner, rounded <= LARGEST_SMALL, stream
        pool = self._pools.setdefault(key, _Pool(rounded <= LARGEST_SMALL))
        address, found = self._find_free(pool, rounded) or self._ask_device(pool, rounded, recording=bool(owner))
        if self._is_divided(pool, found, rounded):
            pool.add(address + rounded, found - rounded)
            found = rounded
        self._held[name] = pool, address, found
        self.used += found
        self.peak_used = max(self.peak_used, self.used)

    def give_back(self, name: Any) -> None:
        """Take back the block of ``name``; it stays reserved."""
        if name not in self._held:
            return  # of no bytes
        pool, address, size = self._held.pop(name)
        if name in self._left:
            self._left.remove(name)
        else:
            self.used -= size
        pool.add(address, size)

    def leave(self, name: Any) -> None:
        """Count the block of ``name`` as used no more; another stream still works on it, until it is given back."""
        if name in self._held:
            self.used -= self._held[name][2]
            self._left.add(name)

    def wait(self) -> None:
        """Take back what was left: the other streams have come to where it is free."""
        for name in list(self._left):
            self.give_back(name)

    def empty_cache(self) -> None:
        """Return to the device what is not divided and not a recording's: ``torch.cuda.empty_cache``."""
        self.wait()  # as torch does before it returns memory
        for (owner, _, _), pool in self._pools.items():
            if not owner:
                self._release(pool)

    def find_block(self, name: Any) -> tuple[int, int]:
        """Return address and size of the block of ``name``."""
        return self._held[name][1:]

    def _find_free(self, pool: _Pool, size: int) -> tuple[int, int] | None:
        """Take the free piece that fits best out of its pool; None where none fits."""
        place = bisect_left(pool.sizes, (size, -1))
        if place == len(pool.sizes):
            return None
        found, address = pool.sizes[place]
        limit = self.settings.max_split_size
        if limit is not None:  # large pieces are for large blocks, and for those of about their size
            is_kept = size < limit <= found or (size >= limit and found >= size + self.settings.large_segment)
            if is_kept:
                return None
        return address, pool.remove(address)

    def _is_divided(self, pool: _Pool, found: int, size: int) -> bool:
        """Return whether the rest of a piece, behind ``size`` bytes of it, becomes a piece of its own."""
        if pool.is_small or self.settings.expandable_segments:
            return found - size >= SMALLEST_BLOCK
        limit = self.settings.max_split_size
        return (limit is None or size < limit) and found - size > LARGEST_SMALL

    def _ask_device(self, pool: _Pool, size: int, recording: bool) -> tuple[int, int]:
        """Return a new piece; give cached ones back to the device where it has no more."""
        take = self._expand if self.settings.expandable_segments else self._take_segment
        found = take(pool, size)
        if found is None and not recording:  # nothing may be freed while a recording is made
            self.empty_cache()
            found = take(pool, size)
        if found is None:
            raise OutOfMemoryError(
                f"{size:,} bytes are asked for, and of the device's {self.capacity:,} bytes {self.reserved:,} are "
                f"reserved, {self.used:,} of them in use"
            )
        return found

    def _take_segment(self, pool: _Pool, size: int) -> tuple[int, int] | None:
        """Return a new segment; None where the device has no more."""
        wanted = -(-size // SEGMENT_ROUNDING) * SEGMENT_ROUNDING
        if pool.is_small:
            wanted = SMALL_SEGMENT
        elif size < SMALLEST_OWN_SEGMENT:
            wanted = self.settings.large_segment
        if not self._reserve(wanted):
            return None
        address = self._place(wanted)
        pool.segments[address] = wanted
        return address, wanted

    def _expand(self, pool: _Pool, size: int) -> tuple[int, int] | None:
        """Let a pool's expandable segment grow until so many bytes at its end are free, and return these."""
        pool.end = pool.end or self._place(2**40)
        first = pool.ends.get(pool.end, pool.end)
        page = SMALL_SEGMENT if pool.is_small else self.settings.large_segment
        more = -(-(size - (pool.end - first)) // page) * page
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
        """Return the whole segments of a pool, or the free pages at the end of its expandable one."""
        for address in [each for each, size in pool.begins.items() if pool.segments.get(each) == size]:
            self.reserved -= pool.remove(address)
            del pool.segments[address]
        if pool.end in pool.ends:
            first = pool.ends[pool.end]
            size = pool.remove(first)
            kept = size % (SMALL_SEGMENT if pool.is_small else self.settings.large_segment)
            self.reserved -= size - kept
            pool.end = first + kept
            if kept:
                pool.add(first, kept)
