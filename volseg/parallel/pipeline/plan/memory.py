"""Compute the memory that each possible stage of a network holds for one micro-batch: pure arithmetic, exact.

The memory of layers does not add up. A tensor that several layers keep for backward is held once by a stage with all of
them, and once by each of the stages that share them: a skip, and the result of an in-place activation for the
convolution behind a cut. A recorded batch holds more. A tensor that crosses a cut has memory on both sides, and so has
its gradient, since copies between graphs need fixed addresses (``record``): a stage that only passes a tensor on also
holds the tensor.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

Held = Sequence[Sequence[float]]
"""``held[start][end]``: cost of a stage of the layers [start, end), for 0 <= start < end."""


@dataclass(frozen=True, slots=True)
class KeptActivation:
    """A block of memory of one micro-batch, by the numbers of the layers that use it."""

    num_bytes: int
    made: int
    read: tuple[int, ...] = ()
    """The number of layers itself is the caller."""
    kept: tuple[int, ...] = ()
    """Layers that keep it for backward."""


def compute_held_bytes(activations: Iterable[KeptActivation], layers: int, is_recorded: bool) -> list[list[float]]:
    """Return the bytes that each run of layers holds between forward and backward.

    Examples
    --------
    Layer 0 makes four bytes that it keeps, and layer 1 reads and keeps:

    >>> shared = KeptActivation(4, made=0, read=(1,), kept=(0, 1))
    >>> held = compute_held_bytes([shared], layers=2, is_recorded=False)
    >>> held[0][2], held[0][1], held[1][2]
    (4.0, 4.0, 4.0)
    >>> compute_held_bytes([shared], layers=2, is_recorded=True)[0][1]  # its gradient as well
    8.0
    """
    ends = torch.arange(layers + 1)
    starts = ends[:, None]
    total = torch.zeros(layers + 1, layers + 1, dtype=torch.float64)
    for activation in activations:
        is_kept = _compute_any_within(activation.kept, layers)
        if is_recorded:
            was_received = _compute_any_within(activation.read, layers) & (activation.made < starts)
            is_read_later = max(activation.read, default=-1) >= ends
            is_sent = (starts <= activation.made) & (activation.made < ends) & is_read_later
            crosses = was_received | is_sent
            copies = (is_kept | crosses).to(total) + crosses.to(total)
        else:
            copies = is_kept.to(total)
        total += activation.num_bytes * copies
    return [list(map(float, row)) for row in total.tolist()]


def _compute_any_within(layers: Sequence[int], count: int) -> torch.Tensor:
    """Return, for each [start, end), whether it contains one of ``layers``."""
    has = torch.zeros(count + 2, dtype=torch.int64)
    has[1 + torch.tensor(sorted(set(layers)), dtype=torch.int64)] = 1
    before = has.cumsum(0)[: count + 1]
    return before[None, :] > before[:, None]


def sum_runs(values: Sequence[float]) -> list[list[float]]:
    """Return the table of an additive cost.

    Examples
    --------
    >>> sum_runs([1.0, 2.0])[0]
    [0.0, 1.0, 3.0]
    """
    before = [0.0]
    for value in values:
        before.append(before[-1] + value)
    return [[end - start for end in before] for start in before]
