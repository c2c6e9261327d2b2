"""Sane data sets that are unlike hippocampi: nothing is said of them, or one thing for one cause."""

import json
from collections import Counter

import numpy as np
import pytest
from planted_faults import save, write_manifest

from volseg.data import check_task, load_task

SIDE = 28


def ball(shape, centre, radius):
    """Return which voxels lie in an ellipsoid."""
    places = (np.indices(shape).T - centre) / radius
    return (np.square(places).sum(-1) < 1).T


def draw_body(rng, shape, noise=8):
    tissue = 300 + 20 * rng.normal(size=tuple(-(-side // 4) for side in shape)).repeat(4, 0).repeat(4, 1).repeat(4, 2)
    tissue = tissue[tuple(map(slice, shape))] + rng.normal(0, noise, shape)
    middle = (np.array(shape) - 1) / 2
    return np.where(ball(shape, middle, 0.9 * middle + 0.5), tissue, 0)


def write_cases(root, cases, **changes):
    names = []
    for number, (image, label, spacing) in enumerate(cases):
        names.append(f"case_{number:02d}")
        affine = np.diag([*spacing, 1.0])
        save(root / "imagesTr" / f"{names[-1]}.nii.gz", image.astype(np.float32), affine)
        save(root / "labelsTr" / f"{names[-1]}.nii.gz", label.astype(np.uint8), affine)
    return write_manifest(root, names, [], labels={"0": "background", "1": "structure"}, **changes)


def count_kinds(root):
    return Counter(finding.kind for finding in check_task(load_task(root)).findings)


def draw_lesions(rng, count):
    """Yield cases with one lesion each, of any size, at any place."""
    shape = (SIDE + 8,) * 3
    for _ in range(count):
        image = draw_body(rng, shape)
        lesion = ball(shape, rng.uniform(11, 24, 3), np.exp(rng.uniform(0.3, np.log(9)))) & (image > 0)
        yield image + 100 * lesion, lesion, (1, 1, 1)


@pytest.mark.parametrize("seed", range(4))
def test_lesions_that_lie_anywhere_are_not_shifted(tmp_path, seed):
    """A small lesion of unusual contrast was to lie 12 voxels elsewhere, though lesions of the data set lie anywhere.

    Their place says nothing, so nothing is said of it.
    """
    root = write_cases(tmp_path / "Task60_Lesions", draw_lesions(np.random.default_rng(seed), 30))
    assert not count_kinds(root).keys() & {"label-shifted", "label-mirrored"}


def draw_stack(rng, thickness):
    shape = (SIDE, SIDE, round(48 / thickness))
    radii = rng.uniform(4, 6, 3) / (1, 1, thickness)
    middle = (np.array(shape) - 1) / 2
    fine = draw_body(rng, (SIDE, SIDE, 48), noise=0)
    image = fine[:, :, :: round(thickness)][:, :, : shape[2]] + rng.normal(0, 8, shape)
    organ = ball(shape, middle + rng.uniform(-1, 1, 3) / (1, 1, thickness), radii)
    return image + 100 * organ, organ, (1, 1, thickness)


def test_a_protocol_of_thicker_slices_is_remarked_on_once(tmp_path):
    """Three stacks of 6 mm among 37 of 1 mm were named for spacing, noise, unlike slices, jumps and ragged labels."""
    rng = np.random.default_rng(0)
    root = write_cases(tmp_path / "Task61_Mixed", [draw_stack(rng, 6 if number < 3 else 1) for number in range(40)])
    assert count_kinds(root) == {"spacing": 3}


def test_slices_twice_as_thick_and_half_as_many_are_another_protocol(tmp_path):
    """A spacing of twice the others' was remarked on even where the size of the patient agrees."""
    rng = np.random.default_rng(1)
    root = write_cases(tmp_path / "Task62_Mixed", [draw_stack(rng, 2 if number < 3 else 1) for number in range(40)])
    assert "spacing" not in count_kinds(root)


def test_a_label_that_is_partly_to_be_ignored_has_no_size_and_no_place(tmp_path):
    """What an annotator left out was taken for background: labels were small, and shifted towards it."""
    rng = np.random.default_rng(2)
    cases = []
    for number in range(30):
        image, organ, spacing = draw_stack(rng, 1)
        label = organ.astype(np.uint8)
        if number < 2:
            label[:, :, 20:] = 2
        cases.append((image, label, spacing))
    root = write_cases(tmp_path / "Task63_Ignored", cases)
    declared = json.loads((root / "dataset.json").read_text(encoding="utf-8"))
    (root / "dataset.json").write_text(json.dumps(declared | {"ignore": 2}), encoding="utf-8")
    assert count_kinds(root) == {}


def test_lesions_of_single_voxels_in_a_cut_out_brain_are_neither_noise_nor_an_overflow(tmp_path):
    """Two lesions of one voxel were ragged, and their image, whose brightest voxels are the brain's, was wrapped."""
    rng = np.random.default_rng(3)
    cases = []
    for number in range(30):
        image, organ, spacing = draw_stack(rng, 1)
        if number == 0:
            image, organ = np.where(organ, image - 100, image), np.zeros_like(organ)
            organ[10, 12, 20] = organ[17, 12, 30] = True
            image[organ] += 60
        cases.append((image, organ, spacing))
    kinds = count_kinds(write_cases(tmp_path / "Task64_Points", cases))
    assert not kinds.keys() & {"label-ragged", "wrapped"}
