"""Files of ``torch.save``: every checksum is compared before a byte is deserialised, and no code of the file runs.

This is the only place where volseg calls ``torch.load``. Torch compares no checksum, so a flipped bit gives other
weights without an error. The checks and torch read one open file, which nobody can replace in between.
"""

import pickle
import re
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from volseg.errors import CheckpointError

__all__ = ["read_torch_file"]

PIECE = 1 << 20
"""Bytes that are compared at a time."""

DOS_FOLDER = 0x10
"""Attribute of a part in a zip file's directory. Torch reads nothing of such a part, and gives what its memory held."""

SAVE_AGAIN = "torch.save(torch.load(FILE, weights_only=True), FILE)"


def read_torch_file(path: Path, device: torch.device | str = "cpu") -> Any:
    """Return what ``torch.save`` wrote: tensors, plain values and numpy's numbers.

    Parameters
    ----------
    path : path
        Of the file.
    device : torch.device or str
        Of the tensors.

    Raises
    ------
    CheckpointError
        If the file is absent or damaged in any bit, carries no checksums (torch before 1.6), or holds anything else.
    """
    try:
        with path.open("rb") as file:
            _require_intact(file, path)
            file.seek(0)
            with torch.serialization.safe_globals(_list_numbers()):
                return torch.load(file, map_location=device, weights_only=True)
    except pickle.UnpicklingError as fault:
        raise CheckpointError(
            f"{path} holds more than tensors, plain values and numpy's numbers, so it is not read: opening it could "
            f"run anybody's code ({_name_global(fault)}). If you trust its source, load it with the program that wrote "
            "it and save only the tensors: torch.save(network.state_dict(), FILE); of a checkpoint of nnU-Net a dict "
            "of network_weights, init_args, trainer_name and inference_allowed_mirroring_axes"
        ) from fault
    except CheckpointError:
        raise
    except OSError as fault:
        raise CheckpointError(f"{path} cannot be read: {fault}") from fault
    except Exception as fault:  # zipfile and torch run into damaged bytes as IndexError, KeyError, struct.error ...
        reason = str(fault).partition("\n")[0] or type(fault).__name__
        raise CheckpointError(f"{path} is damaged or no file of torch.save ({reason}); copy it again") from fault


def _require_intact(file: BinaryIO, path: Path) -> None:
    """Raise unless every part of the file has the checksum that was written with it."""
    if not zipfile.is_zipfile(file):
        file.seek(0)
        if file.read(2) == b"PK":
            raise zipfile.BadZipFile("its end is missing")
        raise CheckpointError(
            f"{path} is damaged or no file of torch.save since torch 1.6. Older files carry no checksums, so damage "
            f"would give other weights without an error; if it is one of them, save it again: {SAVE_AGAIN}"
        )
    with zipfile.ZipFile(file) as archive:
        parts = archive.infolist()
        if any(part.filename.endswith("/constants.pkl") for part in parts):
            raise CheckpointError(
                f"{path} is a TorchScript program; save its weights only: "
                "torch.save(torch.jit.load(FILE).state_dict(), 'weights.pt')"
            )
        if len({part.filename for part in parts}) < len(parts):
            raise zipfile.BadZipFile("it holds a part twice")
        for part in parts:
            if part.compress_type != zipfile.ZIP_STORED or part.compress_size != part.file_size:
                raise zipfile.BadZipFile(f"its part {part.filename} is compressed, which torch.save never does")
            if part.is_dir() or part.external_attr & DOS_FOLDER:
                raise zipfile.BadZipFile(f"its part {part.filename} is marked as a folder")
            with archive.open(part) as content:  # raises at the end of a part whose checksum differs
                while content.read(PIECE):
                    pass


def _list_numbers() -> list[Any]:
    """Return what a pickle may call to rebuild a number of numpy's: none of it does more than that."""
    scalar: Any = np._core.multiarray.scalar if hasattr(np, "_core") else np.core.multiarray.scalar  # type: ignore[attr-defined]
    codes = ("f2", "f4", "f8", "c8", "c16", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "?", "U", "S")
    kinds = [np.dtype(code) for code in codes]
    # numpy 2 moved the function; a checkpoint names the place that it had where it was written.
    named = [(scalar, f"numpy.{place}.multiarray.scalar") for place in ("core", "_core")]
    return [*named, np.dtype, *{type(kind) for kind in kinds}]


def _name_global(fault: BaseException) -> str:
    """Return what the file wanted to build or call, which torch's long message names."""
    named = re.search(r"GLOBAL \S+|<class '[^']+'>", str(fault))
    return named.group() if named else str(fault).strip().rpartition("\n")[2]
