"""On which machine a training is to run: named by an instance, by its GPUs, or the one that this is."""

from dataclasses import replace

import torch

from volseg.errors import ConfigError
from volseg.estimate.calibration import calibrate, describe_kind, describe_machine, find_file, read_calibration
from volseg.estimate.estimator import Machine
from volseg.estimate.gpu_kinds import KINDS, GpuKind, find_kind
from volseg.estimate.instances import find_instance, find_links
from volseg.estimate.search import GIB
from volseg.parallel.devices import count_gpus, find_current_device
from volseg.parallel.forking import ask_copy
from volseg.planning import parse_memory

__all__ = ["calibrate_words", "find_kind_here", "find_machine"]

NEAR = 0.12
"""By how much of the memory that is sold CUDA may tell less."""


def find_machine(
    *,
    num_gpus: int | None = None,
    gpu_memory: str | None = None,
    kind: str | None = None,
    instance: str | None = None,
    here: bool = False,
) -> Machine:
    """Return the machine that is meant; without a word about it, this one, if it has GPUs.

    Parameters
    ----------
    num_gpus : int, optional
        GPUs; 1 by default, or all that an instance or this machine has, of which fewer may be taken.
    gpu_memory : str
        Of one, such as ``16GiB``.
    kind : str
        Of GPU; by default the one with that memory.
    instance : str
        A machine that can be rented.
    here : bool
        This machine.

    Raises
    ------
    ConfigError
        If several machines are meant, none is, or one is not known.
    """
    described = gpu_memory is not None or kind is not None
    if sum([described, instance is not None, here]) > 1:
        raise ConfigError(
            "one machine is planned for, by --gpus N --gpu-memory SIZE (or --gpu KIND), by --instance NAME or by "
            "--here; got several of these"
        )
    if instance is not None:
        named = find_instance(instance)
        return replace(named, num_gpus=_take(num_gpus, named.num_gpus, str(named.instance)))
    if described:
        return _describe_machine(num_gpus or 1, gpu_memory, kind)
    if not here and not count_gpus():
        raise ConfigError(
            "no GPU is visible, so say for which ones to plan: --gpus 4 --gpu-memory 16GiB, or --instance p3.8xlarge"
        )
    return _find_own_machine(num_gpus)


def _take(wanted: int | None, there: int, where: str) -> int:
    if wanted is not None and wanted > there:
        raise ConfigError(f"--gpus {wanted} asks for more than the {there} GPU(s) of {where}; take that or less")
    return wanted or there


def _describe_machine(num_gpus: int, gpu_memory: str | None, kind: str | None) -> Machine:
    size = None if gpu_memory is None else int(parse_memory(gpu_memory) * GIB)
    if kind is not None:
        gpu = find_kind(kind)
    else:
        assert size is not None
        sold = size  # the generator must not see None
        gpu = min(KINDS.values(), key=lambda each: abs(each.memory / sold - 1))
    if size is None or 0 <= 1 - gpu.memory / size <= NEAR:  # CUDA tells less than is sold
        size = gpu.memory
    return Machine(gpu=gpu, num_gpus=num_gpus, links=find_links(gpu), gpu_bytes=size)


def find_kind_here(device: torch.device) -> GpuKind:
    """Return what a GPU of this machine is: as it was measured here, else as its kind is known.

    Raises
    ------
    ConfigError
        If it is of no known kind and was not measured.
    """
    machine = describe_machine(device)
    stored = read_calibration(find_file(machine["gpu"], machine["torch"]), machine)
    if stored is not None:
        return describe_kind(stored)
    try:
        kind = find_kind(machine["gpu"])
    except ConfigError as fault:
        raise ConfigError(f"{fault}; or measure it once by volseg plan --calibrate") from None
    return replace(kind, memory=machine["total_memory"])


def _find_own_machine(num_gpus: int | None) -> Machine:
    if not count_gpus():
        raise ConfigError("--here plans for the GPUs of this machine, and none is visible; name others by --instance")
    gpu = ask_copy(_ask_kind)  # which keeps this process fit for copies that follow the steps
    count = _take(num_gpus, count_gpus(), "this machine")
    return Machine(gpu=gpu, num_gpus=count, links=find_links(gpu), gpu_bytes=gpu.memory)


def _ask_kind() -> GpuKind:
    return find_kind_here(find_current_device())


def calibrate_words() -> str:
    """Measure the GPUs of this machine, once, and say what was found.

    Raises
    ------
    ConfigError
        If there is none.
    """
    kind = calibrate(find_current_device())
    return f"{kind.name}: {kind.source}; --here and parallel: auto forecast by it"
