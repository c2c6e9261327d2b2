"""Find the volume sides that a network accepts.

The sides of stock networks follow from their strides. Any other module is probed: its forward runs on meta tensors,
which have shapes but no values, so a probe needs no memory and about a tenth of a second. The module accepts a size if,
in training mode with a batch of one, its forward does not raise and returns an output on the input's grid.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import torch
from monai.networks import nets
from torch import Tensor, nn
from torch.func import functional_call

from volseg.device.module_internals import get_buffers, get_parameters
from volseg.errors import GridError
from volseg.models.networks import DynUNet
from volseg.models.residual_encoder import PlainConvUNet, ResEncUNet
from volseg.models.vnet import VNet

Sides = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class GridRule:
    """Sides D, H, W that a network accepts."""

    divisors: Sides
    """Divisor of each side."""
    minimum: Sides
    """Shortest sides: a block that becomes one voxel in the network's coarsest layer."""
    least_blocks: int = 1
    """Number of blocks of ``minimum`` that a volume needs: instance and batch norm of a single volume fail on one
    voxel."""
    fixed: bool = False
    """Whether the network accepts only ``minimum``."""

    def takes(self, sides: Sequence[int]) -> bool:
        """Return whether a volume of these sides needs no padding."""
        return self.sides(sides) == tuple(sides)

    def sides(self, sides: Sequence[int]) -> Sides:
        """Return the smallest accepted sides that contain ``sides``.

        Raises
        ------
        GridError
            If the network's grid is fixed and smaller.

        Examples
        --------
        >>> GridRule((16, 16, 16), (16, 16, 16)).sides((40, 56, 40))
        (48, 64, 48)
        >>> GridRule((16, 16, 16), (16, 16, 16), least_blocks=2).sides((9, 16, 5))
        (16, 32, 16)
        """
        if self.fixed:
            if any(side > most for side, most in zip(sides, self.minimum, strict=True)):
                raise GridError(
                    f"this network accepts only volumes of {self.minimum} voxels, got {tuple(sides)}; build it for "
                    "larger volumes, or predict with a sliding window of this size"
                )
            return self.minimum
        whole = [
            math.ceil(max(side, least) / divisor) * divisor
            for side, least, divisor in zip(sides, self.minimum, self.divisors, strict=True)
        ]
        blocks = math.prod(side // least for side, least in zip(whole, self.minimum, strict=True))
        if blocks < self.least_blocks:
            # One block along each axis: lengthen the axis that adds the fewest voxels.
            wanted = [least * self.least_blocks for least in self.minimum]
            axis = min(range(3), key=lambda axis: (wanted[axis] / sides[axis], axis))
            whole[axis] = wanted[axis]
        d, h, w = whole
        return d, h, w


def grid_divisors(net: nn.Module) -> Sides:
    """Return the divisors of the network's input sides along D, H, W.

    Raises
    ------
    GridError
        For a module that does not map volumes to volumes of the same grid.

    Examples
    --------
    >>> grid_divisors(nets.VNet())
    (16, 16, 16)
    >>> grid_divisors(nn.Conv3d(1, 2, 3, padding=1))
    (1, 1, 1)
    """
    return grid_rule(net).divisors


def grid_rule(net: nn.Module) -> GridRule:
    """Return the rule of a network's sides, from its class if known, else by probing.

    Raises
    ------
    GridError
        As `grid_divisors`.
    """
    known = _KNOWN.get(type(net))
    return known(net) if known else probe_grid_rule(net)


def _by_sides(sides: Sequence[int], **rules: Any) -> GridRule:
    d, h, w = sides
    return GridRule((d, h, w), (d, h, w), **rules)


def _by_strides(strides: Sequence[Any]) -> GridRule:
    steps = [[stride] * 3 if isinstance(stride, int) else list(stride) for stride in strides]
    return _by_sides([math.prod(step[axis] for step in steps) for axis in range(3)], least_blocks=2)


_KNOWN: dict[type[nn.Module], Callable[[Any], GridRule]] = {
    nets.VNet: lambda _: _by_strides([2] * 4),
    # MONAI ignores strides beyond the last level.
    nets.UNet: lambda net: _by_strides(net.strides[: len(net.channels) - 1]),
    **dict.fromkeys((VNet, nets.DynUNet, DynUNet, PlainConvUNet, ResEncUNet), lambda net: _by_strides(net.strides)),
    nets.SegResNet: lambda net: _by_strides([2] * (len(net.blocks_down) - 1)),
    nets.SwinUNETR: lambda net: _by_strides([int(net.patch_size)] * 5),
    nets.UNETR: lambda net: _by_sides([a * b for a, b in zip(net.feat_size, net.patch_size, strict=True)], fixed=True),
}
_BASES = (96, 64, 128, 160, 48, 80, 112, 32)
"""Cubes to try first: their sides have many divisors, among which the network's are searched."""


def probe_grid_rule(net: nn.Module) -> GridRule:
    """Return the rule of a module's sides, found by probing.

    Parameters
    ----------
    net : nn.Module
        Maps (B, C, D, H, W) to a volume of the same D, H, W (or a list of volumes that begins with such a volume). C is
        the number of input channels of its first 3D convolution.

    Raises
    ------
    GridError
        If the module accepts no cube of 32 to 160 voxels.
    """
    answer = _Answers(net)
    base = next((side for side in _BASES if answer.takes((side,) * 3)), None)
    if base is None:
        raise GridError(
            f"{type(net).__name__} returns no output on its input's grid for any cube of {sorted(_BASES)} voxels "
            f"({answer.last_fault}); return logits on it, or pass its divisors: FitGrid(net, divisors=(16, 16, 16))"
        )

    def along(axis: int, side: int) -> bool:
        sides = [base, base, base]
        sides[axis] = side
        return answer.takes((sides[0], sides[1], sides[2]))

    divisors, minimum = [], []
    for axis in range(3):
        # The module accepts the base, so the divisor of all accepted sides divides the base.
        step = next((d for d in range(1, base + 1) if base % d == 0 and along(axis, base + d)), None)
        if step is None:
            raise GridError(f"{type(net).__name__} accepts {base} voxels along dim {axis + 2}, but no similar number")
        divisors.append(step)
        minimum.append(next(side for side in count(step, step) if along(axis, side)))
    d, h, w = minimum
    if answer.takes((d, h, w)):
        least_blocks = 1
    elif answer.takes((d, h, 2 * w)):
        least_blocks = 2
    else:
        raise GridError(
            f"{type(net).__name__} accepts {minimum} voxels along each single axis, but not along all together "
            f"({answer.last_fault}); pass the divisors of its sides: FitGrid(net, divisors=(16, 16, 16))"
        )
    return GridRule((divisors[0], divisors[1], divisors[2]), (d, h, w), least_blocks)


class _Answers:
    """Probe on meta tensors whether a module accepts a volume; its mode, state and values stay unchanged."""

    def __init__(self, net: nn.Module) -> None:
        self.net = net
        convolutions = (module for module in net.modules() if isinstance(module, nn.Conv3d))
        self.in_channels = next((module.in_channels for module in convolutions), 1)
        self.last_fault = ""

    def takes(self, sides: Sides) -> bool:
        modes = {module: module.training for module in self.net.modules()}
        self.net.train()
        try:
            with torch.no_grad():
                image = torch.empty(1, self.in_channels, *sides, device="meta")
                output = run_on_copies(self.net, partial(torch.empty_like, device="meta"), image)
        except ImportError:  # the forward pass needs a missing package: no other size helps
            raise
        except Exception as fault:
            self.last_fault = str(fault).strip().splitlines()[0] if str(fault).strip() else type(fault).__name__
            return False
        finally:
            for module, mode in modes.items():
                module.training = mode
        while isinstance(output, list | tuple) and output:
            output = output[0]
        shape = tuple(getattr(output, "shape", ()))
        self.last_fault = f"for {tuple(image.shape)} it returns {shape or f'a {type(output).__name__}'}"
        return len(shape) >= 5 and shape[-3:] == sides


def run_on_copies(net: nn.Module, copy: Callable[[Tensor], Tensor], *args: Any) -> Any:
    """Return ``net(*args)``, computed with a copy of each parameter and buffer.

    Every name of a tensor gets the same copy. With ``tie_weights=True``, ``torch.func.functional_call`` (2.13) leaves
    copies in modules with two names, such as the layers of MONAI's DynUNet; with False, it would miss shared tensors
    whose other names are not passed.

    Parameters
    ----------
    net : nn.Module
        Module to call with ``args``.
    copy : callable
        Returns a copy of a tensor, for instance on the meta device.
    *args
        Arguments of ``net``.
    """
    copies: dict[int, Tensor] = {}
    lent: dict[str, Tensor] = {}
    for prefix, module in net.named_modules():
        for key, tensor in (*get_parameters(module).items(), *get_buffers(module).items()):
            if tensor is None:
                continue
            if id(tensor) not in copies:
                copies[id(tensor)] = copy(tensor)
            lent[f"{prefix}.{key}" if prefix else key] = copies[id(tensor)]
    return functional_call(net, lent, args, tie_weights=False)
