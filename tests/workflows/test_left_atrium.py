"""The left atrium benchmark: h5 files become the Decathlon's layout without loss; scores follow their definitions."""

import json

import h5py
import left_atrium as converter
import left_atrium_scores as benchmark
import nibabel
import numpy as np
import pytest

from volseg.data.layouts import load_task


def write_scan(folder, case, grey, label):
    (folder / converter.SCANS / case).mkdir(parents=True)
    with h5py.File(folder / converter.SCANS / case / "mri_norm2.h5", "w") as file:
        file["image"] = ((grey - grey.mean()) / grey.std()).astype(np.float32)
        file["label"] = label


def test_scans_become_a_data_set_with_their_grey_values(tmp_path):
    source, rng, scans = tmp_path / "data", np.random.default_rng(0), {}
    for case in ("A", "B", "C", "D"):
        grey = rng.integers(3, 250, (7, 6, 5)).astype(np.float64)
        scans[case] = grey, (grey > 100).astype(np.uint8)
        write_scan(source, case, *scans[case])
    (source / "train.list").write_text("B\nA\nC\n", encoding="utf-8")
    (source / "test.list").write_text("D", encoding="utf-8")
    converter.main([str(source), str(tmp_path / "out"), "--labelled", "2"])
    task = load_task(tmp_path / "out")
    assert [case["case"] for case in task.training] == ["A", "B"]
    assert sorted(path.name for path in (tmp_path / "out" / "unlabelled").iterdir()) == ["C.nii.gz"]
    for case, folder in (("A", "Tr"), ("D", "Ts")):
        grey, label = scans[case]
        image = nibabel.load(tmp_path / "out" / f"images{folder}" / f"{case}.nii.gz")
        assert np.array_equal(np.asarray(image.dataobj), grey - grey.min())
        assert nibabel.aff2axcodes(image.affine) == ("L", "P", "S")
        assert image.header.get_zooms() == pytest.approx([0.625] * 3)
        written = nibabel.load(tmp_path / "out" / f"labels{folder}" / f"{case}.nii.gz")
        assert np.array_equal(np.asarray(written.dataobj), label)
    assert json.loads((tmp_path / "out" / "dataset.json").read_text(encoding="utf-8"))["licence"] == "none stated"
    with pytest.raises(FileExistsError):
        converter.main([str(source), str(tmp_path / "out"), "--labelled", "2"])


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (np.zeros((2, 2, 2), np.float32), "one value everywhere"),
        (np.random.default_rng(0).normal(size=(9, 9, 9)).astype(np.float32), "no z-scored image of 8 bits"),
    ],
)
def test_what_was_no_image_of_bytes_is_refused(image, message):
    with pytest.raises(ValueError, match=message):
        converter.grey_values(image)


def measure_by_definition(mask, other):
    """Return the distance of each surface voxel to the other surface, pair by pair."""

    def surface(volume):
        padded = np.pad(volume, 1)
        inner = [np.roll(padded, shift, axis)[1:-1, 1:-1, 1:-1] for axis in range(3) for shift in (1, -1)]
        return np.argwhere(volume & ~np.logical_and.reduce(inner))

    there, back = surface(mask), surface(other)
    return np.sqrt(((there[:, None] - back[None]) ** 2).sum(-1)).min(1)


def test_scores_are_those_of_their_definitions():
    rng = np.random.default_rng(1)
    reference = np.zeros((12, 11, 10), bool)
    reference[2:8, 3:9, 2:7] = True
    prediction = np.roll(reference, 2, 0) ^ (rng.random(reference.shape) < 0.03)
    found = benchmark.score(prediction, reference)
    there, back = measure_by_definition(prediction, reference), measure_by_definition(reference, prediction)
    both, either = (prediction & reference).sum(), (prediction | reference).sum()
    assert found == pytest.approx(
        {
            "dice": 2 * both / (both + either),
            "jaccard": both / either,
            "hd95": np.percentile([*there, *back], 95),
            "asd": there.mean(),
        }
    )
    assert set(benchmark.score(np.zeros_like(reference), reference).values()) == {0.0}


def test_means_over_seeds_have_students_interval():
    rows = [
        {"network": "vnet", "labelled": 16, "cases": {"a": dict.fromkeys(benchmark.METRICS, value)}}
        for value in (0.8, 0.9, 1.0)
    ]
    (entry,) = benchmark.summarise(rows)
    assert entry["seeds"] == 3
    assert entry["dice"]["mean"] == pytest.approx(0.9)
    assert entry["dice"]["half_interval"] == pytest.approx(4.30265 * 0.1 / 3**0.5, rel=1e-5)  # t of 2 degrees
    assert benchmark.summarise(rows[:1])[0]["dice"]["half_interval"] is None
