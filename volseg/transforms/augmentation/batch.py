"""Augment a whole batch on the training device in a few steps, instead of sample by sample.

Voxel values are changed by one function per effect, on N volumes (N, D, H, W) with one parameter each. A volume is one
channel of one sample, so these functions are independent of batches and channels. Blur and low resolution are separable
linear maps; as a matrix per axis they need no loop over samples whose kernels differ.

Noise, brightness and contrast preserve a volume bit for bit with their idle parameter (0, 1, 1). The others need a
mask: the identity matrix is exact in float32, but not if the user allows TF32.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from volseg.config.augmentation import AugmentationConfig
from volseg.errors import ConfigError, GridError
from volseg.transforms.augmentation import spatial, triton_reading
from volseg.transforms.augmentation.parameters import AugmentationParameters, draw_parameters
from volseg.transforms.augmentation.spatial import constant, positions
from volseg.transforms.augmentation.triton_reading import PatchSources


class BatchAugmentation:
    """Change a batch of patches at random.

    On an accelerator every effect is computed for every sample and kept for the samples that drew it: the work is the
    same for every batch, the device never waits for the host, and a CUDA graph can capture the call (register the
    generator with it). On a CPU each sample is changed separately, only by its drawn effects: its bits do not depend on
    the other samples.

    Parameters
    ----------
    config : AugmentationConfig
        Probabilities and ranges.
    patch_size : sequence of int
        D, H, W of the output patches, in voxels.
    num_classes : int, optional
        Classes of the label, background included; needed for ``label_interpolation: linear``.
    spacing : sequence of float
        Voxel size along D, H, W in mm, so that a rotation does not shear; (1, 1, 1) rotates in voxels, as nnU-Net does.
    num_masks : int
        Number of last channels that are masks: they move with the image, and their values do not change.

    Attributes
    ----------
    source_size : tuple of int
        D, H, W of the input patches: the patch with a margin for rotation and scaling.

    Examples
    --------
    >>> augmentation = BatchAugmentation(AugmentationConfig(enabled=False), (8, 8, 8), num_classes=2)
    >>> image, label = torch.rand(2, 1, 8, 8, 8), torch.zeros(2, 1, 8, 8, 8, dtype=torch.uint8)
    >>> same, _ = augmentation(image, label, torch.Generator().manual_seed(0))
    >>> torch.equal(same, image)
    True
    """

    def __init__(
        self,
        config: AugmentationConfig,
        patch_size: Sequence[int],
        *,
        num_classes: int | None = None,
        spacing: Sequence[float] = (1.0, 1.0, 1.0),
        num_masks: int = 0,
    ) -> None:
        if len(patch_size) != 3 or min(patch_size) < 1:
            raise ConfigError(f"patch_size needs three positive sides (D, H, W), got {tuple(patch_size)}")
        if config.label_interpolation == "linear" and num_classes is None:
            raise ConfigError(
                "augmentation.label_interpolation is 'linear', which needs num_classes; pass it, or choose 'nearest'"
            )
        self.config = config
        self.num_masks = num_masks
        self.patch_size = (int(patch_size[0]), int(patch_size[1]), int(patch_size[2]))
        self.spacing = tuple(float(mm) for mm in spacing)
        self._num_classes = num_classes if config.label_interpolation == "linear" else None
        margin = (0, 0, 0)
        if config.enabled:
            margin = spatial.margin_voxels(config, self.patch_size, self.spacing)
        d, h, w = (size + 2 * more for size, more in zip(self.patch_size, margin, strict=True))
        self.source_size = (d, h, w)

    def sample(self, batch_size: int, generator: torch.Generator, num_channels: int = 1) -> AugmentationParameters:
        """Draw the parameters of each sample; ``apply`` can be repeated with them."""
        return draw_parameters(self.config, batch_size, num_channels - self.num_masks, self.patch_size, generator)

    def __call__(self, images: Tensor, labels: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw parameters and apply them; the generator should be on the images' device."""
        parameters = self.sample(images.shape[0], generator, images.shape[1])
        if generator.device != images.device:
            parameters = parameters.to(images.device)
        return self.apply(images, labels, parameters)

    @torch.no_grad()
    def apply_to_sources(self, sources: PatchSources, parameters: AugmentationParameters) -> tuple[Tensor, Tensor]:
        """Apply drawn parameters to patches, read from their sources, in one Triton kernel.

        The result equals that of ``apply``, up to float32's rounding of positions.

        Parameters
        ----------
        sources : PatchSources
            Sources of the patches with their margin, of ``source_size``.
        parameters : AugmentationParameters
            On the sources' device.
        """
        with _full_precision(sources.begins.device.type):
            steps = spatial.voxel_steps(parameters, self.patch_size, self.spacing)
            images, labels = triton_reading.read_patches(
                sources, steps, self.patch_size, self.source_size, self._num_classes
            )
            return self._recolour(images, parameters, dense=True), labels

    @torch.no_grad()
    def apply(
        self, images: Tensor, labels: Tensor, parameters: AugmentationParameters, *, dense: bool | None = None
    ) -> tuple[Tensor, Tensor]:
        """Apply drawn parameters to images (B, C, *source_size) and labels (B, 1, *source_size).

        Parameters
        ----------
        images, labels : Tensor
            The batch; neither is changed.
        parameters : AugmentationParameters
            On the images' device.
        dense : bool, optional
            Whether every effect is computed for every sample, without branches. By default true except on a CPU.

        Returns
        -------
        tuple of Tensor
            Images (B, C, *patch_size) in float32 and labels (B, 1, *patch_size) in their own type.

        Raises
        ------
        GridError
            If the batch does not have ``source_size``.
        """
        for name, volume in (("images", images), ("labels", labels)):
            if tuple(volume.shape[2:]) != self.source_size:
                raise GridError(
                    f"augmentation to patches of {self.patch_size} needs {name} of {self.source_size} voxels "
                    f"(BatchAugmentation.source_size), got {tuple(volume.shape[2:])}"
                )
        if dense is None:
            dense = images.device.type != "cpu"
        # Half-precision coordinates would be off by voxels, so the caller's autocast must not apply here.
        with _full_precision(images.device.type):
            if dense:
                return self._change(images, labels, parameters, dense)
            # One by one: sums, products and crops of several samples round differently from those of a single one.
            rows = [slice(row, row + 1) for row in range(len(images))]
            changed = [self._change(images[row], labels[row], parameters.select(row), dense) for row in rows]
            return torch.cat([image for image, _ in changed]), torch.cat([label for _, label in changed])

    def _change(
        self, images: Tensor, labels: Tensor, parameters: AugmentationParameters, dense: bool
    ) -> tuple[Tensor, Tensor]:
        images, labels = self._move(images.float(), labels, parameters, dense)
        return self._recolour(images, parameters, dense), labels

    def _move(
        self, images: Tensor, labels: Tensor, parameters: AugmentationParameters, dense: bool
    ) -> tuple[Tensor, Tensor]:
        """Crop and mirror; rotate, scale and deform if drawn; one sample unless ``dense``."""
        effects = (self.config.rotation, self.config.scaling, self.config.elastic)
        moved = spatial.is_moved(parameters)
        stays = not self.config.enabled or all(effect.probability == 0 for effect in effects)
        if stays or not (dense or moved.any()):
            kept_images, kept_labels = spatial.crop_and_mirror((images, labels), parameters.mirror, self.patch_size)
            return kept_images, kept_labels
        grid = spatial.sampling_grid(parameters, self.patch_size, self.source_size, self.spacing)
        if not dense:
            inner, grid = spatial.without_idle_border(grid, self.source_size)
            return spatial.resample(images[:, :, *inner], labels[:, :, *inner], grid, self._num_classes)
        kept_images, kept_labels = spatial.crop_and_mirror((images, labels), parameters.mirror, self.patch_size)
        new_images, new_labels = spatial.resample(images, labels, grid, self._num_classes)
        moved = moved.view(-1, 1, 1, 1, 1)
        return torch.where(moved, new_images, kept_images), torch.where(moved, new_labels, kept_labels)

    def _recolour(self, images: Tensor, parameters: AugmentationParameters, dense: bool) -> Tensor:
        """Change intensities in nnU-Net's order."""
        if self.num_masks:
            images, masks = images.split([images.shape[1] - self.num_masks, self.num_masks], 1)
            changed = self._recolour_image(images, parameters, dense)
            return torch.cat([changed, masks.gt(0.5).to(changed.dtype)], 1)
        return self._recolour_image(images, parameters, dense)

    def _recolour_image(self, images: Tensor, parameters: AugmentationParameters, dense: bool) -> Tensor:
        volumes, p, on = images.flatten(0, 1), parameters, self.config
        noise = p.noise.flatten(0, 1)
        steps = [
            _Step(on.noise, add_noise, p.noise_std, idle=0.0, more=(noise,), exact=True),
            _Step(on.blur, blur, p.blur_sigma, idle=0.0),
            _Step(on.brightness, brighten, p.brightness, exact=True),
            _Step(on.contrast, stretch_contrast, p.contrast, exact=True),
            _Step(on.low_resolution, coarsen, p.zoom),
            _Step(on.inverted_gamma, partial(power_law, inverted=True), p.inverted_gamma),
            _Step(on.gamma, power_law, p.gamma),
        ]
        for step in steps if on.enabled else ():
            if step.config.probability > 0 and all(extra.numel() for extra in step.more):
                volumes = step.everywhere(volumes) if dense else step.where_drawn(volumes)
        return volumes.unflatten(0, images.shape[:2])


@dataclass(frozen=True, slots=True)
class _Step:
    """One effect on intensities, with a parameter per volume."""

    config: Any
    effect: Callable[..., Tensor]
    parameter: Tensor
    """(B, C) or (B, C, 3)."""
    idle: float = 1.0
    """Value of the parameter if the effect was not drawn."""
    more: tuple[Tensor, ...] = ()
    exact: bool = False
    """Whether the idle parameter preserves every bit, so that no mask is needed."""

    def everywhere(self, volumes: Tensor) -> Tensor:
        """Compute the effect for every volume, and keep it for the volumes that drew it."""
        changed = self.effect(volumes, self.parameter.flatten(0, 1), *self.more)
        return changed if self.exact else torch.where(self._drawn().view(-1, 1, 1, 1), changed, volumes)

    def where_drawn(self, volumes: Tensor) -> Tensor:
        """Compute the effect in place, only for the volumes that drew it."""
        rows = self._drawn().nonzero().squeeze(1)
        if len(rows):
            parameter = self.parameter.flatten(0, 1)[rows]
            volumes[rows] = self.effect(volumes[rows], parameter, *(extra[rows] for extra in self.more))
        return volumes

    def _drawn(self) -> Tensor:
        drawn = self.parameter.flatten(0, 1) != self.idle
        return drawn.any(1) if drawn.ndim > 1 else drawn


def _full_precision(device_type: str) -> AbstractContextManager[object]:
    if torch.amp.is_autocast_available(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()


def add_noise(volumes: Tensor, std: Tensor, noise: Tensor) -> Tensor:
    """Add ``noise`` (N, D, H, W) times ``std`` (N,)."""
    return torch.addcmul(volumes, noise, std.view(-1, 1, 1, 1))


def brighten(volumes: Tensor, factor: Tensor) -> Tensor:
    """Multiply by ``factor`` (N,)."""
    return volumes * factor.view(-1, 1, 1, 1)


def stretch_contrast(volumes: Tensor, factor: Tensor) -> Tensor:
    """Multiply the distance from the volume's mean by ``factor`` (N,) and clip to the volume's original range."""
    values = volumes.flatten(1)
    low, high = values.aminmax(dim=1, keepdim=True)
    stretched = torch.lerp(values.mean(1, keepdim=True), values, factor[:, None])
    return stretched.clamp(low, high).view_as(volumes)


def power_law(volumes: Tensor, gamma: Tensor, *, inverted: bool = False) -> Tensor:
    """Raise the volume, scaled to [0, 1], to the power ``gamma`` (N,); keep its mean and standard deviation.

    ``inverted`` applies it to the negative of the volume.
    """
    values = volumes.flatten(1)
    low, high = values.aminmax(dim=1, keepdim=True)
    # 1e-7: a constant volume stays unchanged.
    span = (high - low).clamp(min=1e-7)
    scaled = (high - values) / span if inverted else (values - low) / span
    curved = scaled ** gamma[:, None]
    variance, mean = torch.var_mean(values, 1, correction=0, keepdim=True)
    new_variance, new_mean = torch.var_mean(curved, 1, correction=0, keepdim=True)
    gain = variance.sqrt() / new_variance.sqrt().clamp(min=1e-7)
    gain = -gain if inverted else gain
    return torch.addcmul(mean - gain * new_mean, gain, curved).view_as(volumes)


def blur(volumes: Tensor, sigma: Tensor) -> Tensor:
    """Convolve with a Gaussian of ``sigma`` (N, 3) voxels; at a border, the kernel's part inside is normalised."""
    return _multiply_each_axis(volumes, _compute_gaussians(sigma, volumes.shape[1:]))


def coarsen(volumes: Tensor, zoom: Tensor) -> Tensor:
    """Keep ``zoom`` (N, 3) of the voxels along each axis, the nearest ones, and interpolate back linearly."""
    return _multiply_each_axis(volumes, _compute_down_and_up(zoom, volumes.shape[1:]))


def _multiply_each_axis(volumes: Tensor, matrices: Tensor) -> Tensor:
    """Multiply the axes of (N, D, H, W) by the first rows and columns of the matrices (N, 3, n, n)."""
    shape = volumes.shape
    # Each product moves the first axis to the end, (n, d, hw) -> (n, hw, d), so three products restore the order.
    for axis, side in enumerate(shape[1:]):
        volumes = volumes.reshape(shape[0], side, -1)
        volumes = torch.bmm(volumes.transpose(1, 2), matrices[:, axis, :side, :side].transpose(1, 2))
    return volumes.view(shape)


def _compute_gaussians(sigma: Tensor, sides: Sequence[int]) -> Tensor:
    """Return the blur of each volume and axis as a matrix whose rows sum to one, (N, 3, n, n)."""
    position = positions(max(sides), sigma.device)
    # At 1e-3 the neighbours' weight underflows to 0: the identity, without a division by 0.
    distance = (position[:, None] - position) / sigma.clamp(min=1e-3)[..., None, None]
    # Distant weights are negligible denormal numbers, which a CPU multiplies thirty times more slowly.
    weight = torch.threshold(torch.exp(-0.5 * distance**2), 1e-10, 0.0)
    if len(set(sides)) > 1:  # positions beyond a shorter axis have no weight
        weight = weight * (position < constant(tuple(map(float, sides)), sigma.device)[:, None, None])
    return weight / weight.sum(-1, keepdim=True)


def _compute_down_and_up(zoom: Tensor, sides: Sequence[int]) -> Tensor:
    """Return nearest-exact sampling to ``zoom * side`` voxels and linear sampling back, as one matrix (N, 3, n, n)."""
    side = constant(tuple(map(float, sides)), zoom.device)
    position = positions(max(sides), zoom.device)
    kept = (zoom * side).round().clamp(min=1)[..., None]
    step = side[:, None] / kept
    coarse = ((position + 0.5) / step - 0.5).clamp(min=0)
    lower = torch.minimum(coarse.floor(), kept - 1)
    ends = torch.stack((lower, torch.minimum(lower + 1, kept - 1)), dim=2)
    nearest = ((ends + 0.5) * step[..., None]).floor()
    below, above = (nearest[..., None] == position).to(zoom.dtype).unbind(2)
    return torch.lerp(below, above, (coarse - lower)[..., None])
