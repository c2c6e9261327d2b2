"""Components that are removed and holes that are filled; only steps that help are kept."""

import json
from itertools import product
from pathlib import Path

import nibabel
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from monai.data import MetaTensor
from scipy.ndimage import binary_fill_holes

from volseg.data.cases import Task
from volseg.errors import DataError
from volseg.evaluation.summary import evaluate_files, summarise
from volseg.inference.measured_postprocessing import Judged, measure_postprocessing
from volseg.inference.postprocessing import Postprocessing, Step


def task_of(labels, regions=None, ignore=None):
    return Task(
        name="Test",
        root=Path(),
        modalities=("CT",),
        labels=labels,
        regions=regions or {},
        ignore=ignore,
        training=(),
        test=(),
    )


PLAIN = task_of({0: "background", 7: "liver", 500: "spleen"})
NESTED = task_of(
    {0: "background", 1: "oedema", 2: "core", 3: "enhancing"}, {"whole": (1, 2, 3), "core": (2, 3), "enhancing": (3,)}
)
CROSSED = task_of({0: "background", 1: "left", 2: "both", 3: "right"}, {"A": (1, 2), "B": (2, 3)})


def after(task, voxels, *steps):
    """Return a label map (D, H, W) after steps, each an operation and values."""
    order = Postprocessing.of(task, tuple(Step(operation=name, values=values) for name, values in steps))
    volume = MetaTensor(torch.as_tensor(np.asarray(voxels))[None], affine=torch.diag(torch.tensor([2.0, 1, 1, 1])))
    changed = order(volume)
    assert changed.affine.equal(volume.affine)
    assert changed.dtype == volume.dtype
    return changed.numpy()[0]


def largest_by_flooding(mask):
    """Return the voxels of the largest components, found neighbour by neighbour."""
    left, found = {tuple(place) for place in np.argwhere(mask)}, []
    while left:
        waiting, piece = [left.pop()], set()
        while waiting:
            place = waiting.pop()
            piece.add(place)
            around = {tuple(np.add(place, step)) for step in product((-1, 0, 1), repeat=3)} & left
            left -= around
            waiting.extend(around)
        found.append(piece)
    size = max(map(len, found), default=0)
    kept = np.zeros_like(mask)
    for piece in found:
        if len(piece) == size:
            kept[tuple(np.array(sorted(piece)).T)] = True
    return kept


@given(arrays(np.int32, st.tuples(*[st.integers(1, 5)] * 3), elements=st.sampled_from([0, 7, 500])))
def test_without_regions_only_background_and_the_label_change(voxels):
    mask = voxels == 7
    for operation, expected in (("keep_largest", largest_by_flooding(mask)), ("fill_holes", binary_fill_holes(mask))):
        changed = after(PLAIN, voxels, (operation, (7,)))
        np.testing.assert_array_equal(changed == 7, expected & ((voxels != 500) | mask))
        where = changed != voxels
        old, new = (7, 0) if operation == "keep_largest" else (0, 7)
        assert set(voxels[where].tolist()) <= {old}
        assert set(changed[where].tolist()) <= {new}


@given(arrays(np.uint8, (4, 5, 4), elements=st.integers(0, 3)), st.sampled_from([(1, 2, 3), (2, 3), (3,)]))
def test_a_structure_of_regions_loses_strays_and_holes_and_no_larger_one_suffers(voxels, region):
    inside = np.isin(voxels, region)
    kept = after(NESTED, voxels, ("keep_largest", region))
    np.testing.assert_array_equal(np.isin(kept, region), largest_by_flooding(inside))
    filled = after(NESTED, voxels, ("fill_holes", region))
    np.testing.assert_array_equal(np.isin(filled, region), binary_fill_holes(inside))
    for larger in ((1, 2, 3), (2, 3)):
        if set(larger) > set(region):  # what is no core any more is tumour still
            np.testing.assert_array_equal(np.isin(kept, larger), np.isin(voxels, larger))
            assert (np.isin(filled, larger) >= np.isin(voxels, larger)).all()


def test_what_leaves_one_of_two_crossed_regions_stays_in_the_other():
    voxels = np.zeros((1, 1, 9), np.uint8)
    voxels[0, 0] = [1, 1, 1, 0, 2, 0, 3, 3, 0]
    changed = after(CROSSED, voxels, ("keep_largest", (1, 2)))
    assert changed[0, 0].tolist() == [1, 1, 1, 0, 3, 0, 3, 3, 0]


def test_a_narrow_label_map_takes_a_wide_value():
    wide = task_of({0: "background", 1: "part", 2: "inner", 300: "rest"}, {"whole": (300, 1, 2), "inner": (1, 2)})
    voxels = torch.tensor([[[[1, 0, 2, 2]]]], dtype=torch.uint8)
    order = Postprocessing.of(wide, (Step(operation="keep_largest", values=(1, 2)),))
    assert order(MetaTensor(voxels)).flatten().tolist() == [300, 0, 2, 2]


def test_values_of_another_task_are_refused():
    with pytest.raises(DataError, match=r"has the values \[9\], but the postprocessing .* the values \[0, 7, 500\]"):
        after(PLAIN, np.full((1, 1, 2), 9, np.int32), ("keep_largest", (7,)))


@pytest.fixture
def files(tmp_path):
    """Return a function that writes predictions and labels and returns them as scored cases."""

    def write(*pairs, **settings):
        judged = []
        for number, pair in enumerate(pairs):
            paths = []
            for kind, voxels in zip(("prediction", "reference"), pair, strict=True):
                paths.append(tmp_path / f"{kind}_{number}.nii.gz")
                nibabel.save(nibabel.Nifti1Image(np.asarray(voxels), np.diag([1.0, 2, 3, 1])), paths[-1])
            judged.append(Judged(case=f"case_{number}", prediction=paths[0], reference=paths[1], **settings))
        return judged

    return write


def liver_and_spleen():
    """Return a liver with a hole and a spleen, apart from each other."""
    voxels = np.zeros((12, 10, 8), np.int16)
    voxels[1:6, 1:7, 1:6] = 7
    voxels[8:11, 2:5, 2:5] = 500
    return voxels


def test_only_what_helps_is_kept_and_the_scores_are_those_of_the_summary(files, tmp_path):
    label = liver_and_spleen()
    stray, hollow = label.copy(), label.copy()
    stray[11, 9, 7] = 7
    hollow[3, 3, 3] = 0
    judged = files((stray, label), (hollow, label))
    measured = measure_postprocessing(judged, PLAIN)
    # The spleen is a piece of its own: keeping the largest piece of all would lose it.
    assert measured.postprocessing.steps == (
        Step(operation="keep_largest", values=(7,)),
        Step(operation="fill_holes", values=(7,)),
    )
    assert [(tried.step.operation, tried.name, tried.is_kept) for tried in measured.tried] == [
        ("keep_largest", "all", False),
        ("keep_largest", "liver", True),
        ("keep_largest", "spleen", False),
        ("fill_holes", "liver", True),
        ("fill_holes", "spleen", False),
    ]
    assert measured.tried[0].after[1] == 0.0
    before = summarise([evaluate_files(one.prediction, one.reference, PLAIN.structures) for one in judged])
    assert measured.tried[0].before == tuple(before["mean"][key]["Dice"] for key in ("7", "500"))
    assert measured.tried[-1].after == (1.0, 1.0)

    path = measured.save(tmp_path / "postprocessing.json")
    assert path.read_bytes() == measure_postprocessing(judged, PLAIN).save(tmp_path / "again.json").read_bytes()
    order = Postprocessing.load(path)
    assert order == measured.postprocessing
    for voxels in (stray, hollow):
        changed = order(MetaTensor(torch.as_tensor(voxels)[None]))
        assert changed.numpy()[0].tolist() == label.tolist()
    written = json.loads(path.read_text(encoding="utf-8"))
    assert written["cases"] == ["case_0", "case_1"]
    assert written["names"] == ["liver", "spleen"]
    assert (written["tried"][0]["after"][1], written["tried"][0]["kept"]) == (0.0, False)


def test_each_step_is_scored_as_files_changed_by_it_would_be(files, tmp_path):
    """Scores are updated from changed voxels only, with regions, ignored values and partial labels."""
    rng = np.random.default_rng(0)
    task = task_of(NESTED.labels, NESTED.regions, ignore=9)
    pairs = []
    for _ in range(2):
        label = rng.choice([0, 1, 2, 3, 9], (6, 7, 5), p=[0.4, 0.2, 0.2, 0.1, 0.1]).astype(np.uint8)
        noisy = np.where(rng.random(label.shape) < 0.3, rng.integers(0, 4, label.shape), label)
        pairs.append((np.where(noisy == 9, 0, noisy).astype(np.uint8), label))
    judged = files(*pairs, labelled=(2, 3))
    measured = measure_postprocessing(judged, task)
    kept: list[Step] = []
    for tried in measured.tried:
        changed = files(
            *(
                (after(task, one, *((s.operation, s.values) for s in (*kept, tried.step))), label)
                for one, label in pairs
            )
        )
        settings = {"ignore": 9, "values": task.class_values, "labelled": (2, 3)}
        scored = summarise(
            [evaluate_files(one.prediction, one.reference, task.structures, **settings) for one in changed]
        )
        expected = tuple(scored["mean"][str(key)]["Dice"] for key in task.structures)
        np.testing.assert_array_equal(tried.after, expected)
        if tried.is_kept:
            kept.append(tried.step)
    assert np.isnan(measured.tried[0].before[0])  # oedema was not looked for


def test_a_step_that_costs_another_structure_is_not_kept(files):
    """Of two pieces of the foreground the larger one is right in one structure and wrong in the other."""
    label, found = np.zeros((2, 1, 1, 12), np.int16)
    label[0, 0, :4], label[0, 0, 8:10] = 7, 500
    found[0, 0, :6], found[0, 0, 8:10], found[0, 0, 11] = 7, 500, 7
    measured = measure_postprocessing(files((found, label)), PLAIN)
    everything, liver = measured.tried[:2]
    assert everything.after[0] > everything.before[0]
    assert everything.after[1] < everything.before[1]
    assert not everything.is_kept
    assert liver.is_kept
    with pytest.raises(DataError, match="there are none"):
        measure_postprocessing([], PLAIN)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": 2}, "of format 1, got 2"),
        (
            {"steps": [{"operation": "erode", "values": [7]}]},
            "steps.0.operation: Input should be 'keep_largest' or 'fill_holes'",
        ),
        ({"steps": [{"operation": "fill_holes", "values": [8]}]}, "on those labels"),
        ({"steps": [{"operation": "fill_holes"}]}, "not a postprocessing.json of volseg .steps.0.values"),
        ({"labels": [7, 0, 500]}, "Write it again"),
    ],
)
def test_a_file_that_says_something_else_is_refused(tmp_path, change, words):
    path = Postprocessing.of(PLAIN).save(tmp_path / "postprocessing.json")
    content = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(content | change), encoding="utf-8")
    with pytest.raises(DataError, match=words):
        Postprocessing.load(path)
