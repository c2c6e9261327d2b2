"""Draw the random numbers of one batch, separately from applying them.

Every field has an idle value (an angle of 0, a factor of 1) for samples without the effect, so no flags are needed, and
a batch of idle values preserves every bit.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Self

import torch
from torch import Tensor

from volseg.config.augmentation import AugmentationConfig
from volseg.device.gpus import on_gpu


@dataclass(frozen=True, kw_only=True, slots=True)
class AugmentationParameters:
    """Parameters of B samples of C channels; intensities are drawn per sample and channel."""

    rotation: Tensor
    """Angles about D, H, W in radians, (B, 3)."""
    scale: Tensor
    """Ratio of the extent read to the patch's extent along D, H, W, (B, 3)."""
    mirror: Tensor
    """Whether D, H, W are mirrored, (B, 3) bool."""
    elastic: Tensor
    """Displacement of the control points along D, H, W in voxels, (B, 3, k, l, m); k = l = m = 0 if elastic deformation
    is off."""
    noise_std: Tensor
    """Standard deviation of the noise, (B, C), equal over a sample's channels."""
    noise: Tensor
    """Normal deviates, (B, C, D, H, W); D = H = W = 0 if noise is off."""
    blur_sigma: Tensor
    """Standard deviation of the blur along D, H, W in voxels, (B, C, 3)."""
    brightness: Tensor
    """Factor, (B, C)."""
    contrast: Tensor
    """Factor, (B, C)."""
    zoom: Tensor
    """Fraction of the voxels kept along D, H, W, (B, C, 3)."""
    inverted_gamma: Tensor
    """Exponent, (B, C)."""
    gamma: Tensor
    """Exponent, (B, C)."""

    @classmethod
    def identity(cls, batch_size: int, num_channels: int = 1, device: torch.device | str | None = None) -> Self:
        """Return parameters that change nothing."""
        b, c = batch_size, num_channels
        return cls(
            rotation=torch.zeros(b, 3, device=device),
            scale=torch.ones(b, 3, device=device),
            mirror=torch.zeros(b, 3, dtype=torch.bool, device=device),
            elastic=torch.zeros(b, 3, 0, 0, 0, device=device),
            noise_std=torch.zeros(b, c, device=device),
            noise=torch.zeros(b, c, 0, 0, 0, device=device),
            blur_sigma=torch.zeros(b, c, 3, device=device),
            brightness=torch.ones(b, c, device=device),
            contrast=torch.ones(b, c, device=device),
            zoom=torch.ones(b, c, 3, device=device),
            inverted_gamma=torch.ones(b, c, device=device),
            gamma=torch.ones(b, c, device=device),
        )

    def to(self, device: torch.device | str) -> Self:
        """Return the parameters on ``device``."""
        return type(self)(**{f.name: getattr(self, f.name).to(device, non_blocking=True) for f in fields(self)})

    def select(self, rows: Tensor | slice) -> Self:
        """Return the parameters of some samples; a slice returns views, without a wait for the device."""
        return type(self)(**{f.name: getattr(self, f.name)[rows] for f in fields(self)})


def draw_parameters(
    config: AugmentationConfig,
    batch_size: int,
    num_channels: int,
    patch_size: tuple[int, int, int],
    generator: torch.Generator,
) -> AugmentationParameters:
    """Draw the parameters of each sample of a batch.

    One call of the generator draws all small parameters, and every effect takes its share even if it is off, so
    switching one effect off does not change the draws of the others.

    Parameters
    ----------
    config : AugmentationConfig
        Probabilities and ranges.
    batch_size, num_channels : int
        B and C.
    patch_size : tuple of int
        D, H, W of the augmented patch, for the noise and the elastic control points.
    generator : torch.Generator
        The only source of randomness; the parameters are on its device.
    """
    if not config.enabled:
        return AugmentationParameters.identity(batch_size, num_channels, generator.device)
    draws = _Draws(batch_size, num_channels, generator)
    noise_std = draws.within(config.noise.std, ()) * draws.happens(config.noise.probability)
    limits = [math.radians(angle) for angle in config.rotation.degrees]
    turns = torch.stack([draws.within((-limit, limit), ()) for limit in limits], dim=1)
    zoom = draws.within(config.low_resolution.zoom, (num_channels,))
    coarse = draws.happens(config.low_resolution.probability)[:, None] * draws.happens(
        config.low_resolution.per_channel, (num_channels,)
    )
    blurred = draws.happens(config.blur.probability)[:, None] * draws.happens(config.blur.per_channel, (num_channels,))
    parameters = {
        "rotation": turns * draws.happens(config.rotation.probability)[:, None],
        "scale": _spread(
            _unless(draws.happens(config.scaling.probability), draws.within(config.scaling.factor, ()), 1.0),
            config.scaling.axes,
        ),
        "mirror": torch.stack(
            [draws.happens(config.mirror.probability * allowed) for allowed in config.mirror.axes], dim=1
        ),
        "noise_std": noise_std[:, None].expand(-1, num_channels).contiguous(),
        "blur_sigma": draws.within(config.blur.sigma_voxels, (num_channels, 3)) * blurred[..., None],
        "brightness": draws.factor(config.brightness.probability, config.brightness.factor),
        "contrast": draws.factor(config.contrast.probability, config.contrast.factor),
        "zoom": _spread(_unless(coarse, zoom, 1.0), config.low_resolution.axes),
        "inverted_gamma": draws.factor(config.inverted_gamma.probability, config.inverted_gamma.gamma),
        "gamma": draws.factor(config.gamma.probability, config.gamma.gamma),
    }
    return AugmentationParameters(
        elastic=_draw_control_points(config, draws, patch_size, generator),
        noise=_draw_noise(config, parameters["noise_std"], patch_size, generator),
        **parameters,
    )


def control_points(size: int, spacing: float) -> int:
    """Return the number of control points of a cubic B-spline over ``size`` voxels, including those beyond the ends.

    >>> control_points(40, 12)
    7
    """
    return math.ceil(size / spacing) + 3


def _draw_control_points(
    config: AugmentationConfig, draws: "_Draws", patch_size: tuple[int, int, int], generator: torch.Generator
) -> Tensor:
    happens = draws.happens(config.elastic.probability)
    reach = draws.within(config.elastic.displacement_voxels, (3,)) * happens[:, None]
    if config.elastic.probability == 0:
        return torch.zeros(len(happens), 3, 0, 0, 0, device=happens.device)
    lattice = [control_points(size, config.elastic.spacing_voxels) for size in patch_size]
    directions = torch.rand(len(happens), 3, *lattice, generator=generator, device=happens.device) * 2 - 1
    return directions * reach[:, :, None, None, None]


def _draw_noise(
    config: AugmentationConfig, std: Tensor, patch_size: tuple[int, int, int], generator: torch.Generator
) -> Tensor:
    if config.noise.probability == 0:
        return torch.zeros(*std.shape, 0, 0, 0, device=std.device)
    if std.device.type != "cpu" or on_gpu(std):  # a fixed amount of work, as a CUDA graph needs
        return torch.randn(*std.shape, *patch_size, generator=generator, device=std.device)
    noise = torch.zeros(*std.shape, *patch_size)
    noisy = std[:, 0].nonzero().squeeze(1)
    noise[noisy] = torch.randn(len(noisy), std.shape[1], *patch_size, generator=generator)
    return noise


def _unless(happens: Tensor, value: Tensor, idle: float) -> Tensor:
    """Return ``value`` where the effect happens and exactly ``idle`` elsewhere."""
    return torch.where(happens, value, idle)


def _spread(factor: Tensor, axes: Sequence[bool]) -> Tensor:
    """Return ``factor`` (...) along some of D, H, W and 1 along the others, (..., 3)."""
    return torch.stack([factor if axis else torch.ones_like(factor) for axis in axes], dim=-1)


class _Draws:
    """A block of uniform random numbers, handed out column by column."""

    def __init__(self, batch_size: int, num_channels: int, generator: torch.Generator) -> None:
        # More columns than are used: reshaping a slice beyond the end would raise.
        columns = 24 + 12 * num_channels
        self._uniform = torch.rand(batch_size, columns, generator=generator, device=generator.device)
        self._num_channels = num_channels
        self._taken = 0

    def _take(self, shape: tuple[int, ...]) -> Tensor:
        start, self._taken = self._taken, self._taken + math.prod(shape)
        return self._uniform[:, start : self._taken].reshape(-1, *shape)

    def happens(self, probability: float, shape: tuple[int, ...] = ()) -> Tensor:
        """Return True with ``probability``, (B, *shape)."""
        return self._take(shape) < probability

    def within(self, limits: tuple[float, float], shape: tuple[int, ...]) -> Tensor:
        """Return uniform numbers between ``limits``, (B, *shape)."""
        low, high = limits
        return low + (high - low) * self._take(shape)

    def factor(self, probability: float, limits: tuple[float, float]) -> Tensor:
        """Return factors per channel, half of them below 1 if ``limits`` enclose 1; 1 without the effect."""
        low, high = limits
        u = self._take((self._num_channels,))
        if low < 1 < high:
            drawn = torch.where(u < 0.5, low + 2 * u * (1 - low), 1 + (2 * u - 1) * (high - 1))
        else:
            drawn = low + (high - low) * u
        return _unless(self.happens(probability)[:, None], drawn, 1.0)
