"""Run a network and its losses once on tiny inputs, before a run folder is created.

Requirements of a network beyond its parameters (a package that MONAI imports late, a size, an output for each label)
appear only when it runs. On meta tensors a run costs no memory and a tenth of a second. A network that reads values,
which meta tensors lack, runs on the smallest volume that it supports.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from volseg.config.registry import explain_import
from volseg.config.schema import ExperimentConfig
from volseg.data.cases import Task
from volseg.errors import ConfigError, VolsegError
from volseg.inference.window_step import full_logits
from volseg.models.fit_grid import FitGrid
from volseg.models.grids import run_on_copies
from volseg.workflow.named import Named, Objective, describe_value, require_mean

logger = logging.getLogger(__name__)


SIDES = (16, 16, 16)
"""Sides of the volumes for a trial of losses, in voxels."""

SAMPLES = 3


class OneOutput(nn.Module):
    """A network as the function from a volume to its logits.

    Parameters
    ----------
    model : nn.Module
        It may return several outputs, or several heads.
    index : int, optional
        Index of the logits among the outputs; None for a single output.
    """

    def __init__(self, model: nn.Module, index: int | None) -> None:
        super().__init__()
        self.model, self.index = model, index

    def forward(self, image: Tensor) -> Tensor:
        """Return the logits (B, K, D, H, W) of volumes (B, C, D, H, W)."""
        output = self.model(image)
        return full_logits(output if self.index is None else output[self.index])


def rehearse_network(network: FitGrid, config: ExperimentConfig, task: Task) -> dict[str, Any]:
    """Return the network's outputs in training mode, by name: tensors on meta or of a small volume, or lists.

    Raises
    ------
    ConfigError
        If it does not run, lacks a package, or its outputs differ from ``network.outputs``, which include logits with a
        channel per label.
    """
    name = config.network.name
    shape, output = _run_once(network, name, task.num_inputs, config.patch.size)
    try:
        made = Named(lambda _: output, ["image"], config.network.outputs)({"image": None})
    except VolsegError as fault:
        raise ConfigError(f"network {name}: {fault}; network.outputs must name its outputs") from fault
    heads = list(made["logits"]) if isinstance(made["logits"], list | tuple) else [made["logits"]]
    came = [tuple(head.shape) if isinstance(head, Tensor) else type(head).__name__ for head in heads]
    wanted = (shape[0], task.num_outputs, *shape[2:])
    if came[:1] != [wanted] or any(len(head) != 5 or head[1] != wanted[1] for head in came):
        raise ConfigError(
            f"network {name} must return logits (B, K, D, H, W) = {wanted} for an image of {shape}, with K = "
            f"{task.num_outputs} for the task's labels, got {came}; name further outputs in network.outputs"
        )
    return made


def _run_once(network: FitGrid, name: str, num_channels: int, patch: Sequence[int]) -> tuple[tuple[int, ...], Any]:
    """Return the shape of an image, and the network's output for it."""
    mode, sides = network.training, network.rule.sides(patch)
    shape = (1, num_channels, *sides)
    network.train()
    try:
        with torch.random.fork_rng([]), torch.no_grad():
            try:
                image = torch.empty(shape, device="meta")
                return shape, run_on_copies(network, partial(torch.empty_like, device="meta"), image)
            except ImportError:
                raise
            except Exception:  # noqa: S110 - meta tensors have no values, at which the network may look
                pass
            shape = (1, num_channels, *network.rule.sides(network.rule.minimum))
            # Clones, since a run would change a norm's statistics.
            return shape, run_on_copies(network, torch.clone, torch.zeros(shape))
    except ImportError as fault:
        raise ConfigError(f"network {name} {explain_import(fault)}") from fault
    except VolsegError:
        raise
    except Exception as fault:  # any error of the user's network
        raise ConfigError(f"network {name} cannot be run on an image of {shape}: {_tell(fault)}") from fault
    finally:
        network.train(mode)


def rehearse_losses(
    objective: Objective, made: Mapping[str, Any], num_channels: int, *, is_shared: bool = False
) -> None:
    """Compute every loss once on random volumes, whose samples differ in their share of each class.

    Parameters
    ----------
    objective : Objective
        Losses on the CPU.
    made : mapping
        Outputs of the network, by name; see `rehearse_network`.
    num_channels : int
        Channels of an image.
    is_shared : bool
        Whether replicas share a batch: each loss must then be a mean over its samples.

    Raises
    ------
    ConfigError
        If a loss raises an error (the message includes it), does not return a number, or is not such a mean.
    """
    generator, targets = torch.Generator().manual_seed(0), objective.targets
    logits = made["logits"][0] if isinstance(made["logits"], list | tuple) else made["logits"]
    count = logits.shape[1] if targets is None else targets.num_indices
    label = torch.randint(count, (SAMPLES, 1, *SIDES), generator=generator)
    kept = torch.rand(label.shape, generator=generator) < torch.arange(SAMPLES).view(-1, 1, 1, 1, 1) / SAMPLES
    fields: dict[str, Any] = {
        "image": torch.randn(SAMPLES, num_channels, *SIDES, generator=generator),
        "label": (label * kept).to(torch.uint8),
        **{name: _draw_like(value, generator) for name, value in made.items()},
    }
    for loss in objective.losses:
        try:
            values = loss(fields)
        except ImportError as fault:
            raise ConfigError(f"loss {loss.title} {explain_import(fault)}") from fault
        except Exception as fault:  # any error of MONAI's or the user's code
            if isinstance(fault, VolsegError) and not isinstance(fault, ValueError | KeyError):
                raise
            given = {name: describe_value(fields[name]) for name in loss.inputs}
            raise ConfigError(f"loss {loss.title} cannot be computed from {given}: {_tell(fault)}") from fault
        for value in values.values():
            if not (isinstance(value, Tensor) and value.ndim == 0):
                raise ConfigError(f"loss {loss.title} must return one number, got {describe_value(value)}")
        if is_shared:
            require_mean(loss, fields, SAMPLES)


def _draw_like(value: Any, generator: torch.Generator, level: int = 0) -> Any:
    """Return random numbers in place of an output: volumes on the grid of ``SIDES``, coarser ones at half of it."""
    if isinstance(value, list | tuple):
        finest = value[0].shape[-1] if value and isinstance(value[0], Tensor) and value[0].ndim else 1
        levels = [round(finest / head.shape[-1]).bit_length() - 1 if head.ndim == 5 else 0 for head in value]
        return [_draw_like(head, generator, each) for head, each in zip(value, levels, strict=True)]
    if not isinstance(value, Tensor):
        return value
    if value.ndim != 5:
        return torch.randn(SAMPLES if value.ndim else 1, *value.shape[1:], generator=generator).squeeze(0)
    sides = [max(1, side >> level) for side in SIDES]
    return torch.randn(SAMPLES, value.shape[1], *sides, generator=generator)


def _tell(fault: Exception) -> str:
    return f"{type(fault).__name__}: {str(fault).strip().partition(chr(10))[0]}"


def require_window(network: FitGrid, config: ExperimentConfig) -> None:
    """Raise if a network of fixed size has no window of that size; the first whole volume would fail hours later."""
    rule, window = network.rule, config.inference.window
    if rule.fixed and any(side > most for side, most in zip(window or (math.inf,) * 3, rule.minimum, strict=True)):
        raise ConfigError(
            f"network {config.network.name} supports only volumes of {rule.minimum} voxels; set inference.window to "
            f"{list(rule.minimum)}, got {window and list(window)}"
        )
