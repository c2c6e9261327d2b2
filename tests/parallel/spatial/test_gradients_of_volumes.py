"""Hooks, retained gradients and backward passes from volumes, compared with plain tensors."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from volseg.errors import UnsupportedOperatorError
from volseg.parallel.spatial import ShardedVolume
from volseg.parallel.spatial.context import Context
from volseg.parallel.spatial.transport.one_process import LocalDevices
from volseg.parallel.spatial.volume import from_whole

SHAPE = (2, 3, 8, 6, 4)


def random(seed: int) -> Tensor:
    return torch.randn(SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def hooks(x: Tensor, weight: Tensor) -> list[Any]:
    y, seen = x * 2, []
    y.register_hook(lambda gradient: seen.append(gradient))
    y.register_hook(lambda gradient: gradient * gradient.mean())
    y.register_hook(lambda gradient: gradient * 100).remove()
    y.register_hook(lambda gradient: seen.append(gradient.sum()))
    (y * weight)[:, :, :3].sum().backward()
    return [x.grad, *seen]


def retained(x: Tensor, weight: Tensor) -> list[Any]:
    y = x * 2
    y.retain_grad()
    (y * weight)[:, :, 0].sum().backward()
    gradient, y.grad = y.grad, None
    assert y.grad is None
    y.grad = weight
    return [x.grad, gradient, y.grad]


def from_a_volume(x: Tensor, weight: Tensor) -> list[Any]:
    y = x.sigmoid()
    (y * y).backward(weight, retain_graph=True)
    y.backward(gradient=weight)
    torch.autograd.backward([x * 3, x.sum()], [weight, None])
    return [x.grad]


def for_some(x: Tensor, weight: Tensor) -> list[Any]:
    y = x * 2
    y.retain_grad()
    (y * weight).sum().backward(inputs=[y])
    (x * weight).backward(weight, inputs=x)
    return [x.grad, y.grad]


def class_activation(x: Tensor, weight: Tensor) -> list[Any]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv3d(3, 2, 3, padding=1), nn.InstanceNorm3d(2), nn.ReLU(), nn.Conv3d(2, 1, 1)).double()
    seen: list[Any] = []

    def keep(module: nn.Module, args: Any, output: Tensor) -> None:
        output.register_hook(seen.append)
        seen.append(output)

    net[1].register_forward_hook(keep)
    net(x).square().sum().backward()
    return [*seen, *(parameter.grad for parameter in net.parameters())]


CALLS: dict[str, Callable] = {
    call.__name__: call for call in (hooks, retained, from_a_volume, for_some, class_activation)
}
HOOKED = ("hooks", "class_activation")


@pytest.mark.parametrize("cut", [((2,), None), ((3,), None), ((2, 4), (2, 2))], ids=["D", "H", "grid"])
@pytest.mark.parametrize("name", [name for name in CALLS if name not in HOOKED])
@pytest.mark.parametrize("sharded_weight", [False, True], ids=["whole weight", "sharded weight"])
def test_gradients_asked_for_equal_those_of_one_device(
    name: str, cut: tuple[tuple[int, ...], tuple[int, int] | None], sharded_weight: bool
) -> None:
    call, (dims, grid) = CALLS[name], cut
    devices = ["cpu", "cpu:1"] if grid is None else ["cpu", "cpu:1", "cpu:2", "cpu:3"]
    context = Context(LocalDevices(devices, grid))
    expected = call(random(0).requires_grad_(), random(1))
    volume = from_whole(random(0), dims, context)
    volume.requires_grad = True
    actual = call(volume, from_whole(random(1), dims, context) if sharded_weight else random(1))
    whole = [v.full_tensor() if isinstance(v, ShardedVolume) else v for v in tree_leaves(actual)]
    torch.testing.assert_close(whole, tree_leaves(expected))


def volume() -> Any:
    return from_whole(random(0).requires_grad_(), (2,), Context(LocalDevices(["cpu", "cpu:1"]))) * 1


def hooked_module(x: ShardedVolume) -> None:
    net = nn.Conv3d(3, 1, 1).double()
    net.register_full_backward_hook(lambda *_: None)
    net(x).sum()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: x.register_hook(print), r"more than one slab are not supported: use retain_grad"),
        (hooked_module, r"full backward hook.*output\.register_hook"),
        (lambda x: x.backward(), "needs a gradient for each voxel"),
        (lambda x: torch.autograd.grad((x * x).sum(), x), r"retain_grad\(\) and backward\(\)"),
        (lambda x: x.register_post_accumulate_grad_hook(print), "no sharded form"),
    ],
)
def test_what_is_refused(call: Callable, message: str) -> None:
    with pytest.raises(UnsupportedOperatorError, match=message):
        call(volume())


LAID: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x.contiguous(),
    "channels last": lambda x: x.to(memory_format=torch.channels_last_3d),
}
ASKED: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "hook": lambda x, y: y.register_hook(lambda gradient: gradient * 2),
    "retained": lambda x, y: y.retain_grad(),
}


@pytest.mark.parametrize("devices", [["cpu"], ["cpu", "cpu:1"]], ids=len)
@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("laid", LAID)
def test_the_gradient_of_what_is_perhaps_the_volume_itself_is_refused(
    laid: str, asked: str, devices: list[str]
) -> None:
    """A hook on x.contiguous() got one path's gradient only, but torch returns x itself."""
    x = from_whole(random(0).requires_grad_(), (2,), Context(LocalDevices(devices))) * 1
    with pytest.raises(UnsupportedOperatorError, match="depends on the memory layout of the whole volume"):
        ASKED[asked](x, LAID[laid](x))


def test_mistakes_that_torch_reports() -> None:
    with pytest.raises(RuntimeError, match="doesn't require gradient"):
        volume().detach().register_hook(print)
    with pytest.raises(RuntimeError, match="gradient has shape"):
        volume().backward(random(1)[:, :, :4])
