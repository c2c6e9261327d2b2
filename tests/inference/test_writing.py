"""Files of label maps, probabilities and entropies: their numbers, their place, and what they say about themselves."""

import errno
import json
import zlib
from pathlib import Path
from xml.etree import ElementTree

import nibabel as nib
import numpy as np
import pytest
import torch
from monai.data import MetaTensor

from volseg.data.cases import Task
from volseg.data.nifti import read_label_table
from volseg.data.readers import read_volume
from volseg.errors import DataError, GridError, OutOfMemoryError
from volseg.inference import writing
from volseg.inference.predictor import Predictor
from volseg.inference.writing import require_room, write_entropy, write_prediction, write_probabilities
from volseg.transforms.preprocessing import build_preprocessing

SimpleITK = pytest.importorskip("SimpleITK", reason="a machine that only runs GPU tests may lack it")

OBLIQUE = torch.tensor(
    [[-0.9, 0.1, 0.3, 90.5], [0.1, 1.2, -0.2, -126.25], [0.2, 0.3, 2.0, -72], [0, 0, 0, 1]], dtype=torch.float64
)
PREPARED = [
    {"name": "Orientation"},
    {"name": "Spacing", "spacing": [1.5, 1.5, 1.5]},
    {"name": "CropForeground"},
    {"name": "ZScore"},
    {"name": "Pad", "multiple": 8},
]


THRESHOLD = Predictor(model=lambda images: torch.cat([-images, images], 1), num_classes=2)


def reference(*shape, **meta) -> MetaTensor:
    return MetaTensor(torch.rand(1, *shape), affine=OBLIQUE.clone(), meta=meta)


def rounded_to_float32(affine: torch.Tensor) -> torch.Tensor:
    return affine.float().double()


@pytest.mark.parametrize("suffix", [".nii", ".nii.gz"])
def test_written_labels_are_read_back_where_they_were(tmp_path, suffix):
    labels = torch.randint(0, 256, (1, 5, 6, 7), dtype=torch.uint8)
    path = write_prediction(labels, reference(5, 6, 7), tmp_path / "new" / f"knee_7{suffix}")
    volume = read_volume(path)
    assert volume.as_tensor().equal(labels.float())
    assert volume.affine.equal(rounded_to_float32(OBLIQUE))  # NIfTI stores float32
    assert nib.load(path).get_data_dtype() == np.uint8
    assert nib.load(path).header.get_xyzt_units()[0] == "mm"


def test_names_and_colours_of_labels_are_in_the_header(tmp_path):
    """As TotalSegmentator writes them; its reader takes the first extension, any other reader the voxels."""
    names = {1: "left <atrium> & appendage", 2: "a ]]> b", 300: "Ö"}
    image = MetaTensor(torch.rand(1, 5, 6, 7), affine=torch.diag(torch.tensor([-1.0, 1.5, 2.0, 1.0])))
    labels = torch.randint(0, 301, (1, 5, 6, 7), dtype=torch.int32)
    path = write_prediction(labels, image, tmp_path / "heart.nii.gz", names)
    [extension] = nib.load(path).header.extensions
    root = ElementTree.fromstring(extension.get_content().rstrip(b"\0"))
    rows = root.findall("VolumeInformation/LabelTable/Label")
    assert [(row.get("Key"), row.text) for row in rows] == [("1", names[1]), ("2", "a ]] > b"), ("300", "Ö")]
    assert extension.get_code() == 0
    assert [rows[0].get(name) for name in ("Red", "Green", "Blue", "Alpha")] == ["0.9020", "0.3137", "0.2353", "1"]
    assert read_label_table(path) == {**names, 2: "a ]] > b"}
    assert read_volume(path).as_tensor().equal(labels.float())
    read = SimpleITK.GetArrayFromImage(SimpleITK.ReadImage(str(path)))
    assert np.array_equal(read.transpose(2, 1, 0), labels[0].numpy())
    assert path.read_bytes() == write_prediction(labels, image, tmp_path / "2.nii.gz", names).read_bytes()
    assert read_label_table(write_prediction(labels, image, tmp_path / "plain.nii")) == {}


@pytest.mark.parametrize(("sform", "qform"), [(1, 1), (2, 1), (4, 0), (0, 1), (0, 0)])
def test_header_codes_are_those_of_the_image(tmp_path, sform, qform):
    image = nib.Nifti1Image(np.random.default_rng(0).random((5, 6, 7), dtype=np.float32), None)
    rigid = np.diag([-2.0, 1.5, 1, 1]) + np.array([[0, 0, 0, x] for x in (90, -126, -72, 0)])
    image.set_sform(rigid, code=sform)
    image.set_qform(rigid, code=qform)
    image.to_filename(tmp_path / "image.nii.gz")
    read = read_volume(tmp_path / "image.nii.gz")

    written = nib.load(write_prediction(torch.zeros(1, 5, 6, 7), read, tmp_path / "labels.nii.gz"))
    assert (int(written.header["sform_code"]), int(written.header["qform_code"])) == (sform, qform)
    assert np.array_equal(written.affine, nib.load(tmp_path / "image.nii.gz").affine)
    if qform:
        np.testing.assert_allclose(written.get_qform(), rigid, atol=1e-5)  # quaternions in float32


def test_sform_and_qform_of_different_places_are_both_kept(tmp_path):
    """An image registered to an atlas (sform) keeps its place in the scanner (qform), by which ITK-SNAP shows it."""
    scanner, atlas = np.diag([-2.0, 1.5, 1, 1]), np.diag([1.0, 1, 1, 1])
    scanner[:3, 3] = 90, -126, -72
    image = nib.Nifti1Image(np.zeros((5, 6, 7), dtype=np.float32), None)
    image.set_sform(atlas, code=4)
    image.set_qform(scanner, code=1)
    image.to_filename(tmp_path / "image.nii")
    read = read_volume(tmp_path / "image.nii")
    written = nib.load(write_prediction(torch.zeros(1, 5, 6, 7), read, tmp_path / "labels.nii"))
    np.testing.assert_allclose(written.get_sform(), atlas, atol=1e-6)
    np.testing.assert_allclose(written.get_qform(), scanner, atol=1e-5)  # quaternions in float32
    theirs, ours = (SimpleITK.ReadImage(str(tmp_path / name)) for name in ("image.nii", "labels.nii"))
    corner = (4, 5, 6)
    place = theirs.TransformIndexToPhysicalPoint(corner)
    assert ours.TransformIndexToPhysicalPoint(corner) == pytest.approx(place, abs=1e-4)  # float32


def test_a_sheared_affine_gets_no_qform_for_a_quaternion_would_misplace_it(tmp_path):
    written = nib.load(write_prediction(torch.zeros(1, 5, 6, 7), reference(5, 6, 7), tmp_path / "tilted.nii"))
    assert (int(written.header["sform_code"]), int(written.header["qform_code"])) == (1, 0)
    np.testing.assert_allclose(written.affine, OBLIQUE.numpy(), rtol=1e-7)


def test_itk_puts_the_labels_where_the_image_is(tmp_path):
    """SimpleITK reads NIfTI by code of its own: an independent judge of the header."""
    rigid = torch.tensor([[-2, 0, 0, 9.0], [0, 0, 1, 8], [0, 1.5, 0, 7], [0, 0, 0, 1]], dtype=torch.float64)
    image = MetaTensor(torch.rand(1, 4, 5, 6), affine=rigid)
    path = write_prediction(torch.ones(1, 4, 5, 6), image, tmp_path / "labels.nii.gz")
    read = SimpleITK.ReadImage(str(path))
    assert read.GetSize() == (4, 5, 6)
    for index in [(0, 0, 0), (3, 4, 5)]:
        x, y, z = (rigid @ torch.tensor([*index, 1.0], dtype=torch.float64))[:3].tolist()
        assert read.TransformIndexToPhysicalPoint(index) == pytest.approx((-x, -y, z), abs=1e-5)  # float32, LPS


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32])
def test_the_number_of_threads_changes_no_byte_and_every_reader_takes_them(tmp_path, monkeypatch, dtype):
    labels = torch.randint(0, 3, (1, 150, 140, 160), dtype=dtype)  # over three blocks of the compression
    labels[:, 100:] = 0
    image, files = MetaTensor(labels, affine=torch.eye(4, dtype=torch.float64)), []
    for threads in (1, 2, 5):
        monkeypatch.setattr(writing, "MOST_THREADS", threads)
        monkeypatch.setattr(writing.os, "cpu_count", lambda: 8)
        files.append(write_prediction(labels, image, tmp_path / f"{threads}.nii.gz"))
    content = files[0].read_bytes()
    assert all(file.read_bytes() == content for file in files[1:])
    engine = zlib.decompressobj(31)
    plain = write_prediction(labels, image, tmp_path / "plain.nii").read_bytes()
    assert engine.decompress(content) == plain
    assert engine.eof
    assert not engine.unused_data  # one member: a second one is not seen by all readers
    voxels = labels[0].numpy()
    assert np.array_equal(np.asarray(nib.load(files[0]).dataobj), voxels)
    assert np.array_equal(SimpleITK.GetArrayFromImage(SimpleITK.ReadImage(files[0])).transpose(2, 1, 0), voxels)
    assert read_volume(files[0]).equal(labels.float())


def test_failing_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = write_prediction(torch.ones(1, 5, 6, 7), reference(5, 6, 7), tmp_path / "knee_7.nii.gz")
    old = path.read_bytes()

    def disk_full(self, content):
        with self.open("wb") as partial:
            partial.write(content[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", disk_full)
    with pytest.raises(OSError, match="No space left"):
        write_prediction(torch.zeros(1, 5, 6, 7), reference(5, 6, 7), path)
    assert path.read_bytes() == old
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("labels", "name", "error", "message"),
    [
        (torch.zeros(1, 5, 6, 7), "a.mha", DataError, r"a.mha must end in .nii or .nii.gz"),
        (torch.zeros(1, 5, 7, 6), "a.nii", GridError, r"own grid of \(5, 6, 7\) voxels, got \(1, 5, 7, 6\)"),
        (torch.full((1, 5, 6, 7), 2**24), "a.nii", DataError, r"whole labels in \[0, 16777215\], got torch.int64"),
        (torch.full((1, 5, 6, 7), 0.5), "a.nii", DataError, r"whole labels in \[0, 16777215\], got torch.float32"),
    ],
)
def test_what_is_no_label_map_of_the_image_is_refused(tmp_path, labels, name, error, message):
    with pytest.raises(error, match=message):
        write_prediction(labels, reference(5, 6, 7), tmp_path / name)
    assert not list(tmp_path.iterdir())


@pytest.mark.real_data
def test_dicom_in_nifti_out_on_the_series_own_geometry(dicom_series, tmp_path):
    case = {"case": dicom_series.name, "image": read_volume(dicom_series)}
    bright = case["image"] > case["image"].mean()
    done = build_preprocessing([{"name": "Orientation"}, {"name": "ZScore"}])(case)
    path = write_prediction(THRESHOLD(done), done["image"], tmp_path / "crop.nii.gz")

    written = SimpleITK.ReadImage(str(path))
    reader = SimpleITK.ImageSeriesReader()
    reader.SetFileNames(reader.GetGDCMSeriesFileNames(str(dicom_series)))
    series = reader.Execute()
    assert written.GetSize() == series.GetSize()
    for index in [(0, 0, 0), tuple(side - 1 for side in series.GetSize()), (3, 5, 7)]:
        there, here = (image.TransformIndexToPhysicalPoint(index) for image in (series, written))
        assert here == pytest.approx(there, abs=1e-3)  # positions of some 100 mm in float32
    # The threshold itself is the judge of the voxel order; ITK's arrays are (z, y, x).
    labels = SimpleITK.GetArrayFromImage(written).transpose(2, 1, 0)
    assert np.array_equal(labels, bright[0].numpy())
    voxels = SimpleITK.GetArrayFromImage(series).transpose(2, 1, 0)
    assert np.array_equal(labels, voxels > voxels.mean())


@pytest.mark.real_data
@pytest.mark.parametrize("name", ["hippocampus_001", "hippocampus_097"])
def test_real_case_through_another_spacing_lies_on_its_own_grid(msd_task04, tmp_path, name):
    image_path = msd_task04 / "imagesTr" / f"{name}.nii.gz"
    done = build_preprocessing(PREPARED)({"case": name, "image": read_volume(image_path)})
    path = write_prediction(THRESHOLD(done), done["image"], tmp_path / f"{name}.nii.gz")
    image, written = nib.load(image_path), nib.load(path)
    assert written.shape == image.shape
    assert np.array_equal(written.affine, image.affine)
    assert [int(written.header[key]) for key in ("sform_code", "qform_code")] == [
        int(image.header[key]) for key in ("sform_code", "qform_code")
    ]
    bright = image.get_fdata() > image.get_fdata()[image.get_fdata() != 0].mean()
    agree = (np.asarray(written.dataobj) == bright).mean()
    # Measured 0.950 and 0.964: interpolation moves voxels near the mean across it. One voxel off gives 0.917 at most.
    assert agree > 0.93


STEP = 0.5 / 65_535 + 1e-7
"""Half a step of the stored numbers; the slope is float32."""


def task_of(labels, **settings):
    return Task(name="T", root=Path(), modalities=("CT",), labels=labels, training=(), test=(), **settings)


ORGANS = task_of({0: "background", 7: "liver", 500: "Milz (größer)"})


@pytest.fixture
def read(tmp_path):
    """Return an image, as read, with codes and a qform of its own."""
    image = nib.Nifti1Image(np.random.default_rng(0).random((9, 8, 7), dtype=np.float32), None)
    image.set_sform(OBLIQUE.numpy(), code=4)
    image.set_qform(np.diag([2.0, 2, 2, 1]), code=1)
    image.to_filename(tmp_path / "image.nii.gz")
    return read_volume(tmp_path / "image.nii.gz")


@pytest.mark.parametrize("suffix", [".nii", ".nii.gz"])
def test_probabilities_are_read_as_they_were_by_two_libraries(read, tmp_path, suffix):
    sitk = pytest.importorskip("SimpleITK", reason="a machine that only runs GPU tests may lack it")
    probabilities = torch.rand(3, 9, 8, 7).log().softmax(0)
    path = write_probabilities(probabilities, read, tmp_path / "new" / f"case_probabilities{suffix}", task=ORGANS)
    file = nib.load(path)
    assert file.shape == (9, 8, 7, 3)
    assert file.get_data_dtype() == np.uint16
    np.testing.assert_allclose(np.moveaxis(file.get_fdata(), -1, 0), probabilities, atol=STEP, rtol=0)
    np.testing.assert_allclose(file.get_fdata().sum(-1), 1, atol=3 * STEP)
    other = sitk.GetArrayFromImage(sitk.ReadImage(str(path)))  # the last axis first
    np.testing.assert_allclose(other.transpose(0, 3, 2, 1), probabilities, atol=STEP, rtol=0)

    labels = nib.load(write_prediction(torch.zeros(1, 9, 8, 7), read, tmp_path / "labels.nii.gz"))
    for key in ("sform_code", "qform_code"):
        assert file.header[key] == labels.header[key]
    np.testing.assert_array_equal(file.get_sform(), labels.get_sform())
    np.testing.assert_array_equal(file.get_qform(), labels.get_qform())
    (extension,) = file.header.extensions
    told = json.loads(extension.get_content())
    assert [output["name"] for output in told["outputs"]] == ["background", "liver", "Milz (größer)"]
    assert [output["values"] for output in told["outputs"]] == [[0], [7], [500]]
    again = write_probabilities(probabilities, read, tmp_path / f"again{suffix}", task=ORGANS)
    assert again.read_bytes() == path.read_bytes()


def test_regions_are_told_as_regions_and_need_no_background(read, tmp_path):
    tumour = task_of({0: "background", 1: "oedema", 2: "core"}, regions={"whole": (1, 2), "core": (2,)})
    path = write_probabilities(torch.rand(2, 9, 8, 7), read, tmp_path / "p.nii.gz", task=tumour)
    told = json.loads(nib.load(path).header.extensions[0].get_content())
    assert told["outputs"] == [{"name": "whole", "values": [1, 2]}, {"name": "core", "values": [2]}]
    assert "overlap" in told["of"]


def test_entropy_is_a_volume_as_the_label_map(read, tmp_path):
    entropy = torch.rand(1, 9, 8, 7)
    entropy[0, 0, 0, :2] = torch.tensor([0.0, 1.0])
    path = write_entropy(entropy, read, tmp_path / "case_entropy.nii.gz")
    volume = read_volume(path)
    np.testing.assert_allclose(volume, entropy, atol=STEP, rtol=0)
    assert volume.affine.equal(read.affine)
    assert volume[0, 0, 0, :2].tolist() == [0.0, 1.0]


def test_what_a_predictor_streams_goes_into_files(read, tmp_path):
    """The label map is where the written probabilities are largest, and the entropy is that of what was written."""
    two = task_of({0: "background", 1: "bright"})
    steps = [{"name": "Orientation"}, {"name": "Spacing", "spacing": [1.5, 1.5, 1.5]}]
    case = build_preprocessing(steps)({"case": "a", "image": read})
    predictor = Predictor(model=lambda images: torch.cat([-images, images], 1) * 4, num_classes=2)
    ((_, found),) = predictor.stream([case], also=("probabilities", "entropy"))
    path = write_probabilities(found.probabilities, case["image"], tmp_path / "p.nii.gz", task=two)
    written = nib.load(path).get_fdata()
    clear = np.abs(written[..., 1] - written[..., 0]) > 2 * STEP
    assert clear.mean() > 0.9
    np.testing.assert_array_equal(written.argmax(-1)[clear], found.labels[0].numpy()[clear])
    entropy = nib.load(write_entropy(found.entropy, case["image"], tmp_path / "e.nii.gz")).get_fdata()
    expected = -(written * np.log2(written.clip(1e-12))).sum(-1)
    np.testing.assert_allclose(entropy, expected, atol=1e-3)  # the logarithm of numbers in steps of 1.5e-5


@pytest.mark.parametrize("wrong", [-0.1, 1.1, float("nan")])
def test_what_is_no_probability_is_refused_and_leaves_the_old_file(read, tmp_path, wrong):
    path = tmp_path / "p.nii.gz"
    path.write_bytes(b"old")
    probabilities = torch.full((3, 9, 8, 7), 1 / 3)
    probabilities[2, 4, 4, 4] = wrong
    with pytest.raises(DataError, match="takes numbers from 0 to 1, got"):
        write_probabilities(probabilities, read, path, task=ORGANS)
    assert path.read_bytes() == b"old"
    assert {file.name for file in tmp_path.iterdir()} == {"image.nii.gz", "p.nii.gz"}


def test_other_shapes_and_suffixes_are_refused(read, tmp_path):
    with pytest.raises(
        GridError, match=r"needs the probabilities of T on .*, \(K, D, H, W\) = \(3, 9, 8, 7\), got \(2, 9, 8"
    ):
        write_probabilities(torch.rand(2, 9, 8, 7), read, tmp_path / "p.nii.gz", task=ORGANS)
    with pytest.raises(GridError, match=r"needs the entropy on the image's own grid"):
        write_entropy(torch.rand(1, 8, 8, 7), read, tmp_path / "e.nii.gz")
    with pytest.raises(DataError, match=r"must end in .nii or .nii.gz"):
        write_entropy(torch.rand(1, 9, 8, 7), read, tmp_path / "e.mha")


def test_what_cannot_fit_is_refused_before_it_is_computed(monkeypatch):
    image = MetaTensor(torch.zeros(1, 2, 2, 2), meta={"spatial_shape": (512, 512, 600), "filename_or_obj": "ct.nii.gz"})
    monkeypatch.setattr(writing, "available_bytes", lambda: 64 * 2**30)
    require_room(image, 15)
    words = (
        r"ct.nii.gz: the probabilities of 117 outputs on \(512, 512, 600\) voxels take 70.3 GiB .* 64.0 GiB are free"
    )
    with pytest.raises(OutOfMemoryError, match=words):
        require_room(image, 117)
