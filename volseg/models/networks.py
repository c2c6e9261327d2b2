"""Build networks by name: those of ``monai.networks.nets``, with defaults for parameters that MONAI requires.

The numbers of channels and classes follow from the data, and a volume has three dimensions; everything else is the
network's own parameter. A DynUNet or ResEncUNet is planned for the patch and its spacing as in nnU-Net; see
`plan_topology`.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from monai.networks import nets
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from volseg.config.base import list_values
from volseg.config.registry import Registry
from volseg.errors import ConfigError
from volseg.memory import available_bytes
from volseg.models.residual_encoder import ENCODER_BLOCKS, PlainConvUNet, ResEncUNet
from volseg.models.topology import FIRST_FILTERS, MOST_FILTERS, plan_topology
from volseg.models.vnet import VNet

LARGEST = 1 << 16
"""Largest whole number in the parameters of networks of volseg and MONAI: channels, blocks, sides."""

MOST_TENSORS = 5_000
"""Most parameters and buffers of a network; MONAI's largest, a FlexibleUNet of ResNet-200, has 1,288."""

FACTORIES = (torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn)
"""Torch functions that modules call to create their parameters."""

_DATA = ("in_channels", "out_channels")

ISOTROPIC = (1.0, 1.0, 1.0)
"""Equal voxel sides; a plan depends only on their ratios."""


OFFERED = (
    *("AHNet", "AttentionUnet", "BasicUNet", "BasicUNetPlusPlus", "FlexibleUNet", "HighResNet"),
    *("MedNeXt", "MedNeXtS", "MedNeXtB", "MedNeXtM", "MedNeXtL"),
    *("SegResNet", "SegResNetDS", "SwinUNETR", "UNETR", "UNet"),
)
"""Networks of ``monai.networks.nets`` that map an image to logits on its grid, without further packages.

The others classify, reconstruct, generate, register or discriminate images, need more than an image, return more than
logits, or need further packages (DAF3D, HyenaNDUNETR); every network with channels was tried.
"""


class DynUNet(nets.DynUNet):
    """MONAI's DynUNet; returns ``[logits, coarser logits, ...]`` while training with deep supervision.

    MONAI's own ``forward`` resizes every head to the full grid and stacks them as (B, 1 + heads, K, D, H, W), for
    TorchScript. `monai.losses.DeepSupervisionLoss` takes a list, finest first, and resamples the label to each head's
    grid. So the heads stay coarse here: less memory, and an eighth of the loss's work per level. The parameters and
    their names are MONAI's.
    """

    def forward(self, x: Tensor) -> Tensor | list[Tensor]:
        """Return logits (B, K, D, H, W), or the list of them, (B, K, D, H, W) / 2, / 4, ... after the first."""
        logits = self.output_block(self.skip_layers(x))
        if not (self.training and self.deep_supervision):
            return logits
        outputs = [logits, *self.heads]
        # The list belongs to the module: a head that stays in it keeps this step's graph alive until the next step.
        self.heads[:] = [None] * len(self.heads)
        return outputs


NETWORKS = Registry(
    "network",
    {
        **{name: getattr(nets, name) for name in OFFERED},
        "DynUNet": DynUNet,
        "PlainConvUNet": PlainConvUNet,
        "ResEncUNet": ResEncUNet,
        "VNet": VNet,
    },
)
"""Classes by name; add a custom network with ``volseg.register("network", name, component)``."""


def build_network(
    spec: Mapping[str, Any],
    *,
    in_channels: int,
    out_channels: int,
    patch_size: Sequence[int] | None = None,
    spacing: Sequence[float] = ISOTROPIC,
) -> nn.Module:
    """Build the network that ``spec`` names.

    Parameters
    ----------
    spec : mapping
        ``name`` and the network's own parameters.
    in_channels, out_channels : int
        Channels of the image, classes of the label.
    patch_size : sequence of int, optional
        D, H, W of a training patch; determines a U-Net's strides and UNETR's grid if ``spec`` does not.
    spacing : sequence of float
        The patch's voxel sides along D, H, W in mm; a U-Net neither halves nor convolves across thick slices early.

    Raises
    ------
    ConfigError
        For an unknown name or parameter (with the nearest known ones), for parameters that the network refuses, and
        for a network that does not fit into memory.

    Examples
    --------
    >>> build_network({"name": "VNet", "dropout_prob_down": None}, in_channels=1, out_channels=3).__class__.__name__
    'VNet'
    >>> build_network({"name": "VNet", "droput_prob": 0.1}, in_channels=1, out_channels=3)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    volseg.errors.ConfigError: network VNet has no parameter 'droput_prob'; did you mean 'dropout_prob_...
    """
    fixed = {"in_channels": in_channels, "out_channels": out_channels}
    completed = complete_spec(spec, patch_size=patch_size, spacing=spacing)
    name = spec["name"]
    for parameter in _DATA:
        if not NETWORKS.accepts(name, parameter):
            raise ConfigError(f"network {name} must accept {' and '.join(_DATA)} (set from the data) as keywords")
    if NETWORKS.accepts(name, "spatial_dims"):
        fixed["spatial_dims"] = 3
    # A custom network may create any number of tensors and drop them.
    is_bounded = NETWORKS.get_source(name) is None
    large = [value for value in list_values(completed) if isinstance(value, int) and abs(value) > LARGEST]
    if large and is_bounded:
        raise ConfigError(f"network {name} supports whole numbers up to {LARGEST}, got {large[0]}")
    with _ParameterBudget() if is_bounded else nullcontext():
        network = NETWORKS.build(completed, **fixed)
    if not isinstance(network, nn.Module):
        raise ConfigError(f"network {name} must build a torch.nn.Module, got a {type(network).__name__}")
    return network


class _ParameterBudget(TorchFunctionMode):
    """Count the tensors that modules create, and raise `ConfigError` before memory runs out."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = available_bytes() // 2  # the other half is for loading weights
        self.num_tensors = MOST_TENSORS

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a torch function; first count its result on the meta device, which needs no memory."""
        del types
        kwargs = kwargs or {}
        if func in FACTORIES:
            self.num_bytes -= func(*args, **{**kwargs, "device": "meta"}).nbytes
            self.num_tensors -= 1
            if self.num_bytes < 0:
                raise ConfigError(
                    "its parameters do not fit into half of the free memory; choose fewer channels or stages"
                )
            if self.num_tensors < 0:
                raise ConfigError(f"it has more than {MOST_TENSORS} parameters and buffers; choose fewer blocks")
        return func(*args, **kwargs)


def complete_spec(
    spec: Mapping[str, Any], *, patch_size: Sequence[int] | None = None, spacing: Sequence[float] = ISOTROPIC
) -> dict[str, Any]:
    """Return ``spec`` with every parameter that follows from the patch, so that it builds the same network without one.

    Parameters
    ----------
    spec, patch_size, spacing
        As for `build_network`.

    Raises
    ------
    ConfigError
        For an unknown name or parameter, and for a patch without a plan.

    Examples
    --------
    >>> prostate = complete_spec({"name": "DynUNet"}, patch_size=(320, 256, 20), spacing=(0.62, 0.62, 3.6))
    >>> prostate["kernel_size"][:3], prostate["strides"][:3]
    (((3, 3, 1), (3, 3, 1), (3, 3, 3)), ((1, 1, 1), (2, 2, 1), (2, 2, 1)))
    """
    NETWORKS.check(spec)
    name = spec["name"]
    try:
        defaults = _DEFAULTS[name](spec, patch_size, spacing) if name in _DEFAULTS else {}
    except (TypeError, ValueError) as fault:  # a parameter has the wrong type, such as a number instead of a list
        given = {key: value for key, value in spec.items() if key != "name"}
        raise ConfigError(f"network {name} refused {given}: {fault}") from fault
    return {**defaults, **spec}


def _five_levels(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return five levels of 16 to 256 channels, as in MONAI's tutorials."""
    channels = spec.get("channels", (16, 32, 64, 128, 256))
    return {"channels": channels, "strides": (2,) * (len(channels) - 1)}


def _planned(spec: Mapping[str, Any], patch_size: Sequence[int] | None, spacing: Sequence[float]) -> dict[str, Any]:
    """Plan as nnU-Net does, or complete the strides that the user gave."""
    if "strides" in spec:
        strides = spec["strides"]
        kernels: Sequence[Any] = [3] * len(strides)
        filters = [min(FIRST_FILTERS * 2**stage, MOST_FILTERS) for stage in range(len(strides))]
    elif patch_size is not None:
        topology = plan_topology(patch_size, spacing)
        strides, kernels, filters = topology.strides, topology.kernels, list(topology.filters)
    else:
        raise ConfigError(f"network {spec['name']}: its strides are planned for the patch; pass patch_size or strides")
    defaults = {"strides": strides, "kernel_size": kernels, "upsample_kernel_size": strides[1:], "filters": filters}
    if spec.get("deep_supervision"):
        # nnU-Net's coarsest head has no weight in the loss, so that stage needs no head.
        defaults["deep_supr_num"] = max(1, len(strides) - 3)
    return defaults


def _planned_blocks(
    spec: Mapping[str, Any], patch_size: Sequence[int] | None, spacing: Sequence[float]
) -> dict[str, Any]:
    """Plan as nnU-Net does, with its numbers of blocks."""
    planned = _planned({key: value for key, value in spec.items() if key != "deep_supervision"}, patch_size, spacing)
    del planned["upsample_kernel_size"]
    if spec["name"] == "PlainConvUNet":
        return {**planned, "blocks": (2,) * len(planned["strides"]), "decoder_blocks": 2}
    return {**planned, "blocks": ENCODER_BLOCKS[: len(planned["strides"])]}


def _fixed_grid(patch_size: Sequence[int] | None) -> dict[str, Any]:
    """Return UNETR's fixed grid: the patch, padded to whole blocks of 16 x 16 x 16, each with a learned embedding."""
    if patch_size is None:
        raise ConfigError("network UNETR: its grid is fixed when it is built; pass patch_size or img_size")
    return {"img_size": tuple(-(-side // 16) * 16 for side in patch_size)}


_DEFAULTS: dict[str, Callable[[Mapping[str, Any], Sequence[int] | None, Sequence[float]], dict[str, Any]]] = {
    "UNet": lambda spec, *_: {**_five_levels(spec), "num_res_units": 2},
    "AttentionUnet": lambda spec, *_: _five_levels(spec),
    "FlexibleUNet": lambda *_: {"backbone": "efficientnet-b0"},  # its smallest
    "DynUNet": _planned,
    "PlainConvUNet": _planned_blocks,
    "ResEncUNet": _planned_blocks,
    "UNETR": lambda spec, patch_size, _: {} if "img_size" in spec else _fixed_grid(patch_size),
}
