"""Read voxels and their place in the patient from the path in a field of a case.

The path decides the format: a folder is a DICOM series, a suffix names NIfTI, MHA or NRRD, and a DICOM file represents
its whole series. Voxels keep the order of the file; a transform turns them to RAS+ axes, so that the turn can be
inverted. If a field has several paths, each is one channel, and all must be on one grid: this module does not resample.
"""

from collections.abc import Callable, Sequence
from os import fspath
from pathlib import Path

import numpy as np
import torch
from monai.data import MetaTensor

from volseg.config.registry import Registry
from volseg.data.cases import Case, Task
from volseg.data.dicom.elements import is_dicom
from volseg.data.dicom.labels import DicomLabel, read_image_text
from volseg.data.dicom.volumes import read_dicom_series
from volseg.data.itk import read_itk
from volseg.data.nifti import read_nifti, read_nifti_affine
from volseg.errors import BatchFieldError, LargeVolumeError, ReaderError
from volseg.files import require_text
from volseg.formatting import list_some
from volseg.transforms.grid import Grid

Files = str | Path | Sequence[str | Path]
"""A field of a case for voxels: a path, or a path per channel."""

SUFFIXES = Registry(
    "reader",
    {**dict.fromkeys((".nii.gz", ".nii"), read_nifti), **dict.fromkeys((".mha", ".mhd", ".nrrd", ".nhdr"), read_itk)},
)
"""The reader of each kind of file, by suffix in lower case; a folder is read as a DICOM series. A custom reader takes a
path and returns the result of `volseg.data.as_volume`."""


class Read:
    """Replace the paths in some fields of a case by volumes.

    Parameters
    ----------
    fields
        The fields to read; every case must have them. For prediction, ``["image"]``.
    task
        Task whose names decide the values of labels in DICOM; see `read_label`.

    Examples
    --------
    >>> Read(["image", "label"])
    Read(['image', 'label'])
    """

    def __init__(self, fields: Sequence[str], task: Task | None = None) -> None:
        self.task = task
        self.fields = [fields] if isinstance(fields, str) else list(fields)

    def __repr__(self) -> str:
        return f"Read({self.fields})"

    def __call__(self, case: Case) -> Case:
        """Return a copy of ``case`` whose fields are MetaTensors ``(C, D, H, W)``, float32.

        Raises
        ------
        BatchFieldError
            If the case lacks a field.
        ReaderError
            If a file cannot be read; the message names case and file.
        """
        name = case.get("case", "(without id)")
        if missing := [field for field in self.fields if field not in case]:
            raise BatchFieldError(f"case {name}: Read needs {missing}, but the case has {sorted(case)}")
        read = dict(case)
        for field in self.fields:
            paths = case[field] if isinstance(case[field], tuple | list) else [case[field]]
            if not all(isinstance(path, str | Path) for path in paths):
                found = type(case[field]).__name__
                raise ReaderError(f"case {name}: {field} should be a path, or a path per channel, got a {found}")
            try:
                is_label = field == "label"
                read[field] = (
                    read_label(case[field], read.get("image"), self.task) if is_label else read_volume(case[field])
                )
            except ReaderError as fault:
                raise ReaderError(f"case {name}, {field}: {fault}") from fault
        return read


def read_volume(files: Files) -> MetaTensor:
    """Read a file, a folder with one DICOM series, or one of these per channel, as ``(C, D, H, W)`` float32.

    ``affine`` maps voxel indices to RAS+ mm (float64). ``meta`` contains ``filename_or_obj``, ``original_affine``,
    ``spatial_shape``, ``original_dtype``, ``sform_code``, ``qform_code`` and ``space``; for several files, the first's.

    Raises
    ------
    ReaderError
        If a path does not exist, or its content cannot be read as a volume; or if one of several files has more than
        one channel, or another grid than the first.
    """
    first, *others = list_files(files)
    volume = _read_file(first)
    if not others:
        return volume
    channels = [_require_one_channel(volume, first)]
    for path in others:
        channel = _read_file(path)
        if fault := Grid.of(volume).fault_of(Grid.of(channel), f"first channel ({first})"):
            raise ReaderError(f"{path} {fault}")
        channels.append(_require_one_channel(channel, path))
    return MetaTensor(torch.cat([channel.as_tensor() for channel in channels])).copy_meta_from(volume)


def read_label(files: Files, image: MetaTensor | Files | None = None, task: Task | None = None) -> MetaTensor:
    """Read a label map as `read_volume` does; a DICOM segmentation or structure set on the grid of its image.

    Parameters
    ----------
    files : path
        Path of the label map.
    image : MetaTensor or path, optional
        The label's image; if it is not DICOM, only its grid is used.
    task : Task, optional
        Task whose names of labels and regions decide the values.

    Raises
    ------
    ReaderError
        As `read_volume`; or if the label is in DICOM, and its image is unknown or another series.
    """
    label = DicomLabel.open(list_files(files)[0])
    if label is None:
        return read_volume(files)
    path = label.path
    if image is None or task is None:
        raise ReaderError(
            f"{path} is a {label}, which needs its image and the names of labels; name the data set that has both"
        )
    volume = image if isinstance(image, MetaTensor) else read_volume(image)
    uid = read_image_text(Path(volume.meta["filename_or_obj"]))
    if uid and label.series and uid != label.series:
        raise ReaderError(f"{path} is a {label}, but its image is series {uid}; name the label of this image")
    return _read_file(path, lambda _: label.read(Grid.of(volume), task))


def list_files(files: Files) -> tuple[Path, ...]:
    """Return the paths of a field that has one path, or one per channel.

    >>> [path.name for path in list_files(["scan_0000.nii.gz", "scan_0001.nii.gz"])]
    ['scan_0000.nii.gz', 'scan_0001.nii.gz']

    Raises
    ------
    ReaderError
        If there is no path.
    """
    paths = (files,) if isinstance(files, (str, Path)) else tuple(files)
    if not paths:
        raise ReaderError("an image needs a file, or one per channel, got none")
    return tuple(Path(path) for path in paths)


def list_case_files(case: Case) -> list[Path]:
    """Return the files of a case's image and label."""
    return [file for field in ("image", "label") if field in case for file in list_files(case[field])]


def name_files(files: Files) -> str:
    """Return the paths of a field as text for messages.

    >>> name_files(("scan_0000.nii.gz", "scan_0001.nii.gz"))
    'scan_0000.nii.gz, scan_0001.nii.gz'
    """
    first, *others = list_files(files)
    return list_some([str(first), *(path.name if path.parent == first.parent else str(path) for path in others)])


def _require_one_channel(volume: MetaTensor, path: Path) -> MetaTensor:
    if len(volume) != 1:
        raise ReaderError(
            f"{path} has {len(volume)} channels, but is one of several files, which must have one channel each; name "
            "only this file, or split it into a file per channel"
        )
    return volume


def _read_file(path: Path, read: Callable[[Path], MetaTensor] | None = None) -> MetaTensor:
    try:
        return _require_volume((read or choose_reader(path))(path), path)
    except ReaderError:
        raise
    except MemoryError as fault:
        raise LargeVolumeError(f"{path} needs more memory than there is; crop or resample it") from fault
    except Exception as fault:  # a parser may raise anything for damaged bytes, and other cases must still be reported
        reason = f"{type(fault).__name__}: {fault}".partition("\n")[0]
        raise ReaderError(f"{path} cannot be read ({reason}); it is damaged or not an image: fetch it again") from fault


def choose_reader(path: Path) -> Callable[[Path], MetaTensor]:
    """Return the reader of a path.

    Raises
    ------
    ReaderError
        If the path does not exist, no reader supports its kind, or its name is not UTF-8.
    """
    require_text(path, "a file to read", ReaderError)  # ITK would end the process
    if not path.exists():
        raise ReaderError(f"{path} does not exist; check the path")
    if path.is_dir():
        require_text([*path.iterdir()], "a file to read", ReaderError)
        return read_dicom_series
    if (suffix := match_suffix(path)) is not None:
        return SUFFIXES[suffix]
    if path.is_file() and is_dicom(path):
        require_text([*path.parent.iterdir()], "a slice to read", ReaderError)  # a series is a folder
        return read_dicom_series
    advice = "name the folder of the series" if path.suffix.lower() in (".dcm", ".ima") else "convert it"
    raise ReaderError(
        f"{path} has none of the suffixes {', '.join(SUFFIXES)}, and is not a folder of DICOM slices; {advice}"
    )


def _require_volume(volume: MetaTensor, path: Path) -> MetaTensor:
    """Raise unless a reader, which may be the user's own, returned a valid volume."""
    if isinstance(volume, MetaTensor) and volume.ndim == 4 and "spatial_shape" in volume.meta:
        return volume
    shape = tuple(getattr(volume, "shape", ()))
    raise ReaderError(
        f"the reader of {match_suffix(path)} files must return a volume (C, D, H, W) with an affine, built by "
        f"volseg.data.as_volume; got a {type(volume).__name__} {shape} for {path}"
    )


def match_suffix(path: str | Path) -> str | None:
    """Return the suffix of a file's reader, the longest of several, or None for any other file.

    >>> match_suffix("imagesTr/Hippocampus_001.NII.gz")
    '.nii.gz'
    """
    name = Path(fspath(path)).name.lower()
    return max((suffix for suffix in SUFFIXES if name.endswith(suffix)), key=len, default=None)


def stem(path: str | Path) -> str:
    """Return the name of a file without folder and image suffix: its case id.

    >>> stem("imagesTr/hippocampus_001.nii.gz")
    'hippocampus_001'
    """
    name = Path(fspath(path)).name
    suffix = match_suffix(path) or (".dcm" if name.lower().endswith(".dcm") else "")
    return name.removesuffix(name[len(name) - len(suffix) :])


def read_affine(path: str | Path) -> np.ndarray:
    """Return the affine of an image, 4 x 4, voxel index to RAS+ position in mm; only the header of NIfTI is read.

    Raises
    ------
    ReaderError
        If the path does not exist, or the image or its header cannot be read.
    """
    path = Path(path)
    if _is_nifti(path):
        return read_nifti_affine(path)
    return read_volume(path).affine.numpy(force=True)


def _is_nifti(path: Path) -> bool:
    return path.is_file() and path.name.lower().endswith((".nii", ".nii.gz"))
