"""Cut a sequence of layers into stages, and predict memory and time of a batch: pure arithmetic, exact.

A loss comes after the last micro-batch, so all forwards end before a backward starts::

    stage 0  F0 F1 F2 F3                    B3 B2 B1 B0
    stage 1     F0 F1 F2 F3              B3 B2 B1 B0
    stage 2        F0 F1 F2 F3 (loss) B3 B2 B1 B0

The forward phase is as fast as the stage with the slowest forward, the backward phase as the one with the slowest
backward, and these need not be the same: the cut minimises the sum of the two. (Balancing forward and backward
together, as if they interleaved, would cost MONAI's V-Net 7 % on four stages, by its layers' times on an H200.) Of cuts
within ``TOLERANCE`` of the fastest, the one whose fullest device holds least is taken. If that device still holds more
than ``EVEN`` times the mean, phases slower by up to ``PRICE`` are accepted to fix that. No further time is traded: if
memory is scarce, the devices' limits decide. Nothing here touches a module or a device.

The memory of layers does not add up. A tensor that several layers keep for backward is held once by a stage with all of
them, and once by each of the stages that share them: a skip, and the result of an in-place activation for the
convolution behind a cut. A recorded batch holds more. A tensor that crosses a cut has memory on both sides, and so has
its gradient, since copies between graphs need fixed addresses (``recorded_batch``): a stage that only passes a tensor
on also holds the tensor.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from volseg.errors import PartitionError

TOLERANCE = 0.02
"""Accepted slowdown of each phase, relative to the fastest, to even out memory."""

EVEN = 1.3
"""Accepted ratio of the fullest device to the mean, if the layers allow it."""

PRICE = 0.1
"""Accepted slowdown of each phase to reach ``EVEN``."""

# Differences of float sums differ in the last bits from sums taken in order.
SLACK = 1 + 1e-9

UNLIMITED = float("inf")

Held: TypeAlias = npt.NDArray[np.float64]
"""``held[start, end]``: cost of a stage of the layers [start, end), for 0 <= start < end."""


@dataclass(frozen=True, slots=True)
class KeptActivation:
    """A block of memory of one micro-batch, by the numbers of the layers that use it."""

    num_bytes: int
    made: int
    read: tuple[int, ...] = ()
    """The number of layers itself is the caller."""
    kept: tuple[int, ...] = ()
    """Layers that keep it for backward."""


def compute_held_bytes(activations: Iterable[KeptActivation], layers: int, is_recorded: bool) -> Held:
    """Return the bytes that each run of layers holds between forward and backward.

    Examples
    --------
    Layer 0 makes four bytes that it keeps, and layer 1 reads and keeps:

    >>> shared = KeptActivation(4, made=0, read=(1,), kept=(0, 1))
    >>> compute_held_bytes([shared], layers=2, is_recorded=False)[0].tolist()
    [0.0, 4.0, 4.0]
    >>> compute_held_bytes([shared], layers=2, is_recorded=True)[0].tolist()  # its gradient crosses the cut as well
    [0.0, 8.0, 4.0]
    """
    ends = np.arange(layers + 1)
    starts = ends[:, None]
    total = np.zeros((layers + 1, layers + 1))
    for activation in activations:
        copies = _is_any_within(activation.kept, layers)
        if is_recorded:
            was_received = _is_any_within(activation.read, layers) & (activation.made < starts)
            is_read_later = max(activation.read, default=-1) >= ends
            is_sent = (starts <= activation.made) & (activation.made < ends) & is_read_later
            copies = np.where(was_received | is_sent, 2, copies)
        total += activation.num_bytes * copies
    return total


def _is_any_within(layers: Sequence[int], count: int) -> npt.NDArray[np.bool_]:
    """Return, for each [start, end), whether it contains one of ``layers``."""
    return sum_runs(np.bincount(np.array(layers, dtype=int), minlength=count + 1)[:count]) > 0


def sum_runs(values: npt.ArrayLike) -> Held:
    """Return the table of an additive cost.

    Examples
    --------
    >>> sum_runs([1.0, 2.0])[0].tolist()
    [0.0, 1.0, 3.0]
    """
    before = np.concatenate([[0.0], np.cumsum(values)])
    return before - before[:, None]


Found = tuple[tuple[float, ...], tuple[int, ...]]
"""Largest stage of a cut in each cost, and the cut's lengths."""


def balance(
    forward: Sequence[float],
    stages: int,
    backward: Sequence[float] | None = None,
    held: Held | None = None,
    memory_limits: Sequence[float] | None = None,
    tolerance: float = TOLERANCE,
    price: float = PRICE,
) -> list[int]:
    """Cut layers into consecutive non-empty stages, minimising the slowest forward plus the slowest backward.

    Parameters
    ----------
    forward, backward
        Milliseconds per layer, non-negative; no backward by default.
    stages
        Between one and the number of layers.
    held
        Bytes of every possible stage. Of cuts whose phases are within ``tolerance`` of the fastest's, the one whose
        fullest stage holds least wins.
    memory_limits
        Bytes that each stage may hold.
    tolerance
        Relative slack in time, of each phase.
    price
        The slack if the fullest stage then holds at most ``EVEN`` times the mean, and otherwise more.

    Returns
    -------
    list of int
        Layers per stage.

    Raises
    ------
    PartitionError
        If there are fewer layers than stages, or no cut respects the limits.

    Examples
    --------
    >>> balance([3, 1, 1, 1, 2], 2)
    [2, 3]
    >>> balance([1, 1, 2, 2], 2, backward=[5, 1, 2, 2])
    [2, 2]
    """
    layers = len(forward)
    if not 1 <= stages <= layers:
        raise PartitionError(f"cannot split {layers} layers into {stages} non-empty stages; use 1 to {layers} devices")
    behind = [0.0] * layers if backward is None else backward
    phases = [sum_runs(forward), sum_runs(behind)]
    memory = np.zeros((layers + 1, layers + 1)) if held is None else held
    free = [UNLIMITED] * stages
    limits = free if memory_limits is None else list(memory_limits)
    front = _compute_front([*phases, memory], [free, free, limits], minimised=2)
    if not front:
        peak = max(list_held(memory, balance_stages(memory, stages)))
        raise PartitionError(
            f"no cut into {stages} stages fits: even the most even one needs {peak / 2**30:.3f} GiB on one device, and "
            f"the devices have {', '.join(f'{limit / 2**30:.3f}' for limit in limits)} GiB; use more devices, a "
            "smaller batch or smaller volumes"
        )
    fastest, lengths = min(front, key=lambda found: (sum(found[0]), found))
    if held is None:
        return list(lengths)
    slacks = tolerance, max(tolerance, price)
    cuts = [_compute_least_full(phases, fastest, held, limits, slack) for slack in slacks]
    return list(next((cut for cut in cuts if measure_unevenness(held, cut) <= EVEN), cuts[0]))


def _compute_least_full(
    phases: Sequence[Held], fastest: Sequence[float], held: Held, limits: Sequence[float], tolerance: float
) -> tuple[int, ...]:
    """Return the cut whose fullest stage holds least, among those that are nearly as fast as the fastest.

    Parameters
    ----------
    phases
        Forward and backward time of every possible stage.
    fastest
        The slowest stage of the fastest cut, in each phase.
    held, limits
        Bytes of every possible stage, and the limit of each stage.
    tolerance
        Relative slack of a phase.
    """
    quick = [[phase * (1 + tolerance)] * len(limits) for phase in fastest]
    ((_, lengths),) = _compute_front([held, *phases], [limits, *quick], minimised=1)
    return lengths


def list_held(held: Held, lengths: Sequence[int]) -> list[float]:
    """Return the bytes that each stage holds, or its time in a table of times.

    Examples
    --------
    >>> list_held(sum_runs([1, 2, 3, 4]), [1, 3])
    [1.0, 9.0]
    """
    return [float(held[start, end]) for start, end in pairwise([0, *accumulate(lengths)])]


def measure_unevenness(held: Held, lengths: Sequence[int]) -> float:
    """Return the bytes of the fullest stage, as a multiple of the mean."""
    stages = list_held(held, lengths)
    return max(stages) * len(stages) / sum(stages) if sum(stages) else 1.0


def balance_stages(held: Held, stages: int) -> list[int]:
    """Return the layers per stage of the cut whose fullest stage holds least."""
    ((_, lengths),) = _compute_front([held], [[UNLIMITED] * stages], minimised=1)
    return list(lengths)


def _compute_front(costs: Sequence[Held], limits: Sequence[Sequence[float]], minimised: int) -> list[Found]:
    """Return the Pareto front of cuts in the first ``minimised`` costs (one or two).

    A cut's cost is its largest stage in each cost; every stage respects its ``limits[cost][stage]``. Each cut comes
    with these maxima. Dynamic programming over the layers; the fronts stay short, a dozen cuts.
    """
    layers, tables = len(costs[0]) - 1, [cost.tolist() for cost in costs]
    best: list[list[Found]] = [[((0.0,) * minimised, ())], *([] for _ in range(layers))]
    for stage, allowed in enumerate(zip(*limits, strict=True)):
        reached: list[list[Found]] = [[] for _ in best]
        for end in range(stage + 1, layers + 1):
            found = []
            for start in range(stage, end):
                spent = [table[start][end] for table in tables]
                if best[start] and all(cost <= limit * SLACK for cost, limit in zip(spent, allowed, strict=True)):
                    found += [
                        (tuple(map(max, worst, spent)), (*lengths, end - start)) for worst, lengths in best[start]
                    ]
            least = UNLIMITED
            for worst, lengths in sorted(found):
                if worst[-1] < least:
                    least = worst[-1]
                    reached[end].append((worst, lengths))
        best = reached
    return best[-1]


def predict_ms(forward: Sequence[float], backward: Sequence[float], micro_batches: int, copy_ms: float = 0.0) -> float:
    """Return the time of a batch over stages.

    In each phase, the first micro-batch flows through all stages, and each further one adds the slowest stage.

    Parameters
    ----------
    forward, backward
        Milliseconds of each stage for one micro-batch.
    micro_batches
        Number per batch.
    copy_ms
        Time of the first micro-batch's copies between all stages.

    Examples
    --------
    >>> predict_ms([2, 3], [4, 4], micro_batches=4)
    34.0
    """
    return float(sum(sum(stages) + copy_ms + (micro_batches - 1) * max(stages) for stages in (forward, backward)))


def choose_quickest(candidates: dict[int, float]) -> int:
    """Return the fastest split size, or number of stages; within 2 % the largest.

    A larger micro-batch queues fewer kernels, and with more stages each stage holds less.

    Examples
    --------
    >>> choose_quickest({1: 9.0, 2: 5.0, 4: 5.05, 8: 7.0})
    4
    """
    least = min(candidates.values())
    return max(size for size, ms in candidates.items() if ms <= least * 1.02)
