"""nnU-Net's checkpoints, read without running anybody's code.

They are pickles: beside tensors there are the curves of the training, which are numpy's numbers. What rebuilds such a
number is allowed by name and nothing else is; a checkpoint that wants more is refused, whatever that is.
"""

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from volseg.errors import CheckpointError

__all__ = ["NnunetWeights", "read_checkpoint"]

AXES = {0, 1, 2}


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
    try:
        with torch.serialization.safe_globals(_list_numbers()):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as fault:
        raise CheckpointError(
            f"{path} holds more than tensors, plain values and numpy's numbers, so it is not read: opening it could "
            f"run anybody's code ({_name_global(fault)}). If you trust who made it, load it with nnU-Net itself and "
            "save it again with only network_weights, init_args, trainer_name and inference_allowed_mirroring_axes"
        ) from fault
    except (OSError, EOFError, RuntimeError, ValueError, KeyError) as fault:
        raise CheckpointError(f"{path} is damaged, or no checkpoint ({fault}); copy it again") from fault
    return _take(content, path)


def _take(content: object, path: Path) -> NnunetWeights:
    wanted = ("network_weights", "init_args", "trainer_name")
    if not isinstance(content, dict) or any(key not in content for key in wanted):
        raise CheckpointError(f"{path} should hold {', '.join(wanted)}, as nnU-Net 2 writes; it is another program's")
    weights, arguments, axes = (content.get(key) for key in (*wanted[:2], "inference_allowed_mirroring_axes"))
    if not isinstance(weights, dict) or not all(isinstance(name, str) for name in weights):
        raise CheckpointError(f"{path}: network_weights should be named tensors, got {type(weights).__name__}")
    if strange := [name for name, value in weights.items() if not _is_stored(value)]:
        raise CheckpointError(f"{path}: network_weights.{strange[0]} should be a tensor of stored numbers")
    configuration = arguments.get("configuration") if isinstance(arguments, dict) else None
    if not isinstance(configuration, str):
        raise CheckpointError(f"{path}: init_args should name the configuration, got {configuration!r}")
    listed = axes if isinstance(axes, tuple | list) else () if axes is None else (axes,)
    if not all(type(axis) is int and axis in AXES for axis in listed):
        raise CheckpointError(f"{path}: inference_allowed_mirroring_axes should be among 0, 1, 2, got {axes!r}")
    # Compiled and distributed networks put these before every name.
    named = {name.removeprefix("module.").removeprefix("_orig_mod."): value for name, value in weights.items()}
    return NnunetWeights(
        configuration=configuration,
        trainer=str(content["trainer_name"]),
        mirror_axes=tuple(listed),
        weights=named,
    )


def _is_stored(value: object) -> bool:
    """Say whether a value is a dense tensor whose every number is stored, none of them expanded."""
    if not isinstance(value, Tensor) or value.layout is not torch.strided or value.is_quantized or value.is_meta:
        return False
    return value.numel() * value.element_size() <= value.untyped_storage().nbytes()


def _list_numbers() -> list[Any]:
    """Return what a pickle may call to rebuild a number of numpy's: none of it does more than that."""
    scalar: Any = np._core.multiarray.scalar if hasattr(np, "_core") else np.core.multiarray.scalar  # type: ignore[attr-defined]
    kinds = [np.dtype(code) for code in ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "?")]
    # numpy 2 moved the function; a checkpoint names the place that it had where it was written.
    named = [(scalar, f"numpy.{place}.multiarray.scalar") for place in ("core", "_core")]
    return [*named, np.dtype, *{type(kind) for kind in kinds}]


def _name_global(fault: BaseException) -> str:
    """Return the line of torch's long message that says what the file wanted."""
    lines = [line.strip() for line in str(fault).splitlines()]
    return next((line for line in lines if "GLOBAL" in line or "global" in line), lines[0] if lines else "no reason")
