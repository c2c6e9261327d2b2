"""Compute Dice plus cross entropy of one slab in plain torch, as the reference for the kernels.

The voxels are processed in chunks, so that a large volume's probabilities never exist. The sums of a sample and class
``c`` over the voxels, with ``p`` the softmax of the logits and ``y`` the label:

=========  ========================  ==========================================
row        sum of                    for
=========  ========================  ==========================================
overlap    ``p[c] [y = c]``          Dice's numerator
mass       ``p[c]`` or its square    Dice's denominator
truth      ``[y = c]``               Dice's denominator; NaN if a label is not a class
surprise   ``-log p[c] [y = c]``     cross entropy
=========  ========================  ==========================================
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import nan, prod

import torch
from torch import Tensor

OVERLAP, MASS, TRUTH, SURPRISE = range(4)
"""Rows of the sums."""


@dataclass(frozen=True, slots=True)
class Terms:
    """The loss ``dice * mean(1 - Dice) + cross_entropy * mean(-log p[y])``; the names are MONAI's ``DiceCELoss``'s.

    Attributes
    ----------
    dice, cross_entropy
        Weights of the two losses.
    include_background
        Whether the mean of Dice includes class 0.
    batch
        Whether Dice pools the voxels of all samples, instead of a mean over samples.
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
        """Factors of ``mass + truth`` and of ``-overlap`` in the denominator, for the numerator 2 * overlap."""
        return (2.0, 2.0) if self.jaccard else (1.0, 0.0)

    def factors(self, shape: Sequence[int]) -> tuple[float, float]:
        """Return the factors of a pair's Dice loss and of a pair's surprise, for logits of ``shape``."""
        samples, classes, *sides = shape
        pairs = (1 if self.batch else samples) * (classes - (not self.include_background))
        return self.dice / pairs, self.cross_entropy / (samples * prod(sides))


CHUNK = 2**18
"""Voxels per chunk: some megabytes."""


def sums(logits: Tensor, label: Tensor, squared: bool) -> Tensor:
    """Return the sums of a slab, ``(parts, 4, B, K)`` in float32 or float64."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    out = torch.zeros((4, *logits.shape[:2]), dtype=wide, device=logits.device)
    for sample, _, values, hits in iterate_chunks(logits, label, logits.shape[1], CHUNK):
        logs = values.log_softmax(0)
        probabilities = logs.exp()
        out[OVERLAP, sample] += (probabilities * hits).sum(1)
        out[MASS, sample] += (probabilities.square() if squared else probabilities).sum(1)
        out[TRUTH, sample] += hits.sum(1).to(wide).masked_fill(~hits.any(0).all(), nan)
        out[SURPRISE, sample] -= logs.masked_fill(~hits, 0.0).sum(1)
    return out.unsqueeze(0)


def combine(sums: Tensor, terms: Terms, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the loss and its derivatives by the sums, ``(4, B, K)``, or ``(4, 1, K)`` with ``terms.batch``.

    Parameters
    ----------
    sums
        ``(parts, 4, B, K)``: the sums of all parts of all shards.
    terms
        Weights and variants of the two losses.
    shape
        Shape of the logits of the whole volume.
    """
    total = sums.sum(0)
    overlap, mass, truth, surprise = (total.sum(1, keepdim=True) if terms.batch else total).unbind()
    sizes, overlaps = terms.denominator
    denominator = sizes * (mass + truth) - overlaps * overlap + terms.smooth_dr
    ratio = (2 * overlap + terms.smooth_nr) / denominator
    pair, voxel = terms.factors(shape)
    pairs = torch.full_like(ratio, pair)
    if not terms.include_background:
        pairs[:, 0] = 0.0
    # A NaN of the truth reaches the loss and every slope, so that neither looks usable.
    slopes = [-(2 + overlaps * ratio) / denominator * pairs, sizes * ratio / denominator * pairs, 0 * ratio]
    loss = ((1 - ratio) * pairs + surprise * voxel).sum()
    return loss, torch.stack([*slopes, voxel + 0 * ratio])


def empty_gradient(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return memory for the gradient of the logits in their layout, and a view of it with one dim of voxels."""
    last = logits.stride(1) == 1
    out = torch.empty_like(logits, memory_format=torch.channels_last_3d if last else torch.contiguous_format)
    return out, out.view(*out.shape[:2], -1)


def gradient(logits: Tensor, label: Tensor, slopes: Tensor, squared: bool) -> Tensor:
    """Return the gradient of the logits from the loss's derivatives by the sums, ``(4, B, K)``."""
    out, flat = empty_gradient(logits)
    for sample, voxels, values, hits in iterate_chunks(logits, label, logits.shape[1], CHUNK):
        overlap, mass, _, surprise = slopes[:, sample, :, None].unbind()
        probabilities = values.softmax(0)
        by_probability = overlap * hits + mass * (2 * probabilities if squared else 1.0)
        centered = by_probability - (by_probability * probabilities).sum(0)
        result = (probabilities - hits.to(values)) * (surprise * hits).sum(0)
        flat[sample, :, voxels] = result.addcmul_(centered, probabilities).to(out.dtype)
    return out


def iterate_chunks(
    logits: Tensor, label: Tensor, numbers: int, length: int
) -> Iterator[tuple[int, slice, Tensor, Tensor]]:
    """Yield chunks: the sample, its ``length`` voxels, their logits, and whether their label is each number.

    Logits are float32 or wider. Both tensors have a row per channel or number, and a column per voxel.
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    each = torch.arange(numbers, device=logits.device).unsqueeze(1)
    flat, labels = logits.flatten(2), label.flatten(2)
    for sample in range(logits.shape[0]):
        for first in range(0, flat.shape[2], length):
            voxels = slice(first, first + length)
            yield sample, voxels, flat[sample, :, voxels].to(wide), labels[sample, :, voxels] == each
