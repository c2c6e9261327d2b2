"""Sum gradients over replicas as a part of the backward pass.

A forward pass runs on stand-ins of the parameters. Autograd nodes behind the stand-ins, one for each bucket of
parameters, sum the gradients over the replicas; one more node behind them passes the sums to the parameters::

    parameters <- edges <- sum of bucket 0 <- sum of bucket 1 <- ... <- tie <- outputs
                               |  stand-ins      |  stand-ins

Each sum waits for the sum of the bucket after it, and the last sum waits for the outputs. So each replica makes the
same sums in the same order for any graph, and no replica waits for a sum that another one does not make. Each sum also
adds a number per gradient that encodes its memory layout. If only some replicas have a gradient, or layouts differ, the
sum is wrong: an error is raised, on a GPU as soon as the number has arrived, without a wait. A parameter that was
trained once keeps its place in the sums when it is frozen: if only one replica froze it, the sums would otherwise add
gradients of different parameters.

The nodes are recorded with the step like the rest of its backward pass. On a GPU they run on a separate stream, so
that sums overlap with the backward pass of earlier layers.
"""

import weakref
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from volseg.device.first_order import first_order
from volseg.device.gpus import current_gpu_stream, get_address, is_gpu, make_stream, on_stream
from volseg.device.graph import describe_plain
from volseg.device.module_internals import replacing_parameters
from volseg.device.torch_internals import accept_gradients_of_other_streams
from volseg.errors import ParallelError
from volseg.parallel.buckets import Differences, GradientRoom, LayoutNumbers, check_hooks, fill_buckets
from volseg.parallel.fixed_order import add_up

REFUSAL = (
    "only some replicas used {names} in a step, or in another memory format, so the sums of their gradients would be "
    "wrong; use the same parameters in forward() for any sample (multiply by zero instead of skipping), freeze the "
    "same parameters in all processes, and use one memory format"
)

OUTSIDE = (
    "a parameter of shape {shape} got a gradient that was not summed over the replicas: it was used outside the "
    "forward pass of DataParallel (a penalty on the weights, a direct call of the network), or in a block checkpointed "
    "with use_reentrant=True. Compute it in the network's forward, with weight_decay, or with use_reentrant=False"
)


class Marked(NamedTuple):
    """Stand-ins of one pass's parameters, and the end of the chain to which its outputs are tied."""

    originals: list[Tensor]
    stand_ins: list[Tensor]
    end: Tensor

    @property
    def trained(self) -> list[Tensor]:
        """Stand-ins of the parameters that are trained in this pass."""
        return [other for original, other in zip(self.originals, self.stand_ins, strict=True) if is_trained(original)]

    def used(self, net: nn.Module) -> AbstractContextManager[None]:
        """Replace the trained parameters of a network's modules by the stand-ins within the block."""
        pairs = zip(self.originals, self.stand_ins, strict=True)
        return replacing_parameters(net, {id(original): other for original, other in pairs if is_trained(original)})

    @staticmethod
    def check_outputs(leaves: Sequence[Any]) -> None:
        """Refuse a result that may hide tensors, which could not be tied to the sums."""
        for leaf in leaves:
            if not isinstance(leaf, Tensor) and describe_plain(leaf) is None:
                raise ParallelError(
                    f"the network returns a {type(leaf).__name__}, in which DataParallel cannot find the tensors; "
                    "return tensors, in tuples, lists or dicts"
                )

    def tie(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        """Tie the outputs of the pass to the sums, so that a backward pass from any output makes every sum.

        Each output has its own tie: autograd runs the nodes behind all outputs of a function as soon as one output is
        used, and parameters of an output that no loss reads would get gradients of zeros instead of none.
        """
        return [_Tie.apply(self.end, output) for output in outputs]


class GradientSums:
    """Sum gradients over replicas.

    Parameters
    ----------
    group
        The processes that hold the same parameters and compute other samples.
    device
        Device of the parameters.
    average
        Whether to compute the mean instead.
    fixed_order
        Whether the sum has the same bits on any number of processes; see ``fixed_order``.
    stream
        Stream of the sums on a GPU; a separate one by default.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        *,
        average: bool = False,
        fixed_order: bool = False,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        self.group, self.device, self.average, self.fixed_order = group, device, average, fixed_order
        self.count = dist.get_world_size(group)
        self._stream = make_stream(device) if stream is None and is_gpu(device) else stream
        if self._stream is not None:
            accept_gradients_of_other_streams()
        self._guard = None if average else _Guard()
        self._differences: dict[tuple[str, ...], Differences] = {}
        self.numbers = LayoutNumbers(self.count)
        self._ever_trained: set[str] = set()
        self._edges: weakref.ref[_Edges] | None = None

    def mark(self, net: nn.Module) -> Marked | None:
        """Return stand-ins of a network's parameters for one forward pass; None if no parameter was ever trained."""
        self.look()
        known = dict(net.named_parameters())
        self._ever_trained.update(name for name, parameter in known.items() if is_trained(parameter))
        names = tuple(name for name, parameter in known.items() if name in self._ever_trained)
        if not names:
            return None
        parameters: list[Tensor] = [known[name] for name in names]
        with self._on_stream():
            edges = self._get_edges(parameters)
            differences = self.get_differences(names)
            end = torch.empty(0, device=self.device)
            marked: list[Tensor] = []
            for bucket in fill_buckets(parameters):
                first = len(marked)
                work = _Work(self, edges, differences, first, [parameter.detach() for parameter in bucket])
                end, *stand_ins = _Sum.apply(work, end, *edges.tensors[first : first + len(bucket)])
                marked += stand_ins
        return Marked(parameters, marked, end)

    def add(
        self, parameters: Sequence[Tensor], gradients: Sequence[Tensor | None], differences: Differences, first: int
    ) -> list[Tensor | None]:
        """Return a bucket's gradients summed over the replicas; None stays None.

        Parameters
        ----------
        parameters, gradients
            Those of the bucket.
        differences
            Notes the gradients that only some replicas have.
        first
            Place of the bucket's first parameter among the names of ``differences``.
        """
        room = GradientRoom(parameters)
        own, equal = self.numbers.read(gradients, parameters)
        total = add_up(room.gather(gradients, own), self.group, self.fixed_order)
        differences.note(first, total[-len(own) :] != equal)
        if self.average:
            total = total / self.count
        return [None if given is None else part for given, part in zip(gradients, room.split(total), strict=True)]

    def get_differences(self, names: tuple[str, ...]) -> Differences:
        """Return the differences found in sums over the parameters of these names."""
        if names not in self._differences:
            self._differences[names] = Differences(names, self.device, REFUSAL)
        return self._differences[names]

    def look(self) -> None:
        """Raise an error for differences found in the last steps, without waiting for a device.

        Raises
        ------
        ParallelError
            If replicas have used different parameters.
        """
        for differences in self._differences.values():
            differences.look()

    def _get_edges(self, parameters: list[Tensor]) -> "_Edges":
        """Return the edges of pending passes, or new ones.

        All passes of one backward pass share the edges, so that each parameter gets one gradient. The edges must not
        outlive the backward pass: autograd would keep that pass's streams for the parameters.
        """
        edges = None if self._edges is None else self._edges()
        if edges is None or not edges.lead_to(parameters):
            edges = _Edges(parameters, self._guard)
            self._edges = weakref.ref(edges)
        return edges

    def _on_stream(self) -> AbstractContextManager[Any]:
        # Autograd runs a node's backward on the stream of its forward.
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(current_gpu_stream(self.device))
        return self.beside()

    def beside(self) -> AbstractContextManager[Any]:
        """Run work on the stream of the sums, on devices with streams."""
        return nullcontext() if self._stream is None else on_stream(self._stream)


class _Edges:
    """Outputs of a backward pass's sums: the edges to the parameters."""

    def __init__(self, parameters: list[Tensor], guard: "_Guard | None") -> None:
        self._parameters = [weakref.ref(parameter) for parameter in parameters]
        self.tensors: tuple[Tensor, ...] = _ToParameters.apply(guard, *parameters)
        if guard is not None:
            guard.watch(parameters)

    def lead_to(self, parameters: list[Tensor]) -> bool:
        known = [reference() for reference in self._parameters]
        return len(known) == len(parameters) and all(a is b for a, b in zip(known, parameters, strict=True))


class GradientHooks:
    """Hooks of parameters that work as long as this object exists, and do not keep it alive."""

    def __init__(self) -> None:
        self.watched: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()
        """Parameters that have a hook, by identity."""

    def watch(self, parameters: Iterable[Tensor]) -> None:
        """Call ``receive`` for each gradient that one of the trained parameters gets."""
        for parameter in filter(is_trained, parameters):
            if self.watched.get(id(parameter)) is not parameter:
                self.watched[id(parameter)] = parameter
                parameter.register_hook(partial(_receive, weakref.ref(self), id(parameter)))

    def receive(self, key: int, gradient: Tensor) -> None:
        """Handle the gradient of the parameter with this identity."""
        raise NotImplementedError


def _receive(hooks: "weakref.ref[GradientHooks]", key: int, gradient: Tensor | None) -> None:
    owner = hooks()
    if owner is not None and gradient is not None:
        owner.receive(key, gradient)


class _Guard(GradientHooks):
    """Refuse gradients that reach a parameter outside the sums, such as a penalty on the weights themselves."""

    def __init__(self) -> None:
        super().__init__()
        self._expected: dict[int, int] = {}

    def expect(self, parameters: Sequence[int], gradients: Sequence[Tensor | None]) -> None:
        """Set the gradients that the parameters will get."""
        for key, gradient in zip(parameters, gradients, strict=True):
            if gradient is not None:
                self._expected[key] = get_address(gradient)

    def receive(self, key: int, gradient: Tensor) -> None:
        """Refuse any other gradient than the expected one."""
        if self._expected.pop(key, None) != get_address(gradient):
            raise ParallelError(OUTSIDE.format(shape=tuple(gradient.shape)))


class _Work(NamedTuple):
    """Inputs of the sum of one bucket."""

    sums: GradientSums
    edges: _Edges
    differences: Differences
    first: int
    parameters: list[Tensor]


def is_trained(parameter: Tensor) -> bool:
    """Return whether a tensor can get a gradient; tensors of inference mode have no version counter."""
    return parameter.requires_grad and not parameter.is_inference()


class _ToParameters(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, guard: _Guard | None, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.guard, ctx.keys = guard, [id(parameter) for parameter in parameters]
        ctx.given = [weakref.ref(parameter) for parameter in parameters]
        ctx.set_materialize_grads(False)
        # Tensors of a parameter's shape, without memory: only their gradients matter.
        kinds = {(parameter.dtype, parameter.device): parameter for parameter in parameters}
        zeros = {kind: parameter.new_zeros(()) for kind, parameter in kinds.items()}
        return tuple(zeros[parameter.dtype, parameter.device].expand(parameter.shape) for parameter in parameters)

    @staticmethod
    @first_order
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        check_hooks(ctx.given, gradients)
        if ctx.guard is not None:
            ctx.guard.expect(ctx.keys, gradients)
        return None, *gradients


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, work: _Work, before: Tensor, *edges: Tensor) -> tuple[Tensor, ...]:
        del edges
        ctx.work = work
        # A parameter that no replica used keeps the gradient None, as on one device.
        ctx.set_materialize_grads(False)
        return before.new_empty(0), *(parameter.view_as(parameter) for parameter in work.parameters)

    @staticmethod
    @first_order
    def backward(ctx: Any, end: None, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        del end
        with ctx.work.sums.beside():  # memory where autograd has put it, on a real stream
            sums, _, differences, first, parameters = ctx.work
            return None, None, *sums.add(parameters, gradients, differences, first)


class _Tie(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, end: Tensor, output: Tensor) -> Tensor:
        del end
        ctx.set_materialize_grads(False)
        return output.clone()  # an input returned unchanged is a view, which may not be changed in place

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[None, Tensor | None]:
        del ctx
        return None, gradient
