"""Record a function's kernels once and launch them all together: a CUDA graph around any function of tensors.

A training step on small volumes is hundreds of kernels of microseconds each; launching them one by one from Python
takes longer than they run. A recorded function must do the same on every call: no branch on a value, no wait for the
device, the same shapes.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["Captured", "signature"]

Tensors = Mapping[str, Tensor]


def signature(tensors: Tensors) -> tuple[Any, ...]:
    """Return what must be the same for a recording to serve: names, shapes, types, devices."""
    return tuple((name, tuple(t.shape), t.dtype, t.device) for name, t in sorted(tensors.items()))


class Captured:
    """A function whose kernels were recorded.

    Call the function itself some times first, on ``stream``: libraries allocate and choose kernels on first use, which
    cannot be recorded. Recording does not run it.

    Parameters
    ----------
    function : callable
        Takes the inputs by keyword and returns a dict of tensors; it may change other tensors in place (weights).
    inputs : mapping of str to Tensor
        On a GPU; only their signature matters.
    generators : iterable of torch.Generator
        Generators that the function draws from, beside the device's default one. Each replay goes on from where they
        stand, so seeding one before a call has its effect.
    stream : torch.cuda.Stream, optional
        Where to record.
    """

    def __init__(
        self,
        function: Callable[..., dict[str, Tensor]],
        inputs: Tensors,
        *,
        generators: Iterable[torch.Generator] = (),
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        self.signature = signature(inputs)
        self._inputs = {name: tensor.clone() for name, tensor in inputs.items()}
        self._graph = torch.cuda.CUDAGraph()
        for generator in generators:
            self._graph.register_generator_state(generator)
        with torch.cuda.graph(self._graph, stream=stream):
            self._outputs = function(**self._inputs)

    def __call__(self, inputs: Tensors) -> dict[str, Tensor]:
        """Run on new inputs of the recorded signature; the next call overwrites the tensors that are returned."""
        for name, tensor in inputs.items():
            self._inputs[name].copy_(tensor, non_blocking=True)
        self._graph.replay()
        return self._outputs
