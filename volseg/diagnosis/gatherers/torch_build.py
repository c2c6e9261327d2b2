"""The build of torch, and the GPUs that it sees."""

import torch

from volseg.diagnosis.facts import Gpu, TorchFacts

__all__ = ["gather"]


def gather() -> TorchFacts:
    """Return what torch says of itself; starts CUDA where there are GPUs."""
    gpus: list[Gpu] = []
    refused = None
    try:
        gpus = [_look_at(index) for index in range(torch.cuda.device_count())]
        if not gpus and torch.version.cuda is not None:
            torch.cuda.init()  # says why there are none
    except RuntimeError as fault:
        refused = str(fault).strip().splitlines()[0]
    nccl = torch.cuda.nccl.version() if torch.version.cuda is not None and gpus else None
    return TorchFacts(
        version=torch.__version__,
        cuda=torch.version.cuda,
        rocm=torch.version.hip,
        cudnn=torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None,
        nccl=".".join(map(str, nccl)) if nccl else None,
        architectures=tuple(torch.cuda.get_arch_list()),
        gpus=tuple(gpus),
        refused=refused,
        threads=torch.get_num_threads(),
    )


def _look_at(index: int) -> Gpu:
    told = torch.cuda.get_device_properties(index)
    return Gpu(
        index=index,
        name=told.name,
        capability=(told.major, told.minor),
        memory_bytes=told.total_memory,
        free_bytes=torch.cuda.mem_get_info(index)[0],
    )
