"""Watch everything besides its arguments that ``forward`` could read, and an optimizer, for changes.

A recording repeats kernels, not Python, so it may replace ``forward`` only while everything that Python could read is
unchanged: modules and their attributes with the contents of containers, configuration objects and closures, the
functions that run (``forward`` patched on a class or an object), hooks, the set of parameters and buffers and their
memory, and the optimizer's settings. This is checked before every replay, while GPUs may be waiting: all identities
are compared at once, and only values that differ are described again.

Globals are watched if the network's own functions name them and they can be described: a number, a dictionary or a
configuration object. Other globals, and data that ``forward`` reads from outside Python, cannot be watched.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from enum import Enum
from itertools import chain
from operator import call, is_, itemgetter
from types import CodeType, FunctionType
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
from volseg.device.torch_internals import PLAIN_TENSORS
from volseg.parallel.state.description import (
    Description,
    Same,
    UnknownError,
    Weak,
    describe,
    find_tensor,
    list_leaves,
    stays,
)
from volseg.parallel.state.module import LEFT_OUT, is_scripted

FOLLOWED = (*(PARAMETERS, BUFFERS, MODULES), *(FORWARD_HOOKS, FORWARD_PRE_HOOKS, BACKWARD_HOOKS, BACKWARD_PRE_HOOKS))
"""Registries of a module whose members count; the other registries contain flags of these, or concern state dicts."""

MADE_BY_PYTHON = frozenset({"__call__", "__getattr__"})
"""Special names of a class that may change its behaviour."""

LIBRARIES = frozenset(("builtins", "torch", "torchvision", "monai", "volseg"))
"""Packages whose networks read no globals that change."""

MOST_LEAVES = 256
"""Leaves of one global; comparing more would take longer than a recording saves."""


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
        """Whether only the identity of tensors has changed."""
        return all(
            _is_tensor_or_none(old) and _is_tensor_or_none(new) and find_tensor(old) != find_tensor(new)
            for old, new in self.pairs
        )


def _is_tensor_or_none(token: Any) -> bool:
    return token is ABSENT or token == (type(None), None) or find_tensor(token) is not None


class _Held(NamedTuple):
    """One dictionary of a module, a class or an optimizer."""

    where: str
    """Prefix of the names."""
    what: Any
    """Tells dictionaries with one prefix apart."""
    holder: Mapping[Any, Any]
    names: Collection[Any]
    """Watched names."""
    versions: bool = False
    """Whether the values of tensors on hosts count: not of parameters, buffers and optimizers, which a step changes."""


class _Open(NamedTuple):
    """A value that can change inside, and its content."""

    held: _Held
    name: Any
    leaves: list[Any] | None
    """Leaves of the value; None if they include tensors, which must not be kept alive: features may be large."""
    described: Description

    @classmethod
    def of(cls, held: _Held, name: Any) -> "_Open":
        """Describe a value."""
        leaves = list_leaves(held.holder[name])
        keeps = not held.versions or not any(isinstance(leaf, Tensor) for leaf in leaves)
        return cls(held, name, leaves if keeps else None, describe(leaves, held.versions))

    @property
    def key(self) -> tuple[str, Any, Any]:
        """Key of the description."""
        return self.held.where, self.held.what, self.name

    def is_same(self) -> bool:
        """Return whether the content is still the same."""
        try:
            today = list_leaves(self.held.holder[self.name])
        except (KeyError, UnknownError):
            return False
        if self.leaves is not None and len(today) == len(self.leaves) and all(map(is_, today, self.leaves)):
            return True
        return describe(today, self.held.versions) == self.described


class Watch:
    """Find changes of a network and of an optimizer since the last call.

    Parameters
    ----------
    net, optimizer
        The watched objects.

    Attributes
    ----------
    described : dict
        Description of each watched value at the last call.
    unknown : list of str
        Names of values that may change unnoticed.
    """

    def __init__(self, net: nn.Module, optimizer: Optimizer | None = None) -> None:
        self._net, self._optimizer = net, optimizer
        self._note()

    def _note(self) -> None:
        """Record the current state."""
        self.described: dict[tuple[str, Any, Any], Description] = {}
        self.unknown: list[str] = []
        self._open: list[_Open] = []
        self._values: list[Any] = []
        self._gets: list[Callable[[Any], Iterable[Any]]] = []
        self._read: list[Mapping[Any, Any]] = []
        named = list(_name_modules(self._net))
        self._modules = [module for _, module in named]
        self._kinds = list(map(type, self._modules))
        for path, module in named:
            self.described[f"{path}." if path else "", None, "class"] = (Same(type(module)),)
        self._own = _list_own(self._optimizer)
        held = list(_list_held(named, self._optimizer))
        for each in held:
            if each.names:
                self._note_dictionary(each)
        self._holders = [each.holder for each in held]
        self._sizes = list(map(len, self._holders))
        self._tensors = []
        for name, tensor in name_tensors(self._net):
            self._tensors.append(tensor)
            if type(tensor) not in PLAIN_TENSORS:  # whose description is its identity
                self.described[name, "place", ""] = ((get_address(tensor), tensor.requires_grad),)
        self._places = self._list_places()

    def _note_dictionary(self, held: _Held) -> None:
        names = []
        for name in held.names:
            value = held.holder[name]
            is_held_weakly = isinstance(value, Tensor) and held.versions
            if not is_held_weakly:
                names.append(name)
            try:
                found = _Open.of(held, name)
            except UnknownError:
                self.described[held.where, held.what, name] = (UNKNOWN,)
                self.unknown.append(f"{held.where}{name}")
                continue
            self.described[found.key] = found.described
            if is_held_weakly or not (stays(value) or isinstance(value, Tensor)):
                self._open.append(found)
        if names:
            self._gets.append(itemgetter(*names, names[0]))  # with one name it would not return a tuple
            self._read.append(held.holder)
            self._values += self._gets[-1](held.holder)

    @property
    def tensors(self) -> list[Weak]:
        """The tensors in modules and in their contents."""
        tokens = chain.from_iterable(self.described.values())
        return [weak for token in tokens if (weak := find_tensor(token)) is not None]

    def changes(self) -> list[Change]:
        """Return the changes, and record the current state."""
        before = self.described
        if not (self._has_same_objects() and self._look_inside()):
            self._note()
        if self.described is before:
            return []
        return [
            Change(f"{key[0]}{key[2]}", old, new)
            for key in {**before, **self.described}
            if (old := before.get(key, (ABSENT,))) != (new := self.described.get(key, (ABSENT,)))
        ]

    def _has_same_objects(self) -> bool:
        """Compare all identities at once."""
        own = _list_own(self._optimizer)
        if list(map(len, self._holders)) != self._sizes or list(map(type, self._modules)) != self._kinds:
            return False
        if len(own) != len(self._own) or not all(map(is_, own, self._own)) or self._list_places() != self._places:
            return False
        try:
            return all(map(is_, chain.from_iterable(map(call, self._gets, self._read)), self._values))
        except KeyError:  # one name was replaced by another
            return False

    def _look_inside(self) -> bool:
        """Describe changes inside the same objects; return whether nothing else has changed."""
        for place, each in enumerate(self._open):
            if each.is_same():
                continue
            try:
                self._open[place] = again = _Open.of(each.held, each.name)
            except (KeyError, UnknownError):
                return False
            if find_tensor(each.described[0]) is not None and find_tensor(again.described[0]) is None:
                return False
            self.described = {**self.described, each.key: again.described}
        return True

    def _list_places(self) -> list[tuple[int, bool]]:
        return [(get_address(tensor), tensor.requires_grad) for tensor in self._tensors]


def _list_held(named: Iterable[tuple[str, nn.Module]], optimizer: Optimizer | None) -> Iterator[_Held]:
    """Yield the dictionaries that are watched."""
    kinds: dict[type, None] = {}
    members: list[Mapping[str, Any]] = []
    for path, module in named:
        kinds |= dict.fromkeys(type(module).__mro__)
        where, own = f"{path}." if path else "", vars(module)
        members.append(own)
        yield _Held(where, "", own, own.keys() - LEFT_OUT, versions=True)
        for registry in FOLLOWED:
            yield _Held(where, registry, getattr(module, registry), getattr(module, registry))
    for number, hooks in enumerate(HOOKS_OF_ALL_MODULES):
        yield _Held("the hooks of all modules, ", number, hooks, hooks)
    for kind in kinds.keys() - {object, nn.Module}:
        names = [name for name in vars(kind) if not name.startswith("__") or name in MADE_BY_PYTHON]
        yield _Held(f"{kind.__name__}.", kind, vars(kind), [name for name in names if name != "_abc_impl"], True)
    for holder, read in _list_globals([*members, *(vars(kind) for kind in kinds if not _is_of_library(kind))]):
        yield _Held(f"{holder.get('__name__')}.", id(holder), holder, read, versions=True)
    if optimizer is not None:
        for number, group in enumerate(chain(optimizer.param_groups, optimizer.state.values())):
            yield _Held("the optimizer's ", number, group, group)


def _name_modules(net: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules, and networks inside wrappers that share their registries but are not registered children."""
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


def _list_own(optimizer: Optimizer | None) -> list[Any]:
    """Return the optimizer's dictionaries: ``load_state_dict`` creates new ones."""
    if optimizer is None:
        return []
    return [*optimizer.param_groups, optimizer.state, *optimizer.state.values()]


def name_tensors(net: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters and buffers with their names."""
    yield from net.named_parameters()
    yield from net.named_buffers()


def _list_globals(members: Iterable[Mapping[str, Any]]) -> Iterator[tuple[dict[str, Any], set[str]]]:
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
    yield from found.values()


def _is_of_library(value: Any) -> bool:
    """Return whether a class or function belongs to one of ``LIBRARIES``."""
    return (value.__module__ or "").partition(".")[0] in LIBRARIES


def _list_functions(value: Any) -> list[FunctionType]:
    """Return the Python function that a member of a class or module is, if any; none of libraries."""
    value = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
    return [value] if isinstance(value, FunctionType) and not _is_of_library(value) else []


def _list_names_of(code: CodeType) -> set[str]:
    """Return the names that a function reads from its globals, also in functions that it defines."""
    return set(code.co_names).union(*(_list_names_of(part) for part in code.co_consts if isinstance(part, CodeType)))


def _can_be_described(value: Any) -> bool:
    try:
        return len(list_leaves(value)) <= MOST_LEAVES
    except UnknownError:
        return False
