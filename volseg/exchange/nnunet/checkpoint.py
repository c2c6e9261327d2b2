"""Read the weights and settings that a prediction needs from nnU-Net's checkpoints."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from volseg.errors import CheckpointError
from volseg.exchange.torch_file import read_torch_file

__all__ = ["NnunetWeights", "parse_nnunet", "read_checkpoint"]


@dataclass(frozen=True, kw_only=True, slots=True)
class NnunetWeights:
    """The parts of a checkpoint that a prediction needs."""

    configuration: str
    trainer: str
    mirror_axes: tuple[int, ...]
    """Axes (0, 1, 2 are D, H, W as the network sees them) along which it may be mirrored."""
    weights: Mapping[str, Tensor]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Of the trainer: ``plans`` and ``dataset_json`` are those of the model folder."""


def read_checkpoint(path: Path) -> NnunetWeights:
    """Read a checkpoint of nnU-Net 2.

    Raises
    ------
    CheckpointError
        If it is absent or damaged, holds more than tensors, plain values and numpy's numbers, or is another program's.
    """
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist; name the checkpoint by --checkpoint, or copy the whole folder")
    return parse_nnunet(read_torch_file(path), path)


def parse_nnunet(content: Any, path: Path) -> NnunetWeights:
    """Return what a prediction needs of a checkpoint's content; the errors are those of `read_checkpoint`."""
    wanted = ("network_weights", "init_args", "trainer_name")
    if not isinstance(content, dict) or any(key not in content for key in wanted):
        raise CheckpointError(f"{path} should hold {', '.join(wanted)}, as nnU-Net 2 writes; it is another program's")
    weights, arguments, axes = (content.get(key) for key in (*wanted[:2], "inference_allowed_mirroring_axes"))
    if not isinstance(weights, dict):
        raise CheckpointError(f"{path}: network_weights should map names to tensors, got {type(weights).__name__}")
    if odd := [name for name, value in weights.items() if not (isinstance(name, str) and isinstance(value, Tensor))]:
        raise CheckpointError(f"{path}: network_weights should map names to tensors, not {odd[0]!r:.200}")
    configuration = arguments.get("configuration") if isinstance(arguments, dict) else None
    if not isinstance(configuration, str):
        raise CheckpointError(f"{path}: init_args should name the configuration, got {configuration!r}")
    listed = axes if isinstance(axes, tuple | list) else () if axes is None else (axes,)
    if not all(type(axis) is int and axis in range(3) for axis in listed):
        raise CheckpointError(f"{path}: inference_allowed_mirroring_axes should be among 0, 1, 2, got {axes!r}")
    return NnunetWeights(
        configuration=configuration,
        trainer=str(content["trainer_name"]),
        mirror_axes=tuple(listed),
        weights=weights,
        arguments=arguments or {},
    )
