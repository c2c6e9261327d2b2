"""``FastKernels``: run a network on one device with the kernels of the spatial strategy, without cutting volumes."""

import copy
from typing import Any

import torch
from torch import nn

from volseg.device import triton_tiles
from volseg.device.torch_internals import left_out_of_compilation, tree_map_only
from volseg.errors import UnsupportedOperatorError
from volseg.parallel.devices import current_gpu_or_cpu, name_devices
from volseg.parallel.model_parallel import ModelParallel, check_network
from volseg.parallel.spatial import ShardedVolume
from volseg.parallel.state.module import remember
from volseg.parallel.state.random import own_random_numbers

CAPABILITY = (8, 0)
"""Lowest supported compute capability: the kernels are laid out for its 16-bit matrix units."""


class FastKernels(ModelParallel):
    """Run a network on one GPU with fewer and faster kernels, equal to torch's up to round-off.

    A norm and the following activation are one kernel, concatenations are never materialized, and convolutions that are
    slow in cuDNN have their own kernels. They are the kernels of ``ModelParallel(net, strategy="spatial")``, on one
    whole volume. Arguments and results are ordinary tensors, so any loss and any loop work; parameters keep the
    network's names.

    The kernels pay off in a recorded step: launched one by one from Python, the kernels of small volumes are slower
    than torch's. `volseg.Training` records by itself; in your own loop `volseg.parallel.RecordedStep` does.

    Parameters
    ----------
    net
        Any module. It is moved to the device, converted to channels last there, and used in place.
    device
        By default the network's GPU, or the current GPU for a network elsewhere. On a CPU the same functions run as
        plain torch, for experiments.

    Examples
    --------
    >>> net = FastKernels(nn.Sequential(nn.Conv3d(1, 2, 3, padding=1), nn.InstanceNorm3d(2), nn.LeakyReLU()), "cpu")
    >>> type(net(torch.zeros(1, 1, 8, 8, 8))).__name__
    'Tensor'
    """

    def __init__(self, net: nn.Module, device: str | int | torch.device | None = None) -> None:
        check_network(net)
        if device is None:
            held = next((parameter.device for parameter in net.parameters() if parameter.is_cuda), None)
            device = held or current_gpu_or_cpu()
        (chosen,) = name_devices([device])
        super().__init__(net, strategy="spatial", devices=[chosen])
        self.device = chosen

    @left_out_of_compilation
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the network.

        Raises
        ------
        UnsupportedOperatorError
            If the network calls a function that these kernels do not support.
        """
        try:
            return self._run(*args, **kwargs)
        except UnsupportedOperatorError as fault:
            raise UnsupportedOperatorError(
                f"{fault}; on one device call the plain network instead (in a config training.kernels: torch)"
            ) from fault

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        # A volume's only slab is the volume.
        return tree_map_only(ShardedVolume, lambda volume: volume.to_local(), super().forward(*args, **kwargs))

    def rehearse(self, *args: Any, **kwargs: Any) -> None:
        """Run the network once in training and once in evaluation on an example, and undo all side effects.

        Raises
        ------
        UnsupportedOperatorError
            If the network calls a function that these kernels do not support.
        """
        before = remember(self.module)
        try:
            with own_random_numbers([self.device]):
                self.train()
                with torch.enable_grad():
                    self._run(*args, **kwargs)
                self.eval()
                with torch.no_grad():
                    self._run(*args, **kwargs)
        finally:
            before.put_back()
            self.training = self.module.training

    def __deepcopy__(self, memo: dict[int, Any]) -> "FastKernels":
        return self._hand_over(FastKernels(copy.deepcopy(self.module, memo), self.device), memo)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the network and the device."""
        return FastKernels, (self.module, self.device), self._list_own()

    def extra_repr(self) -> str:
        """Name the device."""
        return str(self.device)


def explain_absence(device: torch.device) -> str | None:
    """Return why a device has no fast kernels, as the end of a sentence; None if it has them."""
    if device.type != "cuda":
        return "they need a GPU"
    if not triton_tiles.available():
        return "Triton, which compiles them, is not installed"
    if (capability := torch.cuda.get_device_capability(device)) < CAPABILITY:
        needed, has = (".".join(map(str, version)) for version in (CAPABILITY, capability))
        return f"they need a GPU of compute capability {needed} or more ({device} has {has})"
    return None
