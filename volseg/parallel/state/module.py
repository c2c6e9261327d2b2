"""What a forward pass may leave behind in a network: buffers, and attributes of its modules.

A forward pass that is run once more than the user asked for (a block that is recomputed, an attempt to record or to
run spatially that is given up) must not count. ``remember`` notes the state before it; ``Remembered`` puts it back, or
lends it for the time of a recomputation.
"""

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from volseg.device.module_internals import (
    BUFFERS,
    PARAMETERS,
    get_buffers,
    get_parameters,
)
from volseg.device.torch_internals import get_version
from volseg.errors import ParallelError

__all__ = ["Remembered", "is_scripted", "remember"]

REGISTRIES = frozenset(vars(nn.Module())) - {"training"}
"""Attributes that ``nn.Module`` itself makes: parameters, children, hooks. What they hold is not changed by a forward
pass, except for buffers, which are remembered by value."""

CHANGEABLE = frozenset({Tensor, dict, list, set, tuple, torch.Generator, random.Random})
"""Types of attributes that are remembered with what they hold: a tuple may hold what can be changed."""

PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None), torch.Size, torch.dtype, torch.device})
"""Types that are compared by value."""

LEFT_OUT = REGISTRIES | {"_reversed_padding_repeated_twice"}
"""Attributes that are not looked into; the list is that of torch's convolutions, of which a network has many."""

NONE: dict[str, Any] = {}
"""What most modules have of most kinds of state; never changed."""


class _Known:
    """A value that can be changed in place, and what it held."""

    __slots__ = ("held", "value", "version")

    def __init__(self, value: Any) -> None:
        self.value = value
        self.held: Any = None
        kind = type(value)
        if kind is Tensor:
            self.version = _read_version(value)
            # A tensor with history cannot be changed in place without autograd's knowing.
            self.held = None if value.requires_grad else value.detach().clone()
        elif kind is dict:
            self.held = {key: _Known(item) for key, item in value.items()}
        elif kind is list:
            self.held = [_Known(item) for item in value]
        elif kind is tuple:
            self.held = tuple([_Known(item) for item in value])
        elif kind is set:
            self.held = set(value)
        elif kind is torch.Generator:
            self.held = value.get_state()
        elif kind is random.Random:
            self.held = value.getstate()

    def is_changed(self, now: Any) -> bool:
        """Say whether ``now`` stands where this value stood and says something else.

        A number, a size or a list that was made anew with the same content says the same; another tensor does not.
        """
        value, held, kind = self.value, self.held, type(now)
        if kind is not type(value):
            return True
        if kind in (list, tuple):
            return len(held) != len(now) or any(map(_Known.is_changed, held, now))
        if kind is dict:
            return held.keys() != now.keys() or any(item.is_changed(now[key]) for key, item in held.items())
        if kind is set:
            return bool(held != now)
        if now is not value:
            return kind not in PLAIN or now != value
        if kind is Tensor:
            return self._is_written()
        if kind is torch.Generator:
            return not torch.equal(now.get_state(), held)
        return kind is random.Random and now.getstate() != held

    def _is_written(self) -> bool:
        """Say whether the tensor was written to; through ``data``, that leaves no version."""
        value, held = self.value, self.held
        return _read_version(value) != self.version or (held is not None and not _is_equal(value, held))

    def restore(self) -> Any:
        """Return the value itself, holding again what it held.

        A tensor that holds it still is not written to: backward would take that for a change of what it has saved.
        """
        value, held = self.value, self.held
        if isinstance(value, torch.Generator):
            value.set_state(held)
        elif isinstance(value, random.Random):
            value.setstate(held)
        elif isinstance(held, Tensor):
            if not _fits(value, held):
                value.data = held.clone()
            if self._is_written():
                value.copy_(held)
        elif isinstance(held, dict):
            _refill(value, {key: item.restore() for key, item in held.items()})
        elif isinstance(held, list):
            value[:] = [item.restore() for item in held]
        elif isinstance(held, tuple):
            for item in held:
                item.restore()
        elif isinstance(held, set):
            _refill(value, held)
        return value

    def copy(self) -> Any:
        """Return a value of its own that holds what this one held."""
        value, held = self.value, self.held
        if isinstance(value, torch.Generator):
            generator = torch.Generator(value.device)
            generator.set_state(held)
            return generator
        if isinstance(value, random.Random):
            drawing = random.Random()  # noqa: S311 (the network's own, copied)
            drawing.setstate(held)
            return drawing
        if isinstance(held, Tensor):
            return held.clone()
        if isinstance(held, dict):
            return {key: item.copy() for key, item in held.items()}
        if isinstance(held, list):
            return [item.copy() for item in held]
        if isinstance(held, tuple):
            return tuple([item.copy() for item in held])
        return set(held) if isinstance(held, set) else value


def _is_open(value: Any) -> bool:
    """Say whether a value can be changed in place."""
    kind = type(value)
    return kind in CHANGEABLE and not (kind is tuple and PLAIN.issuperset(map(type, value)))


def _read_version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else get_version(tensor)


def _is_equal(one: Tensor, other: Tensor) -> bool:
    """Say whether two tensors hold the same; undefined values equal themselves."""
    if not _fits(one, other):
        return False
    return one.is_meta or bool(((one == other) | ((one != one) & (other != other))).all())


def _fits(tensor: Tensor, held: Tensor) -> bool:
    """Say whether a tensor can take what it held: ``resize_`` and ``data`` change its shape or its type."""
    return tensor.shape == held.shape and tensor.dtype == held.dtype and tensor.device == held.device


def _refill(container: Any, content: Any) -> None:
    container.clear()
    container.update(content)


class _Part(NamedTuple):
    """One module: its attributes as they were, those that can be changed in place, and its registries."""

    module: nn.Module
    own: dict[str, Any]
    known: dict[str, _Known]
    buffers: dict[str, _Known]
    parameters: dict[str, Any]
    versions: list[int]
    trained: list[bool]

    @classmethod
    def of(cls, module: nn.Module) -> "_Part":
        """Note a module; called for every module of every recomputed block, so it looks at no more than it must."""
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
        """Say, from identities alone, whether the module has nothing that could have changed."""
        return not (
            self.known
            or self.buffers
            or get_buffers(self.module)
            or not _is_same(vars(self.module), self.own)
            or not _is_same(get_parameters(self.module), self.parameters)
            or (self.parameters and _read_trained(self.parameters) != self.trained)
        )

    def changes(self) -> Iterator[str]:
        """Name the buffers and attributes that are not what they were."""
        for then, known, now in (
            (self.own, self.known, vars(self.module)),
            ({name: item.value for name, item in self.buffers.items()}, self.buffers, get_buffers(self.module)),
        ):
            for name in {**then, **now}:
                if name in REGISTRIES:
                    continue
                if name not in then or name not in now or known.get(name, _Known(then[name])).is_changed(now[name]):
                    yield name

    def set(self, known: dict[str, Any], buffers: dict[str, Any]) -> None:
        """Give the module its attributes of then, but for these."""
        own = vars(self.module)
        for name in own.keys() - self.own.keys():
            del own[name]
        own.update(self.own)
        own.update(known)
        _refill(get_buffers(self.module), buffers)
        _refill(get_parameters(self.module), self.parameters)
        for parameter, trained in zip(_list_present(self.parameters), self.trained, strict=True):
            if parameter.requires_grad != trained:
                parameter.requires_grad_(trained)


class Remembered:
    """The state of a network at one moment; made by ``remember``."""

    def __init__(self, net: nn.Module, values: Iterable[Tensor] = ()) -> None:
        self._paths, self._parts = [], []
        for path, module in net.named_modules():
            if not is_scripted(module):
                self._paths.append(path)
                self._parts.append(_Part.of(module))
        self._values = [(tensor, tensor.detach().clone()) for tensor in values]

    @property
    def modes(self) -> tuple[bool, ...]:
        """Whether each module was in training mode."""
        return tuple(part.own["training"] for part in self._parts)

    @torch.no_grad()
    def put_back(self, in_place: bool = True) -> None:
        """Make the network as it was: the same buffers and containers, holding what they held.

        Parameters
        ----------
        in_place
            Whether a parameter's version tells that it was changed; not where kernels were recorded and have not run.

        Raises
        ------
        ParallelError
            If a parameter was changed in place whose value was not noted.
        """
        if in_place:
            self.check_parameters()
        for tensor, value in self._values:
            # Past autograd's versions, as such changes in forward are made.
            tensor.data.copy_(value)
        for part in self._parts:
            if not part.is_unchanged():
                part.set(
                    *({name: item.restore() for name, item in kind.items()} for kind in (part.known, part.buffers))
                )

    def changes(self) -> list[str]:
        """Return the dotted names of the buffers and attributes that are not what they were."""
        found = zip(self._paths, self._parts, strict=True)
        return [f"{path}.{name}".lstrip(".") for path, part in found for name in part.changes()]

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Run with the remembered state, and with today's again afterwards.

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
            part.set(*({name: item.copy() for name, item in kind.items()} for kind in (part.known, part.buffers)))
        try:
            yield
        finally:
            for part, buffers in today:
                part.set(NONE, buffers)
            for parameter, trained in flags:
                if parameter.requires_grad != trained:
                    parameter.requires_grad_(trained)

    def check_parameters(self) -> None:
        """Refuse parameters that were changed in place since, but for those whose values were noted."""
        noted = {id(tensor) for tensor, _ in self._values}
        for part in self._parts:
            if not part.versions or part.versions == _read_versions(part.parameters):
                continue
            pairs = zip(_list_counted(part.parameters), part.versions, strict=True)
            if any(get_version(parameter) != version and id(parameter) not in noted for parameter, version in pairs):
                raise ParallelError(
                    f"a parameter among {', '.join(part.parameters)} of {type(part.module).__name__} was changed in "
                    "place after a forward pass that must be repeated or undone: take the optimizer's step behind "
                    "backward(), and keep what forward() itself changes in buffers"
                )


def remember(net: nn.Module, values: Iterable[Tensor] = ()) -> Remembered:
    """Note the buffers of a network, and the attributes of its modules, with what they hold.

    Parameters
    ----------
    net
        The network.
    values
        Parameters whose values are noted as well, because ``forward`` is known to change them; the others are not, they
        are large.
    """
    return Remembered(net, values)


def is_scripted(module: nn.Module) -> bool:
    """Say whether a module is TorchScript's, whose state cannot be exchanged: none is known for those without any."""
    if not isinstance(module, torch.jit.ScriptModule):
        return False
    if any(True for _ in module.buffers(recurse=False)):
        raise ParallelError(
            f"the scripted module {module.original_name} has buffers, which a forward pass that is repeated or given "
            "up would change once more; use the module that was scripted, or choose strategy='pipeline'"
        )
    return True


def _note_today(module: nn.Module) -> tuple[_Part, dict[str, Any]]:
    """Note a module as it is, to be set again soon: nothing of it by value."""
    parameters = dict(get_parameters(module))
    part = _Part(module, dict(vars(module)), NONE, NONE, parameters, [], _read_trained(parameters))
    return part, dict(get_buffers(module))


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
    """Say whether two dictionaries hold the same objects in the same order."""
    return len(now) == len(then) and all(map(is_, now.values(), then.values()))
