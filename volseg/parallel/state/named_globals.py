"""Find the globals that the functions of a network read by name: a number, a dictionary or a configuration object."""

from collections.abc import Iterable, Iterator, Mapping
from types import CodeType, FunctionType
from typing import Any

from volseg.parallel.state.description import UnknownError, list_leaves

LIBRARIES = frozenset(("builtins", "torch", "torchvision", "monai", "volseg"))
"""Packages whose networks read no globals that change."""

MOST_LEAVES = 256
"""Leaves of one global; comparing more would take longer than a recording saves."""


class AllBut(frozenset[str]):
    """Contains every name except these."""

    def __contains__(self, name: object) -> bool:
        return not super().__contains__(name)


def list_globals(members: Iterable[Mapping[str, Any]]) -> Iterator[tuple[dict[str, Any], frozenset[str]]]:
    """Yield the globals of functions among ``members``, with the names that are read and can be compared.

    Functions that are found under such a name are followed as well.

    Parameters
    ----------
    members
        Attributes of modules and of classes.
    """
    waiting = [each for held in members for member in held.values() for each in _list_functions(member)]
    found: dict[int, tuple[dict[str, Any], set[str]]] = {}
    seen: set[Any] = set()
    for function in waiting:
        key = id(function.__globals__), function.__code__  # equal code may belong to two modules
        if key in seen:
            continue
        seen.add(key)
        holder, names = found.setdefault(id(function.__globals__), (function.__globals__, set()))
        for name in _list_names_of(function.__code__) & holder.keys():
            if _can_be_described(holder[name]):
                names.add(name)
            waiting += _list_functions(holder[name])
    yield from ((holder, frozenset(names)) for holder, names in found.values() if names)


def is_of_library(value: Any) -> bool:
    """Return whether a class or function belongs to one of ``LIBRARIES``."""
    return (value.__module__ or "").partition(".")[0] in LIBRARIES


def _list_functions(value: Any) -> list[FunctionType]:
    """Return the Python function that a member of a class or module is, if any; none of libraries."""
    value = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
    return [value] if isinstance(value, FunctionType) and not is_of_library(value) else []


def _list_names_of(code: CodeType) -> set[str]:
    """Return the names that a function reads from its globals, also in functions that it defines."""
    return set(code.co_names).union(*(_list_names_of(part) for part in code.co_consts if isinstance(part, CodeType)))


def _can_be_described(value: Any) -> bool:
    try:
        return len(list_leaves(value)) <= MOST_LEAVES
    except UnknownError:
        return False
