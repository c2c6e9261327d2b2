"""Compute soft Dice plus cross entropy of the known voxels: regions, ignored voxels, partially labelled cases.

For each output of the network, a number in the label map means that a voxel is in the output, is not, or may be
(`Targets`). The loss is that of `volseg.losses.dice_cross_entropy`, computed over the known voxels:

* Without regions, outputs share a softmax. A voxel that may be one of several classes costs ``-log`` of their summed
  probability. In samples with such voxels, Dice counts these classes as one: the marginal losses of [1]_. Cross entropy
  is the mean over a sample's annotated voxels.
* With regions, each output has a sigmoid, and the loss is nnU-Net's: Dice and binary cross entropy, each a mean over
  outputs. The background has no output. An output has no loss in a sample with a label that does not determine it (its
  region may be hidden in the background).
* A voxel without annotation is in none of the sums, and has a gradient of exactly 0.

The loss is a mean over samples of means within a sample; a sample without any annotated voxel counts as 0. So the
result is the same for any number of replicas that share a batch. nnU-Net divides by the annotated voxels of the whole
batch, which a replica does not know. If nnU-Net ignores voxels, its binary cross entropy is a sum over the outputs, not
their mean.

Only logits and label are kept for the backward pass. No step waits for the host.

References
----------
.. [1] Shi et al., Marginal loss and exclusion loss for partially supervised multi-organ segmentation, Medical Image
   Analysis 70 (2021), 101979, doi:10.1016/j.media.2021.101979.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from volseg.device.first_order import first_order
from volseg.device.gpus import keeping, on_gpu
from volseg.errors import DataError
from volseg.losses.dice.reference import Terms, empty_gradient, iterate_chunks
from volseg.losses.dice_cross_entropy import check_shapes, leave_overlap, read_at_grid


@dataclass(frozen=True, kw_only=True, slots=True)
class Targets:
    """Meaning of the numbers in a label map, for a loss.

    A label map contains the classes ``0 ... K-1``, then a number for voxels without annotation, if any, then a number
    for each set of classes that cannot be distinguished in a case; see `volseg.data.labels`.
    """

    num_classes: int
    """K, background included."""
    regions: tuple[tuple[int, ...], ...] = ()
    """Classes of each sigmoid output of a network; empty for a softmax over the classes."""
    ignores: bool = False
    """Whether number K means a voxel without annotation."""
    hidden: tuple[tuple[int, ...], ...] = ()
    """Classes, including the background, that each number from ``first_hidden`` may mean."""

    @property
    def num_outputs(self) -> int:
        """Channels of the logits."""
        return len(self.regions) or self.num_classes

    @property
    def num_indices(self) -> int:
        """Count of the numbers, from 0, that a label map may contain."""
        return self.first_hidden + len(self.hidden)

    @property
    def first_hidden(self) -> int:
        """The first number that may mean several classes."""
        return self.num_classes + int(self.ignores)

    @property
    def is_plain(self) -> bool:
        """Whether every voxel has one known class, and every class an output."""
        return not (self.regions or self.ignores or self.hidden)

    @property
    def possible(self) -> tuple[tuple[int, ...], ...]:
        """Classes that a voxel with each number may have."""
        every = tuple(range(self.num_classes))
        return (*((index,) for index in every), *((every,) if self.ignores else ()), *self.hidden)


ELEMENTS = 2**23
"""Voxels per chunk, times the values computed for each voxel: some tens of megabytes."""


def known_dice_cross_entropy(logits: Tensor, label: Tensor, targets: Targets, terms: Terms) -> Tensor:
    """Return the scalar loss, in float32, or in float64 for logits of float64.

    Parameters
    ----------
    logits
        ``(B, K, D, H, W)``, K outputs; or a sharded volume.
    label
        ``(B, 1, D, H, W)``; a finer grid is read at the voxels of ``nearest-exact``.
    targets
        The meaning of the label's numbers.
    terms
        Weights and variants of the two losses; ``include_background: false`` leaves class 0 out of Dice.

    Raises
    ------
    DataError
        On the CPU, if the label has a number without a meaning. On a GPU the loss becomes NaN instead.
    """
    if has_torch_function((logits, label)):
        arguments = (logits, label, targets, terms)
        result: Tensor = handle_torch_function(known_dice_cross_entropy, (logits, label), *arguments)
        return result
    check_outputs(logits, label, targets)
    label = read_at_grid(label, logits.shape[2:])
    return compute_known_loss(sum_known(logits, label, targets, terms), targets, terms)


def check_outputs(logits: Tensor, label: Tensor, targets: Targets) -> None:
    """Raise unless logits and label have one batch size, and the logits have the targets' outputs."""
    check_shapes(logits, label, targets.num_outputs, "region" if targets.regions else "class")


def sum_known(logits: Tensor, label: Tensor, targets: Targets, terms: Terms) -> Tensor:
    """Return the sums ``(B, 3 J + I + 1)`` over the voxels of one slab; the caller adds the slabs.

    The J columns are the outputs, then each set of classes that cannot be distinguished. Each column has three sums:
    probability in the column, probability of all voxels, surprise. Then follow the counts of voxels with each of the I
    numbers, and with other numbers.
    """
    sums: Tensor = _KnownSums.apply(logits, label, targets, terms.squared)
    return sums


def compute_known_loss(sums: Tensor, targets: Targets, terms: Terms) -> Tensor:
    """Return the loss from the sums over all voxels."""
    strange = sums[:, -1] > 0
    if not on_gpu(sums) and bool(strange.any()):
        raise DataError(
            f"a label map may contain the numbers 0 to {targets.num_indices - 1} here, but has others in "
            f"{int(sums[:, -1].sum())} voxel(s); map its values with volseg.data.labels.to_classes"
        )
    tables = _tables(targets, sums.device, sums.dtype)
    columns = tables.truth.shape[0]
    overlap, mass, surprise = sums[:, : 3 * columns].unflatten(1, (3, columns)).unbind(1)
    counts = sums[:, 3 * columns : -1].detach()
    # Not a matrix product, which TF32 would round.
    truth, known = ((counts.unsqueeze(1) * table).sum(2) for table in (tables.truth, tables.known))
    judged = (known > 0) & ~((counts.unsqueeze(1) > 0) & tables.spoils).any(2)
    for place in range(len(targets.hidden) if not targets.regions else 0):
        judged[:, targets.num_classes + place] &= counts[:, targets.first_hidden + place] > 0
    foreground = slice(None) if targets.regions else slice(1, targets.num_classes)
    left = torch.stack([overlap, mass, truth]).detach() * judged
    leave_overlap(left[..., foreground], (1,))
    loss = terms.dice * _dice(overlap, mass, truth, _choose_for_dice(judged, targets, terms), terms)
    if terms.cross_entropy != 0:
        if targets.regions:
            per_voxel = surprise / known.clamp(min=1)
            entropy = (torch.where(judged, per_voxel, 0).sum(1) / judged.sum(1).clamp(min=1)).mean()
        else:
            entropy = (surprise[:, 0] / known[:, 0].clamp(min=1)).mean()
        loss = loss + terms.cross_entropy * entropy
    return loss * torch.where(strange.any(), torch.nan, 1.0)  # reaches the gradient, too


def _choose_for_dice(judged: Tensor, targets: Targets, terms: Terms) -> Tensor:
    if terms.include_background or targets.regions:
        return judged
    background = torch.zeros_like(judged)
    background[:, 0] = True
    background[:, targets.num_classes :] = True
    return judged & ~background


def _dice(overlap: Tensor, mass: Tensor, truth: Tensor, judged: Tensor, terms: Terms) -> Tensor:
    """Return one minus Dice: the mean over a sample's judged columns, then over samples."""
    if terms.batch:
        overlap, mass, truth = (torch.where(judged, sums, 0).sum(0, keepdim=True) for sums in (overlap, mass, truth))
        judged = judged.any(0, keepdim=True)
    sizes, overlaps = terms.denominator
    denominator = sizes * (mass + truth) - overlaps * overlap + terms.smooth_dr
    ratio = (2 * overlap + terms.smooth_nr) / torch.where(judged, denominator, 1)
    return (torch.where(judged, 1 - ratio, 0).sum(1) / judged.sum(1).clamp(min=1)).mean()


class _KnownSums(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, label: Tensor, targets: Targets, squared: bool) -> Tensor:
        ctx.save_for_backward(logits, label)
        ctx.targets, ctx.squared = targets, squared
        return _sum_voxels(logits, label, targets, squared)

    @staticmethod
    @first_order
    def backward(ctx: Any, slopes: Tensor) -> tuple[Tensor | None, ...]:
        logits, label = ctx.saved_tensors
        return _compute_gradient(logits, label, slopes, ctx.targets, ctx.squared), None, None, None


@dataclass(frozen=True, slots=True)
class _Tables:
    """The meaning of each number, as tensors on a device; ``(J, I)``."""

    truth: Tensor
    """1 where the number is in the column."""
    known: Tensor
    """1 where the number determines whether the voxel is in the column."""
    spoils: Tensor
    """Whether a single voxel with the number excludes the column from the loss of its sample."""
    possible: Tensor
    """``(K, I)``: 1 where the number may be the class."""
    members: tuple[Tensor, ...]
    """The classes of each column that merges several."""


@keeping()
def _tables(targets: Targets, device: torch.device, dtype: torch.dtype) -> _Tables:
    """Return tables that live as long as the process: CUDA graphs read them at their addresses.

    The tables are copied from the host, which a capture does not allow; the step before the capture creates them.
    """
    every = range(targets.num_classes)
    columns = [set(region) for region in targets.regions]
    if not columns:
        columns = [*({index} for index in every), *(set(hidden) for hidden in targets.hidden)]

    def describe(column: set[int], number: int, classes: set[int]) -> tuple[bool, bool, bool]:
        annotated = not (targets.ignores and number == targets.num_classes)
        inside, outside = classes <= column, not column & classes
        tells = annotated if not targets.regions else inside or (annotated and outside)
        # A class that may be hidden in the background is judged only together with it.
        return annotated and inside, annotated and tells, annotated and not (inside or outside)

    described = [
        [describe(column, number, set(classes)) for number, classes in enumerate(targets.possible)]
        for column in columns
    ]
    truth, known, spoils = torch.tensor(described, device=device).permute(2, 0, 1).contiguous()
    possible = [[index in classes for classes in targets.possible] for index in every]
    hidden = () if targets.regions else targets.hidden
    return _Tables(
        truth=truth.to(dtype),
        known=known.to(dtype),
        spoils=spoils,
        possible=torch.tensor(possible, dtype=dtype, device=device),
        members=tuple(torch.tensor(classes, device=device) for classes in hidden),
    )


def _sum_voxels(logits: Tensor, label: Tensor, targets: Targets, squared: bool) -> Tensor:
    wide = torch.promote_types(logits.dtype, torch.float32)
    tables = _tables(targets, logits.device, wide)
    columns, numbers = tables.truth.shape
    out = torch.zeros(logits.shape[0], 3 * columns + numbers + 1, dtype=wide, device=logits.device)
    for sample, _, values, hits in iterate_chunks(logits, label, numbers, _chunk_length(logits, numbers)):
        number = hits.to(torch.uint8).argmax(0)
        truth, known = (table.index_select(1, number) for table in (tables.truth, tables.known))
        if targets.regions:
            probabilities = values.sigmoid()
            surprise = known * F.binary_cross_entropy_with_logits(values, truth, reduction="none")
        else:
            logs = values.log_softmax(0)
            probabilities, chosen = _merge(logs.exp(), tables), _choose_logs(logs, number, targets, tables)
            surprise = torch.zeros_like(probabilities)
            surprise[0] = -chosen
        masses = probabilities.square() if squared else probabilities
        row = out[sample]
        sums = ((probabilities * truth).sum(1), (masses * known).sum(1), surprise.sum(1))
        row[: 3 * columns] += torch.cat(sums)
        row[3 * columns : -1] += hits.sum(1)
        row[-1] += (~hits.any(0)).sum()
    return out


def _compute_gradient(logits: Tensor, label: Tensor, slopes: Tensor, targets: Targets, squared: bool) -> Tensor:
    """Return the gradient of the logits from the loss's derivatives by the sums."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    tables = _tables(targets, logits.device, wide)
    columns, numbers = tables.truth.shape
    out, flat = empty_gradient(logits)
    for sample, voxels, values, hits in iterate_chunks(logits, label, numbers, _chunk_length(logits, numbers)):
        number = hits.to(torch.uint8).argmax(0)
        truth, known = (table.index_select(1, number) for table in (tables.truth, tables.known))
        overlap, mass, surprise = slopes[sample, : 3 * columns].unflatten(0, (3, columns)).unsqueeze(2).unbind()
        if targets.regions:
            p = values.sigmoid()
            by_probability = overlap * truth + mass * known * (2 * p if squared else 1.0)
            result = by_probability * p * (1 - p) + surprise * known * (p - truth)
        else:
            logs = values.log_softmax(0)
            p = logs.exp()
            merged = _merge(p, tables)
            by_column = overlap * truth + mass * known * (2 * merged if squared else 1.0)
            by_probability = by_column[: targets.num_classes]
            for place, members in enumerate(tables.members, targets.num_classes):
                by_probability.index_add_(0, members, by_column[place].expand(len(members), -1))
            centered = by_probability - (by_probability * p).sum(0)
            among = (logs - _choose_logs(logs, number, targets, tables)).exp() * tables.possible.index_select(1, number)
            result = centered * p + surprise[0] * known[0] * (p - among)
        flat[sample, :, voxels] = result.to(out.dtype)
    return out


def _merge(probabilities: Tensor, tables: _Tables) -> Tensor:
    """Return the probability of each column: the classes, and each merged set of classes."""
    if not tables.members:
        return probabilities
    sets = [probabilities.index_select(0, members).sum(0, keepdim=True) for members in tables.members]
    return torch.cat([probabilities, *sets])


def _choose_logs(logs: Tensor, number: Tensor, targets: Targets, tables: _Tables) -> Tensor:
    """Return the logarithm of the probability of each voxel's possible classes; 0 where all are possible."""
    rows = [logs]
    if targets.ignores:
        rows.append(torch.zeros_like(logs[:1]))
    rows += [logs.index_select(0, members).logsumexp(0, keepdim=True) for members in tables.members]
    return torch.cat(rows).gather(0, number.unsqueeze(0)).squeeze(0)


def _chunk_length(logits: Tensor, numbers: int) -> int:
    return ELEMENTS // max(numbers, logits.shape[1])
