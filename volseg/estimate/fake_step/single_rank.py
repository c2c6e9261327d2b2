# mypy: disable-error-code="override, assignment, call-arg"
# ruff: noqa: ARG001, ARG002  (methods have the parameters of torch's)
"""Trace one rank of a process group without the other ranks, which are assumed to act like this rank.

The strategies run unchanged over a process group of torch, whose exchanges return at once and are recorded. A rank
receives its own data in place of the others'. Votes and descriptions are then right, and planes of a volume have the
right shape; their values are never read.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from volseg.device.torch_internals import get_group_name
from volseg.errors import ParallelError
from volseg.parallel.devices import computing_on

BACKEND = "volseg_lone"
"""Name of this backend in torch."""

CPU = torch.device("cpu")


Note = Callable[[str, Tensor, int], None]
"""Takes an exchange of tensors between processes, seen from this process: its kind (``send``, ``receive``,
``all_reduce``, ``all_gather``, ``all_to_all`` or ``broadcast``), the tensor that this process sends, or receives if it
sends none, and the number of processes that take part."""


class _Done:
    """The handle of a finished exchange."""

    def wait(self, timeout: Any = None) -> bool:
        """Return at once."""
        return True

    def is_completed(self) -> bool:
        """Return True."""
        return True


class LoneGroup(dist.ProcessGroup):
    """A process group with a single real process.

    Parameters
    ----------
    rank
        Rank of this process in the group.
    size
        Number of processes in the group.
    note
        Called with every exchange.
    """

    group_name = ""
    """Name of the group in torch; torch's own property works only for groups made in C++."""

    def __init__(self, rank: int, size: int, note: Note) -> None:
        super().__init__(rank, size)
        self._note, self._place, self._count = note, rank, size

    def size(self) -> int:
        """Return the number of processes."""
        return self._count

    def rank(self) -> int:
        """Return the rank of this process."""
        return self._place

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        """Return the name of the backend."""
        return BACKEND

    def _done(self, kind: str, tensor: Tensor, processes: int | None = None) -> _Done:
        self._note(kind, tensor, processes or self._count)
        return _Done()

    def allreduce(self, tensors: Sequence[Tensor], options: Any = None) -> _Done:
        """Multiply a sum by the number of processes; leave other reductions unchanged."""
        (tensor,) = tensors
        if _has_values(tensor) and (options is None or options.reduceOp == dist.ReduceOp.SUM):
            tensor.mul_(self._count)
        return self._done("all_reduce", tensor)

    def broadcast(self, tensors: Sequence[Tensor], options: Any = None) -> _Done:
        """Leave the value unchanged."""
        (tensor,) = tensors
        return self._done("broadcast", tensor)

    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], options: Any = None) -> _Done:
        """Copy this process's value to the output of every process."""
        (own,), (places,) = inputs, outputs
        if _has_values(own):
            for place in places:
                place.copy_(own)
        return self._done("all_gather", own)

    def all_gather_single(self, output: Tensor, own: Tensor, options: Any = None) -> _Done:
        """Copy this process's value to the part of every process in the output."""
        if _has_values(own):
            output.view(self._count, -1).copy_(own.reshape(1, -1).expand(self._count, -1))
        return self._done("all_gather", own)

    _allgather_base = all_gather_single
    """Its name before torch 2.13."""

    def all_to_all_single(
        self, output: Tensor, own: Tensor, output_sizes: Any = None, input_sizes: Any = None, options: Any = None
    ) -> _Done:
        """Copy the piece that this process sends to itself to the part of every process in the output."""
        if output_sizes or input_sizes:
            raise ParallelError(f"pieces of one size are exchanged, got {input_sizes} and {output_sizes}")
        if _has_values(own):
            pieces = own.reshape(self._count, -1)
            output.view(self._count, -1).copy_(pieces[self._place].expand(self._count, -1))
        return self._done("all_to_all", own)

    alltoall_base = all_to_all_single
    """Its name before torch 2.13."""

    def send(self, tensors: Sequence[Tensor], target: int, tag: int = 0) -> _Done:
        """Record a sent tensor."""
        (tensor,) = tensors
        return self._done("send", tensor, 2)

    def recv(self, tensors: Sequence[Tensor], source: int, tag: int = 0) -> _Done:
        """Receive zeros."""
        (tensor,) = tensors
        if _has_values(tensor):
            tensor.zero_()
        return self._done("receive", tensor, 2)

    def barrier(self, options: Any = None) -> _Done:
        """Return at once."""
        return _Done()


def _has_values(tensor: Tensor) -> bool:
    """Return whether a tensor has values, unlike fake tensors."""
    return type(tensor) in (Tensor, torch.nn.Parameter)


@contextmanager
def be_process(rank: int, size: int, note: Note, device: torch.device = CPU) -> Iterator[None]:
    """Act as process ``rank`` of ``size`` in the body, independently of this process's real groups.

    Parameters
    ----------
    rank, size
        Rank and size in torch's group of all processes.
    note
        Called with every exchange, of any group that the body makes.
    device
        The device of the process.
    """
    made: list[LoneGroup] = []

    def make(store: Any, rank: int, size: int, timeout: Any) -> LoneGroup:
        made.append(LoneGroup(rank, size, note))
        return made[-1]

    # torch looks up the factory by name each time a group is made.
    dist.Backend.register_backend(BACKEND, make, devices=["cpu", "cuda"])
    before, dist.group.WORLD = dist.group.WORLD, None
    told = sys.excepthook  # torch wraps it for each group of all processes, to name the rank
    try:
        dist.init_process_group(BACKEND, store=dist.HashStore(), rank=rank, world_size=size)  # type: ignore[attr-defined]
        with computing_on(device):
            yield
    finally:
        dist.group.WORLD, sys.excepthook = before, told
        for group in made:
            group.group_name = get_group_name(group)
            dist.destroy_process_group(group)
