"""What happens to the voxels' values: one function per effect, on N volumes (N, D, H, W) with one parameter each.

A volume is one channel of one sample, so nothing here knows of batches and channels. Blur and low resolution are
separable linear maps; as a matrix per axis they need no loop over samples whose kernels differ, and a sigma of 0 or a
zoom of 1 is the identity matrix.
"""

import torch
from torch import Tensor

__all__ = ["add_noise", "blur", "brighten", "coarsen", "power_law", "stretch_contrast"]

_VOXELS = (-3, -2, -1)


def add_noise(volumes: Tensor, std: Tensor, noise: Tensor) -> Tensor:
    """Add ``noise`` (N, D, H, W) times ``std`` (N,)."""
    return volumes + std.view(-1, 1, 1, 1) * noise


def brighten(volumes: Tensor, factor: Tensor) -> Tensor:
    """Multiply by ``factor`` (N,)."""
    return volumes * factor.view(-1, 1, 1, 1)


def stretch_contrast(volumes: Tensor, factor: Tensor) -> Tensor:
    """Multiply the distance from the volume's mean by ``factor`` (N,) and clip to the range that the volume had."""
    mean = volumes.mean(_VOXELS, keepdim=True)
    low, high = volumes.amin(_VOXELS, keepdim=True), volumes.amax(_VOXELS, keepdim=True)
    return ((volumes - mean) * factor.view(-1, 1, 1, 1) + mean).clamp(low, high)


def power_law(volumes: Tensor, gamma: Tensor, sign: float = 1.0) -> Tensor:
    """Raise the volume, scaled to [0, 1], to the power ``gamma`` (N,); keep its mean and standard deviation.

    ``sign=-1`` works on the negative of the volume.
    """
    volumes = volumes * sign
    mean, std = _mean_and_std(volumes)
    low, high = volumes.amin(_VOXELS, keepdim=True), volumes.amax(_VOXELS, keepdim=True)
    # 1e-7: a constant volume stays what it is.
    span = (high - low).clamp(min=1e-7)
    curved = ((volumes - low) / span) ** gamma.view(-1, 1, 1, 1)
    new_mean, new_std = _mean_and_std(curved)
    return ((curved - new_mean) * (std / new_std.clamp(min=1e-7)) + mean) * sign


def blur(volumes: Tensor, sigma: Tensor) -> Tensor:
    """Convolve with a Gaussian of ``sigma`` (N, 3) voxels; at a border the kernel's inner part counts for all."""
    return _along_each_axis(volumes, [_gaussian(sigma[:, a], n) for a, n in enumerate(volumes.shape[1:])])


def coarsen(volumes: Tensor, zoom: Tensor) -> Tensor:
    """Keep ``zoom`` (N, 3) of the voxels along each axis, the nearest ones, and interpolate back linearly."""
    return _along_each_axis(volumes, [_down_and_up(zoom[:, a], n) for a, n in enumerate(volumes.shape[1:])])


def _mean_and_std(volumes: Tensor) -> tuple[Tensor, Tensor]:
    # Not torch.std_mean: its Welford recurrence takes eight times as long on a CPU.
    mean = volumes.mean(_VOXELS, keepdim=True)
    return mean, (volumes - mean).square().mean(_VOXELS, keepdim=True).sqrt()


def _along_each_axis(volumes: Tensor, matrices: list[Tensor]) -> Tensor:
    """Multiply each axis of (N, D, H, W) by its own matrix (N, n, n)."""
    shape = volumes.shape
    # Each product turns the first axis into the last, (n, d, hw) -> (n, hw, d), so three of them end where they began.
    for matrix in matrices:
        volumes = volumes.reshape(shape[0], matrix.shape[1], -1)
        volumes = torch.bmm(volumes.transpose(1, 2), matrix.transpose(1, 2))
    return volumes.view(shape)


def _gaussian(sigma: Tensor, size: int) -> Tensor:
    position = torch.arange(size, device=sigma.device, dtype=sigma.dtype)
    # At 1e-3 the neighbours' weight underflows to 0: the identity, without a division by 0.
    distance = (position[:, None] - position) / sigma.clamp(min=1e-3)[:, None, None]
    weight = torch.exp(-0.5 * distance**2)
    # Far weights are denormal numbers, which a CPU multiplies thirty times more slowly, and count for nothing.
    weight = torch.where(weight > 1e-10, weight, 0.0)
    return weight / weight.sum(-1, keepdim=True)


def _down_and_up(zoom: Tensor, size: int) -> Tensor:
    """Return nearest-exact sampling to ``zoom * size`` voxels and linear sampling back, as one matrix (N, n, n)."""
    position = torch.arange(size, device=zoom.device, dtype=zoom.dtype)
    kept = (zoom * size).round().clamp(min=1)[:, None]
    coarse = ((position + 0.5) * kept / size - 0.5).clamp(min=0)
    lower = torch.minimum(coarse.floor(), kept - 1)
    upper = torch.minimum(lower + 1, kept - 1)
    share = (coarse - lower)[..., None]

    def read(index: Tensor) -> Tensor:
        nearest = ((index + 0.5) * size / kept).floor()
        return (nearest[..., None] == position).to(zoom.dtype)

    return (1 - share) * read(lower) + share * read(upper)
