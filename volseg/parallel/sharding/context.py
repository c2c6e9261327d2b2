"""What the operators of one network share: the communicator, the settings, and the parameters on their devices."""

import sys
import warnings
from collections.abc import Sequence
from typing import Literal

from torch import Tensor, nn

from volseg.parallel.sharding.communicator import Communicator

__all__ = ["Context"]


class Context:
    """State of one sharded network.

    Parameters
    ----------
    communicator
        The shards.
    on_unsupported
        What to do with an operator that has no sharded form.
    net
        The network; names the places in messages.
    """

    def __init__(
        self,
        communicator: Communicator,
        on_unsupported: Literal["raise", "gather"] = "raise",
        net: nn.Module | None = None,
    ) -> None:
        self.communicator = communicator
        self.on_unsupported = on_unsupported
        self.net = net
        self._shared: dict[int, list[Tensor]] = {}
        self._said: set[str] = set()

    def share(self, parameters: Sequence[Tensor]) -> None:
        """Hand the parameters to the shards for one forward pass, so that each is copied and summed once."""
        self._shared = {}
        shared = self.communicator.share(parameters)
        for parameter, copies in zip(parameters, shared, strict=True):
            self._shared[id(parameter)] = copies

    def spread(self, whole: Tensor) -> list[Tensor]:
        """Hand a whole value to the shards: a parameter's copies where it is one."""
        copies = self._shared.get(id(whole))
        if copies is not None:
            return copies
        if not whole.requires_grad:
            return [whole.to(device, non_blocking=True) for device in self.communicator.devices]
        return self.communicator.spread(whole)

    def say_once(self, message: str) -> None:
        """Warn about something that was done instead of what was asked, the first time."""
        if message not in self._said:
            self._said.add(message)
            warnings.warn(message, stacklevel=4)

    def module_path(self) -> str:
        """Name the module whose ``forward`` is running, read off the call stack (only when a message needs it)."""
        if self.net is None:
            return "the calling code"
        names = {id(module): name or type(module).__name__ for name, module in self.net.named_modules()}
        frame = sys._getframe(1)
        while frame is not None:
            caller = frame.f_locals.get("self")
            if isinstance(caller, nn.Module) and id(caller) in names:
                return f"{names[id(caller)]} ({type(caller).__name__})"
            frame = frame.f_back  # type: ignore[assignment]
        return "the calling code"
