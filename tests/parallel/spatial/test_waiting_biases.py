"""Biases deferred to a norm, against the plain network in float64: outputs, every gradient, buffers."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from beside_plain import WAYS, assert_small, check_beside_plain, measure_rounding
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from volseg.device import fusions
from volseg.errors import UnsupportedOperatorError
from volseg.parallel import FastKernels
from volseg.parallel.spatial.lazy.bias import WaitingBias, torch_adds_apart
from volseg.parallel.verification.comparison import compare_values, default_objective, eager_step, observe

Use = Callable[["Net", Tensor], Tensor]


class Net(nn.Module):
    """Convolutions with biases, a norm, and operations on them."""

    def __init__(self, norm: Callable[[int], nn.Module], use: Use) -> None:
        super().__init__()
        self.first, self.second = nn.Conv3d(2, 6, 3, padding=1), nn.Conv3d(6, 6, 3, padding=1)
        self.strided, self.up = nn.Conv3d(2, 6, 3, stride=2, padding=1), nn.ConvTranspose3d(6, 6, 2, stride=2)
        self.overlapping = nn.ConvTranspose3d(6, 6, 3, stride=2, padding=1, output_padding=1)
        self.norm, self.other = norm(6), norm(6)
        self.last = nn.Conv3d(6, 2, 3, padding=1)
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.use(self, x))
        return result


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Defer biases on a CPU, too, where kernels add them in their own passes."""
    monkeypatch.setattr("volseg.parallel.spatial.lazy.bias.torch_adds_apart", lambda slab: True)


def use_before_and_behind(net: Net, x: Tensor) -> Tensor:
    found = net.first(x)
    return F.relu(net.norm(found)) + found


def use_twice(net: Net, x: Tensor) -> Tensor:
    found = net.first(x)
    return F.relu(net.norm(found)) * torch.sigmoid(net.other(found))


def change_behind_norm(net: Net, x: Tensor) -> Tensor:
    found = net.first(x)
    normed = torch.tanh(net.norm(found))
    return normed + (found.mul_(2) if not torch.is_grad_enabled() else found * 2)


def change_in_place(net: Net, x: Tensor) -> Tensor:
    return net.norm(net.first(x).mul_(3))


def look(net: Net, x: Tensor) -> Tensor:
    found = net.first(x)
    total = found.detach().sum()  # seen, with its bias
    return F.relu(net.norm(found)) * total.sigmoid()


def checkpoint_between(net: Net, x: Tensor) -> Tensor:
    found = checkpoint(net.first, x, use_reentrant=False)
    return checkpoint(lambda given: F.relu(net.norm(given)), found, use_reentrant=False)


def hook_it(net: Net, x: Tensor) -> Tensor:
    found = net.first(x)
    if found.requires_grad:
        found.register_hook(lambda gradient: gradient + 1)
    return net.norm(found)


def join_with_itself(net: Net, x: Tensor) -> Tensor:
    """Two parts of a join are one volume: its bias was added for each."""
    found = net.up(net.strided(x))
    return torch.cat([found, found], 1)[:, 3:9]


USES: dict[str, Use] = {
    "norm": lambda net, x: F.relu(net.norm(net.first(x))),
    "two in a row": lambda net, x: F.relu(net.other(net.second(F.leaky_relu(net.norm(net.first(x)))))),
    "no norm": lambda net, x: F.relu(net.first(x)),
    "a convolution behind": lambda net, x: net.second(net.first(x)),
    "a join": lambda net, x: F.relu(net.norm(net.first(x))) + torch.cat([net.first(x)[:, :3], net.first(x)[:, 3:]], 1),
    "norm and itself": use_before_and_behind,
    "two norms": use_twice,
    "changed behind": change_behind_norm,
    "changed before": change_in_place,
    "looked at": look,
    "checkpointed": checkpoint_between,
    "strided, transposed": lambda net, x: F.relu(net.norm(net.up(F.relu(net.other(net.strided(x)))))),
    "transposed, overlapping": lambda net, x: F.relu(net.norm(net.overlapping(net.strided(x)))),
    "transposed, no norm": lambda net, x: net.up(net.strided(x)) + net.overlapping(net.strided(x)),
    "joined with itself": join_with_itself,
    # Without a batch, and with as many planes as channels, the bias was added to planes without an error.
    "of one sample": lambda net, x: net.up(net.strided(x[0, :, :6])).unsqueeze(0),
    "norm plus norm": lambda net, x: F.elu(net.norm(net.first(x)) + net.other(net.first(x))),
}

NORMS: dict[str, Callable[[int], nn.Module]] = {
    "instance": lambda channels: nn.InstanceNorm3d(channels, affine=True),
    "instance, running": lambda channels: nn.InstanceNorm3d(channels, track_running_stats=True),
    "batch": nn.BatchNorm3d,
    "batch, cumulative": lambda channels: nn.BatchNorm3d(channels, momentum=None, affine=False),
    "group": lambda channels: nn.GroupNorm(2, channels),
    "group of each": lambda channels: nn.GroupNorm(channels, channels),
}

WHERE = ("one", "two, recomputed", "two, tiled")


def make_image(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.rand(2, 2, 8, 6, 4, dtype=dtype, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("use", "way"), [(use, way) for row, use in enumerate(USES) for way in ("fast", "two", WHERE[row % len(WHERE)])]
)
def test_biases_are_exact(use: str, way: str) -> None:
    torch.manual_seed(0)
    check_beside_plain(Net(NORMS["batch"], USES[use]).double(), WAYS[way], make_image())


def test_a_hook_gets_the_gradient_with_the_bias() -> None:
    check_beside_plain(Net(NORMS["batch"], hook_it).double(), WAYS["fast"], make_image())


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("way", ["fast", "two"])
@pytest.mark.parametrize("norm", NORMS)
def test_biases_in_front_of_norms_are_exact(norm: str, way: str, training: bool) -> None:
    torch.manual_seed(0)
    plain = Net(NORMS[norm], USES["two in a row"]).double()
    plain(make_image())  # running statistics that are no start's
    check_beside_plain(plain.train(training), WAYS[way], make_image())


@pytest.mark.parametrize(("norm", "waits"), [("instance", True), ("batch", True), ("group", False)])
def test_nothing_is_added_in_front_of_a_norm_that_takes_it_away(
    norm: str, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = []
    original = WaitingBias.settle
    monkeypatch.setattr(WaitingBias, "settle", lambda self, *given: written.append(self) or original(self, *given))
    net = FastKernels(Net(NORMS[norm], lambda net, x: net.norm(net.up(net.other(net.first(x))))), "cpu")
    net(torch.rand(1, 2, 4, 4, 4)).sum().backward()
    assert len(written) == (1 if waits else 3)  # the last convolution's output is read as it is


def test_a_change_in_place_copies_nothing_that_a_norm_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frame that still named a convolution's result got it with its bias when anything was changed in place."""
    written = []
    settle = WaitingBias.settle
    monkeypatch.setattr(
        WaitingBias, "settle", lambda self, *given: written.append(self.is_kept) or settle(self, *given)
    )

    def use(net: Net, x: Tensor) -> Tensor:
        found = net.first(x)
        result = net.second(net.norm(found))
        return F.relu(result, inplace=True)

    FastKernels(Net(NORMS["batch"], use), "cpu")(torch.rand(1, 2, 4, 4, 4)).sum().backward()
    assert written == [False, False]  # the second convolution's, and the last one's


def test_a_large_bias_costs_no_digits() -> None:
    """A plain network rounds before it adds a bias; ours is closer to float64."""
    torch.manual_seed(0)
    exact = Net(NORMS["instance"], USES["norm"])
    with torch.no_grad():
        exact.first.bias.fill_(300.0)
    ours, plain = measure_rounding(exact, make_image(), WAYS["fast"], None, dtype=None)
    for name in ("output", "first.weight", "norm.weight"):
        assert ours[name] < 0.1 * plain[name], name


def test_a_bias_that_is_changed_before_it_is_added_is_refused() -> None:
    def change(net: Net, x: Tensor) -> Tensor:
        found = net.first(x)
        with torch.no_grad():
            net.first.bias.add_(1)
        return F.relu(found)

    with pytest.raises(UnsupportedOperatorError, match="bias of a convolution was changed in place"):
        FastKernels(Net(NORMS["batch"], change), "cpu")(torch.rand(1, 2, 4, 4, 4))


@pytest.mark.parametrize("way", ["fast", "two"])
@pytest.mark.parametrize("bias", [lambda bias: bias[:1], lambda bias: bias[:, None]])
@pytest.mark.parametrize("function", [F.conv3d, F.conv_transpose3d])
def test_a_bias_that_torch_refuses_is_refused(
    function: Callable[..., Tensor], bias: Callable[[Tensor], Tensor], way: str
) -> None:
    """A valid bias comes first: the cached layer call must not accept the next, invalid one."""

    def use(net: Net, x: Tensor) -> Tensor:
        weight = net.second.weight  # of as many channels in as out
        inner = torch.cat([x] * 3, 1)
        return F.relu(function(inner, weight, net.second.bias)) + function(inner, weight, bias(net.second.bias))

    with pytest.raises(RuntimeError, match="expected bias to be 1-dimensional with 6 elements"):
        WAYS[way](Net(NORMS["batch"], use))(make_image(torch.float32))


@pytest.mark.parametrize("way", ["fast", "two"])
@pytest.mark.parametrize(
    "ask",
    [
        lambda found, result: found.register_hook(lambda gradient: gradient * 2),
        lambda found, result: found.retain_grad(),
        lambda found, result: torch.autograd.graph.register_multi_grad_hook((found, result), lambda gradients: None),
    ],
)
def test_the_gradient_of_what_a_norm_has_read_without_its_bias_is_refused(
    ask: Callable[[Tensor, Tensor], object], way: str
) -> None:
    """A hook registered after the norm missed its gradient, and its result was lost."""

    def use(net: Net, x: Tensor) -> Tensor:
        found = net.up(net.strided(x))
        result = net.norm(found)
        ask(found, result)
        return result

    with pytest.raises(UnsupportedOperatorError, match="a convolution's bias with a norm"):
        WAYS[way](Net(NORMS["batch"], use))(make_image(torch.float32))


@pytest.mark.parametrize("use", USES)
@pytest.mark.gpu
def test_biases_are_exact_on_a_gpu(use: str) -> None:
    torch.manual_seed(0)
    plain = Net(NORMS["batch"], USES[use]).double()
    model = FastKernels(copy.deepcopy(plain).cuda(), "cuda")
    image = make_image()
    theirs = observe(plain, [image], eager_step(plain, default_objective), 2)
    ours = observe(model, [image.cuda()], eager_step(model, default_objective), 2)
    for wanted, found in zip(theirs, ours, strict=True):
        assert_small(compare_values(wanted, found).errors)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("norm", ["instance", "batch"])
def test_a_bias_that_is_no_number_is_seen(norm: str, training: bool, value: float) -> None:
    plain = Net(NORMS[norm], USES["norm"]).train(training)
    with torch.no_grad():
        plain.first.bias[2] = value
    other = FastKernels(copy.deepcopy(plain), "cpu")
    x = torch.rand(1, 2, 4, 4, 4)
    found, wanted = (net(x).isfinite() for net in (other, plain))
    assert torch.equal(found, wanted)
    assert not found.any()


@pytest.mark.parametrize("adds_apart", [torch_adds_apart, lambda slab: True], ids=["on a CPU", "switched off"])
def test_no_bias_waits(adds_apart: Callable[[Tensor], bool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("volseg.parallel.spatial.lazy.bias.torch_adds_apart", adds_apart)
    monkeypatch.setattr(WaitingBias, "__init__", None)  # would raise
    torch.manual_seed(0)
    plain = Net(NORMS["batch"], USES["strided, transposed"]).double()
    with fusions.without(*(["waiting biases"] if adds_apart is not torch_adds_apart else [])):
        check_beside_plain(plain, WAYS["two"], make_image())
