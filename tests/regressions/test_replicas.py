"""Faults of replicas: differences between processes, norms in other modes, and errors of one replica."""

import copy
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from beside_plain import RunLayers
from in_group import assert_all_well, expect_refusal, in_group
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from volseg.errors import DataError, ParallelError
from volseg.parallel import DataParallel, FastKernels, ModelParallel, Pipeline, RoundSums, Spatial, join_mesh
from volseg.workflow import EpochRecord, Hook, Named, Training
from volseg.workflow.distributed import FollowedModel, GroupValidation


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), nn.Conv3d(4, 3, 3, padding=1)).double()


def wrap(net: nn.Module) -> DataParallel:
    return DataParallel(net, join_mesh(2).replicas())


def wrap_pipeline(net: nn.Module) -> DataParallel:
    return wrap(ModelParallel(net, strategy=Pipeline(split_size=1), devices=["cpu", "cpu:1"]))


def draw(batch: int = 3) -> Tensor:
    return torch.randn(batch, 1, 6, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def take_step(model: DataParallel, batch: Tensor) -> None:
    (share,) = model.replicas.shares(len(batch))
    result = model(batch[model.replicas.deal(len(batch))[share.replica]])
    result = result.full_tensor() if hasattr(result, "full_tensor") else result
    (result.square().mean() * share.weight).backward()


def compare(model: nn.Module, plain: nn.Module) -> str | None:
    for (name, a), (_, b) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        if a.requires_grad and not torch.allclose(a.grad, b.grad, rtol=1e-9, atol=1e-11):  # type: ignore[arg-type]
            return f"the gradient of {name} is off"
    return None


def is_second() -> bool:
    return dist.get_rank() == 1


# Buckets lie as each process's parameters do: sums added elements of different places.


def wrap_another_layout() -> str | None:
    net = build()
    if is_second():
        net.to(memory_format=torch.channels_last_3d)
    return expect_refusal("different networks: 1", lambda: wrap(net))


def change_layout_later() -> str | None:
    model = wrap(build())
    for _ in range(3):
        take_step(model, draw())
    if is_second():
        model.module.to(memory_format=torch.channels_last_3d)
    return expect_refusal("1.weight", lambda: take_step(model, draw()))


def train_channels_last() -> str | None:
    model = wrap(build().to(memory_format=torch.channels_last_3d))
    plain = build()
    take_step(model, draw())
    plain(draw()).square().mean().backward()
    return compare(model, plain)


# A bucket held what each process trained: another number of elements, or other parameters of the same size.


def freeze_in_one_process() -> str | None:
    model = wrap(build())
    for _ in range(3):
        take_step(model, draw())
    if is_second():
        model.get_submodule("0").weight.requires_grad_(False)
    return expect_refusal("0.weight", lambda: take_step(model, draw()))


def freeze_another_one_in_each_process() -> str | None:
    model = wrap(nn.Sequential(nn.Conv3d(1, 1, 1, bias=False), nn.Conv3d(1, 1, 1, bias=False)).double())
    for _ in range(3):
        take_step(model, draw())
    model.get_submodule(str(dist.get_rank())).weight.requires_grad_(False)
    return expect_refusal("0.weight, 1.weight", lambda: take_step(model, draw()))


def replace_by_a_frozen_one() -> str | None:
    model, plain = wrap(build()), build()
    take_step(model, draw())
    for net in (model.module, plain):
        torch.manual_seed(5)
        net[0] = nn.Conv3d(1, 4, 1).double().requires_grad_(False)  # type: ignore[index]
        net[1].zero_grad()  # type: ignore[index]
    take_step(model, draw())
    plain(draw()).square().mean().backward()
    same = torch.allclose(model.get_submodule("1").weight.grad, plain[1].weight.grad)  # type: ignore[index]
    return None if same and model.get_submodule("0").weight.grad is None else "another gradient"


def tie_in_one_process() -> str | None:
    net = build()
    net[1] = nn.Conv3d(4, 4, 3).double()  # type: ignore[index]
    net.append(nn.Conv3d(4, 4, 3).double())
    if is_second():
        net[2].weight = net[1].weight  # type: ignore[index]
    return expect_refusal("different networks: 2", lambda: wrap(net))


def wrap_in_a_wrapped_one() -> str | None:
    outer = nn.Sequential(wrap(build()), nn.Conv3d(3, 2, 1).double())
    return expect_refusal("0 is a DataParallel", lambda: wrap(outer))


def change_a_pipeline(change: Callable[[nn.Module], object]) -> str | None:
    """What was frozen, or absent, when the pipeline first ran was never summed."""
    net, plain = build(), build()
    for each in (net, plain):
        each.get_submodule("0").requires_grad_(False)
    model = wrap_pipeline(net)
    take_step(model, draw())
    model.zero_grad()
    for each in (net, plain):
        torch.manual_seed(1)
        change(each)
    take_step(model, draw())
    take_step(model, draw())  # added to the first one's gradients
    (2 * plain(draw()).square().mean()).backward()
    return compare(model, plain)


def unfreeze_in_a_pipeline() -> str | None:
    return change_a_pipeline(lambda net: net.requires_grad_(True))


def replace_in_a_pipeline() -> str | None:
    return change_a_pipeline(lambda net: net.__setitem__(1, nn.Conv3d(4, 3, 1).double()))  # type: ignore[operator]


def checkpoint_twice(net: RunLayers, x: Tensor) -> Tensor:
    return net.own(checkpoint(net.own, net.own(x), use_reentrant=True))


def share_with_a_reentrant_checkpoint() -> str | None:
    """A block's backward pass runs within another, and a parameter's gradients were summed twice."""
    model = wrap_pipeline(RunLayers(checkpoint_twice, own=nn.Conv3d(1, 1, 3, padding=1)).double())
    return expect_refusal("use_reentrant=False", lambda: take_step(model, draw()))


def cut_a_pipeline_at_other_layers() -> str | None:
    """Each replica measures its own times: sums that follow stages would add gradients of different parameters."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Conv3d(1, 1, 3, padding=1) for _ in range(3))).double()
    plain = copy.deepcopy(net)
    options = Pipeline(split_size=1, cuts=["1" if dist.get_rank() else "2"])
    take_step(wrap(ModelParallel(net, strategy=options, devices=["cpu", "cpu:1"])), draw())
    plain(draw()).square().mean().backward()
    return compare(net, plain)


def take_gradients_of_a_pipeline() -> str | None:
    """``autograd.grad`` gave the gradients of one replica, and a hook after accumulation got them."""
    model = wrap_pipeline(build())
    loss = lambda: model(draw(2)[[dist.get_rank()]]).square().mean()  # noqa: E731
    wrong = expect_refusal("was taken before", lambda: torch.autograd.grad(loss(), list(model.parameters())))
    next(model.parameters()).register_post_accumulate_grad_hook(lambda _: None)
    return wrong or expect_refusal("register_post_accumulate_grad_hook", lambda: loss().backward())


def fail_in_the_backward_pass_of_a_pipeline() -> str | None:
    """Gradients that were accumulated before it were lost."""
    model, plain = wrap_pipeline(build()), build()
    take_step(model, draw())
    plain(draw()).square().mean().backward()
    result = model(draw(2)[[dist.get_rank()]])
    handle = model.get_parameter("0.weight").register_hook(fail)
    wrong = expect_refusal("on purpose", lambda: result.sum().backward())
    handle.remove()
    with torch.no_grad():
        model(draw(2)[[dist.get_rank()]])
    return wrong or compare(model, plain)


def fail(_: Tensor) -> None:
    raise ParallelError("on purpose")


# Statistics of a batch were those of a replica's rows where the network was in evaluation mode, or torch's own
# functions were called.


class Normed(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.way = nn.Conv3d(1, 4, 1), nn.BatchNorm3d(4), way
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        if self.way == "module":
            return self.norm(x)
        if self.way == "functional":
            return F.batch_norm(x, None, None, self.norm.weight, self.norm.bias, training=True).sin()
        function = torch.ops.aten.native_batch_norm if self.way == "aten" else torch.native_batch_norm
        return function(x, self.norm.weight, self.norm.bias, None, None, True, 0.1, 1e-5)[0]


def norm_trained_in_evaluation(way: str, fast: bool) -> str | None:
    net = Normed(way)
    plain = copy.deepcopy(net)
    model = wrap(FastKernels(net, "cpu") if fast else net)
    for each in (model, plain):
        each.eval()
        each.get_submodule("norm").train()
    take_step(model, draw())
    plain(draw()).square().mean().backward()
    return compare(model, plain)


def norm_of_torch(way: str = "torch") -> str | None:
    return expect_refusal("native_batch_norm", lambda: take_step(wrap(Normed(way)), draw()))


def norm_of_aten() -> str | None:
    return norm_of_torch("aten")


def validate_as_many_as_there_are() -> str | None:
    model = wrap(FastKernels(Normed("functional"), "cpu"))
    take_step(model, draw())
    model.eval()
    with torch.no_grad():
        for _ in range(dist.get_rank()):  # the other process has no case, and must not be waited for
            model(draw())
    return None


DIFFER = [wrap_another_layout, change_layout_later, train_channels_last, freeze_in_one_process]
DIFFER += [freeze_another_one_in_each_process, replace_by_a_frozen_one, tie_in_one_process, wrap_in_a_wrapped_one]
DIFFER += [
    unfreeze_in_a_pipeline,
    replace_in_a_pipeline,
    share_with_a_reentrant_checkpoint,
    cut_a_pipeline_at_other_layers,
    take_gradients_of_a_pipeline,
    fail_in_the_backward_pass_of_a_pipeline,
    norm_of_torch,
    norm_of_aten,
    validate_as_many_as_there_are,
]


@pytest.mark.parametrize("story", DIFFER)
def test_replicas_that_differ(story: Callable[[], str | None]) -> None:
    assert_all_well(in_group(2, story))


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("way", ["module", "functional"])
def test_a_norm_that_is_trained_in_evaluation_takes_the_whole_batch(way: str, fast: bool) -> None:
    assert_all_well(in_group(2, norm_trained_in_evaluation, way, fast))


def test_sums_of_rounds() -> None:
    """The gradients of two rounds of four were taken for the whole; a parameter that is listed twice is added once."""
    parameter = nn.Parameter(torch.zeros(()))
    sums = RoundSums([parameter, parameter], 2)
    parameter.backward()
    sums.push()
    with pytest.raises(ParallelError, match=r"got 1 round\(s\)"):
        sums.put_back()
    (2 * parameter).backward()
    sums.push()
    with pytest.raises(ParallelError, match=r"got 3 round\(s\)"):
        sums.push()
    sums.put_back()
    assert parameter.grad == 3.0


class Batches:
    """Three batches of two samples, one for each process."""

    batch_size = 2

    def __len__(self) -> int:
        return 3

    def epoch(self, number: int, start: int = 0) -> Iterator[dict[str, Any]]:
        for _ in range(start, len(self)):
            yield {"image": draw(2)[[dist.get_rank()]], "case": ["a"]}


def give_other_settings() -> str | None:
    """The processes waited for each other for ever, or weighed their losses by parts of different batches."""
    mesh = join_mesh(2)
    said = expect_refusal("the same count", lambda: DataParallel(build(), mesh.replicas(4 if is_second() else 2)))
    said = said or expect_refusal(
        "the same fixed_order", lambda: DataParallel(build(), mesh.replicas(fixed_order=is_second()))
    )
    model = wrap(build())
    batches = Batches()
    batches.batch_size = 3 if is_second() else 2
    return said or expect_refusal("the same batch_size", lambda: train(model, batches))


def train(model: DataParallel, batches: Batches, *hooks: Hook) -> None:
    loss = Named(lambda logits: logits.square().mean(), ["logits"], ["loss"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    Training(model, loss, optimizer, batches, epochs=2, precision="fp32", hooks=hooks).run()


class ChangeInOneProcess(Hook):
    def on_epoch_end(self, training: Training, record: EpochRecord) -> None:
        if is_second():
            training.network.get_submodule("0").bias.data.add_(1e-12)


def change_a_value_in_one_process() -> str | None:
    """A state that one process loaded went unseen after the first two steps."""
    model = wrap(build())
    return expect_refusal("0.bias", lambda: train(model, Batches(), ChangeInOneProcess()))


@pytest.mark.parametrize("story", [give_other_settings, change_a_value_in_one_process])
def test_replicas_of_other_settings_or_values_are_refused_in_each_epoch(story: Callable[[], str | None]) -> None:
    assert_all_well(in_group(2, story))


class Unreadable:
    """A validation whose second case cannot be read."""

    examples = ()

    def __init__(self, model: ModelParallel) -> None:
        self.model = FollowedModel(model)

    def __call__(self) -> None:
        with torch.no_grad():
            self.model(torch.ones(1, 1, 8, 4, 4, dtype=torch.float64)).full_tensor()
        raise DataError("case_2 has no voxels")


def fail_in_the_leading_process() -> str:
    model = ModelParallel(build(), strategy=Spatial(), mesh=join_mesh(1, 2).spatial_group)
    validation = GroupValidation(model, None if is_second() else Unreadable(model), None)  # type: ignore[arg-type]
    try:
        validation()
    except DataError as fault:
        return str(fault)
    return "it ended well"


def test_an_error_in_a_validation_ends_its_followers() -> None:
    """They waited for the next volume."""
    assert in_group(2, fail_in_the_leading_process) == ["case_2 has no voxels"] * 2


def give_two(net: RunLayers, x: Tensor) -> tuple[Tensor, Tensor]:
    features = torch.relu(net.first(x))
    return net.main(features), net.aside(features)


def trained_by_one_head() -> list[str]:
    """Train by one of two outputs on two replicas of two slabs; return which parameters have gradients."""
    mesh = join_mesh(2, 2)
    sizes = {"first": (1, 4), "main": (4, 2), "aside": (4, 2)}
    net = RunLayers(give_two, **{name: nn.Conv3d(*size, 3, padding=1) for name, size in sizes.items()})
    model = DataParallel(ModelParallel(net, strategy=Spatial(), mesh=mesh.spatial_group), mesh.replicas())
    main, _ = model(draw(1).float())
    main.square().mean().backward()
    return [name for name, parameter in net.named_parameters() if parameter.grad is not None]


def test_an_output_that_no_loss_reads_leaves_no_gradients_of_zeros() -> None:
    """An optimizer with weight decay shrank the weights of a head that was not trained, over slabs of replicas."""
    for found in in_group(4, trained_by_one_head):
        assert found == [f"{layer}.{name}" for layer in ("first", "main") for name in ("weight", "bias")]


# A norm of an ordinary tensor took the samples of its own replica where the network ran on slabs or by fast kernels,
# and so did any norm that torch.utils.checkpoint or torch.jit ran.


def normalize(x: Tensor) -> Tensor:
    return F.batch_norm(x, None, None, training=True, eps=0.1)


@cache
def script(way: str) -> Any:
    """Return a batch norm as a function, or a module, of TorchScript."""
    return torch.jit.script(normalize if way == "function" else nn.Sequential(build_norm()))


def build_norm() -> nn.Module:
    return nn.BatchNorm3d(4, affine=False, track_running_stats=False, eps=0.1)


PLAIN, HIDDEN = ("module", "kept", "reentrant"), ("function", "hidden")
"""How the norm is called, where torch sees it, and where it is not part of the network."""


class Squeezed(nn.Module):
    """Gates a volume by one value per sample and channel from a batch norm."""

    def __init__(self, way: str = "module") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.way = nn.Conv3d(1, 4, 1), nn.Conv3d(4, 3, 1), way
        self.norm: Any = build_norm() if way in PLAIN else script(way)
        if way in HIDDEN:
            del self.norm
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).sin()
        gate = F.adaptive_avg_pool3d(x, 1)
        if self.way in ("kept", "reentrant"):
            gate = checkpoint(self.norm, gate, use_reentrant=self.way == "reentrant")
        else:
            gate = script(self.way)(gate) if self.way in HIDDEN else self.norm(gate)
        return self.last(x * gate.sigmoid())


def wrap_squeezed(kernels: str, way: str = "module") -> DataParallel:
    net, slabs = Squeezed(way), kernels == "slabs"
    mesh = join_mesh(2, 2 if slabs else 1)
    model: nn.Module = FastKernels(net, "cpu") if kernels == "fast" else net
    if slabs:
        model = ModelParallel(net, strategy="spatial", mesh=mesh.spatial_group)
    if kernels == "pipeline":
        return wrap_pipeline(net)
    return DataParallel(model, mesh.replicas())


def train_squeezed(kernels: str, way: str, samples: int) -> str | None:
    model, plain = wrap_squeezed(kernels, way), Squeezed(way)
    take_step(model, draw(samples))
    plain(draw(samples)).square().mean().backward()
    return compare(model, plain)


def test_a_norm_behind_a_pool_takes_the_whole_batch() -> None:
    """A replica of one sample had one value per channel: an untyped ValueError."""
    assert_all_well(in_group(2, train_squeezed, "torch", "module", 2))


def norm_no_sample(kernels: str, samples: int) -> str | None:
    """The first process has all rows, the other none."""
    model, plain, batch = wrap_squeezed(kernels), Squeezed(), draw(samples)
    own = batch[:0] if is_second() else batch
    if samples == 1:
        return expect_refusal("it got 1 over 2 replicas", lambda: model(own))
    model(own).square().sum().backward()
    plain(batch).square().sum().backward()
    return compare(model, plain)


@pytest.mark.parametrize("kernels", ["torch", "fast"])
@pytest.mark.parametrize("samples", [1, 3])
def test_a_replica_without_samples_counts_nothing(kernels: str, samples: int) -> None:
    """Its moments were NaN, and so were the statistics of all replicas; a batch of one value is refused on all."""
    assert_all_well(in_group(2, norm_no_sample, kernels, samples))


def refuse_norm(kernels: str, way: str, words: str) -> str | None:
    return expect_refusal(words, lambda: take_step(wrap_squeezed(kernels, way), draw()))


OUT_OF_SIGHT = [
    ("kept", "a checkpointed block"),
    ("reentrant", "a checkpointed block"),
    ("scripted", "Sequential.forward is compiled by torch.jit"),
    ("hidden", "Sequential.forward is compiled by torch.jit"),  # not a submodule of the network
    ("function", "normalize is compiled by torch.jit"),
]


@pytest.mark.parametrize(
    ("kernels", "way", "words"),
    [(kernels, *case) for kernels in ("torch", "fast") for case in OUT_OF_SIGHT]
    + [("slabs", *OUT_OF_SIGHT[4]), ("pipeline", *OUT_OF_SIGHT[4])],
)
def test_a_norm_out_of_sight_is_refused(kernels: str, way: str, words: str) -> None:
    """Checkpoints recomputed it, and TorchScript computed it, with the samples of one replica."""
    assert_all_well(in_group(4 if kernels == "slabs" else 2, refuse_norm, kernels, way, words))
