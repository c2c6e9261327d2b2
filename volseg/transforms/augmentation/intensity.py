"""Change voxel values: one function per effect, on N volumes (N, D, H, W) with one parameter each.

A volume is one channel of one sample, so these functions are independent of batches and channels. Blur and low
resolution are separable linear maps; as a matrix per axis they need no loop over samples whose kernels differ.

Noise, brightness and contrast preserve a volume bit for bit with their idle parameter (0, 1, 1). The others need a
mask: the identity matrix is exact in float32, but not where the user allows TF32.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from volseg.transforms.augmentation.spatial import constant, positions

__all__ = ["add_noise", "blur", "brighten", "coarsen", "power_law", "stretch_contrast"]


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
    """Convolve with a Gaussian of ``sigma`` (N, 3) voxels; at a border the kernel's inner part is normalised."""
    return _multiply_each_axis(volumes, _compute_gaussians(sigma, volumes.shape[1:]))


def coarsen(volumes: Tensor, zoom: Tensor) -> Tensor:
    """Keep ``zoom`` (N, 3) of the voxels along each axis, the nearest ones, and interpolate back linearly."""
    return _multiply_each_axis(volumes, _compute_down_and_up(zoom, volumes.shape[1:]))


def _multiply_each_axis(volumes: Tensor, matrices: Tensor) -> Tensor:
    """Multiply the axes of (N, D, H, W) by the first rows and columns of the matrices (N, 3, n, n)."""
    shape = volumes.shape
    # Each product turns the first axis into the last, (n, d, hw) -> (n, hw, d), so three of them restore the order.
    for axis, side in enumerate(shape[1:]):
        volumes = volumes.reshape(shape[0], side, -1)
        volumes = torch.bmm(volumes.transpose(1, 2), matrices[:, axis, :side, :side].transpose(1, 2))
    return volumes.view(shape)


def _compute_gaussians(sigma: Tensor, sides: Sequence[int]) -> Tensor:
    """Return the blur of each volume and axis as a matrix whose rows sum to one, (N, 3, n, n)."""
    position = positions(max(sides), sigma.device)
    # At 1e-3 the neighbours' weight underflows to 0: the identity, without a division by 0.
    distance = (position[:, None] - position) / sigma.clamp(min=1e-3)[..., None, None]
    # Far weights are denormal numbers, which a CPU multiplies thirty times more slowly, and count for nothing.
    weight = torch.threshold(torch.exp(-0.5 * distance**2), 1e-10, 0.0)
    if len(set(sides)) > 1:  # what lies beyond a shorter axis has no weight
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
