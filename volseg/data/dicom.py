"""Read a DICOM series: the only one of a folder, or the one that a file belongs to.

A series of slices in files of their own and a file of several frames take the same way: headers become frames
(`volseg.data.dicom_frames`), frames become a stack (`volseg.data.dicom_stack`), and only then pixels are read
(`volseg.data.dicom_pixels`), each by the rescaling of its own frame.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from monai.data import MetaTensor

from volseg.data.content import require_memory
from volseg.data.dicom_elements import Header, decode_text, read_elements, read_header
from volseg.data.dicom_frames import Frame, list_frames
from volseg.data.dicom_pixels import read_stored
from volseg.data.dicom_stack import stack_frames
from volseg.data.dicom_tags import TAGS, WANTED
from volseg.data.volume import as_volume
from volseg.errors import ReaderError

__all__ = ["list_slices", "read_dicom_series"]

SERIES_UID = (0x0020, 0x000E)


def read_dicom_series(path: Path) -> MetaTensor:
    """Read a series as ``(1, D, H, W)`` float32 with its RAS+ affine; D counts columns, H rows, W slices.

    Slices are in the order of their places along the normal of their plane, rows to the right times columns downwards.
    Values are ``RescaleSlope * stored + RescaleIntercept``, each slice's own.

    Parameters
    ----------
    path : Path
        A folder that holds one series, or a file, which stands for all files of its series in its folder.

    Raises
    ------
    ReaderError
        No series, several of them, a file that is no DICOM, or slices that do not form an even stack.
    """
    headers = [_require_header(file) for file in list_slices(path)]
    frames, affine = stack_frames([frame for header in headers for frame in list_frames(header)])
    voxels = _read_voxels(headers, frames)
    return as_volume(voxels.transpose(2, 1, 0)[None], affine, path, stored=_find_dtype(frames))


def list_slices(path: Path) -> list[Path]:
    """Return the files of the only series in a folder, or of the series that a file belongs to, sorted by name.

    Hidden files and files without an image, such as structure sets and ``DICOMDIR``, are left out.

    Raises
    ------
    ReaderError
        No series, several of them, or a file that is no DICOM.
    """
    folder = path if path.is_dir() else path.parent
    series, unread = _sort_by_series(folder)
    if path.is_dir():
        if not series:
            raise ReaderError(
                f"{folder} holds no readable DICOM series; name the folder that holds the slices themselves"
            )
        if len(series) > 1:
            found = "; ".join(
                f"{uid or 'no SeriesInstanceUID'} ({len(files)} files, {files[0].name} ...)"
                for uid, files in sorted(series.items())
            )
            raise ReaderError(f"{folder} holds {len(series)} DICOM series: {found}; put each into a folder of its own")
        [slices] = series.values()
    else:
        slices = next((files for uid, files in series.items() if uid and path in files), [])
        if not slices and path not in unread:
            raise ReaderError(f"{path} names no DICOM series; name the folder that holds the slices themselves")
    if unread:  # it may be of this series, which would be a smaller one without a word
        raise ReaderError(f"{unread[0]} is no readable DICOM file; fetch it again or take it out of the series")
    return slices


def _sort_by_series(folder: Path) -> tuple[dict[str, list[Path]], list[Path]]:
    """Return the image files of each series in a folder by UID, and the files that cannot be told to be none."""
    series, unread, others = defaultdict(list), [], []
    for file in sorted(folder.iterdir()):
        if file.is_dir() or file.name.startswith("."):
            continue
        found = read_elements(file, [SERIES_UID, TAGS["Rows"]])
        if found is None:
            unread += [file] if file.suffix.lower() == ".dcm" else []
            continue
        uid = decode_text(found.get(SERIES_UID, b""))
        # Elements that are out of order hide others from a look that ends early.
        if TAGS["Rows"] in found or _require_header(file).pixels is not None:
            series[uid].append(file)
        elif file.name.upper() != "DICOMDIR":
            others.append((uid, file))
    return series, unread + [file for uid, file in others if not uid or uid in series]


def _require_header(file: Path) -> Header:
    header = read_header(file, WANTED)
    if header is None:  # it was DICOM when its folder was listed
        raise ReaderError(f"{file} is no readable DICOM file; fetch it again or take it out of the series")
    return header


def _find_dtype(frames: Sequence[Frame]) -> np.dtype:
    """Return the smallest type for all values: what is stored, where nothing is rescaled, else float32."""
    if any((frame.slope, frame.intercept) != (1, 0) for frame in frames):
        return np.dtype(np.float32)
    return np.result_type(*{frame.stored.dtype for frame in frames})


def _read_voxels(headers: Sequence[Header], frames: Sequence[Frame]) -> np.ndarray:
    """Return the values ``(slices, rows, columns)`` in the order of ``frames``, float32."""
    places = {(frame.file, frame.index): place for place, frame in enumerate(frames)}
    by_file = {frame.file: frame.stored for frame in frames}
    shape = (len(frames), frames[0].stored.rows, frames[0].stored.columns)
    # The volume twice, as it is read and as it is ordered, and the pixels of one file as GDCM holds them.
    largest = max(stored.voxels * stored.allocated // 8 for stored in by_file.values())
    require_memory(8 * math.prod(shape) + 6 * largest, frames[0].file.parent)
    voxels = np.empty(shape, dtype=np.float32)
    for header in headers:
        for index, image in enumerate(read_stored(header, by_file[header.path])):
            place = places[header.path, index]
            slope, intercept = frames[place].slope, frames[place].intercept
            with np.errstate(over="ignore"):  # a value beyond float32 becomes inf, and the data check reports it
                is_stored = (slope, intercept) == (1, 0)
                voxels[place] = image if is_stored else np.multiply(image, slope, dtype=np.float64) + intercept
    return voxels
