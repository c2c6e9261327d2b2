"""DICOM segmentations have the same voxels in the same places for every reader, and no invented tags."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from volseg.data.cases import Task
from volseg.data.readers import read_volume
from volseg.errors import ConfigError, DataError, GridError
from volseg.experiment.prediction.files import PredictionFiles
from volseg.inference.dicom_segmentation import CODES, code_name, require_dicom_source, write_dicom_segmentation
from volseg.inference.writing import write_prediction
from volseg.transforms.preprocessing import build_preprocessing

pytest.importorskip("highdicom", reason="the extra `dicom` is not installed")
pydicom = pytest.importorskip("pydicom", reason="the extra `dicom` is not installed")
pytest.importorskip("SimpleITK", reason="a machine that only runs GPU tests may lack it")

ORGANS = Task(
    name="Abdomen",
    root=Path(),
    modalities=("MR",),
    labels={0: "background", 3: "Liver", 40: "kidney_left", 700: "zone 3", 800: "absent"},
    training=(),
    test=(),
)
TUMOUR = Task(
    name="Brain",
    root=Path(),
    modalities=("MR",),
    labels={0: "background", 1: "oedema", 2: "core"},
    regions={"whole tumour": (1, 2), "core": (2,)},
    training=(),
    test=(),
)
STRAIGHT = np.eye(3)
TURNED = np.linalg.qr(np.array([[0.9, 0.2, -0.1], [-0.3, 1.0, 0.4], [0.1, -0.2, 1.1]]))[0]
"""Columns: along a row, along a column, and from slice to slice."""


@pytest.fixture
def write_series(tmp_path):
    """Return a function that writes slices of 5 columns and 4 rows, with some tags of a scanner."""

    def write(axes=STRAIGHT, order=range(6), step=2.0, folder="series", leave_out=(), **values):
        folder = tmp_path / folder
        folder.mkdir()
        for name, place in enumerate(order):
            one = pydicom.Dataset()
            one.SOPClassUID = pydicom.uid.MRImageStorage
            one.SOPInstanceUID = f"1.2.3.{place + 1}"
            one.PatientID, one.PatientName = "MR-17", "Muster^Erika"
            one.StudyInstanceUID, one.SeriesInstanceUID, one.FrameOfReferenceUID = "1.2.4", "1.2.5", "1.2.6"
            one.Modality, one.SeriesNumber, one.InstanceNumber = "MR", 3, place + 1
            one.ImageOrientationPatient = [f"{value:.8f}" for value in axes[:, :2].T.ravel()]
            one.ImagePositionPatient = [f"{value:.6f}" for value in np.array([1, 2, 3]) + axes[:, 2] * step * place]
            one.PixelSpacing = [0.75, 0.5]  # between rows, between columns
            one.SliceThickness = abs(step)
            one.Rows, one.Columns, one.SamplesPerPixel = 4, 5, 1
            one.PhotometricInterpretation = "MONOCHROME2"
            one.BitsAllocated, one.BitsStored, one.HighBit, one.PixelRepresentation = 16, 16, 15, 0
            voxels = np.random.default_rng(place).integers(0, 900, (4, 5)).astype(np.uint16)
            one.PixelData = voxels.tobytes()
            for key, value in values.items():
                setattr(one, key, value)
            for key in leave_out:
                delattr(one, key)
            one.file_meta = pydicom.dataset.FileMetaDataset()
            one.file_meta.TransferSyntaxUID = pydicom.uid.ExplicitVRLittleEndian
            one.save_as(folder / f"{name:03d}.dcm", enforce_file_format=True)
        return folder

    return write


def labels_for(volume, values, seed=0):
    """Return a random label map on the volume's grid."""
    return torch.from_numpy(np.random.default_rng(seed).choice(values, volume.shape).astype(np.int32))


def places_by_hand(path):
    """Return the LPS positions (mm) of each segment's voxels, only from the elements of the file."""
    found = pydicom.dcmread(path)
    shared = found.SharedFunctionalGroupsSequence[0]
    right, down = np.array(shared.PlaneOrientationSequence[0].ImageOrientationPatient, float).reshape(2, 3)
    by_row, by_column = (float(step) for step in shared.PixelMeasuresSequence[0].PixelSpacing)
    bits = np.unpackbits(np.frombuffer(found.PixelData, np.uint8), bitorder="little")
    frames = bits[: found.NumberOfFrames * found.Rows * found.Columns].reshape(-1, found.Rows, found.Columns)
    places = {item.SegmentNumber: [] for item in found.SegmentSequence}
    for frame, groups in zip(frames, found.PerFrameFunctionalGroupsSequence, strict=True):
        first = np.array(groups.PlanePositionSequence[0].ImagePositionPatient, float)
        number = groups.SegmentIdentificationSequence[0].ReferencedSegmentNumber
        places[number] += [
            first + right * by_column * column + down * by_row * row for row, column in np.argwhere(frame)
        ]
    return found, places


def places_of(nifti, values):
    """Return the LPS positions of the voxels that have one of some values, in the NIfTI file that we write."""
    volume = read_volume(nifti)
    indices = np.argwhere(np.isin(volume.numpy()[0], values))
    at = np.c_[indices, np.ones(len(indices))] @ volume.affine.numpy().T
    return at[:, :3] * (-1, -1, 1)


def assert_same_places(found, expected):
    """Compare two sets of positions to a hundredth of a millimetre: DICOM's decimals, NIfTI's float32."""
    found, expected = (np.asarray(sorted(np.round(at, 2).tolist() for at in places)) for places in (found, expected))
    assert found.shape == expected.shape
    # Sorted by rounded numbers, neighbours may change places; each has a partner.
    for at in found:
        assert np.abs(expected - at).max(axis=1).min() <= 0.02


SERIES = {
    "sorted": {},
    "unsorted": {"order": [3, 0, 5, 1, 4, 2]},
    "reversed": {"order": range(5, -1, -1), "step": -2.0},
    "oblique": {"axes": TURNED, "order": [2, 5, 0, 1, 4, 3]},
}


@pytest.mark.parametrize("kind", SERIES)
def test_voxels_lie_at_the_millimetres_of_the_nifti_file(write_series, tmp_path, kind):
    folder = write_series(**SERIES[kind])
    volume = read_volume(folder)
    labels = labels_for(volume, [0, 0, 3, 40, 700])
    path = write_dicom_segmentation(labels, volume, tmp_path / "case.dcm", task=ORGANS, series=folder, weights="0")
    nifti = write_prediction(labels, volume, tmp_path / "case.nii.gz")
    _, by_hand = places_by_hand(path)
    for number, value in enumerate((3, 40, 700, 800), start=1):
        assert_same_places(by_hand[number], places_of(nifti, [value]))
    assert by_hand[4] == []
    assert len(by_hand[1]) > 5


def test_regions_overlap_come_back_from_another_grid_and_one_slice_stands_for_its_series(write_series, tmp_path):
    folder = write_series(axes=TURNED)
    other = write_series(folder="other", SeriesInstanceUID="1.2.7", step=3.0)
    for file in other.iterdir():
        file.rename(folder / f"other_{file.name}")
    one = folder / "002.dcm"
    volume = read_volume(one)
    case = build_preprocessing([{"name": "Orientation"}, {"name": "Spacing", "spacing": [1, 1, 1]}])({"image": volume})
    labels = labels_for(volume, [0, 1, 2]).byte()
    arguments = {"task": TUMOUR, "series": one, "weights": "0"}
    path = write_dicom_segmentation(labels, case["image"], tmp_path / "a.dcm", **arguments)
    nifti = write_prediction(labels, volume, tmp_path / "case.nii.gz")
    found, places = places_by_hand(path)
    assert [item.SegmentLabel for item in found.SegmentSequence] == ["whole tumour", "core"]
    for number, values in ((1, [1, 2]), (2, [2])):
        assert_same_places(places[number], places_of(nifti, values))
    empty = write_dicom_segmentation(torch.zeros_like(labels), volume, tmp_path / "empty.dcm", **arguments)
    found, places = places_by_hand(empty)
    assert places == {1: [], 2: []}
    assert len(found.SegmentSequence) == 2


def test_it_refers_to_its_source_and_invents_nothing(write_series, tmp_path):
    folder = write_series()
    volume = read_volume(folder)
    labels = labels_for(volume, [0, 3, 40, 700])
    arguments = {"task": ORGANS, "series": folder, "weights": "5f" * 16}
    path = write_dicom_segmentation(labels, volume, tmp_path / "case.dcm", **arguments)
    found, source = pydicom.dcmread(path), pydicom.dcmread(folder / "000.dcm")
    for key in ("PatientID", "PatientName", "StudyInstanceUID", "FrameOfReferenceUID"):
        assert found[key].value == source[key].value
    for key in ("PatientBirthDate", "PatientSex", "StudyDate", "AccessionNumber", "ReferringPhysicianName"):
        assert not found.get(key)  # the source says nothing
    assert found.SeriesInstanceUID != source.SeriesInstanceUID
    referenced = {
        item.ReferencedSOPInstanceUID for item in found.ReferencedSeriesSequence[0].ReferencedInstanceSequence
    }
    assert referenced == {f"1.2.3.{place}" for place in range(1, 7)}
    assert found.ReferencedSeriesSequence[0].SeriesInstanceUID == source.SeriesInstanceUID
    assert found.DeviceSerialNumber == "5f" * 16
    liver, kidney, zone, _ = found.SegmentSequence
    assert liver.SegmentLabel == "Liver"
    assert liver.SegmentedPropertyTypeCodeSequence[0].CodeValue == "10200004"  # SNOMED CT: liver structure
    assert kidney.SegmentedPropertyTypeCodeSequence[0].CodeValue == "64033007"  # kidney structure
    (side,) = kidney.SegmentedPropertyTypeCodeSequence[0].SegmentedPropertyTypeModifierCodeSequence
    assert side.CodeMeaning == "Left"
    assert zone.SegmentLabel == "zone 3"
    assert zone.SegmentedPropertyTypeCodeSequence[0].CodeMeaning == "Tissue"
    colours = {tuple(item.RecommendedDisplayCIELabValue) for item in found.SegmentSequence}
    assert len(colours) == 4
    again = pydicom.dcmread(write_dicom_segmentation(labels, volume, tmp_path / "again.dcm", **arguments))
    assert again.SOPInstanceUID != found.SOPInstanceUID
    assert again.PixelData == found.PixelData


def test_what_is_no_series_is_refused_before_anything_is_computed(write_series, tmp_path, monkeypatch):
    scan = tmp_path / "scan.nii.gz"
    scan.write_bytes(b"no DICOM" * 100)
    words = r"case a: a DICOM segmentation refers to the DICOM slices .* leave out --format"
    for image in (scan, tmp_path / "absent", [tmp_path, tmp_path]):
        with pytest.raises(DataError, match=words):
            require_dicom_source(image, "a")
    folder = write_series()
    for image in (folder, folder / "002.dcm"):
        assert require_dicom_source(image, "a") == image
    monkeypatch.setitem(sys.modules, "highdicom", None)
    with pytest.raises(ConfigError, match="install it: pip install highdicom"):
        require_dicom_source(folder, "a")
    with pytest.raises(ConfigError, match="install it: pip install highdicom"):
        PredictionFiles(folder=tmp_path, label_format="dicom-rtstruct")


def test_slices_that_cannot_be_referred_to_are_refused(write_series, tmp_path):
    folder, other = write_series(leave_out=["FrameOfReferenceUID"]), write_series(folder="other", step=3.0)
    volume, same, files = read_volume(folder), read_volume(other), sorted(other.iterdir())
    labels = torch.zeros(volume.shape, dtype=torch.uint8)
    for label_map, image, series, error, words in (
        (labels, volume, folder, DataError, r"has no FrameOfReferenceUID, so a DICOM segmentation cannot refer to it"),
        (labels, volume, other, GridError, r"DICOM series of .* is up to 5 mm away from its label map"),
        (labels, volume, files[:5], GridError, r"has the shape \(5, 4, 5\), but its label map has \(5, 4, 6\)"),
        (labels, same, [*files[:5], files[0]], DataError, r"6 slices are at 5 place\(s\)"),
        (labels + 9, same, other, DataError, r"has values \[9\], but those of Brain are \[0, 1, 2\]"),
    ):
        with pytest.raises(error, match=words):
            write_dicom_segmentation(label_map, image, tmp_path / "a.dcm", series=series, task=TUMOUR, weights="0")
    assert not (tmp_path / "a.dcm").exists()


def test_every_code_is_one_that_dicom_knows():
    from pydicom.sr.codedict import codes

    for category, kind in CODES.values():
        assert getattr(codes.cid7150, category).value == getattr(codes.SCT, category).value
        assert getattr(codes.SCT, kind).scheme_designator == "SCT"
    assert code_name("Left Atrium").kind == "LeftAtrium"
