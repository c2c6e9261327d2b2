"""MONAI's V-Net with every one of its dropouts under a name, and with kernels and strides per level and axis."""

from collections.abc import Sequence

from monai.networks import nets
from monai.networks.blocks import Convolution
from torch import nn

from volseg.errors import ConfigError

__all__ = ["VNet", "reshape_levels"]

LEVELS = 5
"""Of every V-Net, from full resolution to the bottleneck."""

KERNEL, STRIDE = 5, 2
"""Of MONAI's V-Net, at every level and along every axis."""

Sides = tuple[int, int, int]


class VNet(nets.VNet):
    """V-Net whose kernels, strides and dropout of the two finest skips can be chosen too.

    MONAI drops channels of the skips at full and half resolution with a probability of 0.5 that none of its parameters
    reaches (1.6.1: ``up_tr64`` and ``up_tr32`` take a default), so its ``dropout_prob_up=(0, 0)`` still leaves a
    network that drops. MONAI convolves 5 x 5 x 5 voxels and halves every axis four times, which suits voxels that are
    nearly cubes and no stack of thick slices. Everything else, parameters and their names included, is MONAI's.

    Parameters
    ----------
    spatial_dims, in_channels, out_channels, act, dropout_dim, bias
        As for `monai.networks.nets.VNet`.
    dropout_prob_down : float or None
        In the two coarsest transitions down.
    dropout_prob_up : tuple of float
        In the two coarsest transitions up: on what comes from below, and on the skip.
    dropout_prob_fine : float
        On the skips of the two finest transitions up.
    strides : sequence of (int, int, int) or int, optional
        Stride along D, H, W with which each of the five levels begins; the first is 1, the others 2 by default.
    kernel_size : sequence of (int, int, int) or int, optional
        Odd kernel of the convolutions of each of the five levels; 5 by default.

    Raises
    ------
    ConfigError
        For strides or kernels that are not those of five levels.

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
        if spatial_dims != 3 and not (strides is None and kernel_size is None):
            raise ConfigError(f"VNet takes strides and kernel_size of volumes only, got spatial_dims={spatial_dims}")
        self.strides = _read_levels("strides", (1, *[STRIDE] * (LEVELS - 1)) if strides is None else strides)
        self.kernels = _read_levels("kernel_size", [KERNEL] * LEVELS if kernel_size is None else kernel_size)
        if self.strides[0] != (1, 1, 1):
            raise ConfigError(f"VNet's first level has the image's grid: its stride is 1, got {self.strides[0]}")
        if even := [kernel for kernel in self.kernels if not all(side % 2 for side in kernel)]:
            raise ConfigError(f"VNet needs a kernel_size that is odd along each axis, got {even[0]}")
        reshape_levels(self, self.strides, self.kernels)


def reshape_levels(net: nets.VNet, strides: Sequence[Sides], kernels: Sequence[Sides]) -> None:
    """Put convolutions of other strides and kernels in place of MONAI's, where a level has others.

    The network is then initialised as torch initialises these convolutions; with MONAI's own sides nothing is drawn.

    Parameters
    ----------
    net : monai.networks.nets.VNet
        Of any width.
    strides, kernels
        Of the five levels, from full resolution to the bottleneck.
    """
    downs = (net.down_tr32, net.down_tr64, net.down_tr128, net.down_tr256)
    ups = (net.up_tr32, net.up_tr64, net.up_tr128, net.up_tr256)  # each gives the grid of the level above its own
    for stride, down, up in zip(strides[1:], downs, ups, strict=True):
        if stride != (STRIDE,) * 3:
            down.down_conv = _make_alike(down.down_conv, stride, stride, (0, 0, 0))
            up.up_conv = _make_alike(up.up_conv, stride, stride, (0, 0, 0))
    levels = ((net.in_tr, net.up_tr32, net.out_tr), *zip(downs[:-1], ups[1:], strict=True), (downs[-1],))
    for kernel, transitions in zip(kernels, levels, strict=True):
        if kernel == (KERNEL,) * 3:
            continue
        d, h, w = (side // 2 for side in kernel)
        for block in [part for whole in transitions for part in whole.modules() if isinstance(part, Convolution)]:
            block.conv = _make_alike(block.conv, kernel, (1, 1, 1), (d, h, w))


def _read_levels(name: str, levels: Sequence[Sequence[int] | int]) -> tuple[Sides, ...]:
    """Return a triple for each level, whichever way it was given."""
    triples = [(level,) * 3 if isinstance(level, int) else tuple(level) for level in levels]
    wrong = [triple for triple in triples if len(triple) != 3 or not all(type(n) is int and n > 0 for n in triple)]
    if len(triples) != LEVELS or wrong:
        raise ConfigError(
            f"VNet needs {name} of its {LEVELS} levels, each a positive whole number or three of them (D, H, W), got "
            f"{[*levels]}"
        )
    return tuple((d, h, w) for d, h, w in triples)


def _make_alike(of: nn.Module, kernel: Sides, stride: Sides, padding: Sides) -> nn.Conv3d | nn.ConvTranspose3d:
    """Return a convolution of the same kind and channels, with other sides."""
    assert isinstance(of, nn.Conv3d | nn.ConvTranspose3d)
    kind = nn.ConvTranspose3d if isinstance(of, nn.ConvTranspose3d) else nn.Conv3d
    return kind(of.in_channels, of.out_channels, kernel, stride, padding, bias=of.bias is not None)
