"""Replay a training step of repeated shape as one CUDA graph, with its collectives.

At 128^3 per GPU the Python of a step takes as long as its kernels. A captured step has none: one launch replays
forward, loss, backward and, if the step does it, the optimizer.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from volseg.errors import ParallelError
from volseg.parallel.model_parallel import ModelParallel
from volseg.parallel.sharding.strategy import SpatialStrategy
from volseg.parallel.sharding.volume import ShardedVolume

__all__ = ["CapturedStep"]


@dataclass
class _Graph:
    graph: torch.cuda.CUDAGraph
    inputs: Any
    outputs: Any
    gradients: list[Tensor | None]


class CapturedStep:
    """A step function that is captured per input shape and then replayed.

    Parameters
    ----------
    model
        Its parameters' gradients are those of the last call, captured or not.
    step
        From inputs (tensors and volumes, nested as you like) to tensors. It must do the same on every call: no
        ``.item()``, no branch on values, ``zero_grad(set_to_none=True)`` inside. Under a captured step an optimizer
        needs ``capturable=True`` where it has that option.
    warm_up
        Calls per shape that run as they are, before one is captured: the optimizer's state and cuDNN's choices come
        into being.
    limit
        Number of shapes to capture; calls with further shapes run as they are.
    """

    def __init__(self, model: ModelParallel, step: Callable[..., Any], warm_up: int = 3, limit: int = 2) -> None:
        if not isinstance(model.strategy, SpatialStrategy) or model.strategy.communicator.home.type != "cuda":
            raise ParallelError("a step is captured for strategy='spatial' on GPUs with one process each")
        if len(set(model.strategy.communicator.devices)) != 1:
            raise ParallelError(
                "a step over several devices of one process cannot be captured; start one process per GPU"
            )
        self.model, self.step, self.warm_up, self.limit = model, step, warm_up, limit
        self.device = model.strategy.communicator.home
        self._calls: dict[Any, int] = {}
        self._graphs: dict[Any, _Graph] = {}
        self._stream = torch.cuda.Stream(self.device)
        self._pool: Any = None

    def __call__(self, *inputs: Any) -> Any:
        """Run or replay the step; results of a replay are overwritten by the next one."""
        key = _key(inputs)
        if key in self._graphs:
            return self._replay(self._graphs[key], inputs)
        calls = self._calls[key] = self._calls.get(key, 0) + 1
        if calls <= self.warm_up or len(self._graphs) >= self.limit:
            # The side stream of the capture: autograd remembers the stream of what it allocates.
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self._stream):
                outputs = self.step(*inputs)
            torch.cuda.current_stream(self.device).wait_stream(self._stream)
            return outputs
        self._graphs[key] = self._capture(inputs)
        return self._replay(self._graphs[key], inputs)

    def _capture(self, inputs: Any) -> _Graph:
        static = tree_map(_cloned, inputs)
        for parameter in self.model.parameters():
            parameter.grad = None
        torch.cuda.synchronize(self.device)
        # What the warm-up calls used lies in another pool: the graph has its own.
        torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph()
        self._share_randomness(graph)
        # thread_local: NCCL's watchdog thread asks about its events while this thread captures.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            outputs = self.step(*static)
        self._pool = graph.pool()
        return _Graph(graph, static, outputs, [parameter.grad for parameter in self.model.parameters()])

    def _share_randomness(self, graph: torch.cuda.CUDAGraph) -> None:
        """Give all processes the same default generator, for whole channels, and each its own for voxels."""
        strategy: Any = self.model.strategy
        seed = torch.randint(2**62, (1,)).to(self.device)
        group = getattr(strategy.communicator, "group", None)
        if group is not None:
            dist.broadcast(seed, dist.get_global_rank(group, 0), group=group)
        torch.cuda.manual_seed(int(seed.item()))
        own = torch.Generator(self.device).manual_seed(int(seed.item()) + 1 + strategy.communicator.indices[0])
        strategy.context.graph_generator = own
        graph.register_generator_state(own)

    def _replay(self, captured: _Graph, inputs: Any) -> Any:
        for static, given in zip(_tensors(captured.inputs), _tensors(inputs), strict=True):
            static.copy_(given, non_blocking=True)
        captured.graph.replay()
        for parameter, gradient in zip(self.model.parameters(), captured.gradients, strict=True):
            parameter.grad = gradient
        return captured.outputs


def _tensors(values: Any) -> list[Tensor]:
    leaves = tree_flatten(values)[0]
    found: list[Tensor] = []
    for leaf in leaves:
        found += leaf.slabs if isinstance(leaf, ShardedVolume) else [leaf] if isinstance(leaf, Tensor) else []
    return found


def _cloned(leaf: Any) -> Any:
    if isinstance(leaf, ShardedVolume):
        return ShardedVolume([slab.clone() for slab in leaf.slabs], leaf.dims, leaf.shape, leaf.context)
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


def _key(inputs: Any) -> Any:
    leaves, structure = tree_flatten(inputs)
    return str(structure), tuple((leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
