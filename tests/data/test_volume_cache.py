"""A bank returns the same boxes, however many cases are on its device."""

import logging
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from monai.data import MetaTensor
from torch.nn.functional import pad

from volseg.data.case_store.volume_cache import ForegroundVoxels, VolumeCache, choose_budget, choose_resident
from volseg.errors import DataError

SHAPES = [(5, 9, 4), (7, 3, 6), (6, 6, 6)]


def cases(shapes=SHAPES, channels=2):
    generator = torch.Generator().manual_seed(0)
    for number, shape in enumerate(shapes):
        yield {
            "case": f"case_{number}",
            "image": torch.randn(channels, *shape, generator=generator),
            "label": torch.randint(0, 4, (1, *shape), generator=generator).float(),
        }


def by_padding(volume, corner, size):
    """Cut a box out of a volume with 24 voxels of zeros around it."""
    wide = pad(volume, (24,) * 6)
    box = (slice(24 + c, 24 + c + s) for c, s in zip(corner, size, strict=True))
    return wide[:, *box]


@settings(max_examples=40)
@given(
    budget_bytes=st.integers(0, 6000),
    size=st.tuples(*[st.integers(1, 12)] * 3),
    places=st.lists(st.tuples(st.integers(0, 2), st.tuples(*[st.integers(-8, 12)] * 3)), min_size=1, max_size=4),
)
def test_boxes_are_the_case_inside_and_zero_outside(budget_bytes, size, places):
    bank = VolumeCache(list(cases()), budget_bytes=budget_bytes)
    image, label = bank.gather(
        torch.tensor([case for case, _ in places]), torch.tensor([corner for _, corner in places]), size
    )
    assert image.dtype == torch.float32
    assert label.dtype == torch.uint8
    truth = list(cases())
    for row, (case, corner) in enumerate(places):
        assert torch.equal(image[row], by_padding(truth[case]["image"], corner, size))
        assert torch.equal(label[row].float(), by_padding(truth[case]["label"], corner, size))


@pytest.mark.parametrize(
    ("keep", "budget", "num_on_device"),
    [("auto", None, 0), ("memory", None, 0), ("memory", 10**9, 0), ("device", None, 3)],
)
def test_on_a_cpu_cases_are_not_copied_unless_asked(keep, budget, num_on_device):
    assert VolumeCache(list(cases()), keep=keep, budget_bytes=budget).num_on_device == num_on_device


SIZES_BYTES = [5 * 9 * 4 * 9, 7 * 3 * 6 * 9, 6 * 6 * 6 * 9]  # two channels of float32 and a label


@pytest.mark.parametrize(
    ("budget_bytes", "resident"),
    [
        (SIZES_BYTES[1] - 1, [False, False, False]),
        (SIZES_BYTES[1], [False, True, False]),
        (SIZES_BYTES[0] + SIZES_BYTES[1], [True, True, False]),
        (sum(SIZES_BYTES) - 1, [True, True, False]),
        (sum(SIZES_BYTES), [True, True, True]),
    ],
)
def test_the_smallest_cases_lie_on_the_device_without_padding(budget_bytes, resident, caplog):
    caplog.set_level(logging.INFO, "volseg")
    bank = VolumeCache(list(cases()), budget_bytes=budget_bytes)
    assert bank.is_resident.tolist() == resident
    assert (bank.num_on_device, bank.on_device) == (sum(resident), all(resident))
    there = sum(size for size, lies in zip(SIZES_BYTES, resident, strict=True) if lies)
    assert sum(stored.nbytes for stored in bank.stored) == there
    if any(resident):
        assert f"{sum(resident)} of 3 training cases are on cpu" in caplog.text


@pytest.mark.parametrize("keep", ["device", "memory"])
def test_boxes_of_half_precision_volumes_are_float32_without_metadata(keep):
    case = list(cases())[1]
    case |= {name: MetaTensor(case[name].half()) for name in ("image", "label")}
    image, label = VolumeCache([case], keep=keep).gather(
        torch.tensor([0]), torch.zeros(1, 3, dtype=torch.int64), SHAPES[1]
    )
    assert torch.equal(image[0], case["image"].as_tensor().float())
    assert type(image) is type(label) is torch.Tensor


def test_foreground_lists_the_voxels_of_every_class():
    labels = [case["label"] for case in cases()]
    foreground = ForegroundVoxels.find(labels, most=10_000, seed=0)
    for case, label in enumerate(labels):
        for index in range(3):
            first, count = int(foreground.first[case, index]), int(foreground.count[case, index])
            listed = {tuple(voxel) for voxel in foreground.voxels[first : first + count].tolist()}
            assert listed == {tuple(voxel) for voxel in (label[0] == index + 1).nonzero().tolist()}


def test_foreground_is_capped_by_a_draw_without_repeats():
    label = torch.ones(1, 10, 10, 10)
    foreground = ForegroundVoxels.find([label], most=50, seed=0)
    assert foreground.count.tolist() == [[50]]
    assert len(foreground.voxels.unique(dim=0)) == 50
    assert foreground.voxels[:, 0].max() > 5  # not the first fifty


def test_faulty_cases_are_named():
    good = next(cases())
    with pytest.raises(DataError, match="at least one case, got none"):
        VolumeCache([])
    with pytest.raises(DataError, match=r"case bad: .* on one grid, got \(2, 5, 9, 4\) and \(1, 5, 9, 3\)"):
        VolumeCache([good, {**good, "case": "bad", "label": good["label"][..., :3]}])
    with pytest.raises(DataError, match="case bad has 1 channels, but the first case has 2"):
        VolumeCache([good, {**good, "case": "bad", "image": good["image"][:1]}])
    with pytest.raises(DataError, match=r"case bad: labels must be in 0..255, got 0..900"):
        VolumeCache([good, {**good, "case": "bad", "label": good["label"] * 300}])
    with pytest.raises(DataError, match="case bad: labels must be whole numbers"):
        VolumeCache([good, {**good, "case": "bad", "label": good["label"] / 2}])


@given(sizes=st.lists(st.integers(1, 50), min_size=1, max_size=7), budget=st.integers(-1, 200))
def test_no_other_choice_within_the_budget_holds_more_cases(sizes, budget):
    chosen = choose_resident(sizes, budget)
    within = [
        sum(other)
        for other in product([False, True], repeat=len(sizes))
        if sum(size for size, there in zip(sizes, other, strict=True) if there) <= max(budget, 0)
    ]
    assert sum(size for size, there in zip(sizes, chosen, strict=True) if there) <= max(budget, 0)
    assert sum(chosen) == max(within)


@given(sizes=st.lists(st.integers(1, 50), min_size=1, max_size=7), budget=st.integers(0, 200), more=st.integers(0, 50))
def test_more_room_sends_no_case_away(sizes, budget, more):
    for before, after in zip(choose_resident(sizes, budget), choose_resident(sizes, budget + more), strict=True):
        assert after or not before


@given(free=st.integers(0, 2**40), limit=st.none() | st.integers(0, 2**40))
def test_a_budget_is_never_more_than_there_is(free, limit):
    assert 0 <= choose_budget(free, limit) <= free
