"""``CompiledNetwork``: the training pass of a network as torch.compile makes it, under the network's own names.

Kernels of ours win where they have a form for what a network does. Where they have none, or cannot win, the compiler
may, and a step of compiled kernels is recorded as any other: inductor makes no CUDA graphs of its own here, and the
steps that warm a recording up are those in which it compiles.

torch.compile runs the plain network where it cannot compile, and says little. Here that is an error: a fault of the
compiler, too many variants, hooks that it would skip, modes under which it gives up. A network that is compiled in
pieces, with Python between them, is told of once.
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
from volseg.device.gpus import has_values
from volseg.device.graph import without_cached_casts
from volseg.device.module_internals import (
    BUFFERS,
    HOOKS_OF_ALL_MODULES,
    MODULES,
    NOT_PERSISTENT,
    PARAMETERS,
    get_backward_hooks,
    get_backward_pre_hooks,
    get_forward_hooks,
    get_forward_pre_hooks,
)
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
from volseg.parallel.norms import find_norm_of_batch
from volseg.parallel.state.module import REGISTRIES
from volseg.parallel.state.opaque import opaque

__all__ = ["MOST_VARIANTS", "CompiledNetwork", "refusing"]

logger = logging.getLogger(__name__)

MOST_VARIANTS = 16
"""Kinds of calls (shapes, layouts, modes) that a network is compiled for; one that comes to more changes each time."""


@dataclass
class _Pieces:
    """The graphs that a network came to; it holds neither them nor the network, as the compiler keeps it for ever."""

    count: int = 0
    """Graphs."""
    breaks: int = 0
    """Reasons for which graphs ended before their function did."""
    norms: set[str] = field(default_factory=set)
    """Functions in them that look at all samples of a batch, or move running statistics."""

    def __call__(self, graph: fx.GraphModule, inputs: Sequence[Tensor]) -> Callable[..., Any]:
        """Compile a graph."""
        self.count += 1
        for part in graph.modules():
            if isinstance(part, fx.GraphModule):
                found = (find_norm_of_batch(node.target, node.args, node.kwargs) for node in part.graph.nodes)
                self.norms.update(name for name in found if name is not None)
        compiled = compiler_internals.compile_graph(graph, inputs)

        def run(*inputs: Any) -> Any:
            return _require_all(compiled(*inputs))

        return run


class _Compiled(nn.Module):
    """The network's call, compiled; a module, as recordings look into what a module holds, but not into modules."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.pieces = _Pieces()
        self.call = torch.compile(_make_call(net), backend=self.pieces, dynamic=False)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call it."""
        return self.call(*args, **kwargs)


class CompiledNetwork(nn.Module):
    """Run a network's training pass as torch.compile makes it; in evaluation or without gradients as it is.

    Whole volumes of a validation differ in shape, and each shape would be compiled for a minute. Parameters, buffers
    and children are the network's own under their own names, so its ``state_dict`` is the network's.

    Dropout draws other masks than the plain network's from the same seed. Results agree up to round-off otherwise, as
    a chain of pointwise functions is not rounded to 16 bits on its way.

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
        """Let the network be compiled, anew if it was, when it is called."""
        object.__setattr__(self, "_functions", self._list_functions())
        object.__setattr__(self, "_compiled", _Compiled(self.net))

    def _list_functions(self) -> list[Callable[..., Any]]:
        """Return what the modules run, by their class or by themselves."""
        return [getattr(module.forward, "__func__", module.forward) for module in self.net.modules()]

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of the network, which is what reads it; what every module has is the wrapper's own."""
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
        if self._list_functions() != self._functions:  # torch.compile does not look whether a class has another one
            self._compile()
        if has_torch_function(given):
            # Modes that look at functions of torch see one function. Were they there inside of it, torch.compile would
            # take that for another situation than before, and compile anew.
            return handle_torch_function(self.run_compiled, given, *args, **kwargs)
        return self.run_compiled(*args, **kwargs)

    @opaque
    def run_compiled(self, *args: Any, **kwargs: Any) -> Any:
        """Run the training pass; compile it first, if no call was like this one.

        Raises
        ------
        ParallelError
            If it cannot be compiled.
        """
        pieces, count, breaks = self.pieces, self.pieces.count, compiler_internals.count_breaks()
        device = next((tensor.device for tensor in (*self.net.parameters(), *self.net.buffers())), torch.device("cpu"))
        with (
            refusing(type(self.net).__name__),
            without_cached_casts(),
            compiler_internals.never_running_plain(MOST_VARIANTS),
            _compiling_nothing() if _is_recording(device) else nullcontext(),
        ):
            result = self._compiled(*args, **kwargs)
        if not pieces.count:
            raise ParallelError(
                f"torch.compile found nothing of {type(self.net).__name__} to compile, and ran it as it is (is "
                "TORCHDYNAMO_DISABLE or TORCH_COMPILE_DISABLE set?); run the plain network instead (in a config "
                "training.kernels: torch)"
            )
        if pieces.count > count:
            self._tell(compiler_internals.count_breaks() - breaks)
        return result

    def _tell(self, breaks: Counter[str]) -> None:
        """Say that something was compiled, and where that is in pieces."""
        name, pieces = type(self.net).__name__, self.pieces
        logger.info("torch.compile has compiled %s, %d graph(s) by now", name, pieces.count)
        if breaks and not pieces.breaks:
            first = next(iter(breaks)).strip().partition("\n")[0]
            logger.warning(
                "torch.compile breaks %s up, and Python runs between its kernels, for %d reason(s); the first: %s",
                *(name, len(breaks), first),
            )
        pieces.breaks += len(breaks)

    def explain_replicas(self) -> str | None:
        """Return why replicas cannot share what was compiled, as the end of a sentence; None where they can.

        A norm over the samples of all replicas is put in the place of torch's function when that is called, which a
        graph does not do.
        """
        if self.pieces.norms:
            return f"{', '.join(sorted(self.pieces.norms))} is compiled, and takes the samples of one replica alone"
        if self.pieces.breaks:
            return "it is compiled in pieces, and a norm between them would take the samples of one replica alone"
        return None

    @property
    def pieces(self) -> _Pieces:
        """What it was compiled to so far."""
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
        """Pickle the network, which is compiled anew where it is loaded."""
        return CompiledNetwork, (self.net,)

    def extra_repr(self) -> str:
        """Name the network."""
        return type(self.net).__name__

    def _require_ordinary(self, given: Sequence[Tensor]) -> None:
        """Raise where torch.compile would skip something, or run the plain network without a word."""
        name = type(self.net).__name__
        instead = "run the plain network instead (in a config training.kernels: torch)"
        strange = [type(tensor).__name__ for tensor in given if type(tensor) not in (Tensor, nn.Parameter)]
        if strange or not all(has_values(tensor.device) for tensor in given):
            what = strange[0] if strange else "tensor without values"
            raise ParallelError(f"a compiled {name} takes plain tensors, got a {what}; {instead}")
        if count_dispatch_modes():
            raise ParallelError(
                f"torch.compile compiles nothing under a TorchDispatchMode, and one is active; {instead}"
            )
        refuse_forward_mode(f"a compiled {name}")
        if find_transform() is not None:
            raise ParallelError(f"a compiled {name} was called inside of a transform of torch.func; {instead}")
        of_all = any(HOOKS_OF_ALL_MODULES)
        hooked = next((path for path, module in self.net.named_modules() if _has_hooks(module)), None)
        if of_all or hooked is not None:
            where = "all modules" if of_all else repr(hooked) if hooked else "the network itself"
            raise ParallelError(
                f"{where} of {name} has a hook, which torch.compile skips where it was registered late; remove it, or "
                f"register it on what wraps the network, or {instead}"
            )


def _make_call(net: nn.Module) -> Callable[..., Any]:
    """Return a function that calls the network, with code of its own: variants are counted by code."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return net(*args, **kwargs)

    return FunctionType(call.__code__.replace(), call.__globals__, call.__name__, call.__defaults__, call.__closure__)


class _HandedOn(torch.autograd.Function):
    """Hands a graph's outputs on as they are, from one node."""

    @staticmethod
    def forward(ctx: Any, *outputs: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple([output.view_as(output) for output in outputs])

    @staticmethod
    def backward(_: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return gradients


def _require_all(result: Any) -> Any:
    """Return what a graph returned; the backward pass must use all of it."""
    leaves, structure = tree_flatten(result)
    found = {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.grad_fn is not None}
    if len(found) < 2:
        return result
    if len({output.grad_fn for output in found.values()}) > 1:  # views of one another, which torch makes behind
        found = dict(zip(found, _HandedOn.apply(*found.values()), strict=True))
    outputs = list(found.values())
    node: Any = outputs[0].grad_fn
    node.register_prehook(_Required([output.output_nr for output in outputs]))
    return tree_unflatten([found.get(id(leaf), leaf) for leaf in leaves], structure)


class _Required:
    """Refuses a backward pass that some outputs of a node are no part of."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self._numbers = numbers

    def __call__(self, gradients: Sequence[Tensor | None]) -> None:
        if missing := [place for place, number in enumerate(self._numbers) if gradients[number] is None]:
            raise ParallelError(
                f"backward() does not reach the outputs {missing} (from 0) of the {len(self._numbers)} of a compiled "
                "network (of a piece of it where it is compiled in pieces, and with what it keeps as attributes): "
                "parameters that only they need would get a gradient of zeros where they have none, and an optimizer "
                "would let them decay; let the loss use every output in one backward(), or run the plain network (in a "
                "config training.kernels: torch)"
            )


def _has_hooks(module: nn.Module) -> bool:
    return bool(
        get_forward_hooks(module)
        or get_forward_pre_hooks(module)
        or get_backward_hooks(module)
        or get_backward_pre_hooks(module)
    )


@contextmanager
def refusing(name: str) -> Iterator[None]:
    """Say in a sentence what torch.compile runs into in here with a network of that name, forward or backward."""
    try:
        yield
    except compiler_internals.find_faults() as fault:
        inner = getattr(fault, "inner_exception", fault)  # what a backend has raised
        said = next((line.strip() for line in str(inner).splitlines() if line.strip()), type(inner).__name__)
        if "recompile_limit" in str(fault):
            said = f"more than {MOST_VARIANTS} variants were needed, as something that it reads changes again and again"
        raise ParallelError(
            f"torch.compile cannot compile {name} ({type(fault).__name__}: {said}); run the plain "
            "network instead (in a config training.kernels: torch)"
        ) from fault


def _is_recording(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


@contextmanager
def _compiling_nothing() -> Iterator[None]:
    """Raise in here where something would be compiled: a recording holds the kernels of compiled code, not of that."""
    with torch.compiler.set_stance("fail_on_recompile"):
        yield
