"""Bind the inputs and outputs of modules to named fields of a batch, and combine losses into one number to minimise.

A batch is a dict of fields. ``Named`` binds a module's arguments and results to fields by name, so that models, losses
and metrics of any library can be combined without glue: the order of the fields in a batch never matters. ``Objective``
is the weighted sum of named losses.
"""

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from volseg.device.gpus import has_values
from volseg.errors import BatchFieldError, ConfigError
from volseg.losses import Targets, Terms, dice_cross_entropy, known_dice_cross_entropy
from volseg.losses.dice_cross_entropy import gathering_overlap


class Named(nn.Module):
    """A module with named inputs and outputs.

    Parameters
    ----------
    module : nn.Module or callable
        A network, loss or metric. It is called with positional arguments.
    inputs : sequence of str
        Fields of the batch, in the order of the module's arguments.
    outputs : sequence of str
        Names of the results, in the order in which the module returns them. A single name gets the unchanged result (a
        list of deep-supervision heads stays a list); more names unpack a tuple or list.

    Examples
    --------
    >>> import torch
    >>> double = Named(lambda x: 2 * x, inputs=["image"], outputs=["logits"])
    >>> double({"image": torch.ones(1), "label": torch.zeros(1)})
    {'logits': tensor([2.])}
    """

    def __init__(self, module: Callable[..., Any], inputs: Sequence[str], outputs: Sequence[str]) -> None:
        super().__init__()
        for kind, names in (("inputs", inputs), ("outputs", outputs)):
            if isinstance(names, str) or not names or len(set(names)) != len(names):
                raise ConfigError(f"{kind} must be a list of different field names, got {names!r}")
        self.module = module
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)

    @classmethod
    def wrap(cls, module: Callable[..., Any], inputs: Sequence[str], output: str) -> "Named":
        """Return ``module`` if it is a `Named`, else a `Named` with the conventional fields.

        Raises
        ------
        ConfigError
            If the module cannot be called, or its parameters name the same fields in another order.
        """
        if isinstance(module, Named):
            return module
        if not callable(module) or isinstance(module, type):
            raise ConfigError(
                f"expected a module from {', '.join(inputs)} to {output}, or "
                f"Named(module, inputs=[...], outputs=[...]); got {module!r}"
            )
        _require_order(module, inputs)
        return cls(module, inputs, [output])

    @property
    def title(self) -> str:
        """The wrapped module's own name, for messages."""
        return getattr(self.module, "__name__", type(self.module).__name__)

    def forward(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Read ``inputs`` from the batch in their declared order; return ``outputs`` by name.

        Raises
        ------
        BatchFieldError
            If the batch lacks an input, or the number of results differs from the number of outputs.
        """
        if missing := [name for name in self.inputs if name not in batch]:
            raise BatchFieldError(
                f"{self.title} needs {missing}, but the batch has {sorted(batch)}; "
                "rename the field in the batch, or the input of this Named"
            )
        results = self.module(*(batch[name] for name in self.inputs))
        if len(self.outputs) == 1:
            return {self.outputs[0]: results}
        count = len(results) if isinstance(results, tuple | list) else 1
        if count != len(self.outputs):
            raise BatchFieldError(
                f"{self.title} returned {count} result(s), but {len(self.outputs)} are named: {list(self.outputs)}"
            )
        return dict(zip(self.outputs, results, strict=True))

    def extra_repr(self) -> str:
        """Show the fields in the module's printout."""
        return f"{list(self.inputs)} -> {list(self.outputs)}"


def _require_order(module: Callable[..., Any], inputs: Sequence[str]) -> None:
    """Raise if a module's parameters have the fields' names in another order: it would get the wrong inputs.

    ``loss(label, logits)`` often computes a plausible but wrong number from exchanged inputs.
    """
    try:
        parameters = inspect.signature(module.forward if isinstance(module, nn.Module) else module).parameters.values()
    except (TypeError, ValueError):  # written in C, without a signature
        return
    named = [one.name for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    places = {name: named.index(name) for name in inputs if name in named}
    if wrong := [name for place, name in enumerate(inputs) if places.get(name, place) != place]:
        raise ConfigError(
            f"{getattr(module, '__name__', type(module).__name__)} is called with {', '.join(inputs)} in this order, "
            f"but its parameters are ({', '.join(named)}), with {wrong[0]} in another place; bind each with "
            "Named(module, inputs=[...], outputs=[...])"
        )


Loss = Named | Callable[..., Any]

ROUND_OFF = 1e-5
"""Relative error of float32 sums over some thousand voxels; losses that are not means differ by at least ten times
that."""

ROUND_OFF_OF_VOLUMES = 1e-4
"""Relative error over the millions of voxels of a sample."""


class Objective:
    """The weighted sum of named losses, as the field ``loss``.

    Parameters
    ----------
    losses : Named, callable, or sequence of them
        Each returns one scalar. A single loss may be named ``loss``; with more losses, this name is reserved for the
        sum. A loss that is not `Named` reads ``logits`` and ``label``, and returns ``loss``.
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
                f"expected at least one loss, and one weight per loss; got {len(self.losses)} losses, {weights=}"
            )
        parts = [name for loss in self.losses for name in loss.outputs]
        is_alone = parts == ["loss"] and self.weights == [1.0]
        if parts == ["loss"] and not is_alone:
            raise ConfigError(
                f"the loss {self.losses[0].title} has the factor {self.weights[0]:g} and the output 'loss', but "
                "this names the weighted sum; rename the output, such as output: dice, or leave out the factor"
            )
        if len(set(parts)) != len(parts) or ("loss" in parts and not is_alone):
            raise ConfigError(
                f"losses need different outputs, and 'loss' names their weighted sum; got {parts} with {weights=}; "
                "set the output of each, such as output: dice"
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
            found = loss(fields)
            for name, value in found.items():
                if getattr(value, "ndim", 0) > 0 and value.numel() != 1:
                    raise BatchFieldError(
                        f"the loss {loss.title} returned {name} of shape {tuple(value.shape)}, not one number per "
                        'batch; average it, such as with reduction="mean"'
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
        """Return the fields with every loss, and the foreground's overlap ``(3, F)``.

        Dice plus cross entropy computes the overlap as part of its sums. Other losses need an additional pass over
        ``logits`` and ``label``, which needs the targets; without targets the overlap is None.
        """
        with gathering_overlap() as gathered:
            found = self(fields)
            if gathered.sums is None and self.targets is not None:
                _leave_overlap(fields, self.targets)
        return found, gathered.sums


def describe_value(value: Any) -> str:
    """Return the shapes in a value of a field, for messages."""
    if isinstance(value, Mapping):
        return f"a dict of {', '.join(map(str, value))}"
    if isinstance(value, list | tuple):
        return f"a {type(value).__name__} of {', '.join(map(describe_value, value))}"
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


def require_mean_of_shares(objective: Objective, batch: Mapping[str, Tensor], outputs: Mapping[str, Any]) -> None:
    """Raise for a loss that is not a mean over samples, in a training without a config; try it on the first sample.

    The trial joins the sample with a copy whose fields (the labels) have every other voxel set to 0, so that the two
    have different amounts of each class. Sharded volumes are not checked: their replicas come from a config, whose
    losses were rehearsed.

    Parameters
    ----------
    objective : Objective
        Losses to check.
    batch, outputs : mapping
        Fields of some samples, and the network's outputs for them.

    Raises
    ------
    ConfigError
        The message names the loss and its values.
    """
    made = [head for value in outputs.values() for head in (value if isinstance(value, list | tuple) else [value])]
    if not all(isinstance(head, Tensor) for head in made) or any(hasattr(head, "full_tensor") for head in made):
        return
    # Only the first sample: memory may be just enough for the step.
    fields: dict[str, Any] = {}
    for name, value in batch.items():
        every_other = torch.arange(value.shape[-1], device=value.device) % 2
        fields[name] = torch.cat([value[:1], (value[:1] * every_other).to(value.dtype)])
    for name, value in outputs.items():
        fields[name] = [*map(_double, value)] if isinstance(value, list | tuple) else _double(value)
    for loss in objective.losses:
        require_mean(loss, fields, 2, ROUND_OFF_OF_VOLUMES)


def _double(head: Tensor) -> Tensor:
    """Return the first sample twice, in single precision, so that rounding causes no difference."""
    first = head[:1].float() if head.dtype in (torch.float16, torch.bfloat16) else head[:1]
    return torch.cat([first, first])


def require_mean(loss: Named, fields: Mapping[str, Any], count: int, tolerance: float = ROUND_OFF) -> None:
    """Raise for a loss that is not a mean over the ``count`` samples of a batch; compare it with two parts of it.

    Replicas that share a batch compute only their own samples; their losses are averaged, weighted by number of
    samples. A loss that mixes samples in another way (Dice over the whole batch, class weights divided by their sum)
    would depend on the number of replicas.

    Raises
    ------
    ConfigError
        The message names the loss and its values.
    """
    first, others = _compute(loss, fields, slice(1)), _compute(loss, fields, slice(1, None))
    whole, parts = _compute(loss, fields, slice(None)), (first + (count - 1) * others) / count
    if not math.isclose(whole, parts, rel_tol=tolerance, abs_tol=tolerance):
        raise ConfigError(
            f"{loss.title} is not a mean over the samples of a batch ({whole:.6g} on {count} samples, {parts:.6g} on "
            f"1 + {count - 1} separately), so replicas that share a batch cannot compute it; set parallel.data to 1, "
            "parallel.spatial to the number of GPUs, or make it a mean (for Dice batch: false; no class weights)"
        )


def _compute(loss: Named, fields: Mapping[str, Any], rows: slice) -> float:
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
