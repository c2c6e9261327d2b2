"""Networks that trained differently in a wrapper, or were no longer modules."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from beside_plain import RunLayers, assert_small, compare
from monai.data import MetaTensor
from torch import Tensor, nn
from traced_graphs import trace_only

from volseg.device import compiler_internals
from volseg.errors import ParallelError, UnsupportedOperatorError
from volseg.inference import window_step
from volseg.inference.predictor import _FAST as FAST
from volseg.inference.predictor import Predictor, SharedPredictor
from volseg.parallel import CompiledNetwork, DataParallel, FastKernels, ModelParallel, Spatial, join_mesh

# Networks that torch.compile has taken apart: each story ended in another training without a word.
#
# What torch.compile makes is traced, and runs by torch's kernels.


@pytest.fixture(autouse=True)
def _traced(monkeypatch):
    monkeypatch.setattr(compiler_internals, "compile_graph", trace_only)


Run = Callable[[RunLayers, Tensor], Any]


def make_heads(run: Run) -> RunLayers:
    torch.manual_seed(0)
    return RunLayers(run, first=nn.Conv3d(1, 2, 1), second=nn.Conv3d(1, 2, 1), last=nn.Conv3d(2, 1, 1)).double()


def keep_over_a_break(net: RunLayers, x: Tensor) -> Tensor:
    """A list used across a graph break is an output of the first graph, used or not."""
    features = [net.first(x), net.second(x)]
    torch._dynamo.graph_break()
    return net.last(features[0]) * len(features)


def change_behind_a_break(net: RunLayers, x: Tensor) -> Tensor:
    """Both are used, and one is changed in place."""
    first, second = net.first(x), net.second(x)
    torch._dynamo.graph_break()
    return net.last(first.relu_()) + second.sum(1, keepdim=True)


def give_views(net: RunLayers, x: Tensor) -> tuple[Tensor, ...]:
    """Outputs share memory, and one comes twice."""
    first = net.first(x)
    return first[:, :1], first[:, 1:], net.last(net.second(x)), first


IMAGE = torch.randn(1, 1, 4, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def test_a_piece_of_which_an_output_is_left_out_is_refused():
    """Only outputs of the whole were checked: the second head got zero gradients, and decayed."""
    output = CompiledNetwork(make_heads(keep_over_a_break))(IMAGE)
    with pytest.raises(ParallelError, match=r"backward\(\) does not reach outputs \[1\] \(counted from 0\) of the 2"):
        output.sum().backward()


@pytest.mark.parametrize("run", [change_behind_a_break, give_views])
def test_what_uses_all_of_a_piece_has_the_networks_gradients(run):
    plain, net = make_heads(run), make_heads(run)
    for model in (plain, CompiledNetwork(net)):
        outputs = model(IMAGE)
        sum(output.square().sum() for output in (outputs if isinstance(outputs, tuple) else (outputs,))).backward()
    found, expected = ({name: p.grad for name, p in each.named_parameters()} for each in (net, plain))
    # float64: a chain of functions may be ordered in another way.
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


def test_a_late_hook_of_a_module_that_is_not_registered_is_called():
    """Hooks are refused where modules are found; this one, in a plain list, was skipped."""
    others = [nn.Conv3d(2, 2, 1).double()]
    plain = RunLayers(lambda net, x: others[0](net.first(x)), first=nn.Conv3d(1, 2, 1)).double()
    model = CompiledNetwork(plain)
    model(IMAGE)
    others[0].register_forward_hook(lambda module, given, output: output * 5)
    torch.testing.assert_close(model(IMAGE), plain(IMAGE))


# A wrapped network that was not any module: what its copies lost, and ``torch.compile`` and autograd made of it.


CPUS = ["cpu", "cpu:1"]

WRAPPERS: dict[str, Callable[[nn.Module], ModelParallel]] = {
    "spatial": lambda net: ModelParallel(net, strategy="spatial", devices=CPUS),
    "pipeline": lambda net: ModelParallel(net, strategy="pipeline", devices=CPUS),
    "fast": lambda net: FastKernels(net, "cpu"),
    "replicas": lambda net: DataParallel(net, join_mesh().replicas(1)),
}

each_wrapper = pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)

called: list[str] = []


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv3d(1, 2, 3, padding=1), nn.InstanceNorm3d(2), nn.LeakyReLU())


def note(module: nn.Module, args: object, result: object) -> None:
    called.append(type(module).__name__)


@each_wrapper
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_after_a_step_train_by_themselves_and_keep_the_hooks(wrap, duplicate) -> None:
    """They lost the wrapper's hooks; a context held weak references, and a placement parameters by identity."""
    plain, x = make_net().double(), torch.randn(2, 1, 8, 8, 8, dtype=torch.float64)
    model = wrap(copy.deepcopy(plain))
    model(x).sum().backward()
    handle = model.register_forward_hook(note)
    twin = duplicate(model)
    handle.remove()  # the original's alone
    model.zero_grad(), twin.zero_grad(), called.clear()
    assert_small(compare(plain, twin, [x], steps=2))
    assert called == [type(model).__name__] * 2
    assert all(one.grad is None for one in model.parameters())


def compile_model(model: nn.Module, loss: Callable) -> Callable:
    compiled = torch.compile(model, backend="eager")
    return lambda image: loss(compiled(image))


def compile_in_place(model: nn.Module, loss: Callable) -> Callable:
    model.compile(backend="eager")
    return lambda image: loss(model(image))


def compile_step(model: nn.Module, loss: Callable) -> Callable:
    return torch.compile(lambda image: loss(model(image)), backend="eager")


# The compiler itself asks each tensor that it meets for its gradient.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@each_wrapper
@pytest.mark.parametrize("compiled", [compile_model, compile_in_place, compile_step])
def test_the_compiler_had_followed_into_what_it_cannot(wrap, compiled) -> None:
    # It ended in errors of its own: about a history of slabs, about the hooks by which a pipeline observes a network.
    plain = make_net()
    model = wrap(copy.deepcopy(plain))
    image = torch.randn(2, 1, 8, 8, 8)

    def loss(outputs: Tensor) -> Tensor:
        return (outputs * outputs).mean()

    expected = loss(plain(image))
    expected.backward()
    step = compiled(model, loss)
    for _ in range(2):
        model.zero_grad()
        found = step(image)
        found.backward()
        torch.testing.assert_close(found, expected)
    for parameter, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad)


@pytest.mark.parametrize("options", [{}, {"materialize_grads": True}])
def test_derivatives_by_a_volume_were_looked_for_in_a_gathered_copy(options) -> None:
    # The copy is no part of the loss: torch said that, or the derivatives were zero where it was told to fill them in.
    model = ModelParallel(make_net(), strategy=Spatial(on_unsupported="gather"), devices=CPUS)
    volume = model(torch.randn(1, 1, 8, 8, 8))
    with pytest.raises(UnsupportedOperatorError, match=r"grad called from .*not part of the graph"):
        torch.autograd.grad((volume * volume).sum(), volume, create_graph=True, **options)


# A linear layer on slabs cast all parameters under autocast; torch casts float32 weights, and a bias at each use.


def test_a_linear_layer_is_cast_as_by_torch() -> None:
    linear = nn.Linear(6, 6)
    model = ModelParallel(nn.Sequential(linear, linear), strategy="spatial", devices=CPUS)
    with torch.autocast("cpu", torch.bfloat16):
        output = model(torch.randn(1, 2, 64, 32, 6))
    output.float().square().mean().backward()
    found = linear.bias.grad
    assert not found.equal(found.to(torch.bfloat16).float()), "rounded to 16 bits"
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(RuntimeError, match="same dtype"):
        model.double()(torch.randn(1, 2, 8, 4, 6))


def convolve_by_a_buffer(net: RunLayers, image: Tensor) -> Tensor:
    return F.conv3d(image, net.weights)


def look_at_the_type(net: RunLayers, image: Tensor) -> Tensor:
    found: Tensor = net.layer(image)
    assert type(found) is Tensor
    return found


class CalledStep:
    """Stands in for a recorded step, on a machine without a GPU."""

    def __init__(self, model: nn.Module, step: Callable[[Tensor], Tensor], **options: Any) -> None:
        self.step = step

    def __call__(self, windows: Tensor) -> Tensor:
        return self.step(windows)


@pytest.mark.parametrize(
    "net",
    [
        RunLayers(convolve_by_a_buffer, weights=nn.Buffer(torch.ones(2, 1, 1, 1, 1))),
        RunLayers(look_at_the_type, layer=nn.Conv3d(1, 2, 3, padding=1)),
    ],
    ids=["no parameters", "looks at the type"],
)
def test_a_predictor_takes_every_network_that_predicts_by_itself(
    net: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the fast kernels do not run, in whatever way it fails, torch's run."""
    image = MetaTensor(torch.rand(1, 9, 8, 8, generator=torch.Generator().manual_seed(0)))
    wanted = Predictor(model=net, num_classes=2, window=(8, 8, 8), fast=False)({"image": image})
    monkeypatch.setattr(window_step, "explain_kernel_by_kernel", lambda model: None)
    monkeypatch.setattr(window_step, "explain_absence", lambda device: None)
    monkeypatch.setattr(window_step, "RecordedStep", CalledStep)
    predictor = Predictor(model=net, num_classes=2, window=(8, 8, 8))
    for _ in range(2):
        assert torch.equal(predictor({"image": image}), wanted)


def test_torchs_replicas_on_several_gpus_are_not_recorded() -> None:
    """Their threads launch kernels on GPUs that a recording on one stream does not see."""
    net = nn.Conv3d(1, 2, 1)
    replicas = nn.DataParallel(net)
    replicas.module, replicas.device_ids = net, [0, 1]  # as on a machine with two
    for model in (replicas, nn.Sequential(replicas)):
        assert "several devices" in str(window_step.explain_kernel_by_kernel(model))


def test_a_predictor_follows_its_network_to_another_device() -> None:
    """Its recordings belong to the network's first device."""
    net, image = nn.Conv3d(1, 2, 1), MetaTensor(torch.rand(1, 8, 8, 8))
    predictor = Predictor(model=net, num_classes=2, window=(8, 8, 8))
    wanted = predictor({"image": image})
    FAST[predictor]._models, FAST[predictor]._device = (None,), torch.device("cuda", 0)
    assert torch.equal(predictor({"image": image}), wanted)


def test_a_volume_is_shared_by_predictors_in_inference_mode() -> None:
    """The volumes of the result were made in inference mode, and written to outside of it."""
    image = MetaTensor(torch.rand(1, 17, 8, 8))
    predictors = [Predictor(model=nn.Conv3d(1, 2, 1), num_classes=2, window=(8, 8, 8)) for _ in range(2)]
    with torch.inference_mode():
        (found,) = SharedPredictor(predictors).predict([{"image": image}])
    assert found.labels.shape == image.shape
