"""Arithmetic of Dice plus cross entropy on one slab: Triton on CUDA, plain torch elsewhere.

The sums of a sample and class ``c`` over the voxels, with ``p`` the softmax of the logits and ``y`` the label:

=========  ========================  ==========================================
row        sum of                    for
=========  ========================  ==========================================
overlap    ``p[c] [y = c]``          Dice's numerator
mass       ``p[c]`` or its square    Dice's denominator
truth      ``[y = c]``               Dice's denominator; NaN if a label is no class
surprise   ``-log p[c] [y = c]``     cross entropy
=========  ========================  ==========================================

The plain versions define what the others compute. They work on a few voxels at a time, so that a large volume's
probabilities never exist.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import nan, prod

import torch
from torch import Tensor

__all__ = ["TRUTH", "Terms", "combine", "gradient", "sums"]

OVERLAP, MASS, TRUTH, SURPRISE = range(4)

CHUNK = 2**18
"""Voxels at a time of the plain version: some megabytes."""


@dataclass(frozen=True, slots=True)
class Terms:
    """The loss ``dice * mean(1 - Dice) + cross_entropy * mean(-log p[y])``; the names are MONAI's ``DiceCELoss``'s.

    Attributes
    ----------
    dice, cross_entropy
        Weights of the two losses.
    include_background
        Whether class 0 takes part in the mean of Dice.
    batch
        Whether Dice is of the voxels of all samples, and not a mean over samples.
    squared
        Whether probabilities are squared in the denominator.
    jaccard
        Whether intersection over union replaces Dice.
    smooth_nr, smooth_dr
        Added to numerator and denominator.
    """

    dice: float = 1.0
    cross_entropy: float = 1.0
    include_background: bool = True
    batch: bool = False
    squared: bool = False
    jaccard: bool = False
    smooth_nr: float = 1e-5
    smooth_dr: float = 1e-5

    @property
    def denominator(self) -> tuple[float, float]:
        """Factors of ``mass + truth`` and of ``-overlap`` in the denominator, where the numerator is 2 * overlap."""
        return (2.0, 2.0) if self.jaccard else (1.0, 0.0)

    def factors(self, shape: Sequence[int]) -> tuple[float, float]:
        """Return what a pair's Dice loss and what a pair's surprise are multiplied by, in logits of ``shape``."""
        samples, classes, *sides = shape
        pairs = (1 if self.batch else samples) * (classes - (not self.include_background))
        return self.dice / pairs, self.cross_entropy / (samples * prod(sides))


def _fused(tensor: Tensor) -> bool:
    """Say whether the Triton kernels take this tensor."""
    from volseg.device import triton_tiles

    return tensor.is_cuda and tensor.dtype != torch.float64 and triton_tiles.available()


def sums(logits: Tensor, label: Tensor, squared: bool) -> Tensor:
    """Return the sums of a slab, ``(parts, 4, B, K)`` in float32 or float64."""
    if _fused(logits):
        from volseg.losses.dice import passes

        return passes.sums(logits, label, squared)
    wide = torch.promote_types(logits.dtype, torch.float32)
    out = torch.zeros((4, *logits.shape[:2]), dtype=wide, device=logits.device)
    for sample, _, values, hits in _chunks(logits, label):
        logs = values.log_softmax(0)
        probabilities = logs.exp()
        out[OVERLAP, sample] += (probabilities * hits).sum(1)
        out[MASS, sample] += (probabilities.square() if squared else probabilities).sum(1)
        out[TRUTH, sample] += hits.sum(1).to(wide).masked_fill(~hits.any(0).all(), nan)
        out[SURPRISE, sample] -= logs.masked_fill(~hits, 0.0).sum(1)
    return out.unsqueeze(0)


def combine(sums: Tensor, terms: Terms, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the loss and its derivatives by the sums, ``(4, B, K)``, or ``(4, 1, K)`` where they are of the batch.

    Parameters
    ----------
    sums
        ``(parts, 4, B, K)``: of all parts of all shards.
    terms
        What is summed up.
    shape
        Of the logits of the whole volume.
    """
    if _fused(sums):
        from volseg.losses.dice import passes

        return passes.combine(sums, terms, shape)
    total = sums.sum(0)
    overlap, mass, truth, surprise = (total.sum(1, keepdim=True) if terms.batch else total).unbind()
    sizes, overlaps = terms.denominator
    denominator = sizes * (mass + truth) - overlaps * overlap + terms.smooth_dr
    ratio = (2 * overlap + terms.smooth_nr) / denominator
    pair, voxel = terms.factors(shape)
    pairs = torch.full_like(ratio, pair)
    if not terms.include_background:
        pairs[:, 0] = 0.0
    # A NaN of the truth reaches every slope: neither the loss nor a gradient looks usable.
    slopes = [-(2 + overlaps * ratio) / denominator * pairs, sizes * ratio / denominator * pairs, 0 * ratio]
    loss = ((1 - ratio) * pairs + surprise * voxel).sum()
    return loss, torch.stack([*slopes, voxel + 0 * ratio])


def empty_gradient(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return memory for the gradient of the logits in their layout, and a view of it whose voxels are one dim."""
    last = logits.stride(1) == 1
    out = torch.empty_like(logits, memory_format=torch.channels_last_3d if last else torch.contiguous_format)
    return out, out.view(*out.shape[:2], -1)


def gradient(logits: Tensor, label: Tensor, slopes: Tensor, squared: bool) -> Tensor:
    """Return the gradient of the logits from the loss's derivatives by the sums, ``(4, B, K)``."""
    if _fused(logits):
        from volseg.losses.dice import passes

        return passes.gradient(logits, label, slopes, squared)
    out, flat = empty_gradient(logits)
    for sample, voxels, values, hits in _chunks(logits, label):
        overlap, mass, _, surprise = slopes[:, sample, :, None].unbind()
        probabilities = values.softmax(0)
        by_probability = overlap * hits + mass * (2 * probabilities if squared else 1.0)
        centered = by_probability - (by_probability * probabilities).sum(0)
        result = (probabilities - hits.to(values)) * (surprise * hits).sum(0)
        flat[sample, :, voxels] = result.addcmul_(centered, probabilities).to(out.dtype)
    return out


def _chunks(logits: Tensor, label: Tensor) -> Iterator[tuple[int, slice, Tensor, Tensor]]:
    """Yield sample, voxels, and there the logits in float32 or wider and the one-hot label, ``(K, voxels)`` both."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    classes = torch.arange(logits.shape[1], device=logits.device).unsqueeze(1)
    flat, labels = logits.flatten(2), label.flatten(2)
    for sample in range(logits.shape[0]):
        for first in range(0, flat.shape[2], CHUNK):
            voxels = slice(first, first + CHUNK)
            yield sample, voxels, flat[sample, :, voxels].to(wide), labels[sample, :, voxels] == classes
