"""The operator table: which torch function is run on slabs, and how; nothing else is run at all.

Handlers register themselves with ``@handles(...)``. A call reaches its handler in four steps, each of which refuses
what it does not know:

1. The function must have an entry.
2. Its arguments are bound to torch's own signature (see ``signatures``). The handler's parameters say which of them
   it treats: any other one must have torch's default. A handler with the parameters ``(func, args, kwargs)`` hands
   them all to the function itself, slab by slab.
3. The call is rehearsed on shapes alone (see ``contract``): what torch refuses is refused, and the result must have
   torch's shapes and dtypes.
4. Where torch returns a view and slabs had to be copied, the result may not be changed in place (see ``copied_view``).

The documentation's table is printed from here (``documented``), so it cannot disagree with the code.
"""

import inspect
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import SUPPORTED_NODES, tree_flatten, tree_map

from volseg.errors import UnsupportedOperatorError
from volseg.parallel.sharding.contract import Outline, check, rehearsed
from volseg.parallel.sharding.copied_view import Origin, mark_copies
from volseg.parallel.sharding.signatures import NOTHING, bind, defaults_of, returns_view
from volseg.parallel.sharding.volume import ShardedVolume, from_whole, relaid

__all__ = [
    "Copied",
    "check_history",
    "composes",
    "dispatch",
    "documented",
    "handles",
    "handles_samples",
    "honour_merged",
    "in_planes",
    "nested",
    "refuse",
    "volumes",
]

Handler = Callable[..., Any]

NAMESPACES: dict[str, Any] = {
    "torch": torch,
    "Tensor": Tensor,
    "F": F,
    "special": torch.special,
    "nn": torch._C._nn,
    "linalg": torch.linalg,
    "autograd": torch.autograd,
}

VIEWS = frozenset({"split", "unbind", "__iter__", "unflatten", "T", "mT", "H", "mH", "real", "imag"})
"""What returns views besides the operators whose schemas say so."""

PERHAPS_VIEWS = frozenset({"contiguous", "reshape", "reshape_as", "flatten", "ravel", "data"})
"""What returns a view or a copy as memory happens to lie, which on slabs may be otherwise; and ``data``, whose changes
nobody can see."""

WHOLE_CALL = ("func", "args", "kwargs")


@dataclass(frozen=True, slots=True)
class Entry:
    """One function of the table.

    Attributes
    ----------
    treated
        The arguments that the handler treats; None for all of them.
    rehearsed
        Whether the call is rehearsed on shapes: not where the handler compares sizes itself, or none are to compare.
    broadcasts
        Whether shapes that are equal are right, and the result has them too.
    views
        Whether torch may return a view of an argument.
    perhaps
        Whether that depends on how the argument lies in memory.
    merged
        Whether the handler honours a cut dim that was merged with its neighbours (see ``layout.Merged``). Any other
        one gets the volume in planes, or not at all.
    """

    name: str
    family: str
    handler: Handler
    treated: frozenset[str] | None
    rehearsed: bool
    broadcasts: bool
    views: bool
    perhaps: bool
    merged: bool = False


class Refusal(Exception):  # noqa: N818  (never reaches a user)
    """What a handler cannot do on slabs."""


def refuse(reason: str) -> NoReturn:
    """End a handler: the call cannot be run on slabs, for this reason."""
    raise Refusal(reason)


TABLE: dict[Any, Entry] = {}

BY_SAMPLE: dict[Any, Handler] = {}
"""Forms of entries for volumes that are cut along dim 0, whose samples are computed each by itself."""


@dataclass(frozen=True, slots=True)
class Composite:
    """A function that is written with others, each of which meets the table by itself."""

    name: str
    family: str
    handler: Handler


COMPOSITES: dict[Any, Composite] = {}


def handles(family: str, *names: str, rehearse: bool = True, broadcasts: bool = False) -> Callable[[Handler], Handler]:
    """Register a handler for every function of these names, in any namespace of torch that has it.

    A name is bare (``"relu"``: ``torch.relu``, ``Tensor.relu`` and ``F.relu``) or qualified (``"F.relu"``).
    """

    def register(handler: Handler) -> Handler:
        parameters = tuple(inspect.signature(handler).parameters)
        treated = None if parameters == WHOLE_CALL else frozenset(parameters) - {"func"}
        for name in names:
            for label, function in _find(name):
                known = TABLE.get(function)
                if known is not None and known.handler is not handler:
                    raise ValueError(f"{label} is handled by {known.handler.__name__} already")
                bare = name.rpartition(".")[2]
                perhaps = bare in PERHAPS_VIEWS
                views = perhaps or bare in VIEWS or returns_view(function)
                TABLE[function] = Entry(label, family, handler, treated, rehearse, broadcasts, views, perhaps)
        return handler

    return register


def handles_samples(*names: str) -> Callable[[Handler], Handler]:
    """Register the form of entries for volumes that are cut along dim 0; it takes the entry's arguments by name."""

    def register(handler: Handler) -> Handler:
        for name in names:
            BY_SAMPLE.update((function, handler) for _, function in _find(name) if function in TABLE)
        return handler

    return register


def composes(family: str, *names: str) -> Callable[[Handler], Handler]:
    """Register a function that is written with others; it is called with torch's own arguments."""

    def register(handler: Handler) -> Handler:
        for name in names:
            for label, function in _find(name):
                if function in TABLE or function in COMPOSITES:
                    raise ValueError(f"{label} is handled already")
                COMPOSITES[function] = Composite(label, family, handler)
        return handler

    return register


def honour_merged(*handlers: Handler) -> None:
    """Declare that these handlers honour a cut dim that was merged with its neighbours."""
    for function, entry in TABLE.items():
        if entry.handler in handlers:
            TABLE[function] = replace(entry, merged=True)


def in_planes(volume: ShardedVolume) -> ShardedVolume:
    """Return the volume with its entries balanced over the shards, as operators that look at planes want it."""
    if volume.merged is None:
        return volume
    if volume.merged.outer > 1:
        refuse("its cut dim was merged with dims in front, so that no shard holds one range of it: do this before that")
    moved = relaid(volume, None)
    # A copy: who changes it in place is refused.
    moved.origin = Origin(volume.slabs, moved.slabs, [volume.origin] if volume.origin is not None else [])
    return moved


def _in_planes(leaf: Any) -> Any:
    return in_planes(leaf) if isinstance(leaf, ShardedVolume) else leaf


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
    listed: list[Entry | Composite] = [*TABLE.values(), *COMPOSITES.values()]
    for entry in listed:
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


SCRIPTED = "TorchScript does not see the slabs; take the module as it is without torch.jit"

HISTORY: Any = Tensor.grad_fn
"""The property itself: asked of the shell, where ``volume.grad_fn`` would go through the table."""


def dispatch(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run a torch function that met a sharded volume."""
    entry = TABLE.get(func)
    if entry is None and func in COMPOSITES:
        try:
            handler = COMPOSITES[func].handler
            python = isinstance(func, types.FunctionType)
            return handler(*args, **kwargs) if python else handler(**bind(func, args, kwargs))
        except Refusal as refusal:
            reason = str(refusal)
        with torch._C.DisableTorchFunctionSubclass():
            return unsupported(func, args, kwargs, reason)
    with torch._C.DisableTorchFunctionSubclass():
        given = _given(args, kwargs)
        merged = by_sample = False
        for volume in given:
            merged = merged or volume.merged is not None
            by_sample = by_sample or volume.dims[0] == 0
            if HISTORY.__get__(volume) is not None:
                _refuse_custom(volume)
            if volume.origin is not None:
                volume.origin.check()
        if entry is None:
            scripted = isinstance(func, torch._C.ScriptMethod)
            return unsupported(func, args, kwargs, SCRIPTED if scripted else "it has no sharded form")
        try:
            handler = entry.handler
            if kwargs and kwargs.get("out") is not None:
                refuse("it has no out= on slabs: use the result")
            if by_sample and func in BY_SAMPLE and len(given) == 1 and _is_by_sample(given[0], args):
                handler = BY_SAMPLE[func]
            elif merged and not entry.merged:
                args, kwargs = tree_map(_in_planes, (args, kwargs))
                given = _given(args, kwargs)
            unknown = entry.rehearsed and given and not (entry.broadcasts and _of_one_shape(args, kwargs))
            expected = rehearsed(func, args, kwargs, given[0]) if unknown else None
            if entry.treated is None:
                result = handler(func, args, kwargs)
            else:
                named = _treated(entry, func, args, kwargs)
                if handler is not entry.handler and named.get("input") is not given[0]:
                    refuse("its input is not sharded")
                result = handler(func, **named)
        except Refusal as refusal:
            reason = str(refusal)
        else:
            return _checked(entry, func, result, expected, given)
        return unsupported(func, args, kwargs, reason)


def _is_by_sample(volume: ShardedVolume, args: tuple) -> bool:
    """Say whether a volume is a function's input, and cut along its samples."""
    return len(volume.dims) == 1 and bool(args) and args[0] is volume


def _of_one_shape(args: tuple, kwargs: dict[str, Any]) -> bool:
    """Say whether all tensors have one shape: then there is nothing to rehearse for a function that broadcasts."""
    shape = None
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, Tensor):
            if shape is None:
                shape = value.shape
            elif value.shape != shape:
                return False
        elif nested(value):
            return False
    return True


@dataclass(frozen=True, slots=True)
class Copied:
    """The result of a function that returns views, where torch copies as well."""

    value: Any


def check_history(volume: ShardedVolume) -> None:
    """Refuse a volume that came through a custom function, before its slabs are read past the table."""
    with torch._C.DisableTorchFunctionSubclass():
        if HISTORY.__get__(volume) is not None:
            _refuse_custom(volume)


def _refuse_custom(volume: ShardedVolume) -> NoReturn:
    node = HISTORY.__get__(volume)
    if node.name() == "BackwardHookFunctionBackward":
        raise UnsupportedOperatorError(
            f"{volume.context.module_path()} got a volume through a module with a full backward hook, which is a "
            f"custom autograd.Function and would not see the slabs; use a forward hook that calls "
            f"output.register_hook(...)"
        )
    raise UnsupportedOperatorError(
        f"{volume.context.module_path()} passed a sharded volume through a custom autograd.Function ({node}), whose "
        f"backward would not see the slabs; if it is pointwise, say so by volseg.parallel.pointwise_function(...), "
        f"else write it with torch functions; of torch.utils.checkpoint take use_reentrant=False"
    )


def _checked(
    entry: Entry, func: Callable, result: Any, expected: list[Outline] | None, given: list[ShardedVolume]
) -> Any:
    """Return the result, if it is what torch returns, and marked where it is a copy of what is a view there."""
    if expected is not None:
        check(func, result.value if type(result) is Copied else result, expected)
    if type(result) is Copied:
        result = result.value
    elif entry.views:
        result = mark_copies(result, given, entry.perhaps)
    for volume in given:
        if volume.origin is not None:
            volume.origin.check_unchanged(volume)
        if volume.merged is not None:
            _check_layouts(func, result)
    return result


def _check_layouts(func: Callable, result: Any) -> None:
    """Refuse slabs that are not those of the volume's layout: a mistake of ours must not pass for a number."""
    for volume in volumes(result):
        grid = zip(volume.slabs, volume.context.communicator.coordinates, strict=True)
        for slab, coordinates in grid:
            for dim, extents, position in zip(volume.dims, volume.extents(), coordinates, strict=True):
                if slab.shape[dim] != extents[position]:
                    raise UnsupportedOperatorError(
                        f"the sharded form of {name_of(func)} lost how the cut dim {dim} was merged with its "
                        f"neighbours: a mistake in volseg; please report it, and use strategy='pipeline' for now"
                    )


def _treated(entry: Entry, func: Callable, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments by name; refuse any that the handler does not know, unless it is torch's default."""
    named = bind(func, args, kwargs)
    treated = entry.treated or frozenset()
    if named.keys() <= treated:
        return named
    defaults = defaults_of(func, args, kwargs)
    for name in named.keys() - treated:
        default = defaults.get(name, NOTHING)
        value = named.pop(name)
        if value is not default and (isinstance(value, Tensor) or value != default):
            refuse(f"its argument {name}= is not supported on slabs")
    return named


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
    """Run a function on whole tensors, and cut what has the volume's grid again.

    Raises
    ------
    UnsupportedOperatorError
        If the function changes a gathered volume, or returns something else than values: its effect would be on the
        copy, and be lost.
    """
    given = volumes((args, kwargs))
    gathered = {id(volume): volume.full_tensor() for volume in given}
    versions = [whole._version for whole in gathered.values()]
    whole_args, whole_kwargs = tree_map(
        lambda leaf: gathered[id(leaf)] if isinstance(leaf, ShardedVolume) else leaf, (args, kwargs)
    )
    result = func(*whole_args, **whole_kwargs)
    leaves = tree_flatten(result)[0]
    writes_elsewhere = (
        result is None and args and isinstance(args[0], Tensor) and not isinstance(args[0], ShardedVolume)
    )
    if [whole._version for whole in gathered.values()] != versions:
        lost = "changes a volume in place"
    elif any(leaf is whole for leaf in leaves for whole in gathered.values()):
        lost = "changes a property of the volume"
    elif not writes_elsewhere and not all(isinstance(leaf, Tensor | int | float | complex | str) for leaf in leaves):
        lost = f"returns {type(result).__name__}"
    else:
        memory = {whole.untyped_storage().data_ptr() for whole in gathered.values()}
        views = any(isinstance(leaf, Tensor) and leaf.untyped_storage().data_ptr() in memory for leaf in leaves)
        # An ordinary tensor that took in a volume stays what and where it is.
        own = {id(leaf) for leaf in tree_flatten((args, kwargs))[0]}
        result = tree_map(lambda leaf: leaf if id(leaf) in own else _cut_again(leaf, given[0]), result)
        return mark_copies(result, given, perhaps=True) if views else result
    raise UnsupportedOperatorError(
        f"{name_of(func)} called from {given[0].context.module_path()} {lost}: on a gathered copy of it that would be "
        f"lost. Write it out of place, with the functions listed in docs/spatial.md"
    )


def _cut_again(leaf: Any, like: ShardedVolume) -> Any:
    fits = isinstance(leaf, Tensor) and leaf.ndim == like.ndim
    if fits and all(leaf.shape[dim] == size for dim, size in zip(like.dims, like.sizes, strict=True)):
        return from_whole(leaf, like.dims, like.context)
    return leaf
