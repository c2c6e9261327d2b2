"""A recorded step trains like the step that was recorded."""

import copy
import warnings

import pytest
import torch
from torch import nn

from volseg.config.augmentation import AugmentationConfig
from volseg.data.augmented import AugmentedBatches
from volseg.data.case_store.volume_cache import VolumeCache
from volseg.data.patches import PatchBatches
from volseg.transforms.augmentation import BatchAugmentation
from volseg.workflow import Named, Training
from volseg.workflow.step import to_device

pytestmark = pytest.mark.gpu


@pytest.fixture
def batches():
    generator = torch.Generator().manual_seed(0)
    cases = []
    for number in range(3):
        image = torch.randn(1, 20, 18, 16, generator=generator)
        cases.append({"case": f"case_{number}", "image": image, "label": (image > 0.5).to(torch.uint8)})
    augmentation = BatchAugmentation(AugmentationConfig(), (8, 8, 8), num_classes=2)

    def make(keep):
        bank = VolumeCache(cases, device="cuda", keep=keep)
        patches = PatchBatches(bank, (8, 8, 8), 2, 12, source_size=augmentation.source_size)
        return AugmentedBatches(patches, augmentation, seed=0, device="cuda")

    return make


def net():
    torch.manual_seed(0)
    layers = [nn.Conv3d(1, 4, 3, padding=1), nn.BatchNorm3d(4), nn.ReLU(), nn.Conv3d(4, 2, 1)]
    return nn.Sequential(*layers).cuda()


def loss(logits, label):
    return nn.functional.cross_entropy(logits, label[:, 0].long())


def trained(network, batches, make_optimizer, **options):
    named = Named(loss, ["logits", "label"], ["loss"])
    optimizer = make_optimizer(network.parameters())
    model = Named(network, ["image"], ["logits"])
    training = Training(model, named, optimizer, batches, epochs=2, precision="fp32", clip=1.0, **options)
    training.run()
    return training


@pytest.mark.parametrize(
    "make_optimizer",
    [
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True),
        lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True, capturable=True),
    ],
    ids=["SGD", "AdamW"],
)
def test_a_recorded_training_equals_the_plain_one(batches, make_optimizer):
    schedule = {"schedule": lambda progress: 1 - progress}
    recorded = trained(net(), batches("device"), make_optimizer, **schedule)
    plain = trained(net(), batches("device"), make_optimizer, record=False, **schedule)
    assert recorded.step.recorded.num_recorded == 1
    assert recorded.step.recorded.refused is None
    assert plain.step.recorded is None
    # float32: cuDNN sums with atomics in the backward pass, so two runs of the same step differ in the last bits.
    for one, other in zip(recorded.history, plain.history, strict=True):
        assert one.losses["loss"] == pytest.approx(other.losses["loss"], rel=1e-4)
    torch.testing.assert_close(recorded.network.state_dict(), plain.network.state_dict(), rtol=1e-3, atol=1e-4)


def test_recorded_batches_equal_batches_from_memory(batches):
    for recorded, plain in zip(batches("device").epoch(1), batches("memory").epoch(1), strict=True):
        assert recorded["case"] == plain["case"]
        assert torch.equal(recorded["image"], plain["image"])
        assert torch.equal(recorded["label"], plain["label"])


def test_no_batch_waits_for_the_device(batches):
    training = trained(net(), batches("device"), lambda p: torch.optim.SGD(p, lr=0.1, fused=True))
    training.model.train()
    # The run has released its recording, so another one is made.
    source = training.batches.epoch(0)

    def train_on(count):
        for _ in range(count):
            training.position = 0
            training._losses.losses.clear()
            training._train_batch(to_device(next(source), training.device))

    train_on(4)
    assert training.step.recorded.num_recorded == 2
    try:
        with warnings.catch_warnings(action="ignore"):  # "a prototype feature"
            torch.cuda.set_sync_debug_mode("error")
        train_on(3)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_network_that_looks_at_values_trains_unrecorded_and_says_so(batches, caplog):
    class Looks(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = net()

        def forward(self, x):
            return self.inner(x) * (2.0 if x.mean().item() > 100 else 1.0)

    training = trained(Looks().cuda(), batches("device"), lambda p: torch.optim.SGD(p, lr=0.1, fused=True))
    assert training.step.recorded.refused
    assert "cannot be recorded as a CUDA graph" in caplog.text
    reference = trained(net(), batches("device"), lambda p: torch.optim.SGD(p, lr=0.1, fused=True), record=False)
    assert training.history[-1].losses["loss"] == pytest.approx(reference.history[-1].losses["loss"], rel=1e-3)


def test_a_state_taken_from_a_recorded_training_loads_on_a_cpu(batches):
    training = trained(net(), batches("device"), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True))
    state = training.state_dict()
    assert isinstance(state["optimizer"]["param_groups"][0]["lr"], float)
    fresh = copy.deepcopy(net()).cpu()
    optimizer = torch.optim.SGD(fresh.parameters(), lr=0.1, momentum=0.9)
    optimizer.load_state_dict(state["optimizer"])
