"""Arithmetic of the sharded norms on one slab, in plain torch.

Half precision is widened to float32 inside and rounded once at the end. ``(B, C)`` values broadcast over the voxels.
"""

from functools import lru_cache

import torch
from torch import Tensor

__all__ = ["affine", "gradient_input", "gradient_sums", "moments", "weights"]


def _wide(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _over_voxels(pairs: Tensor, like: Tensor) -> Tensor:
    return pairs.reshape(*pairs.shape, *([1] * (like.ndim - 2)))


@lru_cache(maxsize=256)
def weights(counts: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return each shard's share of the voxels, ``(shards, 1, 1)``; cached, so that no step waits for its copy."""
    shares = torch.tensor(counts, dtype=torch.float64)
    return (shares / shares.sum()).to(dtype).reshape(-1, 1, 1).to(device)


def moments(slab: Tensor) -> Tensor:
    """Return mean and biased variance over the voxels, ``(2, B, C)``."""
    variance, mean = torch.var_mean(_wide(slab).flatten(2), 2, correction=0)
    return torch.stack([mean, variance])


def affine(slab: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Return ``slab * scale + shift``."""
    return torch.addcmul(_over_voxels(shift, slab), _wide(slab), _over_voxels(scale, slab)).to(slab.dtype)


def gradient_sums(gradient: Tensor, slab: Tensor, mean: Tensor) -> Tensor:
    """Return the sums over the voxels of the gradient and of the gradient times ``slab - mean``, ``(2, B, C)``."""
    wide = _wide(gradient).flatten(2)
    centered = _wide(slab).flatten(2) - mean.unsqueeze(-1)
    return torch.stack([wide.sum(2), (wide * centered).sum(2)])


def gradient_input(gradient: Tensor, slab: Tensor, gain: Tensor, slope: Tensor, offset: Tensor) -> Tensor:
    """Return ``gain * gradient + slope * slab + offset``."""
    result = torch.addcmul(_over_voxels(offset, slab), _wide(slab), _over_voxels(slope, slab))
    return result.addcmul_(_wide(gradient), _over_voxels(gain, slab)).to(slab.dtype)
