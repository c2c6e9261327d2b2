"""What an attempt may change besides giving a result, noted so that it can be undone.

An attempt (to run spatially, to record, to find something out) runs ``forward`` once more than the user asked for, or
breaks off in the middle of it. Nothing of it may show.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from volseg.device.gpus import on_gpu
from volseg.device.torch_internals import get_version, tree_leaves
from volseg.errors import ParallelError
from volseg.parallel.state.module import remember
from volseg.parallel.state.random import RandomState

__all__ = ["Attempt"]


class Attempt:
    """Everything as it was before; ``put_back`` undoes the attempt, and so does the end of a ``with`` block.

    Parameters
    ----------
    net
        Its buffers and attributes count, and which tensors its gradients are.
    devices
        Whose random numbers count besides the host's.
    written
        Parameters whose values count as well, because ``forward`` is known to change them.
    optimizer
        Its settings and state count: of the state, values on the host, and which tensors there are.
    inputs
        The arguments of the call, nested as you like, where ``forward`` may have changed them in place.

    Attributes
    ----------
    network : Remembered
        The network's state of then.
    random : RandomState
        The generators' state of then.
    """

    def __init__(
        self,
        net: nn.Module,
        devices: Iterable[torch.device] = (),
        *,
        written: Iterable[Tensor] = (),
        optimizer: Optimizer | None = None,
        inputs: Any = (),
    ) -> None:
        self.network = remember(net, written)
        self.random = RandomState(devices)
        self._gradients = [(parameter, parameter.grad) for parameter in net.parameters()]
        self._put_optimizer_back = _remember_optimizer(optimizer)
        given = [leaf for leaf in tree_leaves(inputs) if type(leaf) is Tensor and not leaf.is_inference()]
        self._inputs = [(leaf, get_version(leaf), leaf.detach().clone()) for leaf in given]

    def __enter__(self) -> "Attempt":
        return self

    def __exit__(self, *failure: Any) -> None:
        self.put_back()

    def put_back(self, in_place: bool = True) -> None:
        """Undo the attempt.

        Parameters
        ----------
        in_place
            Whether a parameter's version tells that it was changed; not where kernels were recorded and have not run.

        Raises
        ------
        ParallelError
            If that cannot be undone: a change in place of a parameter, or of an input that needs a gradient.
        """
        self.random.put_back()  # first, since what follows may refuse
        for parameter, gradient in self._gradients:
            if parameter.grad is not gradient:
                parameter.grad = gradient
        self._put_optimizer_back()
        self.network.put_back(in_place)
        for tensor, version, value in self._inputs:
            if get_version(tensor) == version:
                continue
            if tensor.requires_grad:
                raise ParallelError(
                    f"the network changes its input of shape {tuple(tensor.shape)} in place, which needs a gradient, "
                    "and has operators without a sharded form, before which the change cannot be undone; choose "
                    "strategy='pipeline', or pass input.clone()"
                )
            with torch.no_grad():
                tensor.copy_(value)


def _remember_optimizer(optimizer: Optimizer | None) -> Callable[[], None]:
    """Note an optimizer's settings and state; return the function that puts them back."""
    if optimizer is None:
        return lambda: None
    own, groups = optimizer.param_groups, [(group, dict(group)) for group in optimizer.param_groups]
    states = {
        parameter: {name: (value, _copy_on_host(value)) for name, value in state.items()}
        for parameter, state in optimizer.state.items()
    }

    @torch.no_grad()
    def put_back() -> None:
        optimizer.param_groups = own
        own[:] = [group for group, _ in groups]
        for group, before in groups:
            group.clear()
            group.update(before)
        optimizer.state.clear()
        for parameter, state in states.items():
            for value, held in state.values():
                if held is not None:
                    value.copy_(held)
            optimizer.state[parameter] = {name: value for name, (value, _) in state.items()}

    return put_back


def _copy_on_host(value: Any) -> Tensor | None:
    """Return what a tensor on the CPU holds: those on the device are not changed while kernels are recorded."""
    return value.clone() if isinstance(value, Tensor) and not on_gpu(value) else None
