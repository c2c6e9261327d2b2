import gzip
import logging
import subprocess
import sys

import nibabel
import numpy as np
import pytest
import SimpleITK
import torch
from monai.data import MetaTensor

from volseg.data.readers import Read, list_files, name_files, read_affine, read_volume
from volseg.errors import BatchFieldError, ReaderError


def test_keeps_the_stored_order_and_its_place_and_what_a_writer_needs(save, ramp, affine):
    path = save(ramp)
    volume, meta = read_volume(path), read_volume(path).meta
    assert isinstance(volume, MetaTensor)
    assert volume.dtype == torch.float32
    assert volume.is_contiguous()
    assert volume.affine.dtype == torch.float64
    np.testing.assert_array_equal(volume.numpy(), ramp[None])
    np.testing.assert_allclose(volume.affine, affine, atol=1e-6)  # NIfTI keeps the affine as float32
    torch.testing.assert_close(meta["original_affine"], volume.affine)
    assert (meta["filename_or_obj"], meta["original_dtype"], meta["spatial_shape"]) == (str(path), "int16", ramp.shape)
    assert (meta["sform_code"], meta["qform_code"]) == (2, 0)  # nibabel writes an sform "aligned" and no qform


@pytest.mark.parametrize("shape", [(3, 4, 5, 2), (3, 4, 5, 1, 2)], ids=["4D", "vectors"])
def test_further_axis_becomes_channels(save, ramp, shape):
    volume = read_volume(save(np.stack([ramp, -ramp], axis=-1).reshape(shape)))
    np.testing.assert_array_equal(volume.numpy(), np.stack([ramp, -ramp]))


@pytest.mark.parametrize("image", [nibabel.Nifti1Image, nibabel.Nifti2Image])
@pytest.mark.parametrize("name", ["volume.nii", "VOLUME.NII.GZ"])
def test_both_versions_compressed_or_not(save, ramp, image, name):
    np.testing.assert_array_equal(read_volume(save(ramp, name, image=image)).numpy()[0], ramp)


def test_big_endian_and_scaled_voxels(tmp_path, ramp, affine):
    header = nibabel.Nifti1Header(endianness=">")
    image = nibabel.Nifti1Image(ramp.astype(">i2"), affine, header)
    image.header.set_slope_inter(0.5, -3.0)
    nibabel.save(image, tmp_path / "scaled.nii")
    stored = nibabel.load(tmp_path / "scaled.nii")
    assert stored.header.endianness == ">"
    np.testing.assert_allclose(read_volume(tmp_path / "scaled.nii").numpy()[0], stored.get_fdata(), rtol=1e-6)


@pytest.mark.parametrize(("unit", "millimetres"), [("meter", 1e3), ("micron", 1e-3), ("mm", 1.0), ("unknown", 1.0)])
def test_units_become_millimetres(tmp_path, ramp, affine, unit, millimetres):
    image = nibabel.Nifti1Image(ramp, affine)
    image.header.set_xyzt_units(unit)
    nibabel.save(image, tmp_path / "unit.nii.gz")
    expected = affine.copy()
    expected[:3] *= millimetres
    np.testing.assert_allclose(read_volume(tmp_path / "unit.nii.gz").affine, expected, rtol=1e-6, atol=1e-12)


def test_a_file_without_place_is_said_once(tmp_path, ramp, caplog):
    image = nibabel.Nifti1Image(ramp, None)
    nibabel.save(image, tmp_path / "nowhere.nii.gz")
    with caplog.at_level(logging.WARNING, logger="volseg.data"):
        read_volume(tmp_path / "nowhere.nii.gz")
    [record] = caplog.records
    assert "nowhere.nii.gz has neither sform nor qform" in record.getMessage()


def flip(place, bit, compresslevel=None):
    """Return a function that flips a bit of a compressed file, compressed again at a level."""

    def change(packed):
        packed = bytearray(packed if compresslevel is None else gzip.compress(gzip.decompress(packed), compresslevel))
        packed[place if place >= 0 else len(packed) // 2] ^= bit
        return bytes(packed)

    return change


DAMAGES = {
    "cut": ("volume.nii.gz", lambda content: content[:-200], r" \(.*end-of-stream.*fetch it again"),
    "cut and plain": ("volume.nii", lambda content: content[:-20], r" \(Expected 5832 bytes, got 5812"),
    # nibabel alone stops before gzip's checksum and returns the damaged voxels.
    "a bit of a voxel": ("volume.nii.gz", flip(-1, 1, compresslevel=0), r" \(CRC check failed"),
    # Among them flags that are reserved (RFC 1952), which the library that decompresses does not look at.
    **{
        f"byte {byte}, bit {bit}": ("volume.nii.gz", flip(byte, bit), "")
        for byte in range(4)
        for bit in (0x20, 0x40, 0x80)
    },
}


@pytest.mark.parametrize(("name", "change", "message"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_file_is_named(save, name, change, message):
    path = save(np.random.default_rng(0).standard_normal((9, 9, 9)), name)
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ReaderError, match=rf"{name} is truncated or damaged{message}"):
        read_volume(path)


@pytest.mark.parametrize("content", [b"", b"no image" * 99], ids=["empty", "text"])
@pytest.mark.parametrize("name", ["x.nii", "x.nii.gz", "x.mha", "x.nrrd"])
def test_a_file_of_another_kind(tmp_path, content, name):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ReaderError, match=rf"{name} is (truncated|not a NIfTI file)"):
        read_volume(tmp_path / name)


COLOURS = np.zeros((2, 2, 2), dtype=[("R", "u1"), ("G", "u1"), ("B", "u1")])


@pytest.mark.parametrize(
    ("voxels", "message"),
    [
        (COLOURS, r"stores voxels of type .*'R'.*convert them to integers or floats"),
        (np.zeros((4, 5), np.uint8), r"has the shape \(4, 5\); needed: three spatial axes"),
    ],
    ids=["colours", "slice"],
)
def test_voxels_that_make_no_volume(save, voxels, message):
    with pytest.raises(ReaderError, match=message):
        read_volume(save(voxels))


def test_an_affine_that_flattens_the_patient(save, ramp):
    path = save(ramp, "flat.nii")
    content = bytearray(path.read_bytes())
    content[312:328] = bytes(16)  # srow_z: every slice at the same height
    path.write_bytes(content)
    with pytest.raises(ReaderError, match="does not place voxels in three dimensions; correct the header"):
        read_volume(path)


def test_unknown_suffix_and_single_slice(tmp_path):
    for name, advice in (("scan.png", "convert it"), ("scan.dcm", "name the folder of the series")):
        (tmp_path / name).touch()
        with pytest.raises(ReaderError, match=rf"{name} has none of the suffixes .*\.nii\.gz, .*{advice}"):
            read_volume(tmp_path / name)


def test_read_replaces_the_named_fields_only(save, ramp):
    path = save(ramp)
    case = {"case": "a", "image": path, "label": str(path), "age": 71}
    read = Read(["image"])(case)
    assert case["image"] == path  # the case given is left as it was
    assert read["label"] == str(path)
    assert read["age"] == 71
    assert read["image"].shape == (1, 3, 4, 5)


def test_read_names_case_field_and_file(save, ramp, tmp_path):
    case = {"case": "a", "image": save(ramp)}
    with pytest.raises(BatchFieldError, match=r"case a: Read needs \['label'\], but the case has \['case', 'image'\]"):
        Read(["image", "label"])(case)
    with pytest.raises(ReaderError, match=r"case a, label: .*gone\.nii\.gz does not exist"):
        Read(["label"])({"case": "a", "label": tmp_path / "gone.nii.gz"})
    with pytest.raises(ReaderError, match="case a: image should be a path, or a path per channel, got a MetaTensor"):
        Read(["image"])(Read(["image"])(case))
    with pytest.raises(ReaderError, match="an image needs a file, or one per channel, got none"):
        read_volume(())


def test_nifti_needs_no_simpleitk(save, ramp):
    code = (
        "import sys; from volseg.data.readers import read_volume; "
        f"read_volume({str(save(ramp))!r}); sys.exit('SimpleITK' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.real_data
def test_real_volumes_are_what_nibabel_reads(msd_task04):
    for path in sorted((msd_task04 / "imagesTr").glob("*.nii.gz"))[:10]:
        expected = nibabel.load(path)
        volume = read_volume(path)
        np.testing.assert_array_equal(volume.numpy()[0], expected.get_fdata(dtype=np.float32))
        np.testing.assert_array_equal(volume.affine, expected.affine)


def test_a_file_per_channel_is_one_image(save, ramp, affine):
    """Formats and types may differ; a writer follows the first file."""
    first, second = save(ramp, "a_0000.nii.gz"), save(2.5 * ramp, "a_0001.nii")
    volume = read_volume([first, str(second)])
    np.testing.assert_array_equal(volume.numpy(), np.stack([ramp, np.float32(2.5) * ramp]))
    np.testing.assert_allclose(volume.affine, affine, atol=1e-6)
    alone = read_volume(first).meta
    assert {key: volume.meta[key] for key in ("filename_or_obj", "original_dtype", "sform_code", "spatial_shape")} == {
        key: alone[key] for key in ("filename_or_obj", "original_dtype", "sform_code", "spatial_shape")
    }
    torch.testing.assert_close(volume.meta["original_affine"], alone["original_affine"])
    read = Read(["image"])({"case": "a", "image": (first, second)})
    torch.testing.assert_close(read["image"].as_tensor(), volume.as_tensor())
    assert read_volume((save(np.stack([ramp, ramp], axis=-1)),)).shape == (2, *ramp.shape)  # one file of all channels


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda voxels, affine: (voxels[:2], affine), r"a_0001\.nii\.gz has the shape \(2, 4, 5\), but its first"),
        (lambda voxels, affine: (voxels, affine + np.eye(4, k=3) * 0.4), r"a_0001\.nii\.gz is up to 0\.4 mm away"),
        (lambda voxels, affine: (np.stack([voxels, voxels], axis=-1), affine), r"a_0001\.nii\.gz has 2 channels"),
    ],
    ids=["shape", "place", "4D"],
)
def test_channels_that_do_not_fit_name_both_files(save, ramp, affine, change, message):
    voxels, moved = change(ramp, affine)
    paths = (save(ramp, "a_0000.nii.gz"), save(voxels, "a_0001.nii.gz", moved))
    with pytest.raises(ReaderError, match=message):
        read_volume(paths)


def test_files_are_named_shortly(tmp_path):
    names = [tmp_path / f"scan_000{channel}.nii.gz" for channel in range(3)]
    assert name_files(names) == f"{names[0]}, scan_0001.nii.gz, scan_0002.nii.gz"
    assert name_files((names[0], "elsewhere/scan.nii")) == f"{names[0]}, elsewhere/scan.nii"
    assert list_files(str(names[0])) == (names[0],)


AFFINE = np.array([[0, -2.0, 0.1, 5], [1.5, 0, 0, -7], [0, 0.1, 4.0, 9], [0, 0, 0, 1]])


@pytest.mark.parametrize("unit", ["mm", "meter", None])
@pytest.mark.parametrize(("kind", "suffix"), [(nibabel.Nifti1Image, ".nii.gz"), (nibabel.Nifti2Image, ".nii")])
def test_an_affine_read_alone_is_that_of_the_voxels(tmp_path, kind, suffix, unit):
    """Also for a file that is placed only by its spacing."""
    image, path = kind(np.zeros((3, 4, 5), np.int16), AFFINE if unit else None), tmp_path / f"image{suffix}"
    image.header.set_xyzt_units(unit or "unknown")
    nibabel.save(image, path)
    np.testing.assert_array_equal(read_affine(path), read_volume(path).affine)


@pytest.mark.parametrize("suffix", [".mha", ".nrrd"])
def test_affines_of_other_formats(tmp_path, suffix):
    image = SimpleITK.GetImageFromArray(np.zeros((3, 4, 5), np.int16))
    image.SetSpacing((1.0, 2.0, 4.0))
    SimpleITK.WriteImage(image, tmp_path / f"image{suffix}")
    assert np.linalg.norm(read_affine(tmp_path / f"image{suffix}")[:3, :3], axis=0).tolist() == [1, 2, 4]


@pytest.mark.parametrize(
    "content", [b"", b"no image", gzip.compress(b"\0" * 600, mtime=0)], ids=["empty", "text", "zeros"]
)
@pytest.mark.parametrize("suffix", [".nii", ".nii.gz"])
def test_no_affine_is_read_of_what_is_no_header(tmp_path, content, suffix):
    path = tmp_path / f"image{suffix}"
    path.write_bytes(content)
    with pytest.raises(ReaderError, match=path.name):
        read_affine(path)


def test_an_affine_needs_no_voxels(tmp_path):
    voxels = np.random.default_rng(0).integers(-999, 999, (100, 100, 100)).astype(np.int16)
    nibabel.save(nibabel.Nifti1Image(voxels, AFFINE), tmp_path / "whole.nii.gz")
    (tmp_path / "short.nii.gz").write_bytes((tmp_path / "whole.nii.gz").read_bytes()[: 1 << 20])
    np.testing.assert_allclose(read_affine(tmp_path / "short.nii.gz"), AFFINE, atol=1e-6)  # float32 in the file
