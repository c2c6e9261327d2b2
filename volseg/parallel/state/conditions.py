"""Tell the conditions of a network apart, and know again one that was there before: training, validation."""

from collections.abc import Callable, Hashable

from torch import nn

from volseg.parallel.state.watch import HOOKS_OF_ALL, Watch

__all__ = ["Conditions"]

MOST_NUMBERS = 64
"""Conditions that are remembered."""


class Conditions:
    """Numbers the conditions of a network; asked before every batch.

    Parameters
    ----------
    net
        The network.
    needs_python
        Whether it has something that only Python can do, such as a hook of the user's.
    sees_tensors
        Whether one tensor in the place of another is a difference.
    """

    def __init__(self, net: nn.Module, needs_python: Callable[[nn.Module], bool], sees_tensors: bool = True) -> None:
        self._net, self._ask, self._sees_tensors = net, needs_python, sees_tensors
        self._watch: Watch | None = None
        self._numbers: dict[Hashable, int] = {}
        self._given = 0
        self.number = 0
        """Of the condition when last asked."""

    def __call__(self) -> int | None:
        """Return the number of the network's condition; ``None`` where Python has to run each time."""
        if self._watch is None:
            self._watch = Watch(self._net, sees_tensors=self._sees_tensors)
            self._renumber(self._watch)
        elif self._watch.changes():
            self._renumber(self._watch)
        return None if self._needs_python else self.number

    def _renumber(self, watch: Watch) -> None:
        """Give this condition the number that it had before, or a new one."""
        description = watch.description
        if description not in self._numbers:
            if len(self._numbers) >= MOST_NUMBERS:
                # Something changes all the time; old numbers are not given again.
                self._numbers.clear()
            self._given += 1
            self._numbers[description] = self._given
        self.number = self._numbers[description]
        self._needs_python = bool(watch.unknown) or any(HOOKS_OF_ALL) or self._ask(self._net)
