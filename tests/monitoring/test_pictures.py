import pytest
import torch
from monai.data import MetaTensor

from volseg.monitoring.pictures import PALETTE, draw_example, draw_slices, face_patient
from volseg.workflow.validation import Example

RED, BLUE = PALETTE[0].to(torch.uint8), PALETTE[1].to(torch.uint8)


def count(picture, colour):
    """Return how many pixels have a colour."""
    return int((picture == colour[:, None, None]).all(0).sum())


def one_cube(shape=(16, 20, 24)):
    label = torch.zeros(shape, dtype=torch.long)
    label[4:12, 5:15, 6:18] = 1
    return torch.rand(shape, generator=torch.Generator().manual_seed(1)), label


def test_lines_are_drawn_around_label_and_prediction_and_nothing_else_is_coloured():
    image, label = one_cube()
    plain = draw_slices(image, torch.zeros_like(label), spacing=(1, 1, 1))
    assert plain.dtype == torch.uint8
    assert torch.equal(plain[0], plain[1])
    assert torch.equal(plain[0], plain[2])
    lined = draw_slices(image, label, spacing=(1, 1, 1))
    assert count(lined, RED) > 1000
    grey_outside = (lined[0] == lined[1]) & (lined[1] == lined[2])
    # The label is half of each side, hence a quarter of each slice.
    assert 0.7 < grey_outside.float().mean() < 0.9
    covered = draw_slices(image, label, label, spacing=(1, 1, 1))
    pale = ((0.4 * PALETTE[0] / 255 + 0.6) * 255).round().to(torch.uint8)
    assert count(covered, pale) == count(lined, RED)
    assert count(covered, RED) == 0


def test_voxels_have_their_proportion_in_mm():
    image, label = one_cube((10, 10, 10))
    label[:] = 1
    squat = draw_slices(image, label, spacing=(1, 1, 5), min_side=200)
    # The borders of the sagittal slice: 10 mm wide and 50 mm high.
    rows, columns = ((squat[:, :, : squat.shape[-1] // 3] == RED[:, None, None]).all(0)).nonzero().T
    height, width = (int(line.max() - line.min()) + 1 for line in (rows, columns))
    assert height / width == pytest.approx(5, rel=0.05)  # of a pixel's rounding at 40 pixels


@pytest.mark.parametrize("min_side", [128, 512])
@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 1, 300), (300, 1, 1), (40, 300, 2), (64, 64, 64)])
def test_any_shape_is_of_readable_and_bounded_size(shape, min_side):
    label = torch.ones(shape, dtype=torch.uint8)
    picture = draw_slices(torch.rand(shape), label, label, spacing=(0.7, 0.7, 3), min_side=min_side)
    assert min(picture.shape[1:]) >= min_side
    assert max(picture.shape[1:]) <= 6 * min_side
    assert count(picture, RED) == 0
    assert int(picture.max()) > 0


def test_no_voxel_is_smaller_than_a_pixel():
    image, label = torch.zeros(200, 200, 200), torch.zeros(200, 200, 200, dtype=torch.long)
    label[77, 133, 51] = 2
    assert count(draw_slices(image, label, spacing=(1, 1, 1), min_side=150), BLUE) > 0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, -1024.0])
def test_intensities_without_a_range_are_drawn(value):
    image, label = one_cube()
    picture = draw_slices(torch.full_like(image, value), label, label, spacing=(1, 1, 1))
    assert int(picture.max()) > 0
    image[0, 0, 0] = value
    assert not torch.equal(picture, draw_slices(image, label, label, spacing=(1, 1, 1)))


def test_any_number_of_labels_has_a_colour_and_a_metatensor_is_drawn():
    image, label = one_cube()
    many = draw_slices(MetaTensor(image[None]), MetaTensor(label * (len(PALETTE) + 1)), spacing=(1, 1, 1))
    assert type(many) is torch.Tensor
    assert torch.equal(many, draw_slices(image, label, spacing=(1, 1, 1)))


def test_where_nothing_is_labelled_the_prediction_chooses_the_slices():
    image, label = one_cube()
    prediction = torch.zeros_like(label)
    prediction[1, 2, 3] = 1
    drawn = draw_slices(image, torch.zeros_like(label), prediction, spacing=(1, 1, 1))
    assert not torch.equal(drawn[0], drawn[1])


def test_an_example_is_turned_to_face_the_patient():
    """A file stored from left to right and one stored from head to feet give one picture."""
    image, label = one_cube()
    label[4:6] = 0
    plain = Example(
        case="a", image=image[None], label=label, prediction=label, affine=torch.diag(torch.tensor([1.0, 2, 3, 1]))
    )
    # Voxel axes to the feet, to the left, to the front.
    affine = torch.tensor([[0.0, -1, 0, 15], [0, 0, 2, 0], [-3, 0, 0, 69], [0, 0, 0, 1]])
    turned = [volume.flip(0, 2).permute(2, 0, 1) for volume in (image, label)]
    other = Example(case="a", image=turned[0][None], label=turned[1], prediction=turned[1], affine=affine)
    assert torch.equal(face_patient(turned[1], affine), label)
    assert torch.equal(draw_example(plain), draw_example(other))


def test_the_channel_that_is_asked_for_is_drawn():
    image, label = one_cube()
    both = torch.stack([image, torch.zeros_like(image)])
    drawn = [draw_slices(both, label, spacing=(1, 1, 1), channel=channel) for channel in (0, 1)]
    assert torch.equal(drawn[0], draw_slices(image, label, spacing=(1, 1, 1)))
    assert torch.equal(drawn[1], draw_slices(torch.zeros_like(image), label, spacing=(1, 1, 1)))
    assert not torch.equal(*drawn)
