# mypy: disable-error-code="override, assignment, call-arg"
"""One process of a group, followed by itself: the others are not there, and do as this one does.

The strategies run as they are over a process group of torch's, whose exchanges come back at once. What would travel is
noted. What the others would have sent is what this one sent itself, which is right for votes and descriptions, and for
planes of a volume has the right shape: nobody looks at values here.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from volseg.device.torch_internals import get_group_name
from volseg.errors import ParallelError
from volseg.parallel.devices import computing_on

__all__ = ["Exchange", "LoneGroup", "be_process"]

BACKEND = "volseg_lone"
"""Name under which torch knows groups of this kind."""

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Exchange:
    """Tensors on their way between processes, as this one is asked for them."""

    kind: str
    """``send``, ``receive``, ``all_reduce``, ``all_gather``, ``all_to_all`` or ``broadcast``."""
    shape: tuple[int, ...]
    """Of the tensor that this process gives, or gets where it gives none."""
    dtype: torch.dtype
    device: torch.device
    processes: int
    """That take part."""

    @property
    def num_bytes(self) -> int:
        """Of that tensor."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


Note = Callable[[Exchange], None]


class _Done:
    """The handle of an exchange that is over."""

    def wait(self, timeout: Any = None) -> bool:
        """Return at once."""
        del timeout
        return True

    def is_completed(self) -> bool:
        """Say yes."""
        return True


class LoneGroup(dist.ProcessGroup):
    """A process group whose other processes are not there.

    Parameters
    ----------
    rank
        This process's number in the group.
    size
        Processes in it.
    note
        Is told of every exchange.
    """

    group_name = ""
    """As torch knows it; its own property knows that of groups which C++ made."""

    def __init__(self, rank: int, size: int, note: Note) -> None:
        super().__init__(rank, size)
        self._note, self._place, self._count = note, rank, size

    def size(self) -> int:
        """Return the number of processes."""
        return self._count

    def rank(self) -> int:
        """Return this process's number."""
        return self._place

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        """Name the kind of group."""
        return BACKEND

    def _done(self, kind: str, tensor: Tensor, processes: int | None = None) -> _Done:
        self._note(Exchange(kind, tuple(tensor.shape), tensor.dtype, tensor.device, processes or self._count))
        return _Done()

    def allreduce(self, tensors: Sequence[Tensor], options: Any = None) -> _Done:
        """Leave the value, or multiply it by the number of processes."""
        (tensor,) = tensors
        if _has_values(tensor) and (options is None or options.reduceOp == dist.ReduceOp.SUM):
            tensor.mul_(self._count)
        return self._done("all_reduce", tensor)

    def broadcast(self, tensors: Sequence[Tensor], options: Any = None) -> _Done:
        """Leave the value."""
        del options
        (tensor,) = tensors
        return self._done("broadcast", tensor)

    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], options: Any = None) -> _Done:
        """Give every process's place the own value."""
        del options
        (own,), (places,) = inputs, outputs
        if _has_values(own):
            for place in places:
                place.copy_(own)
        return self._done("all_gather", own)

    def all_gather_single(self, output: Tensor, own: Tensor, options: Any = None) -> _Done:
        """Give every process's place the own value."""
        del options
        if _has_values(own):
            output.view(self._count, -1).copy_(own.reshape(1, -1).expand(self._count, -1))
        return self._done("all_gather", own)

    _allgather_base = all_gather_single
    """Its name before torch 2.13."""

    def all_to_all_single(
        self, output: Tensor, own: Tensor, output_sizes: Any = None, input_sizes: Any = None, options: Any = None
    ) -> _Done:
        """Give every process's place what this one would be sent by itself."""
        del options
        if output_sizes or input_sizes:
            raise ParallelError(f"pieces of one size are exchanged, got {input_sizes} and {output_sizes}")
        if _has_values(own):
            pieces = own.reshape(self._count, -1)
            output.view(self._count, -1).copy_(pieces[self._place].expand(self._count, -1))
        return self._done("all_to_all", own)

    alltoall_base = all_to_all_single
    """Its name before torch 2.13."""

    def send(self, tensors: Sequence[Tensor], target: int, tag: int = 0) -> _Done:
        """Note that something goes."""
        del target, tag
        (tensor,) = tensors
        return self._done("send", tensor, 2)

    def recv(self, tensors: Sequence[Tensor], source: int, tag: int = 0) -> _Done:
        """Receive zeros."""
        del source, tag
        (tensor,) = tensors
        if _has_values(tensor):
            tensor.zero_()
        return self._done("receive", tensor, 2)

    def barrier(self, options: Any = None) -> _Done:
        """Wait for nobody."""
        del options
        return _Done()


def _has_values(tensor: Tensor) -> bool:
    """Say whether a tensor is of the plain kind: what is followed has none."""
    return type(tensor) in (Tensor, torch.nn.Parameter)


@contextmanager
def be_process(rank: int, size: int, note: Note, device: torch.device = CPU) -> Iterator[None]:
    """Be process ``rank`` of ``size`` in here, whatever groups this process is in otherwise.

    Parameters
    ----------
    rank, size
        Of torch's group of all processes.
    note
        Is told of every exchange, of any group that is made in here.
    device
        The device that the process has.
    """
    made: list[LoneGroup] = []

    def make(store: Any, rank: int, size: int, timeout: Any) -> LoneGroup:
        del store, timeout
        made.append(LoneGroup(rank, size, note))
        return made[-1]

    # torch looks the maker up by the name each time that a group is made.
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
