"""Read files of ``torch.save``: compare every checksum before deserialising, and run no code from the file.

This is the only place where volseg calls ``torch.load``. Torch compares no checksum, so a flipped bit would change
weights without an error. The checks and torch read the same open file, so it cannot be replaced in between.
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


DOS_FOLDER = 0x10
"""Attribute of a part in a zip file's directory. Torch does not read such a part and returns uninitialised memory."""

SAVE_AGAIN = "torch.save(torch.load(FILE, weights_only=True), FILE)"


def read_torch_file(path: Path, device: torch.device | str = "cpu") -> Any:
    """Return what ``torch.save`` wrote: tensors, plain values and numpy's numbers.

    Parameters
    ----------
    path : path
        The file.
    device : torch.device or str
        Where to put the tensors.

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
            f"run arbitrary code ({_name_global(fault)}). If you trust its source, load it with the program that wrote "
            "it and save only the tensors: torch.save(network.state_dict(), FILE). From a checkpoint of nnU-Net, save "
            "a dict of network_weights, init_args, trainer_name and inference_allowed_mirroring_axes"
        ) from fault
    except CheckpointError:
        raise
    except OSError as fault:
        raise CheckpointError(f"{path} cannot be read: {fault}") from fault
    except Exception as fault:  # zipfile and torch raise IndexError, KeyError, struct.error ... for damaged bytes
        reason = str(fault).partition("\n")[0] or type(fault).__name__
        raise CheckpointError(f"{path} is damaged or no file of torch.save ({reason}); copy it again") from fault


def _require_intact(file: BinaryIO, path: Path) -> None:
    """Raise unless every part of the file agrees with its checksum."""
    if not zipfile.is_zipfile(file):
        file.seek(0)
        if file.read(2) == b"PK":
            raise zipfile.BadZipFile("its end is missing")
        raise CheckpointError(
            f"{path} is damaged or no file of torch.save since torch 1.6. Older files carry no checksums, so damage "
            f"would change weights without an error. If yours is an older file, save it again: {SAVE_AGAIN}"
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
        if (bad := archive.testzip()) is not None:
            raise zipfile.BadZipFile(f"its part {bad} differs from its checksum")


def _list_numbers() -> list[Any]:
    """Return the names that a pickle may call; all of them only rebuild a number of numpy's."""
    scalar: Any = np._core.multiarray.scalar if hasattr(np, "_core") else np.core.multiarray.scalar  # type: ignore[attr-defined]
    kinds = [np.dtype(code) for code in np.typecodes["AllInteger"] + np.typecodes["AllFloat"] + "?US"]
    # numpy 2 moved the function; a checkpoint names its place in the numpy that wrote it.
    named = [(scalar, f"numpy.{place}.multiarray.scalar") for place in ("core", "_core")]
    return [*named, np.dtype, *{type(kind) for kind in kinds}]


def _name_global(fault: BaseException) -> str:
    """Return the class or function that the file asked for, from torch's long message."""
    named = re.search(r"GLOBAL \S+|<class '[^']+'>", str(fault))
    return named.group() if named else str(fault).strip().rpartition("\n")[2]
