"""Write label maps, probabilities and entropies as NIfTI on the grid of their image, which may have any format."""

import gzip
import io
import json
import os
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import torch
from isal import igzip_threaded
from monai.data import MetaTensor
from torch import Tensor

from volseg.data.cases import LARGEST_VALUE, Task
from volseg.data.labels import format_label_table
from volseg.data.volume import SCANNER_ANATOMICAL
from volseg.errors import DataError, GridError, OutOfMemoryError
from volseg.files import replacing
from volseg.memory import available_bytes
from volseg.transforms.grid import Grid
from volseg.transforms.slabs import run_over_slabs

COMPRESSION = 2
"""ISA-L's level: a label map needs a quarter more bytes than at zlib's level 6, but a thirtieth of the time."""

COMPRESSED_TOGETHER = 2**20
"""Bytes that a thread compresses at a time; the file's bytes depend on it, not on the number of threads."""

MOST_THREADS = 4
"""With more threads, reordering the voxels takes longer than compression."""

LABEL_TABLE = 0
"""TotalSegmentator's code of a header extension with a label table; nibabel returns no content for Caret's code 30."""

BLOCK_SIDE = 64
"""Voxels along two axes that are reordered together."""


def write_prediction(
    label_map: Tensor, reference: MetaTensor, path: str | os.PathLike[str], names: Mapping[int, str] | None = None
) -> Path:
    """Write ``label_map`` as NIfTI with the affine and the header codes of its image; return the path.

    Voxels are uint8, or uint16 or int32 if the largest value needs it. The file is replaced atomically. Equal label
    maps give equal bytes.

    Parameters
    ----------
    label_map : Tensor
        ``(1, D, H, W)`` or ``(D, H, W)``, whole numbers in [0, 16777215].
    reference : MetaTensor
        The image, as read or preprocessed; the label map is on its original grid. Its ``meta`` contains ``sform_code``,
        ``qform_code`` and ``qform_affine`` from the readers; without them, the affine is written as scanner
        coordinates.
    path : path
        Path that ends in ``.nii`` or ``.nii.gz``. names : mapping, optional Names of the labels by value, for the
        header extension that viewers read (`format_label_table`).

    Raises
    ------
    DataError
        If the path has another suffix or the label map other values.
    GridError
        If the label map has another shape than the reference.
    """
    path = Path(path)
    if not path.name.lower().endswith((".nii", ".nii.gz")):
        raise DataError(f"a prediction is written as NIfTI: {path} must end in .nii or .nii.gz")
    image = build_label_image(label_map, reference, path, names)
    content = io.BytesIO()
    image.to_stream(content)
    if path.name.lower().endswith(".gz"):
        content = _compress(content.getbuffer())
    with replacing(path) as partial:
        partial.write_bytes(content.getbuffer())
    return path


def build_label_image(
    label_map: Tensor, reference: MetaTensor, path: Path, names: Mapping[int, str] | None = None
) -> nib.Nifti1Image:
    """Return the image that `write_prediction` writes; ``path`` names it in messages."""
    grid = Grid.original(reference)
    voxels = torch.as_tensor(label_map).detach().cpu()
    if voxels.shape not in (grid.shape, (1, *grid.shape)):
        raise GridError(
            f"{path} needs a label map on the image's own grid of {grid.shape} voxels, got {tuple(voxels.shape)}; "
            "resample it with volseg.inference.original_grid.resample"
        )
    image = nib.Nifti1Image(_to_integers(voxels.reshape(grid.shape), path), grid.affine.numpy())
    if names:
        image.header.extensions.append(nib.nifti1.Nifti1Extension(LABEL_TABLE, format_label_table(names)))
    return place(image, grid, reference.meta)


def _compress(content: memoryview) -> io.BytesIO:
    """Return one gzip member, which every reader supports, without a time stamp: equal maps give equal files."""
    packed, threads = io.BytesIO(), min(MOST_THREADS, os.cpu_count() or 1)
    with igzip_threaded.open(
        packed, "wb", compresslevel=COMPRESSION, threads=threads, block_size=COMPRESSED_TOGETHER
    ) as file:
        file.write(content)
    return packed


def _to_integers(voxels: Tensor, path: Path) -> np.ndarray:
    low, high = voxels.min().item(), voxels.max().item()
    whole = not voxels.is_floating_point() or torch.equal(voxels, voxels.round())
    if not (whole and low >= 0 and high <= LARGEST_VALUE):
        raise DataError(
            f"{path} needs whole labels in [0, {LARGEST_VALUE}], got {voxels.dtype} values from {low} to {high}"
        )
    return _order(voxels.numpy(), np.uint8 if high <= 255 else np.uint16 if high < 2**16 else np.int32)


def _order(voxels: np.ndarray, dtype: type[np.integer]) -> np.ndarray:
    """Return a copy whose first axis is contiguous, as in the file, made in blocks that fit into the cache."""
    ordered = np.empty(voxels.shape, dtype=dtype, order="F")

    def order(planes: slice) -> None:
        for h in range(0, voxels.shape[1], BLOCK_SIDE):
            ordered[planes, h : h + BLOCK_SIDE] = voxels[planes, h : h + BLOCK_SIDE]

    run_over_slabs(order, voxels.shape, BLOCK_SIDE)
    return ordered


STRIPPED_SHEAR = 1e-3
"""Largest deviation of the qform (mm per voxel); without shear, a float32 quaternion is a hundred times as exact."""


def place(image: nib.Nifti1Image, grid: Grid, meta: Mapping[str, Any]) -> nib.Nifti1Image:
    """Return ``image`` with the sform and qform of the reference's header; ``meta`` is as the readers set it."""
    affine = grid.affine.numpy()
    sform, qform = (int(meta.get(key, SCANNER_ANATOMICAL)) for key in ("sform_code", "qform_code"))
    image.set_sform(affine, code=sform)
    image.set_qform(np.asarray(meta.get("qform_affine", affine)), code=qform, strip_shears=True)
    if sform and "qform_affine" not in meta and not np.allclose(image.get_qform(), affine, atol=STRIPPED_SHEAR):
        image.set_qform(None, code=0)  # a quaternion has no shear (tilted gantry): better none than a wrong place
    image.header.set_xyzt_units("mm")
    return image


# Write probabilities and entropies, numbers from 0 to 1, as NIfTI on the grid of their image. Voxels are uint16 with
# the header's slope 1/65535, which every reader of NIfTI applies. The error is at most 1/131070, the size is half that
# of float32, and most voxels are equal, so that they compress well. (NIfTI has no float16, and in uint8 two
# probabilities that differ by 0.003 may be equal.) Probabilities are one file of four axes, the network's outputs last,
# which nibabel and SimpleITK open directly; nnU-Net's ``.npz`` has no affine. The meaning of each output is in the
# file's own header extension, as JSON, where it cannot be lost.


FULL_SCALE = 65_535
COMMENT = "comment"
"""NIfTI's extension for text (code 6)."""

ROUNDING = 1e-4
"""Tolerance below 0 and above 1 for sums in float32, also of half-precision windows."""

SPARED = 0.8
"""Share of the free memory that probabilities may use."""


def write_probabilities(
    probabilities: Tensor, reference: MetaTensor, path: str | os.PathLike[str], *, task: Task
) -> Path:
    """Write probabilities ``(K, D, H, W)`` as ``(D, H, W, K)`` with the affine and header codes of the image.

    Parameters
    ----------
    probabilities : Tensor
        Probabilities on the image's original grid. The K outputs are the task's classes in the order of their values,
        the background first, or its regions in the order of their declaration.
    reference : MetaTensor
        The image, as read or preprocessed; the probabilities are on its original grid.
    path : path
        Path that ends in ``.nii`` or ``.nii.gz``; the file is written atomically, one output at a time.
    task : Task
        Defines the K outputs; see `describe_outputs`.

    Raises
    ------
    GridError
        If the shape is not that of the task's outputs on the image's grid.
    DataError
        For values that are not probabilities, or a path with another suffix.
    """
    about = describe_outputs(task)
    return _write(probabilities, reference, Path(path), about, f"probabilities of {task.name}", task.num_outputs)


def write_entropy(entropy: Tensor, reference: MetaTensor, path: str | os.PathLike[str]) -> Path:
    """Write the entropy ``(1, D, H, W)`` of probabilities, from 0 (certain) to 1 (all equal), on the image's grid.

    Raises
    ------
    GridError, DataError
        As `write_probabilities`.
    """
    return _write(entropy, reference, Path(path), {"holds": "entropy", "unit": "of the largest possible"}, "entropy", 1)


def describe_outputs(task: Task) -> dict[str, Any]:
    """Return the meaning of each output of a task's networks, in order.

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
    """Raise unless the probabilities of a prediction will fit into main memory.

    Parameters
    ----------
    image : MetaTensor
        The preprocessed image.
    num_outputs : int
        Outputs of the network.
    held : int
        Number of predictions in memory at once.

    Raises
    ------
    OutOfMemoryError
        If too little memory is free; the message gives both sizes.
    """
    shape = Grid.original(image).shape
    voxels = int(np.prod(shape))
    needed = voxels * (4 * num_outputs * held + 12)  # float32, and three copies of the output being written
    free = available_bytes()
    if needed > SPARED * free:
        raise OutOfMemoryError(
            f"{image.meta.get('filename_or_obj', 'the image')}: the probabilities of {num_outputs} outputs on {shape} "
            f"voxels need {needed / 2**30:.1f} GiB of main memory, but {free / 2**30:.1f} GiB are free; use "
            "--uncertainty, which needs memory for only one output, crop the image, or use a machine with more memory"
        )


def _write(
    volumes: Tensor, reference: MetaTensor, path: Path, about: Mapping[str, Any], title: str, num_outputs: int
) -> Path:
    grid = Grid.original(reference)
    if tuple(volumes.shape) != (num_outputs, *grid.shape):
        raise GridError(
            f"{path} needs the {title} on the image's own grid, (K, D, H, W) = {(num_outputs, *grid.shape)}, got "
            f"{tuple(volumes.shape)}"
        )
    if not path.name.lower().endswith((".nii", ".nii.gz")):
        raise DataError(f"probabilities and entropies are written as NIfTI: {path} must end in .nii or .nii.gz")
    shape = grid.shape if len(volumes) == 1 and about["holds"] == "entropy" else (*grid.shape, len(volumes))
    with replacing(path) as partial, partial.open("wb") as raw:
        # No time stamp and no name: equal volumes give equal files. Level 1: most voxels are 0 or 1 anyway.
        is_packed = path.name.lower().endswith(".gz")
        packed = gzip.GzipFile("", "wb", compresslevel=1, fileobj=raw, mtime=0) if is_packed else nullcontext(raw)
        with packed as file:
            file.write(_make_header(shape, grid, reference.meta, about))
            for volume in volumes:  # one after the other, so that only one is copied at a time
                numbers = volume.detach().as_subclass(Tensor).to("cpu").float().numpy()
                low, high = float(numbers.min()), float(numbers.max())
                if not -ROUNDING <= low <= high <= 1 + ROUNDING:  # NaN compares as false
                    raise DataError(f"{path} needs numbers from 0 to 1, got {low:g} to {high:g}")
                stored = np.rint(numbers.clip(0, 1) * np.float32(FULL_SCALE)).astype("<u2")
                file.write(stored.tobytes(order="F"))  # the first axis is NIfTI's fastest
    return path


def _make_header(shape: tuple[int, ...], grid: Grid, meta: Mapping[str, Any], about: Mapping[str, Any]) -> bytes:
    """Return the bytes before the voxels."""
    # Zeros without memory, since nibabel's header requires an array.
    image = nib.Nifti1Image(np.broadcast_to(np.uint16(0), shape), grid.affine.numpy())
    header = place(image, grid, meta).header
    header.set_slope_inter(1 / FULL_SCALE, 0)
    header.extensions.append(nib.nifti1.Nifti1Extension(COMMENT, json.dumps(about).encode()))
    header["vox_offset"] = header.single_vox_offset + header.extensions.get_sizeondisk()
    written = io.BytesIO()
    header.write_to(written)
    return written.getvalue().ljust(int(header["vox_offset"]), b"\0")
