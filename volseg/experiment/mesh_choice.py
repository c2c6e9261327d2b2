"""Which replicas and slabs the processes of a job take, by a forecast."""

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from volseg.config.schema import ExperimentConfig
from volseg.estimate.allocator import MemoryUse
from volseg.estimate.candidate import Candidate, Estimate
from volseg.estimate.search import SURE, choose
from volseg.experiment.alternatives import find_estimate, take_candidate
from volseg.experiment.plan_process import Answer, Gpus, run_plan
from volseg.parallel.devices import count_processes, is_main_process
from volseg.parallel.processes.group import gather_over_processes

__all__ = ["choose_by_estimate", "choose_mesh", "is_mesh_open", "leave_out_stages", "take_fastest"]

logger = logging.getLogger(__name__)


def is_mesh_open(config: ExperimentConfig, num_processes: int) -> bool:
    """Tell whether a config leaves it to a forecast how so many processes share a step."""
    is_auto = config.parallel.strategy == "auto" and config.parallel.num_gpus == 1
    return num_processes > 1 and (is_auto or config.mesh(num_processes).is_open)


def choose_by_estimate(
    config: ExperimentConfig, device: torch.device
) -> tuple[ExperimentConfig, str, MemoryUse | None] | None:
    """Return the config with the mesh that is forecast to be fastest on this job's processes, and why.

    The third result is the memory of its step, in the leader. Every process calls it, and gets what the leader found: a
    process per GPU, so that a pipeline is not among it. None on a CPU, where nothing fits for sure, and where nothing
    can be forecast: then it is tried.

    Parameters
    ----------
    config : ExperimentConfig
        With the network as it is planned.
    device : torch.device
        Of this process.
    """
    gpus = Gpus.find(device, count_processes())
    if gpus is None:  # in all processes of a job, or in none
        return None
    found: list[str] = []
    forecasts: tuple[Estimate, ...] = ()
    if is_main_process():
        answer = run_plan(leave_out_stages(config), gpus)
        forecasts = answer.forecasts
        if answer.problem:
            logger.info("no forecast of a training step (%s): it is tried", answer.problem)
        found = [json.dumps(take_fastest(answer, gpus))]
    (told,) = map(json.loads, gather_over_processes(found))
    if told is None:
        return None
    candidate = Candidate(**told["candidate"])
    known = find_estimate(candidate, forecasts)
    return take_candidate(config, candidate, gpus.count), told["why"], None if known is None else known.memory


def leave_out_stages(config: ExperimentConfig) -> ExperimentConfig:
    """Return the config that asks for no pipeline: none could be taken, and its micro-batches take long to follow."""
    return config.model_copy(update={"parallel": config.parallel.model_copy(update={"pipeline": 1})})


def take_fastest(answer: Answer, gpus: Gpus) -> Mapping[str, Any] | None:
    """Return what `choose_mesh` does of an answer about some GPUs."""
    return choose_mesh(answer.forecasts, gpus.count, int(SURE * gpus.memory) - answer.reserve)


def choose_mesh(forecasts: Sequence[Estimate], num_processes: int, capacity: int) -> Mapping[str, Any] | None:
    """Return the fastest candidate of a process per GPU that surely fits, and why, as plain values.

    Parameters
    ----------
    forecasts : sequence of Estimate
        Of whatever was followed.
    num_processes : int
        All of which it must use.
    capacity : int
        Bytes of a GPU that it may take.
    """
    suited = [
        each
        for each in forecasts
        if each.candidate.num_gpus == num_processes
        and each.candidate.pipeline == 1
        and each.memory is not None
        and each.memory.total <= capacity
    ]
    chosen, why = choose(suited)
    return None if chosen is None else {"candidate": vars(chosen.candidate), "why": why}
