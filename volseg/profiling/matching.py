"""Which kernel of a replayed step is which of the same step run eagerly.

A replay has the kernels of the step that was recorded and no Python, so no profiler knows for what each runs. It has
other streams and another order between them than the eager step. So a kernel is found by what both tell of it, its
name and its grid: where both steps have as many of a sort, the first is the first, the second the second::

    eager     conv a   norm   conv a   copy   conv b
    replay    conv a   copy   norm   conv a   memset   conv b
                 1       1      1      2        -        1

What is left (copies of inputs, which only a replay has; a kernel that a library chose anew) belongs where the matched
kernel before it does that computes, and counts as not matched.
"""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from math import fsum

from volseg.profiling.kernels import OUTSIDE, StepPlace

__all__ = ["SeenKernel", "match"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenKernel:
    """What a profiler tells of a kernel, whoever started it."""

    name: str
    grid: tuple[int, ...] = ()
    device: int = 0
    seconds: float = 0.0


def match(
    replayed: Sequence[SeenKernel], eager: Sequence[tuple[SeenKernel, StepPlace]]
) -> tuple[list[StepPlace], float]:
    """Return the place of each replayed kernel, and the part of their time that was matched.

    Parameters
    ----------
    replayed
        Kernels of one step, in order of their begin.
    eager
        Those of the step with their places, in order of their begin.
    """
    found: dict[int, int] = {}
    for name_sort in (_by_grid, _by_name):
        left = [number for number in range(len(replayed)) if number not in found]
        free = sorted(set(range(len(eager))) - set(found.values()))
        found |= _match_sorts(
            {number: name_sort(replayed[number]) for number in left},
            {number: name_sort(eager[number][0]) for number in free},
        )
    total = fsum(kernel.seconds for kernel in replayed)
    matched = fsum(replayed[number].seconds for number in found)
    places, before = [], StepPlace(OUTSIDE, "other")
    for number in range(len(replayed)):
        place = eager[found[number]][1] if number in found else before
        before = place if place.direction != "communication" else before
        places.append(place)
    return places, matched / total if total else 1.0


def _match_sorts(replayed: dict[int, Hashable], eager: dict[int, Hashable]) -> dict[int, int]:
    """Return the partners of kernels of those sorts of which both have as many."""
    theirs = _group(eager)
    found: dict[int, int] = {}
    for sort, own in _group(replayed).items():
        others = theirs.get(sort, [])
        if len(own) == len(others):
            found.update(zip(own, others, strict=True))
    return found


def _group(kernels: dict[int, Hashable]) -> dict[Hashable, list[int]]:
    found: dict[Hashable, list[int]] = defaultdict(list)
    for number, sort in kernels.items():
        found[sort].append(number)
    return found


def _by_grid(kernel: SeenKernel) -> Hashable:
    return kernel.name, kernel.grid, kernel.device


def _by_name(kernel: SeenKernel) -> Hashable:
    return kernel.name, kernel.device
