"""The protocol of slabs that wait or can be written again: every state and every event, and what changes in place do.

The volume of each test is a norm's result, ``instance_norm(source)``, in the state that the test is about.
"""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from beside_plain import RunLayers
from monai.metrics import MSEMetric
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from volseg.device.norm.activation import Activation
from volseg.errors import UnsupportedOperatorError
from volseg.parallel import ModelParallel
from volseg.parallel.spatial.context import Context
from volseg.parallel.spatial.lazy.recipes import RecomputedInput
from volseg.parallel.spatial.operators.conversions import convert_by_name
from volseg.parallel.spatial.pending import PLAIN, PLAIN_SHOWN, Released, Shown, Waiting, Written
from volseg.parallel.spatial.sources import Recipe, Unchanged
from volseg.parallel.spatial.transport.one_process import LocalDevices
from volseg.parallel.spatial.volume import ShardedVolume, from_whole

LEAKY = Activation("leaky", 0.1)
STATES = ["waiting", "written", "shown", "released"]
KIND = {"waiting": Waiting, "written": Written, "shown": Shown, "released": Released}


def cut(whole: Tensor, shards: int = 1) -> ShardedVolume:
    return from_whole(whole, [2], Context(LocalDevices(["cpu"] * shards)))


def norm_of(source: ShardedVolume, state: str) -> ShardedVolume:
    volume = F.instance_norm(source)
    if state != "waiting":
        volume.pending.lend(volume)
    if state == "shown":
        assert volume.slabs is not None
    if state == "released":
        volume.pending.release(volume)
    assert type(volume.pending) is KIND[state] or state == "waiting"
    assert isinstance(volume.pending, KIND[state])
    return volume


@pytest.fixture
def whole() -> Tensor:
    return torch.randn(1, 2, 8, 4, 4, dtype=torch.float64, requires_grad=True)


def held_bytes(volume: ShardedVolume) -> int:
    return volume._slabs[0].untyped_storage().nbytes()


EVENTS: dict[str, Callable[[ShardedVolume], object]] = {
    "settle": lambda volume: volume.settle(),
    "lend": lambda volume: volume.pending.lend(volume),
    "show": lambda volume: volume.slabs,
    "release": lambda volume: volume.pending.release(volume),
    "find_recipe": lambda volume: volume.pending.find_recipe(volume),
    "spare": lambda volume: volume.pending.spare(volume),
    "activate": lambda volume: volume.pending.activate(LEAKY),
}
NEXT = {
    "settle": ["written", "written", "shown", "released"],
    "lend": ["written", "written", "shown", "written"],
    "show": ["shown", "shown", "shown", "shown"],
    "release": ["waiting", "released", "shown", "released"],
    "find_recipe": ["written", "written", "shown", "released"],
    "spare": ["released", "written", "shown", "released"],
    "activate": STATES,
}
"""The state behind each event, for each of ``STATES``."""


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("event", EVENTS)
def test_every_event_in_every_state(whole: Tensor, state: str, event: str) -> None:
    source = cut(whole)
    volume = norm_of(source, state)
    before = volume.pending
    result = EVENTS[event](volume)
    after = NEXT[event][STATES.index(state)]
    assert isinstance(volume.pending, KIND[after])
    assert isinstance(volume.pending, Shown) == (after == "shown")
    if after == state:
        assert volume.pending is before
    assert (held_bytes(volume) <= whole.element_size()) == (
        after == "released"
    )  # of what was never written, one element
    if event in ("lend", "show"):
        assert result is volume._slabs
    elif event in ("find_recipe", "spare"):
        assert isinstance(result, Recipe)
        out = torch.empty_like(whole)
        result.write(result.tensors, out, 0)
        torch.testing.assert_close(out, F.instance_norm(whole))
    elif event == "activate":
        assert isinstance(result, Waiting) == (state == "waiting")
    else:
        assert result is None
    # Whatever came before: the values, and the gradient, are the norm's.
    (slab,) = volume.slabs
    torch.testing.assert_close(slab, F.instance_norm(whole))
    weights = torch.randn_like(whole)
    expected = torch.autograd.grad((F.instance_norm(whole) * weights).sum(), whole)
    torch.testing.assert_close(torch.autograd.grad((slab * weights).sum(), whole), expected)


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("shown", [False, True])
@pytest.mark.parametrize("shards", [1, 2])
def test_a_plain_volume_only_comes_to_be_shown(whole: Tensor, event: str, shown: bool, shards: int) -> None:
    volume = cut(whole, shards)
    if shown:
        assert len(volume.slabs) == shards
    before = volume.pending
    assert before is (PLAIN_SHOWN if shown else PLAIN)
    result = EVENTS[event](volume)
    assert volume.pending is (PLAIN_SHOWN if event == "show" else before)
    assert result is (volume._slabs if event in ("lend", "show") else None)


def test_one_activation_is_taken_along(whole: Tensor) -> None:
    volume = norm_of(cut(whole), "waiting")
    taken = volume.pending.activate(LEAKY)
    assert taken is not None
    assert taken.activate(LEAKY) is None
    activated = F.leaky_relu(volume, 0.1)
    assert isinstance(activated.pending, Waiting)
    assert isinstance(volume.pending, Waiting)  # who else reads the norm gets it without
    twice = F.leaky_relu(activated, 0.1)
    normal = F.instance_norm(whole)
    torch.testing.assert_close(volume.slabs[0], normal)
    torch.testing.assert_close(activated.slabs[0], F.leaky_relu(normal, 0.1))
    torch.testing.assert_close(twice.slabs[0], F.leaky_relu(normal, 0.01))
    volume = norm_of(cut(whole), "waiting")
    assert F.leaky_relu(volume, 0.1, inplace=True) is volume
    assert isinstance(volume.pending, Waiting)
    torch.testing.assert_close(volume.slabs[0], F.leaky_relu(normal, 0.1))


@pytest.mark.parametrize("shards", [1, 2])
def test_only_one_slab_of_a_process_can_be_written_again(whole: Tensor, shards: int) -> None:
    volume = F.instance_norm(cut(whole, shards))
    assert (volume.pending.find_recipe(volume) is not None) == (shards == 1)
    volume.pending.release(volume)
    assert isinstance(volume.pending, Released) == (shards == 1)
    torch.testing.assert_close(volume.full_tensor(), F.instance_norm(whole))


def change(volume: ShardedVolume) -> None:
    """Change a slab past the operators, who cannot know of it."""
    with torch.no_grad():
        volume._slabs[0].add_(1.0)


@pytest.mark.parametrize("state", STATES)
def test_a_source_that_changed_past_the_operators(whole: Tensor, state: str) -> None:
    source = cut(whole.detach().clone())
    expected = F.instance_norm(whole.detach())
    volume = norm_of(source, state)
    change(source)
    if state == "waiting":
        for event in ("settle", "lend", "show", "find_recipe", "show"):  # and again: nobody gets the norm's input
            with pytest.raises(UnsupportedOperatorError, match="was changed in place before the result was used"):
                EVENTS[event](volume)
            assert isinstance(volume.pending, Waiting)
        return
    assert volume.pending.find_recipe(volume) is None
    if state == "released":
        for event in ("lend", "show", "lend"):
            with pytest.raises(UnsupportedOperatorError, match="computed from was changed in place before the volume"):
                EVENTS[event](volume)
            assert isinstance(volume.pending, Released)
        return
    volume.pending.release(volume)
    torch.testing.assert_close(volume.slabs[0], expected)


@pytest.mark.parametrize("trains", [False, True])
def test_a_weight_may_change_before_its_norm_is_written_only_if_no_gradient_reads_it(
    whole: Tensor, trains: bool
) -> None:
    weight = torch.ones(2, dtype=torch.float64, requires_grad=trains)
    with torch.set_grad_enabled(trains):
        volume = F.instance_norm(cut(whole), weight=weight)
    with torch.no_grad():
        weight.mul_(2.0)
    if trains:
        with pytest.raises(UnsupportedOperatorError, match="or the norm's weight"):
            volume.settle()
    else:
        torch.testing.assert_close(volume.slabs[0], F.instance_norm(whole).detach())


@pytest.mark.parametrize("state", STATES)
def test_an_operator_in_place_on_the_source_leaves_the_norm_as_it_was_or_loses_it(whole: Tensor, state: str) -> None:
    source = cut(whole.detach().clone())
    volume = norm_of(source, state)
    source.add_(1.0)
    assert not isinstance(volume.pending, Waiting)
    assert volume.pending.find_recipe(volume) is None
    if state == "released":
        with pytest.raises(UnsupportedOperatorError, match="do that out of place"):
            volume.add_(1.0)
    else:
        torch.testing.assert_close(volume.slabs[0], F.instance_norm(whole.detach()))


@pytest.mark.parametrize("change", [lambda volume: volume.add_(1.0), change], ids=["by an operator", "past operators"])
@pytest.mark.parametrize("state", STATES)
def test_a_slab_that_changed_itself_is_not_written_again(
    whole: Tensor, state: str, change: Callable[[ShardedVolume], object]
) -> None:
    """An operator changes what torch would change; past the operators a slab must have been written."""
    volume = norm_of(cut(whole), state)
    if state in ("waiting", "released"):
        volume.pending.lend(volume)
    change(volume)
    volume.pending.release(volume)
    assert not isinstance(volume.pending, Released)
    assert volume.pending.find_recipe(volume) is None
    torch.testing.assert_close(volume.slabs[0].detach(), F.instance_norm(whole).detach() + 1.0)


def test_a_slab_that_comes_back_is_the_same_tensor_unchanged(whole: Tensor) -> None:
    volume = norm_of(cut(whole), "written")
    (slab,) = volume._slabs
    version, saved = slab._version, slab.detach().clone()
    for _ in range(2):
        volume.pending.release(volume)
        assert volume.pending.lend(volume)[0] is slab
        assert slab._version == version
        assert torch.equal(slab, saved)


def test_what_waits_is_written_in_the_modes_of_its_moment(whole: Tensor) -> None:
    weight = torch.ones(2, dtype=torch.float64, requires_grad=True)
    volume = F.instance_norm(cut(whole), weight=weight)
    with torch.no_grad():
        without = F.instance_norm(cut(whole), weight=weight)
        weight.requires_grad_(False)
        (slab,) = volume.slabs
        weight.requires_grad_(True)
    assert slab.requires_grad
    assert not without.slabs[0].requires_grad
    slab.square().sum().backward()
    assert weight.grad is not None


def test_a_state_does_not_keep_its_volume(whole: Tensor) -> None:
    """Memory comes back with the last reference, not with the next garbage collection."""
    import gc
    import weakref

    gc.disable()
    try:
        for state in STATES:
            volume = norm_of(cut(whole), state)
            slab = weakref.ref(volume._slabs[0])
            reference = weakref.ref(volume)
            del volume
            assert reference() is None
            assert state == "waiting" or slab() is None
    finally:
        gc.enable()


def test_a_skip_that_waits_for_its_join(whole: Tensor) -> None:
    """The join reads recipes: the skip stays released, and the gradient reaches what stands behind both."""
    source = cut(whole)
    skip, low = norm_of(source, "released"), F.relu(F.instance_norm(source * 2.0))
    joined = torch.cat([skip, low], 1)
    assert isinstance(joined.pending, Waiting)
    assert isinstance(skip.pending, Released)
    assert isinstance(low.pending, Written)
    (slab,) = joined.pending.lend(joined)
    assert isinstance(skip.pending, Released)
    assert joined.pending.parts == [skip._slabs, low._slabs]
    joined.pending.release(joined)
    expected = torch.cat([F.instance_norm(whole), F.relu(F.instance_norm(whole * 2.0))], 1)
    torch.testing.assert_close(joined.slabs[0], expected)
    assert joined.slabs[0] is slab
    assert joined.pending.parts is None  # who has seen the join may wait for its gradient
    weights = torch.randn_like(expected)
    torch.testing.assert_close(
        torch.autograd.grad((slab * weights).sum(), whole), torch.autograd.grad((expected * weights).sum(), whole)
    )


def test_a_join_whose_skip_changed_is_refused(whole: Tensor) -> None:
    skip = norm_of(cut(whole), "written")
    joined = torch.cat([skip, skip], 1)
    change(skip)
    with pytest.raises(UnsupportedOperatorError, match=r"or of a join, .* changed in place before the result was used"):
        joined.settle()


def test_a_volume_that_is_sent_to_its_own_device_goes_on_waiting(whole: Tensor) -> None:
    volume = norm_of(cut(whole), "waiting")
    assert volume.cpu() is volume.to("cpu") is volume
    # On a GPU: x.cuda(None, True), with torch's positional non_blocking.
    assert convert_by_name(Tensor.cpu, (volume, None, True), {"non_blocking": True}) is volume
    assert isinstance(volume.pending, Waiting)


def test_a_join_of_joins_is_one_of_all_parts(whole: Tensor) -> None:
    source = cut(whole)
    parts = [norm_of(source, state) for state in STATES]
    inner = torch.cat(parts[:2], 1)
    outer = torch.cat([inner, parts[2], parts[3], source], 1)
    assert outer.pending.activate(LEAKY) is None
    found = outer.pending.find_recipe(outer)
    assert found is not None
    assert len(found.tensors) == 3 * 4 + 1  # a slab, scale and shift of each norm, and the source as it is
    inner.pending.release(inner)
    outer.pending.release(outer)
    normal = F.instance_norm(whole)
    torch.testing.assert_close(F.relu(outer).slabs[0], torch.cat([normal] * 4 + [whole], 1).relu())
    torch.testing.assert_close(inner.slabs[0], torch.cat([normal] * 2, 1))


@pytest.mark.parametrize("state", STATES)
def test_detached_and_checkpointed_volumes_have_its_values(whole: Tensor, state: str) -> None:
    """Autograd saves a checkpointed block's argument by detaching its shell."""
    volume = norm_of(cut(whole), state)
    detached = volume.detach()
    assert not detached.requires_grad
    assert volume.requires_grad
    torch.testing.assert_close(detached.slabs[0], F.instance_norm(whole).detach())
    assert isinstance(volume.pending, Shown)  # they share their memory: it stays
    volume = norm_of(cut(whole), state)
    result = checkpoint(lambda x: (x * x).slabs[0], volume, use_reentrant=False)
    expected = torch.autograd.grad(F.instance_norm(whole).square().sum(), whole)
    torch.testing.assert_close(torch.autograd.grad(result.sum(), whole), expected)


def recompute(source: ShardedVolume) -> tuple[ShardedVolume, RecomputedInput]:
    """Return the input of a recomputed block: a norm's recipe, without its slab."""
    volume = norm_of(source, "written")
    recipe = volume.pending.find_recipe(volume)
    assert recipe is not None
    like = torch.empty_like(volume._slabs[0], device="meta")
    waiting = RecomputedInput(recipe, [like], 0, Unchanged(recipe.tensors), requires_grad=True)
    given = ShardedVolume(waiting.stand_ins, volume.dims, volume.shape, volume.context)
    given.pending = waiting
    return given, waiting


def test_a_recomputed_input_returns_its_recipe_and_stays_unwritten(whole: Tensor) -> None:
    source = cut(whole.detach().clone())
    given, waiting = recompute(source)
    assert given.pending.find_recipe(given) is waiting.recipe
    assert given.pending.activate(LEAKY) is None
    joined = torch.cat([given, given], 1)
    torch.testing.assert_close(joined.slabs[0], torch.cat([F.instance_norm(whole)] * 2, 1).detach())
    assert given.pending is waiting
    assert held_bytes(given) == whole.element_size()
    torch.testing.assert_close(given.slabs[0].detach(), F.instance_norm(whole).detach())
    assert given.slabs[0].is_leaf
    assert given.slabs[0].requires_grad
    given, _ = recompute(source)
    change(source)
    for event in ("find_recipe", "settle", "show"):
        with pytest.raises(UnsupportedOperatorError, match="changed in place after the block ran"):
            EVENTS[event](given)


class TwoReaders(nn.Module):
    """A skip that two convolutions read, one of them through a join: released and written again in between."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv3d(1, 4, 3, padding=1), nn.Conv3d(4, 4, 3, padding=1)
        self.again, self.last = nn.Conv3d(4, 4, 3, padding=1), nn.Conv3d(8, 1, 3, padding=1)
        self.norm = nn.InstanceNorm3d(4, affine=True)
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        skip = F.leaky_relu(self.norm(self.first(x)), inplace=True)
        self.seen.append(skip)
        return self.last(torch.cat([skip, self.second(skip) + self.again(skip)], 1))


@pytest.mark.parametrize("passes", [1, 2])
def test_the_backward_pass_behind_a_release_is_torchs(passes: int) -> None:
    """Also behind a second forward pass, whose volumes are others."""
    plain = TwoReaders().double()
    images = [torch.randn(1, 1, 6, 5, 4, dtype=torch.float64) for _ in range(passes)]
    sum(plain(image).square().sum() for image in images).backward()
    expected = {name: p.grad.clone() for name, p in plain.named_parameters() if p.grad is not None}
    plain.zero_grad()
    plain.seen.clear()
    model = ModelParallel(plain, strategy="spatial", devices=["cpu"])
    results = [model(image) for image in images]
    assert [type(volume.pending) for volume in plain.seen] == [Released] * passes
    sum(result.square().sum() for result in results).backward()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name])
    for volume in plain.seen:
        assert volume.slabs[0].abs().sum() > 0


def test_in_inference_mode_slabs_wait_and_come_back() -> None:
    """Tensors have no versions there: networks run outside of it; slices and MONAI's metrics had raised."""
    net = TwoReaders()
    model = ModelParallel(net, strategy="spatial", devices=["cpu"])
    with torch.inference_mode():
        image, total = torch.randn(1, 1, 6, 5, 4), torch.zeros(1, 1, 2, 5, 4)
        result = model(image)
        total += F.instance_norm(cut(result.full_tensor(), 2))[:, :, 2:4]
        error = MSEMetric()(result, image)
    assert isinstance(net.seen[0].pending, Released)
    assert net.seen[0].slabs[0].abs().sum() > 0
    with torch.no_grad():
        wanted = net(image.clone())
        torch.testing.assert_close(total.clone(), F.instance_norm(wanted)[:, :, 2:4])
        torch.testing.assert_close(error.mean(), F.mse_loss(wanted, image))


def test_a_model_trains_after_it_predicted_in_inference_mode() -> None:
    """What is cached between steps must not become an inference tensor, which no backward pass may save."""
    layers = nn.Sequential(nn.Conv3d(1, 2, 3, padding=1), nn.InstanceNorm3d(2))
    # No slice expresses the planes of this resampling.
    plain = RunLayers(lambda net, x: F.interpolate(net.layers(x), size=(9, 7, 5), mode="trilinear"), layers=layers)
    plain = plain.double()
    model = ModelParallel(plain, strategy="spatial", devices=["cpu"] * 2)
    x = torch.randn(1, 1, 8, 6, 6, dtype=torch.float64)
    with torch.inference_mode():
        predicted = model(x.clone()).full_tensor()
    trained = model(x)
    trained.square().mean().backward()
    torch.testing.assert_close(trained.full_tensor().detach(), predicted.clone())
    assert plain.layers[0].weight.grad.abs().sum() > 0
