"""Table of the torch functions that run on slabs, with their handlers; other functions do not run.

Handlers register themselves with ``@handles(...)``. A call reaches its handler in four steps, and each step refuses
calls that it does not know:

1. The function must have an entry.
2. Its arguments are bound to torch's own signature (see ``signatures``), and omitted ones get torch's defaults. The
   handler's parameters say which arguments it treats: any other one must have torch's default. A handler with the
   parameters ``(func, args, kwargs)`` passes them all to the function itself, slab by slab.
3. The call is rehearsed on shapes alone (see ``dispatch``): what torch refuses is refused, and the result must have
   torch's shapes and dtypes.
4. Where torch returns a view and slabs had to be copied, the result may not be changed in place (see ``copied_view``).

``dispatch`` takes a call through these steps; this module registers the handlers.

The documentation's table is printed from this module (``documented``), so it always agrees with the code.
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
"""Functions that return views, besides the operators whose schemas say so."""

PERHAPS_VIEWS = frozenset({"contiguous", "reshape", "reshape_as", "flatten", "ravel", "data"})
"""Functions that return a view or a copy depending on the memory layout, which may differ on slabs; and ``data``,
whose changes leave no version."""

WHOLE_CALL = ("func", "args", "kwargs")


@dataclass(frozen=True, slots=True)
class Entry:
    """One function of the table.

    Attributes
    ----------
    family
        Its family in the documentation; None for functions that are not torch's.
    treated
        The arguments that the handler treats; None for all of them.
    samples
        Handler for volumes that are cut along dim 0, whose samples are computed by themselves; it gets only the passed
        arguments, by name. None if there is none.
    rehearsed
        Whether the call is rehearsed on shapes: not if the handler compares sizes itself, or there are none to compare.
    broadcasts
        Whether equal shapes are always right, and also the result's shape.
    views
        Whether torch may return a view of an argument.
    perhaps
        Whether that depends on the argument's memory layout.
    merged
        Whether the handler supports a cut dim that was merged with its neighbours (see ``plan.shards.Merged``). Other
        handlers get the volume in planes, or not at all.
    rounded
        Whether it reads an upsampled volume in the slabs' type where torch has float32. Other handlers get the volume
        in float32.
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
    samples: Handler | None = None


class Refusal(Exception):  # noqa: N818  (never reaches a user)
    """A call that a handler cannot run on slabs."""


def refuse(reason: str) -> NoReturn:
    """End a handler: the call cannot be run on slabs, for this reason."""
    raise Refusal(reason)


def refuse_if(stands_against: object, reason: str) -> None:
    """End a handler if a condition prevents the call from running on slabs, for this reason."""
    if stands_against:
        refuse(reason)


TABLE: dict[Any, Entry] = {}


def handles(family: str, *names: str, rehearse: bool = True, **settings: Any) -> Callable[[Handler], Handler]:
    """Register a handler for every function of these names, in each namespace of torch that has it.

    The settings ``broadcasts``, ``merged``, ``rounded`` and ``samples`` are fields of ``Entry``.

    A name is bare (``"relu"``: ``torch.relu``, ``Tensor.relu`` and ``F.relu``) or qualified (``"F.relu"``). A handler
    is ``merged`` if it uses the cut only by zipping slabs, by ``aligned`` or by ``wrap``, or asks the volume for the
    owned entries.

    ``samples`` is the handler for volumes that are cut along dim 0: slices of one volume as samples of a batch, for
    networks of 2D convolutions (``x.transpose(1, 2).reshape(B * D, C, H, W)``).

    A ``rounded`` handler reads an upsampled volume in the slabs' type, where torch has float32 under autocast. These
    are convolutions, which autocast runs in that type anyway; operators between an upsampling and its convolution in
    a decoder (norms, the join or the sum with a skip), whose results are rounded once more than torch's; and functions
    that read no values.
    """

    def register(handler: Handler) -> Handler:
        parameters = tuple(inspect.signature(handler).parameters)
        treated = None if parameters == WHOLE_CALL else frozenset(parameters) - {"func"}
        for label, function in _found(names):
            bare = label.rpartition(".")[2]
            perhaps = bare in PERHAPS_VIEWS
            views = perhaps or bare in VIEWS or returns_view(function)
            TABLE[function] = Entry(label, family, handler, treated, rehearse, views=views, perhaps=perhaps, **settings)
        return handler

    return register


def sharded_form(function: Callable) -> Callable[[Handler], Handler]:
    """Register a function that replaces a custom function if one of its arguments is a sharded volume.

    The handler gets ``(function, args, kwargs)`` unchanged. The function must call it as torch's own functions do:
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


def _check_unknown(function: Callable, label: str) -> None:
    """Refuse a second registration: one of the two would be dead, and nobody could tell which."""
    known = TABLE.get(function)
    if known is not None:
        raise ValueError(f"{label} is handled by {known.handler.__name__} already; register it once")


def _found(names: Sequence[str]) -> list[tuple[str, Any]]:
    """Return the functions of these names without a handler; torch may have one function under several names."""
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
