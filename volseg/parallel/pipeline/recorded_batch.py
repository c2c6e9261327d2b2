"""Record a batch of a pipeline: one graph for the forward pass of all micro-batches, one for the backward pass.

The eager pipeline itself is recorded, on all its devices: the network's own ``forward`` runs once per micro-batch under
``RecordedRun``, and autograd differentiates it. One autograd node then represents the whole network. Its forward copies
the batch into the recorded inputs and replays; so does its backward with the gradients of the outputs.

Aliases replace the parameters: the gradient accumulators of the parameters may belong to another stream, which a
capture must not touch, and other wrappers keep hooks there.

Tensors that are written before a replay are allocated outside of the capture: memory of the capture may serve another
tensor until the first kernel that uses it.
"""

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from volseg.device.first_order import first_order
from volseg.device.gpus import current_gpu_stream
from volseg.device.module_internals import replacing_parameters
from volseg.device.torch_internals import multiply_each, pytree
from volseg.errors import ParallelError
from volseg.parallel.pipeline.graphs import Lanes, RecordedRun, RecordRefusedError
from volseg.parallel.pipeline.micro_batch import Call, CutBatch, join, split
from volseg.parallel.pipeline.placement import BatchContext, Placement
from volseg.parallel.pipeline.run import list_changed_tensors
from volseg.parallel.pipeline.statistics import WholeBatchStatistics
from volseg.parallel.pipeline.transfer import copy_between
from volseg.parallel.state.module import read_version


@dataclass(eq=False)
class _Output:
    """A tensor that ``forward`` returned for one micro-batch."""

    number: int
    """Its place among the tensors of the output."""
    source: Tensor
    home: Tensor
    """Its copy on the device where the outputs are joined."""
    lane: int


class RecordedBatch:
    """Recording of ``net`` for batches like the given one; the tensors' values do not matter.

    Its memory holds one batch: ``is_free`` is False while a backward still needs it.

    Parameters
    ----------
    net, placement
        The network on its stages.
    batch
        The batch, and its micro-batches.
    lanes
        Streams per device among which the micro-batches alternate.

    Raises
    ------
    RecordRefusedError
        If a recording would not repeat the work of ``forward``.
    """

    def __init__(self, net: nn.Module, placement: Placement, batch: CutBatch, lanes: int = 1) -> None:
        # Without the caller's tensors, which would live as long as the recording.
        self._net, self._batch = net, replace(batch, call=((), {}), calls=())
        self._node: weakref.ref[Any] | None = None
        with torch.inference_mode(False):  # else changes in place would not count
            self._call: Call = pytree.tree_map_only(
                Tensor, lambda given: given.detach().clone().requires_grad_(given.requires_grad), batch.call
            )
        self._inputs = [leaf for leaf in pytree.tree_leaves(self._call) if isinstance(leaf, Tensor)]
        self.parameters = list(net.parameters())
        self._aliases = {id(p): nn.Parameter(p.detach(), p.requires_grad) for p in self.parameters}
        owners = {id(alias): placement.owners[key] for key, alias in self._aliases.items()}
        self._placement = replace(placement, owners=placement.owners | owners)
        self._statistics = WholeBatchStatistics(len(batch.sizes), counts_later=True)
        places = {tensor.device for tensor in self._inputs} | placement.devices | {batch.target}
        self._lanes = Lanes(places, lanes)
        self._roots: list[_Output] = []
        versions = [(tensor, read_version(tensor)) for tensor in self._inputs]
        self._forward, self._homes = self._lanes.record(self._run_forward)
        if list_changed_tensors(versions):  # also by scripted functions, which no mode sees
            raise RecordRefusedError("forward changes an argument in place")
        self._backward = self._record_backward() if torch.is_grad_enabled() else None
        self._leaves, self._structure = pytree.tree_flatten(join(self._homes, batch.sizes))
        self._roots.clear()  # free the autograd graph; the recording keeps the memory

    @property
    def is_free(self) -> bool:
        """Whether no forward waits for its backward: while its node exists unused, the activations are needed."""
        node = None if self._node is None else self._node()
        return node is None or node.is_used

    def __call__(self, call: Call) -> Any:
        """Run one batch; return the joined outputs."""
        tensors = [leaf for leaf in pytree.tree_leaves(call) if isinstance(leaf, Tensor)]
        outputs = iter(_Replayed.apply(self, len(tensors), *tensors, *self.parameters))
        leaves = [next(outputs) if isinstance(leaf, Tensor) else leaf for leaf in self._leaves]
        return pytree.tree_unflatten(leaves, self._structure)

    def release(self) -> None:
        """Drop the recording: its memory is freed once no forward waits for its backward, which holds the memory."""

    def _run_forward(self) -> list[Any]:
        """Run every micro-batch; keep its outputs, and return the tensors to which a replay writes them."""
        contexts: dict[int, BatchContext] = defaultdict(BatchContext)
        homes, arrivals, target = [], [], self._batch.target
        for index, (args, kwargs) in enumerate(split(self._call, self._batch.sizes[0], self._batch.is_batch)):
            lane = index % self._lanes.count
            self._statistics.begin(index)
            with self._lanes.turn_to(lane):
                run = RecordedRun(self._placement, self._statistics, contexts[lane], self._inputs)
                with replacing_parameters(self._net, self._aliases), run:
                    output = self._net(*args, **kwargs)
                leaves, structure = pytree.tree_flatten(output)
                places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
                for number, place in enumerate(places):
                    tensor = leaves[place]
                    home = target if tensor.device.type == target.type else tensor.device
                    leaves[place], event = _bring(tensor.detach(), home)
                    self._roots.append(_Output(number, tensor, leaves[place], lane))
                    arrivals.append((leaves[place], event))
            homes.append(pytree.tree_unflatten(leaves, structure))
        # Wait last: an earlier wait would delay the target's next micro-batch.
        for tensor, event in arrivals:
            _wait(tensor, event)
        self._placement.forget_marks(homes)
        return homes

    def _record_backward(self) -> Callable[[], None] | None:
        """Record the gradients of the inputs and of the parameters from those of the outputs."""
        wanted = [*self._inputs, *self._aliases.values()]
        self._places = {id(tensor): place for place, tensor in enumerate(wanted) if tensor.requires_grad}
        roots = [root for root in self._roots if root.source.requires_grad]
        if not roots:
            return None
        self._reaches: dict[int, set[int]] = defaultdict(set)
        """For each output, the inputs and parameters that its gradient reaches."""
        self._arriving: dict[int, Tensor] = {}
        """For each output, where its gradient is written."""
        gradients: dict[int, Iterator[Tensor]] = {}
        for number in {root.number for root in roots}:
            own = [root for root in self._roots if root.number == number]
            self._reaches[number].update(*(self._find_leaves(root.source) for root in own))
            self._arriving[number] = torch.zeros_like(torch.cat([root.home for root in own]))
            gradients[number] = iter(self._arriving[number].split([len(root.home) for root in own]))
        pieces = [(root, next(gradients[root.number])) for root in self._roots if root.number in gradients]
        pieces = [(root, piece) for root, piece in pieces if root.source.requires_grad]
        before = [parameter.grad for parameter in self.parameters]
        replay, found = self._lanes.record(partial(self._run_backward, pieces, wanted))
        if any(parameter.grad is not own for parameter, own in zip(self.parameters, before, strict=True)):
            raise RecordRefusedError("backward itself computes gradients of parameters (reentrant checkpoints)")
        pairs = zip(self._places.values(), found, strict=True)
        self._gradients = {place: gradient for place, gradient in pairs if gradient is not None}
        return replay

    def _run_backward(
        self, pieces: Sequence[tuple[_Output, Tensor]], wanted: Sequence[Tensor]
    ) -> Sequence[Tensor | None]:
        gradients = []
        # Copy all of them first, in the order of use: a copy queued behind a micro-batch's backward pass on the loss's
        # device would start only after it, and the stages would alternate.
        for root, piece in reversed(pieces):
            # Autograd orders all roots after one stream, that of the first root's device.
            with self._lanes.turn_to(root.lane):
                landed, event = _bring(piece, root.source.device)
                _wait(landed, event)
            gradients.append(landed)
        sources = [root.source for root, _ in reversed(pieces)]
        own = [wanted[place] for place in self._places.values()]
        # cuDNN's cache of plans is per thread: it would benchmark again in this one, during the capture.
        times_plans, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, False
        try:
            return torch.autograd.grad(sources, own, gradients, allow_unused=True)
        finally:
            torch.backends.cudnn.benchmark = times_plans

    def _find_leaves(self, tensor: Tensor) -> Iterator[int]:
        """Yield the places of the inputs and parameters from which ``tensor`` was computed."""
        todo, seen = [tensor.grad_fn], set()
        while todo:
            node = todo.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            todo += [following for following, _ in node.next_functions]
            variable = getattr(node, "variable", None)
            if variable is not None:
                if id(variable) not in self._places:
                    raise RecordRefusedError(
                        "forward uses a tensor with a gradient that is not a parameter of the network"
                    )
                yield self._places[id(variable)]

    def replay_forward(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Replay the forward pass; return new tensors, and update running statistics."""
        for tensor, static in zip(tensors, self._inputs, strict=True):
            static.copy_(tensor)
        self._forward()
        self._statistics.commit()
        outputs = (
            leaf for leaf in pytree.tree_leaves(join(self._homes, self._batch.sizes)) if isinstance(leaf, Tensor)
        )
        return tuple(output.clone() if len(self._homes) == 1 else output for output in outputs)

    def list_non_differentiable(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        """Return the outputs that have no gradient."""
        return [output for number, output in enumerate(outputs) if not self._backward or number not in self._arriving]

    def replay_backward(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Replay the backward pass; return the gradients of the inputs, then of the parameters.

        A gradient is None if none arrives. All are copies, since the next batch overwrites the recording's tensors.
        """
        assert self._backward is not None
        reached: set[int] = set()
        for number, arriving in self._arriving.items():
            gradient = gradients[number]
            if gradient is None:
                arriving.zero_()
            else:
                arriving.copy_(gradient)
                reached |= self._reaches[number]
        self._backward()
        found: list[Tensor | None] = [None] * (len(self._inputs) + len(self.parameters))
        # Many at a time: a kernel for each would take longer to queue than to run.
        groups: dict[tuple[torch.device, torch.dtype], list[int]] = defaultdict(list)
        for place, gradient in self._gradients.items():
            if place in reached:
                groups[gradient.device, gradient.dtype].append(place)
        for places in groups.values():
            copies = multiply_each([self._gradients[place] for place in places], 1)
            for place, copied in zip(places, copies, strict=True):
                found[place] = copied
        return found


def _bring(tensor: Tensor, device: torch.device) -> tuple[Tensor, Any]:
    """Return a tensor on ``device``, and the event of its arrival, or None if it was not moved."""
    return (tensor, None) if tensor.device == device else copy_between(tensor, device)


def _wait(tensor: Tensor, event: Any) -> None:
    if event is not None:
        current_gpu_stream(tensor.device).wait_event(event)


class _Replayed(torch.autograd.Function):
    """The whole network as one node."""

    @staticmethod
    def forward(ctx: Any, recorded: RecordedBatch, num_inputs: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.recorded, ctx.is_used = recorded, not any(ctx.needs_input_grad)
        recorded._node = weakref.ref(ctx)
        ctx.set_materialize_grads(False)
        ctx.versions = list(map(read_version, recorded.parameters))
        outputs = recorded.replay_forward(tensors[:num_inputs])
        ctx.mark_non_differentiable(*recorded.list_non_differentiable(outputs))
        return outputs

    @staticmethod
    @first_order
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        if ctx.is_used:
            raise ParallelError(
                "backward through a recorded pipeline ran a second time, and its activations are gone; for "
                "retain_graph=True use ModelParallel(..., record=False)"
            )
        if list(map(read_version, ctx.recorded.parameters)) != ctx.versions:
            raise ParallelError(
                "a parameter was changed in place between forward and backward of a recorded pipeline, which would "
                "compute gradients with its new values; change it after backward"
            )
        ctx.is_used = True
        return None, None, *ctx.recorded.replay_backward(gradients)
