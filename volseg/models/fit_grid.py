"""Run any network on any volume size: pad the input to a size that the network accepts, and crop the output."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import interpolate, pad

from volseg.device.module_internals import BUFFERS, MODULES, NOT_PERSISTENT, PARAMETERS, load_from_state_dict
from volseg.launched import read_launch
from volseg.models.grids import GridRule, grid_rule

logger = logging.getLogger(__name__)


class FitGrid(nn.Module):
    """Run a network on volumes of any size, and log once if padding is needed.

    The input is padded equally on both sides with 0, the mean of a z-scored image, like patches that exceed a case in
    training (`VolumeCache`). Edge values would extend the anatomy to the border. If the network accepts the size, input
    and outputs pass unchanged. Otherwise outputs are cropped to the input's grid; coarser heads of deep supervision are
    first resized to the padded grid (nearest), since a crop by a fraction of their voxels would shift them relative to
    the label.

    The wrapper has the network's parameters, buffers and children under their own names, so its ``state_dict`` is the
    network's. It uses only ``pad``, slices and ``interpolate``, which sharded volumes support.

    Parameters
    ----------
    net : nn.Module
        Maps (B, C, D, H, W) to a volume, a list of volumes, or MONAI's stack (B, heads, K, D, H, W), which becomes a
        list, as `monai.losses.DeepSupervisionLoss` needs.
    divisors : sequence of int, optional
        Divisors of the sides; by default those that `grid_rule` finds.

    Raises
    ------
    GridError
        If no divisors are given and none can be found; in ``forward``, for a volume larger than a fixed grid.

    Examples
    --------
    >>> import torch
    >>> from monai.networks.nets import VNet
    >>> fitted = FitGrid(VNet(out_channels=3))
    >>> fitted.rule.sides((40, 56, 40))
    (48, 64, 48)
    """

    net: nn.Module

    def __init__(self, net: nn.Module, divisors: Sequence[int] | None = None) -> None:
        super().__init__()
        if divisors is None:
            self.rule = grid_rule(net)
        else:
            d, h, w = divisors
            self.rule = GridRule((d, h, w), (d, h, w))
        self._told = False
        self._held: tuple[nn.Module, ...] = ()
        # Not a registered child, which would prefix every key with "net.": the wrapper shares the network's registries.
        object.__setattr__(self, "net", net)
        for name in (PARAMETERS, BUFFERS, MODULES, NOT_PERSISTENT):
            object.__setattr__(self, name, getattr(net, name))
        self.training = net.training

    def forward(self, x: Tensor) -> Any:
        """Return the network's output on the grid of ``x`` (B, C, D, H, W)."""
        sides = tuple(x.shape[2:])
        whole = self.rule.sides(sides)
        if whole == sides:
            return _each_volume(self.net(x), lambda volume: volume)
        self._log_padding(sides, whole)
        before = [(long - side) // 2 for long, side in zip(whole, sides, strict=True)]
        widths: list[int] = []
        for axis in (2, 1, 0):  # pad counts from the last dim
            widths += [before[axis], whole[axis] - sides[axis] - before[axis]]
        inside = tuple(slice(first, first + side) for first, side in zip(before, sides, strict=True))

        def crop(volume: Any) -> Any:
            if tuple(volume.shape[2:]) != whole:
                volume = interpolate(volume, size=whole, mode="nearest")
            return volume[(slice(None), slice(None), *inside)]

        return _each_volume(self.net(pad(x, widths)), crop)

    def train(self, mode: bool = True) -> "FitGrid":
        """Set the mode of the network and of the wrapper."""
        self.net.train(mode)
        self.training = mode
        for module in self._held:
            module.eval()
        return self

    def hold_in_evaluation(self, modules: Sequence[nn.Module]) -> None:
        """Keep some modules of the network in evaluation mode while the others train."""
        # A tuple: torch does not register the modules in it a second time.
        self._held = tuple(modules)
        self.train(self.training)

    def run_by(self, wrap: Callable[[nn.Module], nn.Module]) -> "FitGrid":
        """Run ``wrap(network)`` instead of the network; the wrapper must share the network's registries."""
        wrapped = wrap(self.net)
        assert all(getattr(wrapped, name) is getattr(self, name) for name in (PARAMETERS, BUFFERS, MODULES))
        object.__setattr__(self, "net", wrapped)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the network's state under its own keys."""
        return self.net.state_dict(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        load_from_state_dict(self.net, *args, **kwargs)

    def extra_repr(self) -> str:
        """Describe the accepted sides."""
        return f"{type(self.net).__name__}, {self.rule}"

    def _log_padding(self, sides: tuple[int, ...], whole: tuple[int, ...]) -> None:
        if self._told:
            return
        self._told = True
        if (launch := read_launch()) is None or launch.rank == 0:
            logger.warning(
                "%s needs sides divisible by %s: volumes, such as one of %s voxels, are padded (to %s) and outputs "
                "cropped",
                type(self.net).__name__,
                "x".join(map(str, self.rule.divisors)),
                "x".join(map(str, sides)),
                "x".join(map(str, whole)),
            )


def _each_volume(output: Any, fit: Any) -> Any:
    """Apply ``fit`` to every volume of a network's output, after unstacking MONAI's deep supervision."""
    if isinstance(output, list | tuple):
        return getattr(output, "_make", type(output))(_each_volume(part, fit) for part in output)  # a named tuple's
    if isinstance(output, dict):
        return {name: _each_volume(part, fit) for name, part in output.items()}
    dims = len(getattr(output, "shape", ()))
    if dims == 6:
        return [fit(output[:, head]) for head in range(output.shape[1])]
    return fit(output) if dims == 5 else output
