"""Restore a saved state part by part, including all random generators; errors name the part that does not fit."""

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from volseg.checkpointing.state import TrainingState
from volseg.errors import CheckpointError
from volseg.models.weights import load_weights
from volseg.parallel import ModelParallel
from volseg.parallel.devices import list_gpus
from volseg.parallel.state.random import CommonSeeds

NOT_WHOLE = "the checkpoint is not whole"


class Average(Protocol):
    """Averaged weights."""

    def load_state_dict(self, state: Mapping[str, Any], /) -> object:
        """Restore the averages."""


def restore(
    state: TrainingState,
    network: nn.Module,
    optimizer: Optimizer,
    average: Average | None,
    scaler: torch.amp.GradScaler,
) -> None:
    """Load a state into the parts of a training, and set the random number generators.

    Raises
    ------
    CheckpointError
        The message names the part that does not fit or is incomplete.
    """
    with _naming("model"):
        load_weights(network, state.model)
    with _naming("optimizer"):
        optimizer.load_state_dict(dict(state.optimizer))
        _lay_out_like_parameters(optimizer)
    _require_whole(state, optimizer)
    with _naming("average"):
        if (state.average is None) != (average is None):
            raise ValueError("one of the two has an average of the weights (training.ema), the other has none")
        if average and state.average:
            average.load_state_dict(state.average)
    with _naming("scaler"):
        scaler.load_state_dict(dict(state.scaler))
    with _naming("random"):
        restore_random_state(state.random, network)


@contextmanager
def _naming(part: str) -> Iterator[None]:
    """Turn any error of a part of a state into a `CheckpointError` that names the part."""
    try:
        yield
    except Exception as fault:  # networks, optimizers and generators raise different types
        reason = str(fault) if isinstance(fault, ValueError | RuntimeError) else f"{type(fault).__name__}: {fault}"
        raise CheckpointError(f"the checkpoint is not of this network and optimizer: {part}: {reason}") from fault


def _lay_out_like_parameters(optimizer: Optimizer) -> None:
    """Give the optimizer's tensors the memory layout of its parameters.

    The training that saved the tensors may have used another layout. Fused optimizers read both in the same order: for
    other layouts torch raises on a GPU, and computes wrong numbers on a CPU.
    """
    for parameter, remembered in optimizer.state.items():
        for name, value in remembered.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.layout is torch.strided:
                laid_out = torch.empty_like(parameter, dtype=value.dtype, device=value.device)
                if laid_out.stride() != value.stride():
                    remembered[name] = laid_out.copy_(value)


def _require_whole(state: TrainingState, optimizer: Optimizer) -> None:
    """Raise if parts of a state do not belong together, or an optimizer's tensors are missing."""
    for part, batches in (("losses", state.losses), ("cases", state.cases)):
        if len(batches) != state.position:
            raise CheckpointError(f"{NOT_WHOLE}: {part}: {len(batches)} batches, but position is {state.position}")
    if not state.steps_done:
        return
    entries = state.optimizer["state"]
    for group, saved in zip(optimizer.param_groups, state.optimizer["param_groups"], strict=True):
        wanted = _remembered(optimizer, group)
        # A parameter that never had a gradient has no entry; if no parameter has an entry, the state is incomplete.
        for parameter in saved["params"] if not entries else [one for one in saved["params"] if one in entries]:
            if lost := sorted(wanted - {*entries.get(parameter, ())}):
                raise CheckpointError(
                    f"{NOT_WHOLE}: optimizer: after {state.steps_done} steps it lacks the {lost[0]} that "
                    f"{type(optimizer).__name__} keeps of parameter {parameter}"
                )


def _remembered(optimizer: Optimizer, group: dict[str, Any]) -> set[str]:
    """Return the names of the optimizer's state per parameter of a group, from a step on a test parameter."""
    if not type(optimizer).__module__.startswith("torch.optim"):  # the step of a custom optimizer may do anything
        return set()
    alone = torch.zeros_like(group["params"][0], requires_grad=True)
    alone.grad = torch.zeros_like(alone)
    probe = type(optimizer)([{**group, "params": [alone]}])  # type: ignore[call-arg]  # all their options have defaults
    probe.step()
    return set(probe.state[alone])


def random_state(network: nn.Module | None = None) -> dict[str, Any]:
    """Return the generators' states as plain numbers and tensors, which ``weights_only=True`` can load.

    Parameters
    ----------
    network : nn.Module, optional
        Network whose passes may draw from seeds common to several processes; the state then includes these seeds.
    """
    seeds = _find_seeds(network)
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()  # noqa: NPY002
    return {
        "python": {"version": version, "words": list(words), "gauss": gauss},
        "numpy": {
            "name": str(name),
            "keys": torch.from_numpy(np.asarray(keys).astype(np.int64)),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        },
        "torch": torch.get_rng_state(),
        "cuda": [torch.cuda.get_rng_state(gpu) for gpu in list_gpus()],
        "passes": None if seeds is None else seeds.get_state(),
    }


def restore_random_state(state: Mapping[str, Any], network: nn.Module | None = None) -> None:
    """Set the generators to a saved state, except those of missing devices.

    Parameters
    ----------
    state : mapping
        Result of `random_state`.
    network : nn.Module, optional
        See `random_state`; all processes that run the network together call this function together.
    """
    seeds = _find_seeds(network)
    if seeds is not None:
        seeds.set_state(state.get("passes"))
    python, numpy = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(python["words"]), python["gauss"]))
    keys = numpy["keys"].numpy().astype(np.uint32)
    np.random.set_state((numpy["name"], keys, numpy["position"], numpy["has_gauss"], numpy["cached"]))  # noqa: NPY002
    torch.set_rng_state(state["torch"].cpu())
    for gpu, saved in zip(list_gpus(), state["cuda"], strict=False):
        torch.cuda.set_rng_state(saved.cpu(), gpu)


def _find_seeds(network: nn.Module | None) -> CommonSeeds | None:
    return network.seeds if isinstance(network, ModelParallel) else None
