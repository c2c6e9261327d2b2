from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from made_up_networks import Apply
from torch import Tensor, nn

from tests.following import count_held, count_kernels, pick
from volseg.errors import NotRecordedError, OutOfMemoryError, ParallelError, UnsupportedOperatorError
from volseg.estimate import candidate_trace
from volseg.estimate.candidate import Candidate, Work
from volseg.estimate.gpu_kinds import find_kind
from volseg.estimate.network_plan import describe_network
from volseg.estimate.step_time import select_step
from volseg.estimate.trace import Allocate, Free, Mark, Sent, StepTrace
from volseg.parallel.recorded_step import RecordedStep
from volseg.parallel.spatial.transport import halo

GPU = find_kind("h200")


def build_small() -> nn.Module:
    """Channels that no other size of the tests is a multiple of."""
    return nn.Sequential(
        nn.Conv3d(1, 6, 3, padding=1),
        nn.InstanceNorm3d(6),
        nn.LeakyReLU(inplace=True),
        nn.Conv3d(6, 10, 3, stride=2, padding=1),
        nn.BatchNorm3d(10),
        nn.ReLU(),
        nn.Conv3d(10, 10, 3, padding=1),
        nn.ReLU(),
        nn.ConvTranspose3d(10, 6, 2, stride=2),
        nn.Conv3d(6, 2, 1),
    )


def make_work(build: Callable[[], nn.Module] = build_small, shape: tuple[int, ...] = (4, 1, 32, 16, 16)) -> Work:
    return describe_network(
        build(),
        shape,
        dtype=torch.float32,
        loss=lambda outputs: outputs.float().square().mean(),
        optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True),
    )


def trace_candidate(work: Work, candidate: Candidate, **options: Any) -> tuple[StepTrace, ...]:
    # Each kernel takes so long that a pipeline of a small network has work for every stage.
    return candidate_trace.trace_candidate(work, candidate, GPU, **{"time_kernel": lambda _: 1e-3, **options})


def find_peak(trace: StepTrace) -> int:
    """Compute the peak of allocated memory, block by block."""
    held: dict[int, int] = {}
    most = 0
    for event in trace.events:
        if isinstance(event, Allocate):
            assert event.block not in held
            held[event.block] = event.size
            most = max(most, sum(held.values()))
        elif isinstance(event, Free):
            del held[event.block]
    return most


def count_sent(trace: StepTrace, kind: str) -> list[int]:
    return [event.size for event in pick(trace.events, Sent) if event.kind == kind]


def list_marks(trace: StepTrace) -> list[str]:
    return [event.name for event in pick(trace.events, Mark)]


STEP = ["step", "forward", "loss", "backward", "optimizer", "end"]


def test_one_convolution_of_a_slab_holds_its_planes_and_its_halos() -> None:
    work = make_work(lambda: nn.Conv3d(1, 6, 3, padding=1), shape=(1, 1, 64, 16, 16))
    whole = trace_candidate(work, Candidate())[0]
    inner = trace_candidate(work, Candidate(spatial=4))[-1]  # between two others
    assert inner.device == 1
    plane = 16 * 16 * 4  # bytes of floats
    sizes, inner_sizes = ({event.size for event in pick(trace.events, Allocate)} for trace in (whole, inner))
    assert 6 * 64 * plane in sizes
    assert {6 * 16 * plane, (16 + 2) * plane} <= inner_sizes  # computed; read: its planes, and one of each neighbour
    # Of the input nothing needs a gradient: only forward sends planes, one each way in each of the two steps.
    assert count_sent(inner, "halo") == [2 * plane] * 2


@pytest.mark.parametrize("candidate", [Candidate(data=2), Candidate(spatial=2), Candidate(data=2, spatial=2)])
def test_every_gradient_is_sent_once_in_a_step(candidate: Candidate) -> None:
    (trace,) = trace_candidate(make_work(), candidate)
    parameters = sum(parameter.numel() for parameter in build_small().parameters())
    numbers = sum(1 for _ in build_small().parameters())  # one behind each gradient, which tells how it lies in memory
    sums = (candidate.data > 1) + (candidate.spatial > 1)
    gradients = [size for size in count_sent(trace, "all_reduce") if size > 1000]
    assert gradients == [4 * (parameters + numbers)] * sums * 2
    assert list_marks(trace) == ["placed", *STEP, *STEP]


def test_slabs_hold_their_part_of_what_one_gpu_holds() -> None:
    work = make_work(shape=(1, 1, 128, 32, 32))
    (one,) = trace_candidate(work, Candidate())
    (slab,) = trace_candidate(work, Candidate(spatial=4))
    # A quarter, and of each activation at most three planes of room on both sides of 32 or more.
    assert 0.25 <= find_peak(slab) / find_peak(one) <= 0.25 * (1 + 6 / 32) + 0.02


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_every_stage_has_its_own_parameters_and_sends_what_the_next_one_reads(stages: int) -> None:
    traces = trace_candidate(make_work(), Candidate(pipeline=stages, split_size=2))
    assert [trace.device for trace in traces] == list(range(stages))
    assert all(list_marks(trace).count("step") == 2 for trace in traces)
    used = [number for number, trace in enumerate(traces) if "aten.convolution" in count_kernels(trace.events)]
    assert len(used) >= 2
    assert used[0] == 0
    assert all(sum(count_sent(traces[number], "copy")) > 0 for number in used)


def test_a_pipeline_that_is_cut_by_hand_is_followed_with_that_cut() -> None:
    traces = trace_candidate(make_work(), Candidate(pipeline=2, split_size=2, cuts=("8",)))
    counts = [count_kernels(select_step(trace.events))["aten.convolution"] for trace in traces]
    assert counts == [2 * 3, 2 * 2]  # two micro-batches; the last two layers have a convolution each


def find_last(trace: StepTrace, name: str) -> int:
    return len(trace.events) - 1 - trace.events[::-1].index(Mark(name))


def list_pools(trace: StepTrace) -> set[str]:
    return {event.pool for event in pick(trace.events, Allocate)} - {""}


def test_a_recorded_pipeline_has_memory_of_its_own_and_later_steps_run_no_kernel() -> None:
    candidate = Candidate(pipeline=2, split_size=1, recorded=True)
    traces = trace_candidate(make_work(), candidate)
    assert traces == trace_candidate(make_work(), candidate)
    for trace in traces:
        assert list_pools(trace) == {"recording 0"}
        assert "aten.convolution" not in count_kernels(trace.events[find_last(trace, "step") :])
        assert "aten.convolution" in count_kernels(select_step(trace.events))
        eager = trace_candidate(make_work(), Candidate(pipeline=2, split_size=1))[trace.device]
        held, less = (count_held(each.events[: find_last(each, "end")]) for each in (trace, eager))
        assert held > less  # received, landed and copied: for good


def test_slabs_on_gpus_of_one_process_have_a_trace_each() -> None:
    traces = trace_candidate(make_work(), Candidate(spatial=2), one_process=True)
    assert [trace.device for trace in traces] == [0, 1]
    assert all(find_peak(trace) > 0 for trace in traces)
    assert find_peak(traces[0]) < find_peak(trace_candidate(make_work(), Candidate(kernels="torch"))[0])


@pytest.mark.parametrize("candidate", [Candidate(spatial=2, recorded=True), Candidate(kernels="torch", recorded=True)])
def test_a_recorded_step_has_memory_of_its_own_and_is_replayed(candidate: Candidate) -> None:
    """Hooks that held what notes the step stopped the recording; its pool was there, and the step ran beside it."""
    (trace,) = trace_candidate(make_work(), candidate)
    marks = list_marks(trace)
    assert marks.count("step") == candidate_trace.NUM_STEPS + 2
    assert marks.count("forward") == candidate_trace.NUM_STEPS + 1  # the recording has one
    assert marks.index("empty_cache") < marks.index("record") < marks.index("replay")
    assert marks[-3:] == ["step", "replay", "end"]
    assert len(list_pools(trace)) == 1
    assert not pick(trace.events[find_last(trace, "replay") :], Allocate)


def test_gradients_are_summed_on_a_stream_of_their_own() -> None:
    """Autograd puts a node's backward on the stream of its forward only where streams are real."""
    (trace,) = trace_candidate(make_work(), Candidate(spatial=2))
    taken = pick(trace.events, Allocate)
    assert len({event.stream for event in taken}) == 2
    parameters = sum(parameter.numel() * 4 for parameter in build_small().parameters())
    aside = max(event.size for event in taken if event.stream)
    assert 0 < aside < 2 * parameters  # one bucket, its parts at addresses that kernels like


class Attending(nn.Module):
    """Layers of attention between convolutions: each voxel attends to all, of a volume or of a window."""

    def __init__(self, window: int, layers: int = 2) -> None:
        super().__init__()
        self.first, self.last = nn.Conv3d(1, 32, 1), nn.Conv3d(32, 2, 1)
        self.layers = nn.ModuleList(nn.Linear(32, 96) for _ in range(layers))
        self.window = window
        self.bias = nn.Parameter(torch.zeros(2, window, window)) if window else None

    def forward(self, image: Tensor) -> Tensor:
        with torch.autocast(image.device.type, torch.bfloat16):
            return self.attend(image)

    def attend(self, image: Tensor) -> Tensor:
        x = self.first(image).flatten(2).transpose(1, 2)
        for layer in self.layers:
            rows = x.reshape(-1, self.window or x.shape[1], 32)
            q, k, v = layer(rows).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
            scores = q @ k.transpose(-2, -1) * 0.25
            weights = (scores if self.bias is None else scores + self.bias).softmax(-1).to(v.dtype)
            x = x + (weights @ v).transpose(1, 2).reshape(x.shape)
        result: Tensor = self.last(x.transpose(1, 2).reshape(image.shape[0], 32, *image.shape[2:]))
        return result


@pytest.mark.parametrize("window", [0, 64])
def test_attention_over_slabs_has_the_kernels_and_no_more_memory_than_on_one_gpu(window: int) -> None:
    """Twice the volume on twice the GPUs: tokens meet twice as many keys, and no matrix of scores is written."""
    small, twice = (make_work(lambda: Attending(window), (1, 1, depth, 8, 8)) for depth in (32, 64))
    (one,) = trace_candidate(small, Candidate(kernels="fast"))
    (slab,) = trace_candidate(twice, Candidate(spatial=2))
    names = [count_kernels(select_step(trace.events)) for trace in (one, slab)]
    ours = {name: count for name, count in names[0].items() if name.startswith("attention_kernels.")}
    assert len(ours) == (4 if window else 3)
    assert ours.items() <= names[1].items()
    assert not [name for name in names[1] if "bmm" in name or "softmax" in name]
    # Keys and values of all in place of one's own, and of a message: 8 of their size in each layer.
    keys = 0 if window else 2 * 4096 * 32 * 2
    assert find_peak(slab) <= 1.1 * find_peak(one) + 8 * keys
    assert len([event for event in pick(select_step(slab.events), Sent) if event.kind == "halo"]) == (
        0 if window else 2 * 4
    )


def test_planes_are_sent_from_blocks_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one volume they lie in its activation as they travel, and that waited for NCCL: 40 GB for 7 that were used."""
    sizes = []
    exchange = dist.batch_isend_irecv

    def note(operations: list[dist.P2POp]) -> list[dist.Work]:
        sizes.extend((each.tensor.nbytes, each.tensor.untyped_storage().nbytes()) for each in operations)
        return exchange(operations)

    monkeypatch.setattr(dist, "batch_isend_irecv", note)
    monkeypatch.setattr(halo, "EAGER_LIMIT", 0)  # no mailbox: they go by messages
    trace_candidate(make_work(shape=(1, 1, 32, 16, 16)), Candidate(spatial=2))
    assert sizes
    assert all(moved == held for moved, held in sizes)


def test_a_step_that_would_not_be_recorded_is_refused() -> None:
    class Counts(nn.Conv3d):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x)

    with pytest.raises(ParallelError, match=r"would not be recorded: .*changes calls in Python"):
        trace_candidate(make_work(lambda: Counts(1, 2, 1)), Candidate(kernels="torch", recorded=True))


class Drops(nn.Module):
    """A block that draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.drop, self.head = nn.Conv3d(1, 6, 3, padding=1), nn.Dropout3d(0.3), nn.Conv3d(6, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(self.wide(x)))


@pytest.mark.parametrize("mesh", [{}, {"data": 2}])
def test_what_a_recording_would_refuse_is_foreseen_by_the_first_step(
    mesh: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    work = make_work(lambda: nn.Sequential(Drops()))
    candidate = Candidate(checkpoint="all", recorded=True, **mesh)
    with pytest.raises(OutOfMemoryError):  # the limit ends the trace
        trace_candidate(work, candidate, limit=1 << 12)
    for num_steps in (1, candidate_trace.NUM_STEPS + 2):  # foreseen, or refused by the attempt
        calls: list[Any] = []
        counted = replace(work, build_step=lambda *given, calls=calls: partial(_count, calls, work.build_step(*given)))
        with pytest.raises(NotRecordedError, match=r"the recomputed block .* draws random numbers"):
            trace_candidate(counted, candidate)
        assert len(calls) == num_steps
        monkeypatch.setattr(RecordedStep, "foresee_refusal", lambda _: None)


def _count(calls: list[Any], step: Callable[[Any], Any], batch: Any) -> Any:
    calls.append(None)
    return step(batch)


def test_nothing_is_really_allocated() -> None:
    work = make_work(lambda: nn.Conv3d(1, 64, 3, padding=1), shape=(1, 1, 2048, 2048, 1024))
    (trace,) = trace_candidate(work, Candidate(spatial=2))
    assert find_peak(trace) > 2**38


def test_the_strategy_refuses_in_its_own_words() -> None:
    inverts = make_work(lambda: nn.Sequential(nn.Conv3d(1, 2, 1), Apply(torch.linalg.inv)))
    refused = [
        (inverts, Candidate(spatial=2), UnsupportedOperatorError, r"inv.* has no sharded form"),
        (make_work(), Candidate(data=8), ParallelError, "8 replicas share a batch of 4"),
        (make_work(shape=(4, 1, 2, 2, 2)), Candidate(spatial=4), ParallelError, r"2, 2\) are too thin .* into 4 slabs"),
        (make_work(), Candidate(spatial=2, pipeline=2), ParallelError, "2 slabs and a network in 2 stages"),
        (
            make_work(),
            Candidate(data=2, pipeline=2),
            ParallelError,
            "calls batch_norm for training, which uses the statistics",
        ),
        (
            make_work(build_without_batch_norm),
            Candidate(data=2, pipeline=2, recorded=True),
            NotRecordedError,
            "replicas sum by hooks",
        ),
    ]
    for work, candidate, error, words in refused:
        with pytest.raises(error, match=words):
            trace_candidate(work, candidate)


def build_without_batch_norm() -> nn.Module:
    return nn.Sequential(*build_small()[:4], nn.InstanceNorm3d(10), *build_small()[5:])


@pytest.mark.parametrize("rows", [(8, 4), (7, 4), (4, 2)])
def test_a_replica_of_a_pipeline_is_a_pipeline_and_sums(rows: tuple[int, int]) -> None:
    """The one with the most rows; its sums come after the backward pass, so it hardly holds more at its peak."""
    batch, own = rows
    build = build_without_batch_norm
    replica = trace_candidate(make_work(build, (batch, 1, 32, 16, 16)), Candidate(data=2, pipeline=2, split_size=1))
    alone = trace_candidate(make_work(build, (own, 1, 32, 16, 16)), Candidate(pipeline=2, split_size=1))
    assert len(replica) == len(alone) == 2
    parameters = sum(parameter.nbytes + parameter.element_size() for parameter in build().parameters())
    summed = [count_sent(trace, "all_reduce") for trace in replica]
    assert sum(map(sum, summed)) == 2 * parameters, "each gradient and its layout's number, once in each of two steps"
    for trace, single, sent in zip(replica, alone, summed, strict=True):
        assert 0 <= find_peak(trace) - find_peak(single) < sum(summed[0]) // 2
        assert sent == summed[0] or not sent, "the first device sums for all"
        assert count_sent(single, "all_reduce") == []


@pytest.mark.parametrize("mesh", [{"data": 2}, {"data": 2, "spatial": 2}])
def test_of_unequal_replicas_the_one_with_the_most_rows_is_followed(mesh: dict[str, int]) -> None:
    """The first one was, which has the fewest: three samples on two GPUs were forecast as one on each."""
    uneven, even, small = (
        find_peak(trace_candidate(make_work(shape=(batch, 1, 32, 16, 16)), Candidate(**mesh))[0]) for batch in (3, 4, 2)
    )
    assert small < uneven == even
