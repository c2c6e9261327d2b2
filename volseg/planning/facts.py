"""Facts from which a plan follows: the fingerprint of a data set, as numbers and names, without voxels.

Axes are those of a case turned to RAS: D to the right, H to the front, W to the head.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from pydantic import TypeAdapter

from volseg.config.catalogue import get_public_task

Lengths = tuple[float, float, float]
Sides = tuple[int, int, int]

SHARE_OF_FINE = 0.25
"""Share of the cases of a task with thick slices that are as thin as its target spacing. It is more than a tenth, which
the rule for the target spacing uses, and less than half, which the median uses."""

MOSTLY_ZERO, HARDLY_ZERO = 0.74, 1.0
"""Share of the voxels in the box of those that are not 0, if the files' size is unknown. nnU-Net's plans say on which
side of 0.75 it is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CaseSizes:
    """Sizes of one case."""

    case: str
    shape: Sides
    """D, H, W after cropping to the box of the voxels that are not 0 in any channel."""
    spacing: Lengths
    """Along D, H, W (mm)."""
    kept: float = 1.0
    """Share of the voxels that remain after cropping."""
    voxels: Mapping[int, int] = field(default_factory=dict)
    """Number of voxels of each value of the label map, before cropping."""
    largest: Mapping[str, float] = field(default_factory=dict)
    """Share of each structure's voxels that are in its largest component (26 neighbours)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Intensities:
    """One channel's intensities in the foreground of all cases; each case has the same weight."""

    mean: float
    std: float
    median: float
    min: float
    max: float
    percentile_00_5: float
    percentile_99_5: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Fingerprint:
    """Known facts of a data set.

    `volseg.planning.take_fingerprint` makes it; published numbers can also be written down by hand.
    """

    task: str
    channels: tuple[str, ...]
    labels: Mapping[int, str]
    """Name of each value, including the background's."""
    cases: tuple[CaseSizes, ...]
    """All cases with usable labels."""
    intensities: tuple[Intensities, ...] = ()
    """Intensities of each channel; empty if no voxel was read."""
    regions: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    ignore: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the whole fingerprint as values of JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        """Return the fingerprint from the output of `to_json`.

        Raises
        ------
        ValueError
            If the content is not a fingerprint.
        """
        return TypeAdapter(cls).validate_python(content)


def published_fingerprint(name: str) -> Fingerprint:
    """Return a fingerprint that agrees with nnU-Net's published numbers of a task, as far as its rules need them.

    The published numbers are the median size, the median spacing and the target spacing. So every case has the median
    size at the target spacing. Most cases have the median spacing and a quarter has the target spacing, which differs
    only for thick slices. A fingerprint of the data themselves may give another plan.

    Parameters
    ----------
    name : str
        Such as ``Task09_Spleen``, or ``9``.

    Raises
    ------
    DataError
        If there is no such task.
    """
    manifest = get_public_task(name).manifest
    known = manifest["nnunet"]
    found, target = known["fingerprint"], [float(mm) for mm in known["spacing"]]
    resampled = found["median_shape_resampled"]
    num_cases = manifest["num_training"]
    kept = MOSTLY_ZERO if found["mostly_zero"] else HARDLY_ZERO
    if found["mostly_zero"] and "stored" in manifest:
        kept = math.prod(found["median_shape"]) / math.prod(manifest["stored"]["shape"][1])
    cases = []
    for number in range(num_cases):
        mm = target if number < math.ceil(SHARE_OF_FINE * num_cases) else found["median_spacing"]
        d, h, w = (round(side * to / own) for side, to, own in zip(resampled, target, mm, strict=True))
        x, y, z = (float(side) for side in mm)
        cases.append(CaseSizes(case=f"case_{number:03d}", shape=(d, h, w), spacing=(x, y, z), kept=kept))
    return Fingerprint(
        task=manifest["name"],
        channels=tuple(manifest["modalities"]),
        labels=dict(manifest["labels"]),
        cases=tuple(cases),
        intensities=tuple(Intensities(**{of: float(x) for of, x in each.items()}) for each in found["intensities"]),
    )
