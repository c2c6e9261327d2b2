"""Extend MONAI's V-Net by a parameter for each of its dropouts, and by strides and kernels per level and axis."""

from collections.abc import Sequence

from monai.networks import nets
from monai.networks.blocks import Convolution
from torch import nn

from volseg.errors import ConfigError
from volseg.models.topology import VNET_MONAI

Sides = tuple[int, int, int]


class VNet(nets.VNet):
    """V-Net with configurable kernels, strides, and dropout of the two finest skips.

    MONAI drops channels of the skips at full and half resolution with a probability of 0.5 that no parameter controls
    (1.6.1: ``up_tr64`` and ``up_tr32`` use a default), so a network with ``dropout_prob_up=(0, 0)`` still drops
    channels. MONAI's kernels are 5 x 5 x 5 and every axis is halved four times, which suits nearly cubic voxels, but
    not a stack of thick slices. Everything else, including parameters and their names, is MONAI's.

    Parameters
    ----------
    spatial_dims : int
        3; MONAI's own V-Net also supports 2.
    in_channels, out_channels, act, dropout_dim, bias
        As for `monai.networks.nets.VNet`.
    dropout_prob_down : float or None
        Dropout in the two coarsest transitions down.
    dropout_prob_up : tuple of float
        Dropout in the two coarsest transitions up: on the input from below, and on the skip.
    dropout_prob_fine : float
        Dropout on the skips of the two finest transitions up.
    strides : sequence of (int, int, int) or int, optional
        Stride along D, H, W at the start of each of the five levels; the first is 1, the others 2 by default.
    kernel_size : sequence of (int, int, int) or int, optional
        Odd kernel of the convolutions of each of the five levels; 5 by default.

    Raises
    ------
    ConfigError
        For strides or kernels that do not fit five levels, and for 2D images.

    References
    ----------
    .. [1] F. Milletari, N. Navab, S.-A. Ahmadi, "V-Net", 3DV 2016, doi:10.1109/3DV.2016.79. It has no dropout.

    Examples
    --------
    >>> import torch
    >>> flat = VNet(strides=(1, (2, 2, 1), (2, 2, 1), 2, 2), kernel_size=((5, 5, 1), (5, 5, 1), (5, 5, 3), 5, 5))
    >>> flat(torch.zeros(1, 1, 16, 32, 12)).shape
    torch.Size([1, 1, 16, 32, 12])
    """

    def __init__(
        self,
        spatial_dims: int = 3,
        in_channels: int = 1,
        out_channels: int = 1,
        act: tuple[str, dict] | str = ("elu", {"inplace": True}),
        dropout_prob_down: float | None = 0.5,
        dropout_prob_up: tuple[float | None, float] = (0.5, 0.5),
        dropout_prob_fine: float = 0.5,
        dropout_dim: int = 3,
        bias: bool = False,
        strides: Sequence[Sequence[int] | int] | None = None,
        kernel_size: Sequence[Sequence[int] | int] | None = None,
    ) -> None:
        super().__init__(
            spatial_dims=spatial_dims,
            in_channels=in_channels,
            out_channels=out_channels,
            act=act,
            dropout_prob_down=dropout_prob_down,
            dropout_prob_up=dropout_prob_up,
            dropout_dim=dropout_dim,
            bias=bias,
        )
        for transition in (self.up_tr64, self.up_tr32):
            for module in transition.modules():
                if isinstance(module, nn.Dropout | nn.Dropout2d | nn.Dropout3d):
                    module.p = dropout_prob_fine
        if spatial_dims != 3:
            raise ConfigError(
                f"VNet supports only volumes (spatial_dims=3), got spatial_dims={spatial_dims}; for 2D images use "
                "monai.networks.nets.VNet"
            )
        self.strides = _read_levels("strides", VNET_MONAI.strides if strides is None else strides)
        self.kernels = _read_levels("kernel_size", VNET_MONAI.kernels if kernel_size is None else kernel_size)
        if self.strides[0] != (1, 1, 1):
            raise ConfigError(f"VNet's first level has the image's grid: its stride must be 1, got {self.strides[0]}")
        if even := [kernel for kernel in self.kernels if not all(side % 2 for side in kernel)]:
            raise ConfigError(f"VNet needs a kernel_size that is odd along each axis, got {even[0]}")
        reshape_levels(self, self.strides, self.kernels)


def reshape_levels(net: nets.VNet, strides: Sequence[Sides], kernels: Sequence[Sides]) -> None:
    """Replace MONAI's convolutions at levels with other strides or kernels.

    New convolutions have torch's default initial weights. With MONAI's own sides, no random number is drawn.

    Parameters
    ----------
    net : monai.networks.nets.VNet
        A V-Net of any width.
    strides, kernels
        Sides of the five levels, from full resolution to the bottleneck.
    """
    downs = (net.down_tr32, net.down_tr64, net.down_tr128, net.down_tr256)
    ups = (net.up_tr32, net.up_tr64, net.up_tr128, net.up_tr256)  # each returns the grid of the next finer level
    for stride, down, up in zip(strides[1:], downs, ups, strict=True):
        down.down_conv = _resize(down.down_conv, stride, stride)
        up.up_conv = _resize(up.up_conv, stride, stride)
    levels = ((net.in_tr, net.up_tr32, net.out_tr), *zip(downs[:-1], ups[1:], strict=True), (downs[-1],))
    for kernel, transitions in zip(kernels, levels, strict=True):
        for block in [part for whole in transitions for part in whole.modules() if isinstance(part, Convolution)]:
            block.conv = _resize(block.conv, kernel, (1, 1, 1))


def _read_levels(name: str, levels: Sequence[Sequence[int] | int]) -> tuple[Sides, ...]:
    """Return three sides for each level, from three or one."""
    triples = [(level,) * 3 if isinstance(level, int) else tuple(level) for level in levels]
    wrong = [triple for triple in triples if len(triple) != 3 or not all(type(n) is int and n > 0 for n in triple)]
    if len(triples) != len(VNET_MONAI.strides) or wrong:
        raise ConfigError(
            f"VNet needs {name} for its {len(VNET_MONAI.strides)} levels, each a positive whole number or three of "
            f"them (D, H, W), got {[*levels]}"
        )
    return tuple((d, h, w) for d, h, w in triples)


def _resize(convolution: nn.Module, kernel: Sides, stride: Sides) -> nn.Module:
    """Return a convolution of the same kind and channels with these sides; the input if it already has them."""
    assert isinstance(convolution, nn.Conv3d | nn.ConvTranspose3d)
    if (convolution.kernel_size, convolution.stride) == (kernel, stride):
        return convolution
    d, h, w = ((side - step) // 2 for side, step in zip(kernel, stride, strict=True))
    channels, bias = (convolution.in_channels, convolution.out_channels), convolution.bias is not None
    return type(convolution)(*channels, kernel, stride, (d, h, w), bias=bias)
