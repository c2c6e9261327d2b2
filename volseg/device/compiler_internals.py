"""All private names of torch's compiler that this package uses; ``torch_internals`` has those of torch itself.

The compiler takes as long to import as torch, so each function here imports it when called. The tests in
``tests/device/test_compiler_internals.py`` check the required behaviour.
"""

import shutil
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx

__all__ = ["compile_graph", "count_breaks", "explain_no_compiler", "find_faults", "never_running_plain"]


def explain_no_compiler(device: torch.device) -> str | None:
    """Return why torch.compile cannot make kernels for a device, as the end of a sentence; None if it can."""
    # The compiler reads this setting at its import, which is late.
    from torch._inductor import config

    if device.type == "cuda":
        # Imported late, like the compiler itself.
        from torch.utils._triton import has_triton

        return None if has_triton() else "Triton, in which torch.compile writes kernels, does not run here"
    wanted = config.cpp.cxx
    named = [name for name in (wanted if isinstance(wanted, tuple) else (wanted,)) if name]
    if any(shutil.which(name) for name in (*named, "g++", "c++")):
        return None
    return "torch.compile writes C++ for a CPU, and there is no compiler of it here (apt-get install g++)"


def compile_graph(graph: fx.GraphModule, inputs: Sequence[Tensor]) -> Callable[..., Any]:
    """Compile a graph by inductor, without CUDA graphs of inductor's own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # it imports deprecated parts of torch
        # The compiler takes as long to import as torch itself.
        from torch._inductor.compile_fx import compile_fx

        compiled: Any = compile_fx(graph, list(inputs), config_patches={"triton.cudagraphs": False})
    return compiled  # type: ignore[no-any-return]


@contextmanager
def never_running_plain(most: int) -> Iterator[None]:
    """Make torch.compile raise instead of running plain code, after a fault or more than ``most`` variants."""
    # The compiler takes as long to import as torch itself.
    from torch._dynamo import config

    with (
        config.patch(
            suppress_errors=False,
            fail_on_recompile_limit_hit=True,
            recompile_limit=most,
            skip_nnmodule_hook_guards=False,  # otherwise it skips hooks that are registered late
        ),
        warnings.catch_warnings(),
    ):
        # The compiler checks whether its inputs have gradients; inputs of a graph after a break are no leaves.
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf", UserWarning)
        yield


def find_faults() -> tuple[type[Exception], ...]:
    """Return the errors that torch.compile raises if it cannot compile."""
    # The compiler takes as long to import as torch itself.
    from torch._dynamo import exc

    return exc.TorchDynamoException, exc.FailOnRecompileLimitHit


def count_breaks() -> Counter[str]:
    """Return the reasons of graph breaks in this process so far, with their numbers."""
    # The compiler takes as long to import as torch itself.
    from torch._dynamo.utils import counters

    return Counter(counters["graph_break"])
