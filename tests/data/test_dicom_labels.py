"""DICOM labels have the same voxels as in other readers, on the grid of their image, in every layout."""

import itertools
import json
import shutil
from functools import partial
from pathlib import Path
from unittest.mock import patch

import nibabel
import numpy as np
import pydicom
import pytest
import torch
from dicom_files import SERIES, group, write_series
from pydicom.dataset import Dataset, FileMetaDataset
from typer.testing import CliRunner

from volseg.cli import app
from volseg.data import load_task
from volseg.data.cases import Task
from volseg.data.checks.task import check_task
from volseg.data.dicom.labels import fill_contours, trace_contours
from volseg.data.dicom.series import search_series
from volseg.data.readers import read_label, read_volume
from volseg.errors import DataError, ReaderError
from volseg.evaluation.folders import evaluate_folders
from volseg.inference.dicom_segmentation import write_dicom_segmentation
from volseg.inference.writing import write_prediction

highdicom = pytest.importorskip("highdicom", reason="the extra `dicom` is not installed")

LABELS = {0: "background", 3: "Liver", 40: "kidney_left"}
NAMES = {"labels": {name: value for value, name in LABELS.items()}, "channel_names": {"0": "CT"}}
KINDS = ("SEG", "RTSTRUCT")
SHAPE = (16, 18)
"""Rows and columns."""


def task_of(labels=LABELS, **more):
    return Task(name="T", root=Path(), modalities=("CT",), labels=labels, training=(), test=(), **more)


def write_image(folder, number=1, tilt=0.0, **more):
    """Write a series of six slices with its own UID and the tags that a reference needs."""
    uid = f"{SERIES}.7{number}"
    stored = np.random.default_rng(number).integers(0, 900, (6, *SHAPE)).astype(np.int16)
    for index in range(6):
        of_slice = {"SeriesInstanceUID": uid, "SOPInstanceUID": f"{uid}.{index + 1}", "SliceThickness": 2.0, **more}
        write_series(folder, 1, lambda _, index=index: {}, stored=stored[index], **of_slice, **place_of(index, tilt))
        (folder / "s001.dcm").rename(folder / f"s{9 - index}.dcm")
    return folder


def place_of(index, tilt=0.0):
    empty = ("PatientID", "PatientName", "PatientBirthDate", "PatientSex", "StudyID", "StudyDate", "StudyTime")
    empty = (*empty, "AccessionNumber", "ReferringPhysicianName")
    return {
        **dict.fromkeys(empty, ""),
        "ImagePositionPatient": [-10.0, -20.0 + tilt * index, 5.0 + 2 * index],
        "InstanceNumber": index + 1,
    }


def draw_labels(image, seed=0, values=(0, 0, 3, 40)):
    """Return a random label map: holes, and voxels that touch at corners."""
    drawn = np.random.default_rng(seed).choice(values, image.shape).astype(np.int32)
    drawn[..., 4] = 0  # a slice without labels, which a segmentation leaves out
    return torch.from_numpy(drawn)


def write_label(kind, path, folder, seed=0, task=None, values=(0, 0, 3, 40)):
    """Write the random label map of a series."""
    image, path = read_volume(folder), Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    drawn = draw_labels(image, seed, values)
    write_dicom_segmentation(drawn, image, path, task=task or task_of(), series=folder, weights="5f" * 16, kind=kind)
    return drawn


def write_contours(path, contours, uid=f"{SERIES}.71", names=("LIVER", "body")):
    """Write a structure set by its published layout: contours (LPS mm) of the first region of interest."""
    made = Dataset()
    made.Modality, made.SeriesInstanceUID, made.SOPInstanceUID = "RTSTRUCT", "1.2.9", "1.2.9.1"
    made.SOPClassUID = "1.2.840.10008.5.1.4.1.1.481.3"
    series = group(RTReferencedStudySequence=group(RTReferencedSeriesSequence=group(SeriesInstanceUID=uid)))
    made.ReferencedFrameOfReferenceSequence = series
    made.StructureSetROISequence = [
        item for number, name in enumerate(names, 4) for item in group(ROINumber=number, ROIName=name)
    ]
    drawn = [
        item
        for points in contours
        for item in group(
            ContourGeometricType="CLOSED_PLANAR", ContourData=[f"{value:.4f}" for value in np.ravel(points)]
        )
    ]
    made.ROIContourSequence = group(ReferencedROINumber=4, ContourSequence=drawn)
    made.file_meta = FileMetaDataset()
    made.file_meta.TransferSyntaxUID = pydicom.uid.ImplicitVRLittleEndian
    made.save_as(path, enforce_file_format=True)
    return path


def surround(contours, shape):
    """Return the voxel centres inside an odd number of contours, by the angles of the contours' points."""
    inside = np.zeros(shape, dtype=int)
    at = np.stack(np.indices(shape), -1)[..., None, :]
    for points in contours:
        angles = np.arctan2(*np.moveaxis(points - at, -1, 0))
        turned = (np.diff(angles, axis=-1, append=angles[..., :1]) + np.pi) % (2 * np.pi) - np.pi
        inside += np.abs(turned.sum(-1)) > np.pi
    return inside % 2 == 1


@pytest.mark.parametrize("seed", range(4))
def test_contours_hold_what_they_surround(seed):
    rng = np.random.default_rng(seed)
    contours = []
    for _ in range(rng.integers(1, 4)):
        angles = np.sort(rng.uniform(0, 2 * np.pi, rng.integers(20, 60)))
        radii = rng.uniform(2, 12, len(angles))
        contours.append(rng.uniform(4, 20, 2) + radii[:, None] * np.stack([np.sin(angles), np.cos(angles)], 1))
    filled = fill_contours(contours, (24, 30))
    assert filled.any()
    np.testing.assert_array_equal(filled, surround(contours, (24, 30)))


@pytest.mark.parametrize("share", [0.03, 0.5, 0.97, 1.0])
def test_traced_contours_hold_the_voxels_that_they_were_traced_of(share):
    mask = np.random.default_rng(3).random((23, 31)) < share
    np.testing.assert_array_equal(fill_contours(list(trace_contours(mask)), mask.shape), mask)


@pytest.mark.parametrize(("kind", "tilt"), [("SEG", 0.0), ("SEG", 0.6), ("RTSTRUCT", 0.6)])
def test_regions_that_overlap_are_written_and_read_again(kind, tilt, tmp_path):
    """Also with a tilted gantry, whose segmentation highdicom cannot make a volume of."""
    folder = write_image(tmp_path / "ct", tilt=tilt)
    task = task_of({0: "background", 3: "oedema", 40: "core"}, regions={"whole": (3, 40), "core": (40,)})
    drawn = write_label(kind, tmp_path / "label.dcm", folder, task=task)
    made = highdicom.seg.Segmentation
    with patch.object(made, "from_dataset", wraps=made.from_dataset) as opened:
        assert torch.equal(read_label(tmp_path / "label.dcm", folder, task).as_tensor().int(), drawn)
    assert opened.call_count == (kind == "SEG")  # once per segment, each for all frames
    plain = task_of({0: "background", 1: "whole", 2: "core"})
    with pytest.raises(ReaderError, match=r"'core' overlaps another segment in \d+ voxel\(s\).*declare regions"):
        read_label(tmp_path / "label.dcm", folder, plain)


@pytest.mark.parametrize("kind", ["BINARY", "LABELMAP"])
def test_a_segmentation_is_read_as_highdicom_reads_it(kind, tmp_path):
    folder = write_image(tmp_path / "ct", ImageOrientationPatient=[0.8, 0.6, 0, -0.6, 0.8, 0])
    write_label("SEG", tmp_path / "ours.dcm", folder)
    ours = highdicom.seg.segread(tmp_path / "ours.dcm")
    slices = [pydicom.dcmread(file) for file in sorted(folder.iterdir())]
    planes = np.random.default_rng(5).choice([0, 1, 2], (6, *SHAPE)).astype(np.uint8)
    made = highdicom.seg.Segmentation(
        source_images=slices, pixel_array=planes, segmentation_type=kind,
        segment_descriptions=[ours.get_segment_description(number) for number in (1, 2)],
        series_instance_uid="1.2.8", series_number=9, sop_instance_uid="1.2.8.1", instance_number=1,
        manufacturer="a", manufacturer_model_name="b", software_versions="1", device_serial_number="2",
    )  # fmt: skip
    made.save_as(tmp_path / "label.dcm")
    volume = highdicom.seg.segread(tmp_path / "label.dcm").get_volume(combine_segments=True)
    expected = np.zeros(read_volume(folder).shape, dtype=np.int32)
    image = read_volume(folder)
    for number, value in ((1, 3), (2, 40)):
        places = volume.map_indices_to_reference(np.argwhere(volume.array == number)) * (-1, -1, 1)
        index = np.linalg.solve(image.affine.numpy(), np.c_[places, np.ones(len(places))].T)[:3].round().astype(int)
        expected[0][tuple(index)] = value
    assert (expected > 0).sum() > 500
    np.testing.assert_array_equal(read_label(tmp_path / "label.dcm", folder, task_of()).numpy(), expected)


def ring(radius, height, centre=(-6.11, -14.23), count=40):
    angles = np.linspace(0, 2 * np.pi, count, endpoint=False)
    x, y = centre[0] + radius * np.cos(angles), centre[1] + radius * np.sin(angles)
    return np.stack([x, y, np.full(count, height)], 1)


def test_a_structure_set_of_others_is_filled_in_its_planes(tmp_path):
    folder = write_image(tmp_path / "ct")
    contours = [ring(3.0, 7.0), ring(1.4, 7.0), ring(2.2, 11.0)]
    path = write_contours(tmp_path / "label.dcm", [*contours, ring(0.0, 13.0)])  # the last one has no area
    read = read_label(path, folder, task_of()).numpy()[0]
    for plane, within in ((1, contours[:2]), (3, contours[2:]), (0, []), (2, [])):
        # Rows are 0.75 mm apart and columns 0.5 mm, from (-10, -20) mm.
        points = [(one[:, 1::-1] - (-20, -10)) / (0.75, 0.5) for one in within]
        np.testing.assert_array_equal(read[:, :, plane].T == 3, surround(points, SHAPE))
    assert set(np.unique(read)) == {0, 3}
    image = read_volume(folder)
    nifti = write_prediction(torch.zeros(image.shape, dtype=torch.uint8), image, tmp_path / "ct.nii.gz")
    np.testing.assert_array_equal(read_label(path, nifti, task_of()).numpy()[0], read)


@pytest.mark.parametrize(
    ("contours", "said"),
    [
        ([ring(2.0, 8.0)], r"has a contour at \[.*\] mm, 0\.5 voxels from plane \d of 6 of its image \(at most 0\.1\)"),
        ([ring(2.0, 25.0)], r"0 voxels from plane 10 of 6 of its image"),
        ([ring(2.0, 7.0) * (1, 1, 0) + (0, 0, 1) * np.linspace(6, 9, 40)[:, None]], "voxels from plane"),
        ([ring(2.0, 7.0)[:2]], r"is not three or more points \(x, y, z\)"),
    ],
)
def test_contours_beside_the_planes_are_refused(contours, said, tmp_path):
    path = write_contours(tmp_path / "label.dcm", contours)
    with pytest.raises(ReaderError, match=said):
        read_label(path, write_image(tmp_path / "ct"), task_of())


def test_what_does_not_belong_together_is_refused(tmp_path):
    folder, other = write_image(tmp_path / "ct"), write_image(tmp_path / "other", 2)
    path = tmp_path / "label.dcm"
    write_label("SEG", path, folder)
    with pytest.raises(ReaderError, match=rf"of series {SERIES}.71, 2 segments, but its image is series {SERIES}.72"):
        read_label(path, other, task_of())
    with pytest.raises(ReaderError, match=r"called Liver, kidney_left, but T declares Leber; use the segments' names"):
        read_label(path, folder, task_of({0: "background", 1: "Leber"}))
    with pytest.raises(ReaderError, match="which needs its image and the names of labels"):
        read_label(path)
    made = pydicom.dcmread(path)
    made.SegmentationType = "FRACTIONAL"
    made.save_as(tmp_path / "fractional.dcm")
    with pytest.raises(ReaderError, match="is a FRACTIONAL segmentation; convert it to BINARY"):
        read_label(tmp_path / "fractional.dcm", folder, task_of())
    image = read_volume(folder)
    moved = nibabel.Nifti1Image(np.zeros(image.shape[1:], np.uint8), image.affine.numpy())
    for by, said in ((0.15, "up to 0.15 voxels away"), (0.09, None)):
        place = image.affine.numpy().copy()
        place[0, 3] += by * 0.5
        moved.set_sform(place)
        nibabel.save(moved, tmp_path / "moved.nii")
        if said is None:
            assert read_label(path, tmp_path / "moved.nii", task_of()).any()
        else:
            with pytest.raises(ReaderError, match=said):
                read_label(path, tmp_path / "moved.nii", task_of())


PLACES = {
    "folders": ("images/case{0}", "labels/case{0}.dcm"),
    "series": ("images/case{0}", "labels/1.2.{1}/1-1.dcm"),
    "patients": ("case{0}/ct", "case{0}/a/1-1.dcm"),
    "one folder": ("case{0}", "case{0}/t.dcm"),
}
"""Image and label of a case by its number, and by a number against its order."""


def write_cases(root, kind, layout="folders", manifest=NAMES):
    for number, seed in ((1, 0), (2, 1)):
        image, label = (root / place.format(number, 9 - number) for place in PLACES[layout])
        write_label(kind, label, write_image(image, number), seed)
    if manifest is not None:
        (root / "dataset.json").write_text(json.dumps(manifest), encoding="utf-8")
    return root


def write_as_table(root, kind):
    rows = [f"case{number},images/case{number},labels/case{number}.dcm" for number in (1, 2)]
    (write_cases(root, kind) / "cases.csv").write_text("\n".join(["case,image,label", *rows]), encoding="utf-8")
    return root / "cases.csv"


def write_as_msd(root, kind):
    entries = [{"image": f"images/case{number}", "label": f"labels/case{number}.dcm"} for number in (1, 2)]
    return write_cases(root, kind, manifest={**NAMES, "training": entries})


def write_as_nnunet(root, kind):
    (write_cases(root, kind, manifest={**NAMES, "file_ending": ".nii.gz"}) / "labels").rename(root / "labelsTr")
    (root / "imagesTr").mkdir()
    for number in (1, 2):
        image = read_volume(root / f"images/case{number}")
        path = root / f"imagesTr/case{number}_0000.nii.gz"
        nibabel.save(nibabel.Nifti1Image(image.numpy()[0], image.affine.numpy()), path)
    shutil.rmtree(root / "images")
    return root


LAYOUTS = {
    **{layout: partial(write_cases, layout=layout) for layout in PLACES},
    "table": write_as_table,
    "msd": write_as_msd,
    "nnunet": write_as_nnunet,
}


@pytest.mark.parametrize(("layout", "kind"), list(zip(LAYOUTS, itertools.cycle(KINDS), strict=False)))
def test_every_layout_has_labels_in_dicom(layout, kind, tmp_path):
    task = load_task(LAYOUTS[layout](tmp_path / "data", kind))
    assert [case["case"] for case in task.training] == ["case1", "case2"]
    for seed, case in enumerate(task.training):
        read = read_label(case["label"], case["image"], task)
        assert torch.equal(read.as_tensor().int(), draw_labels(read_volume(case["image"]), seed))
    assert check_task(task).problems == []


def test_labels_without_a_partner_or_declared_names_are_refused(tmp_path):
    write_cases(tmp_path / "data", "RTSTRUCT", manifest=None)
    said = r'declare the labels to segment in dataset.json: {"labels": {"background": 0, "Liver": 1, "kidney_left": 2}}'
    with pytest.raises(DataError, match=said):
        load_task(tmp_path / "data")
    shutil.rmtree(tmp_path / "data/images/case2")
    with pytest.raises(DataError, match=rf"case2.dcm \(structure set of series {SERIES}.72, 2 segments\)"):
        load_task(tmp_path / "data")


@pytest.mark.parametrize("kind", KINDS)
def test_predictions_are_compared_with_labels_in_dicom(kind, tmp_path):
    write_cases(tmp_path / "data", kind)
    (tmp_path / "nifti").mkdir()
    for number, seed in ((1, 0), (2, 1)):
        image = read_volume(tmp_path / f"data/images/case{number}")
        write_prediction(draw_labels(image, seed), image, tmp_path / f"nifti/case{number}.nii.gz")
    for predictions in (tmp_path / "nifti", tmp_path / "data/labels"):
        found = evaluate_folders(predictions, tmp_path / "data", distances=False)
        assert found.faults == {}
        assert {label: of["Dice"] for label, of in found.summary["mean"].items()} == {"3": 1.0, "40": 1.0}
    found = CliRunner().invoke(app, ["data", "check", str(tmp_path / "data")])
    assert found.exit_code == 0, found.output


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_is_read_again_and_damaged_files_are_refused(kind, tmp_path):
    """With names in any script, and a label next to the slices."""
    folder, task = write_image(tmp_path / "ct"), task_of({0: "background", 3: "Küvette", 40: "kidney_left"})
    drawn = write_label(kind, folder / "label.dcm", folder, task=task)
    read = read_label(folder / "label.dcm", folder, task)
    assert torch.equal(read.as_tensor().int(), drawn)
    [beside] = search_series(folder).others
    assert beside.left_out == f"derived from images ({kind})"
    (folder / "label.dcm").rename(tmp_path / "label.dcm")
    assert torch.equal(read.affine, read_volume(folder).affine)
    content = (tmp_path / "label.dcm").read_bytes()
    for kept in (0.3, 0.99):
        (tmp_path / "cut.dcm").write_bytes(content[: int(kept * len(content))])
        with pytest.raises(ReaderError, match=r"cut\.dcm is not a readable DICOM file"):
            read_label(tmp_path / "cut.dcm", folder, task)


def test_frames_may_share_the_number_of_their_segment(tmp_path):
    """The number was read from each frame only, and the second segment counted as the first."""
    folder, path = write_image(tmp_path / "ct"), tmp_path / "label.dcm"
    drawn = write_label("SEG", path, folder, values=(0, 40))
    made = pydicom.dcmread(path)
    for groups in made.PerFrameFunctionalGroupsSequence:
        shared = groups.SegmentIdentificationSequence
        del groups.SegmentIdentificationSequence
    made.SharedFunctionalGroupsSequence[0].SegmentIdentificationSequence = shared
    made.save_as(path)
    assert torch.equal(read_label(path, folder, task_of()).as_tensor().int(), drawn)
