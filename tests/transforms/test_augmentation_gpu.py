"""GPU tests of augmentation: equality with the CPU, and a CUDA graph around it."""

import pytest
import torch

from volseg.config.augmentation import AugmentationConfig
from volseg.transforms.augmentation import BatchAugmentation

pytestmark = pytest.mark.gpu

PATCH = (40, 56, 40)


def augmentation() -> BatchAugmentation:
    return BatchAugmentation(AugmentationConfig(), PATCH, num_classes=3)


def batch(size: int, sides: tuple[int, int, int]):
    generator = torch.Generator().manual_seed(0)
    image = torch.randn(size, 2, *sides, generator=generator)
    return image, torch.randint(0, 3, (size, 1, *sides), generator=generator, dtype=torch.uint8)


def test_a_gpu_gives_what_a_cpu_gives():
    augment = augmentation()
    image, label = batch(9, augment.source_size)
    parameters = augment.sample(9, torch.Generator().manual_seed(1), 2)
    expected, expected_label = augment.apply(image, label, parameters)
    got, got_label = augment.apply(image.cuda(), label.cuda(), parameters.to("cuda"))
    # 2e-3: coordinates of 112 voxels in float32 are off by 1e-5, and a voxel of noise differs from the next by 5;
    # powers of small numbers add their own.
    torch.testing.assert_close(got.cpu(), expected, atol=2e-3, rtol=1e-3)
    assert (got_label.cpu() != expected_label).float().mean() < 1e-4


def test_a_cuda_graph_replays_new_draws():
    augment = augmentation()
    image, label = (tensor.cuda() for tensor in batch(4, augment.source_size))
    generator = torch.Generator("cuda").manual_seed(3)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):  # capture needs a warm-up
        augment(image, label, generator)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(generator)
    with torch.cuda.graph(graph):
        new_image, _ = augment(image, label, generator)
    generator.manual_seed(5)
    graph.replay()
    first = new_image.clone()
    graph.replay()
    assert not torch.equal(first, new_image)
    generator.manual_seed(5)
    eager, _ = augment(image, label, generator)
    assert torch.equal(first, eager)
