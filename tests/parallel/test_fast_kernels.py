"""On one device the fast kernels equal the network, with ordinary tensors as inputs and outputs."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import volseg
from volseg.errors import ParallelError, UnsupportedOperatorError
from volseg.parallel import FastKernels, ModelParallel, RecordedStep
from volseg.parallel.fast_kernels import explain_absence

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class Heads(nn.Module):
    """Two heads, as deep supervision has them, and a number; running statistics, dropout and an attribute."""

    def __init__(self, counts=True):
        super().__init__()
        self.counts = counts
        self.stem = nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), nn.BatchNorm3d(4), nn.LeakyReLU(), nn.Dropout3d(0.5))
        self.fine, self.coarse = nn.Conv3d(4, 2, 1), nn.Conv3d(4, 2, 2, stride=2)
        self.calls = 0

    def forward(self, x):
        self.calls += self.counts
        x = self.stem(x)
        return {"heads": [self.fine(x), self.coarse(x)], "number": 3}


class Spectral(nn.Module):
    """No form on slabs."""

    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv3d(1, 1, 1)
        self.norm = nn.BatchNorm3d(1)

    def forward(self, x):
        return torch.fft.fftn(self.norm(self.convolution(x)), dim=(2, 3, 4)).real


def step(model, image):
    """Return outputs and gradients of a step without dropout, because masks differ."""
    fine, coarse = model(image)["heads"]
    (fine.square().mean() + F.interpolate(coarse, scale_factor=2).abs().mean()).backward()
    return [fine, coarse, image.grad, *(parameter.grad for parameter in model.parameters()), *model.buffers()]


@pytest.mark.parametrize("device", DEVICES)
def test_outputs_gradients_and_buffers_are_those_of_the_network(device):
    plain = Heads().double().to(device)
    plain.stem[3].p = 0.0
    model = FastKernels(copy.deepcopy(plain), device)
    image = torch.randn(2, 1, 8, 6, 4, dtype=torch.float64, device=device)
    expected = step(plain, image.clone().requires_grad_())
    found = step(model, image.clone().requires_grad_())
    assert all(type(tensor) is torch.Tensor for tensor in found[:2])
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)  # float64: sums in another order
    assert model(image)["number"] == 3
    assert [*model.state_dict()] == [*plain.state_dict()]


def test_a_loss_without_a_sharded_form_takes_the_outputs():
    logits = FastKernels(nn.Conv3d(1, 2, 3, padding=1), "cpu")(torch.randn(1, 1, 4, 4, 4))
    torch.fft.fftn(logits).abs().mean().backward()


def test_copies_and_pickles_are_of_their_kind():
    model = FastKernels(Heads(), "cpu").eval()
    image = torch.randn(1, 1, 4, 4, 4)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(twin) is FastKernels
        assert twin.device == model.device
        torch.testing.assert_close(twin(image)["heads"], model(image)["heads"], rtol=0, atol=0)


def test_a_rehearsal_leaves_no_trace():
    net = Heads().eval()
    model = FastKernels(net, "cpu")
    before, random = copy.deepcopy(net.state_dict()), torch.get_rng_state()
    model.rehearse(torch.randn(2, 1, 4, 4, 4, generator=torch.Generator()))
    assert (net.calls, net.training, model.training, net.stem.training) == (0, False, False, False)
    torch.testing.assert_close(net.state_dict(), before, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(parameter.grad is None for parameter in net.parameters())


class Smoothed(Spectral):
    """Meets it only in evaluation."""

    def forward(self, x):
        return self.convolution(x) if self.training else super().forward(x)


@pytest.mark.parametrize("kind", [Spectral, Smoothed])
def test_a_function_without_a_form_is_told_by_rehearsal_and_in_a_step(kind):
    model = FastKernels(kind(), "cpu")
    with pytest.raises(UnsupportedOperatorError, match="fft_fftn called from"):
        model.rehearse(torch.zeros(1, 1, 4, 4, 4))
    assert model.module.norm.num_batches_tracked == 0
    with pytest.raises(UnsupportedOperatorError, match=r"call the plain network instead .*training\.kernels: torch"):
        model.eval()(torch.zeros(1, 1, 4, 4, 4))


def test_the_public_name_and_what_it_refuses():
    assert volseg.FastKernels is FastKernels
    model = FastKernels(nn.Conv3d(1, 1, 1), "cpu")
    assert isinstance(model, ModelParallel)
    assert (model.strategy.is_shared, model.strategy.is_recordable) == (False, True)
    with pytest.raises(ParallelError, match="placed on cpu"):
        model.to("meta")


def test_a_device_without_them_says_why(monkeypatch):
    assert explain_absence(torch.device("cpu")) == "they need a GPU"
    gpu = torch.device("cuda:0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    monkeypatch.setattr("volseg.device.triton_tiles.available", lambda: True)
    assert explain_absence(gpu) == "they need a GPU of compute capability 8.0 or more (cuda:0 has 7.0)"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert explain_absence(gpu) is None
    monkeypatch.setattr("volseg.device.triton_tiles.available", lambda: False)
    assert explain_absence(gpu) == "Triton, which compiles them, is not installed"


@pytest.mark.gpu
def test_a_step_in_a_loop_of_ones_own_is_recorded():
    plain = Heads(counts=False).cuda()  # which a replay would not do
    plain.stem[3].p = 0.0
    model = FastKernels(copy.deepcopy(plain))
    image = torch.randn(2, 1, 16, 16, 16, device="cuda")

    def run(network, image):
        network.zero_grad()
        fine, coarse = network(image)["heads"]
        loss = fine.square().mean() + coarse.abs().mean()
        loss.backward()
        return loss

    recorded = RecordedStep(model, lambda image: run(model, image))
    for _ in range(6):
        found, expected = recorded(image), run(plain, image)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)  # float32, other kernels
    assert recorded.num_recorded == 1, recorded.refused
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-3, atol=1e-5)
    recorded.release()
