"""What a model says about one case, on the grid of the image's file."""

from dataclasses import dataclass

from monai.data import MetaTensor

__all__ = ["Prediction"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Prediction:
    """The label map of a case, and what else was asked for."""

    labels: MetaTensor
    """``(1, D, H, W)``, the values of label files; with the grid, file name and header codes of the image."""
    entropy: MetaTensor | None = None
    """``(1, D, H, W)`` float32, how unsure the model is: nats over the logarithm of K, thus from 0 to 1."""
    probabilities: MetaTensor | None = None
    """``(K, D, H, W)`` float32 on the CPU."""
