"""Record the modes in which an operator was called, so that waiting slabs are written in the same modes."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy

import torch
from torch import Tensor

from volseg.parallel.spatial.context import saved_tensors_hooks
from volseg.parallel.spatial.versions import keep, take


class Moment:
    """Modes in which an operator was called, for writing its slabs later."""

    __slots__ = ("_trained", "grad_enabled", "hooks", "inference")

    def __init__(self, parameters: Sequence[Tensor] = ()) -> None:
        self.grad_enabled = torch.is_grad_enabled()
        self.hooks = saved_tensors_hooks()
        self.inference = torch.is_inference_mode_enabled()
        self._trained = [(parameter, parameter.requires_grad) for parameter in parameters]

    def including(self, *parameters: Tensor) -> "Moment":
        """Return the same moment for more parameters."""
        return self.joined(Moment(parameters))

    def joined(self, other: "Moment") -> "Moment":
        """Return the same moment, also for the parameters of another one."""
        more = copy(self)
        more._trained = [*self._trained, *other._trained]
        return more

    def is_now(self) -> bool:
        """Return whether gradients and saved tensors are handled as then, so that one autograd node can serve both."""
        modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        return modes == (self.grad_enabled, self.inference) and saved_tensors_hooks() == self.hooks

    def trains_alike(self) -> bool:
        """Return whether the parameters are trained, or frozen, as then."""
        return all(parameter.requires_grad == trained for parameter, trained in self._trained)

    def restored(self) -> AbstractContextManager[None]:
        """Compute in the recorded modes within the block.

        The next operator may run under no_grad, or inside a checkpointed block that must not include this work; or a
        parameter may have been frozen or unfrozen in between.
        """
        now = saved_tensors_hooks()
        own = now is None or now == self.hooks
        changed = [parameter for parameter, trained in self._trained if parameter.requires_grad != trained]
        modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        if own and not changed and modes == (self.grad_enabled, self.inference):
            return nullcontext()
        return self._restored(own, changed)

    @contextmanager
    def _restored(self, own: bool, changed: Sequence[Tensor]) -> Iterator[None]:
        hooks = nullcontext() if own else torch.autograd.graph.saved_tensors_hooks(keep, take)
        for parameter in changed:
            parameter.requires_grad_(not parameter.requires_grad)
        try:
            with torch.inference_mode(self.inference), torch.set_grad_enabled(self.grad_enabled), hooks:
                yield
        finally:
            for parameter in changed:
                parameter.requires_grad_(not parameter.requires_grad)
