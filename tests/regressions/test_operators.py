"""Operators on slabs that differed from torch in float64; "cpu:1" acts as a second GPU."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from beside_plain import RunLayers, assert_small, compare, noted
from made_up_networks import Apply
from torch import Tensor, nn
from torch.torch_version import TorchVersion
from torch.utils._pytree import tree_leaves

from volseg.errors import UnsupportedOperatorError
from volseg.parallel import ModelParallel
from volseg.parallel.spatial.context import Context
from volseg.parallel.spatial.transport.one_process import LocalDevices
from volseg.parallel.spatial.volume import ShardedVolume, from_whole
from volseg.parallel.verification.comparison import whole

# All of them were found by an independent attack on version 0.1, and are right since every call is bound to torch's
# own signature and rehearsed on shapes before slabs are touched.


DEVICES = ["cpu", "cpu:1"]
VOLUME = torch.randn(2, 3, 12, 4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
OTHER = torch.rand(VOLUME.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def spatial(function: Callable[[Tensor], Any], **settings: Any) -> ModelParallel:
    return ModelParallel(Apply(function), strategy="spatial", devices=DEVICES, **settings)


def step(run: Callable[[Tensor], Any], volume: Tensor) -> list[Tensor]:
    """Return the outputs and the input's gradient."""
    image = volume.clone().requires_grad_()
    leaves = [whole(leaf) for leaf in tree_leaves(run(image))]
    for leaf in leaves:
        if leaf.requires_grad:
            weights = torch.linspace(1, 2, leaf.numel(), dtype=leaf.dtype).reshape(leaf.shape)
            (leaf * weights).sum().backward(retain_graph=True)
    return [*leaves, image.grad if image.grad is not None else torch.zeros(())]


def assert_equal(function: Callable[[Tensor], Any], volume: Tensor = VOLUME, **settings: Any) -> None:
    torch.testing.assert_close(step(spatial(function, **settings), volume), step(function, volume))


CALLS = [
    # axis=, keepdims=, x1= and x2= were ignored: cat joined along the batch, mean reduced over everything.
    lambda x: torch.cat([x, x], axis=1),
    lambda x: x.mean(axis=1),
    lambda x: x.mean(axis=(2, 3), keepdims=True),
    lambda x: x.std(axis=(2, 3, 4)),
    lambda x: x.max(axis=1),
    lambda x: torch.sum(x, axis=2),
    lambda x: torch.softmax(x, axis=1),
    lambda x: torch.softmax(x, axis=2),  # each slab's summed to one
    lambda x: torch.mul(x1=x, x2=x),
    # A matrix norm was taken for a vector's, a vector of quantiles and keepdim moved the cut; others crashed.
    lambda x: torch.linalg.norm(x, 2, dim=(3, 4)),
    lambda x: torch.quantile(x, torch.tensor([0.2, 0.8], dtype=x.dtype), dim=4),
    lambda x: torch.quantile(x, 0.3, dim=1, keepdim=True),
    lambda x: F.normalize(x, dim=(2, 3, 4)),
    lambda x: torch.where(x > 1),
    lambda x: x.clone().index_add_(dim=1, index=torch.tensor([1, 1, 0]), source=x, alpha=2),
    lambda x: x * x[:, :, 3].mean() / x[:, :, 3].shape.numel(),
    lambda x: x.cumsum(axis=2),  # ran slab by slab
    # mse_loss(weight=) divided by the count instead of the weights' sum, l1_loss ignored the weight.
    lambda x: F.mse_loss(x, OTHER, weight=OTHER),
    lambda x: F.l1_loss(x, OTHER, weight=OTHER, reduction="none"),
    # Raised an IndexError, where torch only warns.
    lambda x: x.flatten().T,
]

TIED = [
    # Each slab's extremum got a share, or the first along the cut instead of the first in memory.
    lambda x: x.amax((2, 3, 4)),
    lambda x: x.amin((0, 2)),
    lambda x: x.max(),
    lambda x: F.adaptive_max_pool3d(x, 1),
    lambda x: F.adaptive_max_pool3d(x, (3, 2, 2)),
    lambda x: F.adaptive_max_pool3d(x, (1, 2, 3)),
    lambda x: torch.linalg.vector_norm(x, float("inf"), (2, 3)),
]
if torch.__version__ >= TorchVersion("2.9"):  # 2.8 has no derivative of it
    TIED.append(torch.aminmax)


@pytest.mark.filterwarnings("ignore:The use of `x.T`")
@pytest.mark.parametrize(
    ("function", "volume"), [(call, VOLUME) for call in CALLS] + [(call, VOLUME.mul(2).round()) for call in TIED]
)
def test_a_call_is_torchs(function: Callable, volume: Tensor) -> None:
    """Arguments were ignored or not thought of, and ties were broken otherwise."""
    assert_equal(function, volume)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: (x * 1j).var((2, 3, 4)), "complex"),  # was complex
        (lambda x: torch.sum(x, (2, 3), out=torch.zeros(2, 3, 6, dtype=x.dtype)), "out="),  # was not written to
    ],
)
def test_what_slabs_compute_otherwise_is_refused(function: Callable, message: str) -> None:
    with pytest.raises(UnsupportedOperatorError, match=message):
        spatial(function)(VOLUME)


def test_an_unknown_reduction() -> None:
    # "average" was taken for the mean.
    with pytest.raises(ValueError, match="average is not a valid value for reduction"):
        F.mse_loss(spatial(nn.Identity())(VOLUME), OTHER, reduction="average")


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize(
    "function",
    [
        lambda x: x + F.max_pool3d(x, (2, 1, 1)),
        lambda x: F.mse_loss(x, x[:, :, :6]),
        lambda x: F.binary_cross_entropy_with_logits(x, OTHER[:, :, :6]),
        lambda x: F.conv3d(x, torch.ones(2, 3, 3, 3, 3, dtype=x.dtype), padding="same", stride=2),
        lambda x: F.max_pool3d(x, 2, stride=0),
    ],
)
def test_what_torch_refuses(function: Callable) -> None:
    # Sizes that do not fit were broadcast against slabs, where they may fit; a stride with padding="same" was taken.
    for run in (function, spatial(function)):
        with pytest.raises((RuntimeError, ValueError)) as caught:
            run(VOLUME)
        assert not isinstance(caught.value, UnsupportedOperatorError)


@pytest.mark.filterwarnings("ignore:.*runs on the gathered volume")
@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x.detach() * 1).put_(torch.tensor([0]), torch.zeros(1, dtype=x.dtype)),
        lambda x: torch.cumsum(x.detach(), 2, out=x.detach() * 1),
        lambda x: setattr(x * 1, "data", OTHER),
    ],
)
def test_gather_mode_loses_no_effect(function: Callable) -> None:
    # The gathered copy was changed, hooked or written to, and the volume stayed as it was.
    with pytest.raises(UnsupportedOperatorError, match=r"lost|in place"):
        spatial(function, on_unsupported="gather")(VOLUME.clone().requires_grad_())
    assert spatial(lambda x: x.flatten(1, 2).contiguous(), on_unsupported="gather")(VOLUME).equal(VOLUME.flatten(1, 2))


@pytest.mark.parametrize("factor", [1.3, (1.05, 1.3, 0.5)])
@pytest.mark.parametrize("mode", ["trilinear", "nearest", "nearest-exact"])
def test_a_factor_that_leaves_the_size(mode: str, factor: Any) -> None:
    # torch copies planes along a dim whose size stays, though the factor is not one; nearest planes it moves all the
    # same, of an uncut dim we did not.
    assert_equal(lambda x: F.interpolate(x, scale_factor=factor, mode=mode), VOLUME[:, :, :3, :3, :3].contiguous())


def test_a_gradient_of_nearest_planes_goes_where_torch_sends_it() -> None:
    # On a CPU it goes to other planes than the ones that are read.
    volume = torch.arange(14, dtype=torch.float64).reshape(1, 1, 14, 1, 1).requires_grad_()
    plain = F.interpolate(volume, scale_factor=(2.05, 1, 1), mode="nearest")
    (gradient,) = torch.autograd.grad(plain.sum(), volume)
    assert not gradient.long().flatten().equal(plain.long().flatten().bincount())
    volume = volume.detach()
    assert_equal(lambda x: F.interpolate(x, scale_factor=(2.05, 1, 1), mode="nearest"), volume, axes="D")


def test_a_tensor_into_which_a_volume_was_scattered_is_not_read() -> None:
    # It was emptied: its sum was nought, without a word. Its result goes on, as in MONAI's one_hot.
    def scattered(x: Tensor) -> tuple[Tensor, Tensor]:
        codes = torch.zeros(1, 3, *x.shape[2:], dtype=x.dtype)
        return codes.scatter_(1, (x[:, :1] > 0).long(), 1.0), codes

    volume = torch.randn(1, 1, 7, 4, 4, dtype=torch.float64)
    result, written = spatial(scattered)(volume)
    torch.testing.assert_close(result.full_tensor(), scattered(volume)[0])
    for read in (lambda: written.sum(), lambda: written + 1, lambda: written.shape, lambda: written.numpy()):
        with pytest.raises(UnsupportedOperatorError, match=r"use the result, as in y = y\.scatter_"):
            read()


# What torch has as a view is a copy where planes lie on other shards: written to, it lost the change without a word.
#
# Now such a write, and a read after the volume changed, raise; assignment to the volume itself does what torch does.


SHARDS = [["cpu", "cpu:1"], ["cpu", "cpu:1", "cpu:2", "cpu:3"]]
SHAPE = (2, 3, 9, 4, 5)


def image(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape or SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def sharded(x: Tensor, devices: list[str]) -> ShardedVolume:
    return from_whole(x, (2,), Context(LocalDevices(devices)))


ANOTHER = image(seed=1)

WRITES: dict[str, Callable[[Tensor], Any]] = {
    "one plane": lambda y: y[:, :, 0].zero_(),
    "some planes": lambda y: y[:, :, 2:8].mul_(0),
    "some planes, by an operator": lambda y: y[:, :, 1:9].__iadd__(1),
    "narrowed": lambda y: y.narrow(2, 1, 4).fill_(1.0),
    "selected": lambda y: y.select(2, -1).add_(1.0),
    "a part": lambda y: y.split(3, 2)[1].zero_(),
    "unbound": lambda y: y.unbind(2)[3].zero_(),
    "a view of a copy": lambda y: y[:, :, 2:8].transpose(1, 2)[0].zero_(),
    "an activation in place": lambda y: F.relu(y[:, :, 2:8], inplace=True),
    "assigned": lambda y: y[:, :, 2:8].__setitem__((slice(None), 0), 0.0),
    "planes in groups": lambda y: y.unflatten(2, (3, 3)).zero_(),
    "flat": lambda y: y.flatten(2).zero_(),
    "gathered": lambda y: y.permute(1, 0, 2, 3, 4).reshape(-1)[7:].zero_(),
}


@pytest.mark.parametrize("devices", SHARDS, ids=len)
@pytest.mark.parametrize("name", WRITES)
def test_a_change_through_a_copied_view_was_lost_and_is_refused(name: str, devices: list[str]) -> None:
    volume, plain = sharded(image(), devices) * 1.0, image() * 1.0
    if name == "a part" and len(devices) == 2:  # planes 3 and 4 of one slab, 5 of the other: a view as torch's
        WRITES[name](volume), WRITES[name](plain)
        assert whole(volume).equal(plain)
        return
    with pytest.raises(UnsupportedOperatorError, match=r"in place|merged"):
        WRITES[name](volume)


@pytest.mark.parametrize("devices", SHARDS, ids=len)
@pytest.mark.parametrize(
    "view",
    [lambda y: y[:, :, 2:8], lambda y: y[:, :, 0], lambda y: y.unflatten(2, (3, 3)), lambda y: y.chunk(2, 2)[1]],
    ids=["slice", "plane", "groups", "chunk"],
)
def test_a_slice_read_after_the_volume_changed_was_stale_and_is_refused(
    view: Callable[[Tensor], Tensor], devices: list[str]
) -> None:
    volume = sharded(image(), devices) * 1.0
    taken = view(volume)
    volume.add_(1.0)
    for read in (lambda: taken * 2, lambda: whole(taken) * 2):
        with pytest.raises(UnsupportedOperatorError, match=r"changed in place after"):
            read()


def test_a_plane_that_is_returned_after_the_volume_changed_is_refused() -> None:
    def forward(x: Tensor) -> Tensor:
        y = x * 1.0
        plane = y[:, :, 3]
        y.mul_(2)
        return plane

    with pytest.raises(UnsupportedOperatorError, match="changed in place after a slice"):
        spatial(forward, axes="D")(VOLUME)


@pytest.mark.parametrize("devices", SHARDS, ids=len)
def test_a_view_within_slabs_is_one(devices: list[str]) -> None:
    """A view within the slabs is a view here too: changes pass through in both directions."""
    results = []
    for x in (image(), sharded(image(), devices)):
        y = x * 1.0
        taken = y[:, 1]
        taken.mul_(3.0)
        y.add_(1.0)
        y.transpose(1, 2)[..., 2:].zero_()
        results.append([whole(taken * 2), whole(y)])
    torch.testing.assert_close(*results)


ALL = slice(None)
ASSIGNED: dict[str, Callable[[Tensor, Tensor], None]] = {
    "a range": lambda y, x: y.__setitem__((ALL, ALL, slice(2, 8)), x[:, :, 1:7]),
    "a number": lambda y, x: y.__setitem__((ALL, ALL, slice(2, 8)), 0.5),
    "an integer": lambda y, x: y.__setitem__((ALL, ALL, 4), x[:, :, 1]),
    "a negative integer": lambda y, x: y.__setitem__((ALL, ALL, -1), x[:, :, 0] * 2),
    "a negative range": lambda y, x: y.__setitem__((ALL, ALL, slice(-7, -2)), x[:, :, :5]),
    "steps": lambda y, x: y.__setitem__((ALL, ALL, slice(1, None, 3)), x[:, :, 6:]),
    "everything": lambda y, x: y.__setitem__(..., x.flip(2)),
    "an ordinary tensor": lambda y, x: y.__setitem__((ALL, slice(1, 3), slice(0, 5)), ANOTHER[:, :2, :5]),
    "a broadcast plane": lambda y, x: y.__setitem__((ALL, ALL, slice(3, 9)), ANOTHER[:, :, :1]),
    "a broadcast column": lambda y, x: y.__setitem__((0, ALL, slice(3, 9)), ANOTHER[0, :, 3:9, :1, :1]),
    "a vector": lambda y, x: y.__setitem__((ALL, ALL, slice(3, 9)), ANOTHER[0, 0, 0, 0]),
    "a number tensor": lambda y, x: y.__setitem__((ALL, ALL, slice(3, 9)), ANOTHER.sum()),
    "nothing": lambda y, x: y.__setitem__((ALL, ALL, slice(4, 4)), 1.0),
    "in place on itself": lambda y, x: y.__setitem__((ALL, ALL, slice(2, 8)), y[:, :, 2:8] * 0 + 1),
    "no index": lambda y, x: y.__setitem__((), 0.5),
    "by an operator": lambda y, x: _doubled(y),
}


def _doubled(y: Tensor) -> None:
    y[:, :, 2:8] = y[:, :, 2:8] * 2
    y[:, 1] += 1


def test_masked_number_too_large_for_float16_is_infinite_as_in_torch() -> None:
    """It raised RuntimeError; torch refuses such numbers only in masked_fill_."""

    def fill(x: Tensor) -> Tensor:
        y = x.half() * 1
        y[VOLUME > 0] = -1e9
        return y

    assert_equal(fill)


@pytest.mark.parametrize("devices", SHARDS, ids=len)
@pytest.mark.parametrize("name", ASSIGNED)
def test_assignment_along_the_cut_is_torchs(name: str, devices: list[str]) -> None:
    results = []
    for place in (lambda x: x, lambda x: sharded(x, devices)):
        leaf = image().requires_grad_()
        x = place(leaf)
        y = x * 1.0
        ASSIGNED[name](y, x)
        result = whole(y * x)
        (gradient,) = torch.autograd.grad((result * ANOTHER).sum(), leaf)
        results.append((result, gradient))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("devices", SHARDS, ids=len)
def test_what_torch_copies_too_may_be_changed(devices: list[str]) -> None:
    """Lists and masks copy in torch: their results are free."""
    results = []
    for x in (image(), sharded(image(), devices)):
        picked, planes = x[:, [0, 2]].mul_(2.0), x[:, :, [1, 1, 4]].add_(1.0)
        results.append([whole(value) for value in (picked, planes, x[x > 0].mul_(3.0), x)])
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last_3d])
def test_another_layout_may_be_the_volume_itself_and_is_not_written_to(layout: torch.memory_format) -> None:
    """Slabs with channels last were returned themselves, where torch had copied the volume: the change was theirs."""
    for given in (image(), image().contiguous(memory_format=torch.channels_last_3d)):
        volume = sharded(given, SHARDS[0])
        laid = volume.to(memory_format=layout)
        torch.testing.assert_close(whole(laid * 2), given * 2)
        with pytest.raises(UnsupportedOperatorError, match="in place"):
            laid.mul_(2)


PICKS = {
    "list": [1, 0],
    "list along dim 1": (slice(None), [1, 3]),
    "mask": torch.tensor([False, True]),
    "two lists": ([0, 1], [2, 1]),
}
FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "flatten(2)": lambda y: y.flatten(2),
    "flatten(1, 2)": lambda y: y.permute(0, 3, 2, 1, 4).flatten(2, 3),
    "outer": lambda y: y.permute(0, 3, 1, 2, 4).flatten(2, 3),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("pick", PICKS)
def test_volumes_assigned_to_picked_entries(form: str, pick: str) -> None:
    """``tokens[[1, 0]] = other[[1, 0]]`` asked for the value in planes: torch's RuntimeError about slabs of other
    sizes, and a refusal where channels lie in front of the planes. Seven planes lie unevenly on three shards."""

    def forward(net: RunLayers, x: Tensor) -> Tensor:
        y = net.layer(x)
        tokens, other = FORMS[form](y) * 1.0, FORMS[form](y.sin())
        tokens[PICKS[pick]] = other[PICKS[pick]]
        tokens[PICKS[pick]] *= 2
        return tokens

    torch.manual_seed(0)
    plain = RunLayers(forward, layer=nn.Conv3d(2, 4, 3, padding=1)).double()
    model = ModelParallel(copy.deepcopy(plain), strategy="spatial", devices=["cpu", "cpu:1", "cpu:2"])
    assert_small(compare(plain, model, [torch.randn(2, 2, 7, 4, 6, dtype=torch.float64)], steps=2))


# What random networks on slabs found: each story ended in another number or a crash, and is equal since.


ONE_OR_TWO = [["cpu"], ["cpu", "cpu:1"]]


def convolution() -> nn.Conv3d:
    return nn.Conv3d(2, 2, 3, padding=1, bias=False)


def assert_same(net: nn.Module, devices: list[str], **options: Any) -> None:
    """Two steps of training: outputs, every gradient, buffers and parameters are equal."""
    torch.manual_seed(0)
    model = ModelParallel(copy.deepcopy(net), strategy="spatial", devices=devices, **options)
    assert_small(compare(net, model, [torch.randn(2, 2, 9, 4, 4, dtype=torch.float64)], steps=2))


@pytest.mark.parametrize("how", ["backward", "autograd.backward"])
@pytest.mark.parametrize("devices", ONE_OR_TWO, ids=len)
def test_backward_from_a_volume_through_a_recomputed_block(devices: list[str], how: str) -> None:
    """``output.backward(gradient)`` computed blocks again where no function of torch reached the slabs: refused."""
    torch.manual_seed(0)
    plain = nn.Sequential(convolution(), nn.BatchNorm3d(2), nn.ReLU(), convolution()).double()
    model = ModelParallel(copy.deepcopy(plain), strategy="spatial", devices=devices, checkpoint="all")
    volume, gradient = (torch.randn(2, 2, 9, 4, 4, dtype=torch.float64) for _ in range(2))
    found = []
    for net in (plain, model):
        output, parameters = net(volume), list(net.parameters())
        output.backward(gradient) if how == "backward" else torch.autograd.backward(output, gradient)
        found.append(tuple(parameter.grad for parameter in parameters))
    torch.testing.assert_close(found[1], found[0])
    torch.testing.assert_close(model.state_dict(), plain.state_dict())


def test_contiguous_without_gradients() -> None:
    """torch returns what is contiguous itself, with its history even under no_grad; slabs with channels last were
    copied there, and the gradient through them was lost. Refused, where the volume has a history to lose."""

    def forward(net: RunLayers, x: Tensor) -> Tensor:
        y = net.a(x)
        with torch.no_grad():
            same = y.contiguous()
        return net.a(same * y)

    net = RunLayers(forward, a=convolution()).double()
    assert_same(net, ["cpu"])
    with pytest.raises(UnsupportedOperatorError, match=r"detach\(\)"):
        assert_same(net, ["cpu"], channels_last=True)


@pytest.mark.parametrize("devices", ONE_OR_TWO, ids=len)
def test_a_batch_of_no_samples_and_a_volume_without_a_batch(devices: list[str]) -> None:
    """Batch norm of no samples failed with an IndexError, and one shard convolved no volume without a batch."""
    model = ModelParallel(nn.BatchNorm3d(2), strategy="spatial", devices=devices)
    with pytest.raises(UnsupportedOperatorError, match="empty batch"):
        model(torch.zeros(0, 2, 9, 4, 4))
    plain = nn.Conv3d(2, 3, 3, padding=1).double()
    model = ModelParallel(copy.deepcopy(plain), strategy="spatial", devices=devices)
    volume = torch.randn(2, 9, 6, 5, dtype=torch.float64)
    torch.testing.assert_close(model(volume).full_tensor(), plain(volume))


def make_join(ask: Callable[[Tensor], object], *, late: bool) -> RunLayers:
    """Return a network that joins two volumes, asks for the gradient of the join, and convolves it; or asks late."""

    def forward(net: RunLayers, x: Tensor) -> Tensor:
        skip = torch.relu(F.instance_norm(net.first(x)))
        net.join = torch.cat([skip, net.second(skip)], 1)
        if not late:
            ask(net.join)
        result = net.last(net.join)
        if late:
            ask(net.join)
        return result

    last = nn.Conv3d(4, 2, 3, padding=1)
    return RunLayers(forward, first=convolution(), second=convolution(), last=last).double()


@pytest.mark.parametrize("devices", ONE_OR_TWO, ids=len)
def test_a_join_has_the_gradient_that_a_convolution_gives_it(devices: list[str]) -> None:
    """The convolution gave the joined volumes their gradients, and the join none: a hook changed nothing."""
    if len(devices) == 1:
        assert_same(make_join(lambda join: join.register_hook(lambda gradient: gradient * 3), late=False), devices)
    plain = make_join(lambda join: join.retain_grad(), late=False)
    model = ModelParallel(copy.deepcopy(plain), strategy="spatial", devices=devices)
    x = torch.randn(1, 2, 9, 4, 4, dtype=torch.float64)
    for net in (plain, model):
        net(x).sin().sum().backward()
    torch.testing.assert_close(model.module.join.grad.full_tensor(), plain.join.grad)


@pytest.mark.parametrize(
    "ask",
    [lambda join: join.register_hook(lambda gradient: gradient * 3), lambda join: join.retain_grad()],
    ids=["hook", "retain_grad"],
)
def test_the_gradient_of_a_join_that_went_past_it_is_refused(ask: Callable[[Tensor], object]) -> None:
    """Without a word it was that of everything but the convolution."""
    model = ModelParallel(make_join(ask, late=True), strategy="spatial", devices=["cpu"])
    with pytest.raises(UnsupportedOperatorError, match="before the volume is used"):
        model(torch.randn(1, 2, 9, 4, 4, dtype=torch.float64))


def assign_channels(x: Tensor) -> Tensor:
    y = x.clone()
    y[:, torch.tensor([2, 0])] = x[:, :2] * 3.0
    y[:, [1]] = 0.5
    return y


@pytest.mark.parametrize("index", [(slice(None), [2, 0]), (..., [1, 1], slice(None), slice(None), slice(None)), ([0],)])
def test_no_volume_is_gathered_for_a_list_of_channels(index: tuple) -> None:
    assert isinstance(spatial(lambda x: x[index])(VOLUME), ShardedVolume)
    with noted(ShardedVolume, full_tensor=ShardedVolume.full_tensor) as gathered:
        spatial(lambda x: x[index])(VOLUME)
    assert not gathered
    assert_equal(lambda x: x[index])


def test_channels_are_assigned_through_a_list_on_the_gathered_volume() -> None:
    assert_equal(assign_channels)


def test_a_dim_of_one_plane_stays_the_cut_one_and_none_is_not_a_slope():
    """On one shard the next longer dim was taken for it, here the channels, which a convolution refuses."""
    volume = from_whole(torch.randn(1, 2, 1, 4, 4), (2,), Context(LocalDevices(["cpu"])))
    assert volume.transpose(1, 2).reshape(1, 2, 4, 4).dims == (0,)
    with pytest.raises(TypeError):
        F.leaky_relu(volume, None)
