"""Results that are remembered, against torch's own."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.following import follow
from volseg.device.gpus import make_stream, on_stream
from volseg.device.torch_internals import TorchDispatchMode, get_storage_key
from volseg.estimate.fake_step import operator_cache
from volseg.estimate.fake_step.operator_cache import OperatorCache
from volseg.estimate.fake_step.tracing import tracing
from volseg.estimate.gpu_kinds import find_kind
from volseg.estimate.trace import Free

GPU = find_kind("v100-16")


@pytest.fixture(autouse=True)
def _nothing_is_remembered(monkeypatch):
    monkeypatch.setattr(operator_cache, "_known", {})


class Compared(TorchDispatchMode):
    """Ask for each operator's result three times: torch, who remembers it, and who has remembered it."""

    def __init__(self, known):
        super().__init__()
        self.known, self.names = known, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        plain = func(*args, **kwargs)
        self.known.run(func, args, kwargs)
        again = self.known.run(func, args, kwargs)
        assert describe(again, args) == describe(plain, args), func
        self.names.add(func.overloadpacket.__name__)
        return plain


def describe(values, args):
    """Return all that a result is: sizes, and whose memory it is."""
    if not isinstance(values, torch.Tensor):
        listed = isinstance(values, list | tuple)
        return type(values), [describe(value, args) for value in values] if listed else values
    memory = get_storage_key(values.untyped_storage())
    owners = [
        number
        for number, value in enumerate(args)
        if isinstance(value, torch.Tensor) and get_storage_key(value.untyped_storage()) == memory
    ]
    same = [number for number, value in enumerate(args) if value is values]
    shape = tuple(values.shape), values.stride(), values.storage_offset(), values.dtype, values.device
    return shape, values.untyped_storage().nbytes(), owners, same, values.requires_grad


def run_many(device):
    """Run operators whose results are new, views, arguments, lists, and of other dtypes."""
    x = torch.empty(2, 4, 8, 8, 8, device=device)
    last = x.to(memory_format=torch.channels_last_3d)
    halves = last.split(2, 1)
    one, other = x.unbind(0)
    (halves[0] + halves[1].half()).relu_()
    torch.cat([one, other.transpose(1, 2)]).sum((1, 2), keepdim=True).expand(8, 3, 3, 8).contiguous()
    x[:, 1:3].select(2, 3).mul_(2).add(1.0)
    x.add(1).div(2, rounding_mode="floor").to(torch.int64)
    x[0, 0, 0, 0, 0].mean()
    x.view(2, -1).reshape(2, 4, -1).max(2)
    F.softmax(x.flatten(2).bfloat16(), 1, torch.float32)
    torch.empty_like(last).copy_(x).detach().bernoulli_(0.5)
    F.pad(x, (1, 1, 0, 0, 2, 0)).as_strided((2, 2), (5, 3), 7)
    F.interpolate(x, scale_factor=2, mode="trilinear")
    x[:, -3:, ::2].unsqueeze(-1).squeeze(-1).permute(0, 1, 4, 3, 2).detach()
    last[..., 2:1].view(-1)
    x.unsqueeze(0).squeeze((0, 1)).mT[0].flatten().view(torch.int32)
    x.expand(3, -1, -1, -1, -1, -1)[2].split([1, 3], 1)[1].split(3, 2)[-1].select(1, -1)
    x[:0, :, 1].transpose(0, -1)
    torch.empty(3, 5, device=device, requires_grad=True)[1:].t().detach()
    F.elu_(F.elu(last[:, 1:]))
    (x[:, :, ::2] * last[0, :, :4] / 3 - x[:1, :1, :4].half() + 2).neg().pow(2).clamp(0, 1).clamp_min_(0.1)
    for other in (x, last, x[:, 1:3, ::2], x.transpose(1, 3), last.expand(2, 2, 4, 8, 8, 8), x[:0]):
        torch.ones_like(other)
        torch.zeros_like(other, dtype=torch.int64)
        torch.empty_like(other, memory_format=torch.preserve_format)
        other.clone().add_(1).sub_(other).mul_(2).div_(3)
        other.double().sum((0, -1)).lt(3)
        other.to(torch.float64, memory_format=torch.contiguous_format)
        torch.cat([other, other.half()])
    torch.empty(2, 3, 4, 5, 6, device=device, memory_format=torch.channels_last_3d, dtype=torch.float16)
    torch.empty_strided((2, 3), (1, 4), device=device)
    torch.empty(2, 3).t().to(device).to("cpu", torch.float64)
    with torch.enable_grad():
        weight = torch.ones(4, 8, device=device, requires_grad=True)
        F.elu(weight.t() * weight.sum(0)[:, None]).to(torch.float16).sum().backward()


def test_results_that_are_remembered_are_those_of_torch():
    with tracing(GPU) as followed, Compared(OperatorCache(followed.mode)) as compared:
        run_many(followed.devices[0])
    assert len(compared.names) > 20
    assert len(operator_cache._known) > 20, "or nothing was remembered"


def test_a_view_has_the_strides_of_a_real_tensor():
    """The mode keeps the strides of one sample; torch's ``view`` computes them, and the result is not channels last."""
    real = torch.empty(1, 4, 8, 8, 8).to(memory_format=torch.channels_last_3d)
    shape, strides, viewed = real.shape, real.stride(), real.view(real.shape).stride()
    with tracing(GPU) as followed:
        fake = torch.empty_strided(shape, strides, device=followed.devices[0])
        assert fake.view(shape).stride() == viewed != strides


def train(followed):
    net = nn.Sequential(
        nn.Conv3d(1, 8, 3, padding=1), nn.BatchNorm3d(8), nn.PReLU(8), nn.Dropout3d(0.5), nn.MaxPool3d(2),
        nn.ConvTranspose3d(8, 8, 2, stride=2), nn.InstanceNorm3d(8), nn.ELU(), nn.Conv3d(8, 3, 1),
    )  # fmt: skip
    net = followed.copy(net).to(followed.devices[0])
    optimizer = torch.optim.AdamW(net.parameters(), foreach=True)
    for _ in range(2):
        x = followed.empty(2, 1, 16, 16, 16)
        with torch.autocast(x.device.type, torch.float16):
            loss = F.cross_entropy(net(x), torch.zeros(2, 16, 16, 16, dtype=torch.int64, device=x.device))
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def test_a_step_asks_for_the_same_whether_results_are_remembered_or_not(monkeypatch):
    (first,), (again,) = follow(train, gpu=GPU), follow(train, gpu=GPU)
    monkeypatch.setattr(OperatorCache, "find", lambda self, function, args, kwargs: (function(*args, **kwargs), None))
    (plain,) = follow(train, gpu=GPU)
    # What goes at a time goes in any order.
    requests = [[event for event in trace.events if not isinstance(event, Free)] for trace in (first, again, plain)]
    assert requests[0] == requests[1] == requests[2]


def test_kernels_that_are_remembered_run_on_the_stream_of_the_day():
    with tracing(GPU) as followed:
        device = followed.devices[0]
        x = torch.ones(8, device=device)
        side = make_stream(device)
        x.mul(2)
        with on_stream(side):
            x.mul(2)
        x.mul(2)
    (trace,) = followed.traces()
    assert [event.stream for event in trace.events if getattr(event, "name", "") == "aten.mul"] == [0, side.number, 0]


@pytest.mark.parametrize("most", [0, 3])
def test_no_more_is_remembered_than_there_is_room_for(monkeypatch, most):
    monkeypatch.setattr(operator_cache, "MOST", most)
    with tracing(GPU) as followed:
        run_many(followed.devices[0])
    assert len(operator_cache._known) <= max(most, 1)
