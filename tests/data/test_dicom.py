import shutil

import numpy as np
import pytest
from dicom_files import SERIES, place, write_series, write_slice
from pydicom.uid import UID

from volseg.data.dicom.volumes import read_dicom_series
from volseg.data.readers import read_volume
from volseg.errors import ReaderError


def stack(folder, places=range(6), tilt=0.0, **more):
    """Write slices at given places of an even stack, each moved back by the tilt of the gantry."""
    positions = [np.add(place(at), (0, tilt * at, 0)).tolist() for at in places]
    return write_series(folder, len(positions), lambda index: {"ImagePositionPatient": positions[index]}, **more)


def test_tilted_gantry_keeps_its_shear(tmp_path):
    """ITK straightens such a stack, although each slice gives its position."""
    volume = read_volume(stack(tmp_path, tilt=0.3))
    np.testing.assert_allclose(volume.affine[:3, 2], [0, -0.3, 2.0], atol=1e-9)


@pytest.mark.parametrize("places", [(0, 1, 2, 4, 5, 6), (0, 2, 3, 4, 5)], ids=["middle", "end"])
def test_uneven_stack_is_refused(tmp_path, places):
    with pytest.raises(ReaderError, match=r"slices are not evenly spaced: 4 mm between .*; a slice is missing"):
        read_volume(stack(tmp_path, places))


def test_several_series_are_named(tmp_path):
    folder = stack(tmp_path)
    stack(tmp_path / "other", SeriesInstanceUID=f"{SERIES}.2")
    for file in (tmp_path / "other").iterdir():
        file.rename(folder / f"other_{file.name}")
    with pytest.raises(
        ReaderError, match=rf"contains 2 DICOM series: {SERIES} \(6 files, s001.dcm ...\); .*2 \(6 files"
    ):
        read_volume(folder)


def test_truncated_slice_and_a_folder_without_series(tmp_path, capfd):
    path = stack(tmp_path) / "s003.dcm"
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(ReaderError, match=r"s003\.dcm is not a readable DICOM file; fetch it again"):
        read_volume(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty/notes.txt").write_text("nothing here", encoding="utf-8")
    with pytest.raises(ReaderError, match="contains no readable DICOM series; name the folder with the slices"):
        read_volume(tmp_path / "empty")
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("syntax", ["1.2.840.10008.1.2.2", "1.2.840.10008.1.2.1.99"], ids=["big-endian", "deflated"])
def test_rare_transfer_syntaxes_are_refused(tmp_path, syntax):
    write_slice(tmp_path / "a.dcm", 0, syntax=UID(syntax))
    with pytest.raises(ReaderError, match=r"a\.dcm is deflated or big-endian DICOM, .* not supported; convert it"):
        read_volume(tmp_path / "a.dcm")


def test_file_that_is_no_dicom(tmp_path):
    stack(tmp_path / "series")
    (tmp_path / "series/s001.dcm").write_bytes(b"broken" * 50)  # the last slice: the rest is an even stack
    (tmp_path / "series/._s001.dcm").write_bytes(b"left by macOS")
    (tmp_path / "series/notes.txt").write_text("not an image", encoding="utf-8")
    with pytest.raises(ReaderError, match=r"series/s001\.dcm is not a readable DICOM file"):
        read_volume(tmp_path / "series")


@pytest.mark.real_data
def test_real_series(dicom_series, tmp_path, capfd):
    volume = read_dicom_series(dicom_series)
    assert volume.shape == (1, 35, 51, 32)
    np.testing.assert_allclose(volume.affine, [[-1, 0, 0, 0], [0, -1, 0, 0], [0, 0, 1, 1], [0, 0, 0, 1]])
    copy = shutil.copytree(dicom_series, tmp_path / "copy")
    (copy / "5.dcm").unlink()
    with pytest.raises(ReaderError, match=r"31 slices are not evenly spaced: 2 mm between 4\.dcm and 6\.dcm, 1 mm"):
        read_dicom_series(copy)
    assert capfd.readouterr().err == ""
