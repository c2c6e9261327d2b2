"""A step on label maps that know little is the same cut over devices, and dealt to replicas, as in one piece."""

import copy

import pytest
import torch
from torch import nn

from volseg.data.cases import Case
from volseg.losses import Targets
from volseg.parallel import ModelParallel
from volseg.workflow.components import build_loss

TARGETS = {
    "regions": Targets(num_classes=4, regions=((1, 2, 3), (2, 3), (3,)), ignores=True),
    "sparse": Targets(num_classes=4, ignores=True),
    "partial": Targets(num_classes=4, hidden=((0, 2, 3), (0, 1))),
}


class TwoHeads(nn.Module):
    """A network with deep supervision."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.stem, self.down = nn.Conv3d(1, 4, 3, padding=1), nn.Conv3d(4, 4, 3, stride=2, padding=1)
        self.fine, self.coarse = nn.Conv3d(4, outputs, 1), nn.Conv3d(4, outputs, 1)

    def forward(self, image: torch.Tensor) -> list[torch.Tensor]:
        features = self.stem(image).relu()
        return [self.fine(features), self.coarse(self.down(features))]


def make_batch(targets: Targets) -> Case:
    generator = torch.Generator().manual_seed(0)
    label = torch.randint(0, targets.num_classes + int(targets.ignores), (4, 1, 8, 8, 8), generator=generator)
    label[1, :, :6] = targets.num_indices - 1  # what is unknown lies on the first device only
    label[2, :, 5:] = targets.num_indices - 1
    label[3] = targets.num_classes if targets.ignores else 0
    return {"image": torch.randn(4, 1, 8, 8, 8, generator=generator).double(), "label": label.to(torch.uint8)}


def compute_gradients(network: nn.Module, targets: Targets, batch: Case) -> tuple[torch.Tensor, list[torch.Tensor]]:
    loss = build_loss({"name": "DiceCELoss"}, inputs=["logits", "label"], output="loss", targets=targets)
    value = loss({"logits": network(batch["image"]), "label": batch["label"]})["loss"]
    value.backward()
    return value.detach(), [parameter.grad for parameter in network.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("name", TARGETS)
def test_cut_over_two_devices(name: str) -> None:
    targets = TARGETS[name]
    plain = TwoHeads(targets.num_outputs).double()
    cut = ModelParallel(copy.deepcopy(plain), strategy="spatial", devices=["cpu", "cpu:1"])
    expected = compute_gradients(plain, targets, make_batch(targets))
    torch.testing.assert_close(compute_gradients(cut, targets, make_batch(targets)), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", TARGETS)
def test_dealt_to_replicas_by_number_of_samples(name: str) -> None:
    """As `volseg.parallel.data_parallel` adds them up: each share weighs as many samples as it has."""
    targets = TARGETS[name]
    plain, batch = TwoHeads(targets.num_outputs).double(), make_batch(targets)
    value, gradients = compute_gradients(plain, targets, batch)
    shares = []
    for rows in (slice(0, 3), slice(3, 4)):
        replica = copy.deepcopy(plain)
        replica.zero_grad()
        shares.append(compute_gradients(replica, targets, {key: tensor[rows] for key, tensor in batch.items()}))
    (first, of_first), (second, of_second) = shares
    torch.testing.assert_close((3 * first + second) / 4, value, rtol=1e-12, atol=0)
    summed = [(3 * one + other) / 4 for one, other in zip(of_first, of_second, strict=True)]
    torch.testing.assert_close(summed, gradients, rtol=1e-9, atol=1e-12)
