"""An affine read by itself is the one that the voxels come with."""

import gzip

import nibabel
import numpy as np
import pytest
import SimpleITK

from volseg.data.readers import read_affine, read_volume
from volseg.errors import ReaderError

AFFINE = np.array([[0, -2.0, 0.1, 5], [1.5, 0, 0, -7], [0, 0.1, 4.0, 9], [0, 0, 0, 1]])


@pytest.mark.parametrize("unit", ["mm", "meter", "micron", "unknown"])
@pytest.mark.parametrize("suffix", [".nii", ".nii.gz"])
@pytest.mark.parametrize("kind", [nibabel.Nifti1Image, nibabel.Nifti2Image])
def test_nifti(tmp_path, kind, suffix, unit):
    image = kind(np.zeros((3, 4, 5), np.int16), AFFINE)
    image.header.set_xyzt_units(unit)
    nibabel.save(image, tmp_path / f"image{suffix}")
    np.testing.assert_array_equal(
        read_affine(tmp_path / f"image{suffix}"), read_volume(tmp_path / f"image{suffix}").affine
    )


def test_nifti_placed_by_its_spacing_alone(tmp_path):
    image = nibabel.Nifti1Image(np.zeros((3, 4, 5), np.int16), None)
    image.header.set_zooms((1, 2, 3))
    nibabel.save(image, tmp_path / "image.nii")
    np.testing.assert_array_equal(read_affine(tmp_path / "image.nii"), read_volume(tmp_path / "image.nii").affine)


@pytest.mark.parametrize("suffix", [".mha", ".nrrd"])
def test_other_formats(tmp_path, suffix):
    image = SimpleITK.GetImageFromArray(np.zeros((3, 4, 5), np.int16))
    image.SetSpacing((1.0, 2.0, 4.0))
    SimpleITK.WriteImage(image, tmp_path / f"image{suffix}")
    assert np.linalg.norm(read_affine(tmp_path / f"image{suffix}")[:3, :3], axis=0).tolist() == [1, 2, 4]


@pytest.mark.parametrize(
    "content", [b"", b"no image", gzip.compress(b"\0" * 600, mtime=0)], ids=["empty", "text", "zeros"]
)
@pytest.mark.parametrize("suffix", [".nii", ".nii.gz"])
def test_what_is_no_header_is_refused(tmp_path, content, suffix):
    path = tmp_path / f"image{suffix}"
    path.write_bytes(content)
    with pytest.raises(ReaderError, match=path.name):
        read_affine(path)


def test_voxels_are_not_needed(tmp_path):
    nibabel.save(nibabel.Nifti1Image(np.zeros((30, 40, 50), np.int16), AFFINE), tmp_path / "whole.nii")
    (tmp_path / "short.nii.gz").write_bytes(gzip.compress((tmp_path / "whole.nii").read_bytes())[:200])
    np.testing.assert_allclose(read_affine(tmp_path / "short.nii.gz"), AFFINE, atol=1e-6)  # float32 in the file
