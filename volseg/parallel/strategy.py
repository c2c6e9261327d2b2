"""What everybody asks of a way to use several devices: ``ModelParallel``, recorded steps, batches, ``verify``.

Nobody but the two packages of strategies looks for the class of one. A strategy is built from its options, which are
values of their own (``Spatial``, ``Pipeline``): neither polices those of the other.
"""

import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias, TypeVar

import torch
from torch import nn

from volseg.errors import ParallelError

if TYPE_CHECKING:
    from volseg.parallel.spatial.strategy import SpatialStrategy
    from volseg.parallel.state.random import CommonSeeds

__all__ = ["Devices", "Options", "Strategy", "take_new_names", "take_old_options"]

Devices: TypeAlias = Sequence[str | int | torch.device] | None
"""Devices of this process, as a user names them; None for all there are."""

Kind = TypeVar("Kind")

LAUNCH = {"auto": "auto", "eager": False, "graphs": True}
"""What ``record`` is for the values of its old name."""


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


def take_new_names(given: Mapping[str, Any], stacklevel: int = 3) -> dict[str, Any]:
    """Take the old name of an option for its new one, with a warning.

    Parameters
    ----------
    given
        Options by name.
    stacklevel
        Whose call the warning names: two for the caller's, three for its caller's.

    Raises
    ------
    ParallelError
        If both names were given, or a value that the option never had.
    """
    if "launch" not in given:
        return dict(given)
    launch = given["launch"]
    if launch not in LAUNCH or "record" in given:
        raise ParallelError(
            f"launch={launch!r} is the old name of record: pass record='auto', True (recorded) or False (eager) instead"
        )
    warnings.warn(
        f"ModelParallel(launch={launch!r}) is record={LAUNCH[launch]!r} now; the old name goes with the next release",
        FutureWarning,
        stacklevel=stacklevel,
    )
    return {**{name: value for name, value in given.items() if name != "launch"}, "record": LAUNCH[launch]}


def take_old_options(kind: type[Kind], options: Kind | None, old: Mapping[str, Any]) -> Kind:
    """Return the options of a strategy that is built by itself; what it took as keywords is taken with a warning.

    Parameters
    ----------
    kind
        The class of its options.
    options
        As they are given now, None for the defaults.
    old
        Options by name, as they were given before.

    Raises
    ------
    ParallelError
        If options came in both ways.
    """
    if not old:
        return kind() if options is None else options
    named = take_new_names(old, stacklevel=4)
    given = ", ".join(f"{name}={value!r}" for name, value in named.items())
    if options is not None:
        raise ParallelError(f"{given}: options go into {kind.__name__}(...), which was given too")
    warnings.warn(
        f"options of a strategy are {kind.__name__}({given}) now; as keywords they go with the next release",
        FutureWarning,
        stacklevel=3,
    )
    return kind(**named)
