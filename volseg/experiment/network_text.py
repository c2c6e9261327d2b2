"""A network as a table: its modules, their parameters, and the shapes of what they give."""

from typing import Any

from torch import Tensor, nn

from volseg.config.schema import ExperimentConfig
from volseg.data.cases import Task
from volseg.errors import VolsegError
from volseg.experiment.placed_network import build_plain_network
from volseg.experiment.rehearsing import rehearse_network
from volseg.parallel.state.random import own_random_numbers

__all__ = ["describe_network"]


def describe_network(config: ExperimentConfig, task: Task) -> str:
    """Return a Markdown table of a config's network, as it runs on one patch.

    Another copy is built for it and run without values: the network that trains is placed, cut or compiled by now, and
    is left alone.
    """
    with own_random_numbers([]):
        network = build_plain_network(config, task)
        shapes: dict[int, str] = {}

        def note(module: nn.Module, inputs: Any, output: Any) -> None:
            del inputs
            shapes.setdefault(id(module), _describe(output))

        handles = [module.register_forward_hook(note) for module in network.modules()]
        try:
            rehearse_network(network, config, task)
            remark = "Shapes are those of a batch of one."
        except VolsegError as fault:
            remark = f"Shapes are not known: {fault}"
        finally:
            for handle in handles:
                handle.remove()
    total = sum(parameter.numel() for parameter in network.parameters())
    trained = sum(parameter.numel() for parameter in network.parameters() if parameter.requires_grad)
    rows = [
        f"| {name or '(network)'} | {type(module).__name__} | {_count(module):,} | {shapes.get(id(module), '')} |"
        for name, module in network.named_modules()
    ]
    return "\n".join(
        [
            f"{config.network.name}: {total:,} parameters, {trained:,} of them trained. {remark}",
            "",
            "| module | type | parameters | output |",
            "| --- | --- | ---: | --- |",
            *rows,
        ]
    )


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _describe(output: Any) -> str:
    """Return the shapes of an output."""
    if isinstance(output, Tensor):
        return " x ".join(map(str, output.shape))
    if isinstance(output, list | tuple):
        return ", ".join(map(_describe, output))
    return type(output).__name__
