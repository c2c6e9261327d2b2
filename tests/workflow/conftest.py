"""A small deterministic training on the CPU."""

import pytest
import torch
from torch import nn

from volseg.workflow import Named, Training


class TwoLayers(nn.Module):
    """Convolution, batch norm (buffers), dropout (random state), convolution."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv3d(1, 4, 3, padding=1), nn.BatchNorm3d(4), nn.ReLU(), nn.Dropout3d(0.3), nn.Conv3d(4, 2, 1)
        )

    def forward(self, x):
        return self.layers(x)


class SeededBatches:
    """Batches that depend on the epoch and their number only, as `PatchBatches` does."""

    def __init__(self, count=6, size=2):
        self.count, self.size = count, size

    def __len__(self):
        return self.count

    def __iter__(self):
        return self.epoch(0)

    def epoch(self, number, start=0):
        for position in range(start, self.count):
            generator = torch.Generator().manual_seed(1000 * number + position)
            image = torch.randn(self.size, 1, 6, 6, 6, generator=generator)
            names = [f"case_{number}_{position}_{i}" for i in range(self.size)]
            yield {"image": image, "label": (image[:, 0] > 0).long(), "case": names}


def assert_equal(one, other, place="state"):
    """Assert that two states are equal bit by bit, through dicts and lists."""
    assert type(one) is type(other), place
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other), place
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), place
        for name in one:
            assert_equal(one[name], other[name], f"{place}.{name}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), place
        for number, pair in enumerate(zip(one, other, strict=True)):
            assert_equal(*pair, f"{place}.{number}")
    else:
        assert one == other, place


@pytest.fixture
def make_training():
    def make(batches=None, seed=7, lr=0.1, dropout=True, **options):
        torch.manual_seed(seed)
        net = TwoLayers()
        if not dropout:
            net.layers[3].p = 0.0
        return Training(
            Named(net, inputs=["image"], outputs=["logits"]),
            options.pop("losses", Named(nn.functional.cross_entropy, inputs=["logits", "label"], outputs=["loss"])),
            torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9),
            SeededBatches() if batches is None else batches,
            **{"epochs": 3, **options},
        )

    return make
