"""Capture a batch as CUDA graphs, one per micro-batch and stage, forward and backward.

The module's own ``forward`` runs once per micro-batch under ``RecordingRun``, which ends a graph and starts
the next when ``forward`` switches to another stage. Tensors do not cross: a tensor of another stage is *received* into
separate memory, a leaf of autograd, so that each stage's backward is separate as well::

    F[stage][micro-batch]    for each micro-batch, then for each stage
    B[stage][micro-batch]    both the other way round

Between graphs, ``replay`` copies along the ``Edge``s. Python does not run again: ``choice`` decides when
that is safe.

Memory that a copy fills before a graph runs must not come from the graph: the allocator would reuse a block that an
earlier layer of the same graph has freed, and each replay would overwrite the copy. So every micro-batch runs once
unrecorded, in a ``Survey``, which allocates the memory; recording takes the memory in the same order.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from volseg.device.gpus import release_cache
from volseg.device.graph import undisturbed, without_cached_casts
from volseg.device.module_internals import NormBase
from volseg.device.torch_internals import add_each_, pytree
from volseg.parallel.pipeline.flow.placement import Location, Placement
from volseg.parallel.pipeline.micro_batch import Call
from volseg.parallel.pipeline.record.graphs import Lanes
from volseg.parallel.pipeline.record.parts import CountedStatistics, Edge, Loans, Output, Part, RecordedBatch, Slot
from volseg.parallel.pipeline.record.passage import RecordingRun, RecordRefusedError, Survey

__all__ = ["record_batch"]


INPUT = Location(-1, torch.device("cpu"))
"""Where the micro-batch's own tensors come from."""


def record_batch(net: nn.Module, placement: Placement, calls: Sequence[Call], lanes: int = 1) -> RecordedBatch:
    """Record ``net`` for micro-batches of these shapes; the tensors' values do not matter.

    Micro-batches alternate among ``lanes`` streams of each device.

    Raises
    ------
    RecordRefusedError
        If a recording would not repeat what ``forward`` does.
    """
    for path, module in net.named_modules():
        if isinstance(module, NormBase) and module.momentum is None and module.training:
            raise RecordRefusedError(f"{path} computes its momentum from the number of batches so far")
    recorded = RecordedBatch([], Lanes(lanes), CountedStatistics(len(calls)), {}, {})
    inputs = [_Inputs(call) for call in calls]
    with recorded.lanes.on_streams(placement.devices):
        with without_cached_casts():
            rooms = _survey(net, placement, inputs, recorded)
        with undisturbed():
            _record(net, placement, inputs, rooms, recorded)
    return recorded


def _survey(
    net: nn.Module, placement: Placement, inputs: "Sequence[_Inputs]", recorded: RecordedBatch
) -> list["deque[Tensor]"]:
    """Return the memory into which each micro-batch receives; allocate the statistics, which the lanes share."""
    rooms: list[deque[Tensor]] = []
    loans: Loans = {}
    lanes, devices = recorded.lanes, placement.devices
    lanes.fan_out(devices)
    with torch.random.fork_rng(devices=[device for device in devices if device.type == "cuda"]):
        for index, given in enumerate(inputs):
            lane = index % lanes.count
            lanes.turn_to(lane, devices)
            recorded.statistics.begin(index)
            run = Survey(placement, recorded.statistics, lanes, lane, loans)
            with run:
                net(*given.args, **given.kwargs)
            rooms.append(run.rooms)
    del run
    lanes.turn_to(0, devices)
    recorded.statistics.forget()
    # The recording has its own memory, and needs what the survey has cached.
    release_cache(devices)
    return rooms


def _record(
    net: nn.Module,
    placement: Placement,
    inputs: "Sequence[_Inputs]",
    rooms: Sequence["deque[Tensor]"],
    recorded: RecordedBatch,
) -> None:
    """Fill ``recorded``: every micro-batch forward, then every one backward.

    Parameters
    ----------
    net, placement
        The network on its stages.
    inputs, rooms
        Of each micro-batch: its arguments, and the memory into which it receives.
    recorded
        Contains the lanes and statistics.
    """
    for index, (given, room) in enumerate(zip(inputs, rooms, strict=True)):
        recorded.statistics.begin(index)
        lane = index % recorded.lanes.count
        run = RecordingRun(placement, recorded.statistics, recorded.lanes, lane, recorded.loans, room)
        recorded.slots.append(_forward(net, given, run))
    if not torch.is_grad_enabled():
        return
    for slot in reversed(recorded.slots):
        _check_closed(slot)
        _make_landings(slot)
        for part in reversed(slot.parts):
            _backward(slot, part, recorded)
        for output in slot.outputs:
            # Drops the autograd graph; the memory stays.
            output.source = output.source.detach()
        for edge in (edge for part in slot.parts for edge in part.edges):
            edge.source = edge.source.detach()


class _Inputs:
    """A micro-batch's arguments, copied to the memory of all later batches."""

    def __init__(self, call: Call) -> None:
        leaves, structure = pytree.tree_flatten(call)
        static = [
            leaf.detach().clone().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf
            for leaf in leaves
        ]
        self.tensors = [leaf for leaf in static if isinstance(leaf, Tensor)]
        for number, tensor in enumerate(self.tensors):
            tensor._volseg_location = INPUT  # type: ignore[attr-defined]
            tensor._volseg_input = number  # type: ignore[attr-defined]
        self.args, self.kwargs = pytree.tree_unflatten(static, structure)


def _forward(net: nn.Module, given: _Inputs, run: RecordingRun) -> Slot:
    with run:
        output = net(*given.args, **given.kwargs)
    results, structure = pytree.tree_flatten(output)
    places = [part.location for part in run.parts]
    for result in results:
        if isinstance(result, Tensor) and not any(getattr(result, "_volseg_location", None) is at for at in places):
            raise RecordRefusedError("an output is an input, a parameter, or made by code outside torch functions")
    found = [Output(result) if isinstance(result, Tensor) else result for result in results]
    outputs = [leaf for leaf in found if isinstance(leaf, Output)]
    return Slot(given.tensors, run.parts, outputs, structure, found, run.lane)


def _make_landings(slot: Slot) -> None:
    """Allocate the memory of arriving gradients, before the graphs that read it."""
    for edge in (edge for part in slot.parts for edge in part.edges):
        if edge.target.requires_grad:
            edge.landing = torch.zeros_like(edge.source.detach())
    for output in slot.outputs:
        if output.source.requires_grad:
            output.landing = torch.zeros_like(output.source.detach())
            output.reaches = frozenset(_walk_back(output.source, slot))


def _walk_back(tensor: Tensor, slot: Slot) -> Iterator[int]:
    """Walk back from ``tensor`` through all parts; yield the leaves at the ends."""
    sources = {id(edge.target): edge.source for part in slot.parts for edge in part.edges}
    todo, seen = [tensor.grad_fn], set()
    if id(tensor) in sources:
        todo.append(sources[id(tensor)].grad_fn)
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        todo += [following for following, _ in node.next_functions]
        variable = getattr(node, "variable", None)
        if variable is not None:
            yield id(variable)
            # A received tensor may itself have been received by its sender.
            while id(variable) in sources:
                variable = sources[id(variable)]
                todo.append(variable.grad_fn)


def _backward(slot: Slot, part: Part, recorded: RecordedBatch) -> None:
    """Record the gradients of one part from those of its sent tensors."""
    arriving: dict[int, tuple[Tensor, list[Tensor]]] = {}
    edges = [edge for other in slot.parts for edge in other.edges if edge.returned is not None]
    holders: list[Edge | Output] = [*edges, *slot.outputs]
    for sent in holders:
        source = sent.source
        if getattr(source, "_volseg_location", None) is part.location and sent.landing is not None:
            arriving.setdefault(id(source), (source, []))[1].append(sent.landing)
            if isinstance(sent, Edge):
                part.sends.append(sent)
    received = [edge for edge in part.edges if edge.target.requires_grad]
    parameters = list(part.leaves.values())
    wanted = [*(edge.target for edge in received), *parameters]
    if not arriving or not wanted:
        return
    for parameter in parameters:
        if id(parameter) not in recorded.gradients:
            recorded.gradients[id(parameter)] = torch.zeros_like(parameter.detach())
    part.backward = recorded.lanes.make_graph(part.location.device, slot.lane)
    part.backward.begin()
    try:
        sources = [source for source, _ in arriving.values()]
        with torch.no_grad():
            totals = [
                landings[0] if len(landings) == 1 else torch.stack(landings).sum(0) for _, landings in arriving.values()
            ]
        found = torch.autograd.grad(sources, wanted, totals, allow_unused=True)
        for edge, gradient in zip(received, found, strict=False):
            edge.returned = gradient
        with torch.no_grad():
            pairs = [
                (recorded.gradients[id(parameter)], gradient)
                for parameter, gradient in zip(parameters, found[len(received) :], strict=True)
                if gradient is not None
            ]
            if pairs:
                sums, new = zip(*pairs, strict=True)
                add_each_(sums, new)
    finally:
        part.backward.end()


def _check_closed(slot: Slot) -> None:
    """Refuse a part whose autograd graph reaches into another's: its gradient would be lost."""
    seen: dict[Any, Location] = {}
    allowed = {part.location: {*part.leaves, *(id(edge.target) for edge in part.edges)} for part in slot.parts}
    sent = [output.source for output in slot.outputs]
    sent += [edge.source for part in slot.parts for edge in part.edges]
    for tensor in sent:
        location = getattr(tensor, "_volseg_location", None)
        if location is None or location is INPUT:
            continue
        todo = [tensor.grad_fn]
        while todo:
            node = todo.pop()
            if node is None or seen.get(node) is location:
                continue
            variable = getattr(node, "variable", None)
            foreign = node in seen if variable is None else id(variable) not in allowed[location]
            if foreign:
                raise RecordRefusedError("code outside torch functions connects two stages")
            if variable is None:
                seen[node] = location
                todo += [following for following, _ in node.next_functions]
