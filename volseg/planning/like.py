"""The grid, the patch and the network of a trained network, for a data set that a training begins on with its weights.

Intensities are not taken over: they follow from the data set, whose channels may be of another kind.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from volseg.planning.facts import Fingerprint
from volseg.planning.geometry import Geometry
from volseg.planning.spacing import resampled_shape

__all__ = ["Like", "plan_geometry_like"]

SAME_AXIS = str.maketrans("LPI", "RAS")

PRESETS_OF = {"VNet": "vnet", "ResEncUNet": "resenc"}
"""Preset with whose learning rate a network is trained; `unet` for any other."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Like:
    """What a plan takes over from a trained network."""

    source: str
    """Path of the weights, with which the training begins."""
    network: Mapping[str, Any]
    """Name and all parameters."""
    patch: Sequence[int]
    batch: int
    spacing: Sequence[float]
    """Voxel sides (mm) along the axes of the network."""
    axcodes: str = "RAS"
    """Directions in the patient to which these axes point."""

    @property
    def preset(self) -> str:
        """The preset whose other settings suit the network."""
        return PRESETS_OF.get(str(self.network.get("name")), "unet")


def plan_geometry_like(fingerprint: Fingerprint, like: Like) -> Geometry:
    """Return the sizes of a data set at the spacing of a trained network, in the order of its axes."""
    axes = ["RAS".index(letter) for letter in like.axcodes.translate(SAME_AXIS)]
    shapes = [
        resampled_shape([case.shape[axis] for axis in axes], [case.spacing[axis] for axis in axes], like.spacing)
        for case in fingerprint.cases
    ]
    median = [float(side) for side in np.median(shapes, 0)]
    a, b, c = (float(mm) for mm in like.spacing)
    patch, largest = ((int(d), int(h), int(w)) for d, h, w in (like.patch, np.max(shapes, 0)))
    return Geometry(
        spacing=(a, b, c),
        spacing_rule=f"that of {like.source}, at which its weights were trained",
        median_shape=(median[0], median[1], median[2]),
        largest_shape=largest,
        voxels=math.prod(median) * len(shapes),
        coarse=int(np.argmax(like.spacing)),
        patch=patch,
        batch=like.batch,
        axcodes=like.axcodes,
    )
