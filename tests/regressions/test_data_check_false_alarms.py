"""Sound data sets that are unlike Task04: the check reports nothing, or one finding for one cause."""

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
    return write_manifest(root, names, [], **{"labels": {"0": "background", "1": "structure"}, **changes})


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
    """A small lesion of unusual contrast was reported as shifted by 12 voxels.

    Lesions of this data set lie anywhere, so their places say nothing.
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


def test_a_protocol_of_thicker_slices_has_one_remark(tmp_path):
    """Three stacks of 6 mm among 37 of 1 mm had remarks on spacing, noise, unlike slices, jumps and ragged labels."""
    rng = np.random.default_rng(0)
    root = write_cases(tmp_path / "Task61_Mixed", [draw_stack(rng, 6 if number < 3 else 1) for number in range(40)])
    assert count_kinds(root) == {"spacing": 3}


def test_slices_twice_as_thick_and_half_as_many_are_another_protocol(tmp_path):
    """A doubled spacing was reported although the size of the patient was usual."""
    rng = np.random.default_rng(1)
    root = write_cases(tmp_path / "Task62_Mixed", [draw_stack(rng, 2 if number < 3 else 1) for number in range(40)])
    assert "spacing" not in count_kinds(root)


def test_a_label_with_ignored_voxels_is_not_small_or_shifted(tmp_path):
    """Ignored voxels counted as background, so labels were reported as small, and as shifted."""
    rng = np.random.default_rng(2)
    cases = []
    for number in range(30):
        image, organ, spacing = draw_stack(rng, 1)
        label = organ.astype(np.uint8)
        if number < 2:
            label[:, :, 20:] = 2
        cases.append((image, label, spacing))
    assert count_kinds(write_cases(tmp_path / "Task63_Ignored", cases, ignore=2)) == {}


def test_lesions_of_single_voxels_in_a_masked_brain_are_neither_noise_nor_an_overflow(tmp_path):
    """Two lesions of one voxel were reported as a ragged label, and the edge of the mask as an overflow."""
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


def draw_chest(rng, *, has_bone):
    shape = (SIDE,) * 3
    place = np.array((15, 14, 14)) + rng.uniform(-1, 1, 3)
    bone, lung = ball(shape, place - np.eye(3)[2] * 6, 6) & has_bone, ball(shape, place + np.eye(3)[2] * 6, 5)
    image = np.where(bone, 400, np.where(lung, -700, 40)) + rng.normal(0, 10, shape)
    image[:3] += 400  # another bone, without a label
    return image, bone + 2 * lung, (1, 1, 1)


def test_lungs_without_bones_are_compared_with_lungs(tmp_path):
    """A crop of a CT with only one of the two structures was reported as dark, and its label as lying on air."""
    rng = np.random.default_rng(4)
    cases = [draw_chest(rng, has_bone=number > 0) for number in range(12)]
    labels = {"0": "background", "1": "bone", "2": "lung"}
    root = write_cases(tmp_path / "Task65_Chest", cases, labels=labels, modality={"0": "CT"})
    assert count_kinds(root) == {}
