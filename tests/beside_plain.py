"""Run networks on slabs and plain networks in all modes, and compare them."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import plain_kernels
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from volseg.device import attention
from volseg.parallel import FastKernels, ModelParallel
from volseg.parallel.verification.comparison import (
    TOLERANCE,
    compare_values,
    default_objective,
    eager_step,
    find_net,
    list_attributes,
    name_steps,
    observe,
    observe_call,
    whole,
)

Way = Callable[[nn.Module], nn.Module]


def name_cpus(count: int) -> list[str]:
    """Return devices of different names: "cpu:1" is copied to as a second GPU is."""
    return ["cpu", *(f"cpu:{index}" for index in range(1, count))]


def on_slabs(count: int | None, **options: Any) -> Way:
    """Return the way of so many slabs in this process, or of one in each process of a group."""
    devices = None if count is None else name_cpus(count)
    return lambda net: ModelParallel(net, strategy="spatial", devices=devices, **options)


WAYS: dict[str, Way] = {
    "fast": lambda net: FastKernels(net, "cpu"),
    "one": on_slabs(1),
    "two": on_slabs(2),
    "three": on_slabs(3),
    "two axes": on_slabs(4, grid=(2, 2), axes=("D", "H")),
    "fixed order": on_slabs(2, fixed_order=True),
    "one, recomputed": on_slabs(1, checkpoint="all"),
    "two, recomputed": on_slabs(2, checkpoint="all"),
    "two, tiled": on_slabs(2, checkpoint="tiled"),
    "two, offloaded": on_slabs(2, offload=True),
    "processes": on_slabs(None),
}


class Counted(TorchDispatchMode):
    """The names of the operators that run; with ``ndim`` of those whose result has so many dims."""

    def __init__(self, ndim: int | None = None) -> None:
        super().__init__()
        self.names: list[str] = []
        self.ndim = ndim

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.ndim in (None, getattr(result, "ndim", 0)):
            self.names.append(func.overloadpacket.__name__)
        return result


class RunLayers(nn.Module):
    """Layers as attributes, and a function of the module and its inputs as ``forward``."""

    def __init__(self, run: Callable[..., Any], **layers: Any) -> None:
        super().__init__()
        for name, layer in layers.items():
            setattr(self, name, layer)
        self.run = run

    def forward(self, *inputs: Tensor, **named: Tensor) -> Any:
        return self.run(self, *inputs, **named)


def assert_small(errors: dict[str, float], tolerance: float = TOLERANCE) -> None:
    wrong = {name: error for name, error in errors.items() if not error <= tolerance}
    assert not wrong, f"largest relative errors: {wrong}"


def compare(
    plain: nn.Module,
    sharded: nn.Module,
    inputs: Sequence[Tensor],
    objective: Callable[[Any], Tensor] = default_objective,
    steps: int = 1,
) -> dict[str, float]:
    """Return the largest relative error of every value that training touches, by name.

    Both networks have the same initial values, and are changed by the steps of gradient descent.
    """
    # Networks that were built separately may differ in attributes, such as a random filler.
    one, other = (
        {f"attribute {key}": held for key, held in list_attributes(find_net(model))} for model in (plain, sharded)
    )
    ignored = frozenset(compare_values(one, other).wrong)
    theirs = observe(plain, inputs, eager_step(plain, objective), steps)
    ours = observe(sharded, inputs, eager_step(sharded, objective), steps)
    return name_steps([compare_values(a, b, ignored).errors for a, b in zip(theirs, ours, strict=True)])


def check_beside_plain(plain: nn.Module, way: Way, *inputs: Tensor, steps: int = 2) -> None:
    """Train a copy of a network in some way beside another copy, then evaluate both, in inference mode too."""
    theirs, ours = copy.deepcopy(plain), way(copy.deepcopy(plain))
    assert_small(compare(theirs, ours, inputs, steps=steps))
    others = [each.flip(-1) + 1 if each.is_floating_point() else each.flip(-1) for each in inputs]
    assert_small(compare(theirs, ours, others, steps=1))  # nothing of the first inputs is left
    theirs.eval(), ours.eval()
    for inference in (False, True):
        with torch.inference_mode(inference):
            assert_small(compare_values(observe_call(theirs, inputs), observe_call(ours, inputs)).errors)
            assert_small(compare_values(observe_call(theirs, others), observe_call(ours, others)).errors)


def assert_same_values(
    got: Mapping[str, Tensor | None], wanted: Mapping[str, Tensor | None], rtol: float = 1e-9, atol: float = 1e-9
) -> None:
    """Compare tensors by name; a gradient that the plain network does not have is none, or zero."""
    assert got.keys() == wanted.keys()
    for name, expected in wanted.items():
        ours = got[name]
        if expected is None or ours is None:
            assert ours is None or not ours.any(), name
            assert expected is None, name
        else:
            torch.testing.assert_close(ours, expected, rtol=rtol, atol=atol, msg=lambda text, n=name: f"{n}: {text}")


def assert_same_gradients(plain: nn.Module, wrap: Callable[[nn.Module], nn.Module], *size: int) -> None:
    """Compare outputs and all gradients, the input's too, of a loss that weights every voxel differently."""
    other, found = copy.deepcopy(plain), []
    for net, model in ((plain, plain), (other, wrap(other))):
        x = torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
        output = whole(model(x))
        (output * torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view(output.shape).sin()).sum().backward()
        found.append({"output": output, "x": x.grad} | {name: p.grad for name, p in net.named_parameters()})
    assert_same_values(found[1], found[0])


def measure_rounding(
    exact: nn.Module, image: Tensor, *ways: Way | None, dtype: torch.dtype | None = torch.bfloat16
) -> list[dict[str, float]]:
    """Return, by way, how far the output and all gradients under autocast are from those of float64.

    A way of None is the plain network, a ``dtype`` of None no autocast. An error is relative to the norm of its value,
    or to a thousandth of the largest one. The image has a gradient if it requires one.
    """

    def look(way: Way | None, own: torch.dtype) -> dict[str, Tensor]:
        net = copy.deepcopy(exact).to(own)
        call = net if way is None else way(net)
        with torch.autocast("cpu", dtype, enabled=dtype is not None and own == torch.float32):
            output = whole(call(given := image.detach().to(own, copy=True).requires_grad_(image.requires_grad)))
        output.to(own).square().mean().backward()
        tensors = {"image": given, **dict(net.named_parameters())}
        found = {name: tensor.grad.double() for name, tensor in tensors.items() if tensor.grad is not None}
        return found | {"output": output.detach().double()}

    wanted = look(None, torch.float64)
    least = 1e-3 * max(float(value.norm()) for name, value in wanted.items() if name != "output")
    # Of a bias in front of a norm nothing but rounding is left.
    wanted = {name: value for name, value in wanted.items() if float(value.norm()) > 1e-6 * least}
    return [
        {name: float((found[name] - value).norm()) / max(float(value.norm()), least) for name, value in wanted.items()}
        for found in (look(way, torch.float32) for way in ways)
    ]


def assert_no_coarser(ours: dict[str, float], *others: dict[str, float], more: float = 0.01) -> None:
    """Compare errors of ``measure_rounding``."""
    coarser = {name: error for name, error in ours.items() if not error <= 1.5 * max(o[name] for o in others) + more}
    assert not coarser, f"errors: {coarser}, of others: {others}"


@contextmanager
def noted(owner: Any, **plain: Callable[..., Any]) -> Iterator[list[str]]:
    """Replace functions of a module or class by others; give the names of those that were called."""
    found: list[str] = []

    def note(name: str, compute: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any, **named: Any) -> Any:
            found.append(name)
            return compute(*given, **named)

        return run

    with ExitStack() as stack:
        for name, compute in plain.items():
            stack.enter_context(patch.object(owner, name, note(name, compute)))
        yield found


@contextmanager
def attention_by_plain_forms(*widths: torch.dtype) -> Iterator[list[str]]:
    """Let a CPU take the way of attention's kernels, by their plain forms; give what was called."""
    scores = "volseg.parallel.spatial.lazy.scores"
    kernels = {"attend": plain_kernels.attend, "differentiate": plain_kernels.differentiate_attention}
    with (
        noted(attention, **kernels) as found,
        patch(f"{scores}._has_kernel", lambda slab: True),
        patch(f"{scores}.WIDTHS", {torch.float64, torch.float32, *widths}),
    ):
        yield found
