"""Run one micro-batch while recording its parts, and before that to allocate the memory into which they receive."""

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from volseg.device.torch_internals import (
    TorchDispatchMode,
    find_saved_tensors_hooks,
    find_transform,
    get_version,
)
from volseg.errors import ParallelError
from volseg.parallel.pipeline.flow.placement import Location, PlacedRun, Placement
from volseg.parallel.pipeline.flow.statistics import RunningStatistics
from volseg.parallel.pipeline.observe import run as runs
from volseg.parallel.pipeline.observe.observer import DIFFERENTIATE
from volseg.parallel.pipeline.record.graphs import Lanes, StageGraph, Unrecorded
from volseg.parallel.pipeline.record.parts import Edge, Loan, Loans, Part

__all__ = ["RecordRefusedError", "RecordingRun", "Survey"]

VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class RecordRefusedError(ParallelError):
    """A forward does something that a recording would not repeat."""


class RecordingRun(PlacedRun):
    """Run one micro-batch while recording it.

    Parameters
    ----------
    placement, statistics
        As for any placed run.
    lanes, lane
        Maker of the graphs, and this micro-batch's lane.
    loans
        Stand-ins for parameters and buffers, shared by the micro-batches.
    rooms
        Memory for received tensors, in the order of receiving.
    """

    skips_quiet = False

    def __init__(
        self,
        placement: Placement,
        statistics: RunningStatistics,
        lanes: Lanes,
        lane: int,
        loans: Loans,
        rooms: "deque[Tensor] | None" = None,
    ) -> None:
        super().__init__(placement, statistics)
        self._lanes, self.lane, self._loans = lanes, lane, loans
        self.rooms: deque[Tensor] = deque() if rooms is None else rooms
        self.parts: list[Part] = []

    def __enter__(self) -> "RecordingRun":
        super().__enter__()
        self._begin(self.here)
        return self

    def __exit__(self, *failure: Any) -> None:
        try:
            self.parts[-1].forward.end()
        finally:
            super().__exit__(*failure)

    def turn_to(self, location: Location) -> None:
        """End the current part and start the next."""
        if location.stage != self.here.stage:
            self.parts[-1].forward.end()
            super().turn_to(location)
            self._begin(location)

    def _begin(self, location: Location) -> None:
        # A separate location for each part: its tensors belong to no other part.
        self.here = Location(location.stage, location.device)
        self.parts.append(Part(self.here, self.make_graph(location.device)))
        self.parts[-1].forward.begin()

    def make_graph(self, device: torch.device) -> StageGraph:
        """Return a graph for the next part."""
        return self._lanes.make_graph(device, self.lane)

    def make_room(self, tensor: Tensor) -> Tensor:
        """Return memory on the current stage for a copy of ``tensor``, which a replay makes."""
        room = self.rooms.popleft().detach() if self.rooms else None
        if room is None or (room.shape, room.dtype, room.device) != (tensor.shape, tensor.dtype, self.here.device):
            raise RecordRefusedError("forward does not do the same when it is run again")
        return room

    def is_here(self, tensor: Tensor) -> bool:
        """Return whether this part made ``tensor``, or its stage owns it."""
        at = getattr(tensor, "_volseg_location", None)
        if at is not None:
            return at is self.here
        owner = self.placement.owners.get(id(tensor))
        if owner is None:
            return super().is_here(tensor)
        return owner.stage == self.here.stage and not (tensor.requires_grad and torch.is_grad_enabled())

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        states = [
            (tensor, get_version(tensor))
            for tensor in runs.find_tensors((args, kwargs or {}))
            if id(tensor) in self.placement.owners
        ]
        if function in DIFFERENTIATE or find_transform() is not None:
            raise RecordRefusedError("forward differentiates or maps functions (torch.autograd, torch.func)")
        if find_saved_tensors_hooks(False) is not None:
            raise RecordRefusedError("forward recomputes or offloads activations (hooks for saved tensors)")
        result = super().__torch_function__(function, types, args, kwargs)
        if runs.find_changes(states):
            raise RecordRefusedError(
                f"{getattr(function, '__name__', function)} changes a parameter or buffer in forward"
            )
        return result

    def receive(self, tensor: Tensor) -> Tensor:
        """Allocate memory for ``tensor`` here; a replay fills it."""
        part = self.parts[-1]
        wants_grad = tensor.requires_grad and torch.is_grad_enabled()
        if id(tensor) in self.placement.owners:
            return self._borrow(tensor, part, wants_grad)
        room = self.make_room(tensor)
        number = getattr(tensor, "_volseg_input", None)
        part.edges.append(Edge(tensor, room.requires_grad_(wants_grad), input=number))
        return room

    def _borrow(self, state: Tensor, part: Part, wants_grad: bool) -> Tensor:
        # Each lane has its own: a gradient accumulator belongs to one stream.
        key = (id(state), self.here.stage, self.lane, wants_grad)
        if key not in self._loans:
            is_copy = self.placement.owners[id(state)].stage != self.here.stage
            leaf = self.make_room(state) if is_copy else state.detach()
            self._loans[key] = Loan(state, leaf.requires_grad_(wants_grad), is_copy)
        leaf = self._loans[key].leaf
        if wants_grad:
            part.leaves[id(leaf)] = leaf
        return leaf


class _NoValues(TorchDispatchMode):
    """Refuse functions whose result Python reads, or whose shape depends on values: a replay runs no Python."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        by_mask = function is torch.ops.aten.index.Tensor and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        # Indexing has this tag because of masks.
        tags = set(function.tags) & VALUES if function is not torch.ops.aten.index.Tensor else set()
        if by_mask or tags:
            raise RecordRefusedError(f"forward reads values of a tensor ({function}), which a replay would not")
        return function(*args, **(kwargs or {}))


class Survey(RecordingRun):
    """Run one micro-batch unrecorded and allocate the memory into which its recording will receive.

    Libraries also initialise themselves here for the streams of the recording.
    """

    def __enter__(self) -> "Survey":
        self._values = _NoValues()
        self._values.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *failure: Any) -> None:
        super().__exit__(*failure)
        self._values.__exit__(*failure)

    def make_graph(self, device: torch.device) -> StageGraph:  # noqa: ARG002
        """Record nothing."""
        return Unrecorded()

    def make_room(self, tensor: Tensor) -> Tensor:
        """Copy at once; keep the memory."""
        with torch.no_grad():
            self.rooms.append(tensor.detach().to(self.here.device, copy=True))
        return self.rooms[-1].detach()
