"""What the operators of one network share: the communicator, the settings, and the parameters on their devices."""

import sys
import warnings
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from volseg.parallel.sharding.communicator import Communicator, buckets

__all__ = ["Context"]

MOST_PLANS = 4096
"""Plans that are kept: those of a network for some hundred sizes of volumes."""


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

    Attributes
    ----------
    room
        Planes of room that norms and joins leave around their slabs.
    channels_last
        Whether volumes of the network are meant to lie in memory with channels last.
    frugal
        Whether memory matters more than time: set where blocks are recomputed.
    graph_generator
        Random numbers that differ between processes, while a CUDA graph is captured.
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
        self.room = 0
        self.channels_last = False
        self.frugal = False
        self.graph_generator: torch.Generator | None = None
        self._buckets: dict[int, list[Tensor]] = {}
        self._shared: dict[int, list[Tensor]] = {}
        self._shared_ids: set[int] = set()
        self._cast: dict[tuple[int, torch.dtype], Tensor] = {}
        # Not a WeakSet: it compares its members, and comparing volumes is an operator.
        self._waiting: list[weakref.ref] = []
        self._said: set[str] = set()
        self._plans: dict[Hashable, Any] = {}
        self._alone = communicator.devices[0] if len(communicator.devices) == 1 else None

    def share(self, parameters: Sequence[Tensor]) -> None:
        """Start a forward pass with these parameters, so that each is copied, and its gradient summed, once.

        A bucket is handed to the shards when the first of its parameters is used. Autograd takes the most recent of
        the nodes that are ready: so the sum of a bucket starts in the middle of the backward pass, and not at its
        end.
        """
        self._shared, self._cast, self._shared_ids = {}, {}, set()
        self._buckets = {}
        for bucket in buckets(parameters):
            for parameter in bucket:
                self._buckets[id(parameter)] = bucket

    def spread(self, whole: Tensor) -> list[Tensor]:
        """Hand a whole value to the shards: a parameter's copies where it is one."""
        shared = self._shared.get(id(whole))
        if shared is not None:
            return shared
        bucket = self._buckets.get(id(whole))
        if bucket is not None:
            for parameter, copies in zip(bucket, self.communicator.share(bucket), strict=True):
                self._shared[id(parameter)] = copies
                self._shared_ids.update(map(id, copies))
            return self._shared[id(whole)]
        if not whole.requires_grad:
            if self._alone == whole.device:
                return [whole]
            return [whole.to(device, non_blocking=True) for device in self.communicator.devices]
        return self.communicator.spread(whole)

    def cast(self, parameter: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a parameter in autocast's dtype: converted once per forward pass, however often it is used."""
        if parameter.dtype == dtype:
            return parameter
        if id(parameter) not in self._shared_ids:
            return parameter.to(dtype)
        key = (id(parameter), dtype)
        if key not in self._cast or self._cast[key].requires_grad != (
            parameter.requires_grad and torch.is_grad_enabled()
        ):
            self._cast[key] = parameter.to(dtype)
        return self._cast[key]

    def planned(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return ``make()``, which depends on ``key`` and the communicator alone, as it was the first time."""
        if key not in self._plans:
            if len(self._plans) >= MOST_PLANS:
                self._plans.clear()
            self._plans[key] = make()
        return self._plans[key]

    def defer(self, volume: Any) -> None:
        """Remember a volume whose norm waits for the next operator."""
        self._waiting = [waiting for waiting in self._waiting if waiting() is not None]
        self._waiting.append(weakref.ref(volume))

    def settle(self) -> None:
        """Compute what waits, before anything is changed in place."""
        waiting, self._waiting = self._waiting, []
        for volume in (reference() for reference in waiting):
            if volume is not None and volume.deferred is not None:
                volume.settle()

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
