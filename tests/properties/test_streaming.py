"""Label maps computed slab by slab equal those of the plain way: blend all, resample, take the largest."""

import itertools

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from label_maps import crop_padding, original_label_map
from monai.data import MetaTensor
from monai.inferers import sliding_window_inference
from torch import Tensor
from volume_files import CODES, tilt, turn

from volseg.inference.original_grid import Decision, LabelRule, measure_entropy, resample
from volseg.inference.predictor import Predictor
from volseg.inference.windows import choose_axis, compute_starts, plan_blend
from volseg.transforms.preprocessing import build_preprocessing

few = settings(max_examples=20, deadline=None)
sides = st.tuples(*[st.integers(5, 18)] * 3)
windows = st.tuples(*[st.integers(5, 9)] * 3)
overlaps = st.sampled_from([0.0, 0.3, 0.5])
budgets = st.sampled_from([2**62, 40_000, 12_000, 4_000])


def draw_image(shape, axes: str, spacing, degrees: float, seed: int) -> MetaTensor:
    """Return an image whose voxel axes point to ``axes``, tilted about the first world axis."""
    affine = turn(axes, spacing, tilt(degrees, 0, 0))
    affine[:3, 3] = 7, -3, 11
    image = torch.rand(1, *shape, generator=torch.Generator().manual_seed(seed)) + 1
    return MetaTensor(image, affine=torch.from_numpy(affine))


def model(windows: Tensor) -> Tensor:
    """Return logits of three classes that see their neighbours, and their place in the window: windows disagree."""
    ramp = torch.linspace(-2, 2, windows[0, 0].numel()).view(windows.shape[2:])
    return torch.cat([windows.roll(1, 2) + ramp, 3 * windows.roll(-1, 3) - 3, windows.roll(2, 4) - ramp], 1) * 2


@few
@given(
    shape=sides,
    window=windows,
    overlap=overlaps,
    axes=st.sampled_from(CODES),
    spacing=st.tuples(*[st.floats(0.6, 1.7)] * 3),
    target=st.sampled_from([[1, 1, 1], [0.8, 1.3, 1], None]),
    oblique=st.booleans(),
    degrees=st.sampled_from([0.0, 17.0]),
    pad=st.booleans(),
    rule=st.sampled_from([(None, False), ((0, 7, 500), False), ((1, 2, 4), True)]),
    mirror=st.sampled_from([False, [1]]),
    budget=budgets,
    windows_per_step=st.integers(1, 3),
)
def test_streaming_gives_the_labels_of_the_plain_way(
    shape, window, overlap, axes, spacing, target, oblique, degrees, pad, rule, mirror, budget, windows_per_step
):
    steps = [{"name": "Orientation"}, {"name": "CropForeground", "above": 1.02}]
    steps += [{"name": "Spacing", "spacing": target}] if target else []
    steps += [{"name": "Pad", "multiple": 4}] if pad else []
    image = build_preprocessing(steps)({"case": "x", "image": draw_image(shape, axes, spacing, degrees, 3)})["image"]
    if oblique:  # as Spacing makes of a sheared image
        c, s = np.cos(0.4), np.sin(0.4)
        image.affine = torch.tensor([[1, 0, 0, 0], [0, c, -s, 0], [0, s, c, 0], [0, 0, 0, 1]]).double() @ image.affine
    values, regions = rule
    predictor = Predictor(
        model=model, num_classes=3, values=values, regions=regions, window=window, overlap=overlap, mirror=mirror,
        windows_per_step=windows_per_step, memory=budget,
    )  # fmt: skip
    (plain,) = predictor.probabilities(image.as_tensor()[None])
    ((_, streamed),) = predictor.stream([{"case": "x", "image": image}], also=["probabilities", "entropy"])
    labels = streamed.labels
    expected = original_label_map(plain, image, values=values, regions=regions)
    assert labels.affine.equal(expected.affine)
    assert labels.as_tensor().equal(expected.as_tensor())
    decision = Decision(image, LabelRule.of(3, values, regions))
    resampled = resample(decision.original, crop_padding(decision, plain), decision.source)
    inside = resampled.any(0)
    assert streamed.probabilities.affine.equal(expected.affine)
    # To the last bit, so that no label hangs on how much was held. But exponentials on a CPU round by where in a
    # batch a number stands, and strips put other windows together.
    rounding = 0 if windows_per_step == 1 else 1e-6
    found, unsure = streamed.probabilities.as_tensor()[:, inside], streamed.entropy.as_tensor()[0, inside]
    torch.testing.assert_close(found, resampled[:, inside], atol=rounding, rtol=0)
    torch.testing.assert_close(unsure, measure_entropy(resampled, regions)[inside], atol=20 * rounding + 1e-6, rtol=0)
    assert not streamed.entropy.as_tensor()[0, ~inside].any()
    assert (streamed.probabilities.as_tensor()[0, ~inside] == (not regions)).all()


@settings(max_examples=12, deadline=None)
@given(shape=sides, window=windows, overlap=overlaps, images=st.integers(1, 3), windows_per_step=st.integers(1, 4))
def test_blended_probabilities_are_those_of_monai(shape, window, overlap, images, windows_per_step):
    batch = torch.rand(images, 1, *shape, generator=torch.Generator().manual_seed(1))
    ours = Predictor(model=model, num_classes=3, window=window, overlap=overlap, windows_per_step=windows_per_step)
    with torch.no_grad():
        theirs = sliding_window_inference(
            batch, window, windows_per_step, lambda x: model(x).softmax(1), overlap=overlap, mode="gaussian"
        )
    # float32 sums of up to 27 windows, which ours adds by layers of another axis where that needs less memory.
    first = choose_axis(tuple(map(max, shape, window)), window) == 0
    torch.testing.assert_close(ours.probabilities(batch), theirs, atol=0 if first else 2e-6, rtol=0)


@few
@given(
    shape=sides, window=windows, overlap=overlaps, num_classes=st.integers(1, 200), budget=st.integers(1000, 10**7),
    whole=st.booleans(),
)  # fmt: skip
def test_every_plan_covers_the_volume_within_its_budget(shape, window, overlap, num_classes, budget, whole):
    window = tuple(map(min, window, shape))
    least = 2 * 2 * max(sides + 1 for sides in window) * (num_classes + 1) * 4
    plan = plan_blend(shape, window, overlap, num_classes, max(budget, least), most_whole=2**62 if whole else 0)
    assert plan.held_bytes(num_classes) <= max(budget, least)
    decided, finished = torch.zeros(shape, dtype=torch.int), torch.zeros(shape, dtype=torch.int)
    for cells in plan.list_strips():
        for layer in plan.layers:
            box = [slice(part.start, part.stop) for part in cells]
            box[plan.axis] = slice(layer.ready.start, layer.ready.stop)
            decided[tuple(box)] += 1
            box[plan.axis] = slice(layer.finished.start, layer.finished.stop)
            finished[tuple(box)] += 1
            if not plan.whole:  # the ring holds the last decided plane, and all that this layer touches
                assert layer.starts[0] + window[plan.axis] - max(0, layer.ready.start) <= plan.depth
    assert (decided == 1).all()
    assert (finished == 1).all()


@few
@given(side=st.integers(1, 300), window=st.integers(1, 64), overlap=st.floats(0, 0.99))
def test_windows_reach_both_ends_and_leave_no_gap(side, window, overlap):
    window = min(side, window)
    starts = compute_starts(side, window, overlap)
    assert starts[0] == 0
    assert starts[-1] == side - window
    assert all(0 < after - before <= window for before, after in itertools.pairwise(starts))


def test_the_tests_above_force_every_plan():
    """Of a typical draw, the budgets hold all, a layer, strips, and strips along two axes."""
    plans = [plan_blend((16, 14, 15), (6, 7, 5), 0.5, 3, budget) for budget in (2**62, 40_000, 12_000, 4_000)]
    assert [plan.whole for plan in plans] == [True, False, False, False]
    assert [max(plan.strips) > 1 for plan in plans] == [False, False, True, True]
    assert sum(count > 1 for count in plans[-1].strips) == 2
