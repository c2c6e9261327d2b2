"""``volseg profile`` from end to end on a CPU: nothing here needs a GPU or data."""

import gzip
import json
import os
import signal

import pytest
import torch
from typer.testing import CliRunner

from volseg.cli import app
from volseg.errors import ConfigError
from volseg.experiment import load_config, profile_training
from volseg.experiment.network_plan import load_facts
from volseg.experiment.profiled_step import build_profiled
from volseg.experiment.profiling import watch_replays
from volseg.profiling.report import ProfileReport
from volseg.workflow import named

SMALL = [
    "network={name: UNet, channels: [4, 8], strides: [2], norm: INSTANCE}",
    "patch={size: [16, 16, 16], batch: 2}",
    "training={epochs: 7, iterations: 9, clip: 12, ema: 0.9}",
]
SET = [part for each in SMALL for part in ("--set", each)]


@pytest.fixture
def config(request):
    return str(request.config.rootpath / "configs" / "task04_cpu.yaml")


def run(*arguments):
    return CliRunner().invoke(app, ["profile", *arguments])


def test_the_verb_runs_the_step_and_writes_table_trace_and_page(config, tmp_path):
    folder = tmp_path / "made" / "here"
    told = run(config, *SET, "--steps", "2", "-o", str(folder))
    assert told.exit_code == 0, told.output
    assert "UNet, 2 x 1 x 16 x 16 x 16, float32, cpu, one device. Measured: " in told.output
    assert "CPU computes " in told.output
    assert f"written: {folder / 'profile.html'}" in told.output.replace("\n", "")
    assert sorted(file.name for file in folder.iterdir()) == [
        "profile.html", "profile.json", "profile.md", "trace.json.gz",
    ]  # fmt: skip
    report = ProfileReport.model_validate_json((folder / "profile.json").read_text(encoding="utf-8"))
    assert (report.source, report.steps, report.recorded, report.peaks) == ("measured", 2, False, None)
    rows = {(row.layer, row.direction): row for row in report.layers}
    first = rows["model.0.conv.unit0.conv", "forward"]
    assert (first.module, first.calls) == ("Conv3d", 1)
    assert rows["model.0.conv.unit0.conv", "backward"].calls >= 1
    directions = {direction for _, direction in rows}
    assert directions >= {"forward", "backward", "optimizer", "augmentation"}
    assert ("(loss)", "forward") in rows
    assert ("(loss)", "backward") in rows
    (device,) = report.devices
    assert device.computing + device.exposed + device.waiting == pytest.approx(device.step)
    assert sum(row.seconds for row in report.layers) >= device.computing * (1 - 1e-6), "of times in nanoseconds"
    trace = json.loads(gzip.decompress((folder / "trace.json.gz").read_bytes()))
    assert {"volseg: (step) 0", "volseg: (step) 1"} <= {event.get("name") for event in trace["traceEvents"]}
    page = (folder / "profile.html").read_text(encoding="utf-8")
    assert "What limits the step" in page
    assert "model.0.conv.unit0.conv" in page
    brief = (folder / "profile.md").read_text(encoding="utf-8")
    assert brief.startswith("# Profile of task04_cpu")


def test_a_gpu_that_is_not_here_is_forecast(config):
    told = run(config, *SET, "--gpu", "h200", "--json")
    assert told.exit_code == 0, told.output
    report = ProfileReport.model_validate_json(told.stdout)
    assert (report.source, report.device, report.precision) == ("forecast", "NVIDIA H200", "bfloat16")
    assert report.recorded
    (device,) = report.devices
    assert sum(row.seconds for row in report.layers) == pytest.approx(device.computing)
    rows = {(row.layer, row.direction): row for row in report.layers}
    first = rows["model.0.conv.unit0.conv", "forward"]
    assert first.bound > 0
    assert first.times_bound == pytest.approx(first.seconds / first.bound)
    assert first.flops == 2 * 2 * 8**3 * 4 * 27, "two of each multiply-add, of half the sides"
    assert ("(optimizer)", "optimizer") in rows
    assert 0 < first.bandwidth_share < 1
    assert report.step_seconds >= device.computing * 0.99


def test_two_gpus_that_are_not_here_send(config):
    told = run(config, *SET, "--set", "parallel.spatial=2", "--gpu", "h200", "--gpus", "2", "--json")
    assert told.exit_code == 0, told.output
    report = ProfileReport.model_validate_json(told.stdout)
    assert report.parallel == "spatial: 2"
    sent = [row for row in report.layers if row.direction == "communication"]
    assert sent
    assert {(row.bound, row.times_bound, row.bandwidth_share) for row in sent} == {(None, None, None)}
    (device,) = report.devices
    assert device.communicating == pytest.approx(sum(row.seconds for row in sent))
    assert device.hidden + device.exposed == pytest.approx(device.communicating)
    assert device.exposed > 0


def test_kernels_of_a_step_without_marks_are_found_in_the_marked_one(config):
    loaded = load_config(config, SMALL)
    built = build_profiled(loaded, load_facts(loaded), 1)
    seen, kernels, matched, classes = watch_replays(built, 1)
    assert matched > 0.9
    places = {kernel.place for kernel in kernels}
    assert {("model.0.conv.unit0.conv", "forward"), ("model.0.conv.unit0.conv", "backward")} <= places
    assert classes["model.0.conv.unit0.conv"] == "Conv3d"
    assert seen.seconds > 0


def test_gathered_batches_are_one_step_and_torch_sorts_no_events(config, monkeypatch):
    def sort_events(*_arguments):
        raise AssertionError("torch would make an object of each event: more than a minute on four GPUs")

    if hasattr(torch.autograd.profiler.profile, "_ensure_function_events"):  # else torch sorts them in any case
        monkeypatch.setattr(torch.autograd.profiler.profile, "_ensure_function_events", sort_events)
    loaded = load_config(config, [*SMALL, "training.accumulate=2"])
    report = profile_training(loaded, steps=1).report
    row = next(row for row in report.layers if (row.layer, row.direction) == ("model.0.conv.unit0.conv", "forward"))
    assert row.calls == 2


def test_the_schema_says_what_each_value_is():
    schema = ProfileReport.model_json_schema()
    parts = [schema, *schema["$defs"].values()]
    assert len(parts) == 5
    for part in parts:
        assert [name for name, field in part["properties"].items() if not field.get("description")] == []


def test_bad_input_is_told_in_words(config):
    told = run(config, "--gpu", "h20")
    assert told.exit_code == 1
    assert "the speed of a GPU called 'h20' is not known" in str(told.exception)
    told = run(config, "--gpus", "2")
    assert "add --gpu, or leave out --gpus" in str(told.exception)
    assert run(config, "--steps", "0").exit_code == 2
    assert run("nowhere.yaml").exit_code != 0
    with pytest.raises(ConfigError, match="at least one step, got 0"):
        profile_training(load_config(config, SMALL), steps=0)
    told = run(config, *SET, "--set", "data.root=Mine")
    assert "--channels N --classes N" in str(told.exception)


def test_ctrl_c_ends_it_between_two_steps_and_leaves_nothing(config, tmp_path, monkeypatch):
    calls = []
    plain = named.Named.forward

    def interrupt(self, batch):
        calls.append(len(calls))
        if len(calls) == 7:
            os.kill(os.getpid(), signal.SIGINT)
        return plain(self, batch)

    monkeypatch.setattr(named.Named, "forward", interrupt)
    told = run(config, *SET, "--steps", "50", "-o", str(tmp_path / "out"))
    assert told.exit_code == 130
    assert len(calls) < 100, "the steps that were left are not run"
    assert not (tmp_path / "out").exists()


@pytest.mark.gpu
def test_a_recorded_step_of_a_gpu_is_told_by_layer(config):
    network = "network={name: DynUNet, filters: [32, 64, 128, 256, 320]}"  # as many as the patch has levels
    sizes = ["patch={size: [64, 64, 64], batch: 1}", "augmentation.enabled=false"]
    report = profile_training(load_config(config, [network, *sizes]), steps=3).report
    assert report.recorded, report.not_recorded
    assert report.matched > 0.95
    rows = {(row.layer, row.direction): row for row in report.layers}
    first = rows["input_block.conv2.conv", "forward"]
    assert first.flops == 2 * 64**3 * 32 * 32 * 27
    assert first.seconds > 0
    if report.peaks is not None:
        assert 1 <= first.times_bound < 50
    computing = sum(row.seconds for row in report.layers if row.direction in ("forward", "backward"))
    assert computing > report.devices[0].computing / 2, "most kernels have a layer"
