"""The kernels of a training: torch.compile's, the fastest measured ones, ours or torch's."""

import logging
import shutil
from dataclasses import asdict

import pytest
import torch
from in_group import in_group
from monai.networks.nets import UNet
from traced_graphs import trace_only

from tests.experiment.conftest import latest
from volseg import Hook
from volseg.checkpointing.folder import RunFolder
from volseg.config.sections import UNSETTLED_KERNELS
from volseg.data.json_files import read_json
from volseg.data.layouts import load_task
from volseg.device import compiler_internals
from volseg.errors import CheckpointError, ConfigError, ParallelError
from volseg.experiment import load_config, train, validate
from volseg.experiment.placement import measured_kernels, placed_network
from volseg.experiment.placement.measured_kernels import (
    KINDS,
    choose_fastest,
    get_compiled,
    resolve_kernels,
    time_steps,
)
from volseg.experiment.placement.mesh_resolution import resolve_mesh
from volseg.experiment.placement.placed_network import build_model
from volseg.experiment.profiling import profile_training
from volseg.models.fit_grid import FitGrid
from volseg.parallel import CompiledNetwork, DataParallel, FastKernels, Replicas
from volseg.parallel.devices import is_main_process

# float32: the two sum in another order, and six optimizer steps carry that on.
TOLERANCE = {"rtol": 1e-3, "atol": 1e-5}
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def traced(monkeypatch):
    """Replace only the kernels, which take seconds to compile."""
    monkeypatch.setattr(compiler_internals, "compile_graph", trace_only)
    monkeypatch.setattr("volseg.experiment.placement.placed_network.explain_no_compiler", lambda device: None)


@pytest.fixture
def told_times(monkeypatch):
    """Run the steps of each kind and report these milliseconds; return the requested kinds."""
    asked, real = [], measured_kernels.time_steps

    def time_steps(config, *given, **named):
        kind = config.training.kernels
        asked.append(kind)
        real(config, *given, **named)  # it draws numbers, and builds networks
        return times[kind]

    times = {"torch": 10.0, "compiled": 8.0}
    monkeypatch.setattr(measured_kernels, "time_steps", time_steps)
    return times, asked


@pytest.fixture(scope="module")
def longer(trained, tmp_path_factory):
    """Return the state of the plain training after a third epoch."""
    folder = shutil.copytree(trained.folder.path, tmp_path_factory.mktemp("longer") / "run")
    train(load_config(folder / "config.yaml", ["training.epochs=3", f"output={folder}"]), resume=True)
    return latest(folder)


def assert_same_state(one, other):
    torch.testing.assert_close(one.model, other.model, rtol=0, atol=0)
    torch.testing.assert_close(one.average, other.average, rtol=0, atol=0)
    torch.testing.assert_close(one.random["torch"], other.random["torch"], rtol=0, atol=0)


@pytest.fixture
def fast_on_the_cpu(monkeypatch):
    """Let the CPU, which runs the same functions in plain torch, replace a GPU with the kernels."""
    monkeypatch.setattr(placed_network, "explain_absence", lambda device: None)


@pytest.mark.usefixtures("fast_on_the_cpu")
@pytest.mark.parametrize(("kernels", "others"), [("compiled", "compiled"), ("fast", "torch")])
def test_a_run_of_other_kernels_is_that_of_torch_and_goes_on_as_it(trained, longer, configured, kernels, others):
    """With the same kernels, or with others."""
    run = train(configured(f"training.kernels={kernels}"))
    for mine, theirs in zip(run.history, trained.history, strict=True):
        torch.testing.assert_close(mine.losses, theirs.losses, **TOLERANCE)
    mine, theirs = latest(run.folder.path), latest(trained.folder.path)
    assert [*mine.model] == [*theirs.model]
    assert not any("_orig_mod" in name or name.startswith("net.") for name in mine.model)
    torch.testing.assert_close(mine.model, theirs.model, **TOLERANCE)
    torch.testing.assert_close(mine.random["torch"], theirs.random["torch"], rtol=0, atol=0)
    # Dice counts voxels: a handful of ties may fall to the other side.
    assert run.validated.score == pytest.approx(trained.validated.score, abs=2e-3)
    again = train(configured(f"training.kernels={others}", "training.epochs=3"), resume=True)
    assert again.folder.config().training.kernels == others
    torch.testing.assert_close(latest(again.folder.path).model, longer.model, **TOLERANCE)
    assert validate(again.folder, overwrite=True).score == pytest.approx(again.validated.score, abs=2e-3)


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


@pytest.mark.parametrize("kernels", sorted(UNSETTLED_KERNELS))
def test_kernels_that_time_chooses_fit_no_deterministic_training_and_no_profile(configured, kernels):
    with pytest.raises(ConfigError, match=rf"training\.kernels is {kernels}, which chooses kernels by their measured"):
        configured(f"training.kernels={kernels}", "training.deterministic=true")
    with pytest.raises(ConfigError, match="does not belong to one layer"):
        profile_training(configured(f"training.kernels={kernels}"))


def test_what_was_measured_is_taken_leaves_no_other_trace_and_stays(configured, tmp_path, told_times, caplog):
    times, asked = told_times
    caplog.set_level(logging.INFO)
    config, named = configured("training.kernels=measured"), f"output={tmp_path / 'named'}"
    outcome = train(config)
    assert asked == [*KINDS]
    assert "training step with kernels torch 10 ms, compiled 8 ms: compiled; fast is not available" in caplog.text
    train(configured("training.kernels=compiled", named))
    assert_same_state(latest(config.folder), latest(tmp_path / "named"))
    written = read_json(config.folder / "kernels.json")
    assert (written["chosen"], written["milliseconds"]) == ("compiled", dict(times))
    assert written["shape"] == [2, 1, 16, 16, 16]
    assert "they need a GPU" in written["refused"]["fast"]
    assert outcome.folder.config().training.kernels == "measured"

    times["compiled"], times["torch"] = 20.0, 1.0
    asked.clear()
    train(configured("training.kernels=measured", "training.epochs=3"), resume=True)
    assert not asked
    train(configured("training.kernels=compiled", "training.epochs=3", named), resume=True)
    assert_same_state(latest(config.folder), latest(tmp_path / "named"))
    (config.folder / "kernels.json").write_text('{"chosen": "quick"}', encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"kernels\.json should state the kernels that the run started with"):
        train(configured("training.kernels=measured", "training.epochs=4"), resume=True)


def test_a_run_that_was_not_measured_is_when_it_goes_on(trained, longer, configured, told_times):
    times, asked = told_times
    times["compiled"] = 12.0
    folder = shutil.copytree(trained.folder.path, configured().folder)
    train(configured("training.kernels=measured", "training.epochs=3"), resume=True)
    assert asked == [*KINDS]
    assert read_json(folder / "kernels.json")["chosen"] == "torch"
    assert_same_state(latest(folder), longer)


def test_a_later_kind_must_be_clearly_faster():
    assert choose_fastest({"fast": 10.0, "torch": 9.8, "compiled": 9.8}) == "fast"
    assert choose_fastest({"torch": 10.0, "compiled": 9.6}) == "compiled"
    assert choose_fastest({"fast": 10.0, "torch": 9.0, "compiled": 8.9}) == "torch"
    with pytest.raises(ConfigError, match=r"no kernels are available \(fast: they are for GPUs; torch: full\)"):
        choose_fastest({}, {"fast": "they are for GPUs", "torch": "full"})


def test_a_kind_without_memory_is_none(configured, task, monkeypatch):
    def time_steps(config, *given, **named):
        if config.training.kernels == "torch":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        if config.training.kernels == "fast":
            raise ConfigError("they are for GPUs")
        return 5.0

    monkeypatch.setattr(measured_kernels, "time_steps", time_steps)
    config, task = configured("training.kernels=measured"), load_task(task)
    config, mesh = resolve_mesh(config, CPU)
    measured = measured_kernels.measure_kernels(config, mesh, task, CPU)
    assert measured.refused["torch"] == "its step ran out of memory"
    assert measured.chosen == "compiled"


def measure_together(config_file):
    """Return the choice of each of two processes, and whether only the leader can run a step then."""
    config = load_config(config_file, ["training.kernels=measured", "parallel.data=2"])
    task = load_task(config.data.root)
    config, mesh = resolve_mesh(config, CPU)
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
    with pytest.raises(ParallelError, match="replicas cannot share it: compiled batch_norm"):
        time_steps(config, load_task(task), CPU, shares=True)


@pytest.fixture
def chosen(configured, task, monkeypatch):
    """Return the form of a config's network on a GPU, simulated by the CPU."""
    rehearse = placed_network._rehearse
    monkeypatch.setattr(placed_network, "explain_absence", lambda device: None)
    monkeypatch.setattr(placed_network, "_rehearse", lambda *given: rehearse(*given[:-1], CPU))

    def choose(*overrides, trains=True):
        config = configured("training.precision=bf16", *overrides)
        network = FitGrid(UNet(3, 1, 3, channels=[4, 8], strides=[2]))
        return placed_network.with_fast_kernels(network, config, 1, torch.device("cuda:0"), trains=trains)

    return choose


def test_on_a_gpu_that_is_too_old_auto_takes_the_plain_network_and_says_why(configured, monkeypatch, caplog):
    """A V100, of compute capability 7.0: nothing is compiled for it, tried on it, or raised."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    monkeypatch.setattr("volseg.device.triton_tiles.available", lambda: True)
    network, old = FitGrid(UNet(3, 1, 3, channels=[4, 8], strides=[2])), torch.device("cuda:0")
    reason = "they need a GPU of compute capability 8.0 or more (cuda:0 has 7.0)"
    for trains in (True, False):
        caplog.clear()
        assert placed_network.with_fast_kernels(network, configured(), 1, old, trains=trains) is None
        assert caplog.messages == [f"torch's kernels are used (training.kernels: auto): {reason}"]
        with pytest.raises(ConfigError, match=r"training\.kernels is fast, but they need a GPU of compute capability"):
            placed_network.with_fast_kernels(network, configured("training.kernels=fast"), 1, old, trains=trains)


def test_on_a_cpu_auto_is_the_plain_network_and_says_nothing(configured, task, caplog):
    caplog.set_level(logging.INFO)
    assert type(build_model(configured(), load_task(task), CPU)) is FitGrid
    assert "kernels" not in caplog.text
    with pytest.raises(ConfigError, match=r"kernels is fast, but they need a GPU; set"):
        train(configured("training.kernels=fast"))
    assert not configured().folder.exists()


WINDOW = "inference.window=[16,16,16]"


def test_auto_takes_the_fast_kernels_where_they_pay(chosen):
    assert type(chosen()) is FastKernels
    assert type(chosen("training.kernels=fast", "training.accumulate=2")) is FastKernels
    assert chosen("training.kernels=torch") is None
    # Of predictions where their windows are recorded.
    assert type(chosen(WINDOW, "training.accumulate=2", trains=False)) is FastKernels
    assert type(chosen("training.kernels=fast", trains=False)) is FastKernels
    assert chosen(WINDOW, "training.kernels=torch", trains=False) is None


@pytest.mark.parametrize(
    ("trains", "overrides", "reason"),
    [
        (True, ["training.precision=fp32"], "faster only in bfloat16, but training.precision differs"),
        (True, ["training.record=false"], "no step is recorded with training.record: false"),
        (True, ["training.accumulate=2"], "no step is recorded with training.accumulate: 2"),
        (True, ["optimizer={name: Adagrad, lr: 0.1}"], "with optimizer Adagrad, which is not fused"),
        (False, ["inference.window=null"], "of different shapes are not recorded (inference.window: null)"),
        (False, [WINDOW, "inference.record=false"], "with inference.record: false"),
        (False, [WINDOW, "training.precision=fp32"], "faster only in bfloat16"),
    ],
)
def test_auto_says_why_it_takes_torchs(chosen, caplog, trains, overrides, reason):
    caplog.set_level(logging.INFO)
    assert chosen(*overrides, trains=trains) is None
    (told,) = [record.getMessage() for record in caplog.records if "kernels" in record.getMessage()]
    assert told.startswith("torch's kernels are used (training.kernels: auto): ")
    assert reason in told


def test_a_network_without_a_form_runs_with_torchs_kernels_or_is_refused(chosen, caplog, monkeypatch):
    plain = UNet.forward

    def spectral(self, x):
        return plain(self, torch.fft.fftn(x.float(), dim=(2, 3, 4)).real)

    monkeypatch.setattr(UNet, "forward", spectral)
    caplog.set_level(logging.INFO)
    assert chosen() is None
    assert "kernels are used (training.kernels: auto): fft_fftn called from" in caplog.text
    with pytest.raises(ConfigError, match=r"kernels is fast, but .*fft_fftn called from .*; set it to auto"):
        chosen("training.kernels=fast")


def test_the_spatial_strategy_on_one_device_is_refused_and_names_the_option(configured):
    with pytest.raises(ConfigError, match=r"has no effect.*training\.kernels: auto uses the fast kernels"):
        train(configured("parallel={strategy: spatial, devices: 1}"))


def test_one_gpu_asked_for_on_the_command_line_cuts_nothing(configured):
    spatial = "parallel={strategy: spatial}"
    assert configured(spatial).on_one_device() == configured("parallel={strategy: none}")
    recomputed = configured("parallel={strategy: spatial, checkpoint: all}").on_one_device().parallel
    assert (recomputed.strategy, recomputed.devices, recomputed.checkpoint) == ("spatial", 1, "all")
    assert configured().on_one_device().parallel.devices == 1


@pytest.mark.gpu
def test_on_a_gpu_auto_trains_with_the_fast_kernels(configured, tmp_path, caplog):
    class Seen(Hook):
        def on_training_end(self, training):
            self.network = type(training.network)

    caplog.set_level(logging.INFO)
    outcomes = {}
    for name, kind in (("auto", FastKernels), ("torch", FitGrid)):
        seen = Seen()
        outcomes[name] = train(configured(f"training.kernels={name}", f"output={tmp_path / name}"), hooks=[seen])
        assert seen.network is kind, caplog.text
    # bfloat16: a loss of three steps differs in the third digit.
    for mine, theirs in zip(outcomes["auto"].history, outcomes["torch"].history, strict=True):
        assert mine.losses["loss"] == pytest.approx(theirs.losses["loss"], rel=2e-2)
