"""Which training steps can be one CUDA graph: forward, loss, backward, clipping and optimizer in one launch."""

from torch import nn
from torch.optim import Optimizer

from volseg.device.gpus import on_gpu
from volseg.parallel import ModelParallel
from volseg.parallel.data_parallel import find_replicas
from volseg.parallel.devices import is_distributed
from volseg.workflow.spatial_group import is_cut_over_processes

__all__ = ["can_be_recorded"]


def can_be_recorded(network: nn.Module, optimizer: Optimizer) -> bool:
    """Tell whether the step on ``network`` is the same kernels each time, on one GPU of each process.

    The optimizer must be fused, so that it takes its learning rate from the device.
    """
    if isinstance(network, ModelParallel):
        one = network.strategy.is_recordable
    else:
        one = len({parameter.device for parameter in network.parameters()}) == 1
    on_gpus = all(on_gpu(parameter) for parameter in network.parameters())
    fused = all(group.get("fused") for group in optimizer.param_groups)
    together = is_cut_over_processes(network) or find_replicas(network) is not None or not is_distributed()
    return one and on_gpus and fused and together
