"""Probabilities and entropies in files: their numbers, their place, and what they say about themselves."""

import json
from pathlib import Path

import nibabel
import numpy as np
import pytest
import torch
from monai.data import MetaTensor

from volseg.data.cases import Task
from volseg.data.readers import read_volume
from volseg.errors import DataError, GridError, OutOfMemoryError
from volseg.inference import writing
from volseg.inference.predictor import Predictor
from volseg.inference.writing import require_room, write_entropy, write_prediction, write_probabilities
from volseg.transforms.preprocessing import build_preprocessing

STEP = 0.5 / 65_535 + 1e-7
"""Half a step of the stored numbers; the slope is float32."""

OBLIQUE = np.array([[-0.9, 0.1, 0.3, 90.5], [0.1, 1.2, -0.2, -126.25], [0.2, 0.3, 2.0, -72], [0, 0, 0, 1]])


def task_of(labels, **settings):
    return Task(name="T", root=Path(), modalities=("CT",), labels=labels, training=(), test=(), **settings)


ORGANS = task_of({0: "background", 7: "liver", 500: "Milz (größer)"})


@pytest.fixture
def read(tmp_path):
    """Return an image, as read, with codes and a qform of its own."""
    image = nibabel.Nifti1Image(np.random.default_rng(0).random((9, 8, 7), dtype=np.float32), None)
    image.set_sform(OBLIQUE, code=4)
    image.set_qform(np.diag([2.0, 2, 2, 1]), code=1)
    image.to_filename(tmp_path / "image.nii.gz")
    return read_volume(tmp_path / "image.nii.gz")


@pytest.mark.parametrize("suffix", [".nii", ".nii.gz"])
def test_probabilities_are_read_as_they_were_by_two_libraries(read, tmp_path, suffix):
    sitk = pytest.importorskip("SimpleITK", reason="a machine that only runs GPU tests may lack it")
    probabilities = torch.rand(3, 9, 8, 7).log().softmax(0)
    path = write_probabilities(probabilities, read, tmp_path / "new" / f"case_probabilities{suffix}", task=ORGANS)
    file = nibabel.load(path)
    assert file.shape == (9, 8, 7, 3)
    assert file.get_data_dtype() == np.uint16
    np.testing.assert_allclose(np.moveaxis(file.get_fdata(), -1, 0), probabilities, atol=STEP, rtol=0)
    np.testing.assert_allclose(file.get_fdata().sum(-1), 1, atol=3 * STEP)
    other = sitk.GetArrayFromImage(sitk.ReadImage(str(path)))  # the last axis first
    np.testing.assert_allclose(other.transpose(0, 3, 2, 1), probabilities, atol=STEP, rtol=0)

    labels = nibabel.load(write_prediction(torch.zeros(1, 9, 8, 7), read, tmp_path / "labels.nii.gz"))
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
    told = json.loads(nibabel.load(path).header.extensions[0].get_content())
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
    written = nibabel.load(path).get_fdata()
    clear = np.abs(written[..., 1] - written[..., 0]) > 2 * STEP
    assert clear.mean() > 0.9
    np.testing.assert_array_equal(written.argmax(-1)[clear], found.labels[0].numpy()[clear])
    entropy = nibabel.load(write_entropy(found.entropy, case["image"], tmp_path / "e.nii.gz")).get_fdata()
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
    with pytest.raises(GridError, match=r"probabilities \(K, D, H, W\) = \(3, 9, 8, 7\) of T .* got \(2, 9, 8"):
        write_probabilities(torch.rand(2, 9, 8, 7), read, tmp_path / "p.nii.gz", task=ORGANS)
    with pytest.raises(GridError, match=r"needs an entropy on the image's own grid"):
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
