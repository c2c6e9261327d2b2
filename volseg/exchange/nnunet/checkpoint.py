"""Read from nnU-Net's checkpoints what a prediction needs."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from volseg.errors import CheckpointError
from volseg.exchange.torch_file import read_torch_file

__all__ = ["NnunetWeights", "read_checkpoint"]

AXES = (0, 1, 2)


@dataclass(frozen=True, kw_only=True, slots=True)
class NnunetWeights:
    """What a prediction needs of a checkpoint."""

    configuration: str
    trainer: str
    mirror_axes: tuple[int, ...]
    """Axes (0, 1, 2 are D, H, W as the network sees them) along which it may be mirrored."""
    weights: Mapping[str, Tensor]


def read_checkpoint(path: Path) -> NnunetWeights:
    """Read a checkpoint of nnU-Net 2.

    Raises
    ------
    CheckpointError
        If it is absent or damaged, holds more than tensors, plain values and numpy's numbers, or is another program's.
    """
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist; name the checkpoint by --checkpoint, or copy the whole folder")
    content = read_torch_file(path)
    wanted = ("network_weights", "init_args", "trainer_name")
    if not isinstance(content, dict) or any(key not in content for key in wanted):
        raise CheckpointError(f"{path} should hold {', '.join(wanted)}, as nnU-Net 2 writes; it is another program's")
    weights, arguments, axes = (content.get(key) for key in (*wanted[:2], "inference_allowed_mirroring_axes"))
    if not isinstance(weights, dict) or not all(isinstance(name, str) for name in weights):
        raise CheckpointError(f"{path}: network_weights should be named tensors, got {type(weights).__name__}")
    if strange := [name for name, value in weights.items() if not _is_stored(value)]:
        raise CheckpointError(
            f"{path}: network_weights.{strange[0]} should be a dense tensor, neither quantised nor expanded"
        )
    configuration = arguments.get("configuration") if isinstance(arguments, dict) else None
    if not isinstance(configuration, str):
        raise CheckpointError(f"{path}: init_args should name the configuration, got {configuration!r}")
    listed = axes if isinstance(axes, tuple | list) else () if axes is None else (axes,)
    if not all(type(axis) is int and axis in AXES for axis in listed):
        raise CheckpointError(f"{path}: inference_allowed_mirroring_axes should be among 0, 1, 2, got {axes!r}")
    return NnunetWeights(
        configuration=configuration,
        trainer=str(content["trainer_name"]),
        mirror_axes=tuple(listed),
        weights=weights,
    )


def _is_stored(value: object) -> bool:
    """Say whether a value is a dense tensor whose storage holds all of its numbers."""
    if not isinstance(value, Tensor) or value.layout is not torch.strided or value.is_quantized or value.is_meta:
        return False
    return value.nbytes <= value.untyped_storage().nbytes()
