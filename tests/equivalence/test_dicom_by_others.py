"""SimpleITK and pydicom read the same DICOM voxels in random orientations, types and transfer syntaxes."""

import numpy as np
import pytest
from scipy.spatial.transform import Rotation

from volseg.data.readers import read_volume

pydicom = pytest.importorskip("pydicom", reason="the extra `dicom` is not installed")
SimpleITK = pytest.importorskip("SimpleITK", reason="a machine that only runs GPU tests may lack it")

from dicom_files import group, write_enhanced, write_slice  # noqa: E402  (they need pydicom)

TYPES = [np.uint8, np.int8, np.uint16, np.int16, np.uint32, np.int32]
PLAIN = [pydicom.uid.ImplicitVRLittleEndian, pydicom.uid.ExplicitVRLittleEndian]
TO_RAS = np.diag([-1.0, -1.0, 1.0, 1.0])


class Made:
    """A volume with a random place in the patient, in the order of its slices along their normal."""

    def __init__(self, seed, kinds=TYPES, least=3):
        random = np.random.default_rng(seed)
        self.random = random
        self.dtype = np.dtype(kinds[seed % len(kinds)])
        slices, rows, columns = random.integers(3, 9), *(2 * random.integers(least, 8 + least, 2))
        low, high = (max(np.iinfo(self.dtype).min, -3000), min(np.iinfo(self.dtype).max, 4000))
        self.stored = random.integers(low, high, (slices, rows, columns)).astype(self.dtype)
        axes = Rotation.random(random_state=seed).as_matrix()
        self.spacing = [round(value, 4) for value in random.uniform(0.3, 4.0, 3)]  # columns, rows, slices
        step = axes[:, 2] * self.spacing[2]
        if seed % 3 == 0:  # a tilted gantry
            step = step + 0.2 * axes[:, 1] * self.spacing[2]
        self.affine = np.eye(4)
        self.affine[:3] = np.c_[axes[:, :2] * self.spacing[:2], step, random.uniform(-200, 200, 3)]
        self.orientation = [f"{value:.12f}" for value in axes[:, :2].T.ravel()]
        self.is_tilted = seed % 3 == 0

    def position(self, index):
        return [f"{value:.10f}" for value in self.affine[:3] @ [0, 0, index, 1]]

    def geometry(self, index):
        return {
            "ImagePositionPatient": self.position(index),
            "ImageOrientationPatient": self.orientation,
            "PixelSpacing": [self.spacing[1], self.spacing[0]],
        }

    def write(self, folder, syntax, line=(1.0, 0.0)):
        names = self.random.permutation(len(self.stored))
        said = {} if line == (1, 0) else {"RescaleSlope": line[0], "RescaleIntercept": line[1]}
        for index, stored in enumerate(self.stored):
            write_slice(folder / f"{names[index]:03d}", index, stored, syntax, **self.geometry(index), **said)
        return folder


def expect(volume, made, line=(1.0, 0.0)):
    values = made.stored.astype(np.float64) * line[0] + line[1]
    np.testing.assert_array_equal(volume.numpy()[0], values.astype(np.float32).transpose(2, 1, 0))
    # Positions have 10 digits here, and DICOM at most 16 characters.
    np.testing.assert_allclose(volume.affine, TO_RAS @ made.affine, atol=1e-5, rtol=0)


@pytest.mark.parametrize("seed", range(24))
def test_plain_series(tmp_path, seed):
    made, syntax = Made(seed), PLAIN[seed // 6 % 2]
    line = [(1.0, 0.0), (2.0, -1024.0), (0.37, 11.5)][seed // 2 % 3]
    folder = made.write(tmp_path / "series", syntax, line)
    volume = read_volume(folder)
    expect(volume, made, line)
    by_pydicom = {
        tuple(one.ImagePositionPatient): pydicom.pixels.apply_rescale(one.pixel_array, one)
        for one in map(pydicom.dcmread, folder.iterdir())
    }
    for index in range(len(made.stored)):
        position = tuple(float(value) for value in made.position(index))
        np.testing.assert_array_equal(volume.numpy()[0, :, :, index].T, by_pydicom[position].astype(np.float32))
    if syntax.is_little_endian or made.dtype.itemsize < 4:  # GDCM swaps the halves of 32 bits
        expect_simpleitk(folder, volume, made)


def expect_simpleitk(folder, volume, made):
    files = SimpleITK.ImageSeriesReader.GetGDCMSeriesFileNames(str(folder))
    image = SimpleITK.ReadImage(files)
    np.testing.assert_array_equal(
        SimpleITK.GetArrayFromImage(image).astype(np.float32).transpose(2, 1, 0), volume.numpy()[0]
    )
    if not made.is_tilted:  # SimpleITK straightens it
        affine = np.eye(4)
        affine[:3, :3] = np.reshape(image.GetDirection(), (3, 3)) * image.GetSpacing()
        affine[:3, 3] = image.GetOrigin()
        np.testing.assert_allclose(volume.affine, TO_RAS @ affine, atol=1e-4, rtol=0)


@pytest.mark.parametrize("syntax", [pydicom.uid.RLELossless, pydicom.uid.JPEGLSLossless], ids=["RLE", "JPEG-LS"])
@pytest.mark.parametrize("seed", range(4))
def test_compressed_series(tmp_path, seed, syntax):
    if syntax == pydicom.uid.JPEGLSLossless:
        pytest.importorskip("jpeg_ls", reason="nothing here encodes JPEG-LS")
    made = Made(seed, kinds=TYPES[:4], least=6)  # GDCM refuses RLE that is longer than what it packs
    line = [(1.0, 0.0), (0.37, 11.5)][seed % 2]
    volume = read_volume(made.write(tmp_path / "series", syntax, line))
    expect(volume, made, line)


@pytest.mark.parametrize("compressor", ["JPEG", "JPEG2000"])
def test_slices_that_simpleitk_compresses(tmp_path, compressor):
    """Slices are large: SimpleITK's JPEG encoder corrupts the heap if an image is smaller than a block."""
    stored = (np.add.outer(np.arange(3), np.add.outer(np.arange(40), np.arange(50))) * 20 - 900).astype(np.int16)
    writer = SimpleITK.ImageFileWriter()
    writer.KeepOriginalImageUIDOn()
    writer.UseCompressionOn()
    writer.SetCompressor(compressor)
    for index in range(3):
        image = SimpleITK.GetImageFromArray(stored[index : index + 1])
        image.SetOrigin((1.0, 2.0, 2.0 * index))
        for tag, value in (("0008|0060", "MR"), ("0020|000e", "1.2.3"), ("0008|0018", f"1.2.3.{index}")):
            image.SetMetaData(tag, value)
        writer.SetFileName(str(tmp_path / f"{index}.dcm"))
        writer.Execute(image)
    assert pydicom.dcmread(tmp_path / "0.dcm").file_meta.TransferSyntaxUID.is_compressed
    volume = read_volume(tmp_path)
    np.testing.assert_array_equal(volume.numpy()[0], stored.transpose(2, 1, 0))
    np.testing.assert_allclose(volume.affine, [[-1, 0, 0, -1], [0, -1, 0, -2], [0, 0, 2, 0], [0, 0, 0, 1]])


@pytest.mark.parametrize("seed", range(6))  # a voxel type each
@pytest.mark.parametrize("syntax", [*PLAIN, pydicom.uid.RLELossless], ids=["implicit", "explicit", "RLE"])
def test_frames_of_one_file(tmp_path, seed, syntax):
    made = Made(seed, **({"kinds": TYPES[:4], "least": 6} if syntax.is_compressed else {}))
    order = made.random.permutation(len(made.stored))
    slopes = made.random.choice([0.5, 0.25, 2.0], len(order)) if seed % 2 else np.ones(len(order))

    def groups(index):
        value = group(RescaleSlope=slopes[index], RescaleIntercept=-float(index), RescaleType="US")
        return {"PixelValueTransformationSequence": value} if seed % 2 else {}

    path = write_enhanced(
        tmp_path / "a.dcm",
        [made.position(index) for index in order],
        stored=made.stored[order],
        shared={
            "PlaneOrientationSequence": group(ImageOrientationPatient=made.orientation),
            "PixelMeasuresSequence": group(PixelSpacing=[made.spacing[1], made.spacing[0]]),
        },
        frames=groups,
        syntax=syntax,
    )
    volume = read_volume(path)
    values = made.stored.astype(np.float64)
    if seed % 2:
        values[order] = values[order] * slopes[:, None, None] - np.arange(len(order))[:, None, None]
    np.testing.assert_array_equal(volume.numpy()[0], values.astype(np.float32).transpose(2, 1, 0))
    np.testing.assert_allclose(volume.affine, TO_RAS @ made.affine, atol=1e-5, rtol=0)
