"""What a forward pass may leave behind in a network: buffers, and attributes of its modules.

A forward pass that is run once more than the user asked for (a block that is recomputed, an attempt to record or to
run spatially that is given up) must not count. ``remember`` notes the state before it; ``Remembered`` puts it back, or
lends it for the time of a recomputation.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Remembered", "remember"]

REGISTRIES = frozenset(vars(nn.Module()))
"""Attributes that ``nn.Module`` itself makes: parameters, children, hooks. What they hold is not changed by a forward
pass, except for buffers, which are remembered by value."""


@dataclass(frozen=True, slots=True)
class _Known:
    """A value, and what it held at the time where it can be changed in place."""

    value: Any
    held: Any = None
    version: int = 0
    """Of a tensor: one that has not been written to needs no writing back, which backward would take for a change."""

    @classmethod
    def of(cls, value: Any) -> "_Known":
        """Note a value: plain tensors without history by value, containers with what they contain."""
        if type(value) is Tensor and not value.requires_grad:
            return cls(value, value.detach().clone(), _version(value))
        if type(value) is dict:
            return cls(value, {key: cls.of(item) for key, item in value.items()})
        if type(value) is list:
            return cls(value, [cls.of(item) for item in value])
        if type(value) is tuple:
            return cls(value, tuple(cls.of(item) for item in value))
        if type(value) is set:
            return cls(value, set(value))
        if isinstance(value, GENERATORS):
            return cls(value, _draws(value))
        return cls(value)

    def is_changed(self, now: Any) -> bool:
        """Whether ``now`` stands where this value stood and says something else.

        A number, a size or a list that was made anew with the same content says the same; another tensor does not.
        """
        if type(now) is not type(self.value):
            return True
        if isinstance(self.held, list | tuple):
            pairs = zip(self.held, now, strict=False)
            return len(self.held) != len(now) or any(known.is_changed(item) for known, item in pairs)
        if isinstance(self.held, dict):
            held = self.held
            return held.keys() != now.keys() or any(known.is_changed(now[key]) for key, known in held.items())
        if isinstance(now, GENERATORS):
            return now is not self.value or not _same_draws(self.held, _draws(now))
        if isinstance(now, Tensor):
            return now is not self.value or (isinstance(self.held, Tensor) and self._is_written())
        if isinstance(self.held, set):
            return bool(self.held != now)
        return now is not self.value and (not isinstance(now, PLAIN) or now != self.value)

    def _is_written(self) -> bool:
        # A change through ``.data`` leaves no new version.
        return _version(self.value) != self.version or not _equal(self.value, self.held)

    def restored(self) -> Any:
        """Return the value itself, holding again what it held."""
        if isinstance(self.value, GENERATORS):
            _draw_from(self.value, self.held)
        elif isinstance(self.held, Tensor):
            if self._is_written():
                self.value.copy_(self.held)
        elif isinstance(self.held, dict):
            _refill(self.value, {key: item.restored() for key, item in self.held.items()})
        elif isinstance(self.held, list):
            self.value[:] = [item.restored() for item in self.held]
        elif isinstance(self.held, tuple):
            for item in self.held:
                item.restored()
        elif isinstance(self.held, set):
            _refill(self.value, self.held)
        return self.value

    def copied(self) -> Any:
        """Return a value of its own that holds what this one held."""
        if isinstance(self.value, GENERATORS):
            return self.value
        if isinstance(self.held, Tensor):
            return self.held.clone()
        if isinstance(self.held, dict):
            return {key: item.copied() for key, item in self.held.items()}
        if isinstance(self.held, list):
            return [item.copied() for item in self.held]
        if isinstance(self.held, tuple):
            return tuple(item.copied() for item in self.held)
        return set(self.held) if isinstance(self.held, set) else self.value


GENERATORS = (torch.Generator, random.Random)
"""Modules may own generators of random numbers."""

PLAIN = (bool, int, float, str, torch.Size, torch.dtype, torch.device)
"""Types that are compared by value."""


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _equal(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors hold the same; undefined values equal themselves."""
    if one.is_meta:
        return True
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return bool(((one == other) | ((one != one) & (other != other))).all())


def _draws(generator: Any) -> Any:
    return generator.get_state() if isinstance(generator, torch.Generator) else generator.getstate()


def _same_draws(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, Tensor) else bool(one == other)


def _draw_from(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    else:
        generator.setstate(state)


def _refill(container: Any, content: Any) -> None:
    container.clear()
    container.update(content)


class Remembered:
    """The state of a network at one moment; made by ``remember``."""

    def __init__(self, net: nn.Module) -> None:
        self._modules: list[tuple[nn.Module, dict[str, _Known], dict[str, _Known]]] = []
        self._paths: list[str] = []
        for path, module in net.named_modules():
            self._paths.append(path)
            buffers, attributes = _parts(module)
            self._modules.append((module, _known(buffers), _known(attributes)))

    @torch.no_grad()
    def put_back(self) -> None:
        """Make the network as it was: the same buffers and containers, holding what they held."""
        for module, buffers, attributes in self._modules:
            _set(module, *({name: known.restored() for name, known in part.items()} for part in (buffers, attributes)))

    def changes(self) -> list[str]:
        """Return the dotted names of the buffers and attributes that are not what they were."""
        found = []
        for path, (module, *parts) in zip(self._paths, self._modules, strict=True):
            for then, now in zip(parts, _parts(module), strict=True):
                names = [name for name in {**then, **now} if name not in then or name not in now]
                names += [name for name, known in then.items() if name in now and known.is_changed(now[name])]
                found += [f"{path}.{name}".lstrip(".") for name in names]
        return found

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Run with the remembered state, and with today's again afterwards.

        Values are exchanged for copies, so that neither tensors nor their versions change: autograd may have saved
        them.
        """
        now = [(module, *_parts(module)) for module, _, _ in self._modules]
        for module, buffers, attributes in self._modules:
            _set(module, *({name: known.copied() for name, known in part.items()} for part in (buffers, attributes)))
        try:
            yield
        finally:
            for module, buffers, attributes in now:
                _set(module, buffers, attributes)


def _known(values: dict[str, Any]) -> dict[str, _Known]:
    return {name: _Known.of(value) for name, value in values.items()}


def remember(net: nn.Module) -> Remembered:
    """Note the buffers of a network, and the attributes of its modules, with what they hold."""
    return Remembered(net)


def _parts(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    own = {name: value for name, value in vars(module).items() if name not in REGISTRIES}
    return dict(module._buffers), own


def _set(module: nn.Module, buffers: dict[str, Any], attributes: dict[str, Any]) -> None:
    _refill(module._buffers, buffers)
    own = vars(module)
    for name in [name for name in own if name not in REGISTRIES and name not in attributes]:
        del own[name]
    own.update(attributes)
