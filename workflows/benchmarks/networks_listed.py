"""Segmentation networks that speed is compared on, as people train them, and small ones of the same kind.

Twelve are tuned for; for the six of `UNTUNED`, built like published ones, no kernel of this package was chosen.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from monai.networks import nets
from torch import Tensor, nn

from volseg.models.residual_encoder import ENCODER_BLOCKS, PlainConvUNet, ResEncUNet

__all__ = ["CLASSES", "NETWORKS", "TUNED", "build", "find_logits", "fit"]

CLASSES = 3

Sides = tuple[int, int, int]


def _dynunet(filters: Sequence[int]) -> nn.Module:
    strides = [1] + [2] * (len(filters) - 1)
    return nets.DynUNet(3, 1, CLASSES, [3] * len(filters), strides, strides[1:], filters=filters)


def _unet(channels: Sequence[int]) -> nn.Module:
    return nets.UNet(3, 1, CLASSES, channels, (2,) * (len(channels) - 1), num_res_units=2)


def _attention(channels: Sequence[int]) -> nn.Module:
    return nets.AttentionUnet(3, 1, CLASSES, channels, (2,) * (len(channels) - 1))


def _nnunet(kind: type[ResEncUNet], filters: Sequence[int], blocks: Sequence[int]) -> nn.Module:
    strides = [1] + [2] * (len(filters) - 1)
    kernels = [3] * len(filters)
    return kind(1, CLASSES, strides=strides, kernel_size=kernels, filters=filters, blocks=blocks)


def _unetr(sides: Sides, **sizes: int) -> nn.Module:
    return nets.UNETR(1, CLASSES, sides, **sizes)


def _swin(**sizes: Any) -> nn.Module:
    return nets.SwinUNETR(1, CLASSES, **sizes)


HIGHRES = (
    {"name": "conv_0", "n_features": 4, "kernel_size": 3},
    {"name": "res_1", "n_features": 4, "kernels": (3, 3), "repeat": 1},
    {"name": "res_2", "n_features": 6, "kernels": (3, 3), "repeat": 1},
    {"name": "conv_1", "n_features": 8, "kernel_size": 1},
    {"name": "conv_2", "kernel_size": 1},
)

FULL: Mapping[str, Callable[[Sides], nn.Module]] = {
    "DynUNet": lambda _: _dynunet([32, 64, 128, 256, 320]),
    "VNet": lambda _: nets.VNet(out_channels=CLASSES),
    "SegResNet": lambda _: nets.SegResNet(3, 32, 1, CLASSES, blocks_down=(1, 2, 2, 4), blocks_up=(1, 1, 1)),
    "SegResNetDS": lambda _: nets.SegResNetDS(3, 32, 1, CLASSES, blocks_down=(1, 2, 2, 4)),
    "UNet": lambda _: _unet([32, 64, 128, 256, 320]),
    "BasicUNet": lambda _: nets.BasicUNet(3, 1, CLASSES),
    "AttentionUnet": lambda _: _attention([32, 64, 128, 256]),
    "UNETR": _unetr,
    "SwinUNETR": lambda _: _swin(feature_size=48),
    "MedNeXt": lambda _: nets.MedNeXtS(spatial_dims=3, in_channels=1, out_channels=CLASSES),
    "HighResNet": lambda _: nets.HighResNet(3, 1, CLASSES),
    "ResEncUNet": lambda _: _nnunet(ResEncUNet, [32, 64, 128, 256, 320, 320], ENCODER_BLOCKS[:6]),
}
"""With the sizes of their papers, of MONAI's defaults, or of nnU-Net's plan for such a patch."""

SMALL: Mapping[str, Callable[[Sides], nn.Module]] = {
    "DynUNet": lambda _: _dynunet([4, 6, 8]),
    "VNet": FULL["VNet"],
    "SegResNet": lambda _: nets.SegResNet(3, 8, 1, CLASSES, blocks_down=(1, 1), blocks_up=(1,)),
    "SegResNetDS": lambda _: nets.SegResNetDS(3, 4, 1, CLASSES, blocks_down=(1, 1, 1)),
    "UNet": lambda _: _unet([4, 6, 8]),
    "BasicUNet": lambda _: nets.BasicUNet(3, 1, CLASSES, (4, 4, 6, 6, 8, 4)),
    "AttentionUnet": lambda _: _attention([4, 6, 8]),
    "UNETR": lambda sides: _unetr(sides, feature_size=2, hidden_size=12, mlp_dim=16, num_heads=2),
    "SwinUNETR": lambda _: _swin(
        patch_size=2, depths=(1, 1, 1, 1), num_heads=(1, 1, 1, 1), feature_size=12, window_size=2
    ),
    "MedNeXt": lambda _: nets.MedNeXt(
        3,
        4,
        1,
        CLASSES,
        kernel_size=3,
        blocks_down=(1, 1),
        blocks_bottleneck=1,
        blocks_up=(1, 1),
        encoder_expansion_ratio=(2, 2),
        decoder_expansion_ratio=(2, 2),
        use_residual_connection=True,
    ),
    "HighResNet": lambda _: nets.HighResNet(3, 1, CLASSES, layer_params=HIGHRES),
    "ResEncUNet": lambda _: _nnunet(ResEncUNet, [4, 6, 8], [1, 1, 2]),
}
"""Of the same functions, for a CPU. V-Net's widths are fixed."""

Block = Callable[[int, int], nn.Module]


class Encoder2Decoder(nn.Module):
    """A U-Net of any blocks, made from their channels before and after; ``widths`` has the finest level first."""

    def __init__(self, widths: Sequence[int], block: Block, down: Block, up: Block, classes: int) -> None:
        super().__init__()
        pairs = list(itertools.pairwise(widths))
        self.first = block(1, widths[0])
        self.downs = nn.ModuleList(down(fine, fine) for fine, _ in pairs)
        self.encoders = nn.ModuleList(block(fine, coarse) for fine, coarse in pairs)
        self.ups = nn.ModuleList(up(coarse, fine) for fine, coarse in pairs)
        self.decoders = nn.ModuleList(block(2 * fine, fine) for fine, _ in pairs)
        self.head = nn.Conv3d(widths[0], classes, 1)

    def forward(self, volume: Tensor) -> Tensor:
        """Return logits of (B, C, D, H, W)."""
        skips = [self.first(volume)]
        for down, encoder in zip(self.downs, self.encoders, strict=True):
            skips.append(encoder(down(skips[-1])))
        volume = skips.pop()
        for up, decoder in zip(reversed(self.ups), reversed(self.decoders), strict=True):
            volume = decoder(torch.cat([skips.pop(), up(volume)], 1))
        return self.head(volume)


class Residual(nn.Module):
    """``x + f(x)``, with a convolution of 1 where the channels differ."""

    def __init__(self, before: int, after: int, body: nn.Module) -> None:
        super().__init__()
        self.body = body
        self.skip = nn.Conv3d(before, after, 1) if before != after else nn.Identity()

    def forward(self, volume: Tensor) -> Tensor:
        """Return the sum."""
        return self.skip(volume) + self.body(volume)


class ChannelNorm(nn.Module):
    """Layer norm of the channels, by hand, as in the code of ConvNeXt (arXiv 2201.03545)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, volume: Tensor) -> Tensor:
        """Return the volume with a mean of 0 and a variance of 1 over the channels, scaled."""
        mean = volume.mean(1, keepdim=True)
        variance = (volume - mean).pow(2).mean(1, keepdim=True)
        volume = (volume - mean) / torch.sqrt(variance + 1e-6)
        return self.weight[:, None, None, None] * volume + self.bias[:, None, None, None]


class DenseBlock(nn.Module):
    """Layers of which each reads all before it, joined (arXiv 1608.06993)."""

    def __init__(self, before: int, layers: int, growth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.BatchNorm3d(before + number * growth),
                nn.ReLU(),
                nn.Conv3d(before + number * growth, growth, 3, padding=1, bias=False),
            )
            for number in range(layers)
        )

    def forward(self, volume: Tensor) -> Tensor:
        """Return the volume with the channels of all layers behind its own."""
        for layer in self.layers:
            volume = torch.cat([volume, layer(volume)], 1)
        return volume


class DenseUNet(nn.Module):
    """Dense blocks down and up; the last convolution reads everything at full resolution."""

    def __init__(self, classes: int, layers: int, growth: int, levels: int) -> None:
        super().__init__()
        added = layers * growth
        self.first = nn.Conv3d(1, 3 * growth, 3, padding=1)
        widths = [3 * growth]
        self.downs, self.up_blocks, self.ups, self.transitions = (nn.ModuleList() for _ in range(4))
        for _ in range(levels):
            self.downs.append(DenseBlock(widths[-1], layers, growth))
            self.transitions.append(_unit(widths[-1] + added, widths[-1] + added, nn.BatchNorm3d, nn.ReLU, kernel=1))
            widths.append(widths[-1] + added)
        self.bottom = DenseBlock(widths[-1], layers, growth)
        before = widths[-1] + added
        for width in reversed(widths[1:]):
            self.ups.append(nn.ConvTranspose3d(before, added, 2, 2))
            self.up_blocks.append(DenseBlock(width + added, layers, growth) if width != widths[1] else nn.Identity())
            before = width + 2 * added if width != widths[1] else width + added
        self.head = nn.Conv3d(before, classes, 3, padding=1)

    def forward(self, volume: Tensor) -> Tensor:
        """Return logits of (B, C, D, H, W)."""
        volume, skips = self.first(volume), []
        for block, transition in zip(self.downs, self.transitions, strict=True):
            skips.append(block(volume))
            volume = nn.functional.max_pool3d(transition(skips[-1]), 2)
        volume = self.bottom(volume)
        for up, block in zip(self.ups, self.up_blocks, strict=True):
            volume = block(torch.cat([skips.pop(), up(volume)], 1))
        return self.head(volume)


Norm, Activation = Callable[[int], nn.Module], Callable[[], nn.Module]


def _unit(
    before: int, after: int, norm: Norm, activation: Activation, kernel: int = 3, stride: int = 1, bias: bool = False
) -> nn.Sequential:
    convolution = nn.Conv3d(before, after, kernel, stride, kernel // 2, bias=bias)
    return nn.Sequential(convolution, norm(after), activation())


def _double(coarse: int, fine: int) -> nn.Module:
    return nn.ConvTranspose3d(coarse, fine, 2, 2)


def _halve(*_: int) -> nn.Module:
    return nn.MaxPool3d(2)


def _group(widths: Sequence[int], classes: int) -> nn.Module:
    """Return residual blocks of GroupNorm(8) and SiLU, halved by strides, doubled by interpolation."""

    def norm(channels: int) -> nn.Module:
        return nn.GroupNorm(min(8, channels), channels)

    def block(before: int, after: int) -> nn.Module:
        body = nn.Sequential(_unit(before, after, norm, nn.SiLU), _unit(after, after, norm, nn.SiLU))
        return Residual(before, after, body)

    def up(coarse: int, fine: int) -> nn.Module:
        return nn.Sequential(nn.Upsample(scale_factor=2, mode="trilinear"), nn.Conv3d(coarse, fine, 1))

    return Encoder2Decoder(widths, block, lambda before, after: nn.Conv3d(before, after, 3, 2, 1), up, classes)


def _gcr(widths: Sequence[int], classes: int) -> nn.Module:
    """Return blocks of group norm, convolution, ReLU, with max pooling and nearest neighbours."""

    def unit(before: int, after: int) -> nn.Sequential:
        norm = nn.GroupNorm(8 if before % 8 == 0 else 1, before)
        return nn.Sequential(norm, nn.Conv3d(before, after, 3, padding=1, bias=False), nn.ReLU(inplace=True))

    def block(before: int, after: int) -> nn.Module:
        middle = max(after // 2, before) if after > before else after
        return nn.Sequential(unit(before, middle), unit(middle, after))

    def up(coarse: int, fine: int) -> nn.Module:
        return nn.Sequential(nn.Upsample(scale_factor=2, mode="nearest"), nn.Conv3d(coarse, fine, 1, bias=False))

    return Encoder2Decoder(widths, block, _halve, up, classes)


def _convnext(widths: Sequence[int], classes: int) -> nn.Module:
    """Return blocks of a depthwise convolution of 7, a layer norm of channels, and an expansion by 4 with GELU."""

    def block(before: int, after: int) -> nn.Module:
        body = nn.Sequential(
            nn.Conv3d(before, before, 7, padding=3, groups=before),
            ChannelNorm(before),
            nn.Conv3d(before, 4 * before, 1),
            nn.GELU(),
            nn.Conv3d(4 * before, after, 1),
        )
        return Residual(before, after, body)

    def down(before: int, after: int) -> nn.Module:
        return nn.Sequential(ChannelNorm(before), nn.Conv3d(before, after, 2, 2))

    return Encoder2Decoder(widths, block, down, _double, classes)


def _of_2016(widths: Sequence[int], classes: int) -> nn.Module:
    """Return the 3D U-Net of arXiv 1606.06650: batch norm and ReLU, half of a level's channels in its first unit."""

    def block(before: int, after: int) -> nn.Module:
        middle = after // 2 if after > before else after
        return nn.Sequential(
            _unit(before, middle, nn.BatchNorm3d, nn.ReLU), _unit(middle, after, nn.BatchNorm3d, nn.ReLU)
        )

    return Encoder2Decoder(widths, block, _halve, _double, classes)


UNTUNED: Mapping[str, Callable[[int, bool], nn.Module]] = {
    "PlainConvUNet": lambda _, small: _nnunet(
        PlainConvUNet, [4, 8, 8] if small else [32, 64, 128, 256, 320, 320], [2] * (3 if small else 6)
    ),
    "GroupNormUNet": lambda classes, small: _group([8, 16] if small else [32, 64, 128, 256], classes),
    "UNet3D": lambda classes, small: _gcr([8, 16] if small else [32, 64, 128, 256], classes),
    "ConvNeXtUNet": lambda classes, small: _convnext([4, 8] if small else [32, 64, 128, 256], classes),
    "UNet2016": lambda classes, small: _of_2016([8, 16] if small else [64, 128, 256, 512], classes),
    "DenseUNet": lambda classes, small: DenseUNet(classes, 2 if small else 4, 4 if small else 16, 1 if small else 3),
}
"""By name: from the number of classes, and whether narrow."""

TUNED = tuple(FULL)
NETWORKS = (*TUNED, *UNTUNED)


def build(name: str, sides: Sides, *, small: bool = False) -> nn.Module:
    """Return a network without dropout, whose masks would be others for each way to run it; from a fixed seed."""
    torch.manual_seed(0)
    net = UNTUNED[name](CLASSES, small) if name in UNTUNED else (SMALL if small else FULL)[name](sides)
    for module in net.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
    return net


def fit(name: str, sides: Sides) -> Sides:
    """Return sides that a network takes: SwinUNETR halves five times, and norms what is left."""
    if name != "SwinUNETR":
        return sides
    depth, height, width = (max(32, side) for side in sides)
    return max(64, depth), height, width


def find_logits(output: Tensor | Sequence[Tensor]) -> Tensor:
    """Return the finest logits of what a network gives."""
    return output if isinstance(output, Tensor) or not isinstance(output, list | tuple) else output[0]
