"""Add values in an order that does not depend on the number of processes.

``T(n)``, the tree over ``n`` numbered values, adds the tree over the first half to the tree over the second. If ``n``
is ``P`` times a power of two, ``T(n)`` is a tree over rounds of ``P`` neighbours each, which ``P`` processes compute at
the same time: a sum over processes and then over rounds has the order of a sum over all values.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from volseg.device.torch_internals import gather_into
from volseg.errors import ParallelError

Value = TypeVar("Value")


def fold(values: Sequence[Value], add: Callable[[Value, Value], Value]) -> Value:
    """Add values in the order of the tree.

    Examples
    --------
    >>> fold(["a", "b", "c", "d", "e"], "({}+{})".format)
    '((a+b)+(c+(d+e)))'
    """
    if len(values) == 1:
        return values[0]
    middle = len(values) // 2
    return add(fold(values[:middle], add), fold(values[middle:], add))


def sum_in_order(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum over a group's processes in the tree's order, with equal bits on each of them.

    Each process adds a part of the values for all: the traffic equals that of a ring ``all_reduce``.
    """
    count = dist.get_world_size(group)
    size = -(-values.numel() // count)
    sent = values.new_zeros(count * size)
    sent[: values.numel()] = values.reshape(-1)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    part = fold(received.view(count, size).unbind(), torch.add)
    gather_into(sent, part.contiguous(), group=group)
    return sent[: values.numel()].view(values.shape)


def add_up(values: Tensor, group: dist.ProcessGroup, fixed_order: bool) -> Tensor:
    """Return the sum over a group's processes, in the tree's order or the fastest; may overwrite the values."""
    if fixed_order:
        return sum_in_order(values, group)
    dist.all_reduce(values, group=group)
    return values


class RoundSums:
    """Gradients of several rounds of one process, added in the order of the tree over the rounds.

    Parameters
    ----------
    parameters
        Parameters whose gradients are added.
    rounds
        Number of rounds that will be pushed.

    Examples
    --------
    >>> parameter = torch.nn.Parameter(torch.zeros(()))
    >>> sums = RoundSums([parameter], 3)
    >>> for factor in (1.0, 2.0, 4.0):
    ...     (factor * parameter).backward()
    ...     sums.push()
    >>> sums.put_back()
    >>> parameter.grad
    tensor(7.)
    """

    def __init__(self, parameters: Iterable[Tensor], rounds: int) -> None:
        # Each parameter once: some optimizers and networks list one under two names.
        self._parameters = list({id(parameter): parameter for parameter in parameters}.values())
        self._rounds = rounds
        self._before = self._take()
        self._pushed = 0
        self._waiting: list[tuple[int, list[Tensor | None]]] = []
        self._ends = list(_list_ends(rounds))

    def push(self) -> None:
        """Move a round's gradients from the parameters into the sum.

        Raises
        ------
        ParallelError
            If all rounds were pushed before.
        """
        self._require(self._pushed < self._rounds, self._pushed + 1)
        self._waiting.append((self._pushed, self._take()))
        for begin in self._ends[self._pushed]:
            (_, second), (start, first) = self._waiting.pop(), self._waiting.pop()
            assert start == begin
            self._waiting.append((start, _add_each(first, second)))
        self._pushed += 1

    def put_back(self) -> None:
        """Set the parameters' gradients to the sum, added to the gradients from before the first round.

        Raises
        ------
        ParallelError
            If not all rounds were pushed.
        """
        self._require(self._pushed == self._rounds, self._pushed)
        ((_, total),) = self._waiting
        for parameter, gradient in zip(self._parameters, _add_each(self._before, total), strict=True):
            parameter.grad = gradient

    def _require(self, holds: bool, found: int) -> None:
        if not holds:
            raise ParallelError(
                f"a sum over {self._rounds} rounds got {found} round(s); push once after each backward pass"
            )

    def _take(self) -> list[Tensor | None]:
        taken = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        return taken


def _list_ends(count: int) -> list[list[int]]:
    """Return, for each value of a tree, the starts of the branches that the value completes."""
    ends: list[list[int]] = [[] for _ in range(count)]

    def visit(start: int, stop: int) -> None:
        if stop - start > 1:
            middle = start + (stop - start) // 2
            visit(start, middle)
            visit(middle, stop)
            ends[stop - 1].append(start)

    visit(0, count)
    return ends


def _add_each(first: Sequence[Tensor | None], second: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [b if a is None else a if b is None else a.add_(b) for a, b in zip(first, second, strict=True)]
