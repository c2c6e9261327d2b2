"""DICOM files that were silently read wrongly, or refused although scanners write them.

Two times, missing or shuffled frames became a plain stack, and a series took voxel type and rescaling from its first
slice. Rounded cosines, new UIDs in each file, overlays in unused bits, and padded pixels were refused.
"""

import struct

import numpy as np
import pytest

from volseg.data.readers import read_volume
from volseg.errors import ReaderError

pydicom = pytest.importorskip("pydicom", reason="the extra `dicom` is not installed")

from dicom_files import (  # noqa: E402  (they need pydicom)
    RIGHT_DOWN,
    SERIES,
    UPRIGHT,
    Items,
    draw_stored,
    expect,
    group,
    place,
    write_enhanced,
    write_series,
    write_slice,
)

PLACES = [place(index) for index in range(6)]
TRANSVERSE, SAGITTAL, CORONAL = list(RIGHT_DOWN), [0, 1, 0, 0, 0, -1], [1, 0, 0, 0, 0, -1]
STACK = [draw_stored(index) for index in range(6)]


def refused(path, match):
    with pytest.raises(ReaderError, match=match):
        read_volume(path)


def expect_stored(path, affine=UPRIGHT, atol=1e-9):
    expect(path, STACK, affine, atol)


def frames(places=PLACES, **described):
    """Return a function that writes one file of frames into a folder."""
    return lambda folder: write_enhanced(folder / "a.dcm", places, **described)


def series(count=6, elements=lambda _: {}, **of_all):
    """Return a function that writes a file for each slice into a folder."""
    return lambda folder: write_series(folder, count, elements, **of_all)


def one_file(stored, **elements):
    """Return a function that writes several frames in the old form, without functional groups."""
    return lambda folder: write_slice(folder / "a.dcm", 0, stored, **elements).parent


def test_a_file_of_frames_and_a_series_of_slices_give_one_volume(tmp_path):
    """One function reads geometry and values of both."""

    def line(index):
        return {"RescaleSlope": 0.0371 * (index + 1), "RescaleIntercept": -7.0 * index, "RescaleType": "US"}

    path = write_enhanced(
        tmp_path / "a.dcm",
        PLACES[::-1],
        stored=np.stack([draw_stored(5 - index) for index in range(6)]),
        frames=lambda index: {"PixelValueTransformationSequence": group(**line(5 - index))},
    )
    values = [draw_stored(index) * float(f"{0.0371 * (index + 1):.10g}") - 7 * index for index in range(6)]
    np.testing.assert_allclose(read_volume(path).numpy()[0].transpose(2, 1, 0), values, rtol=1e-6)
    series = read_volume(write_series(tmp_path / "series", elements=line))
    np.testing.assert_array_equal(read_volume(path), series)
    np.testing.assert_array_equal(read_volume(path).affine, series.affine)


def of_frames(sequence, tag, value):
    """Return a function that gives each frame a group of one tag."""
    return lambda index: {sequence: group(**{tag: value(index)})}


NO_PLACE = {"PlanePositionSequence": None}
TWICE = r"12 slices are at 6 place\(s\) .* needs one slice per place: a.dcm \(frame 1\) .*, a.dcm \(frame 7\) at"
TURNED = [TRANSVERSE, TRANSVERSE, TRANSVERSE, SAGITTAL, SAGITTAL, CORONAL]
TURNS = of_frames("PlaneOrientationSequence", "ImageOrientationPatient", TURNED.__getitem__)
SPACINGS = of_frames("PixelMeasuresSequence", "PixelSpacing", lambda index: [0.75, 0.51 if index == 3 else 0.5])


def look_up_table():
    table = pydicom.Dataset()
    table.LUTDescriptor, table.ModalityLUTType, table.LUTData = [3, 0, 16], "HU", [7, 8, 9]
    table["LUTDescriptor"].VR = table["LUTData"].VR = "US"
    return Items([table])


CLASSES = {
    "CR": "1.2.840.10008.5.1.4.1.1.1",
    "NM": "1.2.840.10008.5.1.4.1.1.20",
    "PT": "1.2.840.10008.5.1.4.1.1.128",
    "US": "1.2.840.10008.5.1.4.1.1.6.1",
    "CT": "1.2.840.10008.5.1.4.1.1.2",
}


DOSE = {"SOPClassUID": "1.2.840.10008.5.1.4.1.1.481.2", "Modality": "RTDOSE", "NumberOfFrames": 5}


DOSES = np.stack([draw_stored(index, dtype=np.uint32) for index in range(5)])
RGB = {"SamplesPerPixel": 3, "PlanarConfiguration": 1, "PhotometricInterpretation": "RGB"}
PERPENDICULAR = "needed: two perpendicular directions of length 1"


OF_FRAMES = [
    ([[0, 0, 2.0 * i + 0.02 * i**2] for i in range(12)], {}, "the 12 slices are not evenly spaced"),
    (
        [[0, 0, 0], [10, 0, 0], [0, 10, 0], [10, 10, 0]],
        {},
        r"4 slices are at 1 place.* at \[0.0, 0.0, 0.0\] mm, .* at \[10.0, 0.0, 0.0\] mm",
    ),
    (PLACES * 2, {}, TWICE),
    (
        PLACES,
        {"shared": {"PlaneOrientationSequence": None}, "frames": TURNS},
        r"a.dcm \(frame 4\) has the ImageOrientationPatient .*, but a.dcm \(frame 1\) has .* parallel slices",
    ),
    (PLACES, {"frames": lambda _: NO_PLACE}, r"\(frame 1\) needs 3 .* \(0020,0032\)"),
    (PLACES, {"frames": lambda _: NO_PLACE, "ImagePositionPatient": [0, 0, 0]}, r"\(frame 1\) needs 3 numbers"),
    (PLACES, {"frames": lambda i: NO_PLACE if i == 4 else {}}, r"\(frame 5\) needs 3 numbers"),
    (PLACES, {"PerFrameFunctionalGroupsSequence": None}, "has 6 frames, but its PerFrame.* has 0 items"),
    (PLACES, {"NumberOfFrames": 5}, "has 5 frames, but its PerFrame.* has 6 items"),
    (PLACES, {"NumberOfFrames": None}, "has 1 frames, but its PerFrame.* has 6 items"),
    (PLACES, {"SharedFunctionalGroupsSequence": None}, r"needs 6 numbers in DICOM tag \(0020,0037\)"),
    (
        PLACES,
        {"shared": {"PixelMeasuresSequence": None}, "frames": SPACINGS},
        r"a.dcm \(frame 4\) has the PixelSpacing \[0.75, 0.51\], but a.dcm \(frame 1\) has \[0.75, 0.5\]",
    ),
    (PLACES, {"SegmentationType": "BINARY"}, "is a BINARY DICOM segmentation; convert it"),
    (PLACES, {"SegmentationType": "FRACTIONAL"}, "is a FRACTIONAL DICOM segmentation"),
]
OF_ONE_SLICE = [
    (
        {"ImageOrientationPatient": [1, 1.745e-3, 0, -1.745e-3, 1, 0]},
        "has the ImageOrientationPatient .*, but s001.dcm has",
    ),
    ({"PixelSpacing": [0.75, 0.6]}, r"has the PixelSpacing \[0.75, 0.6\], but s001"),
    ({"stored": draw_stored(1, (3, 5))}, r"has the size \[5, 3\], but s001\.dcm has \[5, 4\]; a volume needs"),
    ({"BitsStored": 9, "HighBit": 8}, r"values of 9 bits \(BitsStored\), but uses more of the 16"),
    ({"HighBit": 14}, "stores 16 of 16 bits per voxel, up to bit 14"),
    ({"BitsStored": 17, "HighBit": 16}, "stores 17 of 16 bits per voxel"),
    ({"PixelRepresentation": 2}, "has the PixelRepresentation 2"),
    ({"NumberOfFrames": 2}, "has 2 frames, but its PerFrame.* has 0 items"),
    ({"NumberOfFrames": 0}, "has the NumberOfFrames '0'"),
    ({"RescaleSlope": 0, "RescaleIntercept": 0}, "has a RescaleSlope of 0"),
    ({"RescaleSlope": [1, 2], "RescaleIntercept": 0}, r"needs 1 number in DICOM tag \(0028,1053\), .* '1.0\\\\2.0'"),
    (
        {"PhotometricInterpretation": "MONOCHROME1"},
        r"contains MONOCHROME1 with 1 sample\(s\) per pixel; needed: one grey value, brighter if higher",
    ),
    ({"PhotometricInterpretation": "PALETTE COLOR"}, r"contains PALETTE COLOR with 1 sample\(s\) per pixel"),
    ({"PhotometricInterpretation": None}, "contains values of an unknown kind"),
    ({"ImageType": ["ORIGINAL", "PRIMARY", "M", "ND", "MOSAIC"]}, "is a Siemens mosaic: one image with the slices"),
    ({"ModalityLUTSequence": look_up_table()}, r"maps its stored values with a table \(ModalityLUTSequence\)"),
]
"""What one of four slices says, the second in order of the places: it contradicts itself or the others. Values that are
not linear in the stored ones were read as such, and sizes and turns as those of the first."""

OF_ALL_SLICES = [
    ({"Rows": 3}, r"s001\.dcm has 40 bytes of pixels, but 1 frame.* of 3 rows of 5 voxels of 16 bits need 30"),
    ({"Columns": 4}, r"has 40 bytes of pixels, but 1 frame.* of 4 rows of 4 voxels of 16 bits need 32"),
    ({"BitsAllocated": 8, "BitsStored": 8, "HighBit": 7}, "has 40 bytes of pixels"),
    ({"Columns": 6}, "Expected 48 bytes, got 40"),
    ({"BitsAllocated": 32}, "Expected 80 bytes, got 40"),
    ({"PixelSpacing": [0.75, -0.5]}, r"has the PixelSpacing \[0.75, -0.5\] mm; needed: two positive numbers"),
    ({"PixelSpacing": [0, 0]}, r"has the PixelSpacing \[0.0, 0.0\] mm"),
    (
        {"PixelSpacing": None, "ImagerPixelSpacing": [0.3, 0.3]},
        "PixelSpacing, and the file's ImagerPixelSpacing is measured at the detector",
    ),
    ({"ImageOrientationPatient": [1, 0, 0, 1, 0, 0]}, PERPENDICULAR),
    ({"ImageOrientationPatient": [2, 0, 0, 0, 1, 0]}, PERPENDICULAR),
    ({"ImageOrientationPatient": [0, 0, 0, 0, 0, 0]}, PERPENDICULAR),
    ({"stored": np.zeros((3, 4, 5), dtype=np.uint8), **RGB}, r"s001\.dcm contains RGB with 3 sample\(s\) per pixel"),
]
OF_SERIES = [
    (
        12,
        lambda index: {"ImagePositionPatient": place(index // 3), "TemporalPositionIdentifier": index % 3 + 1},
        "12 slices are at 4 place.*Put each time, b-value or echo into its own folder",
    ),
    (4, lambda i: {"PixelSpacing": [0.75, 0.5 + 0.25 * (i > 1)]}, r"0.5\], but s00.\.dcm has .*0.75\]"),
    (
        6,
        lambda index: {"FrameOfReferenceUID": f"{SERIES}.{7 + (index == 3)}"},
        rf"s001.dcm has the .*UID '{SERIES}.7', but s003.dcm .*'{SERIES}.8'.* set the same for all if",
    ),
    (6, lambda index: {"Units": ["BQML", "CNTS"][index == 3]}, "s001.dcm has the Units 'BQML', but s003.dcm has 'CN"),
    (1, lambda _: {}, "is a single slice without SpacingBetweenSlices and SliceThickness"),
]
OF_GEOMETRY = [
    ("PixelSpacing", r"needs 2 numbers in DICOM tag \(0028,0030\), but has ''; it is PixelSpacing"),
    ("ImagePositionPatient", r"needs 3 numbers in DICOM tag \(0020,0032\), but has ''; it is ImagePosition"),
    ("ImageOrientationPatient", r"needs 6 numbers in DICOM tag \(0020,0037\), but has ''; it is ImageOrient"),
]
BY_DETECTOR = {
    "SOPClassUID": CLASSES["NM"],
    "Modality": "NM",
    "NumberOfFrames": 5,
    "SpacingBetweenSlices": -3,
    "ImagePositionPatient": None,
    "DetectorInformationSequence": group(ImagePositionPatient=[0, 0, 0], ImageOrientationPatient=TRANSVERSE),
}


def without(gone):
    """Return frames with some missing, and the expected error by number."""
    kept = [position for index, position in enumerate(PLACES) if index not in gone]
    between = rf"a.dcm \(frame {gone[0]}\) and a.dcm \(frame {gone[0] + 1}\), 2 mm elsewhere"
    return frames(kept), rf"(?s)(?=.*not evenly spaced: [46] mm between .*a slice is missing).*{between}"


REFUSED = [
    *((frames(places, **described), said) for places, described, said in OF_FRAMES),
    *((series(4, lambda i, e=e: e if i == 1 else {}), rf"s003\.dcm.* {said}") for e, said in OF_ONE_SLICE),
    *((series(3, **elements), said) for elements, said in OF_ALL_SLICES),
    *((series(count, elements), said) for count, elements, said in OF_SERIES),
    *map(without, ([1], [2, 3], [4])),
    *(
        (series(4, lambda i, t=tag: {t: None} if i == 2 else {}, SOPClassUID=uid, Modality=kind), rf"s002\.dcm {said}")
        for (kind, uid), (tag, said) in zip(CLASSES.items(), OF_GEOMETRY * 2, strict=False)
    ),
    (one_file(DOSES, **DOSE, DoseGridScaling=0.002), r"is a dose \(DoseGridScaling\), not an image"),
    (
        one_file(DOSES[:, :, :5].astype(np.uint16), **BY_DETECTOR),
        "has 5 frames, but its PerFrame.* has 0 items; a volume needs the position of each frame",
    ),
]


@pytest.mark.parametrize(("write", "said"), REFUSED)
def test_what_makes_no_volume_is_refused(tmp_path, write, said):
    refused(write(tmp_path), said)


LINES = {
    "fractions": (np.uint16, lambda index: (1.0, 0.0) if index == 0 else (0.0371 * index, 0.0)),
    "beyond 16 bits": (np.uint16, lambda index: (1.0, 0.0) if index == 0 else (400.0, 0.0)),
    "below zero": (np.uint16, lambda index: (1.0, 0.0) if index == 0 else (1.0, -1024.0)),
    "of PET": (np.int16, lambda index: (0.31 * (index + 1), 0.0)),
    "the first only": (np.uint8, lambda index: (0.5, -3.25) if index == 0 else (1.0, 0.0)),
    "falling": (np.int16, lambda index: (-2.0, 10.0 * index)),
}


def rescaled(dtype, line):
    """Return slices that are rescaled by tags of their own, their values, and the rest of a row of `READ`."""

    def elements(index):
        slope, intercept = line(index)
        said = {} if (slope, intercept) == (1, 0) else {"RescaleSlope": slope, "RescaleIntercept": intercept}
        return {"stored": draw_stored(index, dtype=dtype), **said}

    lines = [line(index) for index in range(6)]
    values = [draw_stored(i, dtype=dtype).astype(np.float64) * slope + by for i, (slope, by) in enumerate(lines)]
    return series(elements=elements), values, UPRIGHT, 1e-9, "float32"


def draw_type(index):
    """Return the ends of a voxel type of its own."""
    values = draw_stored(index, dtype=[np.uint16, np.int16, np.uint8][index % 3])
    values[0, :2] = np.iinfo(values.dtype).max, np.iinfo(values.dtype).min
    return values


def leave_bits(index):
    """Unused bits may repeat the sign or be zero."""
    stored = draw_stored(index)
    stored = (stored.view(np.uint16) & 0xFFF).view(np.int16) if index % 2 else stored
    return {"stored": stored, "BitsStored": 12, "HighBit": 11}


def shuffled(order):
    places, stored = [PLACES[index] for index in order], np.stack([draw_stored(index) for index in order])
    return frames(places, stored=stored)


def write_halves(folder):
    for number, half in enumerate(([3, 4, 5], [0, 1, 2])):
        shuffled(half)(folder).rename(folder / f"{number}.dcm")
    return folder


def spaced(one, other):
    """Return slices of two spacings that are equal up to rounding, and their affine."""
    mean = (float(one) + float(other)) / 2
    slices = series(elements=lambda index: {"PixelSpacing": [[one, one], [other, other]][index % 2]})
    return slices, STACK, [[-mean, 0, 0, 10], [0, -mean, 0, 20], *UPRIGHT[2:]], 1e-9, None


NOISE = np.random.default_rng(0)
COSINES, PLACED = NOISE.normal(0, 1e-4, (6, 6)), NOISE.uniform(-0.01, 0.01, (6, 3))

AS_WRITTEN = {
    "a frame of reference in each file": (lambda index: {"FrameOfReferenceUID": f"1.2.3.{index}"}, 1e-9),
    "rounded cosines": (
        lambda index: {"ImageOrientationPatient": [f"{v:.6f}" for v in np.add(RIGHT_DOWN, COSINES[index])]},
        3e-4,
    ),
    # The orientation is the median of the slices: a rounding error of the first file does not turn the volume.
    "a first slice that is turned": (
        lambda index: {"ImageOrientationPatient": [1, 5e-4, 0, -5e-4, 1, 0] if index == 5 else TRANSVERSE},
        1e-9,
    ),
    "noise in positions": (lambda index: {"ImagePositionPatient": [*np.round(place(index) + PLACED[index], 4)]}, 0.011),
}
ONE = [draw_stored(0)]
READ = [
    *(
        (shuffled(order), STACK, UPRIGHT, 1e-9, None)
        for order in ([0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0], [3, 0, 5, 1, 4, 2])
    ),
    (write_halves, STACK, UPRIGHT, 1e-9, None),
    *(rescaled(*given) for given in LINES.values()),
    (
        series(elements=lambda index: {"stored": draw_type(index)}),
        [draw_type(index) for index in range(6)],
        UPRIGHT,
        1e-9,
        "int32",  # the smallest for all
    ),
    (series(elements=leave_bits), STACK, UPRIGHT, 1e-9, None),
    *((series(SOPClassUID=uid, Modality=kind), STACK, UPRIGHT, 1e-9, None) for kind, uid in CLASSES.items()),
    # A single slice has the thickness of its tags.
    (series(1, SliceThickness=3), ONE, UPRIGHT * [1, 1, 1.5, 1], 1e-9, None),
    (series(1, SliceThickness=3, SpacingBetweenSlices=3.5), ONE, UPRIGHT * [1, 1, 1.75, 1], 1e-9, None),
    (series(1, SliceThickness=3, SpacingBetweenSlices=0), ONE, UPRIGHT * [1, 1, 1.5, 1], 1e-9, None),
    *((series(elements=elements), STACK, UPRIGHT, atol, None) for elements, atol in AS_WRITTEN.values()),
    *(spaced(*pair) for pair in (("0.4883", "0.4882"), ("0.703125", "0.703"), ("0.78125", "0.7812500"))),
]
"""What is written, the values, the affine, how far (mm) that may be off, and the voxel type where it counts."""


@pytest.mark.parametrize(("write", "values", "affine", "atol", "dtype"), READ)
def test_what_scanners_write_is_one_volume(tmp_path, write, values, affine, atol, dtype):
    volume = expect(write(tmp_path), values, affine, atol)
    assert dtype is None or volume.meta["original_dtype"] == dtype


def test_a_slice_with_a_damaged_header_is_not_left_out(tmp_path):
    """A last slice without Rows would silently be left out."""
    series = write_series(tmp_path)
    end = series / "s001.dcm"
    end.write_bytes(end.read_bytes().replace(b"\x28\x00\x10\x00US", b"\x29\x00\x10\x00US"))
    refused(series, r"s001\.dcm needs a number of two bytes in DICOM tag \(0028,0010\), Rows")
    end.write_bytes(end.read_bytes().replace(b"\xe0\x7f\x10\x00OW", b"\xe0\x7f\x12\x00OW"))
    refused(series, r"s001\.dcm is not a readable DICOM file")


def test_objects_without_an_image_are_ignored(tmp_path):
    series = write_series(tmp_path)
    plan = pydicom.Dataset()
    plan.SOPClassUID, plan.SOPInstanceUID = "1.2.840.10008.5.1.4.1.1.481.3", f"{SERIES}.50"
    plan.SeriesInstanceUID, plan.Modality = f"{SERIES}.51", "RTSTRUCT"
    plan.file_meta = pydicom.dataset.FileMetaDataset()
    plan.file_meta.TransferSyntaxUID = pydicom.uid.ExplicitVRLittleEndian
    plan.save_as(series / "structures.dcm", enforce_file_format=True)
    expect(series, [draw_stored(index) for index in range(6)])
    expect(series / "s003.dcm", [draw_stored(index) for index in range(6)])


def test_the_storage_class_of_the_file_information_is_ignored(tmp_path):
    """Some converters write the storage class of CT into every file."""

    def set_storage(one):
        one.file_meta.MediaStorageSOPClassUID = CLASSES["CT"]

    expect_stored(save_again(write_series(tmp_path), set_storage))


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
    refused(series, "no OverlayBitPosition explains them")
    expect(save_again(series, declare), values)


@pytest.mark.parametrize(
    ("extra", "is_read"), [(bytes(8), True), (bytes(10), True), (bytes(12), False), (bytes(9) + b"\1", False)]
)
def test_a_row_of_zeros_after_the_pixels_is_padding(tmp_path, extra, is_read):
    """5 columns of 16 bits take 10 bytes a row, 4 rows 8 bytes a column."""

    def pad(one):
        one.PixelData += extra

    series = save_again(write_series(tmp_path), pad)
    if is_read:
        expect_stored(series)
    else:
        refused(series, f"has {40 + len(extra)} bytes of pixels")


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
    refused(series, r"element \(0028,0010\) occurs twice in one place")
