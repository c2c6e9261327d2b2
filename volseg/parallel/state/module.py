"""Record and restore the state that a forward pass may change in a network: buffers, and attributes of its modules.

A forward pass that runs once more than the user asked for (a recomputed block, a failed attempt to record or to run
spatially) must have no side effects. ``remember`` records the state before the pass; ``Remembered`` restores that
state, or lends it for a recomputation.
"""

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from volseg.device.module_internals import BUFFERS, PARAMETERS, get_buffers, get_parameters
from volseg.device.torch_internals import get_version
from volseg.errors import ParallelError
from volseg.parallel.state.description import PLAIN

REGISTRIES = frozenset(vars(nn.Module())) - {"training"}
"""Attributes that ``nn.Module`` itself creates: parameters, children, hooks. A forward pass does not change their
contents, except for buffers, whose values are remembered."""

CHANGEABLE = frozenset({Tensor, dict, list, set, tuple, torch.Generator, random.Random})
"""Types of attributes that are remembered with their contents: a tuple may contain changeable values."""

LEFT_OUT = REGISTRIES | {"_reversed_padding_repeated_twice"}
"""Attributes that are not inspected; the list belongs to torch's convolutions, which are numerous."""

NONE: dict[str, Any] = {}
"""The empty state of most modules; never changed."""


DRAWN = {torch.Generator: ("get_state", "set_state"), random.Random: ("getstate", "setstate")}
"""Generators of random numbers, and the names of the methods that read and set their states."""


class _Known:
    """A value that can be changed in place, and its recorded content."""

    __slots__ = ("held", "value", "version")

    def __init__(self, value: Any) -> None:
        self.value = value
        self.held: Any = None
        kind = type(value)
        if kind is Tensor:
            self.version = read_version(value)
            # A tensor with history cannot be changed in place without autograd noticing.
            self.held = None if value.requires_grad else value.detach().clone()
        elif kind is dict:
            self.held = {key: _Known(item) for key, item in value.items()}
        elif kind is list or kind is tuple:
            self.held = kind([_Known(item) for item in value])
        elif kind is set:
            self.held = set(value)
        elif kind in DRAWN:
            self.held = getattr(value, DRAWN[kind][0])()

    def is_written(self) -> bool:
        """Return whether a tensor in it was written to; a write through ``data`` does not increase the version."""
        value, held = self.value, self.held
        if type(value) is Tensor:
            return read_version(value) != self.version or (held is not None and not _is_equal(value, held))
        inside = held.values() if isinstance(held, dict) else held if isinstance(held, list | tuple) else ()
        return any(item.is_written() for item in inside if isinstance(item, _Known))

    def restore(self) -> Any:
        """Return the value itself with its recorded content.

        A tensor with unchanged content is not written to: backward would see a change of a saved tensor.
        """
        value, held, kind = self.value, self.held, type(self.value)
        if kind in DRAWN:
            getattr(value, DRAWN[kind][1])(held)
        elif kind is Tensor and held is not None:
            if not _fits(value, held):
                value.data = held.clone()
            if self.is_written():
                value.copy_(held)
        elif kind is dict:
            _refill(value, {key: item.restore() for key, item in held.items()})
        elif kind is list or kind is tuple:
            content = [item.restore() for item in held]
            if kind is list:
                value[:] = content
        elif kind is set:
            _refill(value, held)
        return value

    def copy(self) -> Any:
        """Return a new value with the recorded content."""
        value, held, kind = self.value, self.held, type(self.value)
        if kind in DRAWN:
            fresh = torch.Generator(value.device) if kind is torch.Generator else random.Random()  # noqa: S311 (a copy)
            getattr(fresh, DRAWN[kind][1])(held)
            return fresh
        if kind is dict:
            return {key: item.copy() for key, item in held.items()}
        if kind is list or kind is tuple:
            return kind([item.copy() for item in held])
        if kind is set:
            return set(held)
        return value if held is None else held.clone()


def _is_open(value: Any) -> bool:
    """Return whether a value can be changed in place."""
    kind = type(value)
    return kind in CHANGEABLE and not (kind is tuple and PLAIN.issuperset(map(type, value)))


def read_version(tensor: Tensor) -> int:
    """Return a tensor's count of in-place changes; changes in inference mode do not count."""
    return 0 if tensor.is_inference() else get_version(tensor)


def _is_equal(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have equal values; NaN equals NaN."""
    if not _fits(one, other):
        return False
    return one.is_meta or bool(((one == other) | ((one != one) & (other != other))).all())


def _fits(tensor: Tensor, held: Tensor) -> bool:
    """Return whether a tensor can take its recorded values: ``resize_`` and ``data`` change shape or type."""
    return tensor.shape == held.shape and tensor.dtype == held.dtype and tensor.device == held.device


def _refill(container: Any, content: Any) -> None:
    container.clear()
    container.update(content)


class _Part(NamedTuple):
    """State of one module: its attributes, the contents of changeable ones, and its registries."""

    module: nn.Module
    own: dict[str, Any]
    known: dict[str, _Known]
    buffers: dict[str, Any]
    parameters: dict[str, Any]
    versions: list[int]
    trained: list[bool]

    @classmethod
    def of(cls, module: nn.Module) -> "_Part":
        """Record a module; called for every module of every recomputed block, so it inspects as little as possible."""
        own = vars(module).copy()
        buffers, parameters = own[BUFFERS], own[PARAMETERS]
        return cls(
            module,
            own,
            {name: _Known(own[name]) for name in own.keys() - LEFT_OUT if _is_open(own[name])},
            {name: _Known(value) for name, value in buffers.items()} if buffers else NONE,
            parameters.copy() if parameters else NONE,
            _read_versions(parameters) if parameters else [],
            _read_trained(parameters) if parameters else [],
        )

    def is_unchanged(self) -> bool:
        """Return whether, by identities only, the module has nothing that could have changed."""
        return not (
            self.known
            or self.buffers
            or get_buffers(self.module)
            or not _is_same(vars(self.module), self.own)
            or not _is_same(get_parameters(self.module), self.parameters)
            or (self.parameters and _read_trained(self.parameters) != self.trained)
        )

    def set(self, get: Callable[[Any], Any]) -> None:
        """Restore the module's attributes, parameters and buffers; ``get`` returns a changeable value's content."""
        own = vars(self.module)
        for name in own.keys() - self.own.keys():
            del own[name]
        own.update(self.own)
        own.update({name: get(value) for name, value in self.known.items()})
        _refill(get_buffers(self.module), {name: get(value) for name, value in self.buffers.items()})
        _refill(get_parameters(self.module), self.parameters)
        for parameter, trained in zip(_list_present(self.parameters), self.trained, strict=True):
            if parameter.requires_grad != trained:
                parameter.requires_grad_(trained)


class Remembered:
    """State of a network at one moment; made by ``remember``."""

    def __init__(self, net: nn.Module, values: Iterable[Tensor] = ()) -> None:
        self._parts = [_Part.of(module) for module in net.modules() if not is_scripted(module)]
        self._values = [(tensor, tensor.detach().clone()) for tensor in values]

    @property
    def modes(self) -> tuple[bool, ...]:
        """Whether each module was in training mode."""
        return tuple(part.own["training"] for part in self._parts)

    @torch.no_grad()
    def put_back(self, in_place: bool = True) -> None:
        """Restore the network: the same buffers and containers, with their recorded contents.

        Parameters
        ----------
        in_place
            Whether a higher version of a parameter means a change; False if kernels were recorded and have not run.

        Raises
        ------
        ParallelError
            If a parameter was changed in place and its value was not recorded.
        """
        if in_place:
            self.check_parameters()
        for tensor, value in self._values:
            # Without a new version: forward makes such changes past autograd too.
            tensor.data.copy_(value)
        for part in self._parts:
            if not part.is_unchanged():
                part.set(_Known.restore)

    def list_written(self) -> list[str]:
        """Return the names of buffers, and of attributes with tensors, that were written to since then."""
        named = (item for part in self._parts for item in (*part.known.items(), *part.buffers.items()))
        return [name for name, known in named if known.is_written()]

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Run the block with the remembered state, and restore the current state afterwards.

        Values are exchanged for copies, so that neither tensors nor their versions change: autograd may have saved
        them.
        """
        self.check_parameters()
        changed = [part for part in self._parts if not part.is_unchanged()]
        today = [_note_today(part.module) for part in changed]
        flags = [
            (parameter, parameter.requires_grad) for part in changed for parameter in _list_present(part.parameters)
        ]
        for part in changed:
            part.set(_Known.copy)
        try:
            yield
        finally:
            for part in today:
                part.set(lambda value: value)
            for parameter, trained in flags:
                if parameter.requires_grad != trained:
                    parameter.requires_grad_(trained)

    def check_parameters(self) -> None:
        """Refuse parameters that were changed in place since then, except those whose values were recorded."""
        noted = {id(tensor) for tensor, _ in self._values}
        for part in self._parts:
            if not part.versions or part.versions == _read_versions(part.parameters):
                continue
            pairs = zip(_list_counted(part.parameters), part.versions, strict=True)
            if any(get_version(parameter) != version and id(parameter) not in noted for parameter, version in pairs):
                raise ParallelError(
                    f"a parameter among {', '.join(part.parameters)} of {type(part.module).__name__} was changed in "
                    "place after a forward pass that must be repeated or undone: run the optimizer's step after "
                    "backward(), and store values that forward() changes in buffers"
                )


def remember(net: nn.Module, values: Iterable[Tensor] = ()) -> Remembered:
    """Record the buffers of a network and the attributes of its modules, with their contents.

    Parameters
    ----------
    net
        The network.
    values
        Parameters whose values are recorded too, because ``forward`` is known to change them; the others are large, and
        are not recorded.
    """
    return Remembered(net, values)


def is_scripted(module: nn.Module) -> bool:
    """Return whether a module is TorchScript's; refuse one with buffers, which cannot be exchanged."""
    if not isinstance(module, torch.jit.ScriptModule):
        return False
    if any(True for _ in module.buffers(recurse=False)):
        raise ParallelError(
            f"the scripted module {module.original_name} has buffers, which a repeated or aborted forward pass would "
            "change again; use the original Python module, or strategy='pipeline'"
        )
    return True


def _note_today(module: nn.Module) -> _Part:
    """Record a module for a short exchange, without copies of its contents."""
    parameters, buffers = dict(get_parameters(module)), dict(get_buffers(module))
    return _Part(module, dict(vars(module)), NONE, buffers, parameters, [], _read_trained(parameters))


def _list_present(parameters: dict[str, Any]) -> list[Tensor]:
    return [parameter for parameter in parameters.values() if parameter is not None]


def _list_counted(parameters: dict[str, Any]) -> list[Tensor]:
    """Return the parameters whose changes torch counts."""
    return [p for p in parameters.values() if p is not None and not p.is_inference()]


def _read_versions(parameters: dict[str, Any]) -> list[int]:
    return [get_version(p) for p in _list_counted(parameters)]


def _read_trained(parameters: dict[str, Any]) -> list[bool]:
    return [p.requires_grad for p in parameters.values() if p is not None]


def _is_same(now: dict[str, Any], then: dict[str, Any]) -> bool:
    """Return whether two dictionaries hold the same objects in the same order."""
    return len(now) == len(then) and all(map(is_, now.values(), then.values()))
