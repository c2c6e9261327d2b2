"""A wrapped network that was not any module: what its copies lost, and ``torch.compile`` and autograd made of it."""

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from volseg.errors import UnsupportedOperatorError
from volseg.parallel import DataParallel, FastKernels, ModelParallel, Spatial, join_mesh

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
def test_copies_had_lost_the_hooks_of_the_wrapper(wrap, duplicate) -> None:
    model = wrap(make_net())
    handle = model.register_forward_hook(note)
    twin = duplicate(model)
    handle.remove()  # the original's alone
    called.clear()
    twin(torch.zeros(2, 1, 8, 8, 8))
    assert called == [type(model).__name__]
    model(torch.zeros(2, 1, 8, 8, 8))
    assert called == [type(model).__name__]


class Watched(FastKernels):
    """Its hook is a method of its own."""

    calls = 0

    def count(self, *_: object) -> None:
        self.calls += 1

    def __deepcopy__(self, memo: dict) -> "Watched":
        return self._hand_over(Watched(copy.deepcopy(self.module, memo), self.device), memo)


def test_a_hook_that_is_a_method_is_the_copys_own() -> None:
    model = Watched(make_net(), "cpu")
    model.register_forward_hook(model.count)
    twin = copy.deepcopy(model)
    twin(torch.zeros(1, 1, 8, 8, 8))
    assert (model.calls, twin.calls) == (0, 1)


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


@pytest.mark.parametrize("on_unsupported", ["raise", "gather"])
@pytest.mark.parametrize("options", [{"create_graph": True}, {"create_graph": True, "materialize_grads": True}])
def test_second_derivatives_by_a_volume_were_looked_for_in_a_gathered_copy(on_unsupported, options) -> None:
    # The copy is no part of the loss: torch said that, or the derivatives were zero where it was told to fill them in.
    model = ModelParallel(make_net(), strategy=Spatial(on_unsupported=on_unsupported), devices=CPUS)
    volume = model(torch.randn(1, 1, 8, 8, 8))
    with pytest.raises(UnsupportedOperatorError, match=r"autograd\.grad|grad called from .*create_graph= is not"):
        torch.autograd.grad((volume * volume).sum(), volume, **options)
    (found,) = torch.autograd.grad((volume * volume).sum(), volume)
    torch.testing.assert_close(found.full_tensor(), 2 * volume.full_tensor())
