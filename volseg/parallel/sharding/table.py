"""The operator table: which torch function is run on slabs, and how.

Handlers register themselves with ``@handles(...)``. A handler gets the function as it was called and returns what the
function would. The documentation's table is printed from here (``documented``), so it cannot disagree with the code.
"""

import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import SUPPORTED_NODES, tree_flatten, tree_map

from volseg.errors import UnsupportedOperatorError
from volseg.parallel.sharding.volume import ShardedVolume, from_whole

__all__ = ["dispatch", "documented", "handles", "nested", "volumes"]

Handler = Callable[[Callable, tuple, dict[str, Any]], Any]

NAMESPACES: dict[str, Any] = {
    "torch": torch,
    "Tensor": Tensor,
    "F": F,
    "special": torch.special,
    "nn": torch._C._nn,
    "linalg": torch.linalg,
}


@dataclass(frozen=True, slots=True)
class Entry:
    """One function of the table."""

    name: str
    family: str
    handler: Handler


TABLE: dict[Any, Entry] = {}


def handles(family: str, *names: str) -> Callable[[Handler], Handler]:
    """Register a handler for every function of these names, in any namespace of torch that has it.

    A name is bare (``"relu"``: ``torch.relu``, ``Tensor.relu`` and ``F.relu``) or qualified (``"F.relu"``).
    """

    def register(handler: Handler) -> Handler:
        for name in names:
            for label, function in _find(name):
                TABLE.setdefault(function, Entry(label, family, handler))
        return handler

    return register


def _find(name: str) -> Iterator[tuple[str, Any]]:
    wanted, _, bare = name.rpartition(".")
    for space, holder in NAMESPACES.items():
        function = getattr(holder, bare, None) if wanted in ("", space) else None
        if function is None:
            continue
        # A property of Tensor is looked up by its getter.
        function = function.__get__ if isinstance(function, types.GetSetDescriptorType | property) else function
        label = f"torch.{bare}" if space in ("torch", "nn") else f"{space}.{bare}"
        yield label, function


def documented() -> dict[str, list[str]]:
    """Return the names of the supported functions by family."""
    families: dict[str, set[str]] = {}
    for entry in TABLE.values():
        families.setdefault(entry.family, set()).add(entry.name)
    return {family: sorted(names) for family, names in families.items()}


def volumes(arguments: Any) -> list[ShardedVolume]:
    """Return the sharded volumes in nested arguments."""
    return [leaf for leaf in tree_flatten(arguments)[0] if isinstance(leaf, ShardedVolume)]


def nested(value: Any) -> bool:
    """Say whether a value may hold tensors; ``tree_flatten`` takes many times as long to find none."""
    holds = type(value) in SUPPORTED_NODES or isinstance(value, tuple)
    return holds and (isinstance(value, dict) or set(map(type, value)) != {int})


PLAIN = frozenset({int, float, bool, str, type(None), Tensor, nn.Parameter, torch.dtype, torch.device})
"""Most arguments of most functions: told by one look at the type."""


def _given(args: tuple, kwargs: dict[str, Any]) -> list[ShardedVolume]:
    found: list[ShardedVolume] = []
    for value in (*args, *kwargs.values()) if kwargs else args:
        if type(value) in PLAIN:
            continue
        if isinstance(value, ShardedVolume):
            found.append(value)
        elif nested(value):
            found += volumes(value)
    return found


HISTORY: Any = Tensor.grad_fn
"""The property itself: asked of the shell, where ``volume.grad_fn`` would go through the table."""


def dispatch(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run a torch function that met a sharded volume."""
    entry = TABLE.get(func)
    with torch._C.DisableTorchFunctionSubclass():
        for volume in _given(args, kwargs):
            if HISTORY.__get__(volume) is not None:
                raise UnsupportedOperatorError(
                    f"{volume.context.module_path()} passed a sharded volume through a custom autograd.Function "
                    f"({HISTORY.__get__(volume)}), whose backward would not see the slabs; write it with torch "
                    f"functions, or use torch.utils.checkpoint with use_reentrant=False"
                )
        if entry is None:
            return unsupported(func, args, kwargs, "it has no sharded form")
        return entry.handler(func, args, kwargs)


def name_of(func: Callable) -> str:
    """Return a function's name as a user would write it."""
    name = str(getattr(func, "__qualname__", None) or getattr(func, "__name__", repr(func)))
    owner = getattr(func, "__self__", None)
    if name == "__get__" and owner is not None:
        return f"Tensor.{owner.__name__}"
    return name.removeprefix("_VariableFunctionsClass.").replace("TensorBase.", "Tensor.")


def unsupported(func: Callable, args: tuple, kwargs: dict[str, Any], reason: str) -> Any:
    """Raise, or run the function on gathered tensors where the user asked for that."""
    given = volumes((args, kwargs))
    context = given[0].context
    where = context.module_path()
    if context.on_unsupported != "gather":
        shapes = ", ".join(str(tuple(volume.shape)) for volume in given)
        raise UnsupportedOperatorError(
            f"{name_of(func)} called from {where} cannot run on a sharded volume (shape {shapes}, cut along dim "
            f"{', '.join(map(str, given[0].dims))}): {reason}. Write it with the functions listed in docs/spatial.md, "
            f"or pass on_unsupported='gather' to ModelParallel to run it on the whole volume"
        )
    context.say_once(
        f"{name_of(func)} called from {where} has no sharded form ({reason}) and runs on the gathered volume"
    )
    return run_gathered(func, args, kwargs)


def run_gathered(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run a function on whole tensors, and cut what has the volume's grid again."""
    given = volumes((args, kwargs))[0]
    whole_args, whole_kwargs = tree_map(
        lambda leaf: leaf.full_tensor() if isinstance(leaf, ShardedVolume) else leaf, (args, kwargs)
    )
    result = func(*whole_args, **whole_kwargs)

    def cut_again(leaf: Any) -> Any:
        fits = isinstance(leaf, Tensor) and leaf.ndim == given.ndim
        if fits and all(leaf.shape[dim] == size for dim, size in zip(given.dims, given.sizes, strict=True)):
            return from_whole(leaf, given.dims, given.context)
        return leaf

    return tree_map(cut_again, result)
