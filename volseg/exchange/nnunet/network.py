"""Rebuild nnU-Net's networks from volseg's, and rename their tensors.

The table of names follows from the network's structure, and must be complete: every tensor of the checkpoint has one
place, every place one tensor of the same shape. So weights of a network that is only similar are refused.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from volseg.errors import CheckpointError, ConfigError
from volseg.models.weights import get_tensor, strip_prefixes

NETWORKS = {"PlainConvUNet": "n_conv_per_stage", "ResidualEncoderUNet": "n_blocks_per_stage"}
"""Supported networks of nnU-Net, and the parameter with the blocks of each."""

MOST_STAGES = 32

FIXED: dict[str, tuple[Any, ...]] = {
    "conv_op": ("torch.nn.modules.conv.Conv3d", "torch.nn.Conv3d"),
    "norm_op": ("torch.nn.modules.instancenorm.InstanceNorm3d", "torch.nn.InstanceNorm3d"),
    "nonlin": ("torch.nn.LeakyReLU", "torch.nn.modules.activation.LeakyReLU"),
    "conv_bias": (True,),
    "dropout_op": (None,),
    "nonlin_first": (False,),
    "stem_channels": (None,),
    "bottleneck_channels": (None,),
}
"""Layers of these networks, as written in plans; another value means another network."""


def read_network(configuration: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the spec of volseg's network for a configuration, with all its parameters.

    Raises
    ------
    ConfigError
        For a network or layers that are not supported.
    """
    name, given = _read_architecture(configuration, where)
    if name not in NETWORKS:
        raise ConfigError(f"{where} names the network {name}; supported: {', '.join(NETWORKS)}")
    counts = NETWORKS[name]
    sizes = ("n_stages", "features_per_stage", "kernel_sizes", "strides", counts, "n_conv_per_stage_decoder")
    if missing := [key for key in sizes if key not in given]:
        raise ConfigError(f"{where} does not set {missing[0]} of the network {name}")
    optional = {"norm_op_kwargs", "nonlin_kwargs", "dropout_op_kwargs", "deep_supervision"}
    if strange := sorted(given.keys() - set(sizes) - FIXED.keys() - optional):
        raise ConfigError(f"{where} gives {name} the parameter {strange[0]!r}, which is not supported")
    for key, values in FIXED.items():
        if given.get(key, values[0] if key not in ("conv_bias", "norm_op", "nonlin") else None) not in values:
            raise ConfigError(f"{where} builds {name} with {key}: {given.get(key)!r}; supported: {values[0]}")
    norm, slope = given.get("norm_op_kwargs") or {}, given.get("nonlin_kwargs") or {}
    if {"eps": 1e-5, **norm} != {"eps": 1e-5, "affine": True} or {"inplace": True, **slope} != {"inplace": True}:
        raise ConfigError(
            f"{where} builds {name} with norm {norm} and activation {slope}; supported: an affine norm of "
            "eps 1e-5, and a leaky ReLU of slope 0.01"
        )
    stages = given["n_stages"]
    if type(stages) is not int or not 2 <= stages <= MOST_STAGES:
        raise ConfigError(f"{where} builds {name} with {stages!r} stages; needed: 2 to {MOST_STAGES}")
    spec: dict[str, Any] = {
        "name": "PlainConvUNet" if name == "PlainConvUNet" else "ResEncUNet",
        "strides": _repeat(given["strides"], stages),
        "kernel_size": _repeat(given["kernel_sizes"], stages),
        "filters": _repeat(given["features_per_stage"], stages),
        "blocks": _repeat(given[counts], stages),
        "decoder_blocks": _repeat(given["n_conv_per_stage_decoder"], stages - 1),
        "deep_supervision": True,  # during training
    }
    for key, of_stages in spec.items():
        count, kind = stages - (key == "decoder_blocks"), _is_size if key in ("strides", "kernel_size") else _is_count
        if key not in ("name", "deep_supervision") and not (len(of_stages) == count and all(map(kind, of_stages))):
            raise ConfigError(
                f"{where} builds {name} with {key} {of_stages!r:.200}; needed: {count} positive whole numbers"
            )
    # No tensor's shape depends on this stride, but the logits would be on a coarser grid than the image.
    if spec["strides"][0] not in (1, [1, 1, 1]):
        raise ConfigError(f"{where} builds {name} with a first stage of stride {spec['strides'][0]}; needed: 1")
    return spec


def _is_count(value: Any) -> bool:
    """Return whether a value is a positive whole number of 31 bits."""
    return type(value) is int and 0 < value < 2**31


def _is_size(value: Any) -> bool:
    """Return whether a value is a positive whole number, or three of them."""
    return all(map(_is_count, value)) if isinstance(value, list) and len(value) == 3 else _is_count(value)


def _read_architecture(configuration: Mapping[str, Any], where: str) -> tuple[str, dict[str, Any]]:
    """Return the network's name and arguments, from new plans or from those before nnU-Net 2.5."""
    if isinstance(new := configuration.get("architecture"), dict):
        arguments = new.get("arch_kwargs")
        if not isinstance(arguments, dict):
            raise ConfigError(f"{where} should contain architecture.arch_kwargs")
        return str(new.get("network_class_name")).rpartition(".")[2], dict(arguments)
    name = str(configuration.get("UNet_class_name"))
    old = ("n_conv_per_stage_encoder", "n_conv_per_stage_decoder", "conv_kernel_sizes", "pool_op_kernel_sizes")
    numbers = ("UNet_base_num_features", "unet_max_num_features")
    if missing := [key for key in (*old, *numbers) if key not in configuration]:
        raise ConfigError(f"{where} describes no network: it has neither architecture nor {missing[0]}")
    blocks, up, kernels, strides = (configuration[key] for key in old)
    base, most = (configuration[key] for key in numbers)
    if not (isinstance(blocks, list) and len(blocks) <= MOST_STAGES and _is_count(base) and _is_count(most)):
        raise ConfigError(
            f"{where} should list the convolutions of at most {MOST_STAGES} stages, and give "
            f"{' and '.join(numbers)} as whole numbers"
        )
    return name, {
        "n_stages": len(blocks),
        "features_per_stage": [min(base * 2**stage, most) for stage in range(len(blocks))],
        "kernel_sizes": kernels,
        "strides": strides,
        NETWORKS.get(name, "blocks"): blocks,
        "n_conv_per_stage_decoder": up,
        "conv_bias": True,
        "norm_op": FIXED["norm_op"][0],
        "nonlin": FIXED["nonlin"][0],
        "norm_op_kwargs": {"eps": 1e-5, "affine": True},
    }


def _repeat(value: Any, count: int) -> list[Any]:
    return [value] * count if isinstance(value, int) else list(value)


def rename_weights(weights: Mapping[str, Tensor], network: nn.Module, where: str) -> dict[str, Tensor]:
    """Rename nnU-Net's tensors to the names of ``network``, which was built from `read_network`'s spec.

    Raises
    ------
    CheckpointError
        If a tensor is missing or surplus, or has another shape or kind of number.
    """
    places = network.state_dict()
    last = sum(name.startswith("ups.") and name.endswith(".weight") for name in places) - 1
    table = dict(_pair_names(places, last))
    bare = strip_prefixes(weights, table.values())
    names: dict[str, list[str]] = {}
    for name in bare:
        names.setdefault(_resolve_alias(name), []).append(name)
    # Heads of deep supervision, including that of the coarsest stage, whose loss has no weight in nnU-Net.
    heads = {f"decoder.seg_layers.{stage}.{kind}" for stage in range(last) for kind in ("weight", "bias")}
    if missing := [name for name in table.values() if name not in names]:
        raise CheckpointError(f"{where} has no tensor {missing[0]!r}, which the network of its plans needs")
    if surplus := sorted(names.keys() - set(table.values()) - heads):
        raise CheckpointError(f"{where} has a tensor {surplus[0]!r}, which the network of its plans lacks")
    assert table.keys() == places.keys(), "the table covers the network"
    renamed = {}
    for ours, name in table.items():
        try:
            renamed[ours] = get_tensor(bare, names[name], places[ours])
        except CheckpointError as fault:
            raise CheckpointError(f"{where}: {fault}") from fault
        if renamed[ours].shape != places[ours].shape:
            raise CheckpointError(
                f"{where}: {name} has the shape {tuple(renamed[ours].shape)}; the network of its plans needs "
                f"{tuple(places[ours].shape)}"
            )
    return renamed


def _resolve_alias(name: str) -> str:
    """Return the first of a tensor's names: nnU-Net's modules register each layer twice, and the encoder again."""
    plain = name.removeprefix("decoder.") if name.startswith("decoder.encoder.") else name
    return plain.replace(".all_modules.0.", ".conv.").replace(".all_modules.1.", ".norm.")


def _pair_names(places: Iterable[str], last: int) -> Iterator[tuple[str, str]]:
    """Yield each of our names with nnU-Net's; ``last`` is the finest stage of the decoder, which has the head."""
    for ours in places:
        part, *rest = ours.split(".")
        match part, rest:
            case "stem", [layer, kind]:
                yield ours, f"encoder.stem.convs.0.{_layer(layer)}.{kind}"
            case "encoder", [stage, block, layer, kind]:  # plain
                yield ours, f"encoder.stages.{stage}.0.convs.{block}.{_layer(layer)}.{kind}"
            case "encoder", [stage, block, "first" | "second" as place, layer, kind]:
                number = 1 if place == "first" else 2
                yield ours, f"encoder.stages.{stage}.blocks.{block}.conv{number}.{_layer(layer)}.{kind}"
            case "encoder", [stage, block, "skip", place, layer, kind]:
                yield ours, f"encoder.stages.{stage}.blocks.{block}.skip.{place}.{_layer(layer)}.{kind}"
            case "ups", [stage, kind]:
                yield ours, f"decoder.transpconvs.{stage}.{kind}"
            case "decoder", [stage, block, layer, kind]:
                yield ours, f"decoder.stages.{stage}.convs.{block}.{_layer(layer)}.{kind}"
            case "heads", [number, kind]:  # the finest first here, the coarsest first there
                yield ours, f"decoder.seg_layers.{last - int(number)}.{kind}"


def _layer(number: str) -> str:
    return ("conv", "norm")[int(number)]
