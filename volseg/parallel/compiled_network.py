"""Compile the training pass of a network by torch.compile, under the network's own parameter names.

volseg's kernels are faster for networks whose functions they support; for other networks the compiler may be faster. A
step of compiled kernels is recorded like any other: inductor creates no CUDA graphs here, and compiles during the
warm-up steps before the recording.

If torch.compile cannot compile a network, it silently runs the plain one. Here this is an error: a fault of the
compiler, too many variants, hooks that it would skip, or modes under which it gives up. If a network is compiled in
pieces, with Python between them, a warning is logged once.
"""

import copy
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import handle_torch_function, has_torch_function

from volseg.device import compiler_internals
from volseg.device.first_order import refuse_forward_mode
from volseg.device.gpus import has_values, is_recording
from volseg.device.graph import without_cached_casts
from volseg.device.module_internals import BUFFERS, HOOKS, HOOKS_OF_ALL_MODULES, MODULES, NOT_PERSISTENT, PARAMETERS
from volseg.device.torch_internals import (
    count_dispatch_modes,
    find_transform,
    left_out_of_compilation,
    tree_flatten,
    tree_leaves,
    tree_unflatten,
)
from volseg.errors import ParallelError
from volseg.parallel.model_parallel import check_network
from volseg.parallel.norms import name_batch_norm
from volseg.parallel.state.description import opaque
from volseg.parallel.state.module import REGISTRIES

logger = logging.getLogger(__name__)

MOST_VARIANTS = 16
"""Limit of variants (shapes, layouts, modes) of one network: a network that needs more changes on every call."""


INSTEAD = "run the plain network instead (in a config training.kernels: torch)"


@dataclass
class _Pieces:
    """Count the graphs of a compiled network; keep no graph or network, as the compiler keeps this object forever."""

    count: int = 0
    """Number of graphs."""
    breaks: int = 0
    """Number of graph breaks."""
    norms: set[str] = field(default_factory=set)
    """Functions in the graphs that read all samples of a batch, or update running statistics."""

    def __call__(self, graph: fx.GraphModule, inputs: Sequence[Tensor]) -> Callable[..., Any]:
        """Compile a graph."""
        self.count += 1
        for part in graph.modules():
            if isinstance(part, fx.GraphModule):
                found = (name_batch_norm(node.target, node.args, node.kwargs) for node in part.graph.nodes)
                self.norms.update(name for name in found if name is not None)
        compiled = compiler_internals.compile_graph(graph, inputs)

        def run(*inputs: Any) -> Any:
            return _require_all(compiled(*inputs))

        return run


class _Compiled(nn.Module):
    """Compiled call of a network; a module, as recordings inspect a module's contents, but not modules inside."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.pieces = _Pieces()
        self.call = torch.compile(_make_call(net), backend=self.pieces, dynamic=False)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the network."""
        return self.call(*args, **kwargs)


class CompiledNetwork(nn.Module):
    """Run a network's training pass by torch.compile; run evaluation, and passes without gradients, as they are.

    Whole volumes of a validation differ in shape, and each shape would take a minute to compile. Parameters, buffers
    and children keep the network's names, so its ``state_dict`` is the network's.

    With the same seed, dropout draws other masks than in the plain network. Otherwise results agree up to round-off, as
    the compiler does not round intermediate values of a chain of pointwise functions to 16 bits.

    Parameters
    ----------
    net
        Any module on one device. It is used in place.

    Raises
    ------
    ParallelError
        In ``forward``: if torch.compile cannot compile the network, or would skip a hook or a mode; see the message.

    Examples
    --------
    >>> net = CompiledNetwork(nn.Sequential(nn.Conv3d(1, 2, 3, padding=1), nn.InstanceNorm3d(2), nn.LeakyReLU()))
    >>> sorted(net.state_dict())
    ['0.bias', '0.weight']
    """

    net: nn.Module
    _compiled: "_Compiled"
    _functions: list[Callable[..., Any]]

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        check_network(net)
        # Not a registered child, which would put "net." before every key: the wrapper shares the network's registries.
        object.__setattr__(self, "net", net)
        for name in (PARAMETERS, BUFFERS, MODULES, NOT_PERSISTENT):
            object.__setattr__(self, name, getattr(net, name))
        self.training = net.training
        self._compile()

    def _compile(self) -> None:
        """Let the next call compile the network, or compile it again."""
        object.__setattr__(self, "_functions", self._list_functions())
        object.__setattr__(self, "_compiled", _Compiled(self.net))

    def _list_functions(self) -> list[Callable[..., Any]]:
        """List the ``forward`` functions of the modules, from their classes or set on the modules themselves."""
        return [getattr(module.forward, "__func__", module.forward) for module in self.net.modules()]

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of the network; an attribute that every module has is set on the wrapper."""
        own = name in REGISTRIES or name == "training" or hasattr(nn.Module, name)
        (super().__setattr__ if own else partial(setattr, self.net))(name, value)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the network."""
        return super().__getattr__(name) if name in ("net", *REGISTRIES) else getattr(self.net, name)

    @left_out_of_compilation
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the network."""
        if not (self.training and torch.is_grad_enabled()):
            return self.net(*args, **kwargs)
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        self._require_ordinary(given)
        if self._list_functions() != self._functions:  # torch.compile does not notice a changed class
            self._compile()
        if has_torch_function(given):
            # Modes over torch's functions see one function. If the modes were active inside it, torch.compile would
            # treat that as a new situation and recompile.
            return handle_torch_function(self.run_compiled, given, *args, **kwargs)
        return self.run_compiled(*args, **kwargs)

    @opaque
    def run_compiled(self, *args: Any, **kwargs: Any) -> Any:
        """Run the training pass; compile it first for a new kind of call.

        Raises
        ------
        ParallelError
            If the network cannot be compiled.
        """
        pieces, count, breaks = self.pieces, self.pieces.count, compiler_internals.count_breaks()
        device = next((tensor.device for tensor in (*self.net.parameters(), *self.net.buffers())), torch.device("cpu"))
        with (
            refusing(type(self.net).__name__),
            without_cached_casts(),
            compiler_internals.never_running_plain(MOST_VARIANTS),
            # A recording holds only kernels of code that was compiled before.
            torch.compiler.set_stance("fail_on_recompile") if is_recording(device) else nullcontext(),
        ):
            result = self._compiled(*args, **kwargs)
        if not pieces.count:
            raise ParallelError(
                f"torch.compile found nothing to compile in {type(self.net).__name__}, and ran the plain network (is "
                f"TORCHDYNAMO_DISABLE or TORCH_COMPILE_DISABLE set?); {INSTEAD}"
            )
        if pieces.count > count:
            self._tell(compiler_internals.count_breaks() - breaks)
        return result

    def _tell(self, breaks: Counter[str]) -> None:
        """Log a compilation, and the first graph break."""
        name, pieces = type(self.net).__name__, self.pieces
        logger.info("torch.compile has compiled %s, %d graph(s) so far", name, pieces.count)
        if breaks and not pieces.breaks:
            first = next(iter(breaks)).strip().partition("\n")[0]
            logger.warning(
                "torch.compile splits %s into graphs with Python between them, for %d reason(s); the first: %s",
                *(name, len(breaks), first),
            )
        pieces.breaks += len(breaks)

    def explain_replicas(self) -> str | None:
        """Return why replicas cannot share the compiled code, as the end of a sentence; None if they can.

        A norm over the samples of all replicas replaces torch's function at the call, and a graph makes no such call.
        """
        if self.pieces.norms:
            return f"compiled {', '.join(sorted(self.pieces.norms))} would use only the samples of one replica"
        if self.pieces.breaks:
            return "it is compiled in pieces, and a norm between them would use only the samples of one replica"
        return None

    @property
    def pieces(self) -> _Pieces:
        """Result of the compilation so far."""
        return self._compiled.pieces

    def train(self, mode: bool = True) -> "CompiledNetwork":
        """Set the mode of the network and of the wrapper."""
        self.net.train(mode)
        self.training = mode
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the network's state under its own keys."""
        return self.net.state_dict(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> "CompiledNetwork":
        copied = CompiledNetwork(copy.deepcopy(self.net, memo))
        memo[id(self)] = copied
        return copied

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the network, which is compiled again after loading."""
        return CompiledNetwork, (self.net,)

    def extra_repr(self) -> str:
        """Name the network."""
        return type(self.net).__name__

    def _require_ordinary(self, given: Sequence[Tensor]) -> None:
        """Raise if torch.compile would skip a hook or mode, or silently run the plain network."""
        name = type(self.net).__name__
        refuse_forward_mode(f"a compiled {name}")
        strange = [type(tensor).__name__ for tensor in given if type(tensor) not in (Tensor, nn.Parameter)]
        hooked = next((path for path, part in self.net.named_modules() if any(getattr(part, k) for k in HOOKS)), None)
        reason = None
        if strange or not all(has_values(tensor.device) for tensor in given):
            reason = f"an argument {'is of type ' + strange[0] if strange else 'has no values'}; pass plain tensors"
        elif count_dispatch_modes() or find_transform() is not None:
            reason = "a TorchDispatchMode or a transform of torch.func is active; call it outside"
        elif any(HOOKS_OF_ALL_MODULES) or hooked is not None:
            where = "every module" if hooked is None else repr(hooked) if hooked else "the network"
            reason = f"{where} has a hook; remove it, or register it on the module that wraps the network"
        if reason is not None:
            raise ParallelError(f"torch.compile cannot run {name}: {reason}, or {INSTEAD}")


def _make_call(net: nn.Module) -> Callable[..., Any]:
    """Return a function that calls the network, with its own code object: variants are counted per code object."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return net(*args, **kwargs)

    return FunctionType(call.__code__.replace(), call.__globals__, call.__name__, call.__defaults__, call.__closure__)


class _HandedOn(torch.autograd.Function):
    """Return a graph's outputs unchanged, as the outputs of one autograd node."""

    @staticmethod
    def forward(ctx: Any, *outputs: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple([output.view_as(output) for output in outputs])

    @staticmethod
    def backward(_: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return gradients


def _require_all(result: Any) -> Any:
    """Return a graph's outputs; require the backward pass to use all of them."""
    leaves, structure = tree_flatten(result)
    found = {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.grad_fn is not None}
    if len(found) < 2:
        return result
    if len({output.grad_fn for output in found.values()}) > 1:  # views of one another, which torch creates afterwards
        found = dict(zip(found, _HandedOn.apply(*found.values()), strict=True))
    outputs = list(found.values())
    node: Any = outputs[0].grad_fn
    node.register_prehook(partial(_require_gradients, [output.output_nr for output in outputs]))
    return tree_unflatten([found.get(id(leaf), leaf) for leaf in leaves], structure)


def _require_gradients(numbers: Sequence[int], gradients: Sequence[Tensor | None]) -> None:
    """Refuse a backward pass that skips some outputs of a node."""
    if missing := [place for place, number in enumerate(numbers) if gradients[number] is None]:
        raise ParallelError(
            f"backward() does not reach outputs {missing} (counted from 0) of the {len(numbers)} of a compiled network "
            "(or of a piece of it, with tensors that it stores as attributes): parameters that only these outputs need "
            "would get zeros instead of no gradient, and an optimizer would apply weight decay to them; use every "
            "output in the loss of one backward(), or run the plain network (in a config training.kernels: torch)"
        )


@contextmanager
def refusing(name: str) -> Iterator[None]:
    """Raise torch.compile's errors in this block, forward or backward, as a `ParallelError` with the network's name."""
    try:
        yield
    except compiler_internals.compile_errors() as fault:
        inner = getattr(fault, "inner_exception", fault)  # raised by a backend
        said = next((line.strip() for line in str(inner).splitlines() if line.strip()), type(inner).__name__)
        if "recompile_limit" in str(fault):
            said = f"more than {MOST_VARIANTS} variants were needed: a value that the network reads keeps changing"
        raise ParallelError(
            f"torch.compile cannot compile {name} ({type(fault).__name__}: {said}); {INSTEAD}"
        ) from fault
