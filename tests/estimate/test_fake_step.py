"""Operators on fake tensors give the shapes and types of torch's own."""

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.following import count_kernels, follow, pick
from volseg.device.torch_internals import TorchDispatchMode, get_storage_key, list_autocast_operators
from volseg.errors import FollowError
from volseg.estimate.fake_step.gpu_autocast import BANNED, FLOAT32, FLOAT32_RESULT, HALF, WIDEST
from volseg.estimate.fake_step.meta_kernels import MetaKernels
from volseg.estimate.fake_step.tracing import TracedStep, tracing
from volseg.estimate.gpu_kinds import find_kind
from volseg.estimate.trace import Allocate, Free, Mark

GPU = find_kind("v100-16")


class Compared(TorchDispatchMode):
    """Ask for each operator's result twice: the mode of fake tensors, and the meta device."""

    def __init__(self, kernels):
        super().__init__()
        self.kernels, self.names = kernels, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        plain = func(*args, **kwargs)
        assert describe(self.kernels.run(func, args, kwargs), args) == describe(plain, args), func
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


def test_results_of_the_meta_device_are_those_of_torch(monkeypatch):
    found = []
    run = MetaKernels._run_on_meta
    monkeypatch.setattr(MetaKernels, "_run_on_meta", lambda *given: found.append(run(*given)) or found[-1])
    with tracing(GPU) as followed, Compared(MetaKernels(followed.mode)) as compared:
        run_many(followed.devices[0])
    assert len(compared.names) > 20
    assert sum(one is not NotImplemented for one in found) > 100


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


def test_a_step_asks_for_the_same_without_the_meta_device(monkeypatch):
    (ours,) = follow(train, gpu=GPU)
    monkeypatch.setattr(MetaKernels, "run", lambda self, function, args, kwargs: function(*args, **kwargs))
    (plain,) = follow(train, gpu=GPU)
    # What goes at a time goes in any order.
    requests = [[event for event in trace.events if not isinstance(event, Free)] for trace in (ours, plain)]
    assert requests[0] == requests[1]


# What is made of numbers alone has values where tensors have none.


READ: dict[str, Callable[[torch.device], Any]] = {
    "a list of dims": lambda device: torch.arange(2, 5, device=device).tolist(),
    "rows": lambda device: [row.tolist() for row in torch.tensor([[1.0, 2.0], [3.0, 4.0]], device=device)],
    "a place": lambda device: torch.tensor([[1.0, 2.0], [3.0, 4.0]], device=device)[1, 0].item(),
    "a sum": lambda device: (
        torch.stack([torch.full((3,), 0.5, device=device), torch.ones(3, device=device)]).sum().item()
    ),
    "a question": lambda device: bool((torch.tensor([0.2, -0.3]).to(device) < 0).any()),
    "a single number on a device": lambda device: torch.tensor(0.5, device=device).item(),
}


@pytest.mark.parametrize("read", READ.values(), ids=READ)
def test_numbers_are_what_they_are_with_values(read: Callable[[torch.device], Any]) -> None:
    expected = read(torch.device("cpu"))
    with tracing(find_kind("h200")) as followed:
        assert read(torch.device("cpu")) == expected
        assert read(followed.devices[0]) == expected


def change(tensor: Tensor) -> Tensor:
    return tensor.add_(1.0)


CHANGED: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda made: change(made)[2],
    "by a view": lambda made: (change(made[1:]), made[2])[1],
    "the base of a view": lambda made: (made[2], change(made))[0],
    "by a copy": lambda made: made.copy_(torch.empty(3, device=made.device))[2],
}


@pytest.mark.parametrize("look", CHANGED.values(), ids=CHANGED)
def test_what_was_changed_is_not_told_as_it_was(look: Callable[[Tensor], Tensor]) -> None:
    """A stale number would be a wrong forecast without a word."""
    with pytest.raises(FollowError, match=r"asks for a tensor's value"), tracing(find_kind("h200")) as followed:
        look(torch.zeros(3, device=followed.devices[0])).item()


# What autograd writes in place, and what it makes anew: of plain tensors, and so of followed ones.


SIDE = 1000
BYTES = SIDE * SIDE * 4


def follow_backward(function):
    """Return the kernels of a backward pass, and the bytes that it takes."""

    def step(followed):
        weight = followed.empty(SIDE, SIDE).requires_grad_()
        result = function(followed.empty(SIDE, SIDE) @ weight).sum()
        followed.mark("backward")
        result.backward()

    (trace,) = follow(step, gpu=find_kind("h200"))
    begin = trace.events.index(Mark("backward"))
    events = trace.events[begin:]
    return count_kernels(events), [event.size for event in pick(events, Allocate) if event.size >= BYTES]


@pytest.mark.parametrize(
    ("function", "uses"), [(lambda x: x.exp() * x.sin(), 2), (lambda x: x.exp() + x.sin() + x.cos(), 3)]
)
def test_a_gradient_that_nobody_else_holds_takes_the_sum(function, uses):
    names, _ = follow_backward(function)
    assert names["aten.add_"] == uses - 1
    assert "aten.add" not in names


def test_a_gradient_that_comes_twice_is_summed_anew():
    names, _ = follow_backward(lambda x: (x + x).exp())
    assert "aten.add" in names


class Twice(torch.autograd.Function):
    """Doubles, and notes where the gradient lies that its backward makes."""

    seen: ClassVar[list[int]] = []

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        made = gradient * 2
        Twice.seen.append(made.data_ptr())
        return made


def test_real_gradients_are_summed_in_place():
    """What is modelled is what plain tensors do: the first gradient's memory holds the sum."""
    Twice.seen.clear()
    sums = []
    x = torch.ones(SIDE, requires_grad=True) * 2
    x.register_hook(lambda gradient: sums.append(gradient.data_ptr()))
    (Twice.apply(x) * Twice.apply(x)).sum().backward()
    assert sums == Twice.seen[:1]


def test_what_was_read_by_indices_is_summed_in_place():
    names, _ = follow_backward(lambda x: x.index_select(0, torch.zeros(SIDE, dtype=torch.int64, device=x.device)))
    assert "aten.index_add_" in names


# A GPU's autocast on devices that stand for GPUs.


H200 = find_kind("h200")

REFUSED = {"_cudnn_rnn", "linalg_matrix_sqrth", "norm.Scalar", "norm.ScalarOpt_dim"}
"""Of builds with cuDNN; of torch 2.14 and later; and norms that no function of Python calls."""


def test_the_lists_are_torchs() -> None:
    lists = (HALF, FLOAT32, FLOAT32_RESULT, WIDEST, frozenset(BANNED))
    others = list_autocast_operators("AutocastCUDA").difference(*lists, REFUSED)
    of_named_tensors = ("imname", "DimnameList", ".names_ScalarOpt_dim")  # which torch 2.13 has no more
    assert {name for name in others if not name.endswith(of_named_tensors)} == set()
    assert sum(map(len, lists)) == len(frozenset().union(*lists))


def test_what_is_cast_and_in_no_list_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("volseg.estimate.fake_step.gpu_autocast.WIDEST", WIDEST - {"cross"})

    def step(followed: TracedStep) -> None:
        full, host = followed.empty(1, 2, 8, 3), torch.ones(2, 3)
        torch.linalg.cross(full, full)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.cross(host, host, dim=1).dtype == torch.float32
            torch.cross(full, full, dim=3)

    with pytest.raises(FollowError, match="casts aten::cross under autocast"):
        follow(step, gpu=H200)


CALLS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], torch.dtype]] = {
    "linear": (lambda half, full: F.linear(full[0, 0, 0], full[0, 0, 0]), torch.bfloat16),
    "conv3d": (lambda half, full: F.conv3d(full, full[:, :, :1, :1, :1]), torch.bfloat16),
    "matmul": (lambda half, full: full @ full, torch.bfloat16),
    "attention": (lambda half, full: F.scaled_dot_product_attention(full[0], full[0], full[0]), torch.bfloat16),
    "layer_norm": (lambda half, full: F.layer_norm(half, (8,)), torch.float32),
    "group_norm": (lambda half, full: F.group_norm(half, 1), torch.float32),
    "instance_norm": (lambda half, full: F.instance_norm(half), torch.bfloat16),
    "exp": (lambda half, full: half.exp(), torch.float32),
    "softmax": (lambda half, full: F.softmax(half, 1), torch.float32),
    "log_softmax": (lambda half, full: F.log_softmax(half, 1), torch.float32),
    "sum": (lambda half, full: half.sum((2, 3)), torch.float32),
    "norm": (lambda half, full: torch.norm(half, dim=1), torch.float32),
    "mse_loss": (lambda half, full: F.mse_loss(half, half), torch.float32),
    "mean": (lambda half, full: half.mean(), torch.bfloat16),
    "max_pool3d": (lambda half, full: F.max_pool3d(half, 2), torch.bfloat16),
    "avg_pool3d": (lambda half, full: F.avg_pool3d(half, 2), torch.bfloat16),
    "pad": (lambda half, full: F.pad(half, (1,) * 6, mode="replicate"), torch.bfloat16),
    "cat": (lambda half, full: torch.cat([half, half]), torch.bfloat16),
    "addcmul": (lambda half, full: torch.addcmul(half, full, half), torch.float32),
}


@pytest.fixture(scope="module")
def found() -> dict[str, torch.dtype]:
    """The dtype of each call's result."""
    dtypes = {}

    def step(followed: TracedStep) -> None:
        full = followed.empty(1, 2, 8, 8, 8)
        half = full.bfloat16()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            dtypes.update({name: call(half, full).dtype for name, (call, _) in CALLS.items()})

    follow(step, gpu=H200)
    return dtypes


@pytest.mark.parametrize("name", CALLS)
def test_results_have_the_type_that_they_have_on_a_gpu(name: str, found: dict[str, torch.dtype]) -> None:
    assert found[name] == CALLS[name][1]


def test_the_cpus_autocast_is_its_own_again() -> None:
    follow(lambda followed: None, gpu=H200)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        x = torch.ones(1, 1, 4, 4, 4, dtype=torch.bfloat16)
        assert (F.max_pool3d(x, 2).dtype, x.exp().dtype) == (torch.float32, torch.bfloat16)
