"""Stories of tensors that were changed in place, or hooked, behind an operator that had them computed otherwise.

What a plain network computes is computed to its digits. What it refuses is refused, and what cannot be told is, too.
"""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from volseg.errors import UnsupportedOperatorError
from volseg.parallel import FastKernels, ModelParallel
from volseg.parallel.spatial.volume import ShardedVolume

CHANNELS = 4

Run = Callable[["Net", Tensor], Tensor]


class Net(nn.Module):
    """Three convolutions, a norm, and a function of them."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.first, self.second, self.last = (nn.Conv3d(CHANNELS, CHANNELS, 3, padding=1) for _ in range(3))
        self.norm = nn.BatchNorm3d(CHANNELS, eps=0.1)
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


WAYS: dict[str, Callable[[nn.Module], ModelParallel]] = {
    "fast": lambda net: FastKernels(net, "cpu"),
    "cut": lambda net: ModelParallel(net, strategy="spatial", devices=["cpu", "cpu:1"]),
    "recomputed": lambda net: ModelParallel(net, strategy="spatial", devices=["cpu", "cpu:1"], checkpoint="all"),
    "tiled": lambda net: ModelParallel(net, strategy="spatial", devices=["cpu", "cpu:1"], checkpoint="tiled"),
    "offloaded": lambda net: ModelParallel(net, strategy="spatial", devices=["cpu", "cpu:1"], offload=True),
}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("volseg.parallel.spatial.convolution.plan.TILE_ELEMENTS", 200)


def compare(run: Run, way: str) -> None:
    torch.manual_seed(0)
    plain = Net(run).double()
    other = copy.deepcopy(plain)
    found = []
    for net, model in ((plain, plain), (other, WAYS[way](other))):
        x = torch.randn(2, CHANNELS, 8, 6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        x.requires_grad_()
        output = model(x)
        whole = output.full_tensor() if isinstance(output, ShardedVolume) else output
        (whole * torch.linspace(-1, 1, whole.numel(), dtype=whole.dtype).view(whole.shape).sin()).sum().backward()
        found.append({"output": whole, "x": x.grad} | {name: p.grad for name, p in net.named_parameters()})
    for name, expected in found[0].items():
        torch.testing.assert_close(found[1][name], expected, rtol=1e-9, atol=1e-9, msg=lambda t, n=name: f"{n}: {t}")


def change_what_is_added(net: Net, x: Tensor) -> Tensor:
    added = net.second(x)
    total = net.norm(net.first(x)) + added
    added.mul_(2)
    return net.last(total + added)


def change_what_is_added_and_activated(net: Net, x: Tensor) -> Tensor:
    added = net.second(x)
    total = F.relu(added + net.norm(net.first(x)))
    added.mul_(2)
    return net.last(total + added)


def change_what_was_added(net: Net, x: Tensor) -> Tensor:
    added = net.second(x)
    total = net.last(net.norm(net.first(x)) + added)
    added.mul_(2)
    return total + added


def change_what_was_added_and_activated(net: Net, x: Tensor) -> Tensor:
    added = net.second(x)
    total = net.last(F.relu(net.norm(net.first(x)) + added))
    added.mul_(2)
    return total + added


def change_the_input_of_a_norm(net: Net, x: Tensor) -> Tensor:
    y = net.first(x)
    total = net.norm(y) + x
    y.mul_(2)
    return net.last(total + y)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "run", [change_what_was_added_and_activated, change_the_input_of_a_norm], ids=lambda run: run.__name__
)
def test_what_a_gradient_is_computed_from_is_exact_or_refused_when_it_was_changed(run: Run, way: str) -> None:
    """In a recomputed block, and among small tensors that are offloaded, it was taken as it had become.

    A recomputation may end before the change, and is exact then.
    """
    if run is change_what_was_added_and_activated and way in ("recomputed", "tiled"):
        compare(run, way)
        return
    # torch refuses the second by itself, in the plain network.
    with pytest.raises(RuntimeError, match=r"in ?place"):
        compare(run, way)


@pytest.mark.parametrize("way", WAYS)
def test_a_step_between_forward_and_backward_is_refused(way: str) -> None:
    """With ``offload`` the gradient was that of the new weights."""
    net = Net(lambda net, x: net.last(F.relu(net.norm(net.first(x)))))
    model = WAYS[way](net)
    loss = model(torch.randn(1, CHANNELS, 8, 6, 4)).sum()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.1)
    with pytest.raises(RuntimeError, match=r"in ?place"):
        loss.backward()


def hook_a_norm_behind_a_sum(net: Net, x: Tensor) -> Tensor:
    y = net.norm(net.first(x))
    total = F.relu(y + x)
    y.register_hook(lambda gradient: gradient * 2)
    return net.last(total)


def hook_a_norm_behind_an_activation(net: Net, x: Tensor) -> Tensor:
    y = net.norm(net.first(x))
    activated = F.relu(y)
    y.retain_grad()
    return net.last(activated)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("run", [hook_a_norm_behind_a_sum, hook_a_norm_behind_an_activation], ids=lambda r: r.__name__)
def test_a_hook_that_nobody_would_call_is_refused(run: Run, way: str) -> None:
    """The sum had taken the norm along, and its gradient went past the norm's result: the hook was never called."""
    with pytest.raises(UnsupportedOperatorError, match="before the volume is used"):
        compare(run, way)


def hook_before(net: Net, x: Tensor) -> Tensor:
    y = net.norm(net.first(x))
    y.register_hook(lambda gradient: gradient * 2)
    return net.last(F.relu(y + x))


def check_a_sum(net: Net, x: Tensor) -> Tensor:
    total = net.norm(net.first(x)) + x
    return checkpoint(lambda given: net.last(F.relu(given)), total, use_reentrant=False)


def check_what_has_no_parameters(net: Net, x: Tensor) -> Tensor:
    total = net.norm(net.first(x)) + x
    return net.last(checkpoint(lambda given: torch.tanh(given).square() * given, total, use_reentrant=False)) + total


def check_a_slab(net: Net, x: Tensor) -> Tensor:
    y = net.first(x)
    return net.last(checkpoint(lambda given: torch.tanh(given).square() * given, y, use_reentrant=False)) + y


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "run",
    [
        *(change_what_is_added, change_what_is_added_and_activated, change_what_was_added),
        *(hook_before, check_a_sum, check_what_has_no_parameters, check_a_slab),
    ],
    ids=lambda run: run.__name__,
)
def test_what_waits_is_right_after_a_change_and_in_a_checkpoint_of_the_network(run: Run, way: str) -> None:
    """A sum kept what is added for the gradient, which torch's does not; a recomputed block compares no versions.

    Within such a block, saving a sum that waited wrote it, at another time than in the first run. What the inner
    checkpoint read had no history there, so that nothing of what it computed was saved again.
    """
    compare(run, way)


def change_what_was_joined(net: Net, x: Tensor) -> Tensor:
    part = net.second(x)
    joined = torch.cat([part[:, :1], x[:, 1:]], 1)
    shown = joined * 1
    result = checkpoint(lambda given: net.norm(net.first(given)), joined, use_reentrant=False)
    part.mul_(2)
    return net.last(result) + part + shown


@pytest.mark.parametrize("way", WAYS)
def test_a_part_of_a_join_that_a_checkpoint_reads_is_exact_or_refused_when_it_was_changed(way: str) -> None:
    """Computed again, the join had no recipe any more, and the convolution saved one tensor less: torch's own error."""
    if way == "fast":
        with pytest.raises(UnsupportedOperatorError, match="in place"):
            compare(change_what_was_joined, way)
    else:
        compare(change_what_was_joined, way)


def set_a_plane_behind_a_hook(net: Net, x: Tensor) -> Tensor:
    y = net.norm(net.first(x))
    y.register_hook(lambda gradient: gradient * 2)
    y[:, :, 1] = 0.5
    return net.last(y)


@pytest.mark.parametrize("way", ["cut", "recomputed", "tiled"])
def test_a_hooked_volume_is_not_changed_in_place(way: str) -> None:
    """Slabs behind one hook are views of several, which torch refused by itself when planes were set."""
    with pytest.raises(UnsupportedOperatorError, match="a hook waits"):
        compare(set_a_plane_behind_a_hook, way)


NO_NUMBER = float("nan")


@pytest.mark.parametrize("way", WAYS)
def test_a_bias_gradient_that_would_vanish_is_no_number_where_the_gradient_is_none(way: str) -> None:
    """Zeros stood there: the norm said of a gradient that it sums to zero, without a look at what it holds."""
    net = Net(lambda net, x: net.norm(net.first(x)))
    x = torch.randn(2, CHANNELS, 8, 6, 4)
    x[0, 1, 2, 3, 1] = NO_NUMBER
    output = WAYS[way](net)(x)
    (output.full_tensor() if isinstance(output, ShardedVolume) else output).square().sum().backward()
    assert net.first.bias.grad is not None
    assert net.first.bias.grad.isnan().all()


def change_in_a_checkpoint(net: Net, x: Tensor) -> Tensor:
    return net.last(checkpoint(lambda given: torch.sigmoid(given.mul_(2)), net.first(x), use_reentrant=False))


def activate_behind_a_checkpoint(net: Net, x: Tensor) -> Tensor:
    y = net.norm(net.first(x))
    result = checkpoint(torch.sigmoid, y, use_reentrant=False)
    F.leaky_relu_(y, 0.3)
    return net.last(result) + y


def add_behind_a_checkpoint(net: Net, x: Tensor) -> Tensor:
    y = net.norm(net.first(x))
    result = checkpoint(torch.sigmoid, y, use_reentrant=False)
    y += x
    return net.last(result) + y


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "run", [change_in_a_checkpoint, activate_behind_a_checkpoint, add_behind_a_checkpoint], ids=lambda run: run.__name__
)
def test_a_checkpoints_input_that_was_changed_is_refused(run: Run, way: str) -> None:
    """torch counts changes of the volume's shell, which those of its slabs did not move: the changed one was taken."""
    with pytest.raises(RuntimeError, match=r"in ?place"):
        compare(run, way)
