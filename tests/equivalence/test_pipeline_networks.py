"""Stock networks through the pipeline equal the plain networks: outputs, every gradient, buffers."""

import copy
from collections.abc import Callable

import pytest
import torch
from monai.networks.nets import UNETR, AttentionUnet, DynUNet, SegResNet, SwinUNETR, UNet
from narrow_vnet import NarrowVNet
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from volseg.models.topology import plan_vnet_topology
from volseg.parallel import ModelParallel
from volseg.parallel.pipeline.record.choice import WARM_UP

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning:monai")

# Splitting a batch changes the order in which float64 sums over samples are taken; nothing else differs.
ROUND_OFF = {"rtol": 1e-9, "atol": 1e-9}


def in_micro_batches(net: nn.Module, size: int) -> Callable[..., object]:
    """What a pipeline computes, without one: the plain network on each micro-batch."""

    def run(*args: Tensor) -> object:
        outputs = [net(*pieces) for pieces in zip(*(arg.split(size) for arg in args), strict=True)]
        flat = [pytree.tree_flatten(output) for output in outputs]
        joined = [torch.cat(column) for column in zip(*(leaves for leaves, _ in flat), strict=True)]
        return pytree.tree_unflatten(joined, flat[0][1])

    return run


def assert_same_step(plain, parallel, reference: nn.Module, candidate: nn.Module, *inputs: Tensor) -> None:
    """Same outputs and, after backward, the same gradient for every input and parameter."""
    ours = [x.clone().requires_grad_(x.is_floating_point()) for x in inputs]
    theirs = [x.clone().requires_grad_(x.is_floating_point()) for x in inputs]
    expected, actual = plain(*theirs), parallel(*ours)
    torch.testing.assert_close(actual, expected, **ROUND_OFF)
    generator = torch.Generator().manual_seed(1)
    for output, _leaves in ((expected, theirs), (actual, ours)):
        generator.manual_seed(1)
        weighted = [
            (leaf * torch.randn(leaf.shape, generator=generator, dtype=leaf.dtype)).sum()
            for leaf in pytree.tree_leaves(output)
        ]
        sum(weighted).backward()
    for mine, plainly in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, plainly.grad, **ROUND_OFF)
    want = {name: p.grad for name, p in reference.named_parameters()}
    got = {name: p.grad for name, p in candidate.named_parameters()}
    assert [name for name in want if want[name] is None] == [name for name in got if got[name] is None]
    torch.testing.assert_close(
        {n: g for n, g in got.items() if g is not None}, {n: g for n, g in want.items() if g is not None}, **ROUND_OFF
    )


class ResNet(nn.Module):
    """torchvision-like: pooling, functional flatten, a classifier."""

    class Block(nn.Module):
        def __init__(self, inputs: int, outputs: int, stride: int) -> None:
            super().__init__()
            self.conv1, self.bn1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs)
            self.conv2, self.bn2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs)
            self.relu = nn.ReLU(inplace=True)
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

        def forward(self, x: Tensor) -> Tensor:
            out = self.relu(self.bn1(self.conv1(x)))
            out = self.bn2(self.conv2(out))
            out += self.downsample(x)
            return self.relu(out)

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.relu = nn.Conv2d(3, 4, 7, 2, 3, bias=False), nn.ReLU(inplace=True)
        self.bn, self.pool = nn.BatchNorm2d(4), nn.MaxPool2d(3, 2, 1)
        self.layers = nn.Sequential(self.Block(4, 4, 1), self.Block(4, 8, 2), self.Block(8, 8, 1))
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d((1, 1)), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(self.pool(self.relu(self.bn(self.stem(x)))))
        return self.fc(torch.flatten(self.avgpool(x), 1))


class TwoInThreeOut(nn.Module):
    """Two inputs, three outputs of different kinds, a reused layer, tied weights, a skip over everything."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.shared = nn.Conv3d(1, 4, 3, padding=1), nn.Conv3d(2, 4, 1), nn.Conv3d(4, 4, 3, padding=1)
        self.act, self.norm, self.tied = nn.PReLU(4), nn.GroupNorm(2, 8), nn.Conv3d(4, 4, 3, padding=1)
        self.tied.weight = self.shared.weight
        self.head = nn.Conv3d(8, 2, 1)
        self.register_buffer("gain", torch.tensor(1.5))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, object]:
        first = self.act(self.shared(self.a(x)))
        second = self.shared(self.b(y)) * self.gain
        both = self.norm(torch.cat([first, second], dim=1))
        up = F.interpolate(both, scale_factor=2.0)
        return {"logits": self.head(up), "deep": (self.tied(first) + second, x.mean((1, 2, 3, 4)) * self.gain)}


def volume(batch: int, side: int, channels: int = 1) -> Tensor:
    return torch.randn(batch, channels, side, side, side, dtype=torch.float64)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], tuple[Tensor, ...]]]] = {
    "VNet": (NarrowVNet, lambda b: (volume(b, 16),)),
    "VNet of thick slices": (
        lambda: NarrowVNet(plan_vnet_topology((216, 256, 9), (1.5, 1.5, 10.0))),
        lambda b: (torch.randn(b, 1, 32, 16, 6, dtype=torch.float64),),
    ),
    "UNet": (lambda: UNet(3, 1, 2, (4, 6, 8), (2, 2), num_res_units=2), lambda b: (volume(b, 8),)),
    "UNet-batch": (lambda: UNet(3, 1, 2, (4, 6), (2,), norm="BATCH", num_res_units=1), lambda b: (volume(b, 8),)),
    "DynUNet": (
        lambda: DynUNet(3, 1, 2, [3, 3, 3], [1, 2, 2], [2, 2], [4, 6, 8], deep_supervision=True, deep_supr_num=1),
        lambda b: (volume(b, 8),),
    ),
    "SegResNet": (lambda: SegResNet(3, 8, 1, 2, blocks_down=(1, 1), blocks_up=(1,)), lambda b: (volume(b, 8),)),
    "AttentionUnet": (lambda: AttentionUnet(3, 1, 2, (4, 6, 8), (2, 2)), lambda b: (volume(b, 8),)),
    "ResNet": (ResNet, lambda b: (torch.randn(b, 3, 32, 32, dtype=torch.float64),)),
    "two in, three out": (TwoInThreeOut, lambda b: (volume(b, 6), volume(b, 6, 2))),
}


def swin(checkpointed: bool, dims: int = 3) -> nn.Module:
    small = {"depths": (1, 1, 1, 1), "num_heads": (1, 1, 1, 1), "feature_size": 12, "window_size": 2}
    return SwinUNETR(1, 2, patch_size=2, use_checkpoint=checkpointed, spatial_dims=dims, **small)


def oblong(batch: int, dims: int = 3) -> tuple[Tensor, ...]:
    """Not a cube of 32: five halvings would leave one voxel, which instance norm refuses."""
    return (torch.randn(batch, 1, 64, *[32] * (dims - 1), dtype=torch.float64),)


TRANSFORMERS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], tuple[Tensor, ...]]]] = {
    "SwinUNETR": (lambda: swin(checkpointed=False), oblong),
    # A pipeline cuts between the same modules, whatever the dims; of volumes they take half a minute in float64.
    "SwinUNETR of slices": (lambda: swin(checkpointed=False, dims=2), lambda b: oblong(b, dims=2)),
    "SwinUNETR, checkpointed": (lambda: swin(checkpointed=True), oblong),
    "UNETR": (
        lambda: UNETR(1, 2, (16, 16, 16), feature_size=2, hidden_size=12, mlp_dim=16, num_heads=2),
        lambda b: (volume(b, 16),),
    ),
}

SLOW = ("SwinUNETR", "SwinUNETR, checkpointed")


def built(name: str) -> nn.Module:
    torch.manual_seed(0)
    return {**NETWORKS, **TRANSFORMERS}[name][0]().double()


def sample(name: str, batch: int) -> tuple[Tensor, ...]:
    torch.manual_seed(1)
    return {**NETWORKS, **TRANSFORMERS}[name][1](batch)


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
@pytest.mark.parametrize("name", NETWORKS)
def test_network_in_eval_mode_equals_the_plain_one(name: str, stages: int) -> None:
    net = built(name).eval()
    reference = copy.deepcopy(net)
    model = ModelParallel(net, devices=["cpu"] * stages, split_size=2)
    assert_same_step(reference, model, reference, net, *sample(name, 3))
    # Layers are timed: where four devices come to be as fast as five, as on a busy machine, one is left idle.
    assert max(1, stages - 1) <= len(model.partition.stages) <= stages


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("name", NETWORKS)
def test_network_in_training_mode_equals_the_plain_one_by_micro_batches(name: str, stages: int) -> None:
    net = built(name)
    reference = copy.deepcopy(net)
    model = ModelParallel(net, devices=["cpu"] * stages, split_size=2, record=True)
    for _ in range(WARM_UP + 1):  # eagerly, then from a recording
        assert_same_step(in_micro_batches(reference, 2), model, reference, net, *sample(name, 4))
    # With deep supervision DynUNet keeps its heads' outputs in a list, which a replay would not refresh.
    assert model.strategy.is_replaying == (name != "DynUNet")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in TRANSFORMERS],
)
def test_transformer_equals_the_plain_one(name: str) -> None:
    stages = 3
    net = built(name)
    reference = copy.deepcopy(net)
    model = ModelParallel(net, devices=["cpu"] * stages, split_size=1)
    assert_same_step(in_micro_batches(reference, 1), model, reference, net, *sample(name, 2))
    assert stages - 1 <= len(model.partition.stages) <= stages  # as above
