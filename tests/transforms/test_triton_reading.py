"""Patches read directly from stored cases equal those that are cut first and then moved.

Runs on a GPU, or anywhere by Triton's interpreter.
"""

from dataclasses import replace

import pytest
import torch
from kernels import DEVICE, INTERPRETED, fewer, with_kernels

from volseg.config.augmentation import AugmentationConfig
from volseg.data.case_store.volume_cache import VolumeCache
from volseg.transforms.augmentation import BatchAugmentation
from volseg.transforms.augmentation.triton_reading import PatchSources

PATCH = (9, 7, 10)
NUM = 4 if INTERPRETED else 7  # patches: of each case, and one beyond
MOVED = {"rotation": {"probability": 0.7}, "scaling": {"probability": 0.7}}
ELASTIC = {**MOVED, "elastic": {"probability": 0.7, "spacing_voxels": 5, "displacement_voxels": (0, 2)}}
RECOLOURING = ("noise", "blur", "brightness", "contrast", "low_resolution", "inverted_gamma", "gamma")
STILL = {name: {"probability": 0} for name in RECOLOURING}


def bank(channels: int = 1, budget_bytes: int | None = None) -> VolumeCache:
    """Return cases larger and smaller than a patch, on the device as far as the budget goes."""
    generator = torch.Generator().manual_seed(0)
    cases = []
    for number, sides in enumerate([(12, 15, 11), (6, 18, 4), (20, 5, 13)]):
        image = torch.randn(channels, *sides, generator=generator)
        label = torch.randint(0, 4, (1, *sides), generator=generator)
        cases.append({"case": str(number), "image": image, "label": label})
    keep = "device" if budget_bytes is None else "auto"
    return VolumeCache(cases, device=DEVICE, keep=keep, budget_bytes=budget_bytes)


def places(augmentation: BatchAugmentation, num: int = NUM):
    """Return cases and corners, some of them outside their case."""
    generator = torch.Generator().manual_seed(1)
    cases = torch.arange(num) % 3
    margin = [(whole - side) // 2 for whole, side in zip(augmentation.source_size, PATCH, strict=True)]
    corners = torch.randint(-4, 7, (num, 3), generator=generator) - torch.tensor(margin)
    corners[0] = 40  # all of it beyond the case
    return cases, corners


def sources_of(cases: VolumeCache, augmentation: BatchAugmentation) -> PatchSources:
    where, corners = places(augmentation)
    boxes = [box.to(DEVICE) for box in cases.fetch(where, corners, augmentation.source_size)]
    located = cases.locate(where, corners, augmentation.source_size)
    return PatchSources(cases.stored, tuple(boxes), *(part.to(DEVICE) for part in located))


def read(augmentation: BatchAugmentation, sources: PatchSources, generator: torch.Generator):
    return augmentation.apply_to_sources(sources, augmentation.sample(len(sources), generator, sources.num_channels))


def both_ways(augmentation: BatchAugmentation, cases: VolumeCache):
    image, label = cases.gather(*places(augmentation), augmentation.source_size)
    generators = [torch.Generator(DEVICE).manual_seed(3) for _ in range(2)]
    parameters = augmentation.sample(len(image), generators[0], image.shape[1])
    plain = augmentation.apply(image, label, parameters, dense=True)
    return plain, read(augmentation, sources_of(cases, augmentation), generators[1])


@with_kernels
@pytest.mark.parametrize("margin", fewer([0.3, 1.0, 0.0], 1))
@pytest.mark.parametrize("interpolation", ["linear", "nearest"])
@pytest.mark.parametrize("effects", [MOVED, ELASTIC], ids=["affine", "elastic"])
@pytest.mark.parametrize("channels", fewer([3, 1], 1))
def test_patches_are_those_of_the_plain_way(margin, interpolation, effects, channels):
    config = AugmentationConfig.model_validate(
        {**STILL, **effects, "margin": margin, "label_interpolation": interpolation}
    )
    # Three classes of the four labels: what is not a class counts as background where it is interpolated.
    augmentation = BatchAugmentation(config, PATCH, num_classes=3, spacing=(1, 1.5, 2))
    (image, label), (fused, fused_label) = both_ways(augmentation, bank(channels))
    # 1e-4: positions of up to 30 voxels in float32 are off by 1e-5, and neighbouring voxels of noise differ by 5.
    torch.testing.assert_close(fused, image, atol=1e-4, rtol=0)
    assert label.count_nonzero() > 100
    # A class or a voxel may change where two are as near as float32 tells.
    assert (fused_label != label).float().mean() < 1e-3
    assert fused_label.dtype == label.dtype


@with_kernels
def test_patches_that_are_only_mirrored_are_copied():
    config = AugmentationConfig.model_validate({**STILL, "rotation": {"probability": 0}, "scaling": {"probability": 0}})
    augmentation = BatchAugmentation(config, PATCH, num_classes=4)
    (image, label), (fused, fused_label) = both_ways(augmentation, bank(2))
    assert torch.equal(fused, image)
    assert torch.equal(fused_label, label)


@with_kernels
def test_intensities_change_as_they_do_in_the_plain_way():
    config = AugmentationConfig.model_validate(
        {name: {"probability": 1} for name in RECOLOURING} | {"rotation": {"probability": 1}}
    )
    (image, _), (fused, _) = both_ways(BatchAugmentation(config, PATCH, num_classes=4), bank())
    # A power of a number near 0 is steep: 1e-5 of the range becomes 1e-3 at an exponent of 0.7.
    torch.testing.assert_close(fused, image, atol=5e-3, rtol=0)


@with_kernels
@pytest.mark.parametrize("budget_bytes", fewer([16_000, 5000, 0], 1))
def test_nothing_beside_a_volume_is_read(budget_bytes):
    """Stored and fetched values are surrounded by numbers that would show in any sum."""
    augmentation = BatchAugmentation(AugmentationConfig.model_validate({**STILL, **MOVED}), PATCH, num_classes=4)
    plain = sources_of(bank(2, budget_bytes=budget_bytes), augmentation)
    surrounded = replace(plain, stored=tuple(map(surround, plain.stored)), boxes=tuple(map(surround, plain.boxes)))
    reads = [read(augmentation, of, torch.Generator(DEVICE).manual_seed(3)) for of in (plain, surrounded)]
    for one, other in zip(*reads, strict=True):
        assert torch.equal(one, other)


def surround(values: torch.Tensor) -> torch.Tensor:
    """Return the values in the middle of a larger buffer."""
    poison = float("nan") if values.is_floating_point() else 3
    count = values.numel()
    buffer = torch.full((count + 2000,), poison, dtype=values.dtype, device=values.device)
    return buffer[1000 : 1000 + count].view(values.shape).copy_(values)


@with_kernels
@pytest.mark.parametrize("channels", fewer([1, 2], 1))
def test_patches_are_the_same_bits_wherever_their_cases_lie(channels):
    config = AugmentationConfig.model_validate({**STILL, **ELASTIC, "noise": {"probability": 0.5}})
    augmentation = BatchAugmentation(config, PATCH, num_classes=4, spacing=(1, 1.5, 2))
    banks = [bank(channels, budget_bytes) for budget_bytes in (None, *fewer([9000 * channels, 0], 1))]
    assert [cases.num_on_device for cases in banks] == [3, *fewer([2, 0], 1)]
    reads = [
        read(augmentation, sources_of(cases, augmentation), torch.Generator(DEVICE).manual_seed(3)) for cases in banks
    ]
    for image, label in reads[1:]:
        assert torch.equal(image, reads[0][0])
        assert torch.equal(label, reads[0][1])
