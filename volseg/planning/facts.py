"""Facts from which a plan follows: the fingerprint of a data set, as numbers and names, without voxels.

Axes are those of a case turned to RAS: D to the right, H to the front, W to the head.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from pydantic import TypeAdapter

__all__ = ["CaseSizes", "Fingerprint", "Intensities"]

Lengths = tuple[float, float, float]
Sides = tuple[int, int, int]


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
