"""Networks through the pipeline equal the plain ones by micro-batches, or are refused: outputs, gradients, buffers."""

import copy
from typing import Any

import monai_networks as census
import pytest
import torch
from micro_batches import gradients, in_micro_batches
from monai.networks.nets import SwinUNETR
from narrow_vnet import NarrowVNet
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from volseg.errors import ParallelError
from volseg.models.topology import plan_vnet_topology
from volseg.parallel import ModelParallel
from volseg.parallel.pipeline.recorder import WARM_UP

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*:UserWarning:monai"),
]


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
        deep = self.tied(first) + second, x.mean((1, 2, 3, 4)) * self.gain
        return {"logits": self.head(up), "deep": deep, "ids": both.argmax(1), "mode": "a word"}


def swin_of_slices() -> nn.Module:
    """A pipeline cuts between the same modules, whatever the dims; of volumes they take half a minute in float64."""
    small: dict[str, Any] = {"depths": (1, 1, 1, 1), "num_heads": (1, 1, 1, 1), "feature_size": 12, "window_size": 2}
    return SwinUNETR(1, 2, patch_size=2, spatial_dims=2, **small)


OWN = {
    "VNet, narrow": census.Case(make=NarrowVNet, shapes=((1, 16, 16, 16),)),
    "VNet, narrow, of thick slices": census.Case(
        make=lambda: NarrowVNet(plan_vnet_topology((216, 256, 9), (1.5, 1.5, 10.0))), shapes=((1, 32, 16, 6),)
    ),
    "two in, three out": census.Case(make=TwoInThreeOut, shapes=((1, 6, 6, 6), (2, 6, 6, 6))),
}

NETWORKS = {**census.NETWORKS, **OWN, "SwinUNETR of slices": census.Case(make=swin_of_slices, shapes=((1, 64, 32),))}

CUT_ANYWHERE = (
    *OWN,
    "ResNet10",
    "UNet, residual",
    "UNet, batch norm",
    "DynUNet, supervised",
    "SegResNet",
    "AttentionUnet",
)

FAST = ("RegUNet", "VoxelMorph", "ViT, classifying", "VQVAE", "DiffusionModelUNet, conditioned")

TRANSFORMERS = ("SwinUNETR of slices", "UNETR")

REFUSED = {
    "SegResNetVAE": "output 1 of the network has shape",
    "VISTA3D": "output 0 of the network has shape",
    "VQVAE": "output 1 of the network has shape",
    "VQVAE, evaluated": "output 1 of the network has shape",
}
"""By what the message says."""

LARGE = 1_000_000
"""Parameters of a network that takes one step only: minutes, on two cores in float64."""


def assert_close(mine: dict[str, Tensor], theirs: dict[str, Tensor], dtype: torch.dtype) -> None:
    """Compare on the scale of the largest value of all: a bias before a norm has a gradient of round-off only.

    Sums over samples are taken in another order, and gradients of deep networks span many magnitudes.
    """
    assert mine.keys() == theirs.keys()
    scale = max((float(value.abs().max()) for value in theirs.values() if value.numel()), default=1.0) or 1.0
    for name, value in theirs.items():
        error = float((mine[name].double() - value.double()).abs().max()) if value.numel() else 0.0
        assert error <= (1e-8 if dtype == torch.float64 else 1e-4) * scale, (
            f"{name} is off by {error:.1e} of {scale:.1e}"
        )


def step(run, inputs: tuple[Tensor, ...]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Run a batch and its backward; return the outputs, and the gradients of the inputs."""
    own = [x.clone().requires_grad_(x.is_floating_point()) for x in inputs]
    leaves = [leaf for leaf in pytree.tree_leaves(run(*own)) if isinstance(leaf, Tensor)]
    rooted = [leaf for leaf in leaves if leaf.requires_grad]
    sum(
        (leaf * torch.cos(torch.arange(leaf.numel(), dtype=leaf.dtype)).view_as(leaf)).sum() for leaf in rooted
    ).backward()
    gradients = {str(number): x.grad for number, x in enumerate(own) if x.grad is not None}
    return {str(number): leaf.detach() for number, leaf in enumerate(leaves)}, gradients


def check(
    name: str, stages: int = 2, split: int = 2, batch: int = 4, *, record: bool = False, train: bool = True
) -> str:
    """Take steps plainly and as a pipeline; return "equal", "equal, recorded", or "refused"."""
    case = NETWORKS[name]
    net = case.build().train(train)
    inputs, reference = case.inputs(batch), copy.deepcopy(net)
    devices = ["cpu", *(f"cpu:{number}" for number in range(1, stages))]
    batched = range(len(inputs)) if len(inputs) > 1 else None
    model = ModelParallel(net, strategy="pipeline", devices=devices, split_size=split, record=record, batched=batched)
    plain = in_micro_batches(reference, split if train else batch)
    said = None
    try:
        model.strategy.plan(*inputs)
        is_large = sum(parameter.numel() for parameter in net.parameters()) > LARGE
        for number in range(WARM_UP + 1 if record else 2 - is_large):
            torch.manual_seed(number)
            found = step(model, inputs)
            torch.manual_seed(number)
            for mine, theirs in zip(
                (*found, gradients(net)), (*step(plain, inputs), gradients(reference)), strict=True
            ):
                assert_close(mine, theirs, case.dtype)
    except ParallelError as refusal:
        said = str(refusal)
    if said is not None or name in REFUSED:
        assert REFUSED.get(name, "no refusal") in (said or "")
        return "refused"
    # Layers are timed: where four devices come to be as fast as five, as on a busy machine, one is left idle.
    assert max(min(stages, 2), stages - 1) <= len(model.partition.stages) <= stages
    # Running statistics are the whole batch's, other buffers those of the micro-batches.
    running = ("running_mean", "running_var", "num_batches_tracked")
    mine, theirs = (
        {name: buffer for name, buffer in each.named_buffers() if not name.endswith(running)}
        for each in (net, reference)
    )
    assert_close(mine, theirs, case.dtype)
    return "equal, recorded" if model.strategy.is_replaying else "equal"


def some_stages(*numbers: tuple[int, ...]) -> list[Any]:
    """Return each network with the numbers of stages of its turn."""
    return [(name, stages) for row, name in enumerate(CUT_ANYWHERE) for stages in numbers[row % len(numbers)]]


@pytest.mark.parametrize(("name", "stages"), some_stages((1, 3), (2, 5)))
def test_network_in_eval_mode_equals_the_plain_one(name: str, stages: int) -> None:
    assert check(name, stages, batch=3, train=False) == "equal"


@pytest.mark.parametrize(("name", "stages"), some_stages((2,), (4,)))
def test_network_in_training_mode_equals_the_plain_one_by_micro_batches(name: str, stages: int) -> None:
    """Eagerly, then from a recording."""
    # With deep supervision DynUNet keeps its heads' outputs in a list, which a replay would not refresh.
    assert check(name, stages, record=True) == ("equal" if name == "DynUNet, supervised" else "equal, recorded")


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_transformer_equals_the_plain_one(name: str) -> None:
    assert check(name, 3, split=1, batch=2).startswith("equal")


@pytest.mark.parametrize("name", FAST)
def test_network_equals_the_plain_one_or_is_refused(name: str) -> None:
    check(name)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.meshgrid:UserWarning")  # MONAI's, once per process
@pytest.mark.parametrize("record", [False, True])
@pytest.mark.parametrize("name", NETWORKS)
def test_every_network(name: str, record: bool) -> None:
    check(name, record=record)


def test_count() -> None:
    """So many networks are run, so many refused: a list that shrinks shows."""
    assert (len(census.NETWORKS), len(REFUSED)) == (95, 4)
