"""The part of nnU-Net's plans that names a network; what runs nnU-Net from plans of its own imports it."""

from collections.abc import Sequence
from typing import Any


def describe_architecture(
    filters: Sequence[int],
    kernels: Sequence[Sequence[int]],
    strides: Sequence[Sequence[int]],
    *,
    blocks: Sequence[int] | None = None,
) -> dict[str, Any]:
    """Return the entry ``architecture`` of a configuration of nnU-Net's plans.

    Parameters
    ----------
    filters, kernels, strides
        Of each stage, axes in nnU-Net's order (z, y, x).
    blocks
        Of each stage of a residual encoder; without them it is the plain U-Net of two convolutions per stage.
    """
    kind, of_stages = (
        ("PlainConvUNet", "n_conv_per_stage") if blocks is None else ("ResidualEncoderUNet", "n_blocks_per_stage")
    )
    return {
        "network_class_name": f"dynamic_network_architectures.architectures.unet.{kind}",
        "arch_kwargs": {
            "n_stages": len(filters),
            "features_per_stage": list(filters),
            "conv_op": "torch.nn.modules.conv.Conv3d",
            "kernel_sizes": [list(kernel) for kernel in kernels],
            "strides": [list(stride) for stride in strides],
            of_stages: [2] * len(filters) if blocks is None else list(blocks),
            "n_conv_per_stage_decoder": [2 if blocks is None else 1] * (len(filters) - 1),
            "conv_bias": True,
            "norm_op": "torch.nn.modules.instancenorm.InstanceNorm3d",
            "norm_op_kwargs": {"eps": 1e-05, "affine": True},
            "dropout_op": None,
            "dropout_op_kwargs": None,
            "nonlin": "torch.nn.LeakyReLU",
            "nonlin_kwargs": {"inplace": True},
        },
        "_kw_requires_import": ["conv_op", "norm_op", "dropout_op", "nonlin"],
    }
