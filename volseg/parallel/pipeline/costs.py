"""Measure the cost of each part of a network by running it.

A copy of the network runs on one device, part by part. Each part's inputs are detached from autograd; its forward is
timed, then its backward, and its activations are freed before the next part starts. So the measurement needs only the
memory of the largest part, and works for a network that one device could not train.
"""

import contextlib
import copy
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from volseg.device.fake_gpu import copying_by_clones
from volseg.device.gpus import has_values, is_gpu, move_in_place, observer
from volseg.device.torch_internals import keep_gpu_busy, pytree, without_overrides
from volseg.errors import PartitionError, VolsegError
from volseg.parallel.pipeline import run as runs
from volseg.parallel.pipeline.balance import KeptActivation
from volseg.parallel.pipeline.micro_batch import Call, copy_call
from volseg.parallel.pipeline.observer import DIFFERENTIATE, Observer
from volseg.parallel.pipeline.partition import LayerCost
from volseg.parallel.pipeline.trace import Segment, Trace, list_segments
from volseg.parallel.state.random import own_random_numbers

REPEATS = 2
"""Timed passes on a GPU after one warm-up; the fastest counts. On a host the first pass counts: observing the network
has warmed it up, and three passes would take longer than the batch."""

# Long enough for the host to queue a part before the device starts it, otherwise the host would be timed.
SLEEP_CYCLES = 2_000_000


@dataclass(frozen=True, slots=True)
class Measured:
    """A network's trace, and the costs of its segments for one micro-batch."""

    trace: Trace
    layers: tuple[LayerCost, ...]
    activations: tuple[KeptActivation, ...]


def observe_copy(
    net: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device
) -> tuple[nn.Module, Trace, Observer]:
    """Copy the network to ``device``, watch the copy, and record one forward of it.

    The first attempt runs without the user's hooks and saved tensors, the second with both: a hook may change shapes,
    and a network may differentiate inside.
    """
    first: Exception | None = None
    for as_user in (False, True):
        probe = copy_network(net, device, with_hooks=as_user)
        own_args, own_kwargs = move_call((args, kwargs), device)
        try:
            observer = Observer(probe)
            counting = torch.autograd.graph.saved_tensors_hooks(observer.count, lambda dropped: dropped)
            with torch.enable_grad(), contextlib.nullcontext() if as_user else counting, observer:
                # Arguments that forward changes in place exist from the start.
                observer.note_arguments((own_args, own_kwargs))
                output = probe(*own_args, **own_kwargs)
            return probe, observer.make_trace(output), observer
        except Exception as failure:  # the first attempt has the network's own error
            first = first or failure
    assert first is not None
    raise first


def move_call(call: Call, device: torch.device) -> Call:
    """Copy the tensors of a call to ``device``."""

    def bring(tensor: Tensor) -> Tensor:
        if tensor.device == device:
            return tensor
        return tensor.detach().to(device).requires_grad_(tensor.requires_grad)

    return pytree.tree_map_only(Tensor, bring, copy_call(call))


def copy_network(net: nn.Module, device: torch.device, with_hooks: bool) -> nn.Module:
    """Copy the network to ``device``, with the user's hooks or without.

    Raises
    ------
    PartitionError
        If copying fails.
    """
    try:
        with copying_by_clones():
            probe = copy.deepcopy(net)
    except Exception as failure:
        raise PartitionError(
            f"the pipeline measures a copy of the network, and copy.deepcopy of {type(net).__name__} failed: {failure}."
            " Make it copyable (tensors kept as attributes belong in buffers)"
        ) from failure
    if not with_hooks:
        runs.remove_hooks(probe)
    for state in (*probe.parameters(), *probe.buffers()):
        move_in_place(state, device)
        state.grad = None
    runs.install_hooks(probe)
    return probe


def measure(net: nn.Module, call: Call, device: torch.device, is_timed: bool = True) -> Measured:
    """Observe a copy of the network on one device, and time every segment.

    Parameters
    ----------
    net
        The network, which is not changed.
    call
        A micro-batch.
    device
        Device of the measurement.
    is_timed
        Whether segments are timed; otherwise their times are zero.

    Raises
    ------
    PartitionError
        If the network cannot be copied.
    """
    current = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    with current, own_random_numbers([device]):
        probe, trace, observer = observe_copy(net, *call, device)
        found = list_segments(trace)
        passes = []
        for _ in range((1 + REPEATS if is_gpu(device) else 1) if is_timed else 0):
            args, kwargs = move_call(call, device)
            with torch.enable_grad(), Stopwatch(probe, found, device) as watch:
                probe(*args, **kwargs)
                watch.finish()
            passes.append(watch.times)
    passes = passes[1:] or passes or [np.zeros((len(found), 2))]
    times = np.fmin.reduce(np.stack(passes))  # NaN for segments that no timed pass ran: the path varies
    np.copyto(times, np.nanmean(times, 0), where=np.isnan(times))
    activations, layers = list_layers(net, observer, found, times.tolist())
    return Measured(trace, tuple(layers), tuple(activations))


def list_layers(
    net: nn.Module, observer: Observer, parts: Sequence[Segment], times: Sequence[Sequence[float]]
) -> tuple[list[KeptActivation], list[LayerCost]]:
    """Return the memory that outlives an operation, with the segments that use it, and the cost of each segment.

    ``times`` are the forward and backward milliseconds of each segment.
    """
    segment_of = {operation: number for number, part in enumerate(parts) for operation in part.operations}

    def name_segments(operations: set[int]) -> tuple[int, ...]:
        # The caller's number is one more than the last operation's or segment's.
        return tuple(sorted({segment_of.get(operation, len(parts)) for operation in operations}))

    found = [
        KeptActivation(
            block.num_bytes, name_segments({block.made})[0], name_segments(block.read), name_segments(block.kept)
        )
        for block in observer.blocks
    ]
    activations = [block for block in found if block.kept or set(block.read) - {block.made}]
    sizes = {name: p.nbytes for name, p in net.named_parameters(remove_duplicate=False)}
    layers = [
        LayerCost(
            modules=tuple(call.path or type(net).__name__ for call in part.calls),
            forward_ms=forward,
            backward_ms=backward,
            parameter_bytes=sum(sizes.get(name, 0) for name in part.states),
            sent_bytes=sum(observer.made_bytes[operation] for operation in part.sends),
        )
        for part, (forward, backward) in zip(parts, times, strict=True)
    ]
    return activations, layers


class Stopwatch(runs.Run):
    """Time each segment's forward and backward separately, from its creation on."""

    def __init__(self, net: nn.Module, parts: Sequence[Segment], device: torch.device) -> None:
        super().__init__()
        paths = dict(net.named_modules())
        self._begins = {(paths[part.calls[0].path], part.calls[0].index): n for n, part in enumerate(parts)}
        self._sends = {number for part in parts for number in part.sends}
        self._parameters = list(net.parameters())
        self._start_clock = _start_device_clock if device.type == "cuda" else partial(_start_clock, time.perf_counter)
        if not has_values(device):
            self._start_clock = partial(_start_clock, partial(observer().read_clock, device))
        self._calls: dict[nn.Module, int] = defaultdict(int)
        self._number = 0
        self._segment = 0
        self._paused = False
        self.times = np.full((len(parts), 2), np.nan)
        """Forward and backward milliseconds of each segment; NaN for those that this pass did not run."""
        self._begin()

    def _begin(self) -> None:
        self._part, self._sent = object(), list[Tensor]()
        self._stop = self._start_clock()

    def finish(self) -> None:
        """End the current segment: stop the clock, then time its backward."""
        forward = self._stop()
        sent = [tensor for tensor in self._sent if tensor.requires_grad and tensor.grad_fn is not None]
        # Recomputation inside belongs to backward: it is neither counted nor cut.
        self._paused = True
        try:
            backward = self._backward(sent) if sent else 0.0
        except RuntimeError as failure:
            # Every result is differentiated here, even if the network does not need its gradient: its saved tensors
            # may have been overwritten, or a derivative may be missing. A reentrant checkpoint passes its gradient
            # beyond the cut, to a finished segment. If the gradient is needed, the training raises the error again.
            # The time is estimated as a second forward, and twice that for the gradients.
            if isinstance(failure, torch.OutOfMemoryError | VolsegError):
                raise
            backward = 3 * forward
        self._paused = False
        for parameter in self._parameters:
            parameter.grad = None
        # Autocast takes a detached tensor for a weight and would keep its cast copy, with the activation and its
        # gradient, until the end of the batch: memory of the whole network instead of the largest part.
        torch.clear_autocast_cache()
        row = self.times[self._segment]  # a path may return to a segment
        row[:] = np.nansum((row, (forward, backward)), 0)

    def _backward(self, sent: list[Tensor]) -> float:
        gradients = [torch.ones_like(tensor) for tensor in sent]
        stop = self._start_clock()
        with without_overrides():
            torch.autograd.backward(sent, gradients)
        return stop()

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> runs.Arguments | None:
        """Start the next segment at its first call; detach the call's arguments."""
        if self._paused:
            return None
        index = self._calls[module]
        self._calls[module] += 1
        number = self._begins.get((module, index))
        if number is None:
            return None
        if number != self._segment:
            self.finish()
            self._begin()
            self._segment = number
        # Functions called here are not part of forward: they must be neither counted nor marked.
        with without_overrides():
            return runs.map_tensors(self._cut_off, args), runs.map_tensors(self._cut_off, kwargs)

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._paused or (runs.keeps_place(function) and function not in DIFFERENTIATE):
            return function(*args, **kwargs)
        args, kwargs = runs.map_tensors(self._cut_off, args), runs.map_tensors(self._cut_off, kwargs)
        result = function(*args, **kwargs)
        tensors = list(runs.iterate_tensors(result))
        for tensor in tensors:
            tensor._volseg_part = self._part  # type: ignore[attr-defined]
        if self._number in self._sends:
            self._sent += tensors
        self._number += 1
        return result

    def _cut_off(self, tensor: Tensor) -> Tensor:
        """Return a leaf in place of a tensor that an earlier segment made."""
        made = getattr(tensor, "_volseg_part", self._part)
        if made is self._part:
            return tensor
        known = getattr(tensor, "_volseg_leaf", None)
        if known is None or known[0] is not self._part:
            leaf = tensor.detach().requires_grad_(tensor.requires_grad)
            known = tensor._volseg_leaf = (self._part, leaf)  # type: ignore[attr-defined]
        return known[1]


def _start_clock(read: Callable[[], float]) -> Callable[[], float]:
    start = read()
    return lambda: (read() - start) * 1e3


def _start_device_clock() -> Callable[[], float]:
    """Time the device's own work: the host runs ahead while the device sleeps."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    keep_gpu_busy(SLEEP_CYCLES)
    begin.record()

    def stop() -> float:
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)

    return stop
