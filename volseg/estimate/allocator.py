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
from dataclasses import dataclass, field, replace
from typing import Any

from volseg.errors import ConfigError, OutOfMemoryError
from volseg.estimate.trace import Allocate, Free, LetGo, Mark, StepTrace

__all__ = ["Allocator", "AllocatorSettings", "MemoryUse", "find_memory_use"]

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
class MemoryUse:
    """Peaks of one device, in bytes."""

    used: int
    """In blocks that are held: ``torch.cuda.max_memory_allocated``."""
    reserved: int
    """Taken from the device: ``torch.cuda.max_memory_reserved``."""
    outside: int
    """Taken beside torch's allocator: the context, libraries' own workspaces."""
    peak_in: str
    """The part of the step in which ``reserved`` was highest."""
    reserved_by_steps: int | None = None
    """Of ``reserved``, what was taken before the first validation; None where none is traced."""

    @property
    def total(self) -> int:
        """What the device must have."""
        return self.reserved + self.outside

    def of_steps(self) -> "MemoryUse":
        """Return what the training steps reserve by themselves."""
        return self if self.reserved_by_steps is None else replace(self, reserved=self.reserved_by_steps)


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
class _Block:
    """A piece of a segment, in use or free."""

    address: int
    size: int
    pool: "_Pool"
    before: "_Block | None" = None
    after: "_Block | None" = None
    is_free: bool = True


@dataclass(slots=True, eq=False)
class _Pool:
    """Free blocks of one kind, owner and stream."""

    is_small: bool
    keys: list[tuple[int, int]] = field(default_factory=list)
    """Size and address of the free blocks, in order."""
    by_address: dict[int, _Block] = field(default_factory=dict)
    last: _Block | None = None
    """Where an expandable segment ends."""

    def add(self, block: _Block) -> None:
        """Put a free block in its place."""
        insort(self.keys, (block.size, block.address))
        self.by_address[block.address] = block

    def remove(self, block: _Block) -> None:
        """Take a free block out."""
        del self.keys[bisect_left(self.keys, (block.size, block.address))]
        del self.by_address[block.address]

    def find(self, size: int) -> _Block | None:
        """Return the smallest free block that is large enough."""
        place = bisect_left(self.keys, (size, -1))
        return self.by_address[self.keys[place][1]] if place < len(self.keys) else None


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
        self._held: dict[Any, _Block] = {}
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
        for other in (block.before, block.after):
            if other is not None and other.is_free:
                block.pool.remove(other)
                self._join(block, other)
        block.pool.add(block)

    def leave(self, name: Any) -> None:
        """Count the block of ``name`` as used no more; another stream still works on it, until it is given back."""
        if name in self._held:
            self.used -= self._held[name].size
            self._left.add(name)

    def empty_cache(self) -> None:
        """Return to the device what is not divided and not a recording's: ``torch.cuda.empty_cache``."""
        for name in list(self._left):  # torch waits for the other streams before it returns memory
            self.give_back(name)
        for (owner, _, _), pool in self._pools.items():
            if not owner:
                self._release(pool)

    def find_block(self, name: Any) -> tuple[int, int]:
        """Return address and size of the block of ``name``."""
        return self._held[name].address, self._held[name].size

    def _find_free(self, pool: _Pool, size: int) -> _Block | None:
        """Take the free block that fits best out of its pool; None where none fits."""
        found = pool.find(size)
        if found is None:
            return None
        limit = self.settings.max_split_size
        if limit is not None and size < limit <= found.size:
            return None
        if limit is not None and size >= limit and found.size >= size + self.settings.large_segment:
            return None
        pool.remove(found)
        return found

    def _is_divided(self, block: _Block, size: int) -> bool:
        left = block.size - size
        if block.pool.is_small or self.settings.expandable_segments:
            return left >= SMALLEST_BLOCK
        limit = self.settings.max_split_size
        return (limit is None or size < limit) and left > LARGEST_SMALL

    def _divide(self, block: _Block, size: int) -> None:
        """Keep the first ``size`` bytes of a block; the rest is a free block behind it."""
        rest = _Block(block.address + size, block.size - size, block.pool, before=block, after=block.after)
        if block.after is not None:
            block.after.before = rest
        block.after, block.size = rest, size
        if block.pool.last is block:
            block.pool.last = rest
        block.pool.add(rest)

    @staticmethod
    def _join(block: _Block, other: _Block) -> None:
        """Let a block, which is in no list, take up its free neighbour, which is in none either."""
        block.size += other.size
        if other is block.before:
            block.address, block.before = other.address, other.before
            if block.before is not None:
                block.before.after = block
        else:
            block.after = other.after
            if block.after is not None:
                block.after.before = block
        if block.pool.last is other:
            block.pool.last = block

    def _ask_device(self, pool: _Pool, size: int, recording: bool) -> _Block:
        """Return a new block; give cached ones back to the device where it has no more."""
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

    def _try_device(self, pool: _Pool, size: int) -> _Block | None:
        """Return a new block, in no list; None where the device has no more."""
        if self.settings.expandable_segments:
            return self._expand(pool, size)
        wanted = -(-size // SEGMENT_ROUNDING) * SEGMENT_ROUNDING
        if pool.is_small:
            wanted = SMALL_SEGMENT
        elif size < SMALLEST_OWN_SEGMENT:
            wanted = self.settings.large_segment
        return _Block(self._place(wanted), wanted, pool) if self._reserve(wanted) else None

    def _expand(self, pool: _Pool, size: int) -> _Block | None:
        """Let a pool's expandable segment grow until its last block has so many bytes, and return that."""
        last = pool.last
        free = last.size if last is not None and last.is_free else 0
        page = SMALL_SEGMENT if pool.is_small else self.settings.large_segment
        more = -(-(size - free) // page) * page
        if not self._reserve(more):
            return None
        if last is None:
            pool.last = _Block(self._place(2**40), more, pool)
        elif last.is_free:
            pool.remove(last)
            last.size += more
        else:
            last.after = pool.last = _Block(last.address + last.size, more, pool, before=last)
        return pool.last

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
        if self.settings.expandable_segments:
            self._shrink(pool)
            return
        for block in list(pool.by_address.values()):
            if block.before is None and block.after is None:
                pool.remove(block)
                self.reserved -= block.size

    def _shrink(self, pool: _Pool) -> None:
        last = pool.last
        if last is None or not last.is_free:
            return
        page = SMALL_SEGMENT if pool.is_small else self.settings.large_segment
        kept = last.size % page
        pool.remove(last)
        self.reserved -= last.size - kept
        last.size = kept
        if kept:
            pool.add(last)
        else:
            pool.last = last.before
            if last.before is not None:
                last.before.after = None


def find_memory_use(
    trace: StepTrace,
    settings: AllocatorSettings | None = None,
    capacity: int | None = None,
    *,
    outside: int = 0,
) -> MemoryUse:
    """Return the peaks of a trace.

    Parameters
    ----------
    trace : StepTrace
        From the placing of the network on; what lives at the end of the trace lives on.
    settings : AllocatorSettings, optional
        Torch's defaults by default.
    capacity : int, optional
        Bytes of the device; where they are not enough, cached memory is given back, as torch does, and asked for again.
        Without, the trace takes what it needs.
    outside : int
        Bytes of the device that are taken beside the allocator.

    Raises
    ------
    OutOfMemoryError
        Where the capacity does not suffice: with the part of the step and the number of the event.
    """
    allocator = Allocator(settings, None if capacity is None else capacity - outside)
    part, peak_in, peak = "placing", "placing", 0
    by_steps: int | None = None
    for number, event in enumerate(trace.events):
        match event:
            case Allocate(block, size, stream, pool):
                try:
                    allocator.take(block, size, stream, pool)
                except OutOfMemoryError as fault:
                    raise OutOfMemoryError(f"out of memory in {part} (event {number} of the trace): {fault}") from fault
                if allocator.reserved > peak:
                    peak, peak_in = allocator.reserved, part
            case Free(block):
                allocator.give_back(block)
            case LetGo(block):
                allocator.leave(block)
            case Mark("empty_cache"):
                allocator.empty_cache()
            case Mark(name):
                part = name
                by_steps = allocator.peak_reserved if name == "validate" else by_steps
    return MemoryUse(
        used=allocator.peak_used,
        reserved=allocator.peak_reserved,
        outside=outside,
        peak_in=peak_in,
        reserved_by_steps=by_steps,
    )
