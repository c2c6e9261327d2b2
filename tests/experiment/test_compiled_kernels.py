"""The copy of a training that compiles its kernels: how it ends, and that nothing of the training depends on it.

What it compiles needs a GPU to know for which; that is replaced here, the processes are real.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from volseg.device.triton_kernels import INSTALLED
from volseg.experiment import compiled_kernels
from volseg.experiment.compiled_kernels import KILLED, CompiledKernels, CompilingBeside

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="copies are made where there is fork")


@pytest.fixture
def compiling(configured, monkeypatch, tmp_path):
    """Return a function that begins a copy, which calls another function in place of compiling."""
    monkeypatch.setattr(compiled_kernels, "_can_begin", lambda config: True)
    monkeypatch.setattr(compiled_kernels, "_find_note", lambda config, gpus: tmp_path / "note.json")
    monkeypatch.setattr(
        compiled_kernels, "ask_copy", lambda function: compiled_kernels._Gpu("H200", 132, 2**37, (9, 0))
    )
    begun = []

    def begin(instead, when_ready=None):
        def compile_kernels(config, gpu, runs_here, ready):
            if when_ready is not None:
                ready()
                when_ready()
            return instead()

        monkeypatch.setattr(compiled_kernels, "compile_kernels", compile_kernels)
        begun.append(CompilingBeside(configured()))
        return begun[-1]

    yield begin
    for each in begun:
        each.close()


def wait_for(file: Path) -> int:
    """Return the process id that a file says, once it does."""
    end = time.monotonic() + 60
    while not (file.exists() and file.read_text(encoding="utf-8")):
        assert time.monotonic() < end
        time.sleep(0.01)
    return int(file.read_text(encoding="utf-8"))


def wait_until_gone(process: int) -> None:
    """Wait until a process that is none of ours has ended."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            state = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return
        if state in "ZX":  # nobody asks for its status in some containers
            return
        time.sleep(0.01)
    raise AssertionError(f"{process} still runs")


def test_what_was_compiled_is_told_and_noted(compiling, tmp_path):
    begun = compiling(lambda: CompiledKernels(kernels=3, seconds=1.5))
    assert begun.wait() == CompiledKernels(kernels=3, seconds=1.5)
    assert (tmp_path / "note.json").exists()
    assert not compiling(CompiledKernels).is_compiling  # there is a note


def test_a_training_goes_on_when_its_first_kernels_are_there_and_the_rest_follows_beside_it(compiling, tmp_path):
    go_on, niceness = tmp_path / "go_on", tmp_path / "niceness"

    def hold():
        niceness.write_text(str(os.getpriority(os.PRIO_PROCESS, 0)), encoding="utf-8")
        while not go_on.exists():
            time.sleep(0.01)

    begun = compiling(CompiledKernels, when_ready=hold)
    assert begun.wait() is None
    assert not begun.is_compiling
    assert not (tmp_path / "note.json").exists()
    assert wait_for(niceness) == compiled_kernels.BESIDE_TRAINING
    go_on.touch()
    end = time.monotonic() + 60
    while not (tmp_path / "note.json").exists():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_training_that_ends_ends_the_copy_that_compiles_beside_it(compiling, tmp_path):
    def hang():
        (tmp_path / "copy").write_text(str(os.getpid()), encoding="utf-8")
        time.sleep(600)

    begun = compiling(CompiledKernels, when_ready=hang)
    assert begun.wait() is None
    copy = wait_for(tmp_path / "copy")
    begun.close()
    wait_until_gone(copy)


BEFOREHAND = """
import sys
from volseg.config.loading import load_config
from volseg.experiment import compiled_kernels
from volseg.forecast.gpu_kinds import find_kind

config, gpu = load_config(sys.argv[1], sys.argv[2:]), find_kind("h200")
compiled = compiled_kernels.compile_beforehand(config, gpu, channels=1, classes=3)
compiled_kernels._can_begin = lambda config: True
compiled_kernels._read_gpus = lambda: [gpu.name] * 8
assert not compiled_kernels.CompilingBeside(config).is_compiling
elsewhere = load_config(sys.argv[1], [*sys.argv[2:], "data.root=/data/Task04_Hippocampus", "output=/runs/one"])
assert not compiled_kernels.CompilingBeside(elsewhere).is_compiling
seen = []
again = compiled_kernels.compile_kernels(
    config, gpu, processes=1, facts=compiled_kernels.find_facts(config, 1, 3), ready=lambda: seen.append(1)
)
assert seen == [1] and again.kernels == compiled.kernels > 15, (seen, again, compiled)
print(compiled_kernels._find_note(config, ["NVIDIA A10G"]).exists())
"""


@pytest.mark.kernels
@pytest.mark.skipif(not INSTALLED, reason="needs Triton: make test-kernels installs it")
def test_what_was_compiled_where_no_gpu_is_is_not_compiled_by_a_training_on_that_gpu(tmp_path):
    small = ["network.filters=[16, 32, 32]", "patch.size=[8, 16, 16]", "patch.batch=1", "inference.window=[8, 16, 16]"]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-c", BEFOREHAND, str(ROOT / "configs/task04_unet.yaml"), *small],
        env={**environment, "TRITON_CACHE_DIR": str(tmp_path)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["False"]


def test_a_copy_that_is_killed_is_not_waited_for_though_its_helpers_live(compiling, tmp_path):
    def be_killed():
        helper = os.fork()
        if helper == 0:
            time.sleep(600)
        (tmp_path / "helper").write_text(str(helper), encoding="utf-8")
        os.kill(os.getpid(), signal.SIGKILL)

    told = compiling(be_killed).wait(seconds=300)  # longer than a test may last
    assert told is not None
    assert told.problem == KILLED
    wait_until_gone(wait_for(tmp_path / "helper"))


def test_a_copy_that_hangs_costs_the_seconds_it_may(compiling):
    told = compiling(lambda: time.sleep(600)).wait(seconds=0.3)
    assert told is not None
    assert "longer than" in told.problem


def test_closing_does_not_wait_for_a_copy_that_has_no_group_yet(compiling):
    compiling(lambda: time.sleep(600)).close()


def test_a_copy_ends_with_a_training_that_is_killed(compiling, tmp_path):
    def say_and_hang():
        (tmp_path / "copy").write_text(str(os.getpid()), encoding="utf-8")
        time.sleep(600)

    training = os.fork()
    if training == 0:
        compiling(say_and_hang)
        time.sleep(600)
    copy = wait_for(tmp_path / "copy")
    os.kill(training, signal.SIGKILL)
    os.waitpid(training, 0)
    wait_until_gone(copy)


def test_a_cache_that_nobody_may_look_into_is_the_compilers_matter(compiling, configured, monkeypatch, tmp_path):
    file = tmp_path / "file"
    file.touch()

    def refuse(config, gpus):
        raise PermissionError(13, "Permission denied", str(file))

    monkeypatch.setattr(compiled_kernels, "_find_note", refuse)
    assert compiling(CompiledKernels).wait() is None
