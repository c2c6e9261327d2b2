"""Estimates that were wrong, refused or endless, and side effects of tracing on its process."""

import gzip
import json
import math
import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace

import made_up_kernels
import numpy as np
import pytest
import torch
from monai.networks.nets import UNet
from ready_python import wait_until
from torch import nn
from typer.testing import CliRunner

import volseg
from tests.following import follow
from volseg import experiment
from volseg.cli import app
from volseg.device.fake_gpu import fake_device
from volseg.device.gpus import has_values, is_gpu, make_stream
from volseg.errors import ConfigError, ParallelError, UnsupportedOperatorError
from volseg.estimate import StepPlan
from volseg.estimate.candidate import Candidate, Estimate
from volseg.estimate.candidate_trace import trace_candidate
from volseg.estimate.estimator import Machine, Planned
from volseg.estimate.fake_step.meta_kernels import MetaKernels
from volseg.estimate.fake_step.tracing import tracing
from volseg.estimate.gpu_kinds import KINDS, find_kind
from volseg.estimate.instances import get_links
from volseg.estimate.network_plan import describe_network
from volseg.estimate.planning import _find_volumes
from volseg.estimate.roofline import classify
from volseg.estimate.step_memory import compute_memory_use
from volseg.estimate.trace import Allocate, Free, KernelRun, Mark, StepTrace
from volseg.experiment.network_plan import load_facts
from volseg.experiment.placement.training_work import describe_training, estimate_reserve
from volseg.lifetime import is_running
from volseg.parallel.forking import ForkedWorkers, ask_copy
from volseg.parallel.spatial.sources import Watched
from volseg.profiling.trace_file import read_trace

# Steps that are followed without a GPU, within a process that does other things too.


def build() -> nn.Module:
    return nn.Sequential(
        nn.Conv3d(1, 4, 3, padding=1), nn.BatchNorm3d(4), nn.Dropout(0.1), nn.ReLU(), nn.Conv3d(4, 2, 3, padding=1)
    )


def plan(net: nn.Module, side: int = 16) -> StepPlan:
    return volseg.plan(net, (1, 1, side, side, side), gpus=1, gpu="v100-16")


def test_random_numbers_go_on_as_if_nothing_had_been_followed() -> None:
    # A plan in the process that trains drew from torch's generator, and dropout was another one than without a plan.
    torch.manual_seed(0)
    net = build()
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002 (of networks)
    plan(net)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.random.get_state()[1].tolist() == states[2]  # noqa: NPY002


@contextmanager
def float64_by_default() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


AROUND: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "anomaly": lambda: torch.autograd.set_detect_anomaly(True),
    "float64": float64_by_default,
}


@pytest.mark.parametrize("around", AROUND)
def test_forecast_does_not_depend_on_what_goes_on_around_it(around: str) -> None:
    # ModelParallel(strategy="auto") plans within the first call, wherever that is made: refused, or other bytes.
    net = build()
    alone = plan(net)
    with AROUND[around]():
        assert plan(net).forecasts == alone.forecasts
        weight = torch.ones(2, 2, dtype=torch.float32)
        assert (weight @ weight).dtype == (torch.bfloat16 if torch.is_autocast_enabled("cpu") else torch.float32)


def test_other_threads_have_no_fake_gpus() -> None:
    # A thread that copied cases to a real GPU meanwhile would have got streams and events that wait for nothing.
    said = []

    def look() -> None:
        said.append((has_values(), is_gpu(fake_device(0)), is_gpu(torch.device("cuda", 0))))

    with tracing(find_kind("v100-16")):
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        assert is_gpu(fake_device(0))
        assert make_stream(fake_device(0)).number == 1
    assert said == [(True, False, True)]


@pytest.fixture
def uses_no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that CUDA was not used, whatever earlier tests did, because forks would inherit it."""
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: False)


def end_process_of(lost: Candidate, candidate: Candidate) -> Estimate:
    if candidate == lost:
        os._exit(9)
    return Estimate(candidate=candidate, refused="as asked")


@pytest.mark.usefixtures("uses_no_cuda")
def test_process_that_ends_while_it_follows_is_an_error() -> None:
    # `volseg plan` waited for ever: the pool began another process, and nobody told of the lost candidate.
    lost, well = Candidate(spatial=2), Candidate()
    if os.cpu_count() == 1:
        pytest.skip("one core follows in this process")
    with ForkedWorkers(lost, forks=True) as copies:
        copies.begin(end_process_of, well)
        with pytest.raises(ParallelError, match="worker process died"):
            copies.ask(end_process_of, lost)


def tell_process(shared: int, number: int) -> tuple[int, int]:
    return os.getpid(), shared + number


def tell_own_process() -> int:
    return os.getpid()


@pytest.mark.usefixtures("uses_no_cuda")
def test_copies_end_with_a_process_that_is_killed() -> None:
    # They waited for their next step for ever: each holds the other end of the pipe that it reads.
    if os.cpu_count() == 1:
        pytest.skip("one core follows in this process")
    receiver, sender = multiprocessing.Pipe(duplex=False)
    asking = os.fork()
    if asking == 0:
        with ForkedWorkers(1, forks=True) as copies:
            sender.send(copies.ask(tell_process, 2)[0])
            time.sleep(600)
    copy = receiver.recv()
    os.kill(asking, signal.SIGKILL)
    os.waitpid(asking, 0)
    wait_until(lambda: not is_running(copy), 60)


def ask_process() -> int:
    with ForkedWorkers(1, forks=True) as copies:
        asked, told = copies.ask(tell_process, 2)
    assert told == 3
    return asked


@pytest.mark.usefixtures("uses_no_cuda")
def test_processes_that_use_cuda_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    # `volseg plan --here` had asked CUDA for its GPUs, and every step failed by "CUDA error: initialization error".
    own = os.getpid()
    assert (ask_process() == own) == (os.cpu_count() == 1)
    assert ask_copy(tell_own_process) != own
    with monkeypatch.context() as patched:
        patched.setattr(torch.cuda, "is_initialized", lambda: True)
        assert ask_process() == own
        assert ask_copy(tell_own_process) == own
    # Counted by CUDA, of which torch tells copies alone.
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    assert ask_process() == own
    assert ask_copy(tell_own_process) == own


def test_processes_of_a_job_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert ask_process() == os.getpid()


def test_settings_of_the_allocator_are_those_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    # They were modelled, tested, and read by nobody.
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    net = nn.Sequential(nn.Conv3d(1, 24, 3, padding=1), nn.ReLU(), nn.Conv3d(24, 2, 3, padding=1))
    usual = plan(net, 56).forecasts[0]
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    changed = plan(net, 56).forecasts[0]
    assert usual.memory is not None
    assert changed.memory is not None
    assert changed.memory.reserved < 0.8 * usual.memory.reserved
    assert changed.memory.used == pytest.approx(usual.memory.used, rel=0.01)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:False")  # torch takes it before the other
    assert plan(net, 56).forecasts[0] == usual
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:128")
    with pytest.raises(ConfigError, match="models only expandable_segments"):
        plan(net, 56)


# Forecasts of trainings that were wrong or refused: batches on their way, regions, kernels without matrix units.


H200 = find_kind("h200")
UNET = Path(__file__).parents[2] / "configs" / "task04_unet.yaml"


def describe(*overrides: str):
    config = experiment.load_config(UNET, overrides)
    return describe_training(config, torch.bfloat16, load_facts(config))


def find_use(*overrides: str):
    work = describe("split.validation=none", *overrides).work
    (trace,) = trace_candidate(work, Candidate(kernels="fast", recorded=True), H200)
    return compute_memory_use(trace)


def test_batches_on_their_way_and_cublas_beside_them_are_counted():
    """With growing patches Task04's U-Net reserved 0.881 GiB; the estimate of the step was 0.791."""
    growth = "patch.growth=[{until: 0.5, size: [24, 32, 24]}]"
    ahead = 2 * 9 * 40 * 56 * 40 * 5  # two batches wait
    beside = estimate_reserve(describe(growth, "data.keep=memory"), 16 * 2**30)[0] - ahead
    assert find_use(growth).reserved + beside == pytest.approx(0.881 * 2**30, rel=0.03)
    assert beside == 2 * (estimate_reserve(describe("data.keep=memory"), 16 * 2**30)[0] - ahead), (
        "a stream of each size"
    )


def test_what_a_users_augmentations_take_is_said_not_to_be_counted():
    described = describe()
    own = replace(described, config=experiment.load_config(UNET, ["augmentation.own=[{name: Bias}]"]))
    plain_notes, notes = ("".join(estimate_reserve(each, 16 * 2**30)[1]) for each in (described, own))
    assert "of your own" not in plain_notes
    assert "of your own (Bias)" in notes


def test_regions_can_be_followed(tmp_path):
    """Tables of a loss were made on the host: within a function that has come by an override, modes are off."""
    told = {"labels": {"0": "background", "1": "edema", "2": "core"}, "regions": {"whole": [1, 2], "core": [2]}}
    case = [{"image": "./imagesTr/a.nii.gz", "label": "./labelsTr/a.nii.gz"}]
    told |= {"name": "Regions", "modality": {"0": "T1"}, "numTraining": 1, "training": case, "test": []}
    (tmp_path / "dataset.json").write_text(json.dumps(told), encoding="utf-8")
    described = describe(f"data.root={tmp_path}", "network={name: UNet, channels: [8, 16], strides: [2]}")
    assert described.facts.task.regions
    (trace,) = trace_candidate(described.work, Candidate(kernels="fast"), H200)
    assert compute_memory_use(trace).used > 0


def test_tensors_of_numbers_lie_where_they_are_asked_for_within_functions_that_have_overrides():
    with tracing(H200) as followed:
        (device,) = followed.devices

        def make(tensor):
            return torch.tensor([1.0, 2.0], device=device) + torch.as_tensor([1.0, 2.0], device=device) + tensor

        assert make(torch.empty(2, device=device)).device == device
    assert torch.tensor([1.0]).device == torch.device("cpu")
    assert torch.tensor.__name__ == "tensor", "torch's own again"


def make_run(name: str, *shapes: tuple[int, ...]) -> KernelRun:
    moved = 2 * sum(torch.Size(shape).numel() for shape in shapes)
    return KernelRun(name, torch.bfloat16, 0, moved, shapes, channels_last=True)


def test_depthwise_kernels_take_what_cudas_cores_do():
    """7 x 7 x 7 was forecast by bytes, twenty times too fast by its operations.

    Of 3 x 3 x 3 taps, which were measured, the operations take 4 and 6 times as long as at these cores' best.
    """
    volume = (1, 32, 128, 128, 128)
    wide, small = (make_run("convolution.depthwise._depthwise_kernel", volume, (k, 32), volume) for k in (343, 27))
    weight = make_run("convolution.depthwise._depthwise_weight_kernel", volume, volume, (21, 7, 7, 7, 32))
    operations = 2 * 343 * 32 * 128**3
    assert [classify(run)[0].flops for run in (wide, weight)] == [operations, operations]
    for run in (wide, weight):
        assert operations / 67e12 < H200.seconds(run) < 7 * operations / 67e12
    by_bytes = small.bytes_moved / 4.8e12
    assert by_bytes < H200.seconds(small) < 5 * by_bytes
    assert find_kind("a100-40").seconds(wide) > 2 * H200.seconds(wide)


def test_few_taps_of_many_channels_are_as_many_taps_of_one():
    """The estimate of a 1^3 convolution of 32 channels, as long as 27 taps, was 2.3 ms."""
    run = make_run("convolution.few_taps._forward_kernel", (1, 32, *(128,) * 3), (64, 32), (1, 64, *(128,) * 3))
    assert run.bytes_moved / 4.8e12 < H200.seconds(run) < 0.6e-3


# Forecasts that were wrong: results remembered of other arguments, passes that there are none of, refused steps.


V100, H200 = find_kind("v100-16"), find_kind("h200")
aten = torch.ops.aten


def test_a_tensor_that_was_given_twice_is_no_other():
    with tracing(V100) as followed:
        kernels = MetaKernels(followed.mode)
        one, other = (torch.empty(4, device=followed.devices[0]) for _ in range(2))
        assert kernels.run(aten.mul_.Tensor, (one, one), {}) is one
        assert kernels.run(aten.mul_.Tensor, (other, one), {}) is other


@pytest.mark.filterwarnings("ignore:TF32 acceleration")  # of a switch that is set with the others
def test_a_result_follows_torchs_switches():
    """oneDNN lays a convolution's output out with channels last; without it the same operator does not."""
    with tracing(V100) as followed:
        kernels = MetaKernels(followed.mode)
        volume = torch.empty(2, 4, 8, 8, 8).to(memory_format=torch.channels_last_3d)
        asked = volume, torch.empty(4, 4, 3, 3, 3), None, (1,) * 3, (1,) * 3, (1,) * 3, False, (0,) * 3, 1
        strides = []
        for enabled in (True, False):
            with torch.backends.mkldnn.flags(enabled=enabled):
                plain = aten.convolution.default(*asked)
                strides.append(plain.stride())
                assert kernels.run(aten.convolution.default, asked, {}).stride() == plain.stride()
    assert torch.backends.mkldnn.is_available() == (len(set(strides)) == 2), "or this tells nothing"


def test_a_view_by_another_name_is_no_pass_over_memory_and_what_is_filled_is_not_read():
    def run(followed):
        volume = followed.empty(4, 1024)
        followed.mark("step")
        aten._unsafe_view.default(volume, [1024, 4])
        aten.unsafe_split.Tensor(volume, 2)
        volume.unsqueeze_(0)
        volume.new_zeros(16)
        torch.ones_like(volume[0, 0, :8])

    (trace,) = follow(run, gpu=V100)
    runs = [event for event in trace.events if isinstance(event, KernelRun)]
    assert [(event.name, event.bytes_moved) for event in runs] == [("aten.new_zeros", 64), ("aten.ones_like", 32)]


def test_a_step_that_would_not_be_recorded_is_forecast_as_it_runs_then():
    """SGD reads the rate on the host: the training ran unrecorded, but its plan had no estimate."""
    net = nn.Conv3d(1, 2, 3, padding=1)

    def plan_for(*, fused):
        recorded = Candidate(kernels="torch", recorded=True)
        optimizer = lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=fused)  # noqa: E731
        work = describe_network(net, (1, 1, 16, 16, 16), dtype=torch.bfloat16, optimizer=optimizer)
        machine = Machine(gpu=H200, num_gpus=1, links=get_links(H200), gpu_bytes=2**37)
        return Planned(work=work, machine=machine).follow(recorded)

    eager, fused = plan_for(fused=None), plan_for(fused=True)
    assert eager.refused is fused.refused is None
    assert not eager.candidate.recorded
    assert fused.candidate.recorded
    assert eager.host_forward_seconds > fused.host_forward_seconds == 0


# Memory that a step kept and nobody wanted: of recomputed blocks, and of pipelines.


def trace(net: nn.Module, shape: Sequence[int], candidate: Candidate) -> Sequence[StepTrace]:
    """Return the allocations and frees of a network's steps under autocast."""
    return trace_candidate(describe_network(net, shape, dtype=torch.bfloat16), candidate, find_kind("h200"))


@pytest.mark.parametrize("checkpoint", ["all", "tiled"])
def test_a_recomputed_step_takes_less_than_a_plain_one(checkpoint):
    """Saved tensors of a recomputed block were kept to check for changes in place.

    Versions were compared by holding the tensors, in a list that a saved-tensor hook held, which autograd holds: V-Net
    took 1438 bytes per voxel with ``checkpoint="all"``, not 777. Results were right, and no test counted bytes.
    """

    net = UNet(3, 1, 2, (16, 32), (2,), num_res_units=2, norm="INSTANCE")
    recomputed, plain = (
        compute_memory_use(trace(net, (1, 1, 64, 64, 64), Candidate(checkpoint=each))[-1]).used
        for each in (checkpoint, None)
    )
    assert recomputed < 0.9 * plain


def test_a_version_is_watched_without_the_memory():
    tensor = torch.zeros(1000)
    storage = torch.multiprocessing.reductions.StorageWeakRef(tensor.untyped_storage())
    watched, view = Watched(tensor), tensor[:10]
    del tensor
    watched.check()
    view.add_(1)
    with pytest.raises(UnsupportedOperatorError, match=r"a tensor of shape \(1000,\) .* was changed in place"):
        watched.check()
    del view
    assert storage.expired()


def list_held_after_forward(steps: StepTrace) -> list[int]:
    """Return the bytes that are held where each step's loss begins."""
    held: dict[int, int] = {}
    found = []
    for event in steps.events:
        match event:
            case Allocate(block, size):
                held[block] = size
            case Free(block):
                held.pop(block, None)
            case Mark("loss"):
                found.append(sum(held.values()))
    return found


def test_measuring_a_network_under_autocast_leaves_no_activation_behind() -> None:
    """Autocast took what separates one measured part from the next for weights, and kept all activations and their
    gradients up to the end of the first batch: of SegResNet at 96^3 5.3 GB of 10.3 on an H200."""

    # Norms hand float32 to convolutions, which autocast casts.
    layers = [layer for _ in range(6) for layer in (nn.Conv3d(4, 4, 3, padding=1), nn.GroupNorm(2, 4))]
    net = nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), *layers)
    for steps in trace(net, (4, 1, 16, 16, 16), Candidate(pipeline=2, split_size=1)):
        first, second = list_held_after_forward(steps)
        assert first <= second


# The table counted what a kernel in place writes a second time: a fused AdamW was forecast faster than the memory.


IN_PLACE = {"aten.add_": 2, "aten._foreach_add_": 120, "aten._foreach_mul_": 60, "aten._fused_adamw_": 240}


def test_the_table_counts_each_tensor_once() -> None:
    rows = json.loads(gzip.decompress(files("volseg.estimate").joinpath("tables", "h200.json.gz").read_bytes()))["rows"]
    for row in (each for each in rows if each["name"] in IN_PLACE):
        assert len(row["shapes"]) == IN_PLACE[row["name"]], row["name"]
        itemsize = getattr(torch, row["dtype"]).itemsize
        assert row["bytes_moved"] == itemsize * sum(map(math.prod, row["shapes"]))


def test_an_optimizer_step_takes_what_reading_and_writing_takes() -> None:
    weights, lists = (93_000_000,), 4
    run = KernelRun("aten._fused_adamw_", torch.float32, 1, 4 * lists * math.prod(weights), (weights,) * lists)
    # Weights and both moments are written, too.
    least = 4 * (lists + 3) * math.prod(weights) / KINDS["h200"].peaks.bandwidth
    assert least < KINDS["h200"].seconds(run) < 1.6 * least


# ``volseg plan`` with ``patch.size=[100000,100000,100000]`` never answered: it followed hundreds of millions of pieces.


SMALL = ["--set", "network={name: UNet, channels: [4, 8, 8], strides: [4, 4]}", "--instance", "p3.2xlarge"]


def run(request, size, *arguments):
    config = str(request.config.rootpath / "configs" / "task04_vnet.yaml")
    patch = f"patch={{size: {size}, batch: 2}}"
    return CliRunner().invoke(app, ["plan", config, *SMALL, "--set", patch, *arguments])


@pytest.mark.parametrize(("side", "form"), [(100_000, []), (10**9, ["--json"])])
def test_a_patch_that_no_gpus_could_hold_is_refused_in_words(request, side, form):
    told = run(request, [side] * 3, *form)
    assert told.exit_code == 1
    assert not told.stdout
    said = str(told.exception)
    assert "take smaller patches or volumes, or a smaller batch" in said
    assert str(side) in said


@pytest.mark.parametrize("fixed", [1, 3, 6])
@pytest.mark.parametrize("per_voxel", [2000, 9000, 12000])
def test_the_largest_volume_is_found_by_few_traces(fixed, per_voxel):
    """Each aspect ratio was searched separately: up to 16 traces, three times the time."""
    asked = []

    def need(candidate, sides):
        asked.append(sides)
        total = int(fixed * 2**30 + math.prod(sides) * per_voxel)
        return math.inf if total > 1.3 * 16 * 2**30 else total

    work, machine = SimpleNamespace(batch_size=1), SimpleNamespace(gpu_bytes=16 * 2**30)
    planned = SimpleNamespace(work=work, divisors=(16, 16, 16), machine=machine, need=need)
    assert all(_find_volumes(planned, Candidate(), ((1, 1, 1), (32, 32, 48))))
    assert len(asked) <= 7


def test_what_follows_a_node_within_another_is_the_outer_nodes():
    """A profile assigned a recomputed block's later work to the last layer of its inner backward passes."""
    event, launched = made_up_kernels.event, made_up_kernels.launched
    node, numbered = "autograd::engine::evaluate_function: ", "Sequence number"
    events = [
        event("volseg: (step) 0", "user_annotation", 0, 100),
        event(f"{node}CheckpointBackward", "cpu_op", 10, 30, **{numbered: 1}),
        event(f"{node}ConvolutionBackward0", "cpu_op", 15, 10, **{numbered: 2}),
        *launched("inner", 1, 16, 1, 20, 2),
        *launched("outer", 2, 30, 1, 32, 2),
    ]
    found = {kernel.timed.name: kernel.timed.place.layer for kernel in read_trace(events, str)}
    assert found == {"inner": "2", "outer": "1"}
