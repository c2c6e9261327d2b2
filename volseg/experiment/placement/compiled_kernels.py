"""Compile the kernels of a training before it needs them, on a machine with or without a GPU.

The training step is traced (`tracing`) for a kind of GPU. Every kernel that it launches is compiled
(`volseg.device.compiling`) into Triton's cache, where the step finds it. A container image, for example, can be
prepared without a GPU. This step is optional: Triton compiles missing kernels at their first launch.
"""

import os
from functools import partial

import torch

from volseg.config.schema import ExperimentConfig
from volseg.device.compiling import Compiling
from volseg.device.fake_gpu import GpuLike
from volseg.device.gpus import host_values, uses_gpus
from volseg.device.triton_kernels import hearing_calls
from volseg.errors import ParallelError
from volseg.estimate.candidate import Candidate, Work
from volseg.estimate.candidate_trace import trace_candidate
from volseg.estimate.fake_step.tracing import tracing
from volseg.experiment.network_plan import load_facts
from volseg.experiment.placement.training_work import at_size, describe_training, list_kernels
from volseg.lifetime import bind_copy
from volseg.parallel.devices import count_gpus
from volseg.parallel.fast_kernels import CAPABILITY, FastKernels
from volseg.parallel.processes.launcher import setting_variables
from volseg.workflow.precision import Precision, choose_dtype


def compile_beforehand(
    config: ExperimentConfig, gpu: GpuLike, *, channels: int | None = None, classes: int | None = None
) -> int:
    """Compile the kernels of a training for one GPU of a kind into Triton's cache; return their number.

    Needs no GPU. The folder of the cache is ``TRITON_CACHE_DIR``. The training finds the kernels with the same versions
    of volseg, torch and Triton, and the same config except for its data and its name.

    Parameters
    ----------
    config : ExperimentConfig
        Config of the training.
    gpu : GpuLike
        The GPU to compile for.
    channels, classes : int, optional
        Channels of images and classes of label maps, for an unknown data set that is absent.

    Raises
    ------
    ConfigError, DataError
        If the config cannot be run.
    ParallelError
        If the training cannot be traced, kernels cannot be compiled, Triton is not installed, or this process has
        initialised CUDA.
    """
    if uses_gpus():
        raise ParallelError(
            "kernels are compiled in forks of this process, but it has initialised CUDA, which forks cannot use; "
            "compile them in a separate process (volseg compile)"
        )
    dtype = choose_dtype(config.training.precision, gpu.capability)
    (kernels, *_) = list_kernels(config, dtype, gpu.capability >= CAPABILITY)
    is_fast = kernels == "fast" or config.training.kernels == "measured"
    described = describe_training(config, dtype, load_facts(config, channels, classes))
    # Not captured, since tracing a capture takes longer. A capture runs the kernels of the steps before it.
    candidate = Candidate(kernels="fast" if is_fast else "torch", recorded=False)
    has_driver, cores = count_gpus() > 0, len(os.sched_getaffinity(0))
    # Bound to this process: a killed process would block further requests forever.
    compiling = Compiling(gpu.capability, cores, runs_here=has_driver, begin=partial(bind_copy, os.getpid()))
    hidden = setting_variables({"CUDA_VISIBLE_DEVICES": ""})  # autograd would initialise each visible GPU
    with hidden, compiling, hearing_calls(compiling.ask):
        if is_fast:
            _follow_rehearsal(described.work, gpu)
        for size in config.patch.sizes:
            trace_candidate(at_size(described, size).work, candidate, gpu)
        compiled = compiling.compiled
    if problems := [f"{each.name}: {each.problem}" for each in compiled if each.problem]:
        raise ParallelError(f"kernels for {gpu.name} were not compiled: {problems[0]}")
    return len(compiled)


def _follow_rehearsal(work: Work, gpu: GpuLike) -> None:
    """Trace the rehearsal of `with_fast_kernels`, which runs before the first step."""
    with tracing(gpu) as followed:
        (device,) = followed.devices
        with host_values():
            network = work.build()
        model = FastKernels(followed.copy(network), device)
        with Precision(device.type, work.precision).autocast():
            model.rehearse(torch.zeros(work.shape, device=device))
