"""The kernels that blend and label, against plain torch: on a GPU, or in Triton's interpreter."""

from itertools import pairwise

import pytest
import torch
from kernels import DEVICE, fewer, with_kernels

from volseg.device.triton_tiles import available
from volseg.inference import blending
from volseg.inference.original_grid import LabelRule, decide, measure_entropy
from volseg.inference.sampling import Aligned, Held, sample_grid
from volseg.inference.windows import compute_importance
from volseg.transforms.grid import Grid

if available():
    from volseg.inference import triton_prediction

SHAPE = (5, 6, 7)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@with_kernels
@pytest.mark.parametrize("link", ["softmax", "sigmoid", ""])
@pytest.mark.parametrize(
    ("num_classes", "dtype"), fewer([(3, torch.float32), (117, torch.bfloat16), (1, torch.float16)], 2)
)
@pytest.mark.parametrize(("axis", "first"), [(0, (5, 0, 1)), (1, (-2, 3, 4)), (2, (1, -1, 12))])
@pytest.mark.parametrize(("channels_last", "flips"), [(False, []), (True, []), (False, [-3, -1]), (True, [-2])])
def test_a_window_is_added_as_plain_torch_adds_it(link, num_classes, dtype, axis, first, channels_last, flips):
    """It wraps around along the ring's axis, and is cropped to the blend along the others."""
    window, importance = draw(1, num_classes, *SHAPE).to(dtype), compute_importance(SHAPE, torch.device(DEVICE))
    window = window.to(memory_format=torch.channels_last_3d) if channels_last else window
    sides = [7, 8, 9]
    sides[axis] = max(sides[axis], SHAPE[axis] + 1)
    blend = draw(num_classes, *sides, seed=1)
    expected = blend.cpu()
    triton_prediction.add_window(blend, window[0], importance, first, axis, link, flips)
    blending.add_window(expected, window[0].cpu().float(), importance.cpu(), first, axis, link, flips)
    # float32: exponentials, and products and sums that are rounded once or twice, of numbers around 1.
    torch.testing.assert_close(blend.cpu(), expected, atol=2e-6, rtol=0)
    assert not expected.equal(draw(num_classes, *sides, seed=1).cpu())


@with_kernels
@pytest.mark.parametrize("link", ["softmax", "sigmoid", ""])
@pytest.mark.parametrize(("axis", "first"), fewer([(2, (0, 1, 68)), (0, (2, 0, -3)), (1, (0, 2, 12))], 2))
def test_lines_and_classes_of_several_tiles(link, axis, first):
    shape, classes = (2, 3, 70), 40  # 64 voxels x 32 classes are a tile
    window = draw(1, classes, *shape).to(torch.float16).to(memory_format=torch.channels_last_3d)[0]
    importance = compute_importance(shape, torch.device(DEVICE))
    blend = draw(classes, 3, 4, 71, seed=1)
    expected = blend.cpu()
    triton_prediction.add_window(blend, window, importance, first, axis, link, [-1])
    blending.add_window(expected, window.cpu().float(), importance.cpu(), first, axis, link, [-1])
    torch.testing.assert_close(blend.cpu(), expected, atol=2e-6, rtol=0)  # as above
    assert not expected.equal(draw(classes, 3, 4, 71, seed=1).cpu())


@with_kernels
@pytest.mark.filterwarnings("ignore:invalid value")  # of NumPy, by which the interpreter computes
@pytest.mark.parametrize(("classes", "channels_last"), [(3, False), (9, True), (40, True)])
def test_a_class_may_be_impossible_and_a_logit_that_is_no_number_shows(classes, channels_last):
    logits = draw(1, classes, *SHAPE)
    logits = (logits.to(memory_format=torch.channels_last_3d) if channels_last else logits)[0]
    logits[0, 0] = float("-inf")
    logits[1, 2, 3, 4] = float("nan")
    logits[2, 4, 5, 6] = float("inf")
    importance = torch.ones(SHAPE, device=DEVICE)
    blend = torch.zeros(classes, *SHAPE, device=DEVICE)
    triton_prediction.add_window(blend, logits, importance, (0, 0, 0), 0, "softmax", ())
    torch.testing.assert_close(blend, logits.softmax(0), atol=1e-6, rtol=0, equal_nan=True)  # exponentials
    assert blend.isnan().sum() == 2 * classes
    assert not blend[0, 0].any()


def grids(spacing, flip: bool) -> tuple[Grid, Grid]:
    affine = torch.zeros(4, 4, dtype=torch.float64)
    for axis, (along, side) in enumerate(zip((2, 0, 1), spacing, strict=True)):
        affine[along, axis] = side
    affine[3, 3] = 1
    affine[:3, 3] = torch.tensor([-0.7, 0.4, 0.9])
    if flip:
        affine[0] *= -1
        affine[0, 3] = 8.0
    return Grid((9, 8, 11), affine), Grid((10, 9, 8), torch.eye(4, dtype=torch.float64))


@with_kernels
@pytest.mark.parametrize("rule", [LabelRule((0, 1, 2)), LabelRule((0, 7, 500)), LabelRule((3, 1, 4), regions=True)])
@pytest.mark.parametrize("spacing", fewer([(0.8, 1.0, 1.3), (1.0, 1.0, 1.0), (1.0, 0.7, 1.0)], 2))
@pytest.mark.parametrize("flip", [False, True])
def test_labels_are_those_of_plain_torch(rule, spacing, flip):
    target, source = grids(spacing, flip)
    sampling = sample_grid(target, source)
    assert isinstance(sampling, Aligned)
    logits = 3 * draw(3, *source.shape)
    probabilities = logits.sigmoid() if rule.regions else logits.softmax(0)
    ring = probabilities.roll(3, 1)  # voxel i along D lies at (i + 3) % 10
    held, cells = Held(ring, (-3, 0, 0)), (range(2, 10), range(9), range(1, 8))
    table, compared = rule.table(probabilities.device), 0
    read = {str(place): values for place, values in sampling.read(held, cells, 2**20)}
    for place, labels, entropy in triton_prediction.decide(
        sampling, held, cells, table, rule.dtype, regions=rule.regions, entropy=True
    ):
        values = read[str(place)]
        assert labels.dtype == rule.dtype
        # Where two probabilities, or one and a half, are as near as float32 tells, either may come out.
        largest = values.sort(0).values
        sure = (values - 0.5).abs().amin(0) > 1e-6 if rule.regions else largest[-1] - largest[-2] > 1e-6
        assert sure.float().mean() > 0.99
        assert labels[sure].equal(decide(values, rule)[sure])
        torch.testing.assert_close(entropy, measure_entropy(values, rule.regions), atol=1e-5, rtol=0)  # logarithms
        compared += labels.numel()
    assert compared > 200


@with_kernels
def test_of_equal_classes_the_first_is_taken():
    sampling = sample_grid(*[Grid((4, 4, 4), torch.eye(4, dtype=torch.float64))] * 2)
    held = Held(torch.full((5, 4, 4, 4), 0.2, device=DEVICE))
    ((_, labels, _),) = triton_prediction.decide(sampling, held, (range(4),) * 3, None, torch.uint8)
    assert not labels.any()


@with_kernels
def test_a_voxels_label_does_not_depend_on_the_box_in_which_it_is_decided():
    target, source = grids((0.8, 1.0, 1.3), False)
    sampling = sample_grid(target, source)
    held = Held(draw(4, *source.shape).softmax(0))
    maps = []
    for cuts in ([0, 10], [0, 4, 5, 10]):
        labels = torch.zeros(target.shape, dtype=torch.uint8)
        for start, stop in pairwise(cuts):
            cells = (range(start, stop), range(9), range(8))
            for place, part, _ in triton_prediction.decide(sampling, held, cells, None, torch.uint8):
                labels[place] = part.cpu()
        maps.append(labels)
    assert maps[0].equal(maps[1])
    assert maps[0].any()
