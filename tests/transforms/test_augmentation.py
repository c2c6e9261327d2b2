"""Laws of batch augmentation: identities, joint movement of image and label, draws, CUDA graphs."""

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from volseg.config.augmentation import AugmentationConfig
from volseg.errors import ConfigError, GridError
from volseg.transforms.augmentation import AugmentationParameters, BatchAugmentation
from volseg.transforms.augmentation.parameters import control_points
from volseg.transforms.augmentation.spatial import constant, displacement, positions

PATCH = (12, 10, 8)
RECOLOURING = ("noise", "blur", "brightness", "contrast", "low_resolution", "inverted_gamma", "gamma")
EVERYTHING = AugmentationConfig.model_validate(
    {
        **{effect: {"probability": 0.5} for effect in ("rotation", "scaling", *RECOLOURING)},
        "elastic": {"probability": 0.5, "spacing_voxels": 5, "displacement_voxels": [0, 2]},
    }
)


def only(**effects) -> AugmentationConfig:
    """Return a config with only these ``effects``."""
    names = [name for name in AugmentationConfig.model_fields if name not in _NO_EFFECTS]
    return AugmentationConfig.model_validate({name: effects.get(name, {"probability": 0}) for name in names})


_NO_EFFECTS = {"enabled", "label_interpolation", "margin", "own"}


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def batch(augmentation: BatchAugmentation, size: int = 2, channels: int = 1) -> tuple[Tensor, Tensor]:
    generator = rng(7)
    image = torch.randn(size, channels, *augmentation.source_size, generator=generator)
    label = torch.randint(0, 3, (size, 1, *augmentation.source_size), generator=generator, dtype=torch.uint8)
    return image, label


def everything(size: int = 2, channels: int = 1) -> tuple[BatchAugmentation, Tensor, Tensor]:
    """Return an augmentation by every effect, and a batch for it."""
    augmentation = BatchAugmentation(EVERYTHING, PATCH, num_classes=3)
    return augmentation, *batch(augmentation, size, channels)


def centre(volume: Tensor, patch: tuple[int, int, int] = PATCH) -> Tensor:
    for dim, size in enumerate(patch, start=2):
        volume = volume.narrow(dim, (volume.shape[dim] - size) // 2, size)
    return volume


@pytest.mark.parametrize("dense", [False, True])
def test_identity_parameters_leave_every_bit(dense):
    augmentation, image, label = everything(3, 2)
    parameters = AugmentationParameters.identity(3, 2)
    new_image, new_label = augmentation.apply(image, label, parameters, dense=dense)
    assert torch.equal(new_image, centre(image))
    assert torch.equal(new_label, centre(label))
    assert new_label.dtype == torch.uint8
    off = BatchAugmentation(AugmentationConfig(enabled=False), augmentation.source_size, num_classes=3)
    for new, old in zip(off(image, label, rng()), (image, label), strict=True):  # it needs no margin
        assert torch.equal(new, old)


@pytest.mark.parametrize("dense", [False, True])
def test_mirroring_is_a_flip_per_sample(dense):
    augmentation = BatchAugmentation(only(mirror={"probability": 0.5}), PATCH, num_classes=3)
    image, label = batch(augmentation, 4)
    mirror = torch.tensor([[1, 0, 0], [0, 1, 1], [0, 0, 0], [1, 1, 1]], dtype=torch.bool)
    parameters = dataclasses.replace(AugmentationParameters.identity(4), mirror=mirror)
    new_image, new_label = augmentation.apply(image, label, parameters, dense=dense)
    for sample, dims in enumerate([[1], [2, 3], [], [1, 2, 3]]):
        assert torch.equal(new_image[sample], image[sample].flip(dims))
        assert torch.equal(new_label[sample], label[sample].flip(dims))


@pytest.mark.parametrize("interpolation", ["linear", "nearest"])
@pytest.mark.parametrize(("axis", "dims"), [(0, (3, 4)), (1, (4, 2)), (2, (2, 3))])
def test_quarter_turn_is_rot90(axis, dims, interpolation):
    """Positive angles turn the following axis towards the one after it, in the order D, H, W, D."""
    side = (9, 9, 9)
    config = AugmentationConfig(label_interpolation=interpolation, rotation={"probability": 1, "degrees": (90, 90, 90)})
    augmentation = BatchAugmentation(config, side, num_classes=3)
    image, label = batch(augmentation)
    angles = torch.zeros(2, 3)
    angles[:, axis] = math.pi / 2
    parameters = dataclasses.replace(AugmentationParameters.identity(2), rotation=angles)
    new_image, new_label = augmentation.apply(image, label, parameters)
    # 1e-4: coordinates in float32 are off by some 1e-6 of the source's 30 voxels, values by that times their slope.
    expected = centre(image, side).rot90(-1, dims)
    torch.testing.assert_close(new_image, expected, atol=1e-4, rtol=0)
    assert torch.equal(new_label, centre(label, side).rot90(-1, dims))


def test_rotation_is_in_millimetres():
    """On voxels of 1 x 2 x 1 mm a quarter turn moves every second voxel of D to a voxel of H."""
    config = only(rotation={"probability": 1, "degrees": (0, 0, 90)})
    augmentation = BatchAugmentation(config, (9, 5, 3), num_classes=2, spacing=(1, 2, 1))
    ramp = torch.arange(augmentation.source_size[0], dtype=torch.float32).view(1, 1, -1, 1, 1)
    image = (ramp - ramp.mean()).expand(1, 1, *augmentation.source_size).contiguous()
    angles = torch.tensor([[0, 0, math.pi / 2]])
    parameters = dataclasses.replace(AugmentationParameters.identity(1), rotation=angles)
    turned, _ = augmentation.apply(image, torch.zeros_like(image, dtype=torch.uint8), parameters)
    expected = -2 * (torch.arange(5.0) - 2).view(1, 1, 1, 5, 1).expand_as(turned)
    torch.testing.assert_close(turned, expected, atol=1e-4, rtol=0)  # float32 coordinates, as above


@pytest.mark.parametrize("dense", [False, True])
def test_image_and_label_move_together(dense):
    """An image that is the label's own shape, moved and cut at a half, is the moved label."""
    config = only(
        rotation={"probability": 1},
        scaling={"probability": 1},
        elastic={"probability": 1, "spacing_voxels": 8, "displacement_voxels": (1, 3)},
        mirror={"probability": 0.5},
    )
    patch = (24, 20, 22)
    augmentation = BatchAugmentation(config, patch, num_classes=2)
    axes = [torch.linspace(-1, 1, n) for n in augmentation.source_size]
    x, y, z = torch.meshgrid(*axes, indexing="ij")
    ellipsoid = ((x + 0.1) ** 2 / 0.1 + (y - 0.05) ** 2 / 0.04 + z**2 / 0.07 < 1).expand(3, 1, -1, -1, -1)
    image, label = augmentation.apply(
        ellipsoid.float(), ellipsoid.to(torch.uint8), augmentation.sample(3, rng(3)), dense=dense
    )
    assert 0.02 < label.float().mean() < 0.9
    undecided = (image - 0.5).abs() < 1e-5
    assert torch.equal((image > 0.5)[~undecided], (label == 1)[~undecided])


def test_constant_images_stay_constant_and_no_border_enters_where_the_source_has_voxels():
    config = AugmentationConfig.model_validate(
        {effect: {**of, "probability": 1} for effect, of in EVERYTHING.model_dump().items() if isinstance(of, dict)}
        | {"noise": {"probability": 0}, "brightness": {"probability": 0}}
    )
    augmentation = BatchAugmentation(config, PATCH, num_classes=2)
    ones = torch.ones(64, 1, *augmentation.source_size)
    image, label = augmentation(ones, ones.to(torch.uint8), rng())
    # 1e-5: eight weights that sum to one in float32.
    torch.testing.assert_close(image, torch.ones_like(image), atol=1e-5, rtol=0)
    assert (label == 1).all()


def test_flat_patches_are_augmented_within_their_planes():
    """Turned all the way round and scaled within planes, what lies along the short axis stays, and needs no margin."""
    within = (True, True, False)
    config = only(
        rotation={"probability": 1, "degrees": (0, 0, 180)},
        scaling={"probability": 1, "factor": (0.7, 1.4), "axes": within},
    )
    augmentation = BatchAugmentation(config, (16, 12, 4), num_classes=2, spacing=(0.6, 0.6, 3.6))
    assert augmentation.source_size[2] == 4
    assert min(augmentation.source_size[:2]) >= 1.4 * math.hypot(15, 11)
    ramp = torch.arange(4.0).expand(3, 1, *augmentation.source_size).contiguous()
    parameters = augmentation.sample(3, rng())
    assert (parameters.scale[:, 2] == 1).all()
    assert torch.equal(parameters.scale[:, 0], parameters.scale[:, 1])
    assert (parameters.scale[:, 0] != 1).all()
    image, _ = augmentation.apply(ramp, torch.zeros_like(ramp, dtype=torch.uint8), parameters)
    # float32 coordinates, as above; the patch's outermost columns end at the source's border
    torch.testing.assert_close(image, torch.arange(4.0).expand_as(image), atol=1e-4, rtol=0)


@pytest.mark.parametrize("channels", [1, 3])
def test_same_generator_state_gives_the_same_bits(channels):
    augmentation, image, label = everything(4, channels)
    before = image.clone(), label.clone()
    first = augmentation(image, label, rng(5))
    with torch.autocast("cpu", dtype=torch.bfloat16):  # which changes nothing
        again = augmentation(image, label, rng(5))
    other = augmentation(image, label, rng(6))
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    assert not torch.equal(first[0], other[0])
    assert torch.equal(image, before[0])  # the batch that came in is left alone
    assert torch.equal(label, before[1])


def test_sparse_and_dense_work_agree():
    augmentation, image, label = everything(16, 2)
    parameters = augmentation.sample(16, rng(2), 2)
    sparse, sparse_label = augmentation.apply(image, label, parameters, dense=False)
    dense, dense_label = augmentation.apply(image, label, parameters, dense=True)
    torch.testing.assert_close(sparse, dense, atol=1e-4, rtol=1e-4)  # coordinates round otherwise, as above
    assert (sparse_label != dense_label).float().mean() < 1e-3
    # Meta tensors have no values: a branch on one, or a copy to the host, raises. Dense work never waits for values.
    new_image, new_label = augmentation.apply(image.to("meta"), label.to("meta"), parameters.to("meta"))
    assert (new_image.shape, new_label.shape) == ((16, 2, *PATCH), (16, 1, *PATCH))


def test_draws_are_per_sample_with_the_stated_probability():
    num = 4000
    config = AugmentationConfig()
    parameters = BatchAugmentation(config, PATCH, num_classes=3).sample(num, rng(11), 2)
    shares = {
        "rotation": ((parameters.rotation != 0).any(1), 0.2),
        "scale": (parameters.scale[:, 0] != 1, 0.2),
        "mirror": (parameters.mirror[:, 1], 0.5),
        "noise": (parameters.noise_std[:, 0] != 0, 0.1),
        "blur": (parameters.blur_sigma[:, 1, 0] != 0, 0.2 * 0.5),
        "brightness": (parameters.brightness[:, 0] != 1, 0.15),
        "contrast": (parameters.contrast[:, 0] != 1, 0.15),
        "low resolution": (parameters.zoom[:, 0, 0] != 1, 0.25 * 0.5),
        "inverted gamma": (parameters.inverted_gamma[:, 0] != 1, 0.1),
        "gamma": (parameters.gamma[:, 0] != 1, 0.3),
    }
    for name, (happened, probability) in shares.items():
        # Four standard deviations of a binomial share.
        slack = 4 * math.sqrt(probability * (1 - probability) / num)
        assert abs(happened.float().mean().item() - probability) < slack, name
    happened = torch.stack([h.float() for h, _ in shares.values()])
    correlation = torch.corrcoef(happened) - torch.eye(len(shares))
    assert correlation.abs().max() < 0.08  # five standard deviations of a correlation of independent draws
    quiet = AugmentationConfig.model_validate({"noise": {"probability": 0}, "rotation": {"probability": 0}})
    without = BatchAugmentation(quiet, PATCH, num_classes=3).sample(num, rng(11), 2)
    for name in ("scale", "mirror", "blur_sigma", "brightness", "contrast", "zoom", "gamma"):
        assert torch.equal(getattr(parameters, name), getattr(without, name)), name  # as without these effects
    assert not without.rotation.any()
    assert not without.noise_std.any()


def test_draws_stay_in_their_ranges_and_fill_them():
    parameters = BatchAugmentation(EVERYTHING, PATCH, num_classes=3).sample(4000, rng(3), 2)
    for drawn, low, high in [
        (parameters.scale, 0.7, 1.4),
        (parameters.rotation.rad2deg(), -30, 30),
        (parameters.brightness, 0.75, 1.25),
        (parameters.gamma, 0.7, 1.5),
        (parameters.zoom, 0.5, 1),
        (parameters.noise_std, 0, 0.1),
    ]:
        assert low - 1e-4 <= drawn.min() < low + 0.05 * (high - low)
        assert high - 0.05 * (high - low) < drawn.max() <= high + 1e-4
    changed = parameters.gamma[parameters.gamma != 1]
    assert abs((changed < 1).float().mean().item() - 0.5) < 0.05  # half below 1, though that side is narrower


def test_elastic_displacement_is_bounded_smooth_and_invertible():
    config = only(elastic={"probability": 1, "spacing_voxels": 6, "displacement_voxels": (2, 2.4)})
    control = BatchAugmentation(config, (24, 20, 16), num_classes=2).sample(4, rng()).elastic
    assert control.shape[2:] == tuple(control_points(n, 6) for n in (24, 20, 16))
    shift = displacement(control, (24, 20, 16))
    assert shift.abs().max() <= 2.4
    assert shift.abs().max() > 0.3
    for axis in range(3):  # 1 + du/dx > 0 along its own axis: no two voxels change places
        assert (shift[:, axis].diff(dim=axis + 1) > -1).all()
    # Weights sum to one, so a constant field is that constant.
    constant = torch.full((1, 3, 7, 6, 5), 1.5)
    torch.testing.assert_close(displacement(constant, (24, 20, 16)), torch.full((1, 3, 24, 20, 16), 1.5))


def test_a_batch_of_another_size_and_settings_that_cannot_work_are_refused():
    augmentation = BatchAugmentation(AugmentationConfig(), PATCH, num_classes=3)
    image = torch.zeros(1, 1, *PATCH)
    with pytest.raises(GridError, match=r"needs images of \(\d+, \d+, \d+\) voxels .*got \(12, 10, 8\)"):
        augmentation(image, image, rng())
    with pytest.raises(ConfigError, match=r"needs num_classes; pass it, or choose 'nearest'"):
        BatchAugmentation(AugmentationConfig(), PATCH)
    with pytest.raises(ConfigError, match=r"three positive sides \(D, H, W\), got \(8, 8\)"):
        BatchAugmentation(AugmentationConfig(label_interpolation="nearest"), (8, 8))


def test_a_constant_is_never_freed_for_a_recording_reads_it_at_its_address():
    cpu = torch.device("cpu")
    vector, ticks = constant((1.0, 2.0, 4.0), cpu), positions(3, cpu)
    for number in range(1000):
        constant((float(number),), cpu)
        positions(number, cpu)
    assert constant((1.0, 2.0, 4.0), cpu) is vector
    assert positions(3, cpu) is ticks
