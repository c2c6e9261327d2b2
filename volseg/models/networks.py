"""Networks by name: those of ``monai.networks.nets``, with defaults where MONAI asks for a choice.

The number of channels and classes follow from the data, and a volume has three dimensions; everything else is the
network's own parameter. A DynUNet or ResEncUNet is planned for the patch as nnU-Net would; see `plan_topology`.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from monai.networks import nets
from torch import nn

from volseg.config.registry import Registry
from volseg.errors import ConfigError
from volseg.models.deep_supervision import DynUNet
from volseg.models.residual_encoder import ENCODER_BLOCKS, ResEncUNet
from volseg.models.topology import plan_topology
from volseg.models.vnet import VNet

__all__ = ["NETWORKS", "build_network"]

_DATA = ("in_channels", "out_channels")


def _image_to_image() -> dict[str, Callable[..., nn.Module]]:
    """Return what of ``monai.networks.nets`` is built from a number of input and of output channels."""
    found: dict[str, Callable[..., nn.Module]] = {}
    for name, member in vars(nets).items():
        is_network = inspect.isclass(member) and issubclass(member, nn.Module)
        if not (is_network and member.__name__ == name):  # an alias: BasicUnet, Basicunet, basicunet
            continue
        if all(parameter in inspect.signature(member).parameters for parameter in _DATA):
            found[name] = member
    # MedNeXt's published sizes are functions that pass everything on to the class.
    sizes = {f"MedNeXt{size}": getattr(nets, f"MedNeXt{size}") for size in "SBML"}
    return found | sizes | {"DynUNet": DynUNet, "ResEncUNet": ResEncUNet, "VNet": VNet}


NETWORKS = Registry("network", _image_to_image())
"""Name to class; a network of the user's own joins by ``NETWORKS.register(name, component)``."""


def build_network(
    spec: Mapping[str, Any],
    *,
    in_channels: int,
    out_channels: int,
    patch_size: Sequence[int] | None = None,
) -> nn.Module:
    """Build the network that ``spec`` names.

    Parameters
    ----------
    spec : mapping
        ``name`` and the network's own parameters.
    in_channels, out_channels : int
        Channels of the image, classes of the label.
    patch_size : sequence of int, optional
        D, H, W of a training patch; plans a U-Net's strides and UNETR's grid where ``spec`` does not give them.

    Raises
    ------
    ConfigError
        For an unknown name or parameter (with the nearest known ones), and for parameters that the network refuses.

    Examples
    --------
    >>> build_network({"name": "VNet", "dropout_prob_down": None}, in_channels=1, out_channels=3).__class__.__name__
    'VNet'
    >>> build_network({"name": "VNet", "droput_prob": 0.1}, in_channels=1, out_channels=3)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    volseg.errors.ConfigError: network VNet has no parameter 'droput_prob'; did you mean 'dropout_prob_...
    """
    NETWORKS.check(spec)
    name = spec["name"]
    fixed = {"in_channels": in_channels, "out_channels": out_channels}
    if NETWORKS.accepts(name, "spatial_dims"):
        fixed["spatial_dims"] = 3
    defaults = _DEFAULTS[name](spec, patch_size) if name in _DEFAULTS else {}
    return NETWORKS.build({**defaults, **spec}, **fixed)


def _five_levels(spec: Mapping[str, Any], patch_size: Sequence[int] | None) -> dict[str, Any]:  # noqa: ARG001
    """Five levels of 16 to 256 channels, as in MONAI's tutorials."""
    channels = spec.get("channels", (16, 32, 64, 128, 256))
    return {"channels": channels, "strides": (2,) * (len(channels) - 1)}


def _residual_unet(spec: Mapping[str, Any], patch_size: Sequence[int] | None) -> dict[str, Any]:
    return {**_five_levels(spec, patch_size), "num_res_units": 2}


def _planned(spec: Mapping[str, Any], patch_size: Sequence[int] | None) -> dict[str, Any]:
    """Plan as nnU-Net does, or complete the strides that the user gave."""
    if "strides" in spec:
        strides = spec["strides"]
        kernels: Sequence[Any] = [3] * len(strides)
        filters = [min(32 * 2**stage, 320) for stage in range(len(strides))]
    elif patch_size is not None:
        topology = plan_topology(patch_size)
        strides, kernels, filters = topology.strides, topology.kernels, list(topology.filters)
    else:
        raise ConfigError(f"network {spec['name']}: its strides are planned for the patch; give patch_size, or strides")
    defaults = {
        "strides": strides,
        "kernel_size": kernels,
        "upsample_kernel_size": strides[1:],
        "filters": filters,
    }
    if spec.get("deep_supervision"):
        # nnU-Net gives every decoder stage a head and the coarsest one no weight, so it needs none.
        defaults["deep_supr_num"] = max(1, len(strides) - 3)
    return defaults


def _planned_residual(spec: Mapping[str, Any], patch_size: Sequence[int] | None) -> dict[str, Any]:
    """Plan as nnU-Net does, with its numbers of residual blocks."""
    planned = _planned({key: value for key, value in spec.items() if key != "deep_supervision"}, patch_size)
    del planned["upsample_kernel_size"]
    return {**planned, "blocks": ENCODER_BLOCKS[: len(planned["strides"])]}


def _fixed_grid(spec: Mapping[str, Any], patch_size: Sequence[int] | None) -> dict[str, Any]:  # noqa: ARG001
    """UNETR learns one embedding per 16 x 16 x 16 block, so its grid is fixed: the patch, padded to whole blocks."""
    if patch_size is None:
        raise ConfigError("network UNETR: its grid is fixed when it is built; give patch_size, or img_size")
    return {"img_size": tuple(-(-side // 16) * 16 for side in patch_size)}


_DEFAULTS: dict[str, Callable[[Mapping[str, Any], Sequence[int] | None], dict[str, Any]]] = {
    "UNet": _residual_unet,
    "AttentionUnet": _five_levels,
    "DynUNet": _planned,
    "ResEncUNet": _planned_residual,
    "UNETR": lambda spec, patch_size: {} if "img_size" in spec else _fixed_grid(spec, patch_size),
}
