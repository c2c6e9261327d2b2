"""What a plan is made from: the fingerprint of a data set, as numbers and names, without a voxel.

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
    """One case."""

    case: str
    shape: Sides
    """D, H, W after cropping to the box of what is not 0 in any channel (voxels)."""
    spacing: Lengths
    """Along D, H, W (mm)."""
    kept: float = 1.0
    """Share of the voxels that the cropping leaves."""
    voxels: Mapping[int, int] = field(default_factory=dict)
    """How many voxels each value of the label map has, before cropping."""
    largest: Mapping[str, float] = field(default_factory=dict)
    """Share of the voxels of each structure of the case in its largest component (26 neighbours)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Intensities:
    """One channel's intensities in the foreground of all cases, each case counting alike."""

    mean: float
    std: float
    median: float
    min: float
    max: float
    percentile_00_5: float
    percentile_99_5: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Fingerprint:
    """What is known of a data set.

    It is made by `volseg.planning.take_fingerprint`, or by hand from published numbers.
    """

    task: str
    channels: tuple[str, ...]
    labels: Mapping[int, str]
    """Name of each value, the background's too."""
    cases: tuple[CaseSizes, ...]
    """All cases with labels that can be used."""
    intensities: tuple[Intensities, ...] = ()
    """Of each channel; none where no voxel was looked at."""
    regions: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    ignore: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Return what JSON can hold of it: everything."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        """Return the fingerprint that `to_json` described.

        Raises
        ------
        ValueError
            If the content is something else.
        """
        return TypeAdapter(cls).validate_python(content)
