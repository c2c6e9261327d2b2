"""Record everything that an attempt may change besides its result, so that the attempt can be undone.

An attempt (to run spatially, to record, to probe) runs ``forward`` once more than the user asked for, or stops in the
middle of it. It must leave no side effects.
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


class Attempt:
    """State before an attempt; ``put_back`` undoes the attempt, as does the end of a ``with`` block.

    Parameters
    ----------
    net
        Network whose buffers and attributes are restored, and the references to its gradients.
    devices
        Devices whose random numbers are restored besides the host's.
    written
        Parameters whose values are restored too, because ``forward`` is known to change them.
    optimizer
        Optimizer whose settings and state are restored: the values on the host, and the set of tensors in its state.
    inputs
        Arguments of the call, nested in any way, which ``forward`` may have changed in place.

    Attributes
    ----------
    network : Remembered
        State of the network before the attempt.
    random : RandomState
        State of the generators before the attempt.
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
            Whether a higher version of a parameter means a change; False if kernels were recorded and have not run.

        Raises
        ------
        ParallelError
            If a change in place cannot be undone: of a parameter, or of an input that needs a gradient.
        """
        self.random.put_back()  # first, since the following code may refuse
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
    """Record an optimizer's settings and state; return the function that restores them."""
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
    """Return a copy of a tensor on the CPU: tensors on the device do not change while kernels are recorded."""
    return value.clone() if isinstance(value, Tensor) and not on_gpu(value) else None
