"""The worker that compiles a training's kernels: how it ends, and that nothing of the training depends on it.

What it compiles needs a GPU to know for which; that is replaced here, the processes are real.
"""

import json
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
from in_group import in_group
from kernels import run_with_compiler
from ready_python import wait_until

from volseg.config.loading import load_config
from volseg.device.triton_kernels import INSTALLED
from volseg.estimate.candidate import Candidate
from volseg.experiment import training
from volseg.experiment.placement import compiled_kernels
from volseg.experiment.placement.compiled_kernels import (
    BESIDE_TRAINING,
    CompiledKernels,
    KernelWorker,
    OwnGpu,
    compile_for_training,
    make_order,
)
from volseg.lifetime import is_running
from volseg.parallel.devices import is_main_process

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="kernels are compiled on Linux")

GPU = OwnGpu(name="NVIDIA H200", processors=132, memory=140 * 2**30, capability=(9, 0))

WORKER = """
import json, os, signal, sys, time
from pathlib import Path
from volseg.experiment.placement.compiled_kernels import CompiledKernels
from volseg.experiment.placement.compiled_kernels import serve_kernels
from volseg.lifetime import end_with_launcher

folder = Path({folder!r})

def put_down(name, value):
    (folder / "partial").write_text(str(value), encoding="utf-8")
    os.replace(folder / "partial", folder / name)

def compile_kernels(config, gpu, *, candidate, one_process, runs_here, ready):
    put_down("worker", os.getpid())
{body}
    return CompiledKernels(kernels=3, seconds=1.5)

end_with_launcher()
serve_kernels(compile_kernels)
"""


@pytest.fixture
def begin(configured, monkeypatch, tmp_path):
    """Return a function that begins a worker, which runs a few lines in place of compiling."""
    monkeypatch.setattr(compiled_kernels, "note_path", lambda *given: tmp_path / "note.json")
    begun = []

    def begin(*body):
        lines = "\n".join(f"    {line}" for line in body)
        script = WORKER.format(folder=str(tmp_path), body=lines)
        order = make_order(configured(), Candidate(), GPU, 1)
        begun.append(KernelWorker(order, [sys.executable, "-c", script]))
        return begun[-1]

    yield begin
    for each in begun:
        each.close()


def wait_for(file: Path) -> int:
    """Return the number that a file says, once it does."""
    wait_until(file.exists, 120)
    return int(file.read_text(encoding="utf-8"))


@pytest.mark.usefixtures("ready_python")
def test_what_was_compiled_is_told_and_noted(begin, configured, tmp_path):
    checks = "assert gpu.capability >= (8, 0) and candidate.data == 1 and runs_here and not one_process"
    assert begin(checks, f"assert config.name == {configured().name!r}").wait(300) == CompiledKernels(
        kernels=3, seconds=1.5
    )
    assert json.loads((tmp_path / "note.json").read_text(encoding="utf-8"))["gpu"] == GPU.name
    assert make_order(configured(), Candidate(), GPU, 1) is None  # there is a note


@pytest.mark.usefixtures("ready_python")
def test_a_training_goes_on_when_its_first_kernels_are_there_and_the_rest_follows_beside_it(begin, tmp_path):
    begun = begin(
        "ready()",
        "put_down('niceness', os.getpriority(os.PRIO_PROCESS, 0))",
        "while not (folder / 'go_on').exists(): time.sleep(0.01)",
    )
    assert begun.wait(300) is None
    assert not begun.is_compiling
    assert wait_for(tmp_path / "niceness") == BESIDE_TRAINING
    assert not (tmp_path / "note.json").exists()
    (tmp_path / "go_on").touch()
    wait_until((tmp_path / "note.json").exists, 120)


@pytest.mark.usefixtures("ready_python")
def test_a_training_that_ends_ends_the_worker_and_what_that_started(begin, tmp_path):
    begun = begin(
        "helper = os.fork()",
        "if helper == 0: time.sleep(600)",
        "put_down('helper', helper)",
        "ready()",
        "time.sleep(600)",
    )
    assert begun.wait(300) is None
    begun.close()
    started = [wait_for(tmp_path / name) for name in ("worker", "helper")]
    wait_until(lambda: not any(map(is_running, started)), 60)


@pytest.mark.usefixtures("ready_python")
@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "was killed by SIGKILL"),
        ("raise KeyError('something of ours')", "KeyError: 'something of ours'"),
    ],
    ids=["killed", "fails"],
)
def test_a_worker_that_brings_nothing_says_why(line, told, begin, tmp_path):
    assert told in begin(line).wait(300).problem
    assert not (tmp_path / "note.json").exists()


@pytest.mark.usefixtures("ready_python")
def test_a_worker_that_hangs_costs_the_seconds_it_may(begin):
    assert "longer than" in begin("time.sleep(600)").wait(seconds=0.3).problem


@pytest.mark.usefixtures("ready_python")
def test_a_note_that_cannot_be_written_is_told(begin, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setattr(compiled_kernels, "note_path", lambda *given: tmp_path / "file" / "note.json")
    assert "FileExistsError" in begin("pass").wait(300).problem


@pytest.mark.parametrize(
    ("processes", "overrides", "candidate", "is_ordered"),
    [
        (2, [], Candidate(data=2), True),
        (2, [], Candidate(spatial=2), True),
        (4, [], Candidate(data=2, spatial=2, checkpoint="all"), True),
        (1, [], Candidate(), True),
        (1, ["parallel={strategy: spatial, devices: 2}"], Candidate(spatial=2), True),
        pytest.param(2, [], Candidate(data=4), False, id="in turns"),
        pytest.param(1, [], Candidate(data=2), False, id="in turns of one process"),
        pytest.param(1, [], Candidate(pipeline=2), False, id="stages"),
        pytest.param(1, ["parallel=auto"], Candidate(), False, id="chosen at the first batch"),
    ],
)
def test_what_is_ordered(processes, overrides, candidate, is_ordered, configured, monkeypatch, tmp_path):
    monkeypatch.setattr(compiled_kernels, "note_path", lambda *given: tmp_path / "note.json")
    order = make_order(configured(*overrides), candidate, GPU, processes)
    assert (order is not None) == is_ordered
    if order is not None:
        assert Candidate(**json.loads(json.dumps(order["candidate"]))) == candidate
        assert order["one_process"] == (processes == 1 and candidate.spatial > 1)


def test_a_training_on_the_cpu_starts_no_worker(configured):
    assert not compile_for_training(configured(), Candidate(), torch.device("cpu")).is_compiling


class Compiling(KernelWorker):
    """A worker of the leader, which takes a second for its kernels."""

    def __init__(self, leads, file):
        super().__init__()
        self.is_compiling, self.file = leads, file

    def wait(self):
        if self.is_compiling:
            time.sleep(1)
            self.file.touch()


def train_beside_a_worker(config_file, file):
    """Return whether all was compiled when this process built its network."""
    seen, build = [], training.build_model

    def build_and_look(*given, **more):
        seen.append(file.exists())
        return build(*given, **more)

    beside = mock.patch.object(training, "compile_for_training", return_value=Compiling(is_main_process(), file))
    with beside, mock.patch.object(training, "build_model", build_and_look):
        training.train(load_config(config_file, ["training.epochs=1", "parallel.data=2"]))
    return seen


@pytest.mark.usefixtures("ready_python")
def test_all_processes_wait_for_what_one_worker_compiles(config_file, tmp_path):
    assert in_group(2, train_beside_a_worker, config_file, tmp_path / "compiled") == [[True], [True]]


ROOT = Path(__file__).parents[2]

BEFOREHAND = """
import sys
from volseg.config.loading import load_config
from volseg.estimate.candidate import Candidate
from volseg.estimate.gpu_kinds import find_kind
from volseg.experiment.placement import compiled_kernels
from volseg.experiment.placement.compiled_kernels import make_order

config, gpu = load_config(sys.argv[1], sys.argv[2:]), find_kind("h200")
compiled = compiled_kernels.compile_beforehand(config, gpu, channels=1, classes=3)
assert make_order(config, Candidate(), gpu, 1) is None
elsewhere = load_config(sys.argv[1], [*sys.argv[2:], "data.root=/data/Task04_Hippocampus", "output=/runs/one"])
assert make_order(elsewhere, Candidate(), gpu, 1) is None
seen, facts = [], compiled_kernels.load_facts(config, 1, 3)
again = compiled_kernels.compile_kernels(
    config, gpu, facts=facts, ready=lambda: seen.append(1)
)
assert seen == [1] and again.kernels == compiled.kernels > 15, (seen, again, compiled)
print(compiled_kernels.note_path(config, ["NVIDIA A10G"]).exists())
print(compiled_kernels.note_path(config, [gpu.name], 2).exists())
cut = compiled_kernels.compile_kernels(config, gpu, candidate=Candidate(spatial=2), facts=facts)
assert cut.kernels > 15 and not cut.problem, cut
"""


@pytest.mark.kernels
@pytest.mark.skipif(not INSTALLED, reason="needs Triton: make test-kernels installs it")
def test_what_was_compiled_where_no_gpu_is_is_not_compiled_by_a_training_on_that_gpu(tmp_path):
    small = ["network.filters=[16, 32, 32]", "patch.size=[8, 16, 16]", "patch.batch=1", "inference.window=[8, 16, 16]"]
    told = run_with_compiler(tmp_path, "-c", BEFOREHAND, str(ROOT / "configs/task04_unet.yaml"), *small)
    assert told.split() == ["False", "False"]
