"""Record a function's kernels once and launch them all together: a CUDA graph around any function of tensors.

A training step on small volumes is hundreds of kernels of microseconds each; launching them one by one from Python
takes longer than they run. A recorded function must do the same on every call: no branch on a value, no wait for the
device, the same shapes. Its collectives (NCCL) are recorded with it.
"""

from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from volseg.errors import ParallelError
from volseg.parallel.spatial.volume import ShardedVolume, wrap

__all__ = ["Captured", "signature"]


PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, Enum)
"""Types of arguments, besides tensors, whose value says all."""


def signature(inputs: Any) -> tuple[Any, ...] | None:
    """Return what must be the same for a recording to serve: structure, shapes, types, devices, plain values.

    Of a sharded volume the whole shape counts, so that all processes that share it come to the same answer. None where
    an argument is of another type, which may hold something else in the next call.
    """
    leaves, structure = tree_flatten(inputs)
    found: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            cut = leaf.dims if isinstance(leaf, ShardedVolume) else None
            found.append((type(leaf), tuple(leaf.shape), leaf.dtype, leaf.device, leaf.requires_grad, cut))
        elif isinstance(leaf, PLAIN):
            found.append((type(leaf), leaf))  # True == 1 == 1.0
        else:
            return None
    return str(structure), *found


class Captured:
    """A function whose kernels were recorded.

    Call the function itself some times first, on ``stream``: libraries allocate and choose kernels on first use, which
    cannot be recorded. Recording does not run it.

    Parameters
    ----------
    function : callable
        Takes the inputs by keyword and returns tensors; it may change other tensors in place (weights).
    inputs : mapping
        Tensors and sharded volumes on a GPU by name, nested as you like; only their signature matters.
    generators : iterable of torch.Generator
        Generators that the function draws from, beside the device's default one. Each replay goes on from where they
        stand, so seeding one before a call has its effect.
    stream : torch.cuda.Stream, optional
        Where to record.
    shares : Captured, optional
        A recording whose memory this one uses too: the results of each hold until the next call of either.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        inputs: Mapping[str, Any],
        *,
        generators: Iterable[torch.Generator] = (),
        stream: torch.cuda.Stream | None = None,
        shares: "Captured | None" = None,
    ) -> None:
        self.signature = signature(inputs)
        if any(tensor.requires_grad for tensor in _tensors(dict(inputs))):
            raise ParallelError("an input needs a gradient, which a replay would not give it; pass input.detach()")
        self._inputs = tree_map(_cloned, dict(inputs))
        versions = _versions(self._inputs)
        self._graph = torch.cuda.CUDAGraph()
        for generator in generators:
            self._graph.register_generator_state(generator)
        pool = None if shares is None else shares._graph.pool()
        # thread_local: NCCL's watchdog thread asks about its events while this thread records.
        with torch.cuda.graph(self._graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            self._outputs = function(**self._inputs)
        if _versions(self._inputs) != versions:
            self.release()
            raise ParallelError(
                "the function changes its input in place, and a replay would change its own copy; pass a clone, or let "
                "the first layer work out of place (inplace=False)"
            )

    def __call__(self, inputs: Mapping[str, Any]) -> Any:
        """Run on new inputs of the recorded signature; the next call overwrites the tensors that are returned."""
        for recorded, given in zip(_tensors(self._inputs), _tensors(dict(inputs)), strict=True):
            recorded.copy_(given, non_blocking=True)
        self._graph.replay()
        return self._outputs

    def release(self) -> None:
        """Free the recording; NCCL ends a group only once no recording holds its collectives."""
        self._graph.reset()
        self._inputs, self._outputs = {}, None


def _tensors(inputs: Any) -> list[Tensor]:
    found: list[Tensor] = []
    for leaf in tree_flatten(inputs)[0]:
        found += leaf.slabs if isinstance(leaf, ShardedVolume) else [leaf] if isinstance(leaf, Tensor) else []
    return found


def _versions(inputs: Any) -> list[int]:
    return [tensor._version for tensor in _tensors(inputs) if not tensor.is_inference()]


def _cloned(leaf: Any) -> Any:
    if isinstance(leaf, ShardedVolume):
        return wrap(leaf, [slab.clone() for slab in leaf.slabs])
    return leaf.clone() if isinstance(leaf, Tensor) else leaf
