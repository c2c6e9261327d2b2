"""Synthetic tasks have their declared properties, twins those of the task's manifest; both can be learned."""

import json
from hashlib import sha256

import nibabel
import numpy as np
import pytest
from scipy.ndimage import binary_dilation, binary_erosion
from scipy.ndimage import label as number_parts

from volseg.config.catalogue import get_public_task, list_public_tasks
from volseg.data import check_cases, load_task
from volseg.data.mock_msd import make_mock_task
from volseg.data.synthetic import make_task
from volseg.errors import DataError

TASKS = [public.name for public in list_public_tasks()]


def manifest_of(name):
    return get_public_task(name).manifest


CT = [name for name in TASKS if manifest_of(name)["modalities"] == ["CT"]]


@pytest.fixture(scope="module")
def twins(tmp_path_factory):
    """Return the task folder of a twin, made once."""
    folder, made = tmp_path_factory.mktemp("twins"), {}

    def make(name):
        if name not in made:
            made[name] = load_task(make_mock_task(folder / name, name, num_cases=4, num_test=1))
        return made[name]

    return make


def volumes(task):
    for case in task.training:
        image, label = nibabel.load(case["image"]), nibabel.load(case["label"])
        yield image, np.asarray(image.dataobj), np.asarray(label.dataobj)


@pytest.mark.parametrize("name", TASKS)
def test_a_twin_declares_and_holds_what_its_task_does(twins, name):
    task, manifest = twins(name), manifest_of(name)
    assert list(task.modalities) == manifest["modalities"]
    assert task.labels == manifest["labels"]
    assert check_cases([*task.training, *task.test], task) == []
    for image, voxels, label in volumes(task):
        assert (voxels.ndim == 4) == (manifest["tensor_image_size"] == "4D")
        assert image.get_data_dtype() == np.int16
        assert set(np.unique(label)) == set(task.labels)
        assert max(label.shape) <= 64
    found, target = manifest["nnunet"]["fingerprint"]["median_spacing"], manifest["nnunet"]["spacing"]
    sides = np.array([image.header.get_zooms()[:3] for image, *_ in volumes(task)])
    assert (sides[:, 0] == sides[:, 1]).all()  # pixels are square
    assert (sides >= 0.89 * np.minimum(found, target)).all()
    assert (sides <= 1.11 * np.array(found)).all()
    assert (len(np.unique(sides, axis=0)) == 1) == (name in ("Task01_BrainTumour", "Task04_Hippocampus"))


def test_fields_of_view_keep_their_proportions(twins):
    manifest = manifest_of("Task03_Liver")["nnunet"]["fingerprint"]
    for image, *_ in volumes(twins("Task03_Liver")):
        view = np.array(image.shape) * image.header.get_zooms()
        whole = np.array(manifest["median_shape"]) * manifest["median_spacing"]
        assert np.allclose(view / whole, (view / whole).mean(), rtol=0.03)  # a voxel of fifty


@pytest.mark.parametrize("name", CT)
def test_ct_is_in_hounsfield_units(twins, name):
    for _, voxels, _ in volumes(twins(name)):
        assert voxels.min() < -900  # air
        assert ((voxels > -160) & (voxels < -50)).mean() > 0.02  # fat
        assert ((voxels > 0) & (voxels < 150)).mean() > 0.1  # muscle and organs
        assert (voxels > 350).mean() > 0.003  # bone


@pytest.mark.parametrize("name", TASKS)
def test_structures_differ_from_what_surrounds_them(twins, name):
    """In some channel by more than the noise, so that they can be learned; the hippocampus by its shape too."""
    for _, voxels, label in volumes(twins(name)):
        channels = np.moveaxis(voxels, -1, 0) if voxels.ndim == 4 else voxels[None]
        for value in manifest_of(name)["labels"]:
            here = label == value
            if value == 0 or here.sum() < 5:
                continue
            around = binary_dilation(here, iterations=2) & ~here
            gaps = [
                abs(np.median(channel[here]) - np.median(channel[around])) / (channel[here].std() + 1)
                for channel in channels
            ]
            # One zone of the prostate is darker, the other brighter than what both lie in.
            assert max(gaps) > {"Task04_Hippocampus": 0.3, "Task05_Prostate": 0.6}.get(name, 1)


@pytest.mark.parametrize(
    ("name", "inner", "outer"), [("Task03_Liver", 2, 1), ("Task01_BrainTumour", 2, 3), ("Task01_BrainTumour", 3, 1)]
)
def test_tumours_lie_in_what_holds_them(twins, name, inner, outer):
    for *_, label in volumes(twins(name)):
        around = binary_dilation(label == inner) & (label != inner)
        assert np.isin(label[around], [0, outer, inner, 2]).all()
        assert (label[around] == outer).mean() > 0.5
        assert (label == inner).sum() < (label == outer).sum()


def test_vessels_are_thin(twins):
    for *_, label in volumes(twins("Task08_HepaticVessel")):
        vessel = label == 1
        assert binary_erosion(vessel, iterations=2).sum() < 0.02 * vessel.sum()


@pytest.mark.parametrize(("name", "side"), [("Task03_Liver", 1), ("Task09_Spleen", -1)])
def test_left_is_left_whatever_way_files_are_stored(twins, name, side):
    stored = set()
    for image, _, label in volumes(twins(name)):
        middle = image.affine[:3] @ np.append(np.argwhere(label > 0).mean(0), 1)
        assert np.sign(middle[0]) == side  # RAS+: the patient's right is positive
        stored.add(nibabel.aff2axcodes(image.affine))
    assert len(stored) > 1


def digests(root):
    return {path.relative_to(root): sha256(path.read_bytes()).hexdigest() for path in root.rglob("*") if path.is_file()}


def test_the_same_arguments_write_the_same_bytes(twins, tmp_path):
    task = twins("Task05_Prostate")
    assert digests(make_mock_task(tmp_path / "again", "5", num_cases=4, num_test=1)) == digests(task.root)
    other = digests(make_mock_task(tmp_path / "other", "Task05_Prostate", num_cases=4, num_test=1, seed=1))
    assert not set(other.values()) & {digest for path, digest in digests(task.root).items() if path.suffix == ".gz"}


def test_a_scale_gives_its_share_of_the_sides_and_replaces_other_synthetic_data(tmp_path):
    folder = make_task(tmp_path / "half", num_cases=3, num_test=0)
    task = load_task(make_mock_task(folder, "Task04_Hippocampus", num_cases=2, num_test=0, scale=0.5))
    assert nibabel.load(task.training[0]["image"]).shape == (18, 25, 18)
    assert (task.name, len(list((folder / "imagesTr").iterdir()))) == ("Hippocampus", 2)


@pytest.mark.parametrize(
    ("like", "scale", "message"),
    [("9", 0, "scale of mock data"), ("9", float("nan"), "scale of mock data"), ("Splen", 1, "09_Spleen")],
)
def test_a_scale_out_of_range_and_an_unknown_task_are_refused(tmp_path, like, scale, message):
    with pytest.raises(DataError, match=message):
        make_mock_task(tmp_path / "task", like, scale=scale)
    assert not (tmp_path / "task").exists()


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return load_task(make_task(tmp_path_factory.mktemp("data") / "synthetic", num_cases=8, num_test=2))


def test_a_case_depends_on_its_number_and_the_seed_only(task, tmp_path):
    assert (task.name, len(task.training), len(task.test)) == ("Synthetic", 8, 2)
    assert task.foreground == {1: "Anterior", 2: "Posterior"}
    fewer = digests(make_task(tmp_path / "fewer", num_cases=2, num_test=0))
    other = digests(make_task(tmp_path / "other", num_cases=2, num_test=0, seed=1))
    whole = digests(task.root)
    images = [path for path in fewer if path.suffix == ".gz"]
    assert len(images) == 4
    assert all(fewer[path] == whole[path] for path in images)
    assert all(other[path] != whole[path] for path in images)


def test_cases_differ_as_scanners_do(task):
    images = [nibabel.load(case["image"]) for case in task.training]
    assert all(32 <= side <= 48 for image in images for side in image.shape)
    assert len({nibabel.aff2axcodes(image.affine) for image in images}) >= 5
    assert len({image.get_data_dtype().name for image in images}) == 3
    assert len({tuple(np.round(image.header.get_zooms(), 3)) for image in images}) == 8
    oblique = [np.count_nonzero(np.abs(image.affine[:3, :3]) > 1e-6) > 3 for image in images]
    assert 0 < sum(oblique) < len(images)
    brightest = [image.get_fdata().max() for image in images]
    assert max(brightest) > 10 * min(brightest)


def test_two_structures_in_one_piece_touch_and_lie_front_to_back(task):
    """They are on the image's grid, grey in white matter."""
    for scan, intensities, mask in volumes(task):
        assert np.median(intensities[mask > 0]) < 0.8 * np.median(intensities[mask == 0])
        image = nibabel.as_closest_canonical(nibabel.Nifti1Image(mask, scan.affine))
        voxels = np.asarray(image.dataobj)
        assert set(np.unique(voxels)) == {0, 1, 2}
        assert all(number_parts(voxels == value)[1] == 1 for value in (1, 2))
        assert (binary_dilation(voxels == 1) & (voxels == 2)).any()
        front, back = (np.argwhere(voxels == value).mean(axis=0)[1] for value in (1, 2))
        assert front > back  # j runs from posterior to anterior in RAS+
        volume = np.bincount(voxels.ravel())[1:] * abs(np.linalg.det(image.affine[:3, :3]))
        assert (volume > 300).all()  # mm3; the real ones have about 1700 and 1500
        assert (volume < 4000).all()


def test_its_own_output_is_replaced_and_foreign_files_stay(tmp_path):
    root = make_task(tmp_path, num_cases=4, num_test=0)
    (root / "notes.txt").write_text("mine", encoding="utf-8")
    make_task(root, num_cases=2, num_test=1)
    assert len(load_task(root).training) == 2
    assert len(list((root / "imagesTr").iterdir())) == 2
    assert (root / "notes.txt").read_text(encoding="utf-8") == "mine"


@pytest.mark.parametrize("manifest", [None, "no json", "[]", json.dumps({"name": "Hippocampus"})])
def test_a_folder_of_the_users_own_is_left_alone(tmp_path, manifest):
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    if manifest is not None:
        (tmp_path / "dataset.json").write_text(manifest, encoding="utf-8")
    before = digests(tmp_path)
    with pytest.raises(DataError, match="is not empty, and volseg did not write it; name a new or an empty folder"):
        make_task(tmp_path)
    assert digests(tmp_path) == before


def test_bad_arguments(tmp_path):
    with pytest.raises(DataError, match="needed: num_cases >= 2 and num_test >= 0, got num_cases=1, num_test=4"):
        make_task(tmp_path / "few", num_cases=1)
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="file is a file; name a new or an empty folder"):
        make_task(tmp_path / "file")
