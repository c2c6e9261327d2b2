"""Run a batch by replaying its graphs: a few hundred calls of the driver instead of tens of thousands.

One autograd node represents the whole network. Its forward copies the batch into the recorded inputs, then replays the
micro-batches one after another, each stage's graph as soon as its tensors have arrived; backward goes the other way.
The memory of a recording holds one batch: ``Replay.is_free`` tells whether a backward still needs it.
"""

import contextlib
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from volseg.device.first_order import first_order
from volseg.device.streams import find_current_stream
from volseg.device.torch_internals import (
    add_each,
    add_each_,
    multiply_each,
    pytree,
    zero_each_,
)
from volseg.errors import ParallelError
from volseg.parallel.pipeline.flow.transfer import copy_into, wait_for_departures
from volseg.parallel.pipeline.micro_batch import Call
from volseg.parallel.pipeline.record.parts import Edge, Output, Part, RecordedBatch
from volseg.parallel.timeline import Pass, find_timeline

__all__ = ["Replay"]

Events = dict[torch.device, "torch.cuda.Event | None"]


class _Ticket:
    """Held by the autograd node of one forward: while it exists unused, its activations are needed."""

    is_used = False


class Replay:
    """A recording that can be run.

    Parameters
    ----------
    recorded
        From ``record_batch``.
    sizes
        Samples of each micro-batch.
    target
        Device of the outputs.
    is_batch
        Which tensors of the call were cut.
    """

    def __init__(
        self, recorded: RecordedBatch, sizes: Sequence[int], target: torch.device, is_batch: Sequence[bool]
    ) -> None:
        self.recorded, self.sizes, self.target = recorded, list(sizes), target
        self._is_batch = list(is_batch)
        self._ticket: weakref.ref[_Ticket] | None = None
        self._copied = [loan for loan in recorded.loans.values() if loan.is_copy]
        self._leaves: dict[Tensor, list[int]] = {}
        for loan in recorded.loans.values():
            if id(loan.leaf) in recorded.gradients:
                self._leaves.setdefault(loan.state, []).append(id(loan.leaf))
        self.parameters = list(self._leaves)
        places = {part.location.device for slot in recorded.slots for part in slot.parts}
        self.devices = places | {target} | {tensor.device for tensor in recorded.slots[0].inputs}

    @property
    def lanes(self) -> int:
        """Number of streams per device among which the micro-batches alternate."""
        return self.recorded.lanes.count

    @property
    def is_free(self) -> bool:
        """Whether no forward waits for its backward."""
        ticket = None if self._ticket is None else self._ticket()
        return ticket is None or ticket.is_used

    def __call__(self, call: Call) -> Any:
        """Run one batch; return the joined outputs."""
        tensors = [leaf for leaf in pytree.tree_leaves(call) if isinstance(leaf, Tensor)]
        outputs = iter(_Replayed.apply(self, len(tensors), *tensors, *self.parameters))
        slot = self.recorded.slots[0]
        leaves = [next(outputs) if isinstance(leaf, Output) else leaf for leaf in slot.leaves]
        return pytree.tree_unflatten(leaves, slot.structure)

    def release(self) -> None:
        """Drop the recording: its memory is freed once no forward waits for its backward, which holds the memory."""

    def take_ticket(self) -> _Ticket:
        """Mark the activations as needed while the returned object exists."""
        ticket = _Ticket()
        self._ticket = weakref.ref(ticket)
        return ticket

    def forward(self, tensors: Sequence[Tensor], commits: bool = True) -> tuple[Tensor, ...]:
        """Replay every forward graph; return new tensors, and update running statistics if it ``commits``."""
        recorded = self.recorded
        # Allocated on the caller's stream, where they will be freed.
        rooms = [
            torch.empty(sum(self.sizes), *output.source.shape[1:], dtype=output.source.dtype, device=self.target)
            for output in recorded.slots[0].outputs
        ]
        with self._work_on_own_streams() as free:
            arrivals = []
            recorded.statistics.blank()
            for loan in self._copied:
                _copy(loan.state.detach(), loan.leaf, free)
            # All at once: a copy starts after the earlier work of its device, and must not wait for a micro-batch.
            for index, slot in enumerate(recorded.slots):
                for tensor, static, is_cut in zip(tensors, slot.inputs, self._is_batch, strict=True):
                    _copy(self._cut_piece(tensor, index) if is_cut else tensor, static, free)
            recorded.lanes.fan_out(self.devices)
            for index, slot in enumerate(recorded.slots):
                recorded.lanes.turn_to(slot.lane, self.devices)
                for part in slot.parts:
                    for edge in part.edges:
                        _copy(edge.source, edge.target, free)
                    with _noted(part, "forward", index):
                        part.forward.replay()
                for output, room in zip(slot.outputs, rooms, strict=True):
                    arrivals.append((copy_into(output.source, self._cut_piece(room, index), free[self.target]), room))
            # Only now: an earlier wait would keep the target from its next micro-batch.
            for event, room in arrivals:
                _wait(event, room)
        # On the caller's streams, which wait for every lane.
        if commits:
            recorded.statistics.commit()
        return tuple(rooms)

    def backward(self, gradients: Sequence[Tensor | None], num_inputs: int) -> list[Tensor | None]:
        """Replay every backward graph; return the gradients of the inputs, then of the parameters."""
        recorded = self.recorded
        with self._work_on_own_streams() as free:
            for totals in _group_by_device(recorded.gradients.values()):
                zero_each_(totals)
            # All at once, in the order of use: a copy queued after a micro-batch's backward on the loss's device would
            # start only then, and the stages would alternate.
            landings = [self._land(gradients, index, free) for index in reversed(range(len(recorded.slots)))]
            recorded.lanes.fan_out(self.devices)
            numbered = reversed(list(enumerate(recorded.slots)))
            for (index, slot), landed in zip(numbered, landings, strict=True):
                recorded.lanes.turn_to(slot.lane, self.devices)
                for event, landing in landed:
                    _wait(event, landing)
                for part in reversed(slot.parts):
                    if part.backward is not None:
                        for edge in part.sends:
                            _return(edge, free)
                        with _noted(part, "backward", index):
                            part.backward.replay()
                    for edge in part.edges:
                        if edge.input is not None and edge.returned is not None:
                            _return(edge, free)
        reached = {
            key
            for slot in recorded.slots
            for output, gradient in zip(slot.outputs, gradients, strict=True)
            if gradient is not None
            for key in output.reaches
        }
        return [*(self._join_input_gradient(number) for number in range(num_inputs)), *self._sum_own_gradients(reached)]

    def _land(
        self, gradients: Sequence[Tensor | None], index: int, free: Events
    ) -> list[tuple["torch.cuda.Event | None", Tensor]]:
        """Start the copies of the outputs' gradients to micro-batch ``index``; return the events to wait for."""
        landed: list[tuple[torch.cuda.Event | None, Tensor]] = []
        for output, gradient in zip(self.recorded.slots[index].outputs, gradients, strict=True):
            landing = output.landing
            if landing is not None and gradient is None:
                landing.zero_()
            elif landing is not None and gradient is not None:
                landed.append((copy_into(self._cut_piece(gradient, index), landing, free[landing.device]), landing))
        return landed

    def _sum_own_gradients(self, reached: set[int]) -> list[Tensor | None]:
        """Return each parameter's gradient, ``None`` where none arrives, as from autograd.

        Gradients are summed over the stages and lanes that use the parameter, and copied: the next batch overwrites the
        recording's own.
        """
        found = [
            [self.recorded.gradients[key].to(parameter.device) for key in keys if key in reached]
            for parameter, keys in self._leaves.items()
        ]
        own: list[Tensor | None] = [None] * len(found)
        # Many at a time: a kernel for each would take longer to queue than to run.
        groups: dict[tuple[torch.device, torch.dtype, int], list[int]] = defaultdict(list)
        for number, sums in enumerate(found):
            if sums:
                groups[sums[0].device, sums[0].dtype, len(sums)].append(number)
        for numbers in groups.values():
            first, *others = zip(*(found[number] for number in numbers), strict=True)
            totals = add_each(first, others[0]) if others else multiply_each(first, 1)
            for more in others[1:]:
                add_each_(totals, more)
            for number, total in zip(numbers, totals, strict=True):
                own[number] = total
        return own

    def _join_input_gradient(self, number: int) -> Tensor | None:
        """Join the gradients of one tensor of the call; sum them if every micro-batch got the whole tensor."""
        parts = []
        for slot in self.recorded.slots:
            landed = [
                edge.landing
                for part in slot.parts
                for edge in part.edges
                if edge.input == number and edge.returned is not None and edge.landing is not None
            ]
            if slot.inputs[number].requires_grad:
                parts.append(sum(landed[1:], landed[0]) if landed else torch.zeros_like(slot.inputs[number]))
        if not parts:
            return None
        return torch.cat(parts) if self._is_batch[number] else torch.stack(parts).sum(0)

    def _cut_piece(self, tensor: Tensor, index: int) -> Tensor:
        """Return micro-batch ``index``'s part of a whole batch."""
        return tensor.narrow(0, index * self.sizes[0], self.sizes[index])

    @contextlib.contextmanager
    def _work_on_own_streams(self) -> Iterator[Events]:
        """Work on the lanes' streams, after the caller's earlier work and before its later work."""
        free: Events = dict.fromkeys(self.devices)
        with torch.no_grad(), self.recorded.lanes.on_streams(self.devices) as streams:
            wait_for_departures(streams)
            free.update({device: stream.record_event() for device, stream in streams.items()})
            yield free
            # The caller may free its arguments.
            self.recorded.lanes.turn_to(0, streams)
            wait_for_departures(streams)


def _group_by_device(tensors: Iterable[Tensor]) -> Iterable[list[Tensor]]:
    found: dict[torch.device, list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        found[tensor.device].append(tensor)
    return found.values()


@contextlib.contextmanager
def _noted(part: Part, what: Pass, micro_batch: int) -> Iterator[None]:
    """Record when a stage works on a micro-batch, on an active timeline."""
    timeline, place = find_timeline(), part.location
    if timeline is not None:
        timeline.mark(place.stage, place.device, what, micro_batch, is_end=False)
    yield
    if timeline is not None:
        timeline.mark(place.stage, place.device, what, micro_batch, is_end=True)


def _wait(event: "torch.cuda.Event | None", tensor: Tensor) -> None:
    if event is not None:
        find_current_stream(tensor.device).wait_event(event)


def _copy(tensor: Tensor, room: Tensor, free: Events) -> None:
    """Copy, and make the receiver wait for the arrival."""
    _wait(copy_into(tensor, room.detach(), free[room.device]), room)


def _return(edge: Edge, free: Events) -> None:
    """Copy an edge's gradient back."""
    assert edge.returned is not None
    assert edge.landing is not None
    _copy(edge.returned, edge.landing, free)


class _Replayed(torch.autograd.Function):
    """The whole network as one node."""

    @staticmethod
    def forward(ctx: Any, replay: Replay, num_inputs: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.replay, ctx.num_inputs = replay, num_inputs
        ctx.ticket = replay.take_ticket() if any(ctx.needs_input_grad) else None
        ctx.set_materialize_grads(False)
        outputs = replay.forward(tensors[:num_inputs])
        first = replay.recorded.slots[0].outputs
        fixed = [output for output, kept in zip(outputs, first, strict=True) if kept.landing is None]
        ctx.mark_non_differentiable(*fixed)
        return outputs

    @staticmethod
    @first_order
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        if ctx.ticket.is_used:
            raise ParallelError(
                "backward through a recorded pipeline ran a second time, and its activations are gone; for "
                "retain_graph=True use ModelParallel(..., record=False)"
            )
        ctx.ticket.is_used = True
        return None, None, *ctx.replay.backward(gradients, ctx.num_inputs)
