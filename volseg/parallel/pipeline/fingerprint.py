"""What ``forward`` could read besides its arguments, described so that a change of any of it shows.

A recording repeats kernels, not Python, so it stands for ``forward`` only while everything that Python could read is as
it was: attributes of modules with what containers, configuration objects and closures hold, the functions that run
(``forward`` patched on a class or an object), which modules, parameters and buffers there are and where they lie.
Asked before every batch, while GPUs may be waiting: as long as every attribute is the same object and nothing that can
change inside has changed, the last description stands.

What it cannot see: values that ``forward`` reads from a module's globals or from outside of Python.
"""

import contextlib
import enum
import functools
import types
from collections.abc import Container, Hashable, Iterable, Mapping
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks_of_all

from volseg.parallel.pipeline import run as runs

__all__ = ["Fingerprint", "describe"]

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout)
"""Types of values that never change, and are compared as such."""

FIXED = (
    *(
        nn.Module,
        type,
        types.BuiltinFunctionType,
        types.ModuleType,
        types.WrapperDescriptorType,
        types.MethodDescriptorType,
    ),
    *(staticmethod, classmethod, property, enum.Enum),
)
"""Types of which nothing but the object itself counts: classes and modules are watched by themselves."""

REGISTRIES = frozenset(vars(nn.Module())) - {"training"}
"""Attributes that ``nn.Module`` itself makes; those with parameters, buffers and children are looked at by name."""

MOST_INSIDE = 4096
"""Objects in one attribute; more would take longer to look at than a recording saves."""

MOST_NUMBERS = 64
"""Conditions that are remembered."""


class _Unknown(Exception):  # noqa: N818 (an answer, not a failure)
    """A value that could change unnoticed."""


class _Describer:
    """Describes one value; objects that hold one another are followed once."""

    def __init__(self, sees_tensors: bool = True) -> None:
        self._sees_tensors = sees_tensors
        self.held: list[Any] = []
        """What is described by its identity, which no other object may take over meanwhile."""
        self._seen: dict[int, int] = {}

    def __call__(self, value: Any) -> Hashable:
        kind = type(value)
        if kind in PLAIN:
            return kind, value
        if isinstance(value, Tensor):
            return _of_tensor(value) if self._sees_tensors else (Tensor, value.dim())
        if id(value) in self._seen:
            return "again", self._seen[id(value)]
        self._seen[id(value)] = len(self._seen)
        self.held.append(value)
        if isinstance(value, torch.Generator) or len(self.held) > MOST_INSIDE:
            raise _Unknown
        if isinstance(value, FIXED):
            return kind, id(value)
        return kind, self._content(value)

    def _content(self, value: Any) -> Hashable:
        if isinstance(value, Mapping):
            return tuple((self(key), self(item)) for key, item in value.items())
        if isinstance(value, list | tuple):
            return tuple(map(self, value))
        if isinstance(value, set | frozenset):
            return frozenset(map(self, value))
        if isinstance(value, types.FunctionType):
            return id(value.__code__), self(_cells(value)), self(value.__defaults__), self(value.__kwdefaults__)
        if isinstance(value, types.MethodType):
            return self(value.__func__), self(value.__self__)
        if isinstance(value, functools.partial):
            return self(value.func), self(value.args), self(value.keywords)
        if hasattr(value, "tobytes") and hasattr(value, "dtype"):  # an array or number of NumPy's
            if value.size > MOST_INSIDE:
                raise _Unknown
            return value.shape, str(value.dtype), value.tobytes()
        return id(value), self(_inside(value))


def _cells(function: types.FunctionType) -> list[Any]:
    """Return what a function closes over."""
    found = []
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # a name that has no value yet
            found.append(cell.cell_contents)
    return found


def _inside(value: Any) -> dict[str, Any]:
    """Return the attributes of an object of an unknown class, in its dictionary and in slots."""
    slots = {
        name: getattr(value, name)
        for kind in type(value).__mro__
        for name in _names(vars(kind).get("__slots__", ()))
        if name not in ("__dict__", "__weakref__") and hasattr(value, name)
    }
    return {**slots, **getattr(value, "__dict__", {})}


def _names(slots: str | Iterable[str]) -> Iterable[str]:
    return (slots,) if isinstance(slots, str) else slots


def _of_tensor(tensor: Tensor) -> Hashable:
    """Describe a tensor; what is on a GPU, a replay reads anew, what is on the host, Python may have read."""
    version = 0 if tensor.is_inference() or tensor.device.type != "cpu" else tensor._version
    place = tensor.data_ptr() if tensor.layout == torch.strided else 0
    return id(tensor), place, version, tensor.requires_grad, tensor.shape, tensor.stride(), tensor.dtype


def describe(value: Any) -> Hashable:
    """Return a hashable description of ``value`` that differs where Python could see a difference.

    Raises
    ------
    _Unknown
        If it could change without a difference here.

    Examples
    --------
    >>> config = {"alpha": [1.0, 2.0]}
    >>> before = describe(config)
    >>> config["alpha"][1] = 3.0
    >>> describe(config) == before
    False
    """
    return _Describer()(value)


class _Names:
    """The attributes of a module or a class, and their description for as long as it holds.

    Parameters
    ----------
    inside
        By name.
    left_out
        Names that are looked at elsewhere.
    sees_tensors
        Whether one tensor in the place of another is a difference.
    """

    def __init__(self, inside: Mapping[str, Any], left_out: Container[str] = (), sees_tensors: bool = True) -> None:
        self._inside, self._left_out, self._sees_tensors = inside, left_out, sees_tensors
        self._note()

    def _note(self) -> None:
        inside = self._inside
        self._order, self._ids = list(inside), list(map(id, inside.values()))
        own = {name: value for name, value in inside.items() if name not in self._left_out}
        # An identity says something as long as no other object can take it over. Tensors may be large: followed weakly.
        self._held = [value for value in own.values() if not isinstance(value, Tensor)]
        self._tensors = [ref(value) for value in own.values() if isinstance(value, Tensor)]
        self._open = [name for name, value in own.items() if not _stays(value)]
        describer = _Describer(self._sees_tensors)
        self._fixed = tuple((name, describer(value)) for name, value in own.items() if name not in self._open)
        self.held = [*describer.held, *self._look()]
        self.description: Hashable = (self._fixed, self._content)

    def _look(self) -> list[Any]:
        """Describe what could have changed inside; return what that refers to."""
        describer = _Describer(self._sees_tensors)
        self._content = tuple([(name, describer(self._inside[name])) for name in self._open])
        return describer.held

    def is_same(self) -> bool:
        """Look again; return whether the description still holds, and make it anew if not."""
        inside = self._inside
        if list(map(id, inside.values())) == self._ids and list(inside) == self._order:
            if not self._open:
                return True
            before = self._content
            self._look()
            if self._content == before and all(tensor() is not None for tensor in self._tensors):
                return True
        self._note()
        return False


def _stays(value: Any) -> bool:
    """Whether nothing inside of ``value`` can change, as long as it is the same object."""
    if isinstance(value, tuple):
        return all(map(_stays, value))
    if isinstance(value, types.FunctionType):
        return value.__closure__ is None and not value.__kwdefaults__ and value.__defaults__ is None
    return type(value) in PLAIN or isinstance(value, FIXED)


class _Member:
    """One module: its class, its attributes, what it registers."""

    def __init__(self, module: nn.Module, sees_tensors: bool) -> None:
        self.module, self.kind = module, type(module)
        self.names = _Names(vars(module), REGISTRIES, sees_tensors)
        self._children = list(map(id, module._modules.values()))

    @property
    def has_its_children(self) -> bool:
        """Whether it holds the same modules in the same order."""
        return list(map(id, self.module._modules.values())) == self._children

    def is_same(self) -> bool:
        """Look again."""
        before, self.kind = self.kind, type(self.module)
        return self.names.is_same() and self.kind is before

    def states(self) -> list[Hashable]:
        """Describe parameters and buffers, of which a replay reads the values."""
        return [
            (id(state), state.data_ptr(), state.requires_grad)
            for registry in (self.module._parameters, self.module._buffers)
            for state in registry.values()
            if state is not None
        ]


class Fingerprint:
    """Describes a network, before every batch.

    Parameters
    ----------
    net
        The network, whose hooks are installed (``run.watch``).
    sees_tensors
        Whether one tensor in the place of another, kept by a module outside of its buffers, is a difference.
    """

    def __init__(self, net: nn.Module, sees_tensors: bool = True) -> None:
        self._net, self._sees_tensors = net, sees_tensors
        self._members: list[_Member] = []
        self._classes: dict[type, _Names] = {}
        self._numbers: dict[Hashable, tuple[int, list[Any]]] = {}
        self.number = self._given = 0
        """Of the attributes, children and classes as they were when last asked; 0 where they cannot be described."""

    def __call__(self) -> Hashable | None:
        """Return what tells the network's condition from others; ``None`` where Python has to run each time."""
        try:
            if not all(member.has_its_children for member in self._members) or not self._members:
                self._members = [_Member(module, self._sees_tensors) for module in self._net.modules()]
                self._renumber()
                return self()
            looked = [member.is_same() for member in self._members]
            looked += [names.is_same() for names in self._classes.values()]
            if not all(looked):
                self._renumber()
        except _Unknown:
            self._members, self.number = [], 0
            return None
        if _has_hooks_for_all() or any(runs.has_foreign_hooks(member.module) for member in self._members):
            return None
        return self.number, tuple([state for member in self._members for state in member.states()])

    def _renumber(self) -> None:
        """Give this description the number that it had before, or a new one."""
        kinds = {kind for member in self._members for kind in member.kind.__mro__} - {object, nn.Module}
        self._classes = {kind: self._classes.get(kind) or _of_class(kind) for kind in sorted(kinds, key=id)}
        described = (
            *((id(member.module), member.kind, member.names.description) for member in self._members),
            *((kind, names.description) for kind, names in self._classes.items()),
        )
        if described not in self._numbers:
            if len(self._numbers) >= MOST_NUMBERS:
                # Something changes all the time; old numbers are not given again.
                self._numbers.clear()
            self._given += 1
            every = (*(member.names for member in self._members), *self._classes.values())
            held = [member.module for member in self._members] + [item for names in every for item in names.held]
            self._numbers[described] = self._given, held
        self.number = self._numbers[described][0]


def _of_class(kind: type) -> _Names:
    """Watch a class's own methods and attributes; those that Python makes say nothing."""
    made = {name for name in vars(kind) if name.startswith("__") and name not in ("__call__", "__getattr__")}
    return _Names(vars(kind), made | {"_abc_impl"})


def _has_hooks_for_all() -> bool:
    """Whether the user has installed hooks for all modules of this process."""
    return bool(
        hooks_of_all._global_forward_hooks
        or hooks_of_all._global_forward_pre_hooks
        or hooks_of_all._global_backward_hooks
        or hooks_of_all._global_backward_pre_hooks
    )
