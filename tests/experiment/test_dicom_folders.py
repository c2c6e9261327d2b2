"""DICOM series in and below a folder, their names, and reading a series from one of its files."""

import shutil
import struct
from pathlib import Path

import numpy as np
import pytest

from volseg.data.dicom.elements import read_header
from volseg.data.dicom.series import choose_series, name_series, search_series
from volseg.data.readers import read_volume
from volseg.errors import DataError, ReaderError
from volseg.experiment.prediction.predicting import resolve_images

SimpleITK = pytest.importorskip("SimpleITK", reason="a machine that only runs GPU tests may lack it")

UID = "1.2.826.0.1.3680043.2.1125.7"


@pytest.fixture
def write_series(tmp_path):
    """Return a function that writes a series of four slices into a folder."""

    def write(
        folder, number, description="T1", *, image_type="ORIGINAL\\PRIMARY\\AXIAL", patient="P1", fill=0, said=None
    ):
        folder = tmp_path / folder
        folder.mkdir(parents=True, exist_ok=True)
        writer = SimpleITK.ImageFileWriter()
        writer.KeepOriginalImageUIDOn()
        uid = f"{UID}.{number}"
        for index in range(4):
            image = SimpleITK.GetImageFromArray(np.full((1, 4, 5), fill + index, dtype=np.int16))
            image.SetOrigin((0.0, 0.0, 2.0 * index))
            tags = {
                "0008|0008": image_type,
                "0008|0018": f"{uid}.{index + 1}",
                "0008|0020": "20240102",
                "0008|0060": "MR",
                "0008|103e": description,
                "0010|0020": patient,
                "0020|000e": uid,
                "0020|0011": str(said or number),
            }
            for tag, value in tags.items():
                image.SetMetaData(tag, value)
            # Named against their order: the reader has to sort them.
            writer.SetFileName(str(folder / f"s{number}_{9 - index}"))
            writer.SetImageIO("GDCMImageIO")
            writer.Execute(image)
        return folder

    return write


def write_object(path, modality, uid):
    """Write a DICOM file without an image, such as a structure set."""

    def element(group, number, kind, value):
        value += b"\0" * (len(value) % 2) if kind == b"UI" else b" " * (len(value) % 2)
        return struct.pack("<HH2sH", group, number, kind, len(value)) + value

    syntax = element(0x0002, 0x0010, b"UI", b"1.2.840.10008.1.2.1")
    body = element(0x0008, 0x0060, b"CS", modality.encode()) + element(0x0020, 0x000E, b"UI", uid.encode())
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(128) + b"DICM" + syntax + body)


def test_series_below_a_folder_are_cases_with_names_of_their_own(write_series, tmp_path, monkeypatch):
    write_series("export/P1/study/a", 1, "T1 sag")
    write_series("export/P1/study/b", 2, "T2/FLAIR")
    write_series("export/P2/study/a", 3, "T1 sag", patient="P2 é")
    cases = resolve_images([tmp_path / "export"])
    assert [case["case"] for case in cases] == [
        "P1_20240102_1_T1-sag",
        "P1_20240102_2_T2-FLAIR",
        "P2_20240102_3_T1-sag",
    ]
    assert resolve_images([tmp_path / "export" / "P1" / "study" / "a"]) == [
        {"case": "a", "image": tmp_path / "export" / "P1" / "study" / "a"}
    ]
    monkeypatch.chdir(tmp_path / "export" / "P1" / "study" / "a")
    assert resolve_images([Path()])[0]["case"] == "a", "the current folder has a name"
    before = name_series(choose_series(search_series(tmp_path / "export"), [], "export"))
    write_series("export/P1/study/c", 4)
    after = name_series(choose_series(search_series(tmp_path / "export"), [], "export"))
    assert before.items() <= after.items(), "names do not depend on what else is found"


def test_series_that_share_a_folder_are_read_apart_and_sorted(write_series, tmp_path):
    folder = write_series("flat", 1)
    write_series("flat", 2, fill=100)
    cases = resolve_images([folder])
    assert [case["case"] for case in cases] == ["P1_20240102_1_T1", "P1_20240102_2_T1"]
    assert resolve_images(sorted(folder.iterdir())) == cases, "named slice by slice"
    first, second = (read_volume(case["image"]) for case in cases)
    assert first.shape == second.shape == (1, 5, 4, 4)
    assert first[0, 0, 0].tolist() == [0, 1, 2, 3]
    assert second[0, 0, 0].tolist() == [100, 101, 102, 103]
    alone = tmp_path / "alone"
    alone.mkdir()
    for file in folder.glob("s1_*"):
        shutil.copy(file, alone)
    whole = read_volume(alone)
    np.testing.assert_array_equal(whole, first)
    np.testing.assert_array_equal(whole.affine, first.affine)
    with pytest.raises(ReaderError, match="contains 2 DICOM series"):
        read_volume(folder)


def test_what_is_no_image_to_segment_is_left_out_and_named(write_series, tmp_path, caplog):
    write_series("export", 1)
    write_series("export", 2, "whatever", image_type="ORIGINAL\\PRIMARY\\LOCALIZER")
    write_series("export", 3, "3-plane Scout")
    write_object(tmp_path / "export" / "rt" / "structures", "RTSTRUCT", f"{UID}.4")
    write_object(tmp_path / "export" / "report", "SR", f"{UID}.5")
    (tmp_path / "export" / "readme.txt").write_text("from the PACS", encoding="utf-8")
    with caplog.at_level("INFO"):
        [case] = resolve_images([tmp_path / "export"])
    assert case["case"] == "export"  # one series, whose folder was named
    for what in ("4 series left out", "a localizer;", "a localizer, by its description", "(RTSTRUCT)", "images (SR)"):
        assert what in caplog.text
    [scout] = resolve_images([tmp_path / "export"], series=["scout"])
    assert scout["image"].name.startswith("s3_")
    assert len(resolve_images([tmp_path / "export"], series=[f"{UID}.1", f"{UID}.2"])) == 2
    with pytest.raises(DataError, match=r"no series matches 'T7'; found: .*7\.1 \(MR 'T1', 4 file\(s\) in"):
        resolve_images([tmp_path / "export"], series=["T7"])


def test_a_folder_without_an_image_is_refused(tmp_path):
    write_object(tmp_path / "export" / "a" / "one", "SR", f"{UID}.5")
    write_object(tmp_path / "export" / "b" / "two", "KO", f"{UID}.6")
    (tmp_path / "Task01" / "imagesTs").mkdir(parents=True)
    (tmp_path / "Task01" / "dataset.json").write_text("{}", encoding="utf-8")
    (tmp_path / "scan.nii.gz").write_bytes(b"not read here")
    for path, series, message in (
        ("export", [], r"no series is an image; found: .*7\.5 .*: derived from images \(SR\), .*7\.6 .*: .*\(KO\)"),
        ("Task01", [], r"Task01 contains neither an image nor a DICOM series; name another folder"),
        ("scan.nii.gz", ["T1"], r"scan\.nii\.gz: there is no DICOM series to choose from; leave out --series"),
    ):
        with pytest.raises(DataError, match=message):
            resolve_images([tmp_path / path], series=series)


def test_series_that_would_be_called_alike_are_told_apart(write_series, tmp_path):
    write_series("export/a", 1)
    write_series("export/b", 2, said=1)
    names = [case["case"] for case in resolve_images([tmp_path / "export"])]
    assert len(set(names)) == 2
    assert all(name.startswith("P1_20240102_1_T1_") and len(name) == 25 for name in names)


def test_a_damaged_file_spoils_its_folder_and_no_other(write_series, tmp_path):
    write_series("export/good", 1)
    write_series("export/spoilt", 2)
    (tmp_path / "export" / "spoilt" / "x.dcm").write_bytes(b"broken" * 50)
    (tmp_path / "export" / "lost").mkdir()
    (tmp_path / "export" / "lost" / "y.dcm").write_bytes(b"broken" * 50)
    good, spoilt, lost = resolve_images([tmp_path / "export"])
    assert read_volume(good["image"]).shape == (1, 5, 4, 4)
    with pytest.raises(ReaderError, match=r"x\.dcm is not a readable DICOM file"):
        read_volume(spoilt["image"])
    assert lost["case"] == "lost"
    with pytest.raises(ReaderError, match="contains no readable DICOM series"):
        read_volume(lost["image"])


def test_a_series_in_two_folders_is_refused(write_series, tmp_path):
    write_series("export/a", 1)
    write_series("export/b", 1)
    with pytest.raises(DataError, match=rf"series {UID}\.1 is spread over 2 folders"):
        resolve_images([tmp_path / "export"])
    assert len(resolve_images([tmp_path / "export" / "a"])) == 1


def test_a_header_is_read_as_far_as_it_is_needed(write_series):
    file = next(write_series("a", 1).iterdir())
    wanted = [(0x0010, 0x0020), (0x0008, 0x0060), (0x0009, 0x0001)]
    assert read_header(file, wanted, to_end=False).top.elements == {(0x0010, 0x0020): b"P1", (0x0008, 0x0060): b"MR"}
    file.write_bytes(file.read_bytes()[:-30])  # the voxels, of which nothing is looked at
    assert read_header(file, wanted[:1], to_end=False).top.elements == {(0x0010, 0x0020): b"P1"}
    file.write_bytes(b"no DICOM at all, and long enough" * 9)
    assert read_header(file, wanted) is None
