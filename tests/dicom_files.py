"""DICOM files with known geometry and values, written by pydicom, for tests of the reader."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from monai.data import MetaTensor
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.sequence import Sequence as Items
from pydicom.uid import UID, ExplicitVRLittleEndian

from volseg.data.readers import read_volume

SERIES = "1.2.826.0.1.3680043.2.1125.9"
MR, ENHANCED_MR = "1.2.840.10008.5.1.4.1.1.4", "1.2.840.10008.5.1.4.1.1.4.1"
RIGHT_DOWN = (1.0, 0.0, 0.0, 0.0, 1.0, 0.0)
UPRIGHT = np.array([[-0.5, 0, 0, 10], [0, -0.75, 0, 20], [0, 0, 2, 5], [0, 0, 0, 1.0]])
"""Affine of the slices that `write_slice` writes."""


def expect(path: Path, values: Any, affine: Any = UPRIGHT, atol: float = 1e-9) -> MetaTensor:
    """Compare a volume with the values ``(slices, rows, columns)`` in their order upwards, and return it."""
    volume = read_volume(path)
    np.testing.assert_array_equal(volume.numpy()[0], np.asarray(values, np.float32).transpose(2, 1, 0))
    np.testing.assert_allclose(volume.affine, affine, atol=atol)
    return volume


def place(index: int, step: float = 2.0) -> list[float]:
    """Return the position of a slice of an upright stack."""
    return [-10.0, -20.0, 5.0 + step * index]


def draw_stored(index: int, shape: tuple[int, int] = (4, 5), dtype: Any = np.int16) -> np.ndarray:
    """Return stored values of a slice."""
    kind = np.dtype(dtype)
    low, high = (0, 200) if kind.itemsize == 1 else (0, 900) if kind.kind == "u" else (-100, 900)
    return np.random.default_rng(index).integers(low, high, shape).astype(kind)


def fill(one: Dataset, elements: Mapping[str, Any]) -> None:
    """Set elements; None takes one away."""
    for name, value in elements.items():
        if value is None:
            if name in one:
                delattr(one, name)
        else:
            setattr(one, name, value)


def describe_pixels(one: Dataset, stored: np.ndarray) -> None:
    """Set the pixels and what describes them."""
    one.SamplesPerPixel, one.PhotometricInterpretation = 1, "MONOCHROME2"
    one.Rows, one.Columns = stored.shape[-2:]
    one.BitsAllocated = one.BitsStored = 8 * stored.dtype.itemsize
    one.HighBit = one.BitsAllocated - 1
    one.PixelRepresentation = int(stored.dtype.kind == "i")


def save(one: Dataset, path: Path, stored: np.ndarray, syntax: UID = ExplicitVRLittleEndian) -> Path:
    """Write a file with its pixels, compressed if the transfer syntax says so."""
    path.parent.mkdir(parents=True, exist_ok=True)
    one.file_meta = FileMetaDataset()
    one.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian if syntax.is_compressed else syntax
    content = stored.tobytes()
    one.PixelData = content + b"\0" * (len(content) % 2)
    one["PixelData"].VR = "OW" if stored.dtype.itemsize > 1 else "OB"
    if syntax.is_compressed:
        one.compress(syntax, encoding_plugin="pydicom" if syntax.name.startswith("RLE") else "pyjpegls")
    one.save_as(path, enforce_file_format=True)
    return path


def write_slice(
    path: Path, index: int, stored: np.ndarray | None = None, syntax: UID = ExplicitVRLittleEndian, **elements: Any
) -> Path:
    """Write one slice of an upright stack, 0.5 mm between columns and 0.75 mm between rows."""
    stored = draw_stored(index) if stored is None else stored
    one = Dataset()
    one.SOPClassUID, one.SOPInstanceUID, one.SeriesInstanceUID = MR, f"{SERIES}.{index + 1}", SERIES
    one.StudyInstanceUID, one.FrameOfReferenceUID, one.Modality = f"{SERIES}.0.1", f"{SERIES}.0.2", "MR"
    one.ImagePositionPatient, one.ImageOrientationPatient = place(index), list(RIGHT_DOWN)
    one.PixelSpacing = [0.75, 0.5]
    describe_pixels(one, stored)
    fill(one, elements)
    return save(one, path, stored, syntax)


def write_series(
    folder: Path, count: int = 6, elements: Callable[[int], Mapping[str, Any]] = lambda _: {}, **of_all: Any
) -> Path:
    """Write a stack, the names of its files against their order; ``elements`` differ from slice to slice."""
    for index in range(count):
        write_slice(folder / f"s{count - index:03d}.dcm", index, **{**of_all, **elements(index)})
    return folder


def group(**elements: Any) -> Items:
    """Return the sequence of one functional group."""
    one = Dataset()
    fill(one, elements)
    return Items([one])


def write_enhanced(
    path: Path,
    positions: Sequence[Sequence[float]],
    *,
    stored: np.ndarray | None = None,
    frames: Callable[[int], Mapping[str, Any]] = lambda _: {},
    shared: Mapping[str, Any] | None = None,
    syntax: UID = ExplicitVRLittleEndian,
    **elements: Any,
) -> Path:
    """Write a file of several frames; ``frames`` gives more functional groups of each, ``shared`` those of all."""
    stored = np.stack([draw_stored(index) for index in range(len(positions))]) if stored is None else stored
    one = Dataset()
    one.SOPClassUID, one.SOPInstanceUID, one.SeriesInstanceUID = ENHANCED_MR, f"{SERIES}.1", SERIES
    one.StudyInstanceUID, one.FrameOfReferenceUID, one.Modality = f"{SERIES}.0.1", f"{SERIES}.0.2", "MR"
    one.NumberOfFrames = len(positions)
    describe_pixels(one, stored)
    common = Dataset()
    common.PlaneOrientationSequence = group(ImageOrientationPatient=list(RIGHT_DOWN))
    common.PixelMeasuresSequence = group(PixelSpacing=[0.75, 0.5], SliceThickness=2.0)
    fill(common, shared or {})
    one.SharedFunctionalGroupsSequence = Items([common])
    own = []
    for index, position in enumerate(positions):
        frame = Dataset()
        frame.PlanePositionSequence = group(ImagePositionPatient=list(position))
        fill(frame, frames(index))
        own.append(frame)
    one.PerFrameFunctionalGroupsSequence = Items(own)
    fill(one, elements)
    return save(one, path, stored, syntax)
