"""Describe a value, so that changes show, also inside containers, configuration objects and closures.

A description is a tuple of tokens, which can be hashed and compared. Plain values are compared by value, others by
identity. Tensors are held weakly, since they may be large.
"""

import contextlib
import enum
import functools
import logging
import random
import types
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, TypeVar
from weakref import ref

import torch
from torch import Tensor, nn

from volseg.device.gpus import get_address
from volseg.device.torch_internals import get_version

Function = TypeVar("Function", bound=Callable[..., Any])

PLAIN = frozenset(
    (
        *(bool, int, float, complex, str, bytes, type(None)),
        *(torch.Size, torch.dtype, torch.device, torch.layout, range, slice),
    )
)
"""Types of values that never change; they are compared by value."""

FIXED = (
    *(nn.Module, type, types.BuiltinFunctionType, types.ModuleType, types.WrapperDescriptorType),
    *(types.MethodDescriptorType, types.CodeType, staticmethod, classmethod, property, enum.Enum, logging.Logger),
)
"""Types of which only the object itself counts: classes and modules are watched separately."""

SINGLE = (Tensor, *FIXED)

MOST_INSIDE = 4096
"""Limit of leaves in one value; more would take longer to compare than a recording saves."""

Description = tuple[Hashable, ...]


class UnknownError(Exception):
    """A value may change unnoticed."""


class Same:
    """An object by its identity; it is kept alive, so that no other object gets the same identity."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)

    def __repr__(self) -> str:
        return repr(self.value)


class Weak(Same):
    """A tensor by its identity, as long as it exists."""

    __slots__ = ("num_dims",)

    def __init__(self, tensor: Tensor) -> None:
        super().__init__(ref(tensor))  # one reference for all comparisons, kept here
        self.num_dims = tensor.dim()

    @property
    def tensor(self) -> Tensor | None:
        """The tensor, or None if it is gone."""
        found: Tensor | None = self.value()
        return found

    def __repr__(self) -> str:
        return "a tensor"


def list_leaves(value: Any) -> list[Any]:
    """Return the contents of a value as a flat list, with the types and lengths of containers.

    Raises
    ------
    UnknownError
        If the value may change unnoticed: it gives another value each time, or has too many parts.
    """
    found: list[Any] = []
    _follow(value, found, {})
    return found


def _follow(value: Any, found: list[Any], seen: dict[int, tuple[int, Any]]) -> None:
    kind = type(value)
    if kind in PLAIN or isinstance(value, SINGLE):
        found.append(value)
        return
    # Objects that refer to each other are followed once.
    if id(value) in seen:
        found += "again", seen[id(value)][0]
        return
    seen[id(value)] = len(seen), value  # kept alive: temporary objects must not reuse an identity
    if len(found) > MOST_INSIDE:
        raise UnknownError
    found.append(kind)
    parts = _list_parts(value)
    if parts is None:
        found.append(value)
        parts = [_list_attributes(value)]
    for part in parts:
        _follow(part, found, seen)


def _list_parts(value: Any) -> Iterable[Any] | None:
    """Return the parts of an object; None for an object of an unknown class, which has attributes."""
    if type(value) is not list and type(value) is not tuple and _varies(value):
        raise UnknownError
    if isinstance(value, Mapping):
        return [len(value), *(part for item in value.items() for part in item)]
    if isinstance(value, list | tuple):
        return [len(value), *value]
    if isinstance(value, set | frozenset):
        return sorted(value, key=lambda item: (type(item).__name__, hash(item)))
    if isinstance(value, types.FunctionType):
        return [value.__code__, _list_cells(value), value.__defaults__, value.__kwdefaults__]
    if isinstance(value, types.MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    if hasattr(type(value), "tobytes") and hasattr(type(value), "dtype"):  # an array or number of NumPy's
        if value.size > MOST_INSIDE:
            raise UnknownError
        return [torch.Size(value.shape), str(value.dtype), value.tobytes()]
    return None


def _varies(value: Any) -> bool:
    """Return whether a value yields another result each time: an iterator, or a generator of random numbers."""
    return (
        isinstance(value, torch.Generator | random.Random)
        or hasattr(type(value), "__next__")
        or type(value).__module__.startswith("numpy.random")
    )


def _list_cells(function: types.FunctionType) -> list[Any]:
    """Return the values in a function's closure."""
    found = []
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # a name that has no value yet
            found.append(cell.cell_contents)
    return found


def _list_attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of an object of an unknown class, in its dictionary and in slots."""
    slots = {
        name: getattr(value, name)
        for kind in type(value).__mro__
        for name in _list_names(vars(kind).get("__slots__", ()))
        if name not in ("__dict__", "__weakref__") and hasattr(value, name)
    }
    return {**slots, **getattr(value, "__dict__", {})}


def _list_names(slots: str | Iterable[str]) -> Iterable[str]:
    return (slots,) if isinstance(slots, str) else slots


def stays(value: Any) -> bool:
    """Return whether nothing inside ``value`` can change, as long as it is the same object."""
    kind = type(value)
    if kind in PLAIN or isinstance(value, FIXED):
        return True
    if kind is tuple:
        return all(map(stays, value))
    if kind is types.FunctionType:
        # The cell of ``super()`` holds the class.
        own_class_only = value.__closure__ is None or value.__code__.co_freevars == ("__class__",)
        return own_class_only and not value.__kwdefaults__ and all(map(stays, value.__defaults__ or ()))
    return False


def describe(found: Iterable[Any], versions: bool = True) -> Description:
    """Return the tokens of leaves.

    Parameters
    ----------
    found
        From ``list_leaves``.
    versions
        Whether the version of a tensor on a host counts, as Python may have read its values.

    Examples
    --------
    >>> config = {"alpha": [1.0, 2.0]}
    >>> before = describe(list_leaves(config))
    >>> config["alpha"][1] = 3.0
    >>> describe(list_leaves(config)) == before
    False
    """
    return tuple([_make_token(leaf, versions) for leaf in found])


def _make_token(leaf: Any, versions: bool) -> Hashable:
    if type(leaf) in PLAIN:
        return (type(leaf), str(leaf)) if type(leaf) is slice else (type(leaf), leaf)
    if not isinstance(leaf, Tensor):
        return Same(leaf)
    if type(leaf) not in (Tensor, nn.Parameter) or leaf.layout != torch.strided:
        return Weak(leaf)  # the tensors of a subclass have no single place
    counts = versions and type(leaf) is Tensor and leaf.device.type == "cpu" and not leaf.is_inference()
    place = get_address(leaf), get_version(leaf) if counts else 0, leaf.requires_grad
    return Weak(leaf), place, leaf.shape, leaf.stride(), leaf.dtype


def find_tensor(token: Hashable) -> Weak | None:
    """Return the tensor that a token describes, or None if it describes another value."""
    first = token[0] if isinstance(token, tuple) and token else token
    return first if isinstance(first, Weak) else None


def opaque(function: Function) -> Function:
    """Mark a function or method as opaque to ``TorchFunctionMode``."""
    function.is_opaque = True  # type: ignore[attr-defined]
    return function


def is_opaque(function: Any) -> bool:
    """Return whether a function, as a mode receives it, is marked as opaque."""
    return getattr(function, "is_opaque", False) is True
