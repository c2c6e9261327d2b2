"""Files of label maps, probabilities and entropies: their numbers, geometry and headers."""

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
from volseg.inference.writing import require_room, write_entropy, write_prediction, write_probabilities

SimpleITK = pytest.importorskip("SimpleITK", reason="a machine that only runs GPU tests may lack it")

OBLIQUE = torch.tensor(
    [[-0.9, 0.1, 0.3, 90.5], [0.1, 1.2, -0.2, -126.25], [0.2, 0.3, 2.0, -72], [0, 0, 0, 1]], dtype=torch.float64
)


def reference(*shape, **meta) -> MetaTensor:
    return MetaTensor(torch.rand(1, *shape), affine=OBLIQUE.clone(), meta=meta)


RIGID = torch.tensor([[-2, 0, 0, 9.0], [0, 0, 1, 8], [0, 1.5, 0, 7], [0, 0, 0, 1]], dtype=torch.float64)


@pytest.mark.parametrize("suffix", [".nii", ".nii.gz"])
@pytest.mark.parametrize(("affine", "qform"), [(RIGID, 1), (OBLIQUE, 0)])  # a quaternion would misplace a sheared one
def test_written_labels_are_read_back_where_they_were(tmp_path, suffix, affine, qform):
    """SimpleITK reads NIfTI by code of its own: an independent judge of the header."""
    labels = torch.randint(0, 256, (1, 5, 6, 7), dtype=torch.uint8)
    image = MetaTensor(torch.rand(1, 5, 6, 7), affine=affine.clone())
    path = write_prediction(labels, image, tmp_path / "new" / f"knee_7{suffix}")
    volume, written = read_volume(path), nib.load(path)
    assert volume.as_tensor().equal(labels.float())
    assert volume.affine.equal(affine.float().double())  # NIfTI stores float32
    assert written.get_data_dtype() == np.uint8
    assert written.header.get_xyzt_units()[0] == "mm"
    assert [int(written.header[key]) for key in ("sform_code", "qform_code")] == [1, qform]
    if qform:
        read = SimpleITK.ReadImage(str(path))
        assert read.GetSize() == (5, 6, 7)
        for index in [(0, 0, 0), (4, 5, 6)]:
            x, y, z = (affine @ torch.tensor([*index, 1.0], dtype=torch.float64))[:3].tolist()
            assert read.TransformIndexToPhysicalPoint(index) == pytest.approx((-x, -y, z), abs=1e-5)  # float32, LPS


def test_names_and_colours_of_labels_are_in_the_header(tmp_path):
    """In TotalSegmentator's form; its reader uses the first extension, other readers only the voxels."""
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


@pytest.mark.parametrize("codes", [(4, 0), (0, 1), (0, 0)])
def test_header_codes_are_those_of_the_image(tmp_path, codes):
    image = nib.Nifti1Image(np.zeros((5, 6, 7), np.float32), None)
    for set_form, code in zip((image.set_sform, image.set_qform), codes, strict=True):
        set_form(RIGID.numpy(), code=code)
    image.to_filename(tmp_path / "image.nii")
    written = nib.load(
        write_prediction(torch.zeros(1, 5, 6, 7), read_volume(tmp_path / "image.nii"), tmp_path / "a.nii")
    )
    assert (int(written.header["sform_code"]), int(written.header["qform_code"])) == codes
    np.testing.assert_allclose(written.affine, nib.load(tmp_path / "image.nii").affine, atol=1e-5)  # float32


def test_sform_and_qform_of_different_places_are_both_kept(tmp_path):
    """An image registered to an atlas (sform) keeps its scanner position (qform) for ITK-SNAP."""
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
    unsure = read_volume(write_entropy(probabilities[:1], read, tmp_path / f"case_entropy{suffix}"))
    np.testing.assert_allclose(unsure, probabilities[:1], atol=STEP, rtol=0)
    assert unsure.affine.equal(read.affine)


def test_regions_are_told_as_regions_and_need_no_background(read, tmp_path):
    tumour = task_of({0: "background", 1: "oedema", 2: "core"}, regions={"whole": (1, 2), "core": (2,)})
    path = write_probabilities(torch.rand(2, 9, 8, 7), read, tmp_path / "p.nii.gz", task=tumour)
    told = json.loads(nib.load(path).header.extensions[0].get_content())
    assert told["outputs"] == [{"name": "whole", "values": [1, 2]}, {"name": "core", "values": [2]}]
    assert "overlap" in told["of"]


def write_labels(labels, image, path):
    return write_prediction(labels, image, path)


def write_organs(probabilities, image, path):
    return write_probabilities(probabilities, image, path, task=ORGANS)


def spoilt(volumes, value):
    volumes[-1, 4, 4, 4] = value
    return volumes


@pytest.mark.parametrize(
    ("write", "volumes", "name", "error", "message"),
    [
        (write_labels, torch.zeros(1, 9, 8, 7), "a.mha", DataError, r"a.mha must end in .nii or .nii.gz"),
        (
            write_labels,
            torch.zeros(1, 9, 7, 8),
            "a.nii",
            GridError,
            r"own grid of \(9, 8, 7\) voxels, got \(1, 9, 7, 8\)",
        ),
        (write_labels, torch.full((1, 9, 8, 7), 2**24), "a.nii", DataError, r"in \[0, 16777215\], got torch.int64"),
        (write_labels, torch.full((1, 9, 8, 7), 0.5), "a.nii", DataError, r"in \[0, 16777215\], got torch.float32"),
        (write_organs, torch.rand(2, 9, 8, 7), "p.nii", GridError, r"of T on .* = \(3, 9, 8, 7\), got \(2, 9, 8"),
        (write_entropy, torch.rand(1, 8, 8, 7), "e.nii", GridError, "needs the entropy on the image's own grid"),
        (write_entropy, torch.rand(1, 9, 8, 7), "e.mha", DataError, r"must end in .nii or .nii.gz"),
        *(
            (write_organs, spoilt(torch.full((3, 9, 8, 7), 1 / 3), wrong), "p.nii.gz", DataError, "from 0 to 1, got")
            for wrong in (-0.1, 1.1, float("nan"))
        ),
    ],
)
def test_other_volumes_are_refused_and_leave_the_old_file(read, tmp_path, write, volumes, name, error, message):
    path = tmp_path / name
    path.write_bytes(b"old")
    with pytest.raises(error, match=message):
        write(volumes, read, path)
    assert path.read_bytes() == b"old"
    assert {file.name for file in tmp_path.iterdir()} == {"image.nii.gz", name}


def test_what_cannot_fit_is_refused_before_it_is_computed(monkeypatch):
    image = MetaTensor(torch.zeros(1, 2, 2, 2), meta={"spatial_shape": (512, 512, 600), "filename_or_obj": "ct.nii.gz"})
    monkeypatch.setattr(writing, "available_bytes", lambda: 64 * 2**30)
    require_room(image, 15)
    words = (
        r"ct.nii.gz: the probabilities of 117 outputs on \(512, 512, 600\) voxels need 70.3 GiB .* 64.0 GiB are free"
    )
    with pytest.raises(OutOfMemoryError, match=words):
        require_room(image, 117)
