"""Fingerprints of the Decathlon's tasks from published numbers: a plan needs no download."""

import math

from volseg.config.catalogue import find_public_task
from volseg.planning.facts import CaseSizes, Fingerprint, Intensities

__all__ = ["published_fingerprint"]

SHARE_OF_FINE = 0.25
"""Share of the cases of a task with thick slices that are as thin as its target spacing. It is more than a tenth, which
the rule for the target spacing uses, and less than half, which the median uses."""

MOSTLY_ZERO, HARDLY_ZERO = 0.74, 1.0
"""Share of the voxels in the box of those that are not 0, if the files' size is unknown. nnU-Net's plans say on which
side of 0.75 it is."""


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
    manifest = find_public_task(name).manifest
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
