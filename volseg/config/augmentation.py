"""Configure the random augmentation of training batches: effects, probabilities and ranges.

Effects, order, probabilities and ranges default to nnU-Net's (``nnUNetTrainer.get_training_transforms``, nnunetv2 2.x,
over batchgeneratorsv2). A probability of 0 switches an effect off; ``enabled: false`` switches all effects off.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from volseg.config.base import ComponentConfig, ConfigModel

Probability = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Degrees = Annotated[float, Field(ge=0, le=180)]

# Choi and Lee, Graphical Models 62(6), 2000: a uniform cubic B-spline deformation of a volume is one-to-one while no
# control point moves by more than 0.403 of the distance between control points.
_NO_FOLDING = 0.403


class _Ranged(ConfigModel):
    """A section whose two-number fields are ranges (lowest, highest)."""

    @model_validator(mode="after")
    def _ranges_ascend(self) -> Self:
        for name in type(self).model_fields:
            value = getattr(self, name)
            if isinstance(value, tuple) and len(value) == 2 and value[0] > value[1]:
                raise ValueError(f"{name} must be (lowest, highest), got {value}")
        return self


class RotationConfig(ConfigModel):
    """Rotation about the patch's centre, rigid in millimetres."""

    probability: Probability = 0.2
    """Share of samples that are rotated."""
    degrees: tuple[Degrees, Degrees, Degrees] = (30.0, 30.0, 30.0)
    """Largest angle about the D, H and W axis, either way. For a flat patch: 180 about its short axis, else 0."""


class ScalingConfig(_Ranged):
    """Scaling about the patch's centre, by one factor."""

    probability: Probability = 0.2
    """Share of samples that are scaled."""
    factor: tuple[Positive, Positive] = (0.7, 1.4)
    """Range of the ratio of the extent read to the patch's extent; above 1, objects shrink."""
    axes: tuple[bool, bool, bool] = (True, True, True)
    """Whether D, H and W are scaled; for a flat patch set false for its short axis."""


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
                f"displacement_voxels up to {self.displacement_voxels[1]:g} folds the anatomy if control points are "
                f"{self.spacing_voxels:g} voxels apart; set at most {_NO_FOLDING * self.spacing_voxels:g}"
            )
        return self


class MirrorConfig(ConfigModel):
    """Mirroring, drawn independently for each axis."""

    probability: Probability = 0.5
    """Share of samples that are mirrored, for each axis."""
    axes: tuple[bool, bool, bool] = (True, True, True)
    """Whether D, H and W may be mirrored. Switch off an axis whose two sides have different labels."""


class NoiseConfig(_Ranged):
    """Additive Gaussian noise."""

    probability: Probability = 0.1
    """Share of samples that get noise."""
    std: tuple[NonNegative, NonNegative] = (0.0, 0.1)
    """Range of the standard deviation, in units of the normalised image. nnU-Net calls this value a variance."""


class BlurConfig(_Ranged):
    """Gaussian blur, drawn independently for each channel and axis."""

    probability: Probability = 0.2
    """Share of samples that may be blurred."""
    per_channel: Probability = 0.5
    """Share of channels blurred in such a sample."""
    sigma_voxels: tuple[NonNegative, NonNegative] = (0.5, 1.0)
    """Range of the kernel's standard deviation."""


class ContrastConfig(_Ranged):
    """A factor on intensities (brightness) or on their distance from the mean (contrast), drawn per channel."""

    probability: Probability = 0.15
    """Share of samples that are changed."""
    factor: tuple[Positive, Positive] = (0.75, 1.25)
    """Range of the factor; half of the draws are below 1, half above."""


class LowResolutionConfig(_Ranged):
    """Resampling to fewer voxels (nearest) and back (linear), drawn independently for each channel."""

    probability: Probability = 0.25
    """Share of samples that may be coarsened."""
    per_channel: Probability = 0.5
    """Share of channels coarsened in such a sample."""
    zoom: tuple[Annotated[float, Field(gt=0, le=1)], Annotated[float, Field(gt=0, le=1)]] = (0.5, 1.0)
    """Range of the fraction of voxels kept along each axis."""
    axes: tuple[bool, bool, bool] = (True, True, True)
    """Whether D, H and W are coarsened; set false for an axis that is already coarse."""


class GammaConfig(_Ranged):
    """A power law on intensities scaled to [0, 1]; mean and standard deviation are restored afterwards."""

    probability: Probability = 0.3
    """Share of samples that are changed."""
    gamma: tuple[Positive, Positive] = (0.7, 1.5)
    """Range of the exponent; half of the draws are below 1, half above."""


class AugmentationConfig(ConfigModel):
    """Random augmentation of training batches, in the order of application."""

    enabled: bool = True
    """Whether batches are augmented."""
    label_interpolation: Literal["linear", "nearest"] = "linear"
    """``linear``: the class with the largest interpolated share, smooth as in nnU-Net; needs the memory of one channel
    per class. ``nearest``: the label of the nearest voxel, for many classes."""
    margin: Probability = 1.0
    """Share of the border read around the patch; 1 covers the largest rotation and scaling. Lower values read fewer
    voxels, but leave zeros at the patch's corners in rare samples. nnU-Net's margin (one rotation at a time, scaling up
    to 1.18) is about 0.43."""
    rotation: RotationConfig = RotationConfig()
    """Rotate the patch."""
    scaling: ScalingConfig = ScalingConfig()
    """Enlarge or shrink the patch's content."""
    elastic: ElasticConfig = ElasticConfig()
    """Deform the patch."""
    mirror: MirrorConfig = MirrorConfig()
    """Mirror the patch."""
    noise: NoiseConfig = NoiseConfig()
    """Add noise to the image."""
    blur: BlurConfig = BlurConfig()
    """Blur the image."""
    brightness: ContrastConfig = ContrastConfig()
    """Multiply intensities."""
    contrast: ContrastConfig = ContrastConfig()
    """Multiply the distance of intensities from their mean; clip to the original range."""
    low_resolution: LowResolutionConfig = LowResolutionConfig()
    """Simulate a lower resolution."""
    inverted_gamma: GammaConfig = GammaConfig(probability=0.1)
    """Apply a power law to the negative image."""
    gamma: GammaConfig = GammaConfig()
    """Apply a power law to the image."""
    own: tuple[ComponentConfig, ...] = ()
    """Custom augmentations, applied to each sample after those above."""
