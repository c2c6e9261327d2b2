"""Written-out attention and layer norms that were silently wrong or broke networks."""

import copy
import gc
from collections.abc import Callable, Iterator
from typing import Any

import beside_plain
import pytest
import torch
import torch.nn.functional as F
from beside_plain import WAYS, RunLayers, assert_small, attention_by_plain_forms
from in_group import in_group
from kernels import DEVICE, INTERPRETED, with_kernels
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from volseg.device import attention, layer_norm
from volseg.errors import UnsupportedOperatorError
from volseg.parallel import FastKernels, ModelParallel

Heads = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Net(nn.Module):
    """Heads that attend to all voxels, with a bias, between convolutions."""

    def __init__(self, heads: Heads) -> None:
        super().__init__()
        self.first, self.last = nn.Conv3d(1, 6, 1), nn.Conv3d(6, 1, 1)
        self.qkv, self.bias = nn.Linear(6, 18), nn.Parameter(torch.randn(2, 8, 8))
        self.heads = heads

    def forward(self, image: Tensor) -> Tensor:
        x = self.first(image).flatten(2).transpose(1, 2)
        q, k, v = self.qkv(x).reshape(-1, 8, 3, 2, 3).permute(2, 0, 3, 1, 4)
        found = self.heads(q, k, v, self.bias).transpose(1, 2).reshape(x.shape)
        return self.last((x + found).transpose(1, 2).reshape(image.shape[0], 6, 2, 2, 2))


@pytest.fixture
def calls() -> Iterator[list[str]]:
    """Use the plain forms of the kernels on a CPU; return their calls."""
    with attention_by_plain_forms() as found:
        yield found


def compare(plain: nn.Module, x: Tensor, tolerance: float = 1e-11, shards: int = 1) -> None:
    """Compare outputs, gradients and parameters of two steps."""
    own = copy.deepcopy(plain)
    model = FastKernels(own, x.device) if shards == 1 else WAYS["two"](own)
    assert_small(beside_plain.compare(plain, model, [x], steps=2), tolerance)


def make(heads: Heads) -> tuple[Net, Tensor]:
    torch.manual_seed(0)
    return Net(heads).double(), torch.rand(2, 1, 2, 2, 2, dtype=torch.float64)


def result_changed(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    found = (q @ k.mT + bias).softmax(-1) @ v
    found += v
    return found


def result_changed_untrained(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    found = (q @ k.mT + bias).softmax(-1) @ v
    with torch.no_grad():
        found.add_(1.0)
    return found * v


def values_of_the_steps(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    weights = (q @ k.mT + bias).softmax(-1)
    return weights @ weights @ v


def weights_into_a_checkpoint(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    weights = (q @ k.mT + bias).softmax(-1)
    return checkpoint(lambda weights, v: weights @ v, weights, v, use_reentrant=False)


def values_into_a_checkpoint(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    values = q @ k.mT  # scores by their looks
    result: Tensor = checkpoint(
        lambda q, k, values: ((q @ k.mT + bias).softmax(-1) @ values)[..., :3], q, k, values, use_reentrant=False
    )
    return result


def frozen_between(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    bias.requires_grad_(False)
    scores = q @ k.mT + bias
    bias.requires_grad_(True)
    return scores.softmax(-1) @ v


def freed_from_history(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    scores = q @ k.mT * 1.0
    weights = (scores + bias).softmax(-1)
    scores.detach_()
    return weights @ v


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize(
    ("heads", "times"),
    [
        # torch's product keeps no result: it was refused to change ours, by torch, which called it a view.
        pytest.param(result_changed, 2, id="result changed"),
        pytest.param(result_changed_untrained, 2, id="result changed without gradients"),
        # AttributeError: a bias has no state.
        pytest.param(lambda q, k, v, bias: (bias / (q @ k.mT).exp()).softmax(-1) @ v, 0, id="bias by scores"),
        pytest.param(lambda q, k, v, bias: (bias / (q @ k.mT)).tanh().softmax(-1) @ v, 0, id="bias by bare scores"),
        pytest.param(values_of_the_steps, None, id="values of the steps"),
        # CheckpointError: the product waited when it was computed again, and had not before.
        pytest.param(weights_into_a_checkpoint, 0, id="weights into a checkpoint"),
        pytest.param(values_into_a_checkpoint, None, id="values into a checkpoint"),
        # The bias had a gradient, which torch does not compute.
        pytest.param(frozen_between, 0, id="frozen between"),
        # The gradient of what was detached behind a sum was lost, of norms and sums that wait as of scores.
        pytest.param(freed_from_history, 0, id="freed from history"),
    ],
)
def test_attention_that_broke(heads: Heads, times: int | None, shards: int, calls: list[str]) -> None:
    net, x = make(heads)
    compare(net, x, shards=shards)
    assert times is None or calls.count("attend") == shards * times


def test_scores_that_were_changed_behind_a_sum_had_changed_the_sum(calls: list[str]) -> None:
    """The sum was computed after the product, from the changed scores."""

    def heads(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        scores = q @ k.mT
        summed = scores + bias
        found = summed.softmax(-1) @ v
        scores.mul_(2.0)
        return found * summed.mean()

    net, x = make(heads)
    with pytest.raises(UnsupportedOperatorError, match="scores of attention were changed in place after a softmax"):
        FastKernels(net, "cpu")(x)
    assert calls


def test_steps_of_a_product_that_failed_were_marked_as_taken(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A network that goes another way then was refused a hook on the weights."""

    def fail(*_: Any) -> Any:
        calls.append("failed")
        raise torch.OutOfMemoryError("no memory")

    def heads(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        weights = (q @ k.mT + bias).softmax(-1)
        try:
            return weights @ v
        except torch.OutOfMemoryError:
            weights.register_hook(lambda gradient: gradient)
            return (weights * 1.0) @ v

    net, x = make(heads)
    monkeypatch.setattr(attention, "attend", fail)
    compare(net, x)
    assert calls == ["failed"] * 2


def test_norms_had_lost_the_gradient_of_what_was_detached_behind_them() -> None:
    def run(net: RunLayers, x: Tensor) -> Tensor:
        x = net.first(x)
        normed = net.norm(x)
        x.detach_()
        return net.last(normed)

    torch.manual_seed(0)
    first, last = nn.Conv3d(1, 4, 3, padding=1), nn.Conv3d(4, 1, 3, padding=1)
    net = RunLayers(run, first=first, last=last, norm=nn.InstanceNorm3d(4, affine=True)).double()
    compare(net, torch.rand(2, 1, 4, 4, 4, dtype=torch.float64))


Run = Callable[[RunLayers, Tensor], Tensor]


def make_lines(run: Run) -> RunLayers:
    """Return a layer norm of voxels' channels, between convolutions."""
    torch.manual_seed(0)
    return RunLayers(
        lambda net, image: net.last(run(net, net.first(image).movedim(1, -1)).movedim(-1, 1)),
        first=nn.Conv3d(1, 6, 1),
        last=nn.Conv3d(6, 1, 1),
        norm=nn.LayerNorm(6),
        wide=nn.Parameter(torch.randn(12)),
    )


def assigned(net: RunLayers, x: Tensor) -> Tensor:
    x = net.norm(x)
    x[..., 0] = 0.0
    return x


@with_kernels
@pytest.mark.parametrize(
    "run",
    [
        # RuntimeError of torch's: the norm's result was a view, which it does not let anybody change.
        pytest.param(lambda net, x: F.relu(net.norm(x), inplace=True), id="relu in place"),
        pytest.param(lambda net, x: net.norm(x).add_(x), id="sum in place"),
        pytest.param(assigned, id="assigned"),
        # Wrong numbers without a word: of weights that lie apart their neighbours were read.
        pytest.param(lambda net, x: F.layer_norm(x, (6,), net.wide[::2], net.wide[1::2]), id="strided weights"),
        pytest.param(lambda net, x: F.layer_norm(x, (6,), net.wide[:1].expand(6)), id="expanded weight"),
    ],
)
def test_layer_norms_that_broke(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:  # of a GPU's path, by tensors of a CPU
        monkeypatch.setattr(layer_norm, "on_gpu", lambda tensor: True)
        monkeypatch.setattr(layer_norm, "available", lambda: True)
    found: list[int] = []
    plain = layer_norm.normalize_lines
    monkeypatch.setattr(layer_norm, "normalize_lines", lambda *given: (found.append(1), plain(*given))[1])
    # In float32, in which torch's sums have another order.
    compare(make_lines(run).to(DEVICE), torch.rand(2, 1, 3, 2, 2, device=DEVICE), tolerance=1e-4)
    assert found


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.complex64])
def test_lines_of_other_types_are_torchs(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Integers, which torch refuses, and complex numbers were accepted."""
    monkeypatch.setattr(layer_norm, "on_gpu", lambda tensor: True)
    monkeypatch.setattr(layer_norm, "available", lambda: True)
    assert not layer_norm.takes_lines(torch.empty(3, 8, dtype=dtype), 8)
    assert layer_norm.takes_lines(torch.empty(3, 8), 8)
    monkeypatch.undo()
    assert not layer_norm.takes_lines(torch.empty(3, 8), 8)  # of a CPU


class Thrown(nn.Module):
    """Drops unread scores, which Python collects in one process only."""

    def __init__(self, then: str) -> None:
        super().__init__()
        self.qkv, self.then = nn.Linear(2, 6), then

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x.flatten(2).transpose(1, 2)).chunk(3, -1)
        kept = [q @ k.mT]
        if self.then == "behind a product":
            kept = [weights := kept[0].softmax(-1), weights @ v]
        kept.append(kept)  # type: ignore[arg-type]
        del kept
        if torch.distributed.get_rank() == 0:
            gc.collect()
        y = x * 1.0
        y.detach().detach_() if self.then == "detached" else y.relu_()
        found = (q @ k.mT).softmax(-1) @ v
        return y + found.transpose(1, 2).reshape(x.shape)


def throw_away(then: str) -> str:
    torch.manual_seed(0)
    plain, x = Thrown(then).double(), torch.randn(1, 2, 6, 2, 2, dtype=torch.float64)
    gc.collect()
    gc.disable()
    try:
        with attention_by_plain_forms():
            model = ModelParallel(copy.deepcopy(plain), strategy="spatial")
            errors = beside_plain.compare(plain, model, [x], steps=2)
            if then == "behind the pass" and torch.distributed.get_rank():
                gc.collect()
            model.strategy.context.write_waiting()
    finally:
        gc.enable()
    assert_small(errors)
    return "well"


@pytest.mark.parametrize("then", ["changed", "detached", "behind a product", "behind the pass"])
def test_scores_that_one_process_has_collected_were_gathered_by_the_others(then: str) -> None:
    """They wrote them before the next change in place, and waited for its keys."""
    assert in_group(2, throw_away, then, seconds=30) == ["well"] * 2
