"""One launch of a kernel in the interpreter, with observed loads, stores and atomics: see `kernel_sanitizer`."""

import gc
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

NOBODY, SEVERAL = 0, -1  # beside the numbers of programs, from 1 on


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
    """Of the kernel, with its module: several modules have a ``_forward_kernel``."""
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
                self.fail(f"an address is not a multiple of the {size} bytes of what lies there")
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


class LargeLaunch(Launch):
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
        pointers, mask = np.broadcast_arrays(np.asarray(pointers), np.asarray(mask, bool))
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

    def begin_program(self, program: int) -> None:
        """Let a program run."""
        self.program = program + 1

    def wait(self) -> None:
        """Do nothing: nobody is waited for."""


class LooseLaunch(Launch):
    """A launch that runs once, unwatched: of a kernel that has been watched, or on much memory."""

    def __post_init__(self) -> None:
        """Look at no memory."""

    def ignore(self, *_: Any) -> None:
        """Do nothing."""

    begin_program = read = write = change = wait = ignore
