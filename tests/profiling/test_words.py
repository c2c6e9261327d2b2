"""The sentences of profiles with constructed numbers."""

import re

import pytest
from made_up_kernels import kernel, work

from volseg.profiling.kernels import sum_device_times, sum_kinds, sum_layers
from volseg.profiling.report import DevicePeaks, ProfileReport
from volseg.profiling.table import advise, describe_limit
from volseg.reporting.profile import format_profile

PEAKS = DevicePeaks(bytes_per_second=100.0, flops_per_second=1000.0, source="made up")


def make_report(ran, done=(), *, step=10.0, peaks=PEAKS, **told):
    devices = (sum_device_times(ran, device=0, step=step),)
    kinds = tuple(sum_kinds(ran, done, step=step, peaks=peaks))
    usual = {"device": "NVIDIA H200", "precision": "bfloat16", "recorded": True, "parallel": "one GPU"}
    report = ProfileReport(
        name="made_up", network="UNet", shape=(1, 1, 8, 8, 8), source="measured", peaks=peaks, steps=1,
        step_seconds=step, kernels_per_step=len(ran), devices=devices, kinds=kinds,
        layers=tuple(sum_layers(ran, done, step=step, peaks=peaks)), limit="", **{**usual, **told},
    )  # fmt: skip
    return report.model_copy(update={"limit": describe_limit(report)})


COMPUTING = [kernel("conv", seconds=5), kernel("batch_norm", start=5, seconds=4)]
DONE = [work(flops=2750, by_flops=2.75), work(kind="norm", moved=320, by_bytes=3.2)]


SENDING = [*COMPUTING, kernel("nccl", direction="communication", start=8, seconds=4)]
SMALL = [kernel(seconds=5), kernel(start=5, seconds=5)]
ON_CPU = {"peaks": None, "device": "cpu", "recorded": False, "precision": "float32"}


@pytest.mark.parametrize(
    ("ran", "done", "told", "limit", "advice"),
    [
        (
            COMPUTING, DONE, {},
            "the GPU computes 90% of the step; its longest kernels: convolution (50%) at 0.55 of the tensor cores, "
            "norm (40%) at 0.80 of the memory's bandwidth", [],
        ),
        (
            COMPUTING, DONE, {"step": 30.0, "recorded": False, "not_recorded": "training.record is false"},
            "the GPU waits 70% of the step for Python; the GPU computes 30% of the step; ",
            ["^70% of the step is spent waiting for Python, .* 2 kernels one by one, .*training.record is false"],
        ),
        (
            SENDING, DONE, {"step": 12.0},
            "25% of the step is communication that no computation overlaps; the GPU computes 75% of the step; ",
            ["larger pieces"],
        ),
        (
            COMPUTING, DONE, {"step": 20.0, "batch_seconds": 8.0},
            "the training waits 40% of the step for its batch; the GPU waits 15% of the step for Python; the GPU "
            "computes 45% of the step; ", ["^40% of the step is spent waiting for the batch"],
        ),
        # The host waits while the GPU has steps to do; a CPU makes its batches itself.
        (COMPUTING, DONE, {"batch_seconds": 9.0}, "the GPU computes 90%", []),
        (
            COMPUTING, DONE, {"batch_seconds": 9.0, **ON_CPU},
            "the training waits 90% of the step for its batch; the CPU computes 90%", ["waiting for the batch"],
        ),
        (COMPUTING, DONE, {"precision": "float32"}, "the GPU computes 90%", ["training.precision: bf16"]),
        (
            SMALL, [work(flops=1, by_flops=1e-9)], {},
            "the GPU computes 100% of the step; its longest kernels: convolution (100%) at 0.00 of the tensor cores",
            ["a larger patch.size"],
        ),
        (
            COMPUTING, DONE, ON_CPU,
            "the CPU computes 90% of the step; its longest kernels: convolution (50%), norm (40%)", [],
        ),
    ],
)  # fmt: skip
def test_a_step_is_told_by_its_limit_and_what_to_do(ran, done, told, limit, advice):
    report = make_report(ran, done, **told)
    assert report.limit.startswith(limit)
    found = advise(report)
    assert len(found) == len(advice)
    for words, sentence in zip(advice, found, strict=True):
        assert re.search(words, sentence)


def test_the_short_form_has_what_is_known_and_is_ascii():
    report = make_report([*COMPUTING, kernel("relu", layer="a.long.name" * 9, start=9, seconds=0.5)], DONE)
    lines = format_profile(report).encode("ascii").decode().splitlines()
    assert any("convolution" in line and "0.55" in line and "1.82" in line for line in lines)
    assert any(line.startswith("The GPU computes 95% of the step; ") for line in lines)
    assert "| direction |" in next(line for line in lines if line.startswith("| layer"))
    assert "bound" not in format_profile(make_report(COMPUTING, peaks=None))
