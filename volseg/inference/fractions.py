"""Write probabilities and entropies, numbers from 0 to 1, as NIfTI on the grid of their image.

Voxels are uint16 with the header's slope 1/65535, which every reader of NIfTI applies: off by 1/131070 at most, half
the bytes of float32, and most of them equal, so that they compress. (NIfTI has no float16, and in uint8 two
probabilities that differ by 0.003 may be one.) Probabilities are one file of four axes, the network's outputs last,
which nibabel and SimpleITK open as it is; nnU-Net's ``.npz`` holds no place in the patient. What each output stands for
is in the file's own header extension, as JSON: nothing that could be lost beside it.
"""

import gzip
import io
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import nibabel as nib
import numpy as np
from monai.data import MetaTensor
from torch import Tensor

from volseg.data.cases import Task
from volseg.errors import DataError, GridError, OutOfMemoryError
from volseg.files import replacing
from volseg.inference.nifti_header import place
from volseg.memory import available_bytes
from volseg.transforms.grid import Grid

__all__ = ["describe_outputs", "require_room", "write_entropy", "write_probabilities"]

FULL_SCALE = 65_535
COMMENT = "comment"
"""NIfTI's extension for text (code 6)."""

ROUNDING = 1e-4
"""How far beyond 0 and 1 sums in float32, of half-precision windows too, may lie."""

SPARED = 0.8
"""Share of the free memory that may be taken."""


def write_probabilities(
    probabilities: Tensor, reference: MetaTensor, path: str | os.PathLike[str], *, task: Task
) -> Path:
    """Write probabilities ``(K, D, H, W)`` as ``(D, H, W, K)`` with the affine and header codes of the image.

    Parameters
    ----------
    probabilities : Tensor
        On the image's original grid. The K are the task's classes in the order of their values, the background first,
        or its regions as they are declared.
    reference : MetaTensor
        The image, as read or preprocessed: its original grid is meant.
    path : path
        Ends in ``.nii`` or ``.nii.gz``; it is written whole or not at all, and an output at a time.
    task : Task
        What the K are; see `describe_outputs`.

    Raises
    ------
    GridError
        For another shape than the task's outputs on the image's grid.
    DataError
        For values that are no probabilities, or a path of another suffix.
    """
    grid = Grid.original(reference)
    wanted = (task.num_outputs, *grid.shape)
    if tuple(probabilities.shape) != wanted:
        raise GridError(
            f"{path} needs probabilities (K, D, H, W) = {wanted} of {task.name} on the image's own grid, got "
            f"{tuple(probabilities.shape)}"
        )
    return _write(probabilities, grid, reference.meta, Path(path), describe_outputs(task))


def write_entropy(entropy: Tensor, reference: MetaTensor, path: str | os.PathLike[str]) -> Path:
    """Write the entropy ``(1, D, H, W)`` of the probabilities, 0 (certain) to 1 (all are equal), beside its image.

    Raises
    ------
    GridError, DataError
        As `write_probabilities`.
    """
    grid = Grid.original(reference)
    if tuple(entropy.shape) != (1, *grid.shape):
        raise GridError(
            f"{path} needs an entropy on the image's own grid, (1, D, H, W) = {(1, *grid.shape)}, got "
            f"{tuple(entropy.shape)}"
        )
    return _write(entropy, grid, reference.meta, Path(path), {"holds": "entropy", "unit": "of the largest possible"})


def describe_outputs(task: Task) -> dict[str, Any]:
    """Return what each output of a task's networks stands for, in order.

    Examples
    --------
    >>> labels = {0: "background", 7: "liver"}
    >>> task = Task(name="T", root=Path(), modalities=("CT",), labels=labels, training=(), test=())
    >>> describe_outputs(task)["outputs"]
    [{'name': 'background', 'values': [0]}, {'name': 'liver', 'values': [7]}]
    """
    structures = task.regions or {task.labels[value]: (value,) for value in task.class_values}
    return {
        "holds": "probabilities",
        "of": "regions, which may overlap" if task.regions else "classes, whose sum is 1",
        "outputs": [{"name": name, "values": list(values)} for name, values in structures.items()],
    }


def require_room(image: MetaTensor, num_outputs: int, *, held: int = 1) -> None:
    """Raise unless the probabilities of a prediction fit into main memory, before it is computed.

    Parameters
    ----------
    image : MetaTensor
        Preprocessed.
    num_outputs : int
        Of the network.
    held : int
        Predictions that are in memory at once.

    Raises
    ------
    OutOfMemoryError
        Says how much is needed, and free.
    """
    shape = Grid.original(image).shape
    voxels = int(np.prod(shape))
    needed = voxels * (4 * num_outputs * held + 12)  # float32; of the output that is being written, three copies
    free = available_bytes()
    if needed > SPARED * free:
        raise OutOfMemoryError(
            f"{image.meta.get('filename_or_obj', 'the image')}: the probabilities of {num_outputs} outputs on "
            f"{shape} voxels take {needed / 2**30:.1f} GiB of main memory, and {free / 2**30:.1f} GiB are free; "
            "ask for --uncertainty, which takes one output's, crop the image, or take a machine with more"
        )


def _write(volumes: Tensor, grid: Grid, meta: Mapping[str, Any], path: Path, about: Mapping[str, Any]) -> Path:
    if not path.name.lower().endswith((".nii", ".nii.gz")):
        raise DataError(f"probabilities and entropies are written as NIfTI: {path} must end in .nii or .nii.gz")
    shape = grid.shape if len(volumes) == 1 and about["holds"] == "entropy" else (*grid.shape, len(volumes))
    with replacing(path) as partial, partial.open("wb") as raw:
        if path.name.lower().endswith(".gz"):
            # No time stamp and no name: equal volumes, equal files. Level 1: most voxels are 0 or 1 anyway.
            with gzip.GzipFile("", "wb", compresslevel=1, fileobj=raw, mtime=0) as packed:
                _write_volumes(packed, volumes, shape, grid, meta, path, about)
        else:
            _write_volumes(raw, volumes, shape, grid, meta, path, about)
    return path


def _write_volumes(
    file: IO[bytes] | gzip.GzipFile,
    volumes: Tensor,
    shape: tuple[int, ...],
    grid: Grid,
    meta: Mapping[str, Any],
    path: Path,
    about: Mapping[str, Any],
) -> None:
    """Write the header, and one volume after the other: a copy of one of them is all that this takes."""
    file.write(_make_header(shape, grid, meta, about))
    for volume in volumes:
        numbers = volume.detach().as_subclass(Tensor).to("cpu").float().numpy()
        low, high = float(numbers.min()), float(numbers.max())
        if not -ROUNDING <= low <= high <= 1 + ROUNDING:  # NaN compares as false
            raise DataError(f"{path} takes numbers from 0 to 1, got {low:g} to {high:g}")
        stored = np.rint(numbers.clip(0, 1) * np.float32(FULL_SCALE)).astype("<u2")
        file.write(stored.tobytes(order="F"))  # the first axis is NIfTI's fastest


def _make_header(shape: tuple[int, ...], grid: Grid, meta: Mapping[str, Any], about: Mapping[str, Any]) -> bytes:
    """Return the bytes before the voxels."""
    # Zeros that take no memory: nibabel's header wants an array.
    image = nib.Nifti1Image(np.broadcast_to(np.uint16(0), shape), grid.affine.numpy())
    header = place(image, grid, meta).header
    header.set_slope_inter(1 / FULL_SCALE, 0)
    header.extensions.append(nib.nifti1.Nifti1Extension(COMMENT, json.dumps(about).encode()))
    header["vox_offset"] = header.single_vox_offset + header.extensions.get_sizeondisk()
    written = io.BytesIO()
    header.write_to(written)
    return written.getvalue().ljust(int(header["vox_offset"]), b"\0")
