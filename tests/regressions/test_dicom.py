"""DICOM that was read wrongly in silence, and DICOM of scanners that was refused.

No check looked at a file of several frames: two times, missing or shuffled frames became a plain stack. A series took
voxel type, rescaling and pixel spacing from its first slice: 16-bit values wrapped, fractions were truncated. Checks
against damaged headers refused rounded cosines, new UIDs in each file, overlays in unused bits, and padded pixels, as
scanners, archives and anonymisers write them.
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


def refused(path, match):
    with pytest.raises(ReaderError, match=match) as raised:
        read_volume(path)
    return str(raised.value)


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0], [3, 0, 5, 1, 4, 2]])
def test_frames_are_sorted_by_position(tmp_path, order):
    stored = np.stack([draw_stored(index) for index in order])
    path = write_enhanced(tmp_path / "a.dcm", [PLACES[index] for index in order], stored=stored)
    expect(path, [draw_stored(index) for index in range(6)])


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


def test_frames_of_several_files_are_one_volume(tmp_path):
    for number, half in enumerate((PLACES[3:], PLACES[:3])):
        stored = np.stack([draw_stored(PLACES.index(position)) for position in half])
        write_enhanced(tmp_path / f"{number}.dcm", half, stored=stored)
    expect(tmp_path, [draw_stored(index) for index in range(6)])


def of_frames(sequence, tag, value):
    """Return what gives each frame a group of one tag."""
    return lambda index: {sequence: group(**{tag: value(index)})}


NO_PLACE = {"PlanePositionSequence": None}
TWICE = r"2 slices at each of 6 places, a volume needs one: a.dcm \(frame 1\) and a.dcm \(fr.*"
TURNED = [TRANSVERSE, TRANSVERSE, TRANSVERSE, SAGITTAL, SAGITTAL, CORONAL]
ECHOES = of_frames("MREchoSequence", "EffectiveEchoTime", lambda index: 2.5 + 5 * (index // 6))
WEIGHTS = of_frames("MRDiffusionSequence", "DiffusionBValue", lambda index: 800.0 * (index % 2))
TURNS = of_frames("PlaneOrientationSequence", "ImageOrientationPatient", TURNED.__getitem__)
SPACINGS = of_frames("PixelMeasuresSequence", "PixelSpacing", lambda index: [0.75, 0.51 if index == 3 else 0.5])

FRAMES = [
    ([[0, 0, 2.0 * i + 0.02 * i**2] for i in range(12)], {}, "the 12 slices are not evenly spaced"),
    ([[0, 0, 0], [10, 0, 0], [0, 10, 0], [10, 10, 0]], {}, "lie side by side in one plane"),
    (PLACES * 2, {"frames": ECHOES}, rf"{TWICE}differ in EffectiveEchoTime \(2.5, 7.5\)"),
    (PLACES * 2, {"frames": WEIGHTS}, f"{TWICE}no known tag tells them apart"),
    (
        PLACES,
        {"shared": {"PlaneOrientationSequence": None}, "frames": TURNS},
        r"a.dcm \(frame 6\) is turned against a.dcm \(frame 1\); .* parallel slices.*3, 2, 1 slices are alike",
    ),
    (PLACES, {"frames": lambda _: NO_PLACE}, r"\(frame 1\) needs 3 .* \(0020,0032\)"),
    (PLACES, {"frames": lambda _: NO_PLACE, "ImagePositionPatient": [0, 0, 0]}, r"\(frame 1\) needs 3 numbers"),
    (PLACES, {"frames": lambda i: NO_PLACE if i == 4 else {}}, r"\(frame 5\) needs 3 numbers"),
    (PLACES, {"PerFrameFunctionalGroupsSequence": None}, "holds 6 frames, and its PerFrame.* has 0 items"),
    (PLACES, {"NumberOfFrames": 5}, "holds 5 frames, and its PerFrame.* has 6 items"),
    (PLACES, {"NumberOfFrames": None}, "holds 1 frames, and its PerFrame.* has 6 items"),
    (PLACES, {"SharedFunctionalGroupsSequence": None}, r"needs 6 numbers in DICOM tag \(0020,0037\)"),
    (
        PLACES,
        {"shared": {"PixelMeasuresSequence": None}, "frames": SPACINGS},
        r"a.dcm \(frame 4\) has the PixelSpacing \[0.75, 0.51\] mm, a.dcm \(frame 1\) has \[0.75, 0.5\]",
    ),
    (PLACES, {"SegmentationType": "BINARY"}, "is a BINARY DICOM segmentation; convert it"),
    (PLACES, {"SegmentationType": "FRACTIONAL"}, "is a FRACTIONAL DICOM segmentation"),
]


@pytest.mark.parametrize(("places", "described", "said"), FRAMES)
def test_frames_that_make_no_volume_are_refused(tmp_path, places, described, said):
    refused(write_enhanced(tmp_path / "a.dcm", places, **described), said)


def look_up_table():
    table = pydicom.Dataset()
    table.LUTDescriptor, table.ModalityLUTType, table.LUTData = [3, 0, 16], "HU", [7, 8, 9]
    table["LUTDescriptor"].VR = table["LUTData"].VR = "US"
    return Items([table])


PERPENDICULAR = "needed: two perpendicular directions of length 1"

# What one of four slices says, the second in order of the places.
ONE_SLICE = [
    ({"ImageOrientationPatient": [1, 1.745e-3, 0, -1.745e-3, 1, 0]}, "is turned against s001.dcm"),
    ({"PixelSpacing": [0.75, 0.6]}, r"has the PixelSpacing \[0.75, 0.6\] mm"),
    ({"stored": draw_stored(1, (3, 5))}, r"has 5 x 3 voxels, s001\.dcm has 5 x 4 \(3, 1 slices are alike\)"),
    ({"BitsStored": 9, "HighBit": 8}, r"values take 9 bits \(BitsStored\), but uses more of the 16"),
    ({"HighBit": 14}, "stores 16 of 16 bits per voxel, up to bit 14"),
    ({"BitsStored": 17, "HighBit": 16}, "stores 17 of 16 bits per voxel"),
    ({"PixelRepresentation": 2}, "has the PixelRepresentation 2"),
    ({"NumberOfFrames": 2}, "holds 2 frames, and its PerFrame.* has 0 items"),
    ({"NumberOfFrames": 0}, "has the NumberOfFrames '0'"),
    ({"RescaleSlope": 0, "RescaleIntercept": 0}, "has a RescaleSlope of 0"),
    ({"RescaleSlope": [1, 2], "RescaleIntercept": 0}, r"needs 1 number in DICOM tag \(0028,1053\), .* '1.0\\\\2.0'"),
    ({"PhotometricInterpretation": "MONOCHROME1"}, "is MONOCHROME1"),
    ({"PhotometricInterpretation": "PALETTE COLOR"}, r"holds PALETTE COLOR with 1 sample\(s\) per pixel"),
    ({"PhotometricInterpretation": None}, "has no PhotometricInterpretation"),
    ({"ImageType": ["ORIGINAL", "PRIMARY", "M", "ND", "MOSAIC"]}, "is a Siemens mosaic: one image, whose tiles"),
    ({"ModalityLUTSequence": look_up_table()}, r"maps its stored values by a table \(ModalityLUTSequence\)"),
]


@pytest.mark.parametrize(("elements", "said"), ONE_SLICE)
def test_one_slice_that_contradicts_itself_or_the_others_is_refused(tmp_path, elements, said):
    """Values that are not linear in the stored ones were read as such, and sizes and turns as those of the first."""
    refused(write_series(tmp_path, 4, lambda index: elements if index == 1 else {}), rf"s003\.dcm.* {said}")


RGB = {"SamplesPerPixel": 3, "PlanarConfiguration": 1, "PhotometricInterpretation": "RGB"}

# What all slices of a series say.
ALL_SLICES = [
    ({"Rows": 3}, r"s001\.dcm holds 40 bytes of pixels, and 1 frame.* of 3 rows of 5 voxels of 16 bits take 30"),
    ({"Columns": 4}, r"holds 40 bytes of pixels, and 1 frame.* of 4 rows of 4 voxels of 16 bits take 32"),
    ({"BitsAllocated": 8, "BitsStored": 8, "HighBit": 7}, "holds 40 bytes of pixels"),
    ({"Columns": 6}, "Expected 48 bytes, got 40"),
    ({"BitsAllocated": 32}, "Expected 80 bytes, got 40"),
    ({"PixelSpacing": [0.75, -0.5]}, r"has the PixelSpacing \[0.75, -0.5\] mm; needed: two numbers above 0"),
    ({"PixelSpacing": [0, 0]}, r"has the PixelSpacing \[0.0, 0.0\] mm"),
    (
        {"PixelSpacing": None, "ImagerPixelSpacing": [0.3, 0.3]},
        "PixelSpacing, and the ImagerPixelSpacing of the file is measured at the detector",
    ),
    ({"ImageOrientationPatient": [1, 0, 0, 1, 0, 0]}, PERPENDICULAR),
    ({"ImageOrientationPatient": [2, 0, 0, 0, 1, 0]}, PERPENDICULAR),
    ({"ImageOrientationPatient": [0, 0, 0, 0, 0, 0]}, PERPENDICULAR),
    ({"stored": np.zeros((3, 4, 5), dtype=np.uint8), **RGB}, r"s001\.dcm holds RGB with 3 sample\(s\) per pixel"),
]


@pytest.mark.parametrize(("elements", "said"), ALL_SLICES)
def test_slices_without_sound_pixels_or_geometry_are_refused(tmp_path, elements, said):
    refused(write_series(tmp_path, 3, **elements), said)


SERIES_OF = {
    "three times": (
        12,
        lambda index: {"ImagePositionPatient": place(index // 3), "TemporalPositionIdentifier": index % 3 + 1},
        r"3 slices at each of 4 places.*differ in TemporalPositionIdentifier \(3, 2, 1\)",
    ),
    "one place": (
        5,
        lambda index: {"ImagePositionPatient": place(0), "TriggerTime": 40 * index},
        r"5 slices at one place.*differ in TriggerTime \(160.0, 120.0, 80.0, 40.0, 0.0\)",
    ),
    "two frames of reference": (
        6,
        lambda index: {"FrameOfReferenceUID": f"{SERIES}.{7 + (index == 3)}"},
        rf"s001.dcm has the FrameOfReferenceUID '{SERIES}.7' and s003.dcm .*'{SERIES}.8'.* or give all of them one if",
    ),
    "two units": (
        6,
        lambda index: {"Units": ["BQML", "CNTS"][index == 3]},
        "s001.dcm has the Units 'BQML' and s003.dcm has 'CNTS'",
    ),
    "a single slice": (1, lambda _: {}, "is a single slice without SpacingBetweenSlices and SliceThickness"),
}


@pytest.mark.parametrize("kind", SERIES_OF)
def test_a_series_that_is_no_volume_is_refused(tmp_path, kind):
    count, elements, said = SERIES_OF[kind]
    refused(write_series(tmp_path, count, elements), said)


@pytest.mark.parametrize("gone", [[1], [2, 3], [4]])
def test_missing_frames_are_reported_by_number(tmp_path, gone):
    places = [position for index, position in enumerate(PLACES) if index not in gone]
    said = refused(
        write_enhanced(tmp_path / "a.dcm", places), "not evenly spaced: [46] mm between .*a slice is missing"
    )
    assert f"a.dcm (frame {gone[0]}) and a.dcm (frame {gone[0] + 1}), 2 mm elsewhere" in said


LINES = {
    "fractions": (np.uint16, lambda index: (1.0, 0.0) if index == 0 else (0.0371 * index, 0.0)),
    "beyond 16 bits": (np.uint16, lambda index: (1.0, 0.0) if index == 0 else (400.0, 0.0)),
    "below zero": (np.uint16, lambda index: (1.0, 0.0) if index == 0 else (1.0, -1024.0)),
    "of PET": (np.int16, lambda index: (0.31 * (index + 1), 0.0)),
    "the first only": (np.uint8, lambda index: (0.5, -3.25) if index == 0 else (1.0, 0.0)),
    "falling": (np.int16, lambda index: (-2.0, 10.0 * index)),
}


@pytest.mark.parametrize("kind", LINES)
def test_each_slice_is_rescaled_by_its_own_tags(tmp_path, kind):
    dtype, line = LINES[kind]

    def elements(index):
        slope, intercept = line(index)
        said = {} if (slope, intercept) == (1, 0) else {"RescaleSlope": slope, "RescaleIntercept": intercept}
        return {"stored": draw_stored(index, dtype=dtype), **said}

    def value(index):
        slope, intercept = line(index)
        return draw_stored(index, dtype=dtype).astype(np.float64) * slope + intercept

    volume = expect(write_series(tmp_path, elements=elements), [value(index) for index in range(6)])
    assert volume.meta["original_dtype"] == "float32"


def test_each_slice_has_its_own_voxel_type(tmp_path):
    def stored(index):
        values = draw_stored(index, dtype=[np.uint16, np.int16, np.uint8][index % 3])
        values[0, :2] = np.iinfo(values.dtype).max, np.iinfo(values.dtype).min
        return values

    volume = expect(
        write_series(tmp_path, elements=lambda index: {"stored": stored(index)}), [stored(index) for index in range(6)]
    )
    assert volume.meta["original_dtype"] == "int32"  # the smallest for all


def test_unused_bits_may_repeat_the_sign_or_be_zero(tmp_path):
    def elements(index):
        stored = draw_stored(index)
        is_short = index % 2 == 1
        stored = (stored.view(np.uint16) & 0xFFF).view(np.int16) if is_short else stored
        return {"stored": stored, "BitsStored": 12, "HighBit": 11}

    expect(write_series(tmp_path, elements=elements), [draw_stored(index) for index in range(6)])


CLASSES = {
    "CR": "1.2.840.10008.5.1.4.1.1.1",
    "NM": "1.2.840.10008.5.1.4.1.1.20",
    "PT": "1.2.840.10008.5.1.4.1.1.128",
    "US": "1.2.840.10008.5.1.4.1.1.6.1",
    "CT": "1.2.840.10008.5.1.4.1.1.2",
}


@pytest.mark.parametrize("modality", CLASSES)
def test_geometry_comes_from_the_tags_in_every_modality(tmp_path, modality):
    series = write_series(tmp_path, SOPClassUID=CLASSES[modality], Modality=modality)
    expect(series, [draw_stored(index) for index in range(6)])


@pytest.mark.parametrize("modality", CLASSES)
@pytest.mark.parametrize(
    ("tag", "said"),
    [
        ("PixelSpacing", r"needs 2 numbers in DICOM tag \(0028,0030\), but has ''; it is PixelSpacing"),
        ("ImagePositionPatient", r"needs 3 numbers in DICOM tag \(0020,0032\), but has ''; it is ImagePosition"),
        ("ImageOrientationPatient", r"needs 6 numbers in DICOM tag \(0020,0037\), but has ''; it is ImageOrient"),
    ],
)
def test_slices_without_geometry_are_refused_by_name(tmp_path, modality, tag, said):
    series = write_series(
        tmp_path, 4, lambda index: {tag: None} if index == 2 else {}, SOPClassUID=CLASSES[modality], Modality=modality
    )
    refused(series, rf"s002\.dcm {said}")


@pytest.mark.parametrize(
    ("elements", "extent"),
    [
        ({"SliceThickness": 3}, 3.0),
        ({"SliceThickness": 3, "SpacingBetweenSlices": 3.5}, 3.5),
        ({"SliceThickness": 3, "SpacingBetweenSlices": 0}, 3.0),
    ],
)
def test_a_single_slice_has_the_thickness_of_its_tags(tmp_path, elements, extent):
    expect(write_series(tmp_path, 1, **elements), [draw_stored(0)], UPRIGHT * [1, 1, extent / 2, 1])


DOSE = {"SOPClassUID": "1.2.840.10008.5.1.4.1.1.481.2", "Modality": "RTDOSE", "NumberOfFrames": 5}


def test_a_dose_is_placed_by_its_offsets_and_scaled(tmp_path):
    stored = np.stack([draw_stored(index, dtype=np.uint32) for index in range(5)])
    write_slice(
        tmp_path / "a.dcm", 0, stored, **DOSE, DoseGridScaling=0.002, GridFrameOffsetVector=[0, -3, -6, -9, -12]
    )
    expect(
        tmp_path,
        [stored[4 - index] * 0.002 for index in range(5)],
        [[-0.5, 0, 0, 10], [0, -0.75, 0, 20], [0, 0, 3, -7], [0, 0, 0, 1]],
    )


@pytest.mark.parametrize(
    ("offsets", "said"),
    [
        (None, "holds 5 frames, and its PerFrame.* has 0 items"),
        ([0, 3, 6, 9], "needs 5 numbers in GridFrameOffsetVector, the first of them 0"),
        ([6, 9, 12, 15, 18], "needs 5 numbers in GridFrameOffsetVector, the first of them 0"),
        ([0, 3, 6, 12, 15], "not evenly spaced"),
        ([0, 0, 0, 0, 0], "5 slices at one place"),
    ],
)
def test_a_dose_without_places_is_refused(tmp_path, offsets, said):
    stored = np.stack([draw_stored(index, dtype=np.uint32) for index in range(5)])
    write_slice(tmp_path / "a.dcm", 0, stored, **DOSE, DoseGridScaling=0.002, GridFrameOffsetVector=offsets)
    refused(tmp_path, said)


def test_nuclear_medicine_with_frames_by_detector_is_refused(tmp_path):
    stored = np.stack([draw_stored(index, dtype=np.uint16) for index in range(5)])
    detector = group(ImagePositionPatient=[0, 0, 0], ImageOrientationPatient=list(RIGHT_DOWN))
    tags = {"SOPClassUID": CLASSES["NM"], "Modality": "NM", "NumberOfFrames": 5, "SpacingBetweenSlices": -3}
    tags |= {"ImagePositionPatient": None, "DetectorInformationSequence": detector}
    write_slice(tmp_path / "a.dcm", 0, stored, **tags)
    refused(tmp_path, "holds 5 frames, and its PerFrame.* has 0 items; a volume needs the position of each frame")


def test_a_slice_with_a_damaged_header_is_not_left_out(tmp_path):
    """A last slice without Rows would silently be left out."""
    series = write_series(tmp_path)
    end = series / "s001.dcm"
    end.write_bytes(end.read_bytes().replace(b"\x28\x00\x10\x00US", b"\x29\x00\x10\x00US"))
    refused(series, r"s001\.dcm needs a number of two bytes in DICOM tag \(0028,0010\), Rows")
    end.write_bytes(end.read_bytes().replace(b"\xe0\x7f\x10\x00OW", b"\xe0\x7f\x12\x00OW"))
    refused(series, r"s001\.dcm is no readable DICOM file")


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


# As scanners, archives and anonymisers write it. Values and places are known by construction.


def expect_stored(path, affine=UPRIGHT, atol=1e-9):
    expect(path, [draw_stored(index) for index in range(6)], affine, atol)


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
    "noise in positions": (
        lambda index: {"ImagePositionPatient": [*np.round(place(index) + PLACED[index], 4)]},
        0.011,
    ),
}


@pytest.mark.parametrize("kind", AS_WRITTEN)
def test_what_scanners_round_is_one_volume(tmp_path, kind):
    elements, atol = AS_WRITTEN[kind]
    expect_stored(write_series(tmp_path, elements=elements), atol=atol)


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


@pytest.mark.parametrize(("one", "other"), [("0.4883", "0.4882"), ("0.703125", "0.703"), ("0.78125", "0.7812500")])
def test_rounded_pixel_spacings_are_one_spacing(tmp_path, one, other):
    series = write_series(tmp_path, elements=lambda index: {"PixelSpacing": [[one, one], [other, other]][index % 2]})
    spacing = (float(one) + float(other)) / 2
    expect_stored(series, [[-spacing, 0, 0, 10], [0, -spacing, 0, 20], *UPRIGHT[2:]])


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
        refused(series, f"holds {40 + len(extra)} bytes of pixels")


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
    refused(series, r"element \(0028,0010\) stands twice in one place")


@pytest.mark.parametrize("sign", [1, -1])
def test_the_offsets_of_a_dose_may_be_heights(tmp_path, sign):
    """Older planning systems write heights in the patient; the first is that of ImagePositionPatient."""
    stored = np.stack([draw_stored(index, dtype=np.uint32) for index in range(5)])
    elements = {**DOSE, "ImageOrientationPatient": [sign, 0, 0, 0, sign, 0], "DoseGridScaling": 0.002}
    write_slice(tmp_path / "a.dcm", 0, stored, **elements, GridFrameOffsetVector=[5, 7, 9, 11, 13])
    expect(tmp_path, stored * 0.002, UPRIGHT * [[sign, sign, 1, 1]] * np.ones((4, 1)))
