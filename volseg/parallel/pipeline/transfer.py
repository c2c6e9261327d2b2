"""Copy a tensor between devices so that neither device waits for the other, forward and backward.

A plain ``.to()`` between two GPUs waits for *both* devices' current streams: the sender idles until the receiver has
finished its queue. Here a copy runs on its own pair of streams, one pair per ordered pair of devices, and only the
receiver's compute stream waits, and only for that copy::

    source  compute  ──ready──┐                         backward:  Depart waits for the gradient
            out               └─copy─┐
    target  in                       └──arrived──┐
            compute                              └───── the layer that uses it

The gradient takes the same path back. Two autograd nodes are needed: ``_Cross`` runs in the target device's autograd
thread and starts the copy; ``_Depart`` runs in the source device's thread when the source reaches that gradient, and
only there is the wait queued. Waiting in ``_Cross`` would put all waits before all work.

No tensor may change while a side stream copies it: see ``PendingCopies`` and ``wait_for_copies``.
"""

from collections.abc import Iterable
from itertools import permutations
from typing import Any, TypeAlias

import torch
from torch import Tensor

from volseg.device.gpus import current_gpu_stream, get_device_cache, is_gpu, make_stream, note_use, observer, on_stream


class PendingCopies:
    """Gradients that side streams may still be copying: the last one of each compute stream.

    Autograd adds to a gradient in place if it holds the only reference, and it does not know the side streams. This
    object therefore references a gradient until the compute stream waits for the copy.
    """

    def __init__(self) -> None:
        self._last: dict[Any, tuple[Tensor, Any]] = {}

    def hold(self, gradient: Tensor, left: Any) -> None:
        """Hold a gradient whose copy ends with the event ``left``; release the previous gradient."""
        stream = current_gpu_stream(gradient.device)
        if stream in self._last:
            stream.wait_event(self._last[stream][1])
        self._last[stream] = gradient, left


class Passage:
    """Copies of one tensor between two devices; holds their events."""

    __slots__ = ("arrived", "home", "pending", "returned")

    def __init__(self, pending: PendingCopies) -> None:
        self.pending = pending
        self.arrived: torch.cuda.Event | None = None
        self.returned: torch.cuda.Event | None = None
        self.home: torch.device | None = None

    def wait(self, tensor: Tensor) -> Tensor:
        """Make the current stream of the tensor's device wait until the tensor has arrived."""
        if self.arrived is not None:
            stream = current_gpu_stream(tensor.device)
            stream.wait_event(self.arrived)
            note_use(tensor, stream)
        return tensor


Pairs: TypeAlias = dict[tuple[torch.device, torch.device], tuple[torch.cuda.Stream, torch.cuda.Stream]]

_kept: dict[str, Pairs] = {}


def _list_pairs() -> Pairs:
    """Return the side streams by source and target; each trace on a fake GPU has its own."""
    pairs: Pairs = get_device_cache(_kept).setdefault("passages", {})
    return pairs


def _get_streams(source: torch.device, target: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """Return the side streams for copies from ``source`` to ``target``: one on each device."""
    # setdefault: called from forward and from every device's backward thread.
    pairs = _list_pairs()
    return pairs.get((source, target)) or pairs.setdefault((source, target), (make_stream(source), make_stream(target)))


def copy_between(tensor: Tensor, target: torch.device) -> tuple[Tensor, Any]:
    """Copy to ``target`` on side streams; return the copy and the event of its arrival.

    The copy starts when the source's current stream has reached this point. The event is ``None`` for devices without
    streams.
    """
    if not is_gpu(tensor.device) or not is_gpu(target) or tensor.device == target:
        # A real copy even on the same device: stages never share memory, on any devices.
        return (tensor.clone() if tensor.device == target else tensor.to(target, non_blocking=True)), None
    observer().on_sent(tensor.device, "copy", tensor.nbytes)
    leaving, entering = _get_streams(tensor.device, target)
    leaving.wait_stream(current_gpu_stream(tensor.device))
    with on_stream(leaving), on_stream(entering):
        copied = tensor.to(target, non_blocking=True)
        event = entering.record_event()
    note_use(tensor, leaving)
    return copied, event


def wait_for_copies(devices: Iterable[torch.device], targets: Iterable[torch.device]) -> None:
    """Make the current streams of ``devices`` wait for their copies to ``targets``; the sources may change then."""
    waiting, reached = set(devices), set(targets)
    for (source, target), (leaving, _) in list(_list_pairs().items()):
        if source in waiting and target in reached:
            current_gpu_stream(source).wait_stream(leaving)


def list_copy_streams(devices: Iterable[torch.device]) -> list[Any]:
    """Return the side streams between some GPUs, of each pair in both directions."""
    return [stream for pair in permutations(devices, 2) for stream in _get_streams(*pair)]


class _Depart(torch.autograd.Function):
    """Identity; backward waits, on the source, for the gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, passage: Passage) -> Tensor:
        ctx.passage = passage
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        returned = ctx.passage.returned
        if returned is not None:
            stream = current_gpu_stream(gradient.device)
            stream.wait_event(returned)
            note_use(gradient, stream)
        return gradient, None


class _Cross(torch.autograd.Function):
    """Copy to the target; backward copies the gradient to the source."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, target: torch.device, passage: Passage) -> Tensor:
        ctx.passage = passage
        passage.home = tensor.device
        copied, passage.arrived = copy_between(tensor, target)
        return copied

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        passage = ctx.passage
        returned, passage.returned = copy_between(gradient, passage.home)
        if passage.returned is not None:
            passage.pending.hold(gradient, passage.returned)
        return returned, None, None


def send(tensor: Tensor, target: torch.device, pending: PendingCopies | None = None) -> tuple[Tensor, Passage]:
    """Start a differentiable copy to ``target``; call ``passage.wait(copy)`` before using it.

    ``pending`` holds the gradients of all sent tensors of a batch.

    Examples
    --------
    >>> x = torch.ones(3, requires_grad=True)
    >>> copy, passage = send(x * 2, torch.device("cpu"))
    >>> passage.wait(copy).sum().backward()
    >>> x.grad
    tensor([2., 2., 2.])
    """
    passage = Passage(pending or PendingCopies())
    copied = _Cross.apply(_Depart.apply(tensor, passage), target, passage)
    return copied, passage
