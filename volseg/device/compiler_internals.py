"""Private names of torch's compilers that this package uses; ``torch_internals`` has those of torch itself.

``torch.compile`` takes as long to import as torch, so each function imports it when it is called. Tests of the expected
behaviour are in ``tests/device/test_torch_internals.py``.
"""

import shutil
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx


def explain_no_compiler(device: torch.device) -> str | None:
    """Return why torch.compile cannot make kernels for a device, as the end of a sentence; None if it can."""
    # The compiler reads this setting at its import, which is late.
    from torch._inductor import config

    if device.type == "cuda":
        # Imported late, like the compiler itself.
        from torch.utils._triton import has_triton

        return None if has_triton() else "Triton, which torch.compile needs for its kernels, does not run here"
    wanted = config.cpp.cxx
    named = [name for name in (wanted if isinstance(wanted, tuple) else (wanted,)) if name]
    if any(shutil.which(name) for name in (*named, "g++", "c++")):
        return None
    return "torch.compile needs a C++ compiler for the CPU (apt-get install g++)"


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
        # The compiler checks whether its inputs have gradients; inputs of a graph after a break are not leaves.
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf", UserWarning)
        yield


def compile_errors() -> tuple[type[Exception], ...]:
    """Return the errors that torch.compile raises if it cannot compile."""
    # The compiler takes as long to import as torch itself.
    from torch._dynamo import exc

    return exc.TorchDynamoException, exc.FailOnRecompileLimitHit


def count_breaks() -> Counter[str]:
    """Return the reasons of graph breaks in this process so far, with their numbers."""
    # The compiler takes as long to import as torch itself.
    from torch._dynamo.utils import counters

    return Counter(counters["graph_break"])


# TorchScript.

ScriptMethod = torch._C.ScriptMethod
"""The type of TorchScript's compiled methods, as ``__torch_function__`` meets them."""

_LOOK_AT_SCRIPT: ContextVar[Callable[[Any], None] | None] = ContextVar("look_at_script", default=None)


@contextmanager
def watching_scripts(look: Callable[[Any], None]) -> Iterator[None]:
    """Call ``look`` before each TorchScript function or method of this thread, whose operators no mode sees."""
    _watch_script_calls()
    token = _LOOK_AT_SCRIPT.set(look)
    try:
        yield
    finally:
        _LOOK_AT_SCRIPT.reset(token)


@cache
def _watch_script_calls() -> None:
    """Wrap both kinds of call for good: two threads could not take turns to wrap and restore them."""

    def watch(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(script: Any, *args: Any, **kwargs: Any) -> Any:
            if (look := _LOOK_AT_SCRIPT.get()) is not None:
                look(script)
            return call(script, *args, **kwargs)

        return run

    for kind in (torch.jit.ScriptFunction, ScriptMethod):
        kind.__call__ = watch(kind.__call__)  # type: ignore[method-assign]
