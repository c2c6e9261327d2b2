"""Combine several losses into one number to minimise, and test that replicas can share them."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from volseg.device.gpus import has_values
from volseg.errors import BatchFieldError, ConfigError, VolsegError
from volseg.formatting import list_some
from volseg.losses import Targets, Terms, dice_cross_entropy, known_dice_cross_entropy
from volseg.losses.dice_cross_entropy import gathering_overlap
from volseg.workflow.named import Named

Loss = Named | Callable[..., Any]

TRIED_SIDES = (16, 16, 16)
"""Size, in voxels, of the volumes for trying losses: large enough for a loss with windows of 11 voxels."""

TRIED_DEALS = ((2, 2), (3, 2), (1, 1, 1))
"""Samples per replica: even, uneven, and one each."""

ROUND_OFF = 1e-5
"""Relative error of float32 sums over some thousand voxels; losses that are no mean differ by at least ten times
that."""

ROUND_OFF_OF_HALVES = 1e-4
"""Relative error over the millions of voxels of a sample."""


class Objective:
    """The weighted sum of named losses, as the field ``loss``.

    Parameters
    ----------
    losses : Named, callable, or sequence of them
        Each gives one scalar. A single loss may be named ``loss``; among several, that name is reserved for the sum. A
        loss that is not `Named` reads ``logits`` and ``label``, and gives ``loss``.
    weights : sequence of float, optional
        One factor per loss, 1 by default.
    targets : Targets, optional
        Content of the field ``label``, if known: see `compute`.
    """

    def __init__(
        self, losses: Loss | Sequence[Loss], weights: Sequence[float] | None = None, targets: Targets | None = None
    ) -> None:
        several = losses if isinstance(losses, Iterable) and not isinstance(losses, str) else [losses]
        self.losses = [Named.wrap(loss, ("logits", "label"), "loss") for loss in several]
        self.weights = [1.0] * len(self.losses) if weights is None else list(weights)
        self.targets = targets
        if not self.losses or len(self.losses) != len(self.weights):
            raise ConfigError(
                f"need one weight per loss and a loss at least, got {len(self.losses)} losses, {weights=}"
            )
        parts = [name for loss in self.losses for name in loss.outputs]
        is_alone = parts == ["loss"] and self.weights == [1.0]
        if parts == ["loss"] and not is_alone:
            raise ConfigError(
                f"the loss {self.losses[0].title} has the factor {self.weights[0]:g} and gives 'loss', which names the "
                "weighted sum; name its output, such as output: dice, or leave out the factor"
            )
        if len(set(parts)) != len(parts) or ("loss" in parts and not is_alone):
            raise ConfigError(
                f"losses need different names, and 'loss' names their weighted sum; got {parts} with {weights=}; "
                "name each one's output, such as output: dice"
            )
        self.names = ("loss",) if is_alone else (*parts, "loss")

    def to(self, device: torch.device) -> "Objective":
        """Move the losses' tensors, such as class weights, to the device."""
        for loss in self.losses:
            loss.to(device)
        return self

    def __call__(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``fields`` with every loss and their weighted sum ``loss`` added."""
        fields = dict(fields)
        for loss in self.losses:
            try:
                found = loss(fields)
            except (AssertionError, AttributeError, IndexError, RuntimeError, TypeError, ValueError) as fault:
                if isinstance(fault, VolsegError) or not (reason := _explain_fault(loss, fields)):
                    raise
                raise BatchFieldError(f"{reason} ({type(fault).__name__}: {fault})") from fault
            for name, value in found.items():
                if getattr(value, "ndim", 0) > 0 and value.numel() != 1:
                    raise BatchFieldError(
                        f"the loss {loss.title} gave {name} of shape {tuple(value.shape)}, where one number per batch "
                        'is needed; average it, such as by reduction="mean"'
                    )
            fields.update(found)
        if self.names != ("loss",):
            fields["loss"] = sum(
                weight * fields[name]
                for weight, loss in zip(self.weights, self.losses, strict=True)
                for name in loss.outputs
            )
        return fields

    def compute(self, fields: Mapping[str, Any]) -> tuple[dict[str, Any], Tensor | None]:
        """Return the fields with every loss, and the foreground's overlap ``(3, F)`` of `gathering_overlap`.

        Dice plus cross entropy computes the overlap as part of its sums. Other losses need an additional pass over
        ``logits`` and ``label``, which needs the targets; without targets the overlap is None.
        """
        with gathering_overlap() as gathered:
            found = self(fields)
            if gathered.sums is None and self.targets is not None:
                _leave_overlap(fields, self.targets)
        return found, gathered.sums


def _explain_fault(loss: Named, fields: Mapping[str, Any]) -> str:
    """Return why a loss cannot be computed from an output and a label; an empty text if they fit."""
    if len(loss.inputs) != 2:
        return ""
    (made_name, made), (label_name, label) = ((name, fields[name]) for name in loss.inputs)
    cases = list(map(str, fields.get("case", ())))
    given = f"{loss.title} cannot be computed of {made_name} = {_describe(made)} and {label_name} = {_describe(label)}"
    given += f" of case {list_some(cases)}: " if cases else ": "
    if not isinstance(made, Tensor):
        return (
            f"{given}the network must give one tensor; return one of them, give several to "
            "monai.losses.DeepSupervisionLoss, or name each by Named(network, inputs=['image'], outputs=[...])"
        )
    rows, channels, *sides = made.shape if made.ndim > 2 else (0, 0)
    if not isinstance(label, Tensor) or [*label.shape] not in ([rows, *sides], [rows, 1, *sides], [*made.shape]):
        return f"{given}they need the same samples and sides, such as (B, K, D, H, W) and (B, 1, D, H, W)"
    highest = max(channels, 2) - 1
    # A GPU does not raise for a wrong value, and fake tensors have no values.
    if label.device.type != "cpu" or not has_values() or not (is_wrong := (label < 0) | (label > highest)).any():
        return ""
    wrong = [case for case, row in zip(cases, is_wrong.flatten(1).any(1).tolist(), strict=False) if row]
    values = ", ".join(f"{value:g}" for value in label[is_wrong].unique().tolist()[:8])
    return (
        f"{given}{label_name} holds {values}{f' in case {list_some(wrong)}' if wrong else ''}, where {made_name} has "
        f"outputs for 0 to {highest}; correct the label map, or give the network an output for each value"
    )


def _describe(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"a dict of {', '.join(map(str, value))}"
    if isinstance(value, list | tuple):
        return f"a {type(value).__name__} of {', '.join(map(_describe, value))}"
    return str(tuple(value.shape)) if isinstance(value, Tensor) else type(value).__name__


def _leave_overlap(fields: Mapping[str, Any], targets: Targets) -> None:
    """Compute the overlap of the finest logits and the label maps; do nothing for other fields."""
    logits, label = fields.get("logits"), fields.get("label")
    logits = logits[0] if isinstance(logits, list | tuple) and logits else logits
    if not (isinstance(logits, Tensor) and isinstance(label, Tensor) and logits.ndim == label.ndim == 5):
        return
    is_map = not label.is_floating_point() and label.shape[:2] == (logits.shape[0], 1)
    if not is_map or logits.shape[1] != targets.num_outputs:
        return
    with torch.no_grad():
        if targets.is_plain:
            dice_cross_entropy(logits, label, Terms())
        else:
            known_dice_cross_entropy(logits, label, targets, Terms())


def require_mean_over_samples(
    objective: Objective,
    *,
    num_channels: int,
    num_classes: int,
    num_indices: int | None = None,
    outputs: Mapping[str, int] | None = None,
) -> None:
    """Raise for a loss that is no mean over the samples of a batch; try each loss on random volumes.

    Replicas that share a batch compute only their own samples; their losses are averaged, weighted by number of
    samples. A loss that mixes samples in another way (Dice over the whole batch, class weights divided by their sum)
    would depend on the number of replicas.

    Parameters
    ----------
    objective : Objective
    num_channels, num_classes : int
        Channels of the images and of the logits.
    num_indices : int, optional
        Number of label values, from 0 on; one per class by default.
    outputs : mapping, optional
        Further output volumes of the network, with the channels of each.

    Raises
    ------
    ConfigError
        Names the loss and what it gave.
    """
    for loss in objective.losses:
        found: list[str] = []
        faults: list[Exception] = []
        for heads in (1, 3):  # logits of a network without and with deep supervision
            for deal in TRIED_DEALS:
                try:
                    batch = _make_fields(sum(deal), heads, num_channels, num_classes, num_indices or num_classes)
                    for name, channels in (outputs or {}).items():
                        batch[name] = torch.randn(
                            sum(deal), channels, *TRIED_SIDES, generator=torch.Generator().manual_seed(1)
                        )
                    whole, parts = _try_deal(loss, deal, batch)
                except Exception as fault:  # a loss may take one of the two kinds of logits only
                    faults.append(fault)
                    continue
                if not math.isclose(whole, parts, rel_tol=ROUND_OFF, abs_tol=ROUND_OFF):
                    found.append(f"{whole:.6g} on {sum(deal)} samples, {parts:.6g} dealt {' + '.join(map(str, deal))}")
        if found:
            raise ConfigError(
                f"{loss.title} is no mean over the samples of a batch ({found[0]}), so replicas that share a batch "
                "cannot compute it; set parallel.data to 1 and parallel.spatial to the number of GPUs, or make it a "
                "mean (batch: false of Dice; no class weights)"
            )
        if len(faults) == 2 * len(TRIED_DEALS):
            raise ConfigError(
                f"{loss.title} could not be tried on random volumes ({faults[0]}), and only a mean over samples can be "
                "shared by replicas; set parallel.data to 1 and parallel.spatial to the number of GPUs"
            )


def require_mean_of_shares(objective: Objective, batch: Mapping[str, Tensor], outputs: Mapping[str, Any]) -> None:
    """Raise for a loss that is no mean over samples, in a training without a config; try it on the first samples.

    The trial joins the first sample with a copy whose fields (the labels) have every other voxel set to 0, so that the
    two halves differ in their content of each class. Sharded volumes are not checked: their replicas come from a
    config, whose losses were tried.

    Parameters
    ----------
    objective : Objective
        Its losses.
    batch, outputs : mapping
        Fields of some samples, and the network's outputs for them.

    Raises
    ------
    ConfigError
        Names the loss and what it gave.
    """
    made = [head for value in outputs.values() for head in (value if isinstance(value, list | tuple) else [value])]
    if not all(isinstance(head, Tensor) for head in made) or any(hasattr(head, "full_tensor") for head in made):
        return
    # Only the first sample: memory may be just enough for the step.
    pairs = {name: (value[:1], _empty_every_other(value[:1])) for name, value in batch.items()}
    pairs |= {name: (_take_first(value), _take_first(value)) for name, value in outputs.items()}
    whole = {name: _join(*pair) for name, pair in pairs.items()}
    for loss in objective.losses:
        first, second = (_compute(loss, {name: pair[side] for name, pair in pairs.items()}) for side in (0, 1))
        found, wanted = _compute(loss, whole), (first + second) / 2
        if not math.isclose(found, wanted, rel_tol=ROUND_OFF_OF_HALVES, abs_tol=ROUND_OFF_OF_HALVES):
            raise ConfigError(
                f"{loss.title} is no mean over the samples of a batch ({found:.6g} on two halves together, "
                f"{wanted:.6g} on average of each), so replicas that share a batch cannot compute it; cut volumes "
                "instead, or make it a mean (batch=False of Dice; no class weights)"
            )


def _empty_every_other(value: Tensor) -> Tensor:
    return (value * (torch.arange(value.shape[-1], device=value.device) % 2)).to(value.dtype)


def _take_first(value: Any) -> Any:
    """Return the outputs of one sample, in single precision, so that no difference comes from rounding."""
    if isinstance(value, list | tuple):
        return [_take_first(head) for head in value]
    return value[:1].float() if value.dtype in (torch.float16, torch.bfloat16) else value[:1]


def _join(one: Any, other: Any) -> Any:
    if isinstance(one, list | tuple):
        return [torch.cat(heads) for heads in zip(one, other, strict=True)]
    return torch.cat([one, other])


def _try_deal(loss: Named, deal: Sequence[int], fields: Mapping[str, Any]) -> tuple[float, float]:
    """Return a loss on a batch, and its mean over the parts of the batch."""
    end, parts = 0, 0.0
    for count in deal:
        begin, end = end, end + count
        parts += _compute(loss, fields, slice(begin, end)) * count / sum(deal)
    return _compute(loss, fields, slice(None)), parts


def _compute(loss: Named, fields: Mapping[str, Any], rows: slice = slice(None)) -> float:
    """Return a loss on some rows of a batch."""
    taken = {
        name: [head[rows] for head in value] if isinstance(value, list) else value[rows]
        for name, value in fields.items()
    }
    with torch.no_grad():
        values = loss(taken).values()
    if not has_values():  # fake tensors measure the memory and have no values
        return 0.0
    return math.fsum(float(value) for value in values)


def _make_fields(count: int, heads: int, num_channels: int, num_classes: int, num_indices: int) -> dict[str, Any]:
    """Return a random batch whose samples differ in their share of each class; one is only background."""
    generator = torch.Generator().manual_seed(0)
    label = torch.randint(num_indices, (count, 1, *TRIED_SIDES), generator=generator)
    kept = torch.rand(label.shape, generator=generator) < torch.arange(count).view(-1, 1, 1, 1, 1) / count
    sides = [[side // 2**level for side in TRIED_SIDES] for level in range(heads)]
    logits = [torch.randn(count, num_classes, *side, generator=generator) for side in sides]
    return {
        "image": torch.randn(count, num_channels, *TRIED_SIDES, generator=generator),
        "label": (label * kept).to(torch.uint8),
        "logits": logits if heads > 1 else logits[0],
    }
