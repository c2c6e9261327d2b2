"""What is done to a training batch at random, and how often.

The defaults are nnU-Net's (``nnUNetTrainer.get_training_transforms``, nnunetv2 2.x, over batchgeneratorsv2), its order
and its probabilities included. A probability of 0 switches an effect off; ``enabled: false`` switches all of them off.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from volseg.config.base import ComponentConfig, ConfigModel

__all__ = ["AugmentationConfig"]

Probability = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Degrees = Annotated[float, Field(ge=0, le=180)]

# Choi and Lee, Graphical Models 62(6), 2000: a uniform cubic B-spline deformation of a volume is one-to-one while no
# control point moves by more than 0.403 of the distance between control points.
_NO_FOLDING = 0.403


class _Ranged(ConfigModel):
    """A section whose two-number fields are ranges, lowest first."""

    @model_validator(mode="after")
    def _ranges_ascend(self) -> Self:
        for name in type(self).model_fields:
            value = getattr(self, name)
            if isinstance(value, tuple) and len(value) == 2 and value[0] > value[1]:
                raise ValueError(f"{name} must be (lowest, highest), got {value}")
        return self


class RotationConfig(ConfigModel):
    """Rotation about the patch's centre, in millimetres."""

    probability: Probability = 0.2
    """Share of samples that are rotated."""
    degrees: tuple[Degrees, Degrees, Degrees] = (30.0, 30.0, 30.0)
    """Largest angle about the D, H and W axis, either way. For a flat patch turn about its short axis only, by 180."""


class ScalingConfig(_Ranged):
    """Scaling about the patch's centre, by one factor."""

    probability: Probability = 0.2
    """Share of samples that are scaled."""
    factor: tuple[Positive, Positive] = (0.7, 1.4)
    """Extent of the region that fills the patch over the patch's own: above 1, objects shrink."""
    axes: tuple[bool, bool, bool] = (True, True, True)
    """Whether D, H and W are scaled; for a flat patch leave out its short axis."""


class ElasticConfig(_Ranged):
    """Smooth free-form deformation by cubic B-splines; off by default, as in nnU-Net."""

    probability: Probability = 0.0
    """Share of samples that are deformed."""
    spacing_voxels: Annotated[float, Field(ge=2)] = 12.0
    """Distance between control points."""
    displacement_voxels: tuple[NonNegative, NonNegative] = (0.0, 4.0)
    """Range of the largest displacement of a control point along each axis."""

    @model_validator(mode="after")
    def _does_not_fold(self) -> Self:
        if self.displacement_voxels[1] > _NO_FOLDING * self.spacing_voxels:
            raise ValueError(
                f"displacement_voxels of up to {self.displacement_voxels[1]:g} folds the anatomy where control points "
                f"are {self.spacing_voxels:g} voxels apart; at most {_NO_FOLDING} of that distance is safe"
            )
        return self


class MirrorConfig(ConfigModel):
    """Mirroring, drawn apart for each axis."""

    probability: Probability = 0.5
    """Share of samples that are mirrored along each of the axes."""
    axes: tuple[bool, bool, bool] = (True, True, True)
    """Whether D, H and W may be mirrored. Switch off an axis whose two sides carry different labels."""


class NoiseConfig(_Ranged):
    """Additive Gaussian noise."""

    probability: Probability = 0.1
    """Share of samples that get noise."""
    std: tuple[NonNegative, NonNegative] = (0.0, 0.1)
    """Standard deviation, in units of the normalised image. nnU-Net calls it a variance and uses it as this."""


class BlurConfig(_Ranged):
    """Gaussian blur, drawn apart for each channel and axis."""

    probability: Probability = 0.2
    """Share of samples that may be blurred."""
    per_channel: Probability = 0.5
    """Share of the channels of such a sample that are."""
    sigma_voxels: tuple[NonNegative, NonNegative] = (0.5, 1.0)
    """Standard deviation of the kernel."""


class ContrastConfig(_Ranged):
    """A factor on intensities (brightness) or on their distance from the mean (contrast), drawn per channel."""

    probability: Probability = 0.15
    """Share of samples that are changed."""
    factor: tuple[Positive, Positive] = (0.75, 1.25)
    """Range; half of the draws lie below 1, half above."""


class LowResolutionConfig(_Ranged):
    """Sampling to fewer voxels (nearest) and back (linear), drawn apart for each channel."""

    probability: Probability = 0.25
    """Share of samples that may be coarsened."""
    per_channel: Probability = 0.5
    """Share of the channels of such a sample that are."""
    zoom: tuple[Annotated[float, Field(gt=0, le=1)], Annotated[float, Field(gt=0, le=1)]] = (0.5, 1.0)
    """Voxels kept along each axis, as a fraction."""
    axes: tuple[bool, bool, bool] = (True, True, True)
    """Whether D, H and W are coarsened; leave out the axis that is coarse already."""


class GammaConfig(_Ranged):
    """A power law on intensities scaled to [0, 1]; mean and standard deviation are put back after it."""

    probability: Probability = 0.3
    """Share of samples that are changed."""
    gamma: tuple[Positive, Positive] = (0.7, 1.5)
    """Range of the exponent; half of the draws lie below 1, half above."""


class AugmentationConfig(ConfigModel):
    """Random changes to training batches, in the order in which they are applied."""

    enabled: bool = True
    """Whether anything at all is changed."""
    label_interpolation: Literal["linear", "nearest"] = "linear"
    """``linear``: the class with the largest interpolated share, smooth as in nnU-Net, one channel of memory per class.
    ``nearest``: the label of the nearest voxel, for many classes."""
    margin: Probability = 1.0
    """Share of the border around the patch that the largest rotation and scaling can bring in and that is therefore
    read. Below 1 zeros show at the patch's corners in rare samples, and less is read: nnU-Net's margin (one rotation at
    a time, scaling up to 1.18) is about 0.43 of it."""
    rotation: RotationConfig = RotationConfig()
    """Turn the patch."""
    scaling: ScalingConfig = ScalingConfig()
    """Enlarge or shrink its content."""
    elastic: ElasticConfig = ElasticConfig()
    """Deform it."""
    mirror: MirrorConfig = MirrorConfig()
    """Mirror it."""
    noise: NoiseConfig = NoiseConfig()
    """Add noise."""
    blur: BlurConfig = BlurConfig()
    """Blur it."""
    brightness: ContrastConfig = ContrastConfig()
    """Multiply intensities."""
    contrast: ContrastConfig = ContrastConfig()
    """Multiply intensities' distance from their mean, within the range they had."""
    low_resolution: LowResolutionConfig = LowResolutionConfig()
    """Make it coarse."""
    inverted_gamma: GammaConfig = GammaConfig(probability=0.1)
    """Power law on the negative image."""
    gamma: GammaConfig = GammaConfig()
    """Power law on the image."""
    own: tuple[ComponentConfig, ...] = ()
    """Augmentations of the user's own, applied to each sample after all of these."""
