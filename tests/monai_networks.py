"""MONAI's networks for 3D volumes, as small as possible; every strategy is tested on them.

Left out are those that need other packages (DAF3D, HyenaNDUNETR, MILModel, TorchVisionFCModel, Transchex), and
``SENet154`` and its like, which always have hundreds of millions of parameters. ``NETWORKS[name].build()`` makes a
network in float64 (where it can), in training mode, without dropout; ``draws`` says whether it still draws random
numbers. ``NETWORKS[name].inputs(batch)`` makes its inputs; the first is the volume.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from monai.networks import nets
from monai.networks.nets.dints import DiNTS, TopologyInstance, TopologySearch
from monai.networks.nets.resnet import resnet10, resnet18, resnet50
from monai.networks.nets.restormer import Restormer
from monai.networks.nets.vista3d import vista3d132
from torch import Tensor, nn

DROPOUTS = (nn.modules.dropout._DropoutNd,)

OBLONG = (32, 16, 16)
"""Not a cube of 16: four halvings would leave one voxel, which instance norm refuses."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One network and the inputs that it takes."""

    make: Callable[[], nn.Module]
    shapes: tuple[tuple[int, ...], ...]
    """Of one sample each, without the batch; an empty one is an integer per sample (a time step)."""
    note: str = ""
    dtype: torch.dtype = torch.float64
    """Some make tensors in float32 whatever their weights are."""
    draws: bool = False
    """Whether its forward draws random numbers even without dropout."""

    def build(self) -> nn.Module:
        """Make the network from a fixed seed."""
        torch.manual_seed(0)
        net = self.make().to(self.dtype)
        for module in net.modules():
            if isinstance(module, DROPOUTS):
                module.p = 0.0  # MONAI's V-Net drops half of its last levels whatever it is told
        return net

    def inputs(self, batch: int = 1, seed: int = 1) -> tuple[Tensor, ...]:
        """Make one tensor per shape: normal numbers, or time steps."""
        generator = torch.Generator().manual_seed(seed)
        return tuple(
            torch.randn(batch, *shape, generator=generator, dtype=self.dtype)
            if shape
            else torch.randint(0, 100, (batch,), generator=generator)
            for shape in self.shapes
        )


def case(make: Callable[..., nn.Module], side: int | tuple[int, ...], *args: Any, **options: Any) -> Case:
    """Return the case of a network of one volume with one channel."""
    sides = (side,) * 3 if isinstance(side, int) else side
    return Case(make=lambda: make(*args, **options), shapes=((1, *sides),))


def dynunet(**options: Any) -> nn.Module:
    return nets.DynUNet(3, 1, 2, [3, 3, 3], [1, 2, 2], [2, 2], filters=[4, 6, 8], **options)


def unet(**options: Any) -> nn.Module:
    return nets.UNet(3, 1, 2, (4, 6, 8), (2, 2), **options)


def swin(**options: Any) -> nn.Module:
    small: dict[str, Any] = {"depths": (1, 1, 1, 1), "num_heads": (1, 1, 1, 1), "feature_size": 12, "window_size": 2}
    return nets.SwinUNETR(1, 2, patch_size=2, **small, **options)


def unetr(**options: Any) -> nn.Module:
    return nets.UNETR(1, 2, (16, 16, 16), feature_size=2, hidden_size=12, mlp_dim=16, num_heads=2, **options)


def diffusion(make: Callable[..., nn.Module] = nets.DiffusionModelUNet, **options: Any) -> nn.Module:
    """Make a diffusion network; its last convolution begins at zero, which would hide everything before it."""
    net = make(3, 1, 1, **_diffusion(), **options)
    nn.init.normal_(net.out[-1].conv.weight, std=0.1)
    return net


def _diffusion() -> dict[str, Any]:
    return {
        "num_res_blocks": 1,
        "channels": (4, 8),
        "attention_levels": (False, True),
        "norm_num_groups": 2,
        "num_head_channels": 4,
    }


def controlnet() -> nn.Module:
    net = nets.ControlNet(
        3, 1, conditioning_embedding_in_channels=1, conditioning_embedding_num_channels=(4,), **_diffusion()
    )
    for parameter in net.parameters():
        if not parameter.any():
            nn.init.normal_(parameter, std=0.1)  # its outputs begin at zero
    return net


AUTOENCODER: dict[str, Any] = {
    "num_res_blocks": 1,
    "channels": (4, 8),
    "attention_levels": (False, False),
    "latent_channels": 2,
    "norm_num_groups": 2,
}
VECTOR_QUANTISED: dict[str, Any] = {
    "channels": (4, 4),
    "num_res_layers": 1,
    "num_res_channels": (4, 4),
    "downsample_parameters": ((2, 4, 1, 1),) * 2,
    "upsample_parameters": ((2, 4, 1, 1, 0),) * 2,
    "num_embeddings": 8,
    "embedding_dim": 4,
}
MAE: dict[str, Any] = {
    "hidden_size": 12,
    "mlp_dim": 16,
    "num_layers": 1,
    "num_heads": 2,
    "decoder_hidden_size": 12,
    "decoder_mlp_dim": 16,
    "decoder_num_layers": 1,
    "decoder_num_heads": 2,
}
VIT: dict[str, Any] = {"hidden_size": 12, "mlp_dim": 16, "num_layers": 2, "num_heads": 2}
SENET: dict[str, Any] = {"spatial_dims": 3, "in_channels": 1, "layers": (1, 1, 1, 1), "num_classes": 2}
MEDNEXT: dict[str, Any] = {
    "init_filters": 4,
    "kernel_size": 3,
    "blocks_down": (1, 1),
    "blocks_bottleneck": 1,
    "blocks_up": (1, 1),
    "encoder_expansion_ratio": (2, 2),
    "decoder_expansion_ratio": (2, 2),
}
HIGHRES = (
    {"name": "conv_0", "n_features": 4, "kernel_size": 3},
    {"name": "res_1", "n_features": 4, "kernels": (3, 3), "repeat": 1},
    {"name": "res_2", "n_features": 6, "kernels": (3, 3), "repeat": 1},
    {"name": "conv_1", "n_features": 8, "kernel_size": 1},
    {"name": "conv_2", "kernel_size": 1},
)


def dints() -> nn.Module:
    return DiNTS(TopologyInstance(channel_mul=0.2, num_blocks=6, num_depths=3), 1, 2)


def dints_search() -> nn.Module:
    return DiNTS(TopologySearch(channel_mul=0.2, num_blocks=2, num_depths=2), 1, 2)


def spade() -> nn.Module:
    return nets.SPADENet(3, 1, 1, 2, [8, 8, 8], [4, 4], is_vae=False, norm="INSTANCE")


def resnet(make: Callable[..., nn.Module], **options: Any) -> nn.Module:
    return make(spatial_dims=3, n_input_channels=1, num_classes=2, widen_factor=0.1, **options)


class _Called(nn.Module):
    """Calls a network with further arguments by name."""

    def __init__(self, net: nn.Module, **further: Any) -> None:
        super().__init__()
        self.net, self.further = net, further

    def forward(self, x: Tensor) -> Any:
        return self.net(x, **self.further)


class _Listed(nn.Module):
    """Calls a network with one group of volumes, those of the batch."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Any:
        return self.net([list(x)])


def cube(side: int, channels: int = 1) -> tuple[int, ...]:
    return (channels, side, side, side)


UNETS = {
    "UNet": case(unet, 8),
    "UNet, residual": case(unet, 8, num_res_units=2),
    "UNet, batch norm": case(unet, 8, norm="BATCH", num_res_units=1),
    "UNet, group norm": case(unet, 8, norm=("GROUP", {"num_groups": 2}), act="RELU"),
    "UNet, no norm": case(unet, 8, norm=None, act="GELU"),
    "UNet, kernel 5": case(unet, 8, kernel_size=5, up_kernel_size=5),
    "BasicUNet": case(nets.BasicUNet, OBLONG, 3, 1, 2, (4, 4, 6, 6, 8, 4)),
    "BasicUNet, batch norm": case(nets.BasicUNet, OBLONG, 3, 1, 2, (4, 4, 6, 6, 8, 4), norm="batch"),
    "BasicUNet, interpolating": case(nets.BasicUNet, OBLONG, 3, 1, 2, (4, 4, 6, 6, 8, 4), upsample="nontrainable"),
    "BasicUNet, pixel shuffle": case(nets.BasicUNet, OBLONG, 3, 1, 2, (4, 4, 6, 6, 8, 4), upsample="pixelshuffle"),
    "BasicUNet, odd size": case(nets.BasicUNet, (33, 18, 19), 3, 1, 2, (4, 4, 6, 6, 8, 4)),
    "BasicUNet++": case(nets.BasicUNetPlusPlus, OBLONG, 3, 1, 2, (4, 4, 6, 6, 8, 4)),
    "BasicUNet++, supervised": case(nets.BasicUNetPlusPlus, OBLONG, 3, 1, 2, (4, 4, 6, 6, 8, 4), deep_supervision=True),
    "AttentionUnet": case(nets.AttentionUnet, 8, 3, 1, 2, (4, 6, 8), (2, 2)),
    "DynUNet": case(dynunet, 8),
    "DynUNet, residual": case(dynunet, 8, res_block=True),
    "DynUNet, supervised": case(dynunet, 8, deep_supervision=True, deep_supr_num=1),
    "DynUNet, batch norm": case(dynunet, 8, norm_name="batch", trans_bias=True),
    "VNet": case(nets.VNet, 16, 3, 1, 2, dropout_prob_down=0.0, dropout_prob_up=(0.0, 0.0)),
    "SegResNet": case(nets.SegResNet, 8, 3, 8, 1, 2, blocks_down=(1, 1), blocks_up=(1,)),
    "SegResNet, batch norm": case(nets.SegResNet, 8, 3, 4, 1, 2, norm="BATCH", blocks_down=(1, 1), blocks_up=(1,)),
    "SegResNet, transposed": case(
        nets.SegResNet, 8, 3, 8, 1, 2, blocks_down=(1, 1), blocks_up=(1,), upsample_mode="deconv"
    ),
    "SegResNet, pixel shuffle": case(
        nets.SegResNet, 8, 3, 8, 1, 2, blocks_down=(1, 1), blocks_up=(1,), upsample_mode="pixelshuffle"
    ),
    "SegResNetDS": case(nets.SegResNetDS, 8, 3, 4, 1, 2, blocks_down=(1, 1, 1), dsdepth=2),
    "SegResNetDS, instance norm": case(nets.SegResNetDS, 8, 3, 4, 1, 2, norm="instance", blocks_down=(1, 1, 1)),
    "SegResNetDS, anisotropic": case(
        nets.SegResNetDS, (8, 8, 4), 3, 4, 1, 2, blocks_down=(1, 1, 1), resolution=(1.0, 1.0, 3.0)
    ),
    "SegResNetDS2": case(nets.SegResNetDS2, 8, 3, 4, 1, 2, blocks_down=(1, 1, 1), dsdepth=2),
    "SegResNetVAE": Case(
        make=lambda: nets.SegResNetVAE((16, 16, 16), vae_nz=4, init_filters=8, blocks_down=(1, 1, 1), blocks_up=(1, 1)),
        shapes=(cube(16),),
        note="returns its VAE loss, a mean over the batch, beside the logits; draws a latent vector",
        draws=True,
    ),
    "MedNeXt": case(nets.MedNeXt, 8, **MEDNEXT),
    "MedNeXt, supervised": case(nets.MedNeXt, 8, **MEDNEXT, deep_supervision=True, use_residual_connection=True),
    "MedNeXt, kernel 5, global response norm": case(
        nets.MedNeXt, 8, **{**MEDNEXT, "kernel_size": 5}, global_resp_norm=True
    ),
    "FlexibleUNet, resnet10": case(
        nets.FlexibleUNet, 32, 1, 2, "resnet10", decoder_channels=(8, 6, 4, 4, 4), spatial_dims=3
    ),
    "FlexibleUNet, efficientnet-b0": case(
        nets.FlexibleUNet, 32, 1, 2, "efficientnet-b0", decoder_channels=(8, 6, 4, 4, 4), spatial_dims=3
    ),
    "AHNet": case(nets.AHNet, 32, (1, 1, 1, 1), psp_block_num=0, upsample_mode="transpose"),
    "AHNet, trilinear": case(nets.AHNet, 32, (1, 1, 1, 1), psp_block_num=0, upsample_mode="trilinear"),
    "AHNet, pyramid": case(nets.AHNet, 32, (1, 1, 1, 1), psp_block_num=1, upsample_mode="nearest"),
    "HighResNet": case(nets.HighResNet, 8, 3, 1, 2, layer_params=HIGHRES),
    "HighResBlock": case(nets.HighResBlock, 8, 3, 1, 4, dilation=2),
    "DiNTS": case(dints, 16),
    "DiNTS, search": case(dints_search, 16),
    "RegUNet": case(nets.RegUNet, 8, 3, 1, 4, 2),
    "RegUNet, concatenating": case(nets.RegUNet, 8, 3, 1, 4, 2, concat_skip=True, pooling=False),
    "LocalNet": case(nets.LocalNet, 8, 3, 1, 4, (0, 1)),
    "LocalNet, transposed": case(nets.LocalNet, 8, 3, 1, 4, (0, 1), use_additive_sampling=False, concat_skip=True),
    "GlobalNet": Case(make=lambda: nets.GlobalNet([8, 8, 8], 3, 1, 4, 2), shapes=(cube(8),), dtype=torch.float32),
    "VoxelMorphUNet": Case(make=lambda: nets.VoxelMorphUNet(3, 2, 4, (4, 4, 4, 4), (4,)), shapes=(cube(8, 2),)),
    "VoxelMorph": Case(
        make=lambda: nets.VoxelMorph(nets.VoxelMorphUNet(3, 2, 4, (4, 4, 4, 4), (4,)), integration_steps=2),
        shapes=(cube(8), cube(8)),
    ),
    "Restormer": case(Restormer, 16, 3, 1, 2, dim=4, num_blocks=(1, 1), heads=(1, 2), num_refinement_blocks=1),
    "Restormer, flash attention": case(
        Restormer, 16, 3, 1, 2, dim=4, num_blocks=(1, 1), heads=(1, 2), num_refinement_blocks=1, flash_attention=True
    ),
    "VISTA3D": Case(
        make=lambda: _Called(vista3d132(encoder_embed_dim=8, in_channels=1), class_vector=torch.tensor([[1], [2]])),
        shapes=(cube(32),),
        note="one volume at a time; its output has the classes as dimension 0",
    ),
}

TRANSFORMERS = {
    "UNETR": case(unetr, 16),
    "UNETR, perceptron patches": case(unetr, 16, proj_type="perceptron"),
    "SwinUNETR": case(swin, (64, 32, 32)),
    "SwinUNETR, v2": case(swin, (64, 32, 32), use_v2=True),
    "SwinUNETR, checkpointed": case(swin, (64, 32, 32), use_checkpoint=True),
    "SwinUNETR, merging v2": case(swin, (64, 32, 32), downsample="mergingv2"),
    "ViT": case(nets.ViT, 8, 1, (8, 8, 8), (4, 4, 4), **VIT),
    "ViT, classifying": case(nets.ViT, 8, 1, (8, 8, 8), (4, 4, 4), **VIT, classification=True),
    "ViT, attention kept": case(nets.ViT, 8, 1, (8, 8, 8), (4, 4, 4), **VIT, save_attn=True),
    "ViTAutoEnc": case(nets.ViTAutoEnc, 16, 1, (16, 16, 16), (4, 4, 4), deconv_chns=4, **VIT),
    "MaskedAutoEncoderViT": Case(
        make=lambda: nets.MaskedAutoEncoderViT(1, (8, 8, 8), (4, 4, 4), **MAE),
        shapes=(cube(8),),
        note="draws which patches it hides",
        draws=True,
    ),
    "NaViT": Case(
        make=lambda: _Listed(nets.NaViT(8, 4, 2, 12, 16, 1, 2)), shapes=(cube(8),), note="takes a list of volumes"
    ),
}

GENERATIVE = {
    "AutoEncoder": case(nets.AutoEncoder, 8, 3, 1, 1, (4, 6), (2, 2)),
    "AutoEncoder, intermediate layers": case(
        nets.AutoEncoder, 8, 3, 1, 1, (4, 6), (2, 2), num_res_units=1, inter_channels=[6, 6], inter_dilations=[1, 2]
    ),
    "VarAutoEncoder": Case(
        make=lambda: nets.VarAutoEncoder(3, (1, 8, 8, 8), 1, 3, (4, 6), (2, 2)),
        shapes=(cube(8),),
        note="draws a latent vector",
        draws=True,
    ),
    "VarAutoEncoder, the mean": Case(
        make=lambda: nets.VarAutoEncoder(3, (1, 8, 8, 8), 1, 3, (4, 6), (2, 2), use_mean_at_inference=True).eval(),
        shapes=(cube(8),),
        note="draws nothing in eval mode",
    ),
    "AutoencoderKL": Case(
        make=lambda: nets.AutoencoderKL(
            3, **AUTOENCODER, with_encoder_nonlocal_attn=False, with_decoder_nonlocal_attn=False
        ),
        shapes=(cube(8),),
        note="draws a latent volume",
        draws=True,
    ),
    "AutoencoderKL, attention": Case(
        make=lambda: nets.AutoencoderKL(3, **AUTOENCODER), shapes=(cube(8),), note="draws a latent volume", draws=True
    ),
    "SPADEAutoencoderKL": Case(
        make=lambda: nets.SPADEAutoencoderKL(3, 2, **AUTOENCODER),
        shapes=(cube(8), cube(8, 2)),
        note="draws a latent volume",
        draws=True,
    ),
    "VQVAE": Case(
        make=lambda: nets.VQVAE(3, 1, 1, **VECTOR_QUANTISED),
        shapes=(cube(8),),
        note="returns its quantisation loss, a mean over the batch; updates its codebook in training",
        dtype=torch.float32,
    ),
    "VQVAE, evaluated": Case(
        make=lambda: nets.VQVAE(3, 1, 1, **VECTOR_QUANTISED).eval(),
        shapes=(cube(8),),
        note="returns its quantisation loss, a mean over the batch",
        dtype=torch.float32,
    ),
    "DiffusionModelUNet": Case(make=diffusion, shapes=(cube(8), ())),
    "DiffusionModelUNet, conditioned": Case(
        make=lambda: diffusion(with_conditioning=True, cross_attention_dim=6), shapes=(cube(8), (), (3, 6))
    ),
    "DiffusionModelUNet, residual resampling": Case(make=lambda: diffusion(resblock_updown=True), shapes=(cube(8), ())),
    "SPADEDiffusionModelUNet": Case(
        make=lambda: _spade_diffusion(), shapes=(cube(8), (), cube(8, 2)), note="seg is passed by name"
    ),
    "ControlNet": Case(make=controlnet, shapes=(cube(8), (), cube(8))),
    "SPADENet": Case(make=spade, shapes=(cube(8, 2),)),
}


class _SpadeDiffusion(nn.Module):
    """MONAI's network with its label volume as third argument."""

    def __init__(self) -> None:
        super().__init__()
        self.net = diffusion(nets.SPADEDiffusionModelUNet, label_nc=2)

    def forward(self, x: Tensor, steps: Tensor, label: Tensor) -> Tensor:
        return self.net(x, steps, label)


def _spade_diffusion() -> nn.Module:
    return _SpadeDiffusion()


PATCH: dict[str, Any] = {"channels": 4, "in_channels": 1}

CLASSIFIERS = {
    "ResNet10": case(resnet, 16, resnet10),
    "ResNet18": case(resnet, 16, resnet18),
    "ResNet50": case(resnet, 16, resnet50),
    "ResNet10, shortcut A": case(resnet, 16, resnet10, shortcut_type="A", bias_downsample=False),
    "ResNetFeatures": case(nets.ResNetFeatures, 32, "resnet10", pretrained=False, spatial_dims=3, in_channels=1),
    "DenseNet": case(nets.DenseNet, 32, 3, 1, 2, 4, 4, (1, 1, 1, 1)),
    "DenseNet121": case(nets.DenseNet121, 32, 3, 1, 2, init_features=4, growth_rate=2),
    "SEResNet50": case(nets.SEResNet50, 32, **SENET),
    "SEResNeXt50": case(nets.SEResNext50, 32, **SENET),
    "EfficientNetBN": case(
        nets.EfficientNetBN, 32, "efficientnet-b0", False, spatial_dims=3, in_channels=1, num_classes=2
    ),
    "EfficientNetBNFeatures": case(
        nets.EfficientNetBNFeatures, 32, "efficientnet-b0", False, spatial_dims=3, in_channels=1, num_classes=2
    ),
    "Classifier": case(nets.Classifier, 8, (1, 8, 8, 8), 2, (4, 6), (2, 2)),
    "Regressor": case(nets.Regressor, 8, (1, 8, 8, 8), (2,), (4, 6), (2, 2)),
    "Discriminator": case(nets.Discriminator, 8, (1, 8, 8, 8), (4, 6), (2, 2), dropout=None),
    "Critic": case(nets.Critic, 8, (1, 8, 8, 8), (4, 6), (2, 2), dropout=None),
    "Generator": Case(make=lambda: nets.Generator((6,), (4, 4, 4, 4), (4, 1), (2, 1)), shapes=((6,),)),
    "PatchDiscriminator": case(nets.PatchDiscriminator, 16, 3, num_layers_d=2, **PATCH),
    "MultiScalePatchDiscriminator": case(
        nets.MultiScalePatchDiscriminator, 32, num_d=2, num_layers_d=1, spatial_dims=3, minimum_size_im=32, **PATCH
    ),
}

NETWORKS: dict[str, Case] = {**UNETS, **TRANSFORMERS, **GENERATIVE, **CLASSIFIERS}
