"""What a forward pass may leave behind in a network: buffers, and attributes of its modules.

A forward pass that is run once more than the user asked for (a block that is recomputed, an attempt to record or to
run spatially that is given up) must not count. ``remember`` notes the state before it; ``Remembered`` puts it back, or
lends it for the time of a recomputation.
"""

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

    @classmethod
    def of(cls, value: Any) -> "_Known":
        """Note a value: plain tensors without history by value, containers with what they contain."""
        if type(value) is Tensor and not value.requires_grad:
            return cls(value, value.detach().clone())
        if type(value) is dict:
            return cls(value, {key: cls.of(item) for key, item in value.items()})
        if type(value) is list:
            return cls(value, [cls.of(item) for item in value])
        if type(value) is set:
            return cls(value, set(value))
        return cls(value)

    def restored(self) -> Any:
        """Return the value itself, holding again what it held."""
        if isinstance(self.held, Tensor):
            self.value.copy_(self.held)
        elif isinstance(self.held, dict):
            _refill(self.value, {key: item.restored() for key, item in self.held.items()})
        elif isinstance(self.held, list):
            self.value[:] = [item.restored() for item in self.held]
        elif isinstance(self.held, set):
            _refill(self.value, self.held)
        return self.value

    def copied(self) -> Any:
        """Return a value of its own that holds what this one held."""
        if isinstance(self.held, Tensor):
            return self.held.clone()
        if isinstance(self.held, dict):
            return {key: item.copied() for key, item in self.held.items()}
        if isinstance(self.held, list):
            return [item.copied() for item in self.held]
        return set(self.held) if isinstance(self.held, set) else self.value


def _refill(container: Any, content: Any) -> None:
    container.clear()
    container.update(content)


class Remembered:
    """The state of a network at one moment; made by ``remember``."""

    def __init__(self, net: nn.Module) -> None:
        self._modules: list[tuple[nn.Module, dict[str, _Known], dict[str, _Known]]] = []
        for module in net.modules():
            buffers, attributes = _parts(module)
            self._modules.append((module, _known(buffers), _known(attributes)))

    @torch.no_grad()
    def put_back(self) -> None:
        """Make the network as it was: the same buffers and containers, holding what they held."""
        for module, buffers, attributes in self._modules:
            _set(module, *({name: known.restored() for name, known in part.items()} for part in (buffers, attributes)))

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
