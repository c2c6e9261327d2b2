"""Trainings whose kernels torch.compile makes, or that measure which are fastest."""

import json
import logging
from dataclasses import asdict

import pytest
import torch
import yaml
from in_group import in_group
from traced_graphs import trace_only

from tests.experiment.checkpoints import latest
from volseg.checkpointing.folder import RunFolder
from volseg.config.schema import KERNELS_OF, UNSETTLED_KERNELS
from volseg.data.layouts import load_task
from volseg.device import compiler_internals
from volseg.errors import CheckpointError, ConfigError, ParallelError
from volseg.experiment import load_config, train, validate
from volseg.experiment.placement import measured_kernels
from volseg.experiment.placement.measured_kernels import (
    KINDS,
    MeasuredKernels,
    choose_fastest,
    get_compiled,
    resolve_kernels,
    time_steps,
)
from volseg.experiment.placement.mesh_resolution import resolve_mesh
from volseg.experiment.placement.placed_network import build_model
from volseg.experiment.profiling import profile_training
from volseg.models import FitGrid
from volseg.parallel import CompiledNetwork, DataParallel, Replicas
from volseg.parallel.devices import is_main_process

# float32: the two sum in another order, and six optimizer steps carry that on.
TOLERANCE = {"rtol": 1e-3, "atol": 1e-5}
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def traced(monkeypatch):
    """Let everything but the kernels be as it is: they take seconds to compile."""
    monkeypatch.setattr(compiler_internals, "compile_graph", trace_only)
    monkeypatch.setattr("volseg.experiment.placement.placed_network.explain_no_compiler", lambda device: None)


@pytest.fixture
def told_times(monkeypatch):
    """Let the steps of each kind run, and take these milliseconds; return what was asked for."""
    asked, real = [], measured_kernels.time_steps

    def time_steps(config, *given, **named):
        kind = config.training.kernels
        asked.append(kind)
        real(config, *given, **named)  # it draws numbers, and builds networks
        return times[kind]

    times = {"torch": 10.0, "compiled": 8.0}
    monkeypatch.setattr(measured_kernels, "time_steps", time_steps)
    return times, asked


def assert_same_state(one, other):
    torch.testing.assert_close(one.model, other.model, rtol=0, atol=0)
    torch.testing.assert_close(one.average, other.average, rtol=0, atol=0)
    torch.testing.assert_close(one.random["torch"], other.random["torch"], rtol=0, atol=0)


def test_a_compiled_run_is_that_of_torch_and_goes_on_as_it(configured, tmp_path):
    plain = train(configured("training.kernels=torch", f"output={tmp_path / 'plain'}"))
    compiled = train(configured("training.kernels=compiled"))
    for mine, theirs in zip(compiled.history, plain.history, strict=True):
        torch.testing.assert_close(mine.losses, theirs.losses, **TOLERANCE)
    mine, theirs = latest(compiled.folder.path), latest(plain.folder.path)
    assert [*mine.model] == [*theirs.model]
    assert not any("_orig_mod" in name or name.startswith("net.") for name in mine.model)
    torch.testing.assert_close(mine.model, theirs.model, **TOLERANCE)
    torch.testing.assert_close(mine.random["torch"], theirs.random["torch"], rtol=0, atol=0)
    longer = train(configured("training.kernels=compiled", "training.epochs=3"), resume=True)
    other = train(
        configured("training.kernels=torch", "training.epochs=3", f"output={tmp_path / 'plain'}"), resume=True
    )
    torch.testing.assert_close(latest(longer.folder.path).model, latest(other.folder.path).model, **TOLERANCE)
    assert validate(longer.folder, overwrite=True).score == pytest.approx(longer.validated.score, abs=2e-3)


def test_it_grows_accumulates_and_freezes(configured, tmp_path):
    overrides = ["patch.growth=[{until: 0.5, size: [8, 16, 8]}]", "training.accumulate=2", "training.iterations=4"]
    overrides += ["training.frozen=[model.0.*]"]
    plain = train(configured("training.kernels=torch", f"output={tmp_path / 'plain'}", *overrides))
    compiled = train(configured("training.kernels=compiled", *overrides))
    torch.testing.assert_close(latest(compiled.folder.path).model, latest(plain.folder.path).model, **TOLERANCE)


def test_what_trains_is_compiled_and_what_predicts_is_plain(configured, task):
    config = configured("training.kernels=compiled")
    model = build_model(config, load_task(task), CPU)
    assert type(model) is FitGrid
    assert isinstance(model.net, CompiledNetwork)
    assert model.net.pieces.count == 1  # compiled before the first step
    assert all(parameter.grad is None for parameter in model.parameters())
    plain = build_model(config, load_task(task), CPU, trains=False)
    assert get_compiled(plain) is None
    assert get_compiled(DataParallel(model, Replicas(1, None, False))) is model.net


def test_a_network_that_cannot_be_compiled_ends_the_run_before_it_begins(configured, monkeypatch):
    def fails(graph, inputs):
        raise ValueError("no such kernel")

    monkeypatch.setattr(compiler_internals, "compile_graph", fails)
    with pytest.raises(ConfigError, match=r"kernels is compiled, but torch\.compile cannot compile .*no such"):
        train(configured("training.kernels=compiled"))
    assert not configured().folder.exists()
    monkeypatch.setattr(
        "volseg.experiment.placement.placed_network.explain_no_compiler", lambda device: "there is no compiler"
    )
    with pytest.raises(ConfigError, match=r"is compiled, but there is no compiler; set it to auto or torch"):
        train(configured("training.kernels=compiled"))


@pytest.mark.parametrize("kernels", ["compiled", "measured", "torch", "fast"])
def test_where_they_cannot_be_is_said(configured, kernels):
    for strategy in (strategy for strategy, known in KERNELS_OF.items() if kernels not in known):
        with pytest.raises(ConfigError, match=rf"is {kernels}, which parallel\.strategy: {strategy} does not"):
            configured(f"training.kernels={kernels}", f"parallel.strategy={strategy}")
    if kernels in UNSETTLED_KERNELS:
        with pytest.raises(ConfigError, match=rf"training\.kernels is {kernels}, where kernels are chosen by how long"):
            configured(f"training.kernels={kernels}", "training.deterministic=true")
        with pytest.raises(ConfigError, match="belongs to no layer of the network"):
            profile_training(configured(f"training.kernels={kernels}"))


def test_what_was_measured_is_taken_and_leaves_no_other_trace(configured, tmp_path, told_times, caplog):
    times, asked = told_times
    caplog.set_level(logging.INFO)
    for fastest, milliseconds in (("compiled", 8.0), ("torch", 12.0)):
        times["compiled"] = milliseconds
        asked.clear()
        folder = tmp_path / f"measured {fastest}"
        outcome = train(configured("training.kernels=measured", f"output={folder}"))
        assert asked == [*KINDS]
        assert f"training step with kernels torch 10 ms, compiled {milliseconds:.3g} ms: {fastest}; fast was not" in (
            caplog.text
        )
        named = train(configured(f"training.kernels={fastest}", f"output={tmp_path / fastest}"))
        assert_same_state(latest(folder), latest(named.folder.path))
        written = json.loads((folder / "kernels.json").read_text(encoding="utf-8"))
        assert (written["chosen"], written["milliseconds"]) == (fastest, dict(times))
        assert written["shape"] == [2, 1, 16, 16, 16]
        assert "they are for GPUs" in written["refused"]["fast"]
        assert yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))["training"]["kernels"] == "measured"
        report = outcome.folder.report_file.read_text(encoding="utf-8")
        assert fastest in report.partition("Kernels")[2].partition("##")[0]


def test_a_resumed_run_keeps_to_its_kernels(configured, tmp_path, told_times):
    times, asked = told_times
    train(configured("training.kernels=measured"))
    times["compiled"], times["torch"] = 20.0, 1.0
    asked.clear()
    longer = train(configured("training.kernels=measured", "training.epochs=3"), resume=True)
    assert not asked
    named = train(configured("training.kernels=compiled", "training.epochs=2", f"output={tmp_path / 'named'}"))
    named = train(
        configured("training.kernels=compiled", "training.epochs=3", f"output={tmp_path / 'named'}"), resume=True
    )
    assert_same_state(latest(longer.folder.path), latest(named.folder.path))
    (longer.folder.path / "kernels.json").write_text('{"chosen": "quick"}', encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"kernels\.json should say which kernels the run was begun with"):
        train(configured("training.kernels=measured", "training.epochs=4"), resume=True)


def test_a_run_that_was_not_measured_is_when_it_goes_on(configured, told_times):
    _, asked = told_times
    train(configured("training.kernels=torch"))
    longer = train(configured("training.kernels=measured", "training.epochs=3"), resume=True)
    assert asked == [*KINDS]
    assert json.loads((longer.folder.path / "kernels.json").read_text(encoding="utf-8"))["chosen"] == "compiled"


def test_a_later_kind_must_be_clearly_faster():
    assert choose_fastest({"fast": 10.0, "torch": 9.8, "compiled": 9.8}) == "fast"
    assert choose_fastest({"torch": 10.0, "compiled": 9.6}) == "compiled"
    assert choose_fastest({"fast": 10.0, "torch": 9.0, "compiled": 8.9}) == "torch"
    with pytest.raises(ConfigError, match=r"no kernels could be had \(fast: they are for GPUs; torch: full\)"):
        choose_fastest({}, {"fast": "they are for GPUs", "torch": "full"})


def test_a_kind_without_memory_is_none(configured, monkeypatch):
    def time_steps(config, *given, **named):
        if config.training.kernels == "torch":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        if config.training.kernels == "fast":
            raise ConfigError("they are for GPUs")
        return 5.0

    monkeypatch.setattr(measured_kernels, "time_steps", time_steps)
    outcome = train(configured("training.kernels=measured"))
    written = MeasuredKernels.read(
        json.loads((outcome.folder.path / "kernels.json").read_text(encoding="utf-8")), "here"
    )
    assert written.refused["torch"] == "its step was out of memory"


def measure_together(config_file):
    """Return what each of two processes takes, and whether the leader alone can run a step meanwhile."""
    config = load_config(config_file, ["training.kernels=measured", "parallel.data=2"])
    task = load_task(config.data.root)
    config, mesh = resolve_mesh(config, task, CPU)
    plain = config.model_copy(update={"training": config.training.model_copy(update={"kernels": "torch"})})
    alone = time_steps(plain, task, CPU, shares=True) if is_main_process() else 1.0
    asked = []

    def tell(config, *given, **named):
        asked.append((config.training.kernels, config.patch.batch, named["shares"]))
        return {"fast": 3.0, "torch": 2.0, "compiled": 1.0}[config.training.kernels]

    measured_kernels.time_steps = tell
    try:
        settled, found = resolve_kernels(RunFolder(config.folder), config, mesh, task, CPU, resume=False)
    finally:
        measured_kernels.time_steps = time_steps
    return alone > 0, settled.training.kernels, asdict(found), asked


def test_of_several_processes_the_leader_measures(config_file):
    leader, member = in_group(2, measure_together, str(config_file))
    assert leader[:3] == member[:3]
    assert leader[:2] == (True, "compiled")
    assert leader[3] == [(kind, 1, True) for kind in KINDS]
    assert member[3] == []


def test_replicas_do_not_measure_what_they_cannot_share(configured, task):
    config = configured("training.kernels=compiled", "network.norm=batch")
    with pytest.raises(ParallelError, match="replicas cannot share it: batch_norm is compiled"):
        time_steps(config, load_task(task), CPU, shares=True)
