"""MONAI's networks as pipelines: each equals the plain network by micro-batches, or is refused."""

import copy
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from volseg.errors import ParallelError
from volseg.parallel import ModelParallel
from volseg.parallel.pipeline.record.choice import WARM_UP

NETWORKS = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("monai_networks.py")))).NETWORKS

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*:UserWarning:monai"),
]

FAST = (
    *("UNet, batch norm", "DynUNet, supervised", "SegResNet", "RegUNet", "VoxelMorph", "ViT, classifying"),
    *("VQVAE", "DiffusionModelUNet, conditioned"),
)

REFUSED = {
    "SegResNetVAE": "output 1 of the network has shape",
    "VISTA3D": "output 0 of the network has shape",
    "VQVAE": "output 1 of the network has shape",
    "VQVAE, evaluated": "output 1 of the network has shape",
}
"""By what the message says."""

BATCH, SPLIT = 4, 2

LARGE = 1_000_000
"""Parameters of a network that takes one step only: minutes, on two cores in float64."""


def tolerance(dtype: torch.dtype) -> float:
    """Sums over samples are taken in another order, and gradients of deep networks span many magnitudes."""
    return 1e-8 if dtype == torch.float64 else 1e-4


def assert_close(mine: dict[str, Tensor], theirs: dict[str, Tensor], dtype: torch.dtype) -> None:
    """Compare on the scale of the largest value of all: a bias before a norm has a gradient of round-off only."""
    assert mine.keys() == theirs.keys()
    scale = max((float(value.abs().max()) for value in theirs.values() if value.numel()), default=1.0) or 1.0
    for name, value in theirs.items():
        error = float((mine[name].double() - value.double()).abs().max()) if value.numel() else 0.0
        assert error <= tolerance(dtype) * scale, f"{name} is off by {error:.1e} of {scale:.1e}"


def step(run, inputs: tuple[Tensor, ...]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Run a batch and its backward; return the outputs, and the gradients of the inputs."""
    own = [x.clone().requires_grad_(x.is_floating_point()) for x in inputs]
    leaves = [leaf for leaf in pytree.tree_leaves(run(*own)) if isinstance(leaf, Tensor)]
    rooted = [leaf for leaf in leaves if leaf.requires_grad]
    sum(
        (leaf * torch.cos(torch.arange(leaf.numel(), dtype=leaf.dtype)).view_as(leaf)).sum() for leaf in rooted
    ).backward()
    return [leaf.detach() for leaf in leaves], {
        str(number): x.grad for number, x in enumerate(own) if x.grad is not None
    }


def plainly(net: nn.Module, inputs: tuple[Tensor, ...]):
    """Run the network on each micro-batch, without a pipeline."""

    def run(*args: Tensor):
        outputs = [net(*pieces) for pieces in zip(*(x.split(SPLIT) for x in args), strict=True)]
        flat = [pytree.tree_flatten(output) for output in outputs]
        columns = zip(*(leaves for leaves, _ in flat), strict=True)
        joined = [torch.cat(column) if isinstance(column[0], Tensor) else column[0] for column in columns]
        return pytree.tree_unflatten(joined, flat[0][1])

    return step(run, inputs)


def compare(name: str, record: bool) -> str:
    """Take steps plainly and as a pipeline; return ``equal``, ``equal, recorded``, or the refusal."""
    case = NETWORKS[name]
    net = case.build()
    inputs, reference = case.inputs(BATCH), copy.deepcopy(net)
    model = ModelParallel(net, strategy="pipeline", devices=["cpu", "cpu:1"], split_size=SPLIT, record=record)
    try:
        model.strategy.plan(*inputs)
        is_large = sum(parameter.numel() for parameter in net.parameters()) > LARGE
        for batch in range(WARM_UP + 1 if record else 2 - is_large):
            torch.manual_seed(batch)
            outputs, gradients = step(model, inputs)
            torch.manual_seed(batch)
            expected, expected_gradients = plainly(reference, inputs)
            names = [str(number) for number in range(len(expected))]
            assert_close(dict(zip(names, outputs, strict=True)), dict(zip(names, expected, strict=True)), case.dtype)
            assert_close(gradients, expected_gradients, case.dtype)
            assert_close(of(net), of(reference), case.dtype)
    except ParallelError as refusal:
        return str(refusal)
    assert len(model.partition.stages) == 2
    # Running statistics are the whole batch's, other buffers those of the micro-batches.
    running = ("running_mean", "running_var", "num_batches_tracked")
    mine, theirs = (
        {name: buffer for name, buffer in each.named_buffers() if not name.endswith(running)}
        for each in (net, reference)
    )
    assert_close(mine, theirs, case.dtype)
    return "equal, recorded" if model.strategy.is_replaying else "equal"


def of(net: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in net.named_parameters() if p.grad is not None}


def check(name: str, record: bool) -> str:
    """Compare; return in one word what came of it."""
    found = compare(name, record)
    if name in REFUSED:
        assert REFUSED[name] in found
        return "refused"
    assert found.startswith("equal"), found
    return found


@pytest.mark.parametrize("name", FAST)
def test_network_equals_the_plain_one_or_is_refused(name: str) -> None:
    check(name, record=False)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.meshgrid:UserWarning")  # MONAI's, once per process
@pytest.mark.parametrize("record", [False, True])
@pytest.mark.parametrize("name", NETWORKS)
def test_every_network(name: str, record: bool) -> None:
    check(name, record)


def test_count() -> None:
    """So many networks are run, so many refused: a list that shrinks shows."""
    assert (len(NETWORKS), len(REFUSED)) == (95, 4)
