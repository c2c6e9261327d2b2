"""The strategy of a replica that is a plain network on one device."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from volseg.device.torch_internals import tree_flatten, tree_unflatten
from volseg.errors import ParallelError
from volseg.parallel.gradient_sums import GradientSums
from volseg.parallel.norms import norms_over_replicas
from volseg.parallel.replicas import Replicas


class OneDevice:
    """The strategy of a plain network on one device: its own ``forward``, with torch's kernels."""

    is_shared = False
    is_recordable = True
    is_replaying = False
    group = None

    def __init__(self, net: nn.Module, replicas: Replicas) -> None:
        devices = {tensor.device for tensor in (*net.parameters(), *net.buffers())}
        if len(devices) > 1:
            raise ParallelError(
                f"the network is on {', '.join(sorted(map(str, devices)))}; move it to one device, or place it by "
                "ModelParallel(net, strategy='pipeline')"
            )
        self.net, self.replicas = net, replicas
        self.step_devices = [next(iter(devices), torch.device("cpu"))]
        self.sums: GradientSums | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the network; the backward pass of its outputs sums the gradients."""
        with norms_over_replicas(self.replicas) if self._shares_norms else nullcontext():
            marked = self.sums.mark(self.net) if self.sums is not None and torch.is_grad_enabled() else None
            if marked is None:
                return self.net(*args, **kwargs)
            with marked.used(self.net):
                result = self.net(*args, **kwargs)
        leaves, structure = tree_flatten(result)
        marked.check_outputs(leaves)
        places = [n for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
        for place, tensor in zip(places, marked.tie([leaves[place] for place in places]), strict=True):
            leaves[place] = tensor
        return tree_unflatten(leaves, structure)

    @property
    def _shares_norms(self) -> bool:
        # A network in evaluation may contain a norm in training: by its mode, or by an argument in forward.
        return self.replicas.count > 1 and (self.net.training or torch.is_grad_enabled())

    @property
    def partition(self) -> str:
        """Assignment of layers to devices."""
        return f"the network on {self.step_devices[0]}"

    @property
    def volumes(self) -> NoReturn:
        """Raise a ParallelError: volumes are whole here.

        Raises
        ------
        ParallelError
            Always.
        """
        raise ParallelError("volumes are cut for strategy='spatial', and each replica of this network has whole ones")

    def prepare_recording(self) -> list[torch.Generator]:
        """Prepare a CUDA graph of a step: nothing to do."""
        return []

    def replaying(self, generators: Sequence[torch.Generator]) -> AbstractContextManager[None]:
        """Replay in this block: nothing to do."""
        assert not generators
        return nullcontext()
