"""Fused operators whose history or digits differed from the plain network's."""

import copy
from collections.abc import Callable
from typing import Any

import plain_kernels
import pytest
import torch
import torch.nn.functional as F
from beside_plain import WAYS, RunLayers, assert_same_gradients, assert_same_values
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_unary
from torch.utils.checkpoint import checkpoint

from volseg.device import broadcast_mul, upsample2x
from volseg.errors import ParallelError, UnsupportedOperatorError
from volseg.parallel import FastKernels, ModelParallel
from volseg.parallel.spatial.convolution import plan
from volseg.parallel.spatial.operators import pointwise, resize
from volseg.parallel.spatial.table import TABLE, sharded_form
from volseg.parallel.spatial.volume import wrap as wrap_slabs
from volseg.parallel.verification.comparison import whole

CHANNELS = 4


@pytest.fixture(autouse=True)
def _kernels_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a CPU take the kernels' way by their plain forms, with tiles of a few voxels."""

    def gather_gradient(gradient: Tensor, shape: Any, part: Any, linear: bool) -> Tensor:
        with torch.enable_grad():
            slab = torch.zeros(shape, dtype=gradient.dtype, requires_grad=True)
            doubled = plain_kernels.double(slab, part, linear)
        return torch.autograd.grad(doubled, slab, gradient)[0]

    monkeypatch.setattr(broadcast_mul, "multiply", torch.mul)
    monkeypatch.setattr(broadcast_mul, "differentiate", plain_kernels.differentiate_product)
    monkeypatch.setattr(pointwise, "_has_kernel", lambda volume: True)
    monkeypatch.setattr(upsample2x, "double", plain_kernels.double)
    monkeypatch.setattr(upsample2x, "gather_gradient", gather_gradient)
    monkeypatch.setattr(resize, "_takes", lambda volume: True)
    monkeypatch.setattr(plan, "TILE_ELEMENTS", 64)


def make_net(run: Callable[[RunLayers, Tensor], Tensor]) -> RunLayers:
    """Return two convolutions with their norms, activations with slopes, and a function of them."""
    torch.manual_seed(0)
    first, second = (nn.Conv3d(CHANNELS, CHANNELS, 3, padding=1) for _ in range(2))
    norm, up = nn.InstanceNorm3d(CHANNELS, affine=True), nn.ConvTranspose3d(CHANNELS, CHANNELS, 2, 2)
    return RunLayers(run, first=first, second=second, norm=norm, up=up, slopes=nn.PReLU(CHANNELS))


def gate_apart(net: RunLayers, x: Tensor) -> Tensor:
    y = net.norm(net.first(x))
    with torch.no_grad():
        gate = F.relu(y)
    return y * gate


def activate_apart_in_place(net: RunLayers, x: Tensor) -> Tensor:
    y = net.norm(net.first(x))
    with torch.no_grad():
        F.relu_(y)
    return net.second(y)


def gate_a_sum_apart(net: RunLayers, x: Tensor) -> Tensor:
    y = net.norm(net.first(x)) + x
    with torch.no_grad():
        gate = F.relu(y)
    return net.second(y) * gate


def train_a_slope_behind_a_frozen_norm(net: RunLayers, x: Tensor) -> Tensor:
    y = net.first(x)
    with torch.no_grad():
        z = net.norm(y)
    return net.slopes(z) + net.second(y)


def look_in_inference_mode(net: RunLayers, x: Tensor) -> Tensor:
    y = net.norm(net.first(x))
    with torch.inference_mode():
        scale = F.relu(y).mean().item()
    return F.relu(y) * scale


def freeze_a_slope_before_it_is_used(net: RunLayers, x: Tensor) -> Tensor:
    y = net.slopes(net.norm(net.first(x))) + x
    net.slopes.weight.requires_grad_(False)
    z = F.relu(y) * 1
    net.slopes.weight.requires_grad_(True)
    return z


def freeze_while_recomputed(net: RunLayers, x: Tensor) -> Tensor:
    y = net.up(net.norm(net.first(x)))
    net.up.weight.requires_grad_(False)
    z = net.second(y)
    net.up.weight.requires_grad_(True)
    return z


def change_a_gradient_unseen(net: RunLayers, x: Tensor) -> Tensor:
    def add_one(gradient: Any) -> None:
        getattr(gradient, "slabs", [gradient])[0].data.add_(1)

    y = net.first(x)
    y.register_hook(add_one)
    return net.second(F.relu(net.norm(y)))


@pytest.mark.parametrize("way", ["fast", "two", "two, recomputed", "two, tiled"])
@pytest.mark.parametrize(
    "run",
    [
        *(gate_apart, activate_apart_in_place, gate_a_sum_apart, train_a_slope_behind_a_frozen_norm),
        *(look_in_inference_mode, freeze_a_slope_before_it_is_used, freeze_while_recomputed),
    ],
)
def test_gradients_are_those_of_the_plain_network(run, way):
    """An activation used the history of a norm that was called in another mode.

    Under ``no_grad`` it was differentiated, and a slope behind a norm under ``no_grad`` got no gradient. What a forward
    froze for a while stayed frozen where its recomputation ended early.
    """
    assert_same_gradients(make_net(run).double(), WAYS[way], 1, CHANNELS, 7, 6, 4)


def test_a_gradient_that_a_hook_changed_unseen_does_not_vanish() -> None:
    assert_same_gradients(make_net(change_a_gradient_unseen).double(), WAYS["fast"], 1, CHANNELS, 7, 6, 4)


def upsample(net: RunLayers, x: Tensor) -> Tensor:
    return F.interpolate(net.first(x), scale_factor=2, mode="trilinear")


DIGITS: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda x: x,
    "softmax": lambda x: F.softmax(x, dim=1),
    "mean": lambda x: x.mean((2, 3, 4)),
    "tanh": torch.tanh,
    "pow": lambda x: x**3,
    "float": lambda x: x.float(),
    "clone": torch.clone,
    "product": lambda x: x * 3,
    "crop": lambda x: x[:, :, :-1, 1:],
    "padding": lambda x: F.pad(x, (0, 1)),
    "sort": lambda x: x.sort(1)[0],
    "flat": lambda x: x.flatten(2),
    "pooling": lambda x: F.max_pool3d(x, 2),
    "twice": lambda x: F.interpolate(x, scale_factor=2, mode="trilinear"),
    "joined": lambda x: torch.stack([x, x]),
    "gate": lambda x: torch.where(x > 0, x, -x),
    "ones": torch.ones_like,
}


each_device = pytest.mark.parametrize("devices", [["cpu"], ["cpu", "cpu:1"]])


def run_on_slabs(read: Callable[[RunLayers, Tensor], Any], devices: list[str], x: Tensor) -> tuple[Tensor, RunLayers]:
    """Return a function's result for layers and an image on slabs, under autocast, and the layers."""
    net = make_net(read)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return whole(ModelParallel(net, strategy="spatial", devices=devices)(x)), net


def draw_image() -> Tensor:
    return torch.randn(1, CHANNELS, 6, 6, 4, generator=torch.Generator().manual_seed(1))


def run_upsampled(read: Callable[[Tensor], Any], devices: list[str]) -> tuple[Tensor, Any, list[nn.Parameter]]:
    """Return what a function makes of an upsampled volume in torch's digits, what it makes of it on slabs, and weights.

    The weights are those of the convolution that is upsampled: the plain network's, and ours.
    """
    plain, x = make_net(upsample), draw_image()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        # As on GPUs: a CPU's autocast leaves the type to what is upsampled.
        expected = read(F.interpolate(plain.first(x).float(), scale_factor=2, mode="trilinear"))
    found, ours = run_on_slabs(lambda net, x: read(upsample(net, x)), devices, x)
    return expected, found, [net.first.weight for net in (plain, ours)]


@pytest.mark.parametrize("read", DIGITS)
@each_device
def test_what_is_computed_from_an_upsampled_volume_has_torchs_digits(devices: list[str], read: str) -> None:
    """Probabilities of upsampled logits were bfloat16, as the logits themselves, where torch's are float32."""
    expected, found, weights = run_upsampled(DIGITS[read], devices)
    assert expected.dtype == found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-6 if read == "itself" else 1e-5, atol=1e-6)
    if not expected.requires_grad:
        assert not found.requires_grad
        return
    expected.square().sum().backward()
    found.square().sum().backward()
    # bfloat16's: each slab's sums of the weight's gradient are rounded to it.
    theirs, ours = (weight.grad for weight in weights)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2**-7 * float(theirs.abs().max()))


def test_what_reads_rounded_digits_is_listed() -> None:
    """Unlisted functions get all digits; in a recorded step only listed ones may get fewer."""
    rounded = {entry.name for entry in TABLE.values() if entry.rounded and entry.family != "Metadata and autograd"}
    convolutions = {f"torch.conv{kind}{count}d" for kind in ("", "_transpose") for count in (1, 2, 3)}
    norms = {"F.batch_norm", "torch.batch_norm", "F.instance_norm", "F.group_norm", "torch.group_norm"}
    sums = {"torch.add", "Tensor.add", "Tensor.__add__", "Tensor.__radd__", "Tensor.add_", "Tensor.__iadd__"}
    assert rounded == convolutions | norms | sums | {"torch.cat", "torch.concat", "torch.concatenate"}


def scale(x: Tensor) -> Tensor:
    """Be a function of somebody's own, with a form on slabs."""
    if has_torch_function_unary(x):
        return handle_torch_function(scale, (x,), x)
    return x * 3


def test_a_function_of_ones_own_reads_all_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(TABLE, scale, raising=False)
    sharded_form(scale)(lambda func, args, kwargs: wrap_slabs(args[0], [slab * 3 for slab in args[0].slabs]))
    expected, found, _ = run_upsampled(scale, ["cpu"])
    monkeypatch.delitem(TABLE, scale)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def assign(x: Tensor) -> Tensor:
    x[:, :1] = 2
    return x


def add_to_zeros(x: Tensor) -> Tensor:
    return torch.zeros_like(x).mul_(1).copy_(x)


CHANGED: dict[str, Callable[[Tensor], Tensor]] = {
    "exp_": lambda x: x.exp_(),
    "sigmoid_": lambda x: x.sigmoid_(),
    "relu_": lambda x: (F.relu(x, inplace=True), x)[1],
    "relu by name": lambda x: (F.relu(inplace=True, input=x), x)[1],
    "leaky by place": lambda x: (F.leaky_relu(x, 0.1, True), x)[1],
    "mul_": lambda x: (x.mul_(2), x)[1],
    "imul": lambda x: x.__imul__(2),
    "dropout": lambda x: (F.dropout(x, 0.5, False, inplace=True), x)[1],
    "assigned": assign,
    "detach_": lambda x: x.detach_(),
    "copied": add_to_zeros,
}


@pytest.mark.parametrize("change", CHANGED)
@each_device
def test_an_upsampled_volume_is_changed_itself(devices: list[str], change: str) -> None:
    """In place its own type stays; a copy with more digits must not be changed in its place."""
    with torch.no_grad():
        expected, found, _ = run_upsampled(CHANGED[change], devices)
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=2**-7, check_dtype=False)


@pytest.mark.parametrize(
    "change",
    [lambda x: (x[:, :1].mul_(2), x)[1], lambda x: (x.detach().zero_(), x)[1], lambda x: (x.view(1, -1).zero_(), x)[1]],
)
def test_views_of_upsampled_volumes_are_copies_that_nobody_changes(change: Callable[[Tensor], Tensor]) -> None:
    with torch.no_grad(), pytest.raises(UnsupportedOperatorError, match=r"in place, which is a copy here"):
        run_upsampled(change, ["cpu"])


@each_device
def test_an_upsampled_volume_has_all_digits_where_autocast_is_off_again(devices: list[str]) -> None:
    """A convolution got 16 bits where its weight has 32, and torch refused them."""

    def read(net: RunLayers, x: Tensor) -> Tensor:
        upsampled = upsample(net, x).float() if type(x) is Tensor else upsample(net, x)  # on a CPU torch rounds it
        with torch.autocast("cpu", enabled=False):
            return net.second(upsampled) + upsampled

    x = draw_image()
    found, _ = run_on_slabs(read, devices, x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = make_net(read)(x)
    assert found.dtype == expected.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=2**-7)


@each_device
def test_a_hook_on_what_was_read_with_all_digits_is_refused(devices: list[str]) -> None:
    """The gradient bypasses the hook, whose result was silently lost."""

    def read(net: RunLayers, x: Tensor) -> Tensor:
        upsampled = upsample(net, x)
        result = torch.tanh(upsampled)
        upsampled.register_hook(lambda gradient: gradient * 2)
        return result

    with pytest.raises(UnsupportedOperatorError, match="an upsampled volume with a reader in float32"):
        run_on_slabs(read, devices, draw_image())


def test_an_upsampled_result_that_was_changed_stays_changed() -> None:
    """Only unchanged results are recomputed."""
    x = draw_image()
    found, _ = run_on_slabs(lambda net, x: upsample(net, x).relu_(), ["cpu"], x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = make_net(lambda net, x: upsample(net, x).relu_())(x)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected.float(), rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("net", [None, 3, "a network"])
def test_what_is_no_network_is_refused_by_name(net: Any) -> None:
    for wrap in (ModelParallel, FastKernels):
        with pytest.raises(ParallelError, match=r"torch\.nn\.Module, got"):
            wrap(net)


# Blocks of checkpoints in a network's own code were computed again otherwise than they had been: gates and upsampled
# volumes by torch's kernels, for no forward pass runs then.


def make_checked(run: Callable[[RunLayers, Tensor], Tensor]) -> RunLayers:
    """Return convolutions and a norm, and operations on them."""
    torch.manual_seed(0)
    first, second = nn.Conv3d(2, 4, 3, padding=1), nn.Conv3d(4, 4, 3, padding=1)
    norm, psi = nn.InstanceNorm3d(4, affine=True), nn.Conv3d(4, 1, 1)
    joined, last = nn.Conv3d(8, 4, 3, padding=1), nn.Conv3d(4, 2, 3, padding=1)
    layers = {"first": first, "second": second, "norm": norm, "psi": psi, "joined": joined, "last": last}
    return RunLayers(lambda net, x: net.last(run(net, net.first(x))), **layers).double()


def again(block: Callable[..., Tensor], *given: Tensor) -> Tensor:
    return checkpoint(block, *given, use_reentrant=False)


def double(x: Tensor) -> Tensor:
    return F.interpolate(x, scale_factor=2, mode="trilinear")


RUNS: dict[str, Callable[[RunLayers, Tensor], Tensor]] = {
    "a gate": lambda net, x: again(lambda x: net.second(x) * net.psi(x).sigmoid(), net.norm(x).relu()),
    "a gate at the end": lambda net, x: again(lambda x: x * net.psi(x).sigmoid(), x),
    "upsampled": lambda net, x: again(lambda x: net.second(double(x)), x),
    "upsampled before": lambda net, x: again(net.second, double(x)),
    "upsampled, normed": lambda net, x: again(net.second, net.norm(double(x)).relu()),
    "upsampled, gated": lambda net, x: again(lambda x: double(x) * net.psi(double(x)).sigmoid(), x),
    "normed": lambda net, x: again(net.second, net.norm(x).relu()),
    "joined": lambda net, x: again(net.joined, torch.cat([net.norm(x), x], 1)),
    "upsampled, joined": lambda net, x: again(net.joined, torch.cat([double(net.norm(x)), double(x)], 1)),
}


def observe(net: nn.Module, call: nn.Module, x: Tensor, *, half: bool = False) -> dict[str, Tensor]:
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        output = call(x)
    output = whole(output)
    output.double().square().mean().backward()
    found = {name: p.grad.double() for name, p in net.named_parameters() if p.grad is not None}
    return found | {"output": output.detach().double()}


@pytest.mark.parametrize("way", ["fast", "two", "two, recomputed", "two, tiled"])
@pytest.mark.parametrize("name", RUNS)
def test_blocks_were_computed_again_otherwise(name: str, way: str) -> None:
    plain, x = make_checked(RUNS[name]), torch.rand(1, 2, 8, 4, 4, dtype=torch.float64)
    ours, narrow = copy.deepcopy(plain), copy.deepcopy(plain).float()
    wanted, got = observe(plain, plain, x), observe(ours, WAYS[way](ours), x)
    assert_same_values(got, wanted, atol=1e-11)
    # The type of what is upsampled is autocast's. What is computed in bfloat16 has two or three digits.
    rounded = observe(narrow, WAYS[way](narrow), x.float(), half=True)
    for each, value in wanted.items():
        assert float((rounded[each] - value).norm()) <= 0.05 * float(value.norm()) + 0.01, each
