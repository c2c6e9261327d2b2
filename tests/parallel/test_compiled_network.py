"""A compiled training pass equals the network, and no part of it silently runs uncompiled."""

import copy
import gc
import logging
import pickle
import weakref

import pytest
import torch
from in_group import in_group
from monai.networks.nets import BasicUNet
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode
from traced_graphs import trace_only

from volseg.device import compiler_internals
from volseg.errors import ParallelError, UnsupportedOperatorError
from volseg.models.fit_grid import FitGrid
from volseg.parallel import CompiledNetwork, DataParallel, Replicas, join_mesh
from volseg.parallel.state.recorded import RecordedState

# float64: fused kernels sum in another order.
TOLERANCE = {"rtol": 1e-9, "atol": 1e-11}


class Heads(nn.Module):
    """Two heads, as deep supervision has them, and a number; running statistics and dropout."""

    def __init__(self, norm=nn.BatchNorm3d, dropout=0.0):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), norm(4), nn.LeakyReLU(), nn.Dropout3d(dropout))
        self.fine, self.coarse = nn.Conv3d(4, 2, 1), nn.Conv3d(4, 2, 2, stride=2)

    def forward(self, x):
        x = self.stem(x)
        return {"heads": [self.fine(x), self.coarse(x)], "number": 3}


@pytest.fixture
def traced(monkeypatch):
    """Replace only the kernels, which take seconds to compile."""
    monkeypatch.setattr(compiler_internals, "compile_graph", trace_only)


@pytest.fixture
def inductor():
    """Skip where nothing can be compiled."""
    if reason := compiler_internals.explain_no_compiler(torch.device("cpu")):
        pytest.skip(reason)


def step(model, image, optimizer):
    """Return outputs, gradients, parameters and buffers of a step."""
    optimizer.zero_grad()
    image = image.clone().requires_grad_()
    fine, coarse = model(image)["heads"]
    (fine.square().mean() + F.interpolate(coarse, scale_factor=2).abs().mean()).backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    optimizer.step()
    return [fine, coarse, image.grad, *gradients, *(value.clone() for value in model.state_dict().values())]


def assert_same_training(dtype, **tolerance):
    """Compare two steps and an evaluation of the plain network and the compiled one."""
    torch.manual_seed(0)
    plain = Heads().to(dtype)
    model = CompiledNetwork(copy.deepcopy(plain))
    pairs = [(net, torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)) for net in (plain, model)]
    for seed in (1, 2):
        image = torch.randn(2, 1, 8, 6, 4, dtype=dtype, generator=torch.Generator().manual_seed(seed))
        expected, found = (step(net, image, optimizer) for net, optimizer in pairs)
        torch.testing.assert_close(found, expected, **tolerance)
    assert model(image.requires_grad_())["number"] == plain(image)["number"] == 3
    assert model.pieces.count == 1
    plain.eval(), model.eval()
    torch.testing.assert_close(model(image), plain(image), **tolerance)
    assert model.pieces.count == 1  # evaluation runs as it is


def test_two_steps_and_an_evaluation_are_those_of_the_network(traced):
    assert_same_training(torch.float64, **TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    # float32: gradients of a few hundred voxels, summed in another order.
    [(torch.float64, TOLERANCE), (torch.float32, {"rtol": 1e-4, "atol": 1e-6})],
    ids=["float64", "float32"],
)
def test_what_inductor_makes_is_the_network(inductor, dtype, tolerance):
    assert_same_training(dtype, **tolerance)


@pytest.mark.slow
def test_a_network_of_monai_is_itself_when_compiled(inductor):
    torch.manual_seed(0)
    plain = BasicUNet(3, 1, 2, features=(4, 4, 8, 8, 8, 4)).double()
    fitted = FitGrid(copy.deepcopy(plain), divisors=(16, 16, 16)).run_by(CompiledNetwork)
    image = torch.randn(1, 1, 32, 16, 16, dtype=torch.float64)
    for net in (plain, fitted):
        net(image).square().mean().backward()
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
    torch.testing.assert_close({name: each.grad for name, each in fitted.named_parameters()}, expected, **TOLERANCE)


def test_names_copies_and_pickles_are_the_networks(traced):
    plain = FitGrid(Heads(), divisors=(2, 2, 2))
    model = copy.deepcopy(plain).run_by(CompiledNetwork)
    assert [*model.state_dict()] == [*plain.state_dict()]
    assert [name for name, _ in model.named_modules()] == [name for name, _ in plain.named_modules()]
    model.load_state_dict(plain.state_dict())
    image = torch.randn(1, 1, 4, 4, 4)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert isinstance(twin.net, CompiledNetwork)
        torch.testing.assert_close(twin(image), model(image), rtol=0, atol=0)
        assert twin.fine.weight is not model.fine.weight


def test_frozen_parameters_and_norms_stay(traced):
    model = FitGrid(Heads(), divisors=(2, 2, 2)).run_by(CompiledNetwork)
    norm = model.stem[1]
    model.stem.requires_grad_(False)
    model.hold_in_evaluation([norm])
    fine, coarse = model.train()(torch.randn(2, 1, 4, 4, 4))["heads"]
    (fine.sum() + coarse.sum()).backward()
    assert norm.num_batches_tracked == 0
    trained = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert trained == {"fine.weight", "fine.bias", "coarse.weight", "coarse.bias"}


def test_an_output_that_the_loss_leaves_out_is_refused(traced):
    """Its head would get zeros for a gradient, and by weight decay other weights than in the plain network."""
    model = CompiledNetwork(Heads())
    fine, _ = model(torch.randn(1, 1, 4, 4, 4))["heads"]
    with pytest.raises(ParallelError, match=r"backward\(\) does not reach outputs \[1\] \(counted from 0\) of the 2"):
        fine.sum().backward()


def test_autocast_and_shapes_are_each_compiled_once(traced):
    plain = Heads(nn.InstanceNorm3d)
    model = CompiledNetwork(copy.deepcopy(plain))
    for sides in ((4, 4, 4), (8, 4, 4), (4, 4, 4), (8, 4, 4)):
        image = torch.randn(1, 1, *sides)
        for cached in (True, False):  # a recording allows no cached casts, and must find what was compiled before
            with torch.autocast("cpu", torch.bfloat16, cache_enabled=cached):
                # bfloat16 has 8 bits.
                torch.testing.assert_close(model(image), plain(image), rtol=2e-2, atol=2e-2)
    assert model.pieces.count == 2


def test_dropout_drops_and_follows_the_seed(traced):
    model = CompiledNetwork(nn.Dropout3d(0.5))
    image = torch.ones(1, 64, 2, 2, 2, requires_grad=True)

    def draw():
        torch.manual_seed(3)
        return model(image)[0, :, 0, 0, 0]

    first = draw()
    assert 0 < int((first == 0).sum()) < 64
    assert torch.equal(draw(), first)


def test_a_recorded_step_finds_what_was_compiled(traced):
    model = FitGrid(Heads(nn.InstanceNorm3d), divisors=(2, 2, 2)).run_by(CompiledNetwork)
    image = torch.randn(1, 1, 4, 4, 4)

    def run():
        model.zero_grad(set_to_none=True)
        fine, coarse = model(image)["heads"]
        (fine.square().mean() + coarse.square().mean()).backward()

    run()
    state = RecordedState(model)
    state.begin()  # looks at every function of torch from here
    run()
    state.keep()
    assert model.net.pieces.count == 1
    assert state.find_change() is None
    model.stem[3].p = 0.25
    assert state.find_change() == "stem.3.p"


def test_state_that_compiled_code_puts_in_anothers_place_is_not_recorded(traced):
    class Remembers(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Conv3d(1, 1, 1)
            self.register_buffer("last", torch.zeros(1, 1, 4, 4, 4))

        def forward(self, x):
            x = self.layer(x) + self.last
            self.last = x.detach()
            return x

    model = CompiledNetwork(Remembers())
    image = torch.randn(1, 1, 4, 4, 4)
    model(image)
    state = RecordedState(model)
    state.begin()
    model(image)
    with pytest.raises(ParallelError, match="the step reads last and then replaces it with another tensor"):
        state.keep()


def test_breaks_are_told_once(traced, caplog):
    class Looks(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.other = nn.Conv3d(1, 1, 1), nn.Conv3d(1, 1, 1)

        def forward(self, x):
            x = self.one(x)
            return self.other(x) if x.abs().sum().item() > 0 else x

    caplog.set_level(logging.WARNING)
    model, plain = CompiledNetwork(net := Looks()), net
    image = torch.randn(1, 1, 2, 2, 2)
    for _ in range(3):
        torch.testing.assert_close(model(image), plain(image))
    told = [record.getMessage() for record in caplog.records if record.name.startswith("volseg")]
    assert len(told) == 1
    assert told[0].startswith("torch.compile splits Looks into graphs with Python between them, for 1 reason(s)")
    assert "in pieces" in model.explain_replicas()


class Counts(nn.Module):
    """Uses another number in each call, which is compiled into the code."""

    def __init__(self):
        super().__init__()
        self.layer, self.calls = nn.Conv3d(1, 1, 1), 0

    def forward(self, x):
        self.calls += 1
        return self.layer(x) * self.calls


def fail_to_compile(graph, inputs):
    raise ValueError("no such kernel")


@pytest.mark.parametrize(
    ("compiler", "stance", "calls", "message"),
    [
        (trace_only, "default", 20, r"cannot compile Counts \(.*more than 16 variants were needed.*kernels: torch"),
        (fail_to_compile, "default", 1, r"torch\.compile cannot compile Counts \(.*no such kernel.*kernels: torch"),
        (trace_only, "force_eager", 1, "found nothing to compile in Counts, and ran the plain network"),
    ],
    ids=["changes each time", "fails", "nothing"],
)
def test_what_cannot_be_compiled_is_refused(compiler, stance, calls, message, monkeypatch):
    monkeypatch.setattr(compiler_internals, "compile_graph", compiler)
    model, image = CompiledNetwork(Counts()), torch.ones(1, 1, 2, 2, 2)
    with torch.compiler.set_stance(stance), pytest.raises(ParallelError, match=message):
        _ = [model(image) for _ in range(calls)]


def test_hooks_are_refused_whenever_they_come(traced):
    model = CompiledNetwork(Heads())
    image = torch.randn(1, 1, 4, 4, 4)
    model(image)
    handle = model.stem[2].register_forward_hook(lambda *given: None)
    with pytest.raises(ParallelError, match=r"cannot run Heads: 'stem\.2' has a hook"):
        model(image)
    handle.remove()
    model(image)
    handle = nn.modules.module.register_module_forward_hook(lambda *given: None)
    try:
        with pytest.raises(ParallelError, match="every module has a hook"):
            model(image)
    finally:
        handle.remove()


@pytest.mark.filterwarnings("ignore:.torch.jit.script.:DeprecationWarning")  # torch's own, for jvp
def test_modes_and_tensors_that_would_run_it_plain_are_refused(traced):
    class Own(torch.Tensor):
        pass

    model = CompiledNetwork(nn.Conv3d(1, 1, 1))
    image = torch.ones(1, 1, 2, 2, 2)
    with FlopCounterMode(display=False), pytest.raises(ParallelError, match="a TorchDispatchMode or a transform of"):
        model(image)
    with pytest.raises(ParallelError, match="an argument is of type Own"):
        model(image.as_subclass(Own))
    with pytest.raises(ParallelError, match=r"a transform of torch\.func is active"):
        torch.func.vmap(model)(image[None])
    with forward_ad.dual_level(), pytest.raises(UnsupportedOperatorError, match="compiled Conv3d supports only rev"):
        model(forward_ad.make_dual(image, image))


class Scaled(nn.Module):
    """Reads an attribute that is no parameter."""

    def __init__(self):
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.ones(1)), 2.0
        self.inner = nn.Conv3d(1, 1, 1)

    def forward(self, x):
        return self.inner(x) * self.weight * self.scale


def test_another_forward_is_run_wherever_it_is_put(traced, monkeypatch):
    model, image = CompiledNetwork(Scaled()), torch.randn(1, 1, 4, 4, 4)
    before = model(image)
    monkeypatch.setattr(Scaled, "forward", lambda self, x: self.inner(x) * self.weight + 1)
    torch.testing.assert_close(model(image), before / 2 + 1)
    model.inner.forward = lambda x: x
    torch.testing.assert_close(model(image), image + 1)
    del model.inner.forward
    torch.testing.assert_close(model(image), before / 2 + 1)


def test_attributes_are_the_networks(traced):
    net, image = Scaled(), torch.randn(1, 1, 4, 4, 4)
    model = CompiledNetwork(net)
    before = model(image)
    model.scale, model.note = 3.0, "kept"
    assert (net.scale, net.note, model.scale, model.note) == (3.0, "kept", 3.0, "kept")
    torch.testing.assert_close(model(image), before * 1.5)
    model.weight = nn.Parameter(torch.full((1,), 5.0))
    assert net.weight is model.weight
    torch.testing.assert_close(model(image), before * 7.5)
    assert not vars(model).keys() & {"scale", "note", "weight"}
    with pytest.raises(AttributeError, match="'Scaled' object has no attribute 'missing'"):
        _ = model.missing


def test_nothing_of_a_network_is_kept_when_it_goes(traced):
    model = CompiledNetwork(Heads())
    fine, coarse = model(torch.randn(1, 1, 4, 4, 4))["heads"]
    (fine.sum() + coarse.sum()).backward()
    del fine, coarse
    gone = weakref.ref(model.net)
    del model
    gc.collect()
    assert gone() is None


class CallsTorchsNorm(nn.Module):
    """Past ``torch.nn.functional``, with running statistics."""

    def __init__(self, name):
        super().__init__()
        self.first, self.name = nn.Conv3d(1, 2, 1), name
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("variance", torch.ones(2))

    def forward(self, image):
        norms = {"instance_norm": torch.instance_norm, "batch_norm": torch.batch_norm}
        return norms[self.name](
            self.first(image), None, None, self.mean, self.variance, self.training, 0.1, 1e-5, False
        )


def share(net):
    return DataParallel(net, Replicas(2, None, False))


def test_replicas_refuse_norms_that_they_cannot_share(traced):
    """Compiled ones of the whole batch, and torch's own ones that move statistics."""
    image = torch.randn(1, 1, 4, 4, 4)
    share(CompiledNetwork(Heads(nn.InstanceNorm3d)))(image)
    with pytest.raises(ParallelError, match=r"cannot run under torch\.compile: compiled batch_norm would use"):
        share(CompiledNetwork(Heads()))(image)
    for name in ("instance_norm", "batch_norm"):
        with pytest.raises(ParallelError, match=f"forward calls torch.{name} in training; replicas need"):
            share(CallsTorchsNorm(name))(image)
        with pytest.raises(ParallelError, match=f"compiled {name} would use"):
            share(CompiledNetwork(CallsTorchsNorm(name)))(image)
        assert share(CallsTorchsNorm(name)).eval()(image).shape == (1, 2, 4, 4, 4)


def train_replicas():
    """Return the weights after two steps of two processes, a replica each, of a compiled network."""
    compiler_internals.compile_graph, before = trace_only, compiler_internals.compile_graph
    try:
        torch.manual_seed(0)
        model = DataParallel(CompiledNetwork(Heads(nn.InstanceNorm3d).double()), join_mesh(data=2).replicas())
        return train_on_shares(model)
    finally:
        compiler_internals.compile_graph = before


def train_on_shares(model):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    images = torch.randn(2, 3, 1, 4, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for image in images:
        optimizer.zero_grad()
        shares = model.replicas.shares(3) if isinstance(model, DataParallel) else [None]
        for share in shares:
            rows = image if share is None else image[model.replicas.deal(3)[share.replica]]
            fine, coarse = model(rows)["heads"]
            ((fine.square().mean() + coarse.abs().mean()) * (1 if share is None else share.weight)).backward()
        optimizer.step()
    return {name: value.detach().tolist() for name, value in model.named_parameters()}


def test_gradients_of_processes_are_summed():
    torch.manual_seed(0)
    expected = train_on_shares(Heads(nn.InstanceNorm3d).double())
    for found in in_group(2, train_replicas):
        assert [*found] == [*expected]
        for name, value in found.items():
            torch.testing.assert_close(torch.tensor(value), torch.tensor(expected[name]), **TOLERANCE)
