"""DICOM as scanners, archives and anonymisers write it was refused by checks against damaged headers.

They refused rounded cosines, new UIDs in each file, overlays in unused bits, and padded pixels. Values and places of
these files are known by construction.
"""

import struct

import numpy as np
import pytest

from volseg.data.readers import read_volume
from volseg.errors import ReaderError

pydicom = pytest.importorskip("pydicom", reason="the extra `dicom` is not installed")

from dicom_files import (  # noqa: E402  (they need pydicom)
    RIGHT_DOWN,
    UPRIGHT,
    draw_stored,
    expect,
    place,
    write_series,
    write_slice,
)


def expect_stored(path, affine=UPRIGHT, atol=1e-9):
    expect(path, [draw_stored(index) for index in range(6)], affine, atol)


def change(series, change_one):
    """Apply a function to the bytes of each file."""
    for path in series.iterdir():
        path.write_bytes(change_one(path.read_bytes()))
    return series


def save_again(series, change_one):
    """Apply a function to each file as pydicom reads it."""
    for path in series.iterdir():
        one = pydicom.dcmread(path)
        change_one(one)
        one.save_as(path)
    return series


def set_storage(one):
    one.file_meta.MediaStorageSOPClassUID = "1.2.840.10008.5.1.4.1.1.2"


def test_the_storage_class_of_the_file_information_is_ignored(tmp_path):
    """Some converters write the storage class of CT into every file."""
    expect_stored(save_again(write_series(tmp_path), set_storage))


def test_a_frame_of_reference_in_each_file_is_ignored(tmp_path):
    expect_stored(write_series(tmp_path, elements=lambda index: {"FrameOfReferenceUID": f"1.2.3.{index}"}))


def test_several_frames_of_reference_are_refused_with_a_remedy(tmp_path):
    series = write_series(tmp_path, elements=lambda index: {"FrameOfReferenceUID": f"1.2.3.{index // 2}"})
    with pytest.raises(ReaderError, match=r"or give all of them one if they are of one scan"):
        read_volume(series)


@pytest.mark.parametrize("seed", range(3))
def test_rounded_cosines_are_one_orientation(tmp_path, seed):
    noise = np.random.default_rng(seed).normal(0, 1e-4, (6, 6))
    series = write_series(
        tmp_path,
        elements=lambda index: {"ImageOrientationPatient": [f"{v:.6f}" for v in np.add(RIGHT_DOWN, noise[index])]},
    )
    expect_stored(series, atol=3e-4)


@pytest.mark.parametrize(("one", "other"), [("0.4883", "0.4882"), ("0.703125", "0.703"), ("0.78125", "0.7812500")])
def test_rounded_pixel_spacings_are_one_spacing(tmp_path, one, other):
    series = write_series(tmp_path, elements=lambda index: {"PixelSpacing": [[one, one], [other, other]][index % 2]})
    spacing = (float(one) + float(other)) / 2
    expect_stored(series, [[-spacing, 0, 0, 10], [0, -spacing, 0, 20], *UPRIGHT[2:]])


def test_the_orientation_is_the_median_of_the_slices(tmp_path):
    """A rounding error of the first file does not turn the volume."""
    slight = [1, 5e-4, 0, -5e-4, 1, 0]
    series = write_series(
        tmp_path, elements=lambda index: {"ImageOrientationPatient": slight if index == 5 else list(RIGHT_DOWN)}
    )
    expect_stored(series)


def test_noise_in_positions_moves_no_slice(tmp_path):
    noise = np.random.default_rng(0).uniform(-0.01, 0.01, (6, 3))
    series = write_series(
        tmp_path, elements=lambda index: {"ImagePositionPatient": [*np.round(place(index) + noise[index], 4)]}
    )
    expect_stored(series, atol=0.011)


@pytest.mark.parametrize("sign", [0, -100], ids=["unsigned", "signed"])
def test_bits_of_a_declared_overlay_are_removed_from_values(tmp_path, sign):
    """Old CT stores overlays in the unused bits of a voxel."""
    random = np.random.default_rng(0)
    values = [random.integers(sign, 900, (4, 5)).astype(np.int16) for _ in range(6)]
    overlays = [random.integers(0, 2, (4, 5)).astype(np.uint16) for _ in range(6)]

    def elements(index):
        low = values[index].view(np.uint16) & 0xFFF
        stored = (low | overlays[index] << 12).view(np.int16 if sign else np.uint16)
        return {"stored": stored, "BitsStored": 12, "HighBit": 11}

    def declare(one):
        one.add_new(0x60020102, "US", 12)

    series = write_series(tmp_path, elements=elements)
    with pytest.raises(ReaderError, match="no OverlayBitPosition explains them"):
        read_volume(series)
    expect(save_again(series, declare), values)


@pytest.mark.parametrize(("extra", "is_read"), [(8, True), (10, True), (12, False)])
def test_a_row_of_zeros_after_the_pixels_is_padding(tmp_path, extra, is_read):
    """5 columns of 16 bits take 10 bytes a row, 4 rows 8 bytes a column."""

    def pad(one):
        one.PixelData += bytes(extra)

    series = save_again(write_series(tmp_path), pad)
    if is_read:
        expect_stored(series)
    else:
        with pytest.raises(ReaderError, match=rf"holds {40 + extra} bytes of pixels"):
            read_volume(series)


def test_a_row_of_values_after_the_pixels_is_refused(tmp_path):
    def pad(one):
        one.PixelData += b"\0" * 9 + b"\1"

    with pytest.raises(ReaderError, match="holds 50 bytes of pixels"):
        read_volume(save_again(write_series(tmp_path), pad))


def bare(path, *, is_implicit):
    """Return the data set of a file without its file information."""
    one = pydicom.dcmread(path)
    only = pydicom.Dataset()
    only.update(one)
    buffer = pydicom.filebase.DicomBytesIO()
    pydicom.filewriter.dcmwrite(buffer, only, implicit_vr=is_implicit, little_endian=True, enforce_file_format=False)
    return buffer.getvalue()


@pytest.mark.parametrize("is_implicit", [True, False], ids=["implicit", "explicit"])
@pytest.mark.parametrize("preamble", [b"", bytes(128) + b"DICM"], ids=["bare", "preamble"])
def test_a_data_set_without_file_information_is_read(tmp_path, is_implicit, preamble):
    series = write_series(tmp_path)
    for path in series.iterdir():
        path.write_bytes(preamble + bare(path, is_implicit=is_implicit))
    expect_stored(series)


def test_explicit_elements_are_read_in_a_file_marked_implicit(tmp_path):
    explicit, implicit = b"1.2.840.10008.1.2.1\0", b"1.2.840.10008.1.2\0"
    old, new = (b"UI" + struct.pack("<H", len(uid)) + uid for uid in (explicit, implicit))

    def claim(content):
        assert content.count(old) == 1
        content = content.replace(old, new)
        length = int.from_bytes(content[140:144], "little") - len(old) + len(new)
        return content[:140] + struct.pack("<I", length) + content[144:]

    expect_stored(change(write_series(tmp_path), claim))


def test_a_repeated_element_is_read_if_its_values_are_equal(tmp_path):
    rows = struct.pack("<HH2sHH", 0x0028, 0x0010, b"US", 2, 4)
    expect_stored(change(write_series(tmp_path / "like"), lambda content: content.replace(rows, rows * 2)))
    unlike = rows + struct.pack("<HH2sHH", 0x0028, 0x0010, b"US", 2, 3)
    series = change(write_series(tmp_path / "unlike"), lambda content: content.replace(rows, unlike))
    with pytest.raises(ReaderError, match=r"element \(0028,0010\) stands twice in one place"):
        read_volume(series)


@pytest.mark.parametrize("sign", [1, -1])
def test_the_offsets_of_a_dose_may_be_heights(tmp_path, sign):
    """Older planning systems write heights in the patient; the first is that of ImagePositionPatient."""
    stored = np.stack([draw_stored(index, dtype=np.uint32) for index in range(5)])
    elements = {"SOPClassUID": "1.2.840.10008.5.1.4.1.1.481.2", "Modality": "RTDOSE", "NumberOfFrames": 5}
    elements |= {"ImageOrientationPatient": [sign, 0, 0, 0, sign, 0], "DoseGridScaling": 0.002}
    write_slice(tmp_path / "a.dcm", 0, stored, **elements, GridFrameOffsetVector=[5, 7, 9, 11, 13])
    expect(tmp_path, stored * 0.002, UPRIGHT * [[sign, sign, 1, 1]] * np.ones((4, 1)))
