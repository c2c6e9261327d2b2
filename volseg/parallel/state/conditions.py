"""Distinguish the conditions of a network, and recognise earlier ones, such as training and validation."""

from collections.abc import Callable, Hashable

from torch import nn

from volseg.device.module_internals import HOOKS_OF_ALL_MODULES
from volseg.parallel.state.watch import Watch

MOST_NUMBERS = 64
"""Number of conditions that are remembered."""


class Conditions:
    """Number the conditions of a network; called before every batch.

    Parameters
    ----------
    net
        The network.
    needs_python
        Returns whether the network needs Python on each call, for example for a user's hook.
    sees_tensors
        Whether a tensor that replaces another one is a difference.
    """

    def __init__(self, net: nn.Module, needs_python: Callable[[nn.Module], bool], sees_tensors: bool = True) -> None:
        self._net, self._ask, self._sees_tensors = net, needs_python, sees_tensors
        self._watch: Watch | None = None
        self._numbers: dict[Hashable, int] = {}
        self._given = 0
        self.number = 0
        """Number of the condition at the last call."""

    def __call__(self) -> int | None:
        """Return the number of the network's condition; ``None`` if Python has to run each time."""
        if self._watch is None:
            self._watch = Watch(self._net, sees_tensors=self._sees_tensors)
            self._renumber(self._watch)
        elif self._watch.changes():
            self._renumber(self._watch)
        return None if self._needs_python else self.number

    def _renumber(self, watch: Watch) -> None:
        """Give this condition its earlier number, or a new one."""
        description = watch.description
        if description not in self._numbers:
            if len(self._numbers) >= MOST_NUMBERS:
                # The conditions change all the time; old numbers are not used again.
                self._numbers.clear()
            self._given += 1
            self._numbers[description] = self._given
        self.number = self._numbers[description]
        self._needs_python = bool(watch.unknown) or any(HOOKS_OF_ALL_MODULES) or self._ask(self._net)
