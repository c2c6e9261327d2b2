import locale
import shutil

import numpy as np
import pytest

from volseg.data.dicom.volumes import read_dicom_series
from volseg.data.readers import read_volume
from volseg.errors import ReaderError

SimpleITK = pytest.importorskip("SimpleITK", reason="a machine that only runs GPU tests may lack it")

UID = "1.2.826.0.1.3680043.2.1125.1"


@pytest.fixture
def write_series(tmp_path):
    """Return a function that writes slices at given places (mm along k) into a folder."""

    def write(folder="series", places=range(6), uid=UID, tilt=0.0, directions=None):
        folder = tmp_path / folder
        folder.mkdir(exist_ok=True)
        writer = SimpleITK.ImageFileWriter()
        writer.KeepOriginalImageUIDOn()
        for index, place in enumerate(places):
            voxels = np.random.default_rng(index).integers(-100, 900, (1, 4, 5)).astype(np.int16)
            image = SimpleITK.GetImageFromArray(voxels)
            image.SetSpacing((0.5, 0.75, 2.0))
            image.SetOrigin((1.0, 2.0 + tilt * place, 2.0 * place))
            if directions is not None:
                image.SetDirection(directions[index])
            image.SetMetaData("0008|0060", "MR")
            image.SetMetaData("0020|000e", uid)
            image.SetMetaData("0008|0018", f"{uid}.{index + 1}")
            writer.SetFileName(str(folder / f"{uid[-1]}{index:03d}.dcm"))
            writer.Execute(image)
        return folder

    return write


def test_series_becomes_a_volume_in_ras(write_series):
    volume = read_volume(write_series())
    assert volume.shape == (1, 5, 4, 6)
    expected = [[-0.5, 0, 0, -1], [0, -0.75, 0, -2], [0, 0, 2, 0], [0, 0, 0, 1]]
    np.testing.assert_allclose(volume.affine, expected, atol=1e-9)
    for index in range(6):
        slices = np.random.default_rng(index).integers(-100, 900, (1, 4, 5))
        np.testing.assert_array_equal(volume.numpy()[0, :, :, index], slices[0].T)


def test_tilted_gantry_keeps_its_shear(write_series):
    """ITK straightens such a stack; each slice says where it lies."""
    volume = read_volume(write_series(tilt=0.3))
    np.testing.assert_allclose(volume.affine[:3, 2], [0, -0.3, 2.0], atol=1e-9)


@pytest.mark.parametrize("places", [(0, 1, 2, 4, 5, 6), (0, 2, 3, 4, 5)], ids=["middle", "end"])
def test_uneven_stack_is_refused(write_series, places):
    with pytest.raises(ReaderError, match=r"slices are not evenly spaced: 4 mm between .*; a slice is missing"):
        read_volume(write_series(places=places))


def test_doubled_slice_is_named(write_series):
    with pytest.raises(
        ReaderError,
        match=r"5 slices at 4 places, 1 to 2 at each, a volume needs one: 1001\.dcm and 1002\.dcm both lie at "
        r"\[1\.0, 2\.0, 2\.0\] mm",
    ):
        read_volume(write_series(places=(0, 1, 1, 2, 3)))


def test_rounded_positions_are_an_even_stack(write_series):
    volume = read_volume(write_series(places=[0, 1.004, 1.996, 3.003, 4]))
    np.testing.assert_allclose(volume.affine[:3, 2], [0, 0, 2.0], atol=1e-9)


def test_several_series_are_named(write_series):
    write_series(uid=UID)
    folder = write_series(uid=UID[:-1] + "2")
    with pytest.raises(ReaderError, match=rf"holds 2 DICOM series: {UID} \(6 files, 1000.dcm ...\); .*2 \(6 files"):
        read_volume(folder)


def test_slices_turned_against_each_other(write_series):
    straight = (1, 0, 0, 0, 1, 0, 0, 0, 1)
    turned = (0.96, -0.28, 0, 0.28, 0.96, 0, 0, 0, 1)
    folder = write_series(directions=[straight, straight, turned, straight], places=range(4))
    with pytest.raises(ReaderError, match=r"1002\.dcm is turned against 1000\.dcm; a volume needs parallel slices"):
        read_volume(folder)


def test_truncated_slice(write_series):
    folder = write_series()
    path = folder / "1003.dcm"
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(ReaderError, match=r"1003\.dcm is no readable DICOM file; fetch it again"):
        read_volume(folder)


def test_slices_of_another_size(write_series):
    folder = write_series()
    image = SimpleITK.ReadImage(str(folder / "1003.dcm"))
    writer = SimpleITK.ImageFileWriter()
    writer.KeepOriginalImageUIDOn()
    writer.SetFileName(str(folder / "1003.dcm"))
    smaller = image[:3]
    for tag in image.GetMetaDataKeys():
        smaller.SetMetaData(tag, image.GetMetaData(tag))
    before = locale.setlocale(locale.LC_ALL)
    writer.Execute(smaller)
    locale.setlocale(locale.LC_ALL, before)  # ITK's writer leaves C behind, where it is given so much metadata
    with pytest.raises(ReaderError, match=r"1003\.dcm has 3 x 4 voxels, 1000\.dcm has 5 x 4 \(5, 1 slices are alike\)"):
        read_volume(folder)


def test_slices_without_a_place(write_series):
    folder = write_series()
    for path in folder.iterdir():  # rename ImagePositionPatient to a tag that nobody knows
        path.write_bytes(path.read_bytes().replace(b"\x20\x00\x32\x00", b"\x20\x00\x33\x00"))
    with pytest.raises(ReaderError, match=r"1000\.dcm needs 3 numbers in DICOM tag \(0020,0032\), but has ''"):
        read_volume(folder)


def test_file_that_is_no_dicom(write_series):
    folder = write_series()
    (folder / "1005.dcm").write_bytes(b"broken" * 50)  # the last slice: the rest is an even stack
    (folder / "._1000.dcm").write_bytes(b"left by macOS")
    (folder / "notes.txt").write_text("not an image", encoding="utf-8")
    with pytest.raises(ReaderError, match=r"series/1005\.dcm is no readable DICOM file"):
        read_volume(folder)


def test_folder_without_series_stays_quiet(tmp_path, capfd):
    (tmp_path / "notes.txt").write_text("nothing here", encoding="utf-8")
    with pytest.raises(ReaderError, match="holds no readable DICOM series; name the folder that holds the slices"):
        read_volume(tmp_path)
    assert capfd.readouterr().err == ""


@pytest.mark.real_data
def test_real_series(dicom_series, tmp_path, capfd):
    volume = read_dicom_series(dicom_series)
    assert volume.shape == (1, 35, 51, 32)
    np.testing.assert_allclose(volume.affine, [[-1, 0, 0, 0], [0, -1, 0, 0], [0, 0, 1, 1], [0, 0, 0, 1]])
    copy = shutil.copytree(dicom_series, tmp_path / "copy")
    (copy / "5.dcm").unlink()
    with pytest.raises(
        ReaderError, match=r"31 slices are not evenly spaced: 2 mm between 4\.dcm and 6\.dcm, 1 mm elsewhere"
    ):
        read_dicom_series(copy)
    assert capfd.readouterr().err == ""
