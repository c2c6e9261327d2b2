"""The patches of an epoch, which do not depend on how they are computed."""

import itertools
import re
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from volseg.data.case_store.volume_cache import ForegroundVoxels, VolumeCache
from volseg.data.patches import PatchBatches, _draw_cases, num_foreground, plan_epoch
from volseg.errors import ConfigError

SHAPES = [(12, 14, 10), (9, 20, 11), (6, 15, 16)]
PATCH = (8, 8, 8)


def bank(keep="memory", budget_bytes=None):
    generator = torch.Generator().manual_seed(0)
    cases = []
    for number, shape in enumerate(SHAPES):
        label = torch.zeros(1, *shape, dtype=torch.uint8)
        label[0, 1, 2, 3] = 1  # one voxel near a corner: a random patch seldom holds it
        if number != 1:
            label[0, -1, -1, -1] = 2
        cases.append({"case": f"case_{number}", "image": torch.randn(1, *shape, generator=generator), "label": label})
    return VolumeCache(cases, keep=keep, budget_bytes=budget_bytes)


def batches(keep="memory", budget_bytes=None, **changes):
    settings = {"batch_size": 4, "iterations": 12, "foreground": 0.33, "seed": 3} | changes
    return PatchBatches(bank(keep, budget_bytes), PATCH, **settings)


def assert_same(first, second):
    for a, b in itertools.zip_longest(first, second):
        assert a["case"] == b["case"]
        assert torch.equal(a["image"], b["image"])
        assert torch.equal(a["label"], b["label"])


@settings(max_examples=50)
@given(
    shapes=st.lists(st.tuples(*[st.integers(1, 30)] * 3), min_size=1, max_size=5),
    patch=st.tuples(*[st.integers(1, 20)] * 3),
    batch_size=st.integers(1, 5),
    iterations=st.integers(1, 20),
    share=st.floats(0, 1),
    seed=st.integers(0, 99),
)
def test_plans_keep_their_promises(shapes, patch, batch_size, iterations, share, seed):
    """Every case is seen equally often; patches stay inside, or are centred; the last ones hold foreground."""
    generator = torch.Generator().manual_seed(seed)
    labels = [torch.randint(0, 3, (1, *shape), generator=generator) for shape in shapes]
    foreground = ForegroundVoxels.find(labels, most=10_000, seed=0)
    plan = plan_epoch(
        torch.tensor(shapes), foreground, patch,
        batch_size=batch_size, iterations=iterations, share=share, generator=generator,
    )  # fmt: skip
    assert plan.cases.shape == (iterations, batch_size)
    seen = torch.bincount(plan.cases.flatten(), minlength=len(shapes))
    assert seen.max() - seen.min() <= 1
    surely = num_foreground(batch_size, share)
    for case, corners in zip(plan.cases.tolist(), plan.corners.tolist(), strict=True):
        for place, (number, corner) in enumerate(zip(case, corners, strict=True)):
            for first, side, length in zip(corner, patch, shapes[number], strict=True):
                if length >= side:
                    assert 0 <= first <= length - side
                else:
                    assert first == -((side - length) // 2)
            box = (slice(max(c, 0), max(c, 0) + p) for c, p in zip(corner, patch, strict=True))
            if place >= batch_size - surely and (labels[number] > 0).any():
                assert (labels[number][0][tuple(box)] > 0).any()


def test_every_place_of_a_case_is_reached():
    plan = batches(iterations=400, foreground=0.0).plan(0)
    for case, shape in enumerate(SHAPES):
        corners = plan.corners[plan.cases == case]
        for axis, (length, side) in enumerate(zip(shape, PATCH, strict=True)):
            expected = set(range(length - side + 1)) if length >= side else {-((side - length) // 2)}
            assert set(corners[:, axis].tolist()) == expected


def plan_of_three(weights, iterations=4, batch_size=2):
    """Plan an epoch of three equal cases."""
    labels = [torch.ones(1, 9, 9, 9, dtype=torch.uint8)] * 3
    return plan_epoch(
        torch.tensor([[9, 9, 9]] * 3), ForegroundVoxels.find(labels, most=50), (4, 4, 4), batch_size=batch_size,
        iterations=iterations, share=0.5, generator=torch.Generator().manual_seed(5), weights=weights,
    )  # fmt: skip


def test_without_weights_cases_and_places_are_those_that_they_always_were():
    plan = plan_of_three(None)
    assert plan.cases.tolist() == [[1, 2], [0, 1], [0, 2], [0, 1]]
    assert plan.corners.sum(-1).tolist() == [[5, 5], [5, 13], [4, 3], [8, 13]]


@pytest.mark.parametrize("scale", [1.0, 1e300, 1e-300])
def test_cases_are_drawn_as_often_as_their_weights_say(scale):
    """At every place of a batch, the oversampled ones too: within five standard deviations of 20,000 draws."""
    drawn = plan_of_three(scale * torch.tensor([1.0, 0.0, 3.0], dtype=torch.float64), 20_000, 4).cases
    assert drawn.shape == (20_000, 4)
    counts = torch.stack([torch.bincount(place, minlength=3) for place in drawn.T])
    assert not counts[:, 1].any()
    assert (counts[:, 0] - 5000).abs().max() < 5 * (20_000 * 0.25 * 0.75) ** 0.5
    pairs = torch.bincount((drawn[:, 0] > 0) * 2 + (drawn[:, 1] > 0), minlength=4) / 20_000  # independent of each other
    torch.testing.assert_close(pairs, torch.tensor([1, 3, 3, 9]) / 16, atol=0.02, rtol=0)


@given(
    weights=st.lists(st.floats(0, 1e308), min_size=1, max_size=6).filter(any),
    lots=st.lists(st.sampled_from([0.0, 0.5, 1 - 2**-53]), min_size=1, max_size=4),
)
def test_no_round_off_draws_a_case_of_weight_zero(weights, lots):
    """The lots are the first and the last number that torch draws from [0, 1), and one between."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "rand", lambda *_, **__: torch.tensor(lots, dtype=torch.float64))
        chosen = _draw_cases(len(weights), len(lots), torch.tensor(weights, dtype=torch.float64), torch.Generator())
    assert all(weights[case] > 0 for case in chosen.tolist())


def test_equal_weights_are_no_weights():
    cases = [{"case": str(n), "image": torch.zeros(1, 4, 4, 4), "label": torch.zeros(1, 4, 4, 4)} for n in range(2)]
    assert VolumeCache([{**case, "weight": 0.5} for case in cases]).weights is None
    assert VolumeCache([{**cases[0], "weight": 0.5}, cases[1]]).weights.tolist() == [0.5, 1.0]


def test_oversampled_patches_hold_each_class_of_their_case():
    """Two single voxels: without oversampling one patch in ten contains one of them."""
    seen = {1: 0, 2: 0}
    for batch in batches(iterations=60, batch_size=2, foreground=0.5).epoch(0):
        last = batch["label"][-1]
        assert (last > 0).any()
        for label in seen:
            seen[label] += int((last == label).any() and batch["case"][-1] != "case_1")
    assert min(seen.values()) > 10


def test_a_class_is_drawn_alike_however_many_voxels_it_has():
    label = torch.ones(1, 20, 20, 20, dtype=torch.uint8)
    label[0, 0, 0, 0] = 2
    one = VolumeCache([{"case": "a", "image": torch.zeros(1, 20, 20, 20), "label": label}])
    chosen = PatchBatches(one, (4, 4, 4), 1, 400, foreground=1.0)
    share = sum(bool((batch["label"] == 2).any()) for batch in chosen.epoch(0)) / 400
    assert abs(share - 0.5) < 0.1  # four standard deviations of 400 fair draws


def test_small_cases_are_padded_with_zeros_around():
    for batch in batches(foreground=0.0).epoch(0):
        for name, image in zip(batch["case"], batch["image"], strict=True):
            if name == "case_2":  # 6 voxels along D in a patch of 8
                assert not image[:, 0].any()
                assert not image[:, -1].any()
                assert image[:, 1:-1].all()


def test_the_patch_is_the_centre_of_the_source():
    wide_batches = batches(source_size=(14, 12, 8))
    for small, wide in zip(batches().epoch(1), wide_batches.epoch(1), strict=True):
        assert (wide["image"].shape, wide["image"].dtype) == ((4, 1, 14, 12, 8), torch.float32)
        assert (wide["label"].shape, wide["label"].dtype) == ((4, 1, 14, 12, 8), torch.uint8)
        assert torch.equal(wide["image"][:, :, 3:-3, 2:-2], small["image"])
        assert torch.equal(wide["label"][:, :, 3:-3, 2:-2], small["label"])
    assert len(wide_batches) == 12


def test_an_epoch_depends_on_seed_and_number_alone():
    made = batches()
    assert_same(made.epoch(2), batches().epoch(2))
    assert_same(made.epoch(2), made.epoch(2))  # not on what came before
    first = [batch["case"] for batch in made.epoch(0)]
    assert first != [batch["case"] for batch in made.epoch(1)]
    assert first != [batch["case"] for batch in batches(seed=4).epoch(0)]


def test_the_thread_ends_with_the_loop_and_waiting_is_counted_for_the_current_epoch():
    made = batches(prefetch=2)
    made.seconds_waited = 1e9  # an earlier epoch's
    epoch = made.epoch(1)
    next(epoch)
    assert 0 < made.seconds_waited < 1e9
    assert any(thread.name.startswith("patches") for thread in threading.enumerate())
    epoch.close()
    assert not any(thread.name.startswith("patches") for thread in threading.enumerate())


def test_a_fault_in_the_thread_reaches_the_loop():
    broken = VolumeCache(
        [{"case": "a", "image": torch.zeros(1, 8, 8, 8), "label": torch.zeros(1, 8, 8, 8)}], keep="memory"
    )
    broken.shapes = broken.shapes.repeat(2, 1)  # a plan for a second case, which is not there
    broken.names *= 2
    broken.foreground = ForegroundVoxels.find([torch.zeros(1, 8, 8, 8)] * 2, 1, 0)
    with pytest.raises(IndexError):
        list(PatchBatches(broken, PATCH, 2, 3, prefetch=2).epoch(0))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"batch_size": 0}, "batch_size 0,"),
        ({"foreground": 1.5}, "share 1.5,"),
        ({"source_size": (9, 8, 8)}, "source_size (9, 8, 8)"),
        ({"source_size": (6, 8, 8)}, "source_size (6, 8, 8)"),
    ],
)
def test_senseless_settings_are_refused(changes, told):
    with pytest.raises(ConfigError, match=rf"patches need .*; got patch_size \(8, 8, 8\), .*{re.escape(told)}"):
        batches(**changes)


def test_patches_of_sparse_annotations_hold_annotated_voxels():
    """nnU-Net centres on a random annotated voxel, the background's too, where it does not ask for foreground."""
    label = torch.full((1, 40, 6, 6), 3)
    label[0, 30] = 0
    label[0, 8, :2] = 1
    sparse = {"case": "a", "image": torch.zeros(1, 40, 6, 6), "label": label}
    nobody = {**sparse, "case": "b", "label": torch.full((1, 40, 6, 6), 3)}
    bank = VolumeCache([sparse, nobody], num_classes=3, is_sparse=True)
    assert bank.annotated is not None
    assert bank.annotated.count.tolist() == [[36 + 12], [0]]
    assert bank.foreground.count.tolist() == [[12, 0], [0, 0]]  # the ignored value is not a class
    plan = PatchBatches(bank, (4, 6, 6), batch_size=4, iterations=100, foreground=0.5).plan(0)
    first = plan.corners[..., 0]
    holds = [(first <= plane) & (plane < first + 4) for plane in (8, 30)]
    is_a, oversampled = plan.cases == 0, torch.arange(4).expand(100, 4) >= 2
    assert holds[0][is_a & oversampled].all()
    assert (holds[0] | holds[1])[is_a].all()
    assert holds[1][is_a & ~oversampled].any()
    assert len(first[~is_a].unique()) > 20  # anywhere


def test_voxels_of_unknown_class_are_no_foreground():
    label = torch.tensor([0, 1, 2, 4, 5]).view(1, 1, 1, 5)
    bank = VolumeCache([{"case": "a", "image": torch.zeros(1, 1, 1, 5), "label": label}], num_classes=3)
    assert bank.foreground.count.tolist() == [[1, 1]]
    assert bank.annotated is None
