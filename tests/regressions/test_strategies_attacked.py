"""What an attack on strategies found: arguments that are one tensor, state over replicas, norms in micro-batches."""

import copy

import pytest
import torch
import torch.nn.functional as F
from in_group import in_group
from made_up_networks import WithLayers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from volseg.errors import ParallelError, UnsupportedOperatorError
from volseg.parallel import DataParallel, ModelParallel, Pipeline, Spatial, join_mesh
from volseg.parallel.verification.comparison import whole

DEVICES = ["cpu", "cpu:1"]


def change_first(layers: nn.ModuleDict, one: Tensor, other: Tensor) -> Tensor:
    one.add_(1)
    return layers["conv"](one) * layers["conv"](other)


def make_changing() -> nn.Module:
    torch.manual_seed(0)
    return WithLayers(change_first, conv=nn.Conv3d(1, 2, 3, padding=1)).double()


def make_batch(samples: int = 2) -> Tensor:
    return torch.randn(samples, 1, 5, 4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(samples))


def train(net: nn.Module, call: nn.Module, *given: Tensor) -> list[Tensor]:
    """Return the output, the gradients, and the arguments after the call."""
    output = whole(call(*given))
    output.square().mean().backward()
    return [output.detach(), *(p.grad for p in net.parameters() if p.grad is not None), *given]


@pytest.mark.parametrize(
    "strategy", [Spatial(axes="D"), Spatial(axes="D", checkpoint="all"), Pipeline(split_size=1, record=False)]
)
def test_a_tensor_that_is_given_twice_is_changed_for_both(strategy: Spatial | Pipeline) -> None:
    # Each place had slabs of its own on several devices: the second one kept the old values. In a pipeline autograd
    # found that a later micro-batch had changed what it saved of an earlier one, and the backward pass broke.
    plain = make_changing()
    ours = copy.deepcopy(plain)
    one, other = make_batch(), make_batch()
    wanted = train(plain, plain, one, one)
    torch.testing.assert_close(train(ours, ModelParallel(ours, strategy, DEVICES), other, other), wanted)


@pytest.mark.parametrize("strategy", [Spatial(axes="D"), Pipeline(split_size=1, record=False)])
def test_arguments_that_share_memory_are_refused_where_one_is_changed(strategy: Spatial | Pipeline) -> None:
    model = ModelParallel(make_changing(), strategy, DEVICES)
    x = make_batch()
    with pytest.raises((UnsupportedOperatorError, ParallelError), match=r"shares? (its )?memory.*clone"):
        model(x, x[:])


def test_arguments_side_by_side_in_memory_are_not_refused() -> None:
    plain, x = make_changing(), make_batch()
    ours, y = copy.deepcopy(plain), x.clone()
    wanted = train(plain, plain, x[:1], x[1:])
    found = train(ours, ModelParallel(ours, Spatial(axes="D"), DEVICES), y[:1], y[1:])
    torch.testing.assert_close(found, wanted)


def test_a_pipeline_gives_each_micro_batch_its_own_input_to_change() -> None:
    # The backward pass broke: "modified by an inplace operation", of another micro-batch.
    torch.manual_seed(0)
    plain = nn.Sequential(nn.ReLU(inplace=True), nn.Conv3d(1, 2, 3), nn.Conv3d(2, 1, 1)).double()
    ours = copy.deepcopy(plain)
    x, y = make_batch(3), make_batch(3)
    model = ModelParallel(ours, Pipeline(split_size=1, record=False), DEVICES)
    torch.testing.assert_close(train(ours, model, y), train(plain, plain, x))


def test_a_pipeline_trains_a_batch_norm_of_no_momentum() -> None:
    # ZeroDivisionError at the first batch: its counter was kept at 0 where nothing should remain.
    torch.manual_seed(0)
    layers = nn.Conv3d(1, 2, 3), nn.BatchNorm3d(2, momentum=None), nn.ReLU(), nn.Conv3d(2, 1, 1)
    plain = nn.Sequential(*layers).double()
    ours = copy.deepcopy(plain)
    model = ModelParallel(ours, Pipeline(split_size=1, record=False), DEVICES)
    for _ in range(3):
        x = make_batch()
        plain(x)
        model(x)
        torch.testing.assert_close(dict(ours.named_buffers()), dict(plain.named_buffers()))


def test_a_pipeline_says_why_a_batch_norm_cannot_run() -> None:
    def forward(layers: nn.ModuleDict, x: Tensor) -> Tensor:
        return layers["conv"](x) * layers["norm"](x.mean((2, 3, 4)))[..., None, None, None]

    net = WithLayers(forward, conv=nn.Conv3d(1, 1, 1), norm=nn.BatchNorm1d(1)).double()
    with pytest.raises(ParallelError, match=r"one value per channel.*larger split_size"):
        ModelParallel(net, Pipeline(split_size=1, record=False), DEVICES)(make_batch())


def test_replicas_of_one_process_refuse_a_buffer_that_each_would_change() -> None:
    # Power iterations were made once for each replica, and once for the batch on one device.
    net = nn.utils.parametrizations.spectral_norm(nn.Conv3d(1, 2, 3)).double()
    model = DataParallel(net, join_mesh().replicas(2))
    with pytest.raises(ParallelError, match=r"changes its buffer .*_u, and this process computes 2 replicas"):
        model(make_batch())
    model.eval()
    model(make_batch())


def call_a_norm(rank_count: int) -> str:
    del rank_count

    def forward(layers: nn.ModuleDict, x: Tensor) -> Tensor:
        x = F.batch_norm(layers["first"](x), None, None, training=layers.training)
        return layers["last"](x)

    net = WithLayers(forward, first=nn.Conv3d(1, 2, 1), last=nn.Conv3d(2, 1, 1)).double()
    model = ModelParallel(net, Pipeline(split_size=1, record=False), DEVICES)
    replicas = DataParallel(model, join_mesh(2).replicas())
    try:
        replicas(make_batch())
    except ParallelError as fault:
        return str(fault)
    return "was run"


def test_replicas_of_a_pipeline_refuse_a_norm_that_is_called_as_a_function() -> None:
    # A module was refused; the function took the statistics of micro-batches without a word.
    for said in in_group(2, call_a_norm, 2):
        assert "calls batch_norm for training, which uses the statistics of a whole batch" in said


class Checkpointed(nn.Module):
    """A convolution and a batch norm, which are computed again in the backward pass if that is asked for."""

    def __init__(self, checkpoints: bool, momentum: float | None) -> None:
        super().__init__()
        self.checkpoints = checkpoints
        self.conv = nn.Conv3d(4, 4, 3, padding=1)
        self.norm = nn.BatchNorm3d(4, momentum=momentum)

    def compute(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(self.conv(x)))

    def forward(self, x: Tensor) -> Tensor:
        return x + (checkpoint(self.compute, x, use_reentrant=False) if self.checkpoints else self.compute(x))


def make_checkpointed(checkpoints: bool, momentum: float | None = 0.1) -> nn.Module:
    torch.manual_seed(0)
    parts = (Checkpointed(checkpoints, momentum) for _ in range(2))
    return nn.Sequential(nn.Conv3d(1, 4, 1), *parts, nn.Conv3d(4, 2, 1)).double()


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("split_size", [2, 4])
def test_a_pipeline_recomputes_a_batch_norm_of_the_networks_own_checkpoint(split_size, momentum):
    """Its recomputation saved two tensors less, as it had no running buffers: torch's checkpoint refused it."""
    plain, net = make_checkpointed(False, momentum), make_checkpointed(True, momentum)
    expected = plain if split_size == 4 else ModelParallel(plain, Pipeline(split_size=split_size), DEVICES)
    model = ModelParallel(net, Pipeline(split_size=split_size), DEVICES)
    for _ in range(2):
        x = make_batch(4)
        for one, other in zip(train(net, model, x), train(plain, expected, x), strict=True):
            torch.testing.assert_close(one, other)
    for one, other in zip(net.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(one, other)
