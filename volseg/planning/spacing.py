"""nnU-Net's rules for the target spacing and the sizes at it, pure.

Axes come in any order, the same in all arguments.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from volseg.transforms.grid import ANISOTROPY

__all__ = ["is_flat", "plan_spacing", "resampled_shape"]

Floats = NDArray[np.float64]


def plan_spacing(spacings: Sequence[Sequence[float]], shapes: Sequence[Sequence[int]]) -> tuple[Floats, str]:
    """Return the spacing (mm) to which all cases are resampled, and why.

    It is the median along each axis. Where one axis has more than three times the others' spacing and less than a third
    of their voxels, the tenth percentile along it: the median would throw away slices of the cases that have many.

    Parameters
    ----------
    spacings, shapes : sequences
        Of each case, after cropping to what is not 0.

    References
    ----------
    .. [1] F. Isensee et al., "nnU-Net", Nature Methods 18, 2021, supplement, doi:10.1038/s41592-020-01008-z.
    """
    mm, sides = np.asarray(spacings, dtype=np.float64), np.asarray(shapes, dtype=np.float64)
    target, size = np.percentile(mm, 50, 0), np.percentile(sides, 50, 0)
    worst = int(np.argmax(target))
    others = [axis for axis in range(3) if axis != worst]
    finer = max(target[others])
    thick = target[worst] > ANISOTROPY * finer
    few = size[worst] * ANISOTROPY < min(size[others])
    if not (thick and few):
        return target, "median of the cases along each axis"
    tenth = float(np.percentile(mm[:, worst], 10))
    # Not finer than the other axes, by a hair, so that the axis stays the coarsest one.
    target[worst] = tenth if tenth >= finer else finer + 1e-5
    return target, (
        f"median of the cases, but for the thick slices ({np.percentile(mm[:, worst], 50):.4g} mm, more than 3 times "
        "the others, and less than a third of their voxels): tenth percentile"
    )


def resampled_shape(shape: Sequence[int], spacing: Sequence[float], target: Sequence[float] | Floats) -> list[int]:
    """Return how many voxels a case has along each axis at the target spacing."""
    return [round(side / to * count) for side, to, count in zip(spacing, target, shape, strict=True)]


def is_flat(patch: Sequence[int], coarse: int) -> bool:
    """Tell whether a patch is so short along its coarsest axis that it is augmented as a stack of planes.

    >>> is_flat((320, 256, 20), 2), is_flat((40, 56, 40), 0)
    (True, False)
    """
    return max(patch) / patch[coarse] > ANISOTROPY
