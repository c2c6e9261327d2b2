"""Interface of a strategy for several devices: used by ``ModelParallel``, recorded steps, batches and ``verify``.

Only the packages of the two strategies test for a strategy's class. A strategy is built from its options, a frozen
value (``Spatial`` or ``Pipeline``); neither checks the options of the other.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias

import torch
from torch import nn

if TYPE_CHECKING:
    from volseg.parallel.spatial.strategy import SpatialStrategy
    from volseg.parallel.state.random import CommonSeeds

Devices: TypeAlias = Sequence[str | int | torch.device] | None
"""Devices of this process, as a user names them; None for all visible ones."""


class Strategy(Protocol):
    """A network placed on devices."""

    @property
    def partition(self) -> Any:
        """Assignment of work to devices; printable."""

    @property
    def is_shared(self) -> bool:
        """Whether volumes are spread over several processes, all of which run the network together."""

    @property
    def is_recordable(self) -> bool:
        """Whether a process runs the network on one device, so that a whole step can be one CUDA graph there."""

    @property
    def is_replaying(self) -> bool:
        """Whether the strategy replays recordings of its own."""

    @property
    def seeds(self) -> "CommonSeeds | None":
        """Generators that several processes share for passes; None if each pass uses the default generators."""

    @property
    def step_devices(self) -> Sequence[torch.device]:
        """Devices of this process in a whole step; raises a ParallelError if the strategy records parts of it."""

    @property
    def volumes(self) -> "SpatialStrategy":
        """How volumes are cut; raises a ParallelError if they are not cut."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the network's own ``forward``."""


class Options(Protocol):
    """Options of a strategy: a frozen value, copied and pickled with the model."""

    name: ClassVar[str]

    def build(self, net: nn.Module, devices: Devices = None, mesh: Any = None, *, replicated: bool = True) -> Strategy:
        """Place a network.

        Parameters
        ----------
        net
            The network.
        devices, mesh
            See ``ModelParallel``.
        replicated
            Whether it gets the values of the first process, if there are several.
        """
