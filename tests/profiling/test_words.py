"""What is said of profiles whose numbers are made up."""

from made_up_kernels import kernel, work

from volseg.profiling.kernels import sum_device_times, sum_kinds, sum_layers
from volseg.profiling.report import DevicePeaks, ProfileReport
from volseg.profiling.table import advise, describe_limit, list_far_from_bound
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


def test_a_step_that_computes():
    report = make_report(COMPUTING, DONE)
    assert report.limit == (
        "the GPU computes 90% of the step; 50% of it are convolutions at 0.55 of the tensor cores, the next are norms "
        "(40%) at 0.80 of the memory's bandwidth"
    )
    assert advise(report) == []


def test_a_step_that_waits_for_python():
    report = make_report(
        COMPUTING, DONE, step=30.0, recorded=False, not_recorded="training.record is false"
    )  # fmt: skip
    assert report.limit.startswith("the GPU waits 70% of the step for Python, which starts its kernels one by one; ")
    (advice,) = advise(report)
    assert "2 kernels one by one" in advice
    assert "training.record is false" in advice


def test_a_step_that_waits_for_messages():
    ran = [*COMPUTING, kernel("nccl", direction="communication", start=8, seconds=4)]
    report = make_report(ran, DONE, step=12.0)
    assert report.limit.startswith(
        "25% of the step are communication that no computing hides, and the GPU computes 75%"
    )
    assert any("larger pieces" in advice for advice in advise(report))


def test_a_training_that_waits_for_batches():
    report = make_report(COMPUTING, DONE, step=20.0, batch_seconds=11.0)
    assert report.limit.startswith("the training waits 55% of the step for its batch; ")
    assert advise(report)[0].startswith("55% of the step wait for the batch")
    busy = make_report(COMPUTING, DONE, batch_seconds=9.0)
    assert busy.limit.startswith("the GPU computes 90%"), "the host waits while the GPU has steps to do"
    assert advise(busy) == []
    on_cpu = make_report(COMPUTING, DONE, batch_seconds=9.0, device="cpu", peaks=None)
    assert on_cpu.limit.startswith("the training waits 90%"), "a CPU makes its batches itself"


def test_a_step_in_float32_is_told_of_bfloat16():
    assert any("training.precision: bf16" in each for each in advise(make_report(COMPUTING, DONE, precision="float32")))


def test_kernels_that_do_next_to_nothing_reach_no_rate():
    report = make_report([kernel(seconds=5), kernel(start=5, seconds=5)], [work(flops=1, by_flops=1e-9)])
    assert report.limit.endswith("100% of it are convolutions of 2 kernels with too little work for any rate")
    assert any("a larger patch.size" in advice for advice in advise(report))


def test_a_cpu_is_no_gpu():
    report = make_report(COMPUTING, DONE, peaks=None, device="cpu", recorded=False, precision="float32")
    assert report.limit == "the CPU computes 90% of the step; 50% of it are convolutions, the next are norms (40%)"
    assert advise(report) == []


def test_what_is_far_above_its_bound_is_named_by_the_time_that_is_to_be_had():
    ran = [kernel(layer="near", seconds=3), kernel(layer="far", seconds=3), kernel(layer="tiny", seconds=1)]
    done = [work("near", by_flops=2.5), work("far", by_flops=1.0), work("tiny", by_flops=0.1)]
    assert [row.layer for row in list_far_from_bound(make_report(ran, done).layers)] == ["far", "tiny"]


def test_the_short_form_has_what_is_known_and_is_ascii():
    report = make_report([*COMPUTING, kernel("relu", layer="a.long.name" * 9, start=9, seconds=0.5)], DONE)
    lines = format_profile(report).encode("ascii").decode().splitlines()
    assert any("convolution" in line and "0.55" in line and "1.82" in line for line in lines)
    assert any(line.startswith("The GPU computes 95% of the step; ") for line in lines)
    assert "| direction |" in next(line for line in lines if line.startswith("| layer"))
    assert "bound" not in format_profile(make_report(COMPUTING, peaks=None))
