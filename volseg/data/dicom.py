"""Read a DICOM series: the only one of a folder, or the one that a file belongs to.

SimpleITK (GDCM) reads and sorts the slices. Their place is taken from each slice's own ``ImagePositionPatient``: ITK
takes an even stack for granted, so that a missing slice would stretch the patient, and it straightens the slices of a
tilted gantry.
"""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from monai.data import MetaTensor

from volseg.data.content import require_held, require_memory, require_regular
from volseg.data.dicom_elements import Tag, read_elements, require_sound_elements
from volseg.data.itk import image_affine, image_voxels, lps_to_ras, simpleitk
from volseg.data.volume import as_volume
from volseg.errors import DamagedFileError, ReaderError

__all__ = ["list_slices", "read_dicom_series"]

SERIES_UID, POSITION, ORIENTATION = (0x0020, 0x000E), (0x0020, 0x0032), (0x0020, 0x0037)
BITS = "0028|0100"

UNCOMPRESSED = ("1.2.840.10008.1.2", "1.2.840.10008.1.2.1", "1.2.840.10008.1.2.2")
"""Transfer syntaxes in which a voxel takes its bits."""

TOLERANCE = 0.05
"""Largest distance of a slice from its place in an even stack, as a fraction of the distance between slices.

A missing slice moves another one by at least half that distance; positions rounded by a scanner stay far below.
"""


def read_dicom_series(path: Path) -> MetaTensor:
    """Read a series as ``(1, D, H, W)`` float32 with its RAS+ affine; W counts the slices.

    Parameters
    ----------
    path : Path
        A folder that holds one series, or a file, which stands for all files of its series in its folder.

    Raises
    ------
    ReaderError
        No series, several of them, a file that is no DICOM, or slices that do not form an even stack.
    """
    folder = path if path.is_dir() else path.parent
    # ITK opens every file of a folder to look whether it is of the series.
    files = sorted(file for file in path.iterdir() if not file.is_dir()) if path.is_dir() else list_slices(path)
    syntaxes = {file.name: require_sound_elements(file) for file in files}
    files = list_slices(path) if path.is_dir() else files
    series = simpleitk().ImageSeriesReader()
    _require_room(files, syntaxes)
    series.SetFileNames([str(file) for file in files])
    series.MetaDataDictionaryArrayUpdateOn()
    try:
        image = series.Execute()
    except RuntimeError as fault:
        raise DamagedFileError(
            f"{folder}: SimpleITK cannot read its {len(files)} DICOM files as one volume; "
            "a file is truncated, or the slices differ in size"
        ) from fault
    voxels = image_voxels(image, folder)
    affine = image_affine(image)
    if len(files) > 1:
        affine[:, 2] = lps_to_ras(_measure_step(series, files, folder))
    return as_volume(voxels, affine, path, stored=voxels.dtype)


def list_slices(path: Path) -> list[Path]:
    """Return the sorted files of the only series in a folder, or of the series that a slice's file belongs to.

    Raises
    ------
    ReaderError
        No series, several of them, or a file that is no DICOM.
    """
    return _find_only_series(path) if path.is_dir() else _find_series_of(path)


def _find_series_of(slice_file: Path) -> list[Path]:
    """Return the files of the series that a file belongs to, in the order in which GDCM sorts a folder's."""
    headers = {}
    for file in sorted(slice_file.parent.iterdir()):
        if file.is_dir() or file.name.startswith("."):
            continue
        found = read_elements(file, [SERIES_UID, POSITION, ORIENTATION])
        if found is not None:
            headers[file] = found
        elif file.suffix.lower() == ".dcm":  # it may be of this series, which would be a smaller one without a word
            raise ReaderError(f"{file} is no readable DICOM file; fetch it again or take it out of the series")
    uid = headers.get(slice_file, {}).get(SERIES_UID)
    if uid is None:
        raise ReaderError(f"{slice_file} names no DICOM series; name the folder that holds the slices themselves")
    of_series = {file: found for file, found in headers.items() if found.get(SERIES_UID) == uid}
    places = {file: _measure_place(found) for file, found in of_series.items()}
    # Who has no place is told by name when the slices have been read.
    return sorted(of_series) if None in places.values() else sorted(of_series, key=lambda file: (places[file], file))


def _measure_place(header: Mapping[Tag, bytes]) -> float | None:
    """Return how far a slice lies along the normal of its plane, in mm; None where its header does not say it."""
    position, orientation = (
        [float(part) for part in re.findall(rb"[-+.\deE]+", header.get(tag, b""))] for tag in (POSITION, ORIENTATION)
    )
    if (len(position), len(orientation)) != (3, 6):
        return None
    return float(np.cross(orientation[:3], orientation[3:]) @ position)


def _find_only_series(folder: Path) -> list[Path]:
    """Return the sorted files of the only series in ``folder``."""
    reader = simpleitk().ImageSeriesReader
    try:
        by_id = {uid: reader.GetGDCMSeriesFileNames(str(folder), uid) for uid in reader.GetGDCMSeriesIDs(str(folder))}
    except RuntimeError as fault:
        raise ReaderError(
            f"{folder}: SimpleITK cannot sort its DICOM files into series; one of them is damaged, fetch them again"
        ) from fault
    if not by_id:
        raise ReaderError(f"{folder} holds no readable DICOM series; name the folder that holds the slices themselves")
    if len(by_id) > 1:
        found = "; ".join(
            f"{uid} ({len(files)} files, {Path(files[0]).name} ...)" for uid, files in sorted(by_id.items())
        )
        raise ReaderError(f"{folder} holds {len(by_id)} DICOM series: {found}; put each into a folder of its own")
    [names] = by_id.values()
    files = [Path(name) for name in names]
    readable = {file.name for file in files}
    damaged = sorted(
        path.name
        for path in folder.iterdir()
        if path.suffix.lower() == ".dcm" and path.name not in readable | _list_hidden(folder)
    )
    if damaged:
        raise ReaderError(
            f"{folder / damaged[0]} is no readable DICOM file; fetch it again or take it out of the series"
        )
    return files


def _require_room(files: Sequence[Path], syntaxes: Mapping[str, str]) -> None:
    """Raise unless the first file, by which ITK allocates all, holds its slices, and all of them fit into memory."""
    first = simpleitk().ImageFileReader()
    first.SetImageIO("GDCMImageIO")
    first.SetFileName(str(files[0]))
    try:
        first.ReadImageInformation()
    except RuntimeError as fault:
        raise ReaderError(
            f"{files[0]} is no readable DICOM file; fetch it again or take it out of the series"
        ) from fault
    voxels = math.prod(first.GetSize()) * first.GetNumberOfComponents()
    if syntaxes[files[0].name] in UNCOMPRESSED:
        bits = first.GetMetaData(BITS).strip() if first.HasMetaDataKey(BITS) else ""
        require_held(voxels * (int(bits) if bits.isdigit() else 8) // 8, require_regular(files[0]), files[0])
    # As ITK reads a slice, as it holds the volume, and twice as an array, at 8 bytes at most.
    require_memory(voxels * len(files) * 28, files[0].parent)


def _list_hidden(folder: Path) -> set[str]:
    """Names of the files that macOS leaves in archives."""
    return {path.name for path in folder.glob(".*")}


def _measure_step(series: Any, files: list[Path], folder: Path) -> np.ndarray:
    """Return the step (mm, LPS, homogeneous) from a slice to the next one.

    Raises
    ------
    ReaderError
        Slices are missing, doubled or turned against each other.
    """
    positions = np.array([_read_numbers(series, index, POSITION, 3, files) for index in range(len(files))])
    orientations = np.array([_read_numbers(series, index, ORIENTATION, 6, files) for index in range(len(files))])
    turned = np.abs(orientations - orientations[0]).max(axis=1)
    if turned.max() > 1e-3:
        raise ReaderError(
            f"{folder}: {files[int(turned.argmax())].name} is turned against {files[0].name}; "
            "a volume needs parallel slices, so take out localizers and the like"
        )
    step = (positions[-1] - positions[0]) / (len(files) - 1)
    even = positions[0] + np.arange(len(files))[:, None] * step
    away = np.linalg.norm(positions - even, axis=1)
    if not away.max() <= TOLERANCE * np.linalg.norm(step):
        gaps = np.linalg.norm(np.diff(positions, axis=0), axis=1)
        odd = int(np.abs(gaps - np.median(gaps)).argmax())
        raise ReaderError(
            f"{folder}: the {len(files)} slices are not evenly spaced: {gaps[odd]:g} mm between {files[odd].name} and "
            f"{files[odd + 1].name}, {np.median(gaps):g} mm elsewhere; a slice is missing or doubled"
        )
    return np.append(step, 0.0)


def _read_numbers(series: Any, index: int, tag: Tag, count: int, files: list[Path]) -> list[float]:
    key = f"{tag[0]:04x}|{tag[1]:04x}"
    text = series.GetMetaData(index, key) if series.HasMetaDataKey(index, key) else ""
    try:
        numbers = [float(part) for part in text.split("\\")]
    except ValueError:
        numbers = []
    if len(numbers) != count:
        raise ReaderError(
            f"{files[index]} needs {count} numbers in DICOM tag ({tag[0]:04x},{tag[1]:04x}), but has {text!r}; "
            "without them a slice has no place in the patient"
        )
    return numbers
