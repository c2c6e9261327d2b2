"""Steps traced without a GPU, compared with steps that run on this CPU and on an H200."""

import gc
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from made_up_networks import Apply
from monai.networks.nets import DynUNet
from torch import Tensor, nn

from tests.following import count_held, count_kernels, follow, pick
from volseg.device import fusions
from volseg.device.gpus import host_values
from volseg.errors import FollowError, OutOfMemoryError
from volseg.estimate.fake_step.tracing import TracedStep, tracing
from volseg.estimate.gpu_kinds import find_kind
from volseg.estimate.trace import Allocate, Free, KernelRun, Mark, StepTrace
from volseg.parallel import FastKernels
from volseg.workflow.components import build_loss, build_optimizer
from volseg.workflow.precision import Precision

GPU = find_kind("h200")


def list_sizes(trace: StepTrace) -> list[int]:
    return [event.size for event in pick(trace.events, Allocate)]


def read_marks(trace: StepTrace) -> list[tuple[str, int]]:
    """Return the bytes that are held at each mark, in the blocks of 512 bytes of torch's allocator."""
    found, sizes, held = [], {}, 0
    for event in trace.events:
        if isinstance(event, Allocate):
            sizes[event.block] = -(-event.size // 512) * 512
            held += sizes[event.block]
        elif isinstance(event, Free):
            held -= sizes[event.block]
        elif isinstance(event, Mark):
            found.append((event.name, held))
    return found


def test_a_step_is_written_down() -> None:
    def step(followed: TracedStep) -> None:
        net = followed.copy(nn.Conv3d(1, 4, 3, padding=1, bias=False)).to(followed.devices[0])
        x = followed.empty(1, 1, 8, 8, 8)
        followed.mark("step")
        loss = net(x).square().mean()
        loss.backward()
        assert net.weight.grad is not None
        assert net.weight.grad.device == followed.devices[0]

    (trace,) = follow(step, gpu=GPU)
    assert list_sizes(trace)[:2] == [4 * 27 * 4, 8**3 * 4]
    assert 4 * 8**3 * 4 in list_sizes(trace)
    assert Mark("step") in trace.events
    (convolution,) = (run for run in pick(trace.events, KernelRun) if run.name == "aten.convolution")
    assert convolution.flops == 2 * 8**3 * 4 * 27
    assert convolution.dtype == torch.float32
    assert convolution.bytes_moved == 4 * (8**3 + 4 * 27 + 4 * 8**3)


def build_small() -> nn.Module:
    return nn.Sequential(
        nn.Conv3d(1, 8, 3, padding=1), nn.InstanceNorm3d(8, affine=True), nn.LeakyReLU(0.1, inplace=True),
        nn.MaxPool3d(2), nn.Conv3d(8, 8, 3, padding=1), nn.BatchNorm3d(8), nn.ELU(), nn.Upsample(scale_factor=2),
        nn.ConvTranspose3d(8, 4, 2, stride=2), nn.Softmax(1),
    )  # fmt: skip


def count_really_held(net: nn.Module, x: Tensor) -> int:
    """Run a forward pass on the CPU; return the bytes of all memory that is then held, by what autograd keeps."""
    memory: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        memory[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = net(x)
    for tensor in (*net.parameters(), *net.buffers(), x, out):
        keep(tensor)
    return sum(memory.values())


def test_what_is_held_after_forward_is_what_a_cpu_holds() -> None:
    torch.manual_seed(0)
    real = count_really_held(build_small(), torch.rand(2, 1, 16, 16, 16))
    found = []

    def step(followed: TracedStep) -> None:
        net, x = followed.copy(build_small()).to(followed.devices[0]), followed.empty(2, 1, 16, 16, 16)
        out = net(x)
        found.append(count_held(followed.traces()[0].events))
        out.sum().backward()

    follow(step, gpu=GPU)
    assert found == [real]


def train_thrice(followed: TracedStep) -> None:
    net = followed.copy(build_small()).to(followed.devices[0])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        followed.mark("step")
        net(followed.empty(2, 1, 16, 16, 16)).square().mean().backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def test_all_memory_is_given_back_and_the_same_is_found_again() -> None:
    (trace,), (again,) = (follow(train_thrice, gpu=GPU) for _ in range(2))
    assert trace == again
    given, taken = (sorted(event.block for event in pick(trace.events, kind)) for kind in (Free, Allocate))
    assert given == taken
    first, second, third = (held for name, held in read_marks(trace) if name == "step")
    assert first < second == third  # the optimizer's state
    assert "aten._foreach_norm" in set(count_kernels(trace.events))  # as of a GPU's gradients


@pytest.mark.parametrize("is_frozen", [False, True])
def test_who_looks_for_circles_passes_by_what_was_there_before(is_frozen: bool) -> None:
    """A recording looks for them, among a million objects of torch's modules: a quarter of a second each time."""
    was_frozen = gc.get_freeze_count() > 0  # by what forked this process, or a test before
    gc.unfreeze()
    if is_frozen:
        gc.freeze()
    try:
        found = []

        def step(followed: TracedStep) -> None:
            found.append(gc.get_freeze_count())
            circle: list[Any] = [followed.empty(8)]
            circle.append(circle)
            del circle
            assert count_held(followed.traces()[0].events) == 32
            gc.collect()
            assert count_held(followed.traces()[0].events) == 0

        follow(step, gpu=GPU)
        assert found[0] > 0
        assert (gc.get_freeze_count() > 0) == is_frozen, "what somebody else has frozen stays so"
    finally:
        gc.freeze() if was_frozen else gc.unfreeze()


HALVED = {"strides": [1, 2, 2, 2, 2], "kernel_size": [3] * 5, "upsample_kernel_size": [2] * 4}


@pytest.mark.parametrize(
    ("fast", "measured"),
    [
        (False, {"step": 219547136, "loss": 3854024192, "backward": 3854024704, "optimizer": 285729280}),
        (True, {"step": 219549696, "loss": 2158910976, "backward": 2158912000, "optimizer": 285726720}),
    ],
    ids=["torch", "fast"],
)
def test_what_is_held_is_what_an_h200_held(fast: bool, measured: dict[str, int]) -> None:
    """Of torch 2.11 on 2026-11-22, in its allocator's account: two volumes of 128^3, bfloat16, AdamW.

    ``backward`` was not read there: it is what is held at ``loss``, and the kibibyte that the loss makes. Convolutions
    over groups of voxels, which keep indices, came later.
    """

    def step(followed: TracedStep) -> None:
        with host_values():
            plain = DynUNet(3, 1, 3, filters=[32, 64, 128, 256, 320], **HALVED)
        net = followed.copy(plain)
        net = FastKernels(net, followed.devices[0]) if fast else net.to(followed.devices[0])
        image = followed.empty(2, 1, 128, 128, 128)
        label = followed.empty(2, 1, 128, 128, 128, dtype=torch.uint8)
        loss = build_loss({"name": "DiceCELoss"}, inputs=["logits", "label"], output="loss")
        optimizer = build_optimizer({"name": "AdamW", "lr": 1e-4}, net, on_gpu=True)
        for _ in range(2):
            followed.mark("step")
            with Precision.choose("auto", followed.devices[0]).autocast():
                logits = net(image)
                followed.mark("loss")
                value = loss({"logits": logits, "label": label})["loss"]
            followed.mark("backward")
            del logits
            value.backward()
            followed.mark("optimizer")
            optimizer.step()
            optimizer.zero_grad()
            del value

    with fusions.without("pairs"):
        (trace,) = follow(step, gpu=GPU)
    held = dict(read_marks(trace))  # of the second step
    assert {name: held[name] for name in measured} == measured


def test_convolutions_over_groups_of_voxels_are_followed() -> None:
    def step(followed: TracedStep) -> None:
        with host_values():
            plain = nn.Sequential(*(nn.Conv3d(channels, 32, 3, padding=1, bias=False) for channels in (1, 32)))
        net = FastKernels(followed.copy(plain), followed.devices[0])
        for _ in range(2):
            followed.mark("step")
            with Precision.choose("auto", followed.devices[0]).autocast():
                value = net(followed.empty(1, 1, 64, 64, 64)).float().square().mean()
            value.backward()
            net.zero_grad()
            del value
        followed.mark("end")

    with fusions.without("pairs"):
        (before,) = follow(step, gpu=GPU)
    (after,) = follow(step, gpu=GPU)
    grouped = [
        run for run in pick(after.events, KernelRun) if (64, 64, 3, 3, 3) in run.shapes and "convolution" in run.name
    ]
    assert [run.name for run in grouped] == ["aten.convolution_backward"] * 2, "of the weight alone, in both steps"
    assert grouped[0].flops == 2 * 64**3 // 2 * 64 * 64 * 27
    assert not [run for run in pick(before.events, KernelRun) if (64, 64, 3, 3, 3) in run.shapes]
    kept = [dict(read_marks(trace))["end"] for trace in (before, after)]
    assert kept[1] - kept[0] == 2 * 32 * 32 * 27 * 4, "where both entries of each tap stand"


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (
            Apply(lambda x: x if x.sum() > 0 else -x),
            r"Apply '1' \(made_up_networks.py, line \d+\) asks for a tensor's value .*_dense.*torch.where",
        ),
        (Apply(lambda x: x * x.mean().item()), r"Apply '1' .* asks for a tensor's value"),
        (
            Apply(lambda x: torch.from_numpy(x.cpu().numpy())),
            r"Apply '1' .* needs values of tensors, which are not there \(.*numpy",
        ),
        (Apply(lambda x: x[x > 0].sum()), r"Apply '1' .* asks for a result whose size depends on values \(aten.nonze"),
        (nn.Conv3d(2, 3, 3), r"the network refuses this step: Conv3d '1' .*expected input.*to have 2 channels"),
    ],
    ids=["a branch", "a number", "numpy", "a selection", "channels"],
)
def test_what_cannot_be_followed_is_named(module: nn.Module, words: str) -> None:
    net = nn.Sequential(nn.Identity(), module)
    with pytest.raises(FollowError, match=words):
        follow(lambda followed: followed.copy(net)(followed.empty(1, 1, 4, 4, 4)), gpu=GPU)


def test_faults_of_the_caller_pass_as_they_are() -> None:
    with pytest.raises(ZeroDivisionError):
        follow(lambda _: 1 / 0, gpu=GPU)


# What a GPU does otherwise than a CPU.


def follow_call(call: Callable[[Tensor], Tensor], x: Callable[[TracedStep], Tensor]) -> tuple[Any, list[int]]:
    """Return the stride and dtype of a result, and the bytes that it needed without the input."""
    found = []

    def step(followed: TracedStep) -> None:
        given = x(followed)
        followed.mark("step")
        out = call(given)
        found.append((out.stride(), out.dtype))

    (trace,) = follow(step, gpu=GPU)
    begin = trace.events.index(Mark("step"))
    return found[0], [event.size for event in pick(trace.events[begin:], Allocate)]


def make_volume(followed: TracedStep) -> Tensor:
    return followed.empty(2, 4, 8, 8, 8, dtype=torch.bfloat16)


def make_last(followed: TracedStep) -> Tensor:
    return make_volume(followed).contiguous(memory_format=torch.channels_last_3d)


CONTIGUOUS, LAST = (2048, 512, 64, 8, 1), (2048, 1, 256, 32, 4)
BYTES = 2 * 4 * 512 * 2


def test_group_norms_and_softmax_write_densely() -> None:
    for call in (lambda x: F.group_norm(x, 2), lambda x: F.softmax(x, 1)):
        (stride, dtype), sizes = follow_call(call, make_last)
        assert (stride, dtype) == (CONTIGUOUS, torch.bfloat16)
        assert sizes.count(BYTES) == 2  # a dense copy, and the result
    (stride, _), sizes = follow_call(F.instance_norm, make_last)
    assert stride == CONTIGUOUS


def test_convolutions_are_channels_last_if_either_tensor_is() -> None:
    def convolve(x: Tensor) -> Tensor:
        return F.conv3d(x, torch.empty(4, 4, 3, 3, 3, dtype=x.dtype, device=x.device), padding=1)

    assert follow_call(convolve, make_volume)[0][0] == CONTIGUOUS
    assert follow_call(convolve, make_last)[0][0] == LAST


def test_dropout_keeps_a_mask_of_bytes() -> None:
    _, sizes = follow_call(lambda x: F.dropout(x, 0.5), make_volume)
    assert sizes == [BYTES, BYTES // 2]
    assert follow_call(lambda x: F.dropout(x, 0.5, training=False), make_volume)[1] == []
    assert follow_call(lambda x: F.dropout(x, 0.0), make_volume)[1] == []


def test_half_precision_is_scaled() -> None:
    def step(followed: TracedStep) -> None:
        net = followed.copy(build_small()).to(followed.devices[0])
        precision, optimizer = Precision.choose("fp16", followed.devices[0]), torch.optim.RMSprop(net.parameters())
        scaler = precision.scaler()
        with precision.autocast():
            loss = net(followed.empty(1, 1, 16, 16, 16)).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    (trace,) = follow(step, gpu=find_kind("v100-16"))
    names = set(count_kernels(trace.events))
    assert {"aten._amp_foreach_non_finite_check_and_unscale_", "aten._amp_update_scale_"} <= names
    assert {run.dtype for run in pick(trace.events, KernelRun) if run.name == "aten.convolution"} == {torch.float16}


def take(followed: TracedStep) -> None:
    """Hold three times 4096 bytes at most."""
    held = followed.empty(1024)
    torch.cat([held, held])


def take_in_backward(followed: TracedStep) -> None:
    held = followed.empty(256).requires_grad_()
    twice = held * 2
    twice.register_hook(lambda grad: torch.cat([grad] * 16)[:256])
    twice.backward(torch.ones_like(twice))


def take_in_recording(followed: TracedStep) -> None:
    followed.mark("record")
    take(followed)


@pytest.mark.parametrize(
    ("step", "num_gpus", "limit", "fits"),
    [
        (take, 1, 3 * 4096, True),
        (take, 1, 3 * 4096 - 1, False),
        (take, 2, 3 * 4096 - 1, False),
        (take_in_backward, 1, 3 * 4096, False),
        # The order of requests is unsettled on several devices; and a step without the recording may need less.
        (take_in_backward, 2, 3 * 4096, True),
        (take_in_recording, 1, 4096, True),
    ],
)
def test_what_holds_more_than_a_limit_is_not_followed_to_its_end(
    step: Callable[[TracedStep], None], num_gpus: int, limit: int, fits: bool
) -> None:
    expectation = nullcontext() if fits else pytest.raises(OutOfMemoryError, match="smaller patches")
    with expectation, tracing(GPU, num_gpus, limit=limit) as followed:
        step(followed)


@pytest.mark.parametrize("error", [None, KeyError("weight")])
def test_a_step_that_catches_its_end_is_given_up_at_last(error: Exception | None) -> None:
    """Also where it raises another error in its place."""

    def step() -> None:
        with tracing(GPU, limit=4095) as followed:
            with suppress(OutOfMemoryError):
                followed.empty(1024)
            if error is not None:
                raise error
            followed.empty(8)

    with pytest.raises(OutOfMemoryError, match="smaller patches"):
        step()
