"""Find by Triton's interpreter what would go wrong on a GPU only.

The interpreter runs a kernel's programs one after the other in their order, on memory of the CPU where an access beside
a tensor hits something, with NumPy's NaN. Within ``watching`` each launch runs several times from the same memory, its
programs in another order each time, and every load, store and atomic is looked at. A `KernelFault` is raised where

- the orders leave other bits behind;
- programs write the same byte, or one reads what another writes, and nothing orders them: an atomic of one that
  releases, of the other that acquires, with scope of the GPU, and a barrier between the access and what releases it;
- a program reads, behind no barrier, what it wrote: another of its threads may have been the one that wrote; or writes
  what it read with its lanes on other places;
- lanes of one store write different values to one place;
- an access lies outside of the tensors that the kernel was given, to the byte;
- a grid is one that CUDA does not take.

What ``torch.empty`` returns is NaN, or the largest number, so that what no program writes shows in a test's comparison.
``tl.minimum`` and ``tl.maximum`` of NaN and a number are the number, as on a GPU.
"""

import gc
import inspect
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["KernelFault", "Launch", "watching"]

LARGEST_GRID = 2**31 - 1, 2**16 - 1, 2**16 - 1
"""CUDA's, https://docs.nvidia.com/cuda/cuda-c-programming-guide, technical specifications per compute capability."""

NOBODY, SEVERAL = 0, -1  # beside the numbers of programs, from 1 on

LARGEST_POISONED = 2**26
"""Bytes of uninitialised memory that are filled."""


class KernelFault(AssertionError):  # noqa: N818  (of a kernel, found in a test)
    """What a kernel would do wrong on a GPU."""


@dataclass(eq=False)
class Region:
    """The memory of one tensor's storage, byte by byte."""

    start: int
    bytes: Any
    """NumPy's view of it."""
    allowed: Any
    """Whether each byte belongs to a tensor that the kernel was given; None where all do."""
    owner: Any
    undo: list[tuple[Any, Any]] = field(default_factory=list)
    """Bytes that were written, and what was there before."""
    writer: Any = None
    epoch: Any = None
    """Of the writer, when it wrote."""
    reader: Any = None
    read_epoch: Any = None
    contended: Any = None
    """Bytes that some program writes: only who reads those is written down."""

    @property
    def stop(self) -> int:
        return self.start + len(self.bytes)

    def forget(self) -> None:
        """Begin another run of the launch."""
        size = len(self.bytes)
        # Zeros, which take no memory until they are written: a box of planes has 32 MB, of which little is used.
        self.writer, self.reader, self.epoch, self.read_epoch = (np.zeros(size, np.int64) for _ in range(4))
        self.undo = []

    def note_change(self, places: Any) -> None:
        """Write down what is there before it changes."""
        self.undo.append((places, self.bytes[places]))
        self.contended[places] = True

    def restore(self) -> None:
        """Let all be there again that was before the launch."""
        for places, before in reversed(self.undo):
            self.bytes[places] = before

    def list_changes(self) -> tuple[Any, Any]:
        """Return the bytes that were written, and what is there now."""
        places = np.unique(np.concatenate([np.zeros(0, np.int64), *(places for places, _ in self.undo)]))
        return places, self.bytes[places]


def _make_region(owner: Tensor, views: Sequence[Tensor] | None) -> Region:
    storage = owner.untyped_storage()
    memory = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,)).numpy()
    allowed = None if views is None else np.zeros(len(memory), bool)
    for view in views or ():
        if view.numel() and allowed is not None:
            size = view.element_size()
            strides = [step * size for step in view.stride()]
            begin = allowed[view.storage_offset() * size :]
            np.lib.stride_tricks.as_strided(begin, (*view.shape, size), (*strides, 1))[...] = True
    region = Region(storage.data_ptr(), memory, allowed, storage, contended=np.zeros(len(memory), bool))
    region.forget()
    return region


@dataclass(eq=False)
class Launch:
    """One launch of a kernel."""

    name: str
    tensors: Sequence[Tensor]
    programs: int
    regions: list[Region] = field(default_factory=list)
    first: bool = True
    program: int = 0

    def __post_init__(self) -> None:
        by_storage: dict[int, list[Tensor]] = {}
        for tensor in self.tensors:
            by_storage.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
        self.regions = [_make_region(views[0], views) for start, views in by_storage.items() if start]
        self.begin_run()

    def begin_run(self) -> None:
        """Forget who has done what."""
        self.epochs = np.ones(self.programs + 1, np.int64)  # grows with each barrier
        self.known: dict[int, Any] = {}
        self.released: dict[int, Any] = {}
        self.atomics: dict[int, dict[int, int]] = {}
        self.readers: dict[tuple[int, int], dict[int, int]] = {}
        self.loads: list[tuple[Region, Any]] = []
        for region in self.regions:
            region.forget()

    def begin_program(self, program: int) -> None:
        """Let a program run."""
        self.program, self.loads = program + 1, []

    def restore(self) -> None:
        """Let memory be as it was before the launch."""
        for region in self.regions:
            region.restore()

    def fail(self, what: str) -> None:
        """Say what is wrong."""
        raise KernelFault(f"{self.name}, program {self.program - 1} of {self.programs}: {what}")

    def find(self, pointers: Any, mask: Any, size: int) -> list[tuple[Region, Any, Any]]:
        """Return the memory that is accessed: region, first bytes in it, and which of the lanes."""
        pointers, mask = np.broadcast_arrays(np.asarray(pointers).reshape(-1), np.asarray(mask).reshape(-1))
        lanes = np.flatnonzero(mask)
        addresses = pointers[lanes].astype(np.int64)
        found = []
        while len(addresses):
            region = self._find_region(int(addresses[0]))
            here = (addresses >= region.start) & (addresses + size <= region.stop)
            if not here[0]:
                self.fail(f"an access of {size} bytes ends behind the memory of its tensor")
            offsets = addresses[here] - region.start
            if region.allowed is not None and not all(region.allowed[offsets + byte].all() for byte in range(size)):
                self.fail(
                    "an access lies in the memory of a tensor, but beside the part of it that the kernel was given"
                )
            if (addresses[here] % size).any():
                self.fail(f"an address is no multiple of the {size} bytes of what lies there")
            found.append((region, offsets, lanes[here]))
            addresses, lanes = addresses[~here], lanes[~here]
        return found

    def _find_region(self, address: int) -> Region:
        for region in self.regions:
            if region.start <= address < region.stop:
                return region
        # Told as a number: a box that processes write into.
        for value in gc.get_objects():
            if type(value) is Tensor and value.device.type == "cpu" and value.layout is torch.strided:
                storage = value.untyped_storage()
                if storage.data_ptr() <= address < storage.data_ptr() + storage.nbytes():
                    self.regions.append(_make_region(value, None))
                    return self.regions[-1]
        return self.fail(f"an access outside of all memory, at {self._describe(address)}")

    def _describe(self, address: int) -> str:
        near = min(self.regions, key=lambda region: min(abs(address - region.start), abs(address - region.stop)))
        shape = [tuple(t.shape) for t in self.tensors if t.untyped_storage().data_ptr() == near.start]
        return f"{address - near.start} of {len(near.bytes)} bytes of the nearest tensor, {shape}"

    def is_ordered(self, programs: Any, epochs: Any) -> Any:
        """Say whether what other programs did in an epoch of theirs happened before what this program does now."""
        known = self.known.get(self.program)
        return np.zeros(len(programs), bool) if known is None else known[programs] > epochs

    def read(self, pointers: Any, mask: Any, size: int) -> None:
        """Look at a load."""
        for region, offsets, _ in self.find(pointers, mask, size):
            places = (offsets[:, None] + np.arange(size)).reshape(-1)
            self._check_writers(region, places, "reads")
            own = region.writer[places] == self.program
            if (own & (region.epoch[places] == self.epochs[self.program])).any():
                self.fail("it reads what it wrote itself, with no barrier between: another thread may have written it")
            self._check_atomics(region, places, "reads")
            if region.contended[offsets].any():
                self.loads.append((region, offsets))
                self._note_readers(region, places[region.contended[places]])

    def _note_readers(self, region: Region, places: Any) -> None:
        others = places[~np.isin(region.reader[places], (NOBODY, self.program))]
        for place in others.tolist():
            key = region.start, place
            if region.reader[place] != SEVERAL:
                self.readers[key] = {int(region.reader[place]): int(region.read_epoch[place])}
            self.readers[key][self.program] = int(self.epochs[self.program])
        region.reader[places] = self.program
        region.read_epoch[places] = self.epochs[self.program]
        region.reader[others] = SEVERAL

    def write(self, pointers: Any, mask: Any, size: int, values: Any) -> None:
        """Look at a store."""
        values = np.ascontiguousarray(np.broadcast_to(values, np.shape(pointers))).reshape(-1)
        for region, offsets, lanes in self.find(pointers, mask, size):
            self._check_lanes(offsets, values[lanes])
            places = (offsets[:, None] + np.arange(size)).reshape(-1)
            self._check_writers(region, places, "writes")
            self._check_atomics(region, places, "writes")
            self._check_readers(region, places)
            for other, read in self.loads:
                if other is region and not np.array_equal(read, offsets) and np.isin(read, offsets).any():
                    self.fail("it writes what it read with other lanes, with no barrier between")
            region.writer[places] = self.program
            region.epoch[places] = self.epochs[self.program]
            region.note_change(places)

    def _check_lanes(self, offsets: Any, values: Any) -> None:
        order = np.argsort(offsets, kind="stable")
        offsets, values = offsets[order], values[order].view(np.dtype(f"V{values.dtype.itemsize}"))
        if ((offsets[1:] == offsets[:-1]) & (values[1:] != values[:-1])).any():
            self.fail("lanes of one store write different values to one place")

    def _check_writers(self, region: Region, places: Any, verb: str) -> None:
        writers = region.writer[places]
        others = (writers != NOBODY) & (writers != self.program)
        if others.any():
            unordered = ~self.is_ordered(writers[others], region.epoch[places][others])
            if unordered.any():
                self.fail(f"it {verb} what program {writers[others][unordered][0] - 1} writes, and nothing orders them")

    def _check_readers(self, region: Region, places: Any) -> None:
        readers = region.reader[places]
        one = (readers > NOBODY) & (readers != self.program)
        if one.any() and not self.is_ordered(readers[one], region.read_epoch[places][one]).all():
            self.fail(f"it writes what program {readers[one][0] - 1} reads, and nothing orders them")
        for place in places[readers == SEVERAL].tolist():
            self._check_all(self.readers[region.start, place], "writes what program {} reads")

    def _check_all(self, done: dict[int, int], what: str) -> None:
        for program, epoch in done.items():
            if program != self.program and not self.is_ordered(np.array([program]), np.array([epoch])).all():
                self.fail(f"it {what.format(program - 1)}, and nothing orders them")

    def _check_atomics(self, region: Region, places: Any, verb: str) -> None:
        if self.atomics:
            for place in places.tolist():
                self._check_all(self.atomics.get(region.start + place, {}), verb + " what program {} adds to")

    def change(self, pointers: Any, mask: Any, size: int, sem: str, scope: str) -> None:
        """Look at an atomic."""
        far = scope in ("GPU", "SYSTEM")
        for region, offsets, _ in self.find(pointers, mask, size):
            places = (offsets[:, None] + np.arange(size)).reshape(-1)
            if far and sem in ("ACQUIRE", "ACQUIRE_RELEASE"):
                for place in offsets.tolist():
                    self._learn(self.released.get(region.start + place))
            self._check_writers(region, places, "adds to")
            self._check_readers(region, places)
            region.note_change(places)
            for place in places.tolist():
                mine = self.atomics.setdefault(region.start + place, {})
                mine[self.program] = int(self.epochs[self.program]) - 1  # it is what the others acquire
            if far and sem in ("RELEASE", "ACQUIRE_RELEASE"):
                known = self.known.get(self.program, np.zeros(self.programs + 1, np.int64)).copy()
                known[self.program] = self.epochs[self.program]  # what came before the last barrier
                for place in offsets.tolist():
                    told = self.released.get(region.start + place)
                    self.released[region.start + place] = known if told is None else np.maximum(told, known)

    def _learn(self, told: Any) -> None:
        if told is not None:
            known = self.known.get(self.program)
            self.known[self.program] = told.copy() if known is None else np.maximum(told, known)

    def wait(self) -> None:
        """Let all threads of a program have done what came before."""
        self.epochs[self.program] += 1
        self.loads = []

    def compare(self, wanted: list[Any]) -> list[Any]:
        """Return what memory holds now; fail where it is not what the programs left there in their own order."""
        found = [region.list_changes() for region in self.regions]
        for ours, theirs in zip(found, wanted or found, strict=False):
            if not all(np.array_equal(one, other) for one, other in zip(ours, theirs, strict=True)):
                self.fail("programs in another order leave other bits behind")
        return found


class _LargeLaunch(Launch):
    """A launch on more memory than can be looked at byte by byte, of which some programs run."""

    def __post_init__(self) -> None:
        self.bounds, self.reached = [], set()
        for tensor in self.tensors:
            steps = [(size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)]
            size, first = tensor.element_size(), tensor.data_ptr()
            low, high = (sum(step for step in steps if (step > 0) is up) for up in (False, True))
            self.bounds.append((first + low * size, first + (high + 1) * size))

    def find(self, pointers: Any, mask: Any, size: int) -> list[tuple[Region, Any, Any]]:
        """Look whether all lies within some tensor."""
        pointers, mask = np.broadcast_arrays(np.asarray(pointers), np.asarray(mask))
        addresses = pointers[mask].astype(np.int64)
        inside = np.zeros(len(addresses), bool)
        for number, (start, stop) in enumerate(self.bounds):
            inside |= (addresses >= start) & (addresses + size <= stop)
            if (addresses + size == stop).any():
                self.reached.add(number)
        if not inside.all():
            self.fail("an access lies outside of all tensors")
        return []

    @property
    def missed(self) -> list[tuple[int, ...]]:
        """The shapes of the tensors of more than 2**31 elements whose last element nobody came to."""
        large = (number for number, tensor in enumerate(self.tensors) if tensor.numel() > 2**31)
        return [tuple(self.tensors[number].shape) for number in large if number not in self.reached]

    def wait(self) -> None:
        """Do nothing: nobody is waited for."""

    def begin_program(self, program: int) -> None:
        """Let a program run."""
        self.program = program + 1


EMPTY = {torch.empty, torch.empty_like, torch.empty_strided, Tensor.new_empty, Tensor.new_empty_strided}


class _Poison(TorchFunctionMode):
    """Fills what ``torch.empty`` returns."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in EMPTY and type(result) is Tensor and result.device.type == "cpu":
            storage = result.untyped_storage()
            if 0 < storage.nbytes() <= LARGEST_POISONED and not result.dtype.is_complex:
                flat = torch.empty(0, dtype=result.dtype).set_(storage)
                flat.fill_(float("nan") if result.is_floating_point() else _find_largest(result.dtype))
        return result


def _find_largest(dtype: torch.dtype) -> int | bool:
    return True if dtype == torch.bool else torch.iinfo(dtype).max


def _order_programs(grid: Sequence[int], number: int, seed: int) -> list[tuple[int, int, int]]:
    """Return the programs of a grid: in their order, the other way round, then at random."""
    programs = [(x, y, z) for x in range(grid[0]) for y in range(grid[1]) for z in range(grid[2])]
    if number == 1:
        programs.reverse()
    elif number > 1:
        random.Random(f"{seed} {number}").shuffle(programs)
    return programs


@contextmanager
def watching(
    orders: int = 3, seed: int = 0, only: Callable[[Sequence[int]], list[tuple[int, int, int]]] | None = None
) -> Iterator[list[Launch]]:
    """Look at all that kernels do in here; yields the launches, as they come.

    Parameters
    ----------
    orders
        How often each launch runs: in the programs' order, the other way round, then at random.
    seed
        Of the random orders.
    only
        The programs of a grid that run, of launches too large to run: once, with bounds and grids alone looked at.

    Raises
    ------
    KernelFault
        As Triton's ``InterpreterError`` where a kernel's own code was on the way.
    """
    from triton.runtime import interpreter  # Triton may not be installed

    builder, launches, seen, plain = interpreter.interpreter_builder, [], [], _find_plain()

    def measure(pointers: Any) -> int:
        return int(np.dtype(interpreter._get_np_dtype(pointers.get_element_ty())).itemsize)

    def load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        launches[-1].read(pointers.data, mask.data, measure(pointers))
        return plain["create_masked_load"](self, pointers, mask, *rest)

    def store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        launches[-1].write(pointers.data, mask.data, measure(pointers), value.data)
        return plain["create_masked_store"](self, pointers, value, mask, *rest)

    def modify(self: Any, operation: Any, pointers: Any, value: Any, mask: Any, sem: Any, scope: Any) -> Any:
        launches[-1].change(pointers.data, mask.data, measure(pointers), sem.name, scope.name)
        return plain["create_atomic_rmw"](self, operation, pointers, value, mask, sem, scope)

    def swap(self: Any, pointers: Any, old: Any, value: Any, sem: Any, scope: Any) -> Any:
        launches[-1].change(pointers.data, np.True_, measure(pointers), sem.name, scope.name)
        return plain["create_atomic_cas"](self, pointers, old, value, sem, scope)

    def barrier(self: Any) -> None:
        launches[-1].wait()

    def run(self: Any, *arguments: Any, **options: Any) -> None:
        accepted = inspect.getfullargspec(self.fn).args
        options = {name: value for name, value in options.items() if name in accepted}
        given = inspect.getcallargs(self.fn, *arguments, **options)
        fixed = set(self.constexprs)
        converted = {n: v if n in fixed else interpreter._implicit_cvt(v) for n, v in given.items()}
        grid = self.grid(converted) if callable(self.grid) else self.grid
        grid = (*grid, 1, 1)[:3] if isinstance(grid, tuple | list) else (grid, 1, 1)
        if any(not 0 <= size <= most for size, most in zip(grid, LARGEST_GRID, strict=True)):
            raise KernelFault(f"{self.fn.__name__}: CUDA takes no grid of {grid}, at most {LARGEST_GRID}")
        tensors = [value for value in given.values() if isinstance(value, Tensor)]
        programs = grid[0] * grid[1] * grid[2]
        launch = (Launch if only is None else _LargeLaunch)(self.fn.__name__, tensors, programs)
        patches = interpreter._patch_lang(self.fn)
        launches.append(launch)
        seen.append(launch)
        try:
            builder.set_grid_dim(*grid)
            left: list[Any] = []
            for number in range(1 if only is not None else orders if programs > 1 else min(orders, 2)):
                if number:
                    launch.restore()
                    launch.begin_run()
                for x, y, z in only(grid) if only is not None else _order_programs(grid, number, seed):
                    builder.set_grid_idx(x, y, z)
                    launch.begin_program((x * grid[1] + y) * grid[2] + z)
                    self.fn(**converted)
                left = launch.compare(left) if only is None else left
        finally:
            launches.pop()
            patches.restore()

    own = {
        "create_masked_load": load, "create_masked_store": store, "create_atomic_rmw": modify,
        "create_atomic_cas": swap, "create_barrier": barrier,
        "create_minnumf": lambda self, one, other: self.binary_op(one, other, np.fmin),
        "create_maxnumf": lambda self, one, other: self.binary_op(one, other, np.fmax),
    }  # fmt: skip
    with ExitStack() as changed:
        for name, function in own.items():
            changed.enter_context(patch.object(interpreter.InterpreterBuilder, name, function))
        changed.enter_context(patch.object(interpreter.GridExecutor, "__call__", run))
        changed.enter_context(_Poison())
        yield seen


@cache
def _find_plain() -> dict[str, Any]:
    """Return the interpreter's own functions, found before any is replaced."""
    from triton.runtime.interpreter import InterpreterBuilder  # Triton may not be installed

    names = ("create_masked_load", "create_masked_store", "create_atomic_rmw", "create_atomic_cas")
    return {name: getattr(InterpreterBuilder, name) for name in names}
