"""The graphs that torch.compile makes of a network, without compiling kernels for seconds."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, fx


def trace_only(graph: fx.GraphModule, inputs: Sequence[Tensor]) -> Callable[..., Any]:
    """Stand for inductor: the graphs, those of the backward pass too, run by torch's kernels."""
    # Late, as the package does it: the compiler takes as long to import as torch.
    from torch._dynamo.backends.debugging import aot_eager

    return aot_eager(graph, list(inputs))
