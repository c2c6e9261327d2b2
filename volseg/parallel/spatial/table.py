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

``dispatch`` takes a call through them; here is what is registered.

The documentation's table is printed from here (``documented``), so it cannot disagree with the code.
"""

import inspect
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from volseg.device.torch_internals import nn_functions
from volseg.parallel.spatial.signatures import returns_view

__all__ = ["composes", "documented", "handles", "handles_samples", "refuse", "refuse_if", "sharded_form"]

Handler = Callable[..., Any]

NAMESPACES: dict[str, Any] = {
    "torch": torch,
    "Tensor": Tensor,
    "F": F,
    "special": torch.special,
    "nn": nn_functions,
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
    family
        Where the documentation lists it; None for functions that are not torch's.
    treated
        The arguments that the handler treats; None for all of them.
    filled
        Whether it gets them as one value, with torch's defaults (see ``signatures.fill``).
    composed
        Whether it is written with other functions, each of which meets the table by itself.
    rehearsed
        Whether the call is rehearsed on shapes: not where the handler compares sizes itself, or none are to compare.
    broadcasts
        Whether shapes that are equal are right, and the result has them too.
    views
        Whether torch may return a view of an argument.
    perhaps
        Whether that depends on how the argument lies in memory.
    merged
        Whether the handler honours a cut dim that was merged with its neighbours (see ``plan.shards.Merged``). Any
        other one gets the volume in planes, or not at all.
    rounded
        Whether it reads an upsampled volume in the type that its slabs have, where torch has float32. Any other one
        gets it in float32.
    """

    name: str
    family: str | None
    handler: Handler
    treated: frozenset[str] | None = None
    rehearsed: bool = False
    broadcasts: bool = False
    views: bool = False
    perhaps: bool = False
    merged: bool = False
    rounded: bool = False
    filled: bool = False
    composed: bool = False


class Refusal(Exception):  # noqa: N818  (never reaches a user)
    """What a handler cannot do on slabs."""


def refuse(reason: str) -> NoReturn:
    """End a handler: the call cannot be run on slabs, for this reason."""
    raise Refusal(reason)


def refuse_if(stands_against: object, reason: str) -> None:
    """End a handler where something stands against the call: it cannot be run on slabs, for this reason."""
    if stands_against:
        refuse(reason)


TABLE: dict[Any, Entry] = {}

BY_SAMPLE: dict[Any, Handler] = {}
"""Forms of entries for volumes that are cut along dim 0, whose samples are computed each by itself."""


def handles(
    family: str,
    *names: str,
    rehearse: bool = True,
    broadcasts: bool = False,
    merged: bool = False,
    rounded: bool = False,
    treats: str = "",
) -> Callable[[Handler], Handler]:
    """Register a handler for every function of these names, in any namespace of torch that has it.

    A name is bare (``"relu"``: ``torch.relu``, ``Tensor.relu`` and ``F.relu``) or qualified (``"F.relu"``). A handler
    is ``merged`` if it touches the cut only by zipping slabs, by ``aligned`` or by ``wrap``, or asks the volume for
    what it owns.

    ``treats`` names the arguments of a handler that gets them as one value, with torch's own defaults.

    ``rounded``, it reads an upsampled volume in the type that its slabs have, where torch has float32 under autocast:
    convolutions, which autocast has in that type anyway; what stands between an upsampling and its convolution in a
    decoder (norms, the join or the sum with a skip), whose results are rounded once more than torch's; and what asks
    for no value.
    """

    def register(handler: Handler) -> Handler:
        parameters = tuple(inspect.signature(handler).parameters)
        treated = None if parameters == WHOLE_CALL else frozenset(treats.split() or parameters) - {"func"}
        for label, function in _found(names):
            bare = label.rpartition(".")[2]
            perhaps = bare in PERHAPS_VIEWS
            views = perhaps or bare in VIEWS or returns_view(function)
            TABLE[function] = Entry(
                label, family, handler, treated, rehearse, broadcasts, views, perhaps, merged, rounded, bool(treats)
            )
        return handler

    return register


def sharded_form(function: Callable) -> Callable[[Handler], Handler]:
    """Register what runs in the place of a function of one's own where one of its arguments is a sharded volume.

    The handler gets ``(function, args, kwargs)`` as they come. The function must ask for it, as torch's own do:
    ``torch.overrides.handle_torch_function(function, tensors, *args, **kwargs)``.

    Raises
    ------
    ValueError
        If the function has a form already.
    """

    def register(handler: Handler) -> Handler:
        _check_unknown(function, function.__qualname__)
        TABLE[function] = Entry(function.__qualname__, None, handler)
        return handler

    return register


def handles_samples(*names: str) -> Callable[[Handler], Handler]:
    """Register the form of entries for volumes that are cut along dim 0; it takes the entry's arguments by name."""

    def register(handler: Handler) -> Handler:
        forms = {function: handler for name in names for _, function in _find(name) if function in TABLE}
        twice = forms.keys() & BY_SAMPLE.keys()
        if twice:
            labels = ", ".join(sorted(TABLE[function].name for function in twice))
            raise ValueError(f"{labels} has a form for cut samples already; register it once")
        BY_SAMPLE.update(forms)
        return handler

    return register


def composes(family: str, *names: str) -> Callable[[Handler], Handler]:
    """Register a function that is written with others; it is called with torch's own arguments."""

    def register(handler: Handler) -> Handler:
        for label, function in _found(names):
            TABLE[function] = Entry(label, family, handler, composed=True)
        return handler

    return register


def _check_unknown(function: Callable, label: str) -> None:
    """Refuse a second registration: one of the two would be dead, and nobody could tell which."""
    known = TABLE.get(function)
    if known is not None:
        raise ValueError(f"{label} is handled by {known.handler.__name__} already; register it once")


def _found(names: Sequence[str]) -> list[tuple[str, Any]]:
    """Return the functions of these names that nobody handles yet; torch may know one by several of the names."""
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ValueError(f"{', '.join(sorted(twice))} stands in one registration twice; name it once")
    found = [each for name in names for each in _find(name)]
    for label, function in found:
        _check_unknown(function, label)
    return found


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
    """Return the names of torch's supported functions by family."""
    families: dict[str, set[str]] = {}
    for entry in TABLE.values():
        if entry.family is not None:
            families.setdefault(entry.family, set()).add(entry.name)
    return {family: sorted(names) for family, names in families.items()}
