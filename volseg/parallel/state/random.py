"""Record the random number generators of a forward pass, so that the pass can be repeated or undone.

This covers torch's default generators of the CPU and of the devices in use, Python's and NumPy's. Generators that
belong to a network are part of the network's state: see ``module``.
"""

import hashlib
import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from volseg.device.gpus import get_host_readable_device, host_values
from volseg.errors import ParallelError


class RandomState:
    """States of the generators at one moment.

    Parameters
    ----------
    devices
        Devices whose generators count in addition to the CPU's; only CUDA devices have their own.
    foreign
        Whether Python's and NumPy's generators count too: reading them takes fifty times as long as reading torch's.
    """

    def __init__(self, devices: Iterable[torch.device], foreign: bool = True) -> None:
        self._devices, self._foreign = tuple(devices), foreign
        with host_values():
            self._generators = [(generator, generator.get_state()) for generator in _find_generators(self._devices)]
        self._python = random.getstate() if foreign else None
        self._numpy = _find_numpy().get_state() if foreign and _find_numpy() is not None else None

    def torch_moved(self) -> bool:
        """Return whether torch's generators were drawn from since then."""
        with host_values():
            return any(not torch.equal(generator.get_state(), state) for generator, state in self._generators)

    def foreign_moved(self) -> bool:
        """Return whether Python's or NumPy's generators were drawn from since then."""
        if self._foreign and random.getstate() != self._python:
            return True
        return self._numpy is not None and not _is_same_numpy(_find_numpy().get_state(), self._numpy)

    def put_back(self) -> None:
        """Restore the recorded states of the generators."""
        for generator, state in self._generators:
            generator.set_state(state)
        if self._python is not None:
            random.setstate(self._python)
        if self._numpy is not None:
            _find_numpy().set_state(self._numpy)

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Draw from the recorded states in this block, and from the current states afterwards."""
        now = RandomState(self._devices, self._foreign)
        self.put_back()
        try:
            yield
        finally:
            now.put_back()


@contextmanager
def own_random_numbers(devices: Iterable[torch.device]) -> Iterator[None]:
    """Draw without effect on the generators, in trials, measurements and attempts to record."""
    known = RandomState(devices)
    try:
        yield
    finally:
        known.put_back()


@contextmanager
def seeded(seed: int, devices: Iterable[torch.device]) -> Iterator[None]:
    """Draw from a seed in this block, with any library, and from the caller's states afterwards.

    Each generator is seeded separately: ``torch.manual_seed`` takes ten times as long.
    """
    devices, numpy = tuple(devices), _find_numpy()
    before, python = RandomState(devices, foreign=False), random.getstate()
    legacy = None if numpy is None else numpy.get_bit_generator()
    for generator in _find_generators(devices):
        generator.manual_seed(seed)
    random.seed(seed)
    if numpy is not None:
        numpy.set_bit_generator(numpy.MT19937(seed))
    try:
        yield
    finally:
        before.put_back()
        random.setstate(python)
        if numpy is not None:
            numpy.set_bit_generator(legacy)


class CommonSeeds:
    """Seeds that are equal in all processes, one per forward pass, independent of other draws.

    They come from a generator of the network, whose state is in the checkpoint: a resumed training draws the same
    numbers. Evaluation passes do not advance the generator: the number of validations, and of their processes, does not
    change the training.

    Parameters
    ----------
    groups
        Groups of processes with equal seeds: shards, then replicas, so that one value reaches all. The first process
        chooses the initial state from its default generator when the first seed is drawn.
    device
        Device for the exchange between processes.
    """

    def __init__(self, groups: Sequence[dist.ProcessGroup], device: torch.device) -> None:
        self._groups, self._device = groups, device
        self._generator: torch.Generator | None = None
        self._num_evaluations = 0

    def draw(self, training: bool) -> int:
        """Return the seed of a pass; all processes draw the first one together."""
        generator = self.agree()
        if training:
            self._num_evaluations = 0
            return _draw(generator)
        self._num_evaluations += 1
        beside = torch.Generator()
        beside.set_state(generator.get_state())
        return mix(_draw(beside), 2**32 + self._num_evaluations)

    def agree(self) -> torch.Generator:
        """Return the common generator; all processes call this together until it exists."""
        if self._generator is None:
            with host_values():
                first = self._take_first(torch.randint(2**62, (1,)))
                self._generator = torch.Generator().manual_seed(int(first.item()))
        return self._generator

    def _take_first(self, own: Tensor) -> Tensor:
        """Return the first process's value."""
        value = own.to(get_host_readable_device(self._device), copy=True)
        for group in self._groups:
            dist.broadcast(value, dist.get_global_rank(group, 0), group=group)
        return value.cpu()

    def follow(self, other: "CommonSeeds") -> None:
        """Continue from the state of another object, which is equal in all processes; nothing is sent."""
        state = other.get_state()
        if state is not None:
            self._generator = torch.Generator()
            self._generator.set_state(state)

    def get_state(self) -> Tensor | None:
        """Return the state of the generator; None before the first pass."""
        return None if self._generator is None else self._generator.get_state()

    def set_state(self, state: Tensor | None) -> None:
        """Continue from a saved state; all processes call this together.

        Raises
        ------
        ParallelError
            If processes pass different states.
        """
        self._generator = None
        own = torch.zeros(0, dtype=torch.uint8) if state is None else state.cpu()
        digest = torch.frombuffer(bytearray(hashlib.sha256(own.numpy().tobytes()).digest()), dtype=torch.uint8)
        differs = (self._take_first(digest) != digest).any().int().view(1).to(self._device)
        for group in self._groups:
            dist.all_reduce(differs, op=dist.ReduceOp.MAX, group=group)
        if bool(differs.item()):
            raise ParallelError(
                "the processes of a network were given different random states; load the same checkpoint in all"
            )
        if state is not None:
            self._generator = torch.Generator()
            self._generator.set_state(own)


def mix(seed: int, number: int) -> int:
    """Return another seed for each number.

    Seeds that differ by one would give related streams of the CPU's Mersenne twister; a large odd step does not.
    """
    return (seed + number * 0x9E3779B97F4A7C15) % 2**63


def _draw(generator: torch.Generator) -> int:
    with host_values():
        return int(torch.randint(2**62, (), generator=generator).item())


def _find_generators(devices: Iterable[torch.device]) -> Iterator[torch.Generator]:
    yield torch.default_generator
    gpus = [device for device in devices if device.type == "cuda"]
    if gpus:
        torch.cuda.init()  # without this there are no generators
        current = torch.cuda.current_device()
        for index in sorted({current if device.index is None else device.index for device in gpus}):
            yield torch.cuda.default_generators[index]


def _find_numpy() -> Any:
    """Return NumPy's module of random numbers if it was imported, otherwise None."""
    return sys.modules.get("numpy.random")


def _is_same_numpy(one: Any, other: Any) -> bool:
    return all(bool((a == b).all()) if hasattr(a, "all") else a == b for a, b in zip(one, other, strict=True))
