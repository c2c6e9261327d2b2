"""What a forward pass may leave behind in a network: buffers, and attributes of its modules.

A forward pass that is run once more than the user asked for (a block that is recomputed, an attempt to record or to
run spatially that is given up) must not count. ``remember`` notes the state before it; ``Remembered`` puts it back, or
lends it for the time of a recomputation.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from volseg.errors import ParallelError

__all__ = ["Remembered", "is_scripted", "remember"]

REGISTRIES = frozenset(vars(nn.Module())) - {"training"}
"""Attributes that ``nn.Module`` itself makes: parameters, children, hooks. What they hold is not changed by a forward
pass, except for buffers, which are remembered by value."""

CHANGEABLE = frozenset({Tensor, dict, list, set, torch.Generator})
"""Types of attributes that are remembered with what they hold."""


NONE: dict[str, Any] = {}
"""What most modules have of most kinds of state; never changed."""


class _Known:
    """A value that can be changed in place, and what it held."""

    __slots__ = ("held", "value")

    def __init__(self, value: Any) -> None:
        self.value = value
        self.held: Any = None
        kind = type(value)
        if kind is Tensor:
            # A tensor with history cannot be changed in place without autograd's knowing.
            self.held = None if value.requires_grad else value.detach().clone()
        elif kind is dict:
            self.held = {key: _Known(item) for key, item in value.items()}
        elif kind is list:
            self.held = [_Known(item) for item in value]
        elif kind is set:
            self.held = set(value)
        elif kind is torch.Generator:
            self.held = value.get_state()

    def restored(self) -> Any:
        """Return the value itself, holding again what it held."""
        if isinstance(self.value, torch.Generator):
            self.value.set_state(self.held)
        elif isinstance(self.held, Tensor):
            if not _fits(self.value, self.held):
                self.value.data = self.held.clone()
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
        if isinstance(self.value, torch.Generator):
            generator = torch.Generator(self.value.device)
            generator.set_state(self.held)
            return generator
        if isinstance(self.held, Tensor):
            return self.held.clone()
        if isinstance(self.held, dict):
            return {key: item.copied() for key, item in self.held.items()}
        if isinstance(self.held, list):
            return [item.copied() for item in self.held]
        return set(self.held) if isinstance(self.held, set) else self.value


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
        buffers, parameters = own["_buffers"], own["_parameters"]
        known = NONE
        # torch's own layers keep nothing in containers, and most modules of a network are those.
        if not type(module).__module__.startswith("torch.nn.modules."):
            known = {
                name: _Known(own[name]) for name in own if name not in REGISTRIES and type(own[name]) in CHANGEABLE
            }
        return cls(
            module,
            own,
            known,
            {name: _Known(value) for name, value in buffers.items()} if buffers else NONE,
            parameters.copy() if parameters else NONE,
            _versions(parameters) if parameters else [],
            _trained(parameters) if parameters else [],
        )

    def is_unchanged(self) -> bool:
        """Say, from identities alone, whether the module has nothing that could have changed."""
        return not (
            self.known
            or self.buffers
            or self.module._buffers
            or not _same(vars(self.module), self.own)
            or not _same(self.module._parameters, self.parameters)
            or (self.parameters and _trained(self.parameters) != self.trained)
        )

    def set(self, known: dict[str, Any], buffers: dict[str, Any]) -> None:
        """Give the module its attributes of then, but for these."""
        own = vars(self.module)
        for name in own.keys() - self.own.keys():
            del own[name]
        own.update(self.own)
        own.update(known)
        _refill(self.module._buffers, buffers)
        _refill(self.module._parameters, self.parameters)
        for parameter, trained in zip(_present(self.parameters), self.trained, strict=True):
            if parameter.requires_grad != trained:
                parameter.requires_grad_(trained)


class Remembered:
    """The state of a network at one moment; made by ``remember``."""

    def __init__(self, net: nn.Module) -> None:
        self._parts = [_Part.of(module) for module in net.modules() if not is_scripted(module)]

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
            If a parameter was changed in place: parameters are not remembered by value, they are large.
        """
        if in_place:
            self.check_parameters()
        for part in self._parts:
            if not part.is_unchanged():
                part.set(
                    *({name: item.restored() for name, item in kind.items()} for kind in (part.known, part.buffers))
                )

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Run with the remembered state, and with today's again afterwards.

        Values are exchanged for copies, so that neither tensors nor their versions change: autograd may have saved
        them.
        """
        self.check_parameters()
        changed = [part for part in self._parts if not part.is_unchanged()]
        today = [_today(part.module) for part in changed]
        flags = [(parameter, parameter.requires_grad) for part in changed for parameter in _present(part.parameters)]
        for part in changed:
            part.set(*({name: item.copied() for name, item in kind.items()} for kind in (part.known, part.buffers)))
        try:
            yield
        finally:
            for part, buffers in today:
                part.set(NONE, buffers)
            for parameter, trained in flags:
                if parameter.requires_grad != trained:
                    parameter.requires_grad_(trained)

    def check_parameters(self) -> None:
        """Refuse parameters that were changed in place since."""
        for part in self._parts:
            if part.versions and part.versions != _versions(part.parameters):
                raise ParallelError(
                    f"a parameter among {', '.join(part.parameters)} of {type(part.module).__name__} was changed in "
                    "place after a forward pass that must be repeated or undone: take the optimizer's step behind "
                    "backward(), and keep what forward() itself changes in buffers"
                )


def remember(net: nn.Module) -> Remembered:
    """Note the buffers of a network, and the attributes of its modules, with what they hold."""
    return Remembered(net)


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


def _today(module: nn.Module) -> tuple[_Part, dict[str, Any]]:
    """Note a module as it is, to be set again soon: nothing of it by value."""
    parameters = dict(module._parameters)
    part = _Part(module, dict(vars(module)), NONE, NONE, parameters, [], _trained(parameters))
    return part, dict(module._buffers)


def _present(parameters: dict[str, Any]) -> list[Tensor]:
    return [parameter for parameter in parameters.values() if parameter is not None]


def _versions(parameters: dict[str, Any]) -> list[int]:
    return [p._version for p in parameters.values() if p is not None and not p.is_inference()]


def _trained(parameters: dict[str, Any]) -> list[bool]:
    return [p.requires_grad for p in parameters.values() if p is not None]


def _same(now: dict[str, Any], then: dict[str, Any]) -> bool:
    """Say whether two dictionaries hold the same objects in the same order."""
    return len(now) == len(then) and all(map(is_, now.values(), then.values()))
