"""The random numbers that a forward pass may draw from, noted so that it can be repeated or undone.

torch's default generators of the CPU and of the devices in use, Python's and NumPy's. Generators that a network holds
itself are part of its own state: see ``module``.
"""

import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["RandomState", "own_random_numbers", "seeded"]


class RandomState:
    """Where the generators stand at one moment.

    Parameters
    ----------
    devices
        Whose generators count besides the CPU's; those of devices that are not CUDA's have none of their own.
    foreign
        Whether Python's and NumPy's count as well: to read them takes fifty times as long as to read torch's.
    """

    def __init__(self, devices: Iterable[torch.device], foreign: bool = True) -> None:
        self._devices, self._foreign = tuple(devices), foreign
        self._generators = [(generator, generator.get_state()) for generator in _find_generators(self._devices)]
        self._python = random.getstate() if foreign else None
        self._numpy = _find_numpy().get_state() if foreign and _find_numpy() is not None else None

    def torch_moved(self) -> bool:
        """Say whether torch's generators were drawn from since."""
        return any(not torch.equal(generator.get_state(), state) for generator, state in self._generators)

    def foreign_moved(self) -> bool:
        """Say whether Python's or NumPy's were drawn from since."""
        if self._foreign and random.getstate() != self._python:
            return True
        return self._numpy is not None and not _is_same_numpy(_find_numpy().get_state(), self._numpy)

    def put_back(self) -> None:
        """Let the generators stand where they stood."""
        for generator, state in self._generators:
            generator.set_state(state)
        if self._python is not None:
            random.setstate(self._python)
        if self._numpy is not None:
            _find_numpy().set_state(self._numpy)

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Draw the numbers of then, and go on from today's afterwards."""
        now = RandomState(self._devices, self._foreign)
        self.put_back()
        try:
            yield
        finally:
            now.put_back()


@contextmanager
def own_random_numbers(devices: Iterable[torch.device]) -> Iterator[None]:
    """Draw numbers that do not count: trials, measurements and attempts to record leave the generators as they are."""
    known = RandomState(devices)
    try:
        yield
    finally:
        known.put_back()


@contextmanager
def seeded(seed: int, devices: Iterable[torch.device]) -> Iterator[None]:
    """Draw from a seed, whoever draws, and go on from the caller's numbers afterwards.

    Generator by generator: ``torch.manual_seed`` takes ten times as long.
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


def _find_generators(devices: Iterable[torch.device]) -> Iterator[torch.Generator]:
    yield torch.default_generator
    gpus = [device for device in devices if device.type == "cuda"]
    if gpus:
        torch.cuda.init()  # before, they have no generators
        current = torch.cuda.current_device()
        for index in sorted({current if device.index is None else device.index for device in gpus}):
            yield torch.cuda.default_generators[index]


def _find_numpy() -> Any:
    """Return NumPy's module of random numbers where somebody has imported it."""
    return sys.modules.get("numpy.random")


def _is_same_numpy(one: Any, other: Any) -> bool:
    return all(bool((a == b).all()) if hasattr(a, "all") else a == b for a, b in zip(one, other, strict=True))
