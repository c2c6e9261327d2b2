"""Build nnU-Net's two U-Nets as nnU-Net 2 does, so that its trained weights fit.

MONAI's DynUNet has two convolutions in each stage and no biases; MONAI has no residual encoder with a plain decoder. In
a residual encoder, the output of a stage's first block is added to its input, which is pooled by the stride and, if the
channels differ, convolved with a kernel of one voxel (ResNet-D). The decoder is that of the plain U-Net.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from volseg.errors import ConfigError

ENCODER_BLOCKS = (1, 3, 4, *[6] * 10)
"""Residual blocks of each stage in nnU-Net's networks."""

DECODER_BLOCKS = 1
"""Convolutions of each decoder stage."""

Sides = tuple[int, int, int]


class ResEncUNet(nn.Module):
    """U-Net with a residual encoder; returns ``[logits, coarser logits, ...]`` in training with deep supervision.

    Parameters
    ----------
    in_channels, out_channels : int
        Channels of the image, classes of the label.
    strides : sequence of (int, int, int) or int
        Stride of each stage's first convolution along D, H, W; the first stage's is 1.
    kernel_size : sequence of (int, int, int) or int
        Kernel of each stage's convolutions.
    filters : sequence of int
        Channels of each stage.
    blocks : sequence of int
        Residual blocks of each stage, two convolutions each.
    decoder_blocks : int or sequence of int
        Convolutions of each decoder stage; a sequence starts with the coarsest stage.
    deep_supervision : bool
        Whether coarser stages have heads; the coarsest, which has no weight in nnU-Net, has none.

    References
    ----------
    .. [1] F. Isensee et al., "nnU-Net Revisited", MICCAI 2024, arXiv:2404.09556.
    .. [2] T. He et al., "Bag of tricks for image classification", CVPR 2019, arXiv:1812.01187: the blocks.

    Examples
    --------
    >>> net = ResEncUNet(1, 3, strides=(1, 2, 2), kernel_size=(3, 3, 3), filters=(4, 8, 16), blocks=(1, 1, 2))
    >>> net(torch.zeros(1, 1, 8, 8, 16)).shape
    torch.Size([1, 3, 8, 8, 16])
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        strides: Sequence[Sequence[int] | int],
        kernel_size: Sequence[Sequence[int] | int],
        filters: Sequence[int],
        blocks: Sequence[int],
        decoder_blocks: int | Sequence[int] = DECODER_BLOCKS,
        deep_supervision: bool = False,
    ) -> None:
        super().__init__()
        if len({len(strides), len(kernel_size), len(filters), len(blocks)}) > 1 or len(strides) < 2:
            raise ConfigError(
                f"{type(self).__name__} needs strides, kernel_size, filters and blocks for the same number of stages, "
                f"at least two, got {len(strides)}, {len(kernel_size)}, {len(filters)} and {len(blocks)}"
            )
        self.strides = [_triple(stride) for stride in strides]
        self.deep_supervision = deep_supervision
        kernels = [_triple(kernel) for kernel in kernel_size]
        up_blocks = [decoder_blocks] * (len(filters) - 1) if isinstance(decoder_blocks, int) else list(decoder_blocks)
        if len(up_blocks) != len(filters) - 1:
            raise ConfigError(
                f"{type(self).__name__} needs decoder_blocks for each of {len(filters) - 1} stages, got {up_blocks}"
            )
        self.stem, width = self._make_stem(in_channels, filters[0], kernels[0])
        self.encoder = nn.ModuleList(
            nn.Sequential(
                self._make_block(below, channels, kernel, stride),
                *(self._make_block(channels, channels, kernel) for _ in range(count - 1)),
            )
            for below, channels, kernel, stride, count in zip(
                [width, *filters[:-1]], filters, kernels, self.strides, blocks, strict=True
            )
        )
        ups, decoder = [], []
        for stage, count in zip(reversed(range(len(filters) - 1)), up_blocks, strict=True):
            channels, stride = filters[stage], self.strides[stage + 1]
            ups.append(nn.ConvTranspose3d(filters[stage + 1], channels, stride, stride))
            sizes = [2 * channels, *[channels] * (count - 1)]
            decoder.append(nn.Sequential(*(_Convolution(size, channels, kernels[stage]) for size in sizes)))
        self.ups, self.decoder = nn.ModuleList(ups), nn.ModuleList(decoder)
        num_heads = max(1, len(filters) - 2) if deep_supervision else 1
        self.heads = nn.ModuleList(nn.Conv3d(channels, out_channels, 1) for channels in filters[:num_heads])
        self.apply(_initialise)

    @staticmethod
    def _make_stem(in_channels: int, channels: int, kernel: Sides) -> tuple[nn.Module, int]:
        """Return the module before the first stage, and its channels."""
        return _Convolution(in_channels, channels, kernel), channels

    @staticmethod
    def _make_block(in_channels: int, out_channels: int, kernel: Sides, stride: Sides = (1, 1, 1)) -> nn.Module:
        """Return one block of a stage."""
        return _ResidualBlock(in_channels, out_channels, kernel, stride)

    def forward(self, x: Tensor) -> Tensor | list[Tensor]:
        """Return logits (B, K, D, H, W), or a list of logits, finest first."""
        x, skips = self.stem(x), []
        for stage in self.encoder:
            x = stage(x)
            skips.append(x)
        skips.pop()
        decoded = []
        for up, decode in zip(self.ups, self.decoder, strict=True):
            x = decode(torch.cat((up(x), skips.pop()), 1))
            decoded.append(x)
        if self.training and self.deep_supervision:
            heads = zip(self.heads, reversed(decoded), strict=False)  # the coarsest has none
            return [head(x) for head, x in heads]
        return self.heads[0](x)


class _Convolution(nn.Sequential):
    """A convolution, an instance norm, and a leaky ReLU unless an addition follows."""

    def __init__(self, in_channels: int, out_channels: int, kernel: Sides, stride: Sides = (1, 1, 1), *,
                 bias: bool = True, activated: bool = True) -> None:  # fmt: skip
        d, h, w = ((side - 1) // 2 for side in kernel)
        convolution = nn.Conv3d(in_channels, out_channels, kernel, stride, (d, h, w), bias=bias)
        super().__init__(convolution, nn.InstanceNorm3d(out_channels, affine=True))
        if activated:
            self.append(nn.LeakyReLU(inplace=True))


class _ResidualBlock(nn.Module):
    """Two convolutions, added to their input."""

    def __init__(self, in_channels: int, out_channels: int, kernel: Sides, stride: Sides = (1, 1, 1)) -> None:
        super().__init__()
        self.first = _Convolution(in_channels, out_channels, kernel, stride)
        self.second = _Convolution(out_channels, out_channels, kernel, activated=False)
        self.activation = nn.LeakyReLU(inplace=True)
        self.skip = nn.Sequential()
        if max(stride) > 1:
            self.skip.append(nn.AvgPool3d(stride, stride))
        if in_channels != out_channels:
            self.skip.append(_Convolution(in_channels, out_channels, (1, 1, 1), bias=False, activated=False))

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.second(self.first(x)) + self.skip(x))


class PlainConvUNet(ResEncUNet):
    """nnU-Net's plain U-Net: like `ResEncUNet`, but ``blocks`` are convolutions.

    Examples
    --------
    >>> net = PlainConvUNet(1, 3, strides=(1, 2, 2), kernel_size=(3, 3, 3), filters=(4, 8, 16), blocks=(2, 2, 2))
    >>> net(torch.zeros(1, 1, 8, 8, 16)).shape
    torch.Size([1, 3, 8, 8, 16])
    """

    @staticmethod
    def _make_stem(in_channels: int, channels: int, kernel: Sides) -> tuple[nn.Module, int]:
        del channels, kernel  # the first stage's first convolution is the stem
        return nn.Identity(), in_channels

    @staticmethod
    def _make_block(in_channels: int, out_channels: int, kernel: Sides, stride: Sides = (1, 1, 1)) -> nn.Module:
        return _Convolution(in_channels, out_channels, kernel, stride)


def _triple(sides: Sequence[int] | int) -> Sides:
    d, h, w = (sides,) * 3 if isinstance(sides, int) else sides
    return d, h, w


def _initialise(module: nn.Module) -> None:
    """Initialise as nnU-Net does: He's normal weights, zero biases, and residual blocks that start as their skips."""
    if isinstance(module, nn.Conv3d | nn.ConvTranspose3d):
        nn.init.kaiming_normal_(module.weight, a=1e-2)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, _ResidualBlock):  # after its children
        _, norm = module.second
        assert isinstance(norm, nn.InstanceNorm3d)
        nn.init.zeros_(norm.weight)
