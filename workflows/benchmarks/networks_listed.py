"""The twelve segmentation networks that speed is compared on, as people train them, and small ones of the same kind."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from monai.networks import nets
from networks_untuned import UNTUNED
from torch import Tensor, nn

from volseg.models.residual_encoder import ENCODER_BLOCKS, ResEncUNet

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


def _residual_encoder(filters: Sequence[int], blocks: Sequence[int]) -> nn.Module:
    strides = [1] + [2] * (len(filters) - 1)
    kernels = [3] * len(filters)
    return ResEncUNet(1, CLASSES, strides=strides, kernel_size=kernels, filters=filters, blocks=blocks)


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
    "ResEncUNet": lambda _: _residual_encoder([32, 64, 128, 256, 320, 320], ENCODER_BLOCKS[:6]),
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
    "ResEncUNet": lambda _: _residual_encoder([4, 6, 8], [1, 1, 2]),
}
"""Of the same functions, for a CPU. V-Net's widths are fixed."""

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
