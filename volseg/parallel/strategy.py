"""What everybody asks of a way to use several devices: ``ModelParallel``, recorded steps, batches, ``verify``.

Nobody but the two packages of strategies looks for the class of one. A strategy is built from its options, which are
values of their own (``Spatial``, ``Pipeline``): neither polices those of the other.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias

import torch
from torch import nn

if TYPE_CHECKING:
    from volseg.parallel.spatial.strategy import SpatialStrategy
    from volseg.parallel.state.random import CommonSeeds

__all__ = ["Devices", "Options", "Strategy"]

Devices: TypeAlias = Sequence[str | int | torch.device] | None
"""Devices of this process, as a user names them; None for all there are."""


class Strategy(Protocol):
    """A network placed on devices."""

    @property
    def partition(self) -> Any:
        """Describe which device does what; printable."""

    @property
    def is_shared(self) -> bool:
        """Whether volumes lie on several processes, all of which run the network together."""

    @property
    def is_recordable(self) -> bool:
        """Whether a process runs the network on one device, so that a whole step can be one CUDA graph there."""

    @property
    def is_replaying(self) -> bool:
        """Whether it runs recordings of its own by now."""

    @property
    def seeds(self) -> "CommonSeeds | None":
        """What several processes draw alike for its passes; None where each pass draws from the default generators."""

    @property
    def step_devices(self) -> Sequence[torch.device]:
        """Devices of this process that a whole step works on; raises a ParallelError where parts of it are recorded."""

    @property
    def volumes(self) -> "SpatialStrategy":
        """How volumes are cut; raises a ParallelError where they are not."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the network's own ``forward``."""


class Options(Protocol):
    """The options of a strategy: a frozen value, which is copied and pickled with the model."""

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
            Whether it gets the values of the first process, where there are several.
        """
