"""Match lesions, the connected components of prediction and reference, one to one.

Components are joined by faces, edges and corners (26 neighbours). A predicted and a true lesion match if the voxels
that they share are at least `MINIMUM_OVERLAP` of those that either has (intersection over union); pairs are taken from
the largest overlap down, each lesion once. So one blob over three lesions finds one of them; if a lesion is predicted
in three pieces, one matches and two are false positives.

References
----------
.. [1] Kofler et al., Panoptica: instance-wise evaluation of 3D semantic and instance segmentation maps,
   arXiv:2312.02608: its approximation by connected components and ``NaiveThresholdMatching``.
.. [2] Baumgartner et al., nnDetection: a self-configuring method for medical object detection, MICCAI 2021,
   doi:10.1007/978-3-030-87240-3_51: an overlap of 0.1 in 3D, where lesions do not lie over each other and their place
   counts more than their outline.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import label as label_components

__all__ = ["LESIONS", "MINIMUM_OVERLAP", "FoundLesions", "match_lesions"]

LESIONS = ("lesion_F1", "lesion_precision", "lesion_recall", "lesion_TP", "lesion_FP", "lesion_FN")

MINIMUM_OVERLAP = 0.1

Mask = NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundLesions:
    """How many lesions were found, predicted and missed."""

    matched: int
    only_predicted: int
    only_reference: int

    def metrics(self) -> dict[str, float]:
        """Return F1, precision, recall and the counts; NaN for a share of nothing."""
        predicted, true = self.matched + self.only_predicted, self.matched + self.only_reference
        values = (
            _divide(2 * self.matched, predicted + true),
            _divide(self.matched, predicted),
            _divide(self.matched, true),
            self.matched,
            self.only_predicted,
            self.only_reference,
        )
        return dict(zip(LESIONS, values, strict=True))


def match_lesions(prediction: Mask, reference: Mask, minimum_overlap: float = MINIMUM_OVERLAP) -> FoundLesions:
    """Match the lesions of two structures ``(D, H, W)``.

    Examples
    --------
    >>> reference = np.zeros((1, 1, 9), dtype=bool)
    >>> reference[..., 0:3] = reference[..., 6:9] = True
    >>> prediction = np.zeros((1, 1, 9), dtype=bool)
    >>> prediction[..., 1:3] = True
    >>> match_lesions(prediction, reference)
    FoundLesions(matched=1, only_predicted=0, only_reference=1)
    """
    neighbours = np.ones((3, 3, 3), dtype=bool)
    (predicted, num_predicted), (true, num_true) = (
        label_components(mask, structure=neighbours) for mask in (prediction, reference)
    )
    sizes_predicted, sizes_true = (np.bincount(lesions.ravel()) for lesions in (predicted, true))
    is_shared = prediction & reference
    pairs, shared = np.unique(np.stack([predicted[is_shared], true[is_shared]]), axis=1, return_counts=True)
    overlaps = shared / (sizes_predicted[pairs[0]] + sizes_true[pairs[1]] - shared)
    taken_predicted: set[int] = set()
    taken_true: set[int] = set()
    # Stable: of equal overlaps the first lesion in the volume wins, on every machine.
    for place in np.argsort(-overlaps, kind="stable"):
        one, other = pairs[:, place].tolist()
        if overlaps[place] >= minimum_overlap and one not in taken_predicted and other not in taken_true:
            taken_predicted.add(one)
            taken_true.add(other)
    matched = len(taken_true)
    return FoundLesions(matched=matched, only_predicted=num_predicted - matched, only_reference=num_true - matched)


def _divide(part: int, whole: int) -> float:
    return part / whole if whole else math.nan
