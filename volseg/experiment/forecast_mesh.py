"""Which replicas and slabs the processes of a job take, by a forecast."""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from volseg.config.schema import ExperimentConfig
from volseg.errors import VolsegError
from volseg.experiment.alternatives import take_candidate
from volseg.experiment.forecast_beside import Answer, Gpus, PlanBeside, read_plan
from volseg.experiment.machines import find_machine
from volseg.experiment.what_fits import plan_training
from volseg.forecast.candidate import Candidate, Forecast
from volseg.parallel.candidates.choosing import SURE, choose
from volseg.parallel.devices import count_processes, is_main_process
from volseg.parallel.processes.group import gather_over_processes

__all__ = ["Ask", "ask_here", "choose_by_forecast", "choose_mesh", "is_mesh_open", "leave_out_stages", "take_fastest"]

logger = logging.getLogger(__name__)

Ask = Callable[[ExperimentConfig, Gpus], Answer | None]
"""Returns the forecast of a config on some GPUs that was begun beside, if there is one."""


def is_mesh_open(config: ExperimentConfig, num_processes: int) -> bool:
    """Tell whether a config leaves it to a forecast how so many processes share a step."""
    is_auto = config.parallel.strategy == "auto" and config.parallel.num_gpus == 1
    return num_processes > 1 and (is_auto or config.mesh(num_processes).is_open)


def choose_by_forecast(
    config: ExperimentConfig, device: torch.device, beside: Ask = lambda *_: None
) -> tuple[ExperimentConfig, str] | None:
    """Return the config with the mesh that is forecast to be fastest on this job's processes, and why.

    Every process calls it, and gets what the leader found: a process per GPU, so that a pipeline is not among it. None
    on a CPU, where nothing fits for sure, and where nothing can be forecast: then it is tried.

    Parameters
    ----------
    config : ExperimentConfig
        With the network as it is planned.
    device : torch.device
        Of this process.
    beside : callable, optional
        Asked by the leader, before it has a forecast made.
    """
    gpus = Gpus.find(device, count_processes())
    if gpus is None:  # in all processes of a job, or in none
        return None
    found = []
    if is_main_process():
        asked = leave_out_stages(config)
        answer = beside(asked, gpus) or PlanBeside(asked, gpus).wait()
        if answer.problem:
            logger.info("no forecast of a training step (%s): it is tried", answer.problem)
        found = [json.dumps(take_fastest(answer, gpus))]
    (told,) = map(json.loads, gather_over_processes(found))
    return None if told is None else (take_candidate(config, Candidate(**told["candidate"]), gpus.count), told["why"])


def leave_out_stages(config: ExperimentConfig) -> ExperimentConfig:
    """Return the config that asks for no pipeline: none could be taken, and its micro-batches take long to follow."""
    return config.model_copy(update={"parallel": config.parallel.model_copy(update={"pipeline": 1})})


def ask_here(config: ExperimentConfig, gpus: Gpus) -> Answer:
    """Return what `PlanBeside` would answer, by copies of this process, which must not have begun to use CUDA."""
    try:
        machine = find_machine(num_gpus=gpus.count, kind=gpus.name, gpu_memory=gpus.told_memory)
        return read_plan(plan_training(config, machine, beside=True).to_json())
    except VolsegError as fault:
        return Answer(problem=str(fault).partition("\n")[0])


def take_fastest(answer: Answer, gpus: Gpus) -> Mapping[str, Any] | None:
    """Return what `choose_mesh` does of an answer about some GPUs."""
    return choose_mesh(answer.forecasts, gpus.count, int(SURE * gpus.memory) - answer.reserve)


def choose_mesh(forecasts: Sequence[Forecast], num_processes: int, capacity: int) -> Mapping[str, Any] | None:
    """Return the fastest candidate of a process per GPU that surely fits, and why, as plain values.

    Parameters
    ----------
    forecasts : sequence of Forecast
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
