"""Which replicas and slabs the processes of a job take, by a forecast."""

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from volseg.config.schema import ExperimentConfig
from volseg.experiment.alternatives import take_candidate
from volseg.experiment.forecast_beside import Gpus, PlanBeside
from volseg.forecast.candidate import Candidate, Forecast
from volseg.parallel.candidates.choosing import SURE, choose
from volseg.parallel.devices import count_processes, is_main_process
from volseg.workflow.processes import gather_over_processes

__all__ = ["choose_by_forecast", "choose_mesh"]

logger = logging.getLogger(__name__)


def choose_by_forecast(config: ExperimentConfig, device: torch.device) -> tuple[ExperimentConfig, str] | None:
    """Return the config with the mesh that is forecast to be fastest on this job's processes, and why.

    Every process calls it, and gets what the leader found: a process per GPU, so that a pipeline is not among it. None
    on a CPU, where nothing fits for sure, and where nothing can be forecast: then it is tried.

    Parameters
    ----------
    config : ExperimentConfig
        With the network as it is planned.
    device : torch.device
        Of this process.
    """
    count = count_processes()
    gpus = Gpus.find(device, count)
    if gpus is None:  # in all processes of a job, or in none
        return None
    found = []
    if is_main_process():
        # No pipeline is asked for: none could be taken, and one of many micro-batches takes longest to follow.
        alone = config.parallel.model_copy(update={"pipeline": 1})
        answer = PlanBeside(config.model_copy(update={"parallel": alone}), gpus).wait()
        if answer.problem:
            logger.info("no forecast of a training step (%s): it is tried", answer.problem)
        found = [json.dumps(choose_mesh(answer.forecasts, count, int(SURE * gpus.memory) - answer.reserve))]
    (told,) = map(json.loads, gather_over_processes(found))
    return None if told is None else (take_candidate(config, Candidate(**told["candidate"]), count), told["why"])


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
