"""Take over a saved state part by part: what does not fit is told by the name of its part, whatever it runs into."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from volseg.checkpointing.state import TrainingState
from volseg.errors import CheckpointError

__all__ = ["lay_out_like_parameters", "require_whole", "taking_over"]

NOT_WHOLE = "the checkpoint is not whole"


@contextmanager
def taking_over(part: str) -> Iterator[None]:
    """Turn whatever a part of a state runs into into a `CheckpointError` that names the part."""
    try:
        yield
    except Exception as fault:  # networks, optimizers and generators each raise something else
        reason = str(fault) if isinstance(fault, ValueError | RuntimeError) else f"{type(fault).__name__}: {fault}"
        raise CheckpointError(f"the checkpoint is not of this network and optimizer: {part}: {reason}") from fault


def lay_out_like_parameters(optimizer: Optimizer) -> None:
    """Lay out what an optimizer has taken over as its parameters lie in memory, as if it had begun with them.

    The training that wrote it may have had the same weights in another layout. Fused optimizers read both in one order:
    on a GPU torch refuses that, on a CPU it computes something else.
    """
    for parameter, remembered in optimizer.state.items():
        for name, value in remembered.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.layout is torch.strided:
                laid_out = torch.empty_like(parameter, dtype=value.dtype, device=value.device)
                if laid_out.stride() != value.stride():
                    remembered[name] = laid_out.copy_(value)


def require_whole(state: TrainingState, optimizer: Optimizer) -> None:
    """Raise for a state whose parts do not belong together, or that has lost what its optimizer remembers.

    Parameters
    ----------
    state : TrainingState
        Of a training.
    optimizer : Optimizer
        Which has taken over its part.

    Raises
    ------
    CheckpointError
        Names the part.
    """
    for part, batches in (("losses", state.losses), ("cases", state.cases)):
        if len(batches) != state.position:
            raise CheckpointError(f"{NOT_WHOLE}: {part}: {len(batches)} batches, but position is {state.position}")
    if not state.steps_done:
        return
    entries = state.optimizer["state"]
    for group, saved in zip(optimizer.param_groups, state.optimizer["param_groups"], strict=True):
        wanted = _remembered(optimizer, group)
        # A parameter that never had a gradient has no entry; all of them have had none only if something was lost.
        for parameter in saved["params"] if not entries else [one for one in saved["params"] if one in entries]:
            if lost := sorted(wanted - {*entries.get(parameter, ())}):
                raise CheckpointError(
                    f"{NOT_WHOLE}: optimizer: after {state.steps_done} steps it lacks the {lost[0]} that "
                    f"{type(optimizer).__name__} keeps of parameter {parameter}"
                )


def _remembered(optimizer: Optimizer, group: dict[str, Any]) -> set[str]:
    """Return what the optimizer keeps of each parameter of a group, by a step on one that is nobody's."""
    if not type(optimizer).__module__.startswith("torch.optim"):  # somebody's own, whose step may do anything
        return set()
    alone = torch.zeros_like(group["params"][0], requires_grad=True)
    alone.grad = torch.zeros_like(alone)
    probe = type(optimizer)([{**group, "params": [alone]}])  # type: ignore[call-arg]  # whose own all have defaults
    probe.step()
    return set(probe.state[alone])
