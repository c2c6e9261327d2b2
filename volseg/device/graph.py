"""Record a function's kernels once and launch them all together: a CUDA graph around any function of tensors.

A training step on small volumes is hundreds of kernels of microseconds each; launching them one by one from Python
takes longer than they run. A recorded function must do the same on every call: no branch on a value, no wait for the
device, the same shapes. Its collectives (NCCL) are recorded with it.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, Protocol, Self, TypeGuard

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from volseg.errors import ParallelError

__all__ = ["Composed", "RecordedFunction", "modes", "signature"]


PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, Enum)
"""Types of arguments, besides tensors, whose value says all."""


class Composed(Protocol):
    """A tensor to whoever looks that is made of others, such as a volume of slabs."""

    @property
    def arrangement(self) -> Hashable:
        """How it is made of them: what must be the same for a recording to serve."""

    def pieces(self) -> Sequence[Tensor]:
        """Return the tensors that it is made of."""

    def with_pieces(self, pieces: Sequence[Tensor]) -> Self:
        """Return one of the same arrangement, made of others."""


def is_composed(leaf: Any) -> TypeGuard[Composed]:
    """Say whether a tensor is made of others."""
    return hasattr(type(leaf), "with_pieces")


def signature(inputs: Any) -> tuple[Any, ...] | None:
    """Return what must be the same for a recording to serve: structure, shapes, types, devices, plain values.

    Of a composed tensor the whole shape counts, so that all processes that share it come to the same answer. None where
    an argument is of another type, which may hold something else in the next call.
    """
    leaves, structure = tree_flatten(inputs)
    found: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            made = leaf.arrangement if is_composed(leaf) else None
            found.append((type(leaf), tuple(leaf.shape), leaf.dtype, leaf.device, leaf.requires_grad, made))
        elif isinstance(leaf, PLAIN):
            found.append((type(leaf), leaf))  # True == 1 == 1.0
        else:
            return None
    return str(structure), *found


def modes() -> tuple[Any, ...]:
    """Return the modes of torch under which a function would be recorded."""
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled(kind),
        torch.get_autocast_dtype(kind),
        torch.are_deterministic_algorithms_enabled(),
    )


class RecordedFunction:
    """A function whose kernels were recorded.

    Call the function itself some times first, on ``stream``: libraries allocate and choose kernels on first use, which
    cannot be recorded. Recording does not run it.

    Parameters
    ----------
    function : callable
        Takes the inputs by keyword and returns tensors; it may change other tensors in place (weights).
    inputs : mapping
        Tensors on a GPU by name, nested as you like; only their signature matters.
    generators : iterable of torch.Generator
        Generators that the function draws from, beside the device's default one. Each replay goes on from where they
        stand, so seeding one before a call has its effect.
    stream : torch.cuda.Stream, optional
        Where to record.
    shares : RecordedFunction, optional
        A recording whose memory this one uses too: the results of each hold until the next call of either.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        inputs: Mapping[str, Any],
        *,
        generators: Iterable[torch.Generator] = (),
        stream: torch.cuda.Stream | None = None,
        shares: "RecordedFunction | None" = None,
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
        found += leaf.pieces() if is_composed(leaf) else [leaf] if isinstance(leaf, Tensor) else []
    return found


def _versions(inputs: Any) -> list[int]:
    return [tensor._version for tensor in _tensors(inputs) if not tensor.is_inference()]


def _cloned(leaf: Any) -> Any:
    if is_composed(leaf):
        return leaf.with_pieces([piece.clone() for piece in leaf.pieces()])
    return leaf.clone() if isinstance(leaf, Tensor) else leaf
