"""The pipeline's laws on GPUs: streams, copies between devices, CUDA graphs."""

import copy

import pytest
import torch
from torch import Tensor, nn

from volseg.parallel import ModelParallel
from volseg.parallel.pipeline.recorder import WARM_UP
from volseg.parallel.pipeline.transfer import list_copy_streams

# float64 convolutions on CUDA choose other algorithms for other batch sizes: round-off of sums of 54 to 4096 terms.
ROUND_OFF = {"rtol": 1e-8, "atol": 1e-8}


class Net(nn.Module):
    """Skips over one and two stages, a tied weight, a reused layer, running statistics, in-place changes."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Conv3d(2, 2, 3, padding=1) for _ in range(4))
        self.d.weight = self.a.weight
        self.norm, self.act = nn.BatchNorm3d(2), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        first = self.act(self.a(x))
        second = self.act(self.b(self.norm(first)))
        third = self.c(torch.cat([second[:, :1], first[:, 1:]], 1)) + x
        return self.d(self.b(third)) + first


def devices(count: int) -> list[str]:
    return [f"cuda:{index % torch.cuda.device_count()}" for index in range(count)]


def compare(stages: list[str], record: bool, batches: int) -> ModelParallel:
    net = Net().double().cuda()
    reference = copy.deepcopy(net)
    model = ModelParallel(net, devices=stages, split_size=2, cuts=["b", "c", "d"][: len(stages) - 1], record=record)
    ours, theirs = (torch.optim.SGD(module.parameters(), lr=0.01) for module in (model, reference))
    for _ in range(batches):
        x = torch.randn(6, 2, 8, 8, 8, dtype=torch.float64, device="cuda:0")
        mine, plainly = x.clone().requires_grad_(), x.clone().requires_grad_()
        actual = model(mine)
        expected = torch.cat([reference(piece) for piece in plainly.split(2)])
        assert actual.device == x.device
        torch.testing.assert_close(actual, expected, **ROUND_OFF)
        for output, optimizer, _module in ((actual, ours, model), (expected, theirs, reference)):
            output.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(mine.grad, plainly.grad, **ROUND_OFF)
        want = {name: p.cpu() for name, p in reference.named_parameters()}
        torch.testing.assert_close({name: p.cpu() for name, p in net.named_parameters()}, want, **ROUND_OFF)
    return model


@pytest.mark.gpu
@pytest.mark.parametrize("record", [False, True])
def test_stages_on_one_gpu(record):
    model = compare(["cuda:0"] * 3, record, WARM_UP + 3)
    assert model.strategy.is_replaying == record


@pytest.mark.multi_gpu
@pytest.mark.parametrize("record", [False, True])
@pytest.mark.parametrize("stages", [2, 4])
def test_stages_on_several_gpus(record, stages):
    model = compare(devices(stages), record, WARM_UP + 3)
    assert model.strategy.is_replaying == record


@pytest.mark.gpu
def test_autocast_and_scaler_from_a_recording():
    net = Net().cuda()
    model = ModelParallel(net, devices=devices(2), split_size=2, record=True)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cuda")
    x, losses = torch.randn(6, 2, 16, 16, 16, device="cuda:0"), []
    for _ in range(WARM_UP + 8):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = (model(x) - 1).float().square().mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    assert model.strategy.is_replaying
    assert losses[-1] < losses[0]


@pytest.mark.gpu
def test_measured_partition_and_recorded_dropout():
    net = nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), nn.Dropout(0.5), nn.Conv3d(4, 1, 3, padding=1)).cuda()
    model = ModelParallel(net, devices=devices(2), split_size=1, record=True)
    x = torch.randn(3, 1, 8, 8, 8, device="cuda:0")
    outputs = [model(x) for _ in range(WARM_UP + 3)]
    assert model.partition.total_ms > 0
    assert not torch.equal(outputs[-1], outputs[-2])


class Tells(nn.Module):
    """Returns results of two stages, so gradients of outputs arrive on two devices."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv3d(2, 2, 1), nn.Conv3d(2, 2, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first = self.a(x)
        return first, self.b(first).sin() + x


@pytest.mark.multi_gpu
@pytest.mark.parametrize("record", [False, True])
def test_late_copies_read_what_was_sent(record):
    """The caller changed the batch before it was copied, and one lane did not wait for its outputs' gradients.

    Copies are delayed here by 50 ms and more.
    """
    net = Tells().double().cuda()
    reference = copy.deepcopy(net)
    model = ModelParallel(net, devices=devices(2), split_size=1, cuts=["b"], record=record)

    def delay() -> None:
        for stream in list_copy_streams([torch.device("cuda", index) for index in range(2)]):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(10**8)

    for _ in range(WARM_UP + 2):
        x = torch.randn(4, 2, 8, 8, 8, dtype=torch.float64, device="cuda:0")
        expected = reference(x)
        delay()
        actual = model(x)
        torch.testing.assert_close(actual, expected, **ROUND_OFF)
        with torch.no_grad():
            given = x.clone()
            delay()
            found = model(given)
            given.zero_()
        torch.testing.assert_close(found, tuple(output.detach() for output in expected), **ROUND_OFF)
        sum(output.square().sum() for output in expected).backward()
        delay()
        sum(output.square().sum() for output in actual).backward()
        ours, theirs = ({name: p.grad.cpu() for name, p in each.named_parameters()} for each in (net, reference))
        torch.testing.assert_close(ours, theirs, **ROUND_OFF)
