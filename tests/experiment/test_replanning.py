"""A training step that runs out of memory: the error, and the run that continues once in another way."""

import gc
import subprocess
import sys
from dataclasses import asdict

import pytest
import torch

from tests.experiment.conftest import latest, write_config
from volseg import Checkpoints, Hook
from volseg.data.json_files import read_json
from volseg.errors import CheckpointError, OutOfMemoryError
from volseg.estimate.candidate import Candidate, Estimate
from volseg.estimate.step_memory import MemoryUse
from volseg.experiment import REGISTRIES, RunFolder, load_config, train
from volseg.experiment import training as experiment_training
from volseg.experiment.placement import replanning
from volseg.experiment.placement.alternatives import Answer, explaining_memory
from volseg.experiment.placement.placed_network import build_model
from volseg.experiment.placement.replanning import Replanning
from volseg.monitoring.loggers import Logger
from volseg.parallel import ModelParallel
from volseg.parallel.processes.progress import report_progress
from volseg.workflow import training

REPLAN = "parallel.on_oom=replan"
AT_SECOND = "ran out of memory at train, epoch 2, batch 2; since then, and only once, the run continues with"


def take_all_memory():
    """Ask torch's allocator for more than any machine has."""
    torch.empty(1 << 50, dtype=torch.uint8)


class TooMuch(Hook):
    """Take all memory at a batch, in the network's first way, or in whatever way it runs."""

    def __init__(self, epoch, position, *, always=False):
        self.at, self.always, self.seen = (epoch, position), always, []

    def on_batch_begin(self, training, batch):
        is_cut = isinstance(training.network, ModelParallel)
        self.seen.append((training.epoch, training.position, is_cut))
        if (training.epoch, training.position) == self.at and (self.always or not is_cut):
            take_all_memory()

    def on_batch_end(self, training, fields):
        next(hook for hook in training.hooks if isinstance(hook, Checkpoints)).finish()  # the next one can be taken

    on_epoch_end = on_batch_end  # and after the best one has been written


def forecast(gib, seconds=1.0, refused=None, **candidate):
    memory = MemoryUse(used=0, reserved=int(gib * 2**30), outside=0, peak_in="backward")
    return Estimate(candidate=Candidate(**candidate), memory=memory, seconds=seconds, refused=refused)


@pytest.fixture(autouse=True)
def known(request, monkeypatch):
    """Let the CPU simulate a GPU on which a step with recomputed activations fits."""
    if not any(map(request.node.get_closest_marker, ("gpu", "multi_gpu"))):
        answer = Answer(forecasts=(forecast(21, refused="too much"), forecast(9, checkpoint="all", recorded=True)))
        monkeypatch.setattr(replanning, "_forecast", lambda config, tried, more_gpus: answer)


def test_without_being_asked_a_run_ends_and_says_what_takes_less(configured):
    with pytest.raises(OutOfMemoryError) as caught:
        train(configured(), hooks=[TooMuch(0, 1)])
    told = str(caught.value)
    assert told.startswith("out of memory on cpu, which has ")
    assert "Tried: patch.size [16, 16, 16], patch.batch 2" in told
    assert "at train, epoch 1, batch 2" in told
    assert "\n  --set parallel.strategy=spatial --set parallel.devices=1 --set parallel.checkpoint=all   " in told
    assert told.endswith("parallel.checkpoint: all (recomputes activations)")


@pytest.mark.parametrize(
    ("answer", "lines"),
    [
        (Answer(problem="no such kind"), ["Their memory could not be estimated: no such kind."]),
        (
            Answer(forecasts=(forecast(40, refused="needs 40.0 GiB"),), remedies=("one GPU of 40 GiB", "8 x 8 x 8")),
            ["It would fit: one GPU of 40 GiB.", "It would fit: 8 x 8 x 8."],
        ),
    ],
)
def test_what_a_plan_says_is_told(configured, monkeypatch, answer, lines):
    """As if `volseg plan` had answered on a GPU: the reason for no estimate, or the options that fit."""
    monkeypatch.setattr(replanning, "_forecast", lambda config, tried, more_gpus: answer)
    failed = Replanning(configured())
    failed.tried = Candidate()
    report_progress("train", epoch=1, item=2)
    with pytest.raises(OutOfMemoryError) as caught, failed.heeding(), explaining_memory(failed.config):
        take_all_memory()
    assert [line for line in str(caught.value).splitlines() if "estimated:" in line or "would fit" in line] == lines


def test_a_batch_is_part_of_its_step(configured, monkeypatch):
    """On a GPU the batch is augmented, so an epoch's first one failed in the state of the epoch before."""

    def fill_memory(batches, epoch, position):
        take_all_memory()

    monkeypatch.setattr(training, "remaining_batches", lambda *args: iter(lambda: fill_memory(*args), None))
    with pytest.raises(OutOfMemoryError, match=r"(?s), at train, epoch 1, batch 1.*less memory, fastest first:"):
        train(configured())


class Full(Hook):
    """Take all memory in a part of the second epoch's first step, in the network's first way."""

    def __init__(self, part):
        self.part = part

    def on_training_begin(self, training):
        def take(*of_hook):
            if training.epoch == 1 and training.network.training:
                take_all_memory()

        network, optimizer = training.network, training.optimizer
        hang_in = {
            "forward": lambda: list(network.modules())[4].register_forward_pre_hook(take),
            "backward": lambda: next(network.parameters()).register_hook(take),
            "optimizer": lambda: optimizer.register_step_pre_hook(take),
            "average": lambda: optimizer.register_step_post_hook(take),
        }
        if not isinstance(network, ModelParallel):
            hang_in[self.part]()


ACCUMULATED = ("training.accumulate=3", "training.ema=0.9")


@pytest.fixture(scope="module")
def undisturbed(task, tmp_path_factory):
    """Return the folder of a training that gathers batches and never lacks memory."""
    file = write_config(task, tmp_path_factory.mktemp("undisturbed"))
    return train(load_config(file, ACCUMULATED)).folder.path


@pytest.mark.parametrize("part", ["forward", "backward", "optimizer", "average"])
def test_whichever_part_of_a_step_fails_nothing_is_trained_twice_or_left_out(configured, undisturbed, part):
    config = configured(REPLAN, *ACCUMULATED)
    train(config, hooks=[Full(part)])
    assert (config.folder / "replanned.json").exists()
    # float32, in another order of sums.
    torch.testing.assert_close(latest(config.folder).model, latest(undisturbed).model, rtol=1e-3, atol=1e-5)
    assert [record.epoch for record in latest(config.folder).history] == [0, 1]


class Counted(Logger):
    """Counts how often it is made, and notes the epochs that it hears of."""

    made, heard = 0, ()

    def __init__(self):
        type(self).made += 1

    def scalars(self, values, step):
        type(self).heard += (step,)


def test_a_second_attempt_that_cannot_be_built_failed_in_no_step(configured, monkeypatch):
    """The error named the batch at which the first attempt had failed."""
    built = []

    def build(*args, **options):
        built.append(args)
        if len(built) == 2:
            take_all_memory()
        return build_model(*args, **options)

    monkeypatch.setattr(experiment_training, "build_model", build)
    with pytest.raises(OutOfMemoryError, match=r"The failure was not in a training step \(start\)"):
        train(configured(REPLAN), hooks=[Full("forward")])


def test_a_run_goes_on_from_its_checkpoint_in_another_way(trained, configured, caplog):
    """Six batches, the fifth fails first: none is trained twice or left out.

    Nor is a logger made twice: one that opens a server's run in its constructor left one that nobody ended.
    """
    config = configured(REPLAN, "training.checkpoint_minutes=0", "logging.loggers=[counted]")
    hook = TooMuch(1, 1)
    REGISTRIES["logger"].register("counted", Counted)
    try:
        with caplog.at_level("INFO"):
            outcome = train(config, hooks=[hook])
    finally:
        REGISTRIES["logger"].forget("counted")
    assert (Counted.made, Counted.heard) == (1, (1, 2))
    assert hook.seen == [
        *((0, position, False) for position in range(3)),
        (1, 0, False),
        (1, 1, False),
        (1, 1, True),
        (1, 2, True),
    ]
    assert caplog.text.count(AT_SECOND) == 1
    record = read_json(config.folder / "replanned.json")
    assert "parallel.checkpoint=all" in record["overrides"]
    assert record["failure"]["tried"]["checkpoint"] is None
    assert AT_SECOND in (config.folder / "report.md").read_text(encoding="utf-8")
    # float32: the strategy that recomputes adds up in another order, over two steps.
    torch.testing.assert_close(latest(config.folder).model, latest(trained.folder.path).model, rtol=1e-3, atol=1e-5)
    assert outcome.history[0].losses == trained.history[0].losses


@pytest.mark.parametrize(
    ("gib", "taken"),
    [
        ({1: 12, 2: 10, 3: 9, "all": 8}, 1),  # the fastest of those that fit
        ({1: 20, 2: 18, 3: 17, "all": 16.5}, "all"),  # none fits: the least
    ],
)
def test_what_is_taken_follows_from_forecasts(configured, monkeypatch, gib, taken):
    """As on a GPU of 16 GiB, with given estimates instead of a GPU's."""

    def estimate(checkpoint, needed):
        refused = None if needed <= 16 else "needs more than 16.0 GiB"
        return forecast(needed, 1 + (4 if checkpoint == "all" else checkpoint or 0), refused, checkpoint=checkpoint)

    known = [estimate(None, 21), *(estimate(*each) for each in gib.items())]
    replanned = choose(monkeypatch, configured(REPLAN), Candidate(), 1, known)
    assert f"parallel.checkpoint={taken}" in replanned.overrides
    assert "GiB, " in replanned.why


def test_what_cannot_be_estimated_is_not_replanned(configured, monkeypatch):
    with pytest.raises(
        OutOfMemoryError, match=r"full\. parallel\.on_oom: replan found no settings that need less memory on"
    ):
        choose(monkeypatch, configured(REPLAN), Candidate(), 1, [])


OF_ONE = "parallel={strategy: spatial, devices: [cpu, cpu], on_oom: replan}"


def choose(monkeypatch, config, tried, processes, forecasts):
    """Return the way in which a run continues after a step ran out of memory."""
    monkeypatch.setattr(replanning, "_forecast", lambda config, tried, more_gpus: Answer(forecasts=forecasts))
    failure = replanning.Failure(where="process 0", at="train", said="full", tried=tried)
    return replanning._choose(config, failure, processes)


@pytest.mark.parametrize(
    ("settings", "processes", "tried", "taken"),
    [
        (REPLAN, 2, Candidate(data=2), {"spatial": 2, "data": None, "pipeline": None}),
        (OF_ONE, 1, Candidate(spatial=2), {"strategy": "pipeline", "devices": ("cpu", "cpu"), "split_size": 1}),
        (OF_ONE, 1, Candidate(pipeline=2, split_size=1), {"strategy": "spatial", "devices": ("cpu", "cpu")}),
        (REPLAN, 2, Candidate(data=2, pipeline=2, split_size=2), {"data": 2, "pipeline": 2, "split_size": 1}),
    ],
)
def test_processes_stay_as_many_as_they_are(configured, monkeypatch, settings, processes, tried, taken):
    """Two processes with one GPU each chose a pipeline of two GPUs per process, and failed.

    One process took slabs that belong to as many processes, and ended; its stages left the GPUs that it names.
    """
    known = [
        forecast(1, 1.0, pipeline=tried.num_gpus, split_size=1),
        forecast(1, 2.0, spatial=tried.num_gpus, checkpoint="all"),
        forecast(1, 3.0, data=2, pipeline=2, split_size=1),
    ]
    config = configured(settings)
    config = choose(monkeypatch, config, tried, processes, known).apply(config)
    assert {name: getattr(config.parallel, name) for name in taken} == taken
    assert config.mesh(processes).num_processes == processes


def test_a_second_time_ends_the_run_even_after_it_was_resumed(configured):
    config = configured(REPLAN)
    with pytest.raises(OutOfMemoryError, match=r"then, and only once, .* A second failure ends the run\.") as caught:
        train(config, hooks=[TooMuch(1, 1, always=True)])
    assert str(caught.value).endswith("parallel.checkpoint: tiled (recomputes in tiles)"), "of the last failure"
    hook = TooMuch(1, 1, always=True)
    with pytest.raises(OutOfMemoryError, match="A second failure ends the run"):
        train(config, resume=True, hooks=[hook])
    assert all(is_cut for _, _, is_cut in hook.seen)


class Fails(Hook):
    """Lose the run at a batch of its second way."""

    def on_batch_end(self, training, fields):
        if isinstance(training.network, ModelParallel) and training.epoch == 1:
            raise InterruptedError


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ((), "the run continues with --set parallel.strategy=spatial"),  # it does not fall back
        (("parallel={strategy: pipeline, devices: 2}",), "is for another mesh; the requested mesh"),
    ],
)
def test_a_run_that_was_replanned_and_lost_goes_on_as_it_was_or_is_asked_for(configured, caplog, settings, message):
    full = TooMuch(0, 1)
    with pytest.raises(InterruptedError):
        train(configured(REPLAN), hooks=[full, Fails()])
    # Without a checkpoint it has begun again.
    assert full.seen[:4] == [(0, 0, False), (0, 1, False), (0, 0, True), (0, 1, True)]
    hook = TooMuch(9, 9)
    with caplog.at_level("INFO"):
        train(configured(REPLAN, *settings), resume=True, hooks=[hook])
    assert hook.seen
    assert settings or all(is_cut for _, _, is_cut in hook.seen)
    assert message in caplog.text


STRANGE = [["data.root=/etc"], ["training.epochs=9"], ["parallel.devices"], ["parallel.devises=1"], [1], None]
DAMAGED = [("asked", None), ("asked", "abc"), *(("overrides", each) for each in STRANGE), ("unknown", 1)]


@pytest.mark.parametrize(("field", "value"), DAMAGED)
def test_a_damaged_record_is_refused(field, value):
    tried = {"where": "here", "at": "epoch 0", "said": "full", "tried": asdict(Candidate())}
    sound = {"asked": {}, "processes": 1, "failure": tried, "overrides": ["parallel.devices=1"], "why": "less memory"}
    assert asdict(replanning.Replanned.read(sound, "replanned.json")) == {**sound, "overrides": ("parallel.devices=1",)}
    with pytest.raises(CheckpointError, match=r"(?s)replanned\.json should contain the settings chosen .* remove it"):
        replanning.Replanned.read({**sound, field: value}, "replanned.json")


def test_a_validation_without_memory_is_no_matter_of_steps(configured):
    class FullWindow(Hook):
        def on_training_begin(self, training):
            training.network.register_forward_hook(
                lambda network, inputs, output: None if network.training else take_all_memory()
            )

    with pytest.raises(OutOfMemoryError, match=r"window \(prediction\).* not in a training step \(predict\)"):
        train(configured(REPLAN), hooks=[FullWindow()])
    folder = RunFolder(configured().folder).path
    assert not (folder / "replanned.json").exists()
    told = read_json(folder / "status.json")
    assert "out of memory on cpu, which has " in told["message"], "in words, for who looks at the run from elsewhere"


HOOK = """
import os
import torch
import volseg
from volseg.estimate.candidate import Candidate, Estimate
from volseg.estimate.step_memory import MemoryUse
from volseg.experiment.placement import replanning
from volseg.experiment.placement.alternatives import Answer
from volseg.parallel.devices import count_restarts

if not torch.cuda.is_available():  # the CPU stands for GPUs on which slabs fit
    memory = MemoryUse(used=0, reserved=2**30, outside=0, peak_in="backward")
    known = Estimate(candidate=Candidate(spatial=2), memory=memory, seconds=1.0)
    replanning._forecast = lambda config, tried, more_gpus: Answer(forecasts=(known,))

@volseg.register("hook", "TooMuch")
class TooMuch(volseg.Hook):
    def __init__(self, ranks, always=False):
        self.ranks, self.always = map(str, ranks), always

    def on_batch_begin(self, training, batch):
        line = f"at {os.environ['RANK']} {count_restarts()} {training.epoch} {training.position}\\n"
        os.write(1, line.encode())  # whole, though both processes write
        if (training.epoch, training.position) == (1, 1) and os.environ["RANK"] in self.ranks:
            if (self.always or count_restarts() == 0) and training.device.type == "cuda":
                torch.cuda.empty_cache()
                total = torch.cuda.get_device_properties(training.device).total_memory
                torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / total)
                self.taken, size = [], 1 << 30
                while size >= 512:  # a small network finds room in the pieces that are left
                    try:
                        self.taken.append(torch.empty(size, dtype=torch.uint8, device=training.device))
                    except torch.OutOfMemoryError:
                        size //= 2
            elif self.always or count_restarts() == 0:
                torch.empty(1 << 50, dtype=torch.uint8)
"""
"""Leaves no memory to some processes, at first or in every attempt: on a GPU the step itself then fails."""


def run_together(start, tmp_path, launcher, config_file, hook, *more):
    """Train in two processes with the hook; return the status, the output by batch, and the errors."""
    (tmp_path / "hook.py").write_text(HOOK, encoding="utf-8")
    settings = [REPLAN, "training.checkpoint_minutes=0", f"hooks=[{{name: TooMuch, {hook}}}]", *more]
    arguments = [part for each in settings for part in ("--set", each)]
    command = [*launcher, "-m", "volseg", "train", str(config_file), "--components", str(tmp_path / "hook.py")]
    job = start([*command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8")
    printed, errors = job.communicate(timeout=300)
    batches = [tuple(map(int, line.split()[1:])) for line in printed.splitlines() if line.startswith("at ")]
    return job.returncode, sorted(batches), errors


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


@pytest.mark.usefixtures("ready_python")
def test_one_of_two_processes_fails_and_both_go_on_cut(start, configured, config_file, tmp_path):
    """Under a launcher that would not have started them again."""
    status, batches, errors = run_together(start, tmp_path, TORCHRUN, config_file, "ranks: [1]")
    assert status == 0, errors
    # Process 1 failed at the fifth batch, of which process 0 had its own replica's part under way.
    first = [(epoch, batch) for rank, attempt, epoch, batch in batches if (rank, attempt) == (1, 0)]
    assert first == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]
    again = {
        rank: [(epoch, batch) for r, attempt, epoch, batch in batches if (r, attempt) == (rank, 1)] for rank in (0, 1)
    }
    assert again[0] == again[1]
    assert again[0][-1] == (1, 2)
    assert "process 1 of 2" in errors
    assert errors.count(AT_SECOND) == 1
    assert "every volume cut into 2 slabs" in errors
    assert "Traceback" not in errors
    history = latest(configured().folder).history
    assert [record.epoch for record in history] == [0, 1]
    assert read_json(configured().folder / "replanned.json")["processes"] == 2


@pytest.mark.slow
@pytest.mark.usefixtures("ready_python")
def test_two_processes_that_fail_at_a_time_are_replanned_once(start, config_file, tmp_path):
    status, batches, errors = run_together(start, tmp_path, TORCHRUN, config_file, "ranks: [0, 1], always: true")
    assert status != 0
    assert {attempt for _, attempt, _, _ in batches} == {0, 1}
    assert "A second failure ends the run." in errors
    # As it was chosen; later it is told as what was before.
    assert errors.count("parallel.spatial=2 --set training.record=false: 1.0 GiB of each GPU, 1 s per step\n") == 1


def measure_peak(config):
    """Return the peak GPU memory of a training, in bytes."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    train(config)
    return torch.cuda.max_memory_reserved()


@pytest.mark.gpu
def test_a_gpu_that_is_out_of_memory_goes_on_with_what_fits_it(configured, tmp_path):
    """The limit is between the measured memory of the plain and of the recomputed step."""
    # A recording allocates nothing when it is replayed: what is to fail is the step. Its memory is activations, nearly
    # all: of a V-Net on 96^3 half are weights and what cuDNN computes with, and a UNet's first convolution leaves an
    # eighth of the voxels: recomputation saved 6 % and nothing on an H200.
    network = "network={name: DynUNet, filters: [32, 64, 128], strides: [1, 2, 2], kernel_size: [3, 3, 3]}"
    step = ["device=cuda", "training.record=false", network, "patch={size: [128, 128, 128], batch: 2}"]
    recomputed = "parallel={strategy: spatial, devices: 1, checkpoint: all}"
    most = measure_peak(configured(*step, f"output={tmp_path / 'plain'}"))
    least = measure_peak(configured(*step, f"output={tmp_path / 'recomputed'}", recomputed))
    assert least < 0.85 * most, f"{least / 2**20:.0f} MiB recomputed, {most / 2**20:.0f} MiB as it is: no room between"
    gc.collect()  # what the two have left
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((0.4 * most + 0.6 * least) / total)
    try:
        with pytest.raises(OutOfMemoryError) as caught:
            train(configured(*step, f"output={tmp_path / 'raised'}"))
        assert "\n  --set parallel.strategy=spatial --set parallel.devices=1 --set parallel.checkpoint=" in str(
            caught.value
        )
        del caught  # its traceback holds the model
        config = configured(*step, REPLAN)
        train(config)
        assert torch.cuda.max_memory_reserved() < most
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert latest(config.folder).progress == (2, 0)
    taken = read_json(config.folder / "replanned.json")
    assert any(each.startswith("parallel.checkpoint=") for each in taken["overrides"])
    measured = read_json(config.folder / "memory.json")["measured"]
    assert measured[-1]["devices"][0]["reserved"] < most


@pytest.mark.gpu
def test_the_first_steps_on_a_gpu_are_measured_beside_a_forecast(configured, caplog):
    config = configured("device=cuda", "training.epochs=30", "training.iterations=20", "training.validate_every=30")
    with caplog.at_level("INFO"):
        train(config)
    written = read_json(config.folder / "memory.json")
    assert [reading["steps"] for reading in written["measured"]] == [8]
    assert all(reading["devices"][0]["used"] > 0 for reading in written["measured"])
    # The forecast may come after so short a training, and then is given up.
    assert written["forecast"] is None or "estimate of a step: " in caplog.text
    assert "Memory after 8 steps: " in (config.folder / "report.md").read_text(encoding="utf-8")


@pytest.mark.multi_gpu
def test_one_of_two_gpus_is_out_of_memory_and_both_go_on_cut(start, configured, config_file, tmp_path):
    more = ["device=cuda", "training.record=false"]
    status, batches, errors = run_together(start, tmp_path, TORCHRUN, config_file, "ranks: [1]", *more)
    assert status == 0, errors
    assert {attempt for _, attempt, _, _ in batches} == {0, 1}
    assert "CUDA out of memory" in errors
    assert errors.count(AT_SECOND) == 1
    assert [record.epoch for record in latest(configured().folder).history] == [0, 1]
    devices = read_json(configured().folder / "memory.json")["measured"][0]["devices"]
    assert [(each["process"], each["device"]) for each in devices] == [(0, "cuda:0"), (1, "cuda:1")]
