"""Watch everything besides its arguments that ``forward`` could read, and an optimizer, for changes.

A recording repeats kernels, not Python, so it may replace ``forward`` only while everything that Python could read is
unchanged: modules and their attributes with the contents of containers, configuration objects and closures, the
functions that run (``forward`` patched on a class or an object), hooks, the set of parameters and buffers and their
memory, and the optimizer's settings. This is checked before every replay, while GPUs may be waiting: all identities
are compared at once, and only changed objects are inspected.

Globals are watched if the network's own functions name them and they can be described. Other globals, and data that
``forward`` reads from outside of Python, cannot be watched.
"""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from enum import Enum
from itertools import chain
from operator import call, is_, itemgetter
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from volseg.device.gpus import get_address
from volseg.device.module_internals import (
    BACKWARD_HOOKS,
    BACKWARD_PRE_HOOKS,
    BUFFERS,
    FORWARD_HOOKS,
    FORWARD_PRE_HOOKS,
    HOOKS_OF_ALL_MODULES,
    MODULES,
    PARAMETERS,
    get_modules,
)
from volseg.parallel.state.description import (
    Description,
    Same,
    See,
    UnknownError,
    Weak,
    describe,
    find_tensor,
    list_leaves,
    stays,
)
from volseg.parallel.state.module import LEFT_OUT, is_scripted
from volseg.parallel.state.named_globals import AllBut, is_of_library, list_globals

FOLLOWED = (
    *(PARAMETERS, BUFFERS, MODULES),
    *(FORWARD_HOOKS, FORWARD_PRE_HOOKS, BACKWARD_HOOKS, BACKWARD_PRE_HOOKS),
)
"""Registries of a module whose members count; the other registries hold flags of these, or concern state dicts."""

MADE_BY_PYTHON = frozenset({"__call__", "__getattr__"})
"""Special names of a class that may change its behaviour."""


_VALUES: Callable[[Any], Iterable[Any]] = dict.values


class _Token(Enum):
    """Token for a value that cannot be described."""

    ABSENT = "nothing"
    UNKNOWN = "what cannot be compared"

    def __repr__(self) -> str:
        return self.value


ABSENT, UNKNOWN = _Token


class Change(NamedTuple):
    """A change of a watched value."""

    name: str
    old: Description
    new: Description

    @property
    def pairs(self) -> list[tuple[Any, Any]]:
        """Tokens that differ, in pairs; one pair of all tokens if the lengths differ."""
        if len(self.old) != len(self.new):
            return [(self.old, self.new)]
        return [pair for pair in zip(self.old, self.new, strict=True) if pair[0] != pair[1]]

    @property
    def is_of_tensors(self) -> bool:
        """Whether only the identity of tensors has changed, if anything."""
        return self.old != self.new and all(
            _is_tensor_or_none(old) and _is_tensor_or_none(new) and find_tensor(old) != find_tensor(new)
            for old, new in self.pairs
        )


def _is_tensor_or_none(token: Any) -> bool:
    return token is ABSENT or token == (type(None), None) or find_tensor(token) is not None


class _Content:
    """A member that can change inside, with its content and description."""

    def __init__(self, value: Any, found: list[Any], described: Description, see: See) -> None:
        self._value, self._described, self._see = value, described, see
        # Tensors in it must not be kept alive.
        keeps = see is See.OBJECTS or not any(isinstance(leaf, Tensor) for leaf in found)
        self._leaves = found if keeps else None
        is_flat = keeps and type(value) in (list, tuple)
        self._items = (
            list(value) if is_flat and all(stays(item) or isinstance(item, Tensor) for item in value) else None
        )

    def is_same(self) -> bool:
        """Return whether the content is still the same."""
        items = self._items
        if items is not None and len(self._value) == len(items) and all(map(is_, self._value, items)):
            return True
        try:
            today = list_leaves(self._value)
        except UnknownError:
            return False
        if self._leaves is not None and len(today) == len(self._leaves) and all(map(is_, today, self._leaves)):
            return True
        return describe(today, self._see) == self._described


class _Snapshot:
    """Descriptions by name, with a hash that is computed once."""

    __slots__ = ("_hash", "_items")

    def __init__(self, described: Mapping[Any, Description]) -> None:
        self._items = tuple(described.items())
        self._hash = hash(self._items)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Snapshot) and self._hash == other._hash and self._items == other._items

    def __hash__(self) -> int:
        return self._hash


class _Held:
    """One dictionary of a module, a class or an optimizer, and its recorded content.

    Parameters
    ----------
    where
        Prefix of the names.
    holder
        The dictionary itself.
    see
        Properties of tensors that count.
    left_out
        Names that are not watched.
    """

    def __init__(self, where: str, holder: Mapping[Any, Any], see: See, left_out: Container[Any] = ()) -> None:
        self.where, self.holder, self.see, self._left_out = where, holder, see, left_out
        self.note()

    def note(self) -> None:
        """Record the current content."""
        self.length = len(self.holder)
        self.names: list[Any] = []
        self.unknown: list[str] = []
        self.described: dict[Any, Description] = {}
        self.contents: list[_Content] = []
        self.loose: list[tuple[Any, Description]] = []
        for name, value in self.holder.items():
            if name in self._left_out:
                continue
            if isinstance(value, Tensor) and self.see is not See.OBJECTS:
                # Only the description refers to the tensor: features that a module keeps may be large.
                self.described[name] = describe((value,), self.see)
                self.loose.append((name, self.described[name]))
                continue
            self.names.append(name)
            try:
                found = list_leaves(value)
            except UnknownError:
                self.described[name] = (UNKNOWN,)
                self.unknown.append(f"{self.where}{name}")
                continue
            self.described[name] = describe(found, self.see)
            if not stays(value) and not isinstance(value, Tensor):
                self.contents.append(_Content(value, found, self.described[name], self.see))
        self.get: Callable[[Any], Iterable[Any]] | None = None
        if len(self.names) == self.length and isinstance(self.holder, dict):
            self.get = _VALUES  # quicker if all names count
        elif self.names:
            self.get = itemgetter(*self.names, self.names[0])
        self.values: list[Any] = [] if self.get is None else list(self.get(self.holder))
        self.snapshot = _Snapshot(self.described)

    def is_same(self) -> bool:
        """Return whether the dictionary holds the same objects; their contents may differ."""
        return len(self.holder) == self.length and self._has_same_objects() and self.is_same_inside()

    def is_same_inside(self) -> bool:
        """Return whether the same objects have the same contents."""
        holder, see = self.holder, self.see
        return all(content.is_same() for content in self.contents) and all(
            name in holder and isinstance(holder[name], Tensor) and describe((holder[name],), see) == described
            for name, described in self.loose
        )

    def _has_same_objects(self) -> bool:
        try:
            return self.get is None or all(map(is_, self.get(self.holder), self.values))
        except KeyError:  # one name was replaced by another
            return False

    def changes(self) -> Iterator[Change]:
        """Record the content anew; yield the changes."""
        before = self.described
        self.note()
        for name in {**before, **self.described}:
            old, new = before.get(name, (ABSENT,)), self.described.get(name, (ABSENT,))
            if old != new:
                yield Change(f"{self.where}{name}", old, new)


class Watch:
    """Find changes of a network and of an optimizer since the last call.

    Parameters
    ----------
    net, optimizer
        The watched objects.
    sees_tensors
        Whether a tensor that replaces another one, or moves in memory, is a change.
    """

    def __init__(self, net: nn.Module, optimizer: Optimizer | None = None, sees_tensors: bool = True) -> None:
        self._net, self._optimizer, self._sees_tensors = net, optimizer, sees_tensors
        self._begin()

    def _begin(self) -> None:
        self._members = [module for _, module in _name_modules(self._net)]
        self._kinds = list(map(type, self._members))
        self._held = list(_find_held(self._net, self._optimizer, self._sees_tensors))
        self._children = {id(get_modules(module)) for module in self._members}
        self._own = _list_own(self._optimizer)
        self._arrange()

    def _arrange(self) -> None:
        """Collect the values that are compared each time."""
        self._empty = [held.holder for held in self._held if not held.length]
        self._full = [held.holder for held in self._held if held.length]
        self._lengths = list(map(len, self._full))
        reading = [held for held in self._held if held.values]
        self._gets = [held.get for held in reading if held.get is not None]
        self._read = [held.holder for held in reading]
        self._values = [value for held in reading for value in held.values]
        self._open = [held for held in self._held if held.contents or held.loose]
        self._tensors = (
            [(name, tensor, get_address(tensor), tensor.requires_grad) for name, tensor in name_tensors(self._net)]
            if self._sees_tensors
            else []
        )

    @property
    def unknown(self) -> list[str]:
        """Names of values that may change unnoticed."""
        return [name for held in self._held for name in held.unknown]

    @property
    def tensors(self) -> list[Weak]:
        """The tensors in modules and in their contents."""
        tokens = (token for held in self._held for described in held.described.values() for token in described)
        return [weak for token in tokens if (weak := find_tensor(token)) is not None]

    @property
    def description(self) -> Description:
        """Description of everything watched, at the last call."""
        places = tuple([(address, requires_grad) for _, _, address, requires_grad in self._tensors])
        return (
            *(tuple(map(Same, self._members)), tuple(self._kinds), places),
            *[held.snapshot for held in self._held],
        )

    def changes(self) -> list[Change]:
        """Return the changes, and record the current state."""
        same = self._has_same_objects()
        if same:
            suspects = [held for held in self._open if not held.is_same_inside()]
        else:
            suspects = [held for held in self._held if not held.is_same()]
        names = [held.names for held in suspects]
        found = [change for held in suspects for change in held.changes()]
        moved = [
            Change(name, ((address, requires_grad),), ((get_address(tensor), tensor.requires_grad),))
            for name, tensor, address, requires_grad in self._tensors
            if tensor.requires_grad != requires_grad or get_address(tensor) != address
        ]
        others = []
        if not all(map(is_, _list_own(self._optimizer), self._own)):
            others.append(Change("the optimizer's state", (), ()))  # load_state_dict creates a new one
        if list(map(type, self._members)) != self._kinds:
            others.append(Change("a module's class", (), ()))
        if others or any(id(held.holder) in self._children for held in suspects):
            self._begin()
        elif moved or not same or names != [held.names for held in suspects]:
            self._arrange()
        return found + moved + others

    def _has_same_objects(self) -> bool:
        """Compare all identities at once."""
        if any(self._empty) or list(map(len, self._full)) != self._lengths:
            return False
        try:
            return all(map(is_, chain.from_iterable(map(call, self._gets, self._read)), self._values))
        except KeyError:  # one name was replaced by another
            return False


def _find_held(net: nn.Module, optimizer: Optimizer | None, sees_tensors: bool) -> Iterator[_Held]:
    """Yield the dictionaries that are watched."""
    see, registered = (See.VALUES, See.OBJECTS) if sees_tensors else (See.KINDS, See.KINDS)
    kinds: dict[type, None] = {}
    for path, module in _name_modules(net):
        kinds |= dict.fromkeys(type(module).__mro__)
        where = f"{path}." if path else ""
        yield _Held(where, vars(module), see, LEFT_OUT)
        for registry in FOLLOWED:
            yield _Held(where, getattr(module, registry), registered)
    for hooks in HOOKS_OF_ALL_MODULES:
        yield _Held("the hooks of all modules, ", hooks, registered)
    for kind in kinds.keys() - {object, nn.Module}:
        by_python = {name for name in vars(kind) if name.startswith("__")} - MADE_BY_PYTHON
        yield _Held(f"{kind.__name__}.", vars(kind), see, by_python | {"_abc_impl"})
    members = [vars(module) for _, module in _name_modules(net)]
    for holder, names in list_globals([*members, *(vars(kind) for kind in kinds if not is_of_library(kind))]):
        yield _Held(f"{holder.get('__name__')}.", holder, see, left_out=AllBut(names))
    if optimizer is not None:
        for group in optimizer.param_groups:
            yield _Held("the optimizer's ", group, registered)
        for state in optimizer.state.values():
            yield _Held("the optimizer's ", state, registered)


def _name_modules(net: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules, and networks inside wrappers that share their registries but are no registered child."""
    waiting, known = [("", net)], set[int]()
    for path, outer in waiting:
        for name, module in outer.named_modules(prefix=path):
            if id(module) in known or is_scripted(module):
                continue
            known.add(id(module))
            yield name, module
            held = ((key, value) for key, value in vars(module).items() if isinstance(value, nn.Module))
            waiting += [
                (f"{name}.{key}" if name else key, value)
                for key, value in held
                if not is_scripted(value) and get_modules(value) is get_modules(module)
            ]


def _list_own(optimizer: Optimizer | None) -> tuple[Any, ...]:
    return (len(optimizer.param_groups), optimizer.param_groups, optimizer.state) if optimizer is not None else ()


def name_tensors(net: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters and buffers with their names."""
    yield from net.named_parameters()
    yield from net.named_buffers()
