import json
from hashlib import sha256

import nibabel
import numpy as np
import pytest
from scipy.ndimage import binary_dilation, label

from volseg.data.layouts import load_task
from volseg.data.synthetic import make_task
from volseg.errors import DataError


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return load_task(make_task(tmp_path_factory.mktemp("data") / "synthetic", num_cases=8, num_test=2))


def digests(root):
    return {
        path.relative_to(root): sha256(path.read_bytes()).hexdigest()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


def test_it_is_an_msd_task(task):
    assert task.name == "Synthetic"
    assert len(task.training) == 8
    assert len(task.test) == 2
    assert task.foreground == {1: "Anterior", 2: "Posterior"}


def test_a_case_depends_on_its_number_and_the_seed_only(task, tmp_path):
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
    for case in task.training:
        image = nibabel.as_closest_canonical(nibabel.load(case["label"]))
        voxels = np.asarray(image.dataobj)
        assert set(np.unique(voxels)) == {0, 1, 2}
        assert all(label(voxels == value)[1] == 1 for value in (1, 2))
        assert (binary_dilation(voxels == 1) & (voxels == 2)).any()
        front, back = (np.argwhere(voxels == value).mean(axis=0)[1] for value in (1, 2))
        assert front > back  # j runs from posterior to anterior in RAS+
        volume = np.bincount(voxels.ravel())[1:] * abs(np.linalg.det(image.affine[:3, :3]))
        assert (volume > 300).all()  # mm3; the real ones have about 1700 and 1500
        assert (volume < 4000).all()


def test_label_and_image_share_one_grid(task):
    for case in task.training:
        image, mask = nibabel.load(case["image"]), nibabel.load(case["label"])
        np.testing.assert_array_equal(image.affine, mask.affine)
        structure, rest = (
            image.get_fdata()[np.asarray(mask.dataobj) > 0],
            image.get_fdata()[np.asarray(mask.dataobj) == 0],
        )
        assert np.median(structure) < 0.8 * np.median(rest)  # grey in white matter


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
    with pytest.raises(DataError, match="is not empty and was not made by volseg; name a new or an empty folder"):
        make_task(tmp_path)
    assert digests(tmp_path) == before


def test_bad_arguments(tmp_path):
    with pytest.raises(DataError, match="need num_cases >= 2 and num_test >= 0, got num_cases=1, num_test=4"):
        make_task(tmp_path / "few", num_cases=1)
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="file is a file; name a new or an empty folder"):
        make_task(tmp_path / "file")
