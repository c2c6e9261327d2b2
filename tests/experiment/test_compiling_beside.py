"""The copy of a training that compiles its kernels: how it ends, and that nothing of the training depends on it.

What it compiles needs a GPU to know for which; that is replaced here, the processes are real. So are those of jobs,
which train on the CPU and take it for two GPUs.
"""

import inspect
import json
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from volseg.errors import ParallelError
from volseg.estimate.allocator import MemoryUse
from volseg.estimate.candidate import Candidate, Forecast
from volseg.experiment import compiling_beside
from volseg.experiment.cases import choose_cases
from volseg.experiment.compiled_kernels import CompiledKernels
from volseg.experiment.compiling_beside import KILLED, CompilingBeside
from volseg.experiment.mesh_choice import ask_here, leave_out_stages
from volseg.experiment.network_plan import plan_network
from volseg.experiment.plan_process import Answer, Gpus, run_plan
from volseg.parallel import launch
from volseg.parallel.devices import is_launched

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="copies are made where there is fork")

GPU = compiling_beside._Gpu("NVIDIA H200", 132, 140 * 2**30, (9, 0))
GPUS = Gpus(name=GPU.name, memory=139 * 2**30, count=2)


@pytest.fixture
def compiling(configured, monkeypatch, tmp_path):
    """Return a function that begins a copy, which calls another function in place of compiling."""
    monkeypatch.setattr(compiling_beside, "_can_begin", lambda config: True)
    monkeypatch.setattr(compiling_beside, "find_note", lambda config, gpus, processes: tmp_path / "note.json")
    monkeypatch.setattr(compiling_beside, "ask_copy", lambda function, device: GPU)
    begun = []

    def begin(instead, when_ready=None, config=None):
        def compile_kernels(config, gpu, ready, **more):
            if when_ready is not None:
                ready()
                when_ready()
            return instead(**{name: more[name] for name in inspect.signature(instead).parameters})

        monkeypatch.setattr(compiling_beside, "compile_kernels", compile_kernels)
        begun.append(CompilingBeside(config or configured()))
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


def tell_nothing():
    return CompiledKernels()


def test_what_was_compiled_is_told_and_noted(compiling, tmp_path):
    begun = compiling(lambda: CompiledKernels(kernels=3, seconds=1.5))
    assert begun.wait() == CompiledKernels(kernels=3, seconds=1.5)
    assert (tmp_path / "note.json").exists()
    assert not compiling(tell_nothing).is_compiling  # there is a note


def test_a_training_goes_on_when_its_first_kernels_are_there_and_the_rest_follows_beside_it(compiling, tmp_path):
    go_on, niceness = tmp_path / "go_on", tmp_path / "niceness"

    def hold():
        niceness.write_text(str(os.getpriority(os.PRIO_PROCESS, 0)), encoding="utf-8")
        while not go_on.exists():
            time.sleep(0.01)

    begun = compiling(tell_nothing, when_ready=hold)
    assert begun.wait() is None
    assert not begun.is_compiling
    assert not (tmp_path / "note.json").exists()
    assert wait_for(niceness) == compiling_beside.BESIDE_TRAINING
    go_on.touch()
    end = time.monotonic() + 60
    while not (tmp_path / "note.json").exists():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_training_that_ends_ends_the_copy_that_compiles_beside_it(compiling, tmp_path):
    def hang():
        (tmp_path / "copy").write_text(str(os.getpid()), encoding="utf-8")
        time.sleep(600)

    begun = compiling(tell_nothing, when_ready=hang)
    assert begun.wait() is None
    copy = wait_for(tmp_path / "copy")
    begun.close()
    wait_until_gone(copy)


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

    def refuse(config, gpus, processes):
        raise PermissionError(13, "Permission denied", str(file))

    monkeypatch.setattr(compiling_beside, "find_note", refuse)
    assert compiling(tell_nothing).wait() is None


def be_launched(monkeypatch, rank, local_rank, world_size, local_world_size=2):
    told = {"RANK": rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": local_world_size}
    for name, value in told.items():
        monkeypatch.setenv(name, str(value))


@pytest.mark.parametrize(
    ("rank", "local_rank", "begins"), [(0, 0, True), (1, 1, False), (2, 0, True), (3, 1, False)], ids=str
)
def test_one_process_of_each_machine_has_a_copy(rank, local_rank, begins, configured, monkeypatch):
    monkeypatch.setattr(compiling_beside, "can_compile", lambda: True)
    monkeypatch.setattr(compiling_beside, "count_gpus", lambda: 2)
    be_launched(monkeypatch, rank, local_rank, 4)
    assert compiling_beside._can_begin(configured()) == begins
    monkeypatch.setattr(compiling_beside, "has_process_group", lambda: True)
    assert not compiling_beside._can_begin(configured())


@pytest.mark.parametrize(
    ("processes", "overrides", "candidate"),
    [
        (2, ["parallel.data=2"], Candidate(data=2)),
        (2, ["parallel.spatial=2"], Candidate(spatial=2)),
        (4, ["parallel={data: 2, spatial: 2, checkpoint: all}"], Candidate(data=2, spatial=2, checkpoint="all")),
        (2, ["parallel.strategy=spatial"], Candidate(spatial=2)),
        (1, ["parallel={strategy: spatial, devices: 1, checkpoint: 2}"], Candidate(checkpoint=2)),
        (1, [], Candidate()),
    ],
    ids=str,
)
def test_what_is_compiled_is_what_the_job_runs(processes, overrides, candidate, compiling, configured, monkeypatch):
    be_launched(monkeypatch, 0, 0, processes)
    begun = compiling(
        lambda candidate: CompiledKernels(problem=json.dumps(vars(candidate))), None, configured(*overrides)
    )
    told = json.loads(begun.wait().problem)
    # The config says which kernels, and a recording runs the same.
    assert {**told, "kernels": "fast", "recorded": False} == vars(candidate)


@pytest.mark.parametrize(
    ("processes", "overrides"),
    [
        pytest.param(2, ["training.deterministic=true", "patch.batch=4", "parallel.data=4"], id="in turns"),
        pytest.param(2, ["parallel={data: 1, pipeline: 2}"], id="too few for the mesh"),
        pytest.param(1, ["parallel={strategy: pipeline, devices: 2}"], id="stages"),
        pytest.param(1, ["parallel=auto"], id="chosen at the first batch"),
    ],
)
def test_what_nobody_could_follow_has_no_copy(processes, overrides, compiling, configured, monkeypatch):
    be_launched(monkeypatch, 0, 0, processes)
    assert not compiling(tell_nothing, config=configured(*overrides)).is_compiling


SLABS = Candidate(spatial=2)


@pytest.fixture
def forecast(monkeypatch):
    """Let copies forecast, at once, that two slabs are fastest; for a job of two."""
    be_launched(monkeypatch, 0, 0, 2)
    use = MemoryUse(used=1, reserved=1, outside=0, peak_in="")
    answer = Answer(forecasts=(Forecast(candidate=SLABS, memory=use, seconds=1.0),))
    monkeypatch.setattr(compiling_beside, "ask_here", lambda asked, gpus: answer)
    return answer


def find_question(config):
    return leave_out_stages(plan_network(config, choose_cases(config).task).complete(config))


def test_a_copy_forecasts_what_is_open_and_compiles_for_it(forecast, compiling, configured):
    begun = compiling(lambda candidate: CompiledKernels(problem=repr(candidate)))
    assert begun.forecast(find_question(configured()), GPUS) == forecast
    assert begun.wait().problem == repr(SLABS)


def test_a_copy_is_none_of_the_jobs_processes(forecast, compiling, configured, monkeypatch):
    monkeypatch.setattr(compiling_beside, "ask_here", lambda *asked: Answer(problem=f"launched: {is_launched()}"))
    assert compiling(tell_nothing).forecast(find_question(configured()), GPUS).problem == "launched: False"


def test_an_answer_to_another_question_is_none(forecast, compiling, configured):
    assert compiling(tell_nothing).forecast(find_question(configured("patch.batch=4")), GPUS) is None


def test_an_answer_about_more_memory_than_there_is_is_none(forecast, compiling, configured):
    begun, asked = compiling(tell_nothing), find_question(configured())
    least = int(compiling_beside.LEFT * GPU.memory)
    assert begun.forecast(asked, replace(GPUS, memory=least - 1)) is None
    assert begun.forecast(asked, replace(GPUS, count=4)) is None
    assert begun.forecast(asked, replace(GPUS, memory=least)) == forecast


def test_where_all_is_compiled_the_leaders_copy_only_forecasts(forecast, compiling, configured, monkeypatch, tmp_path):
    (tmp_path / "note.json").touch()
    begun = compiling(lambda: CompiledKernels(kernels=1))
    assert begun.forecast(find_question(configured()), GPUS) == forecast
    assert begun.wait() == CompiledKernels()
    be_launched(monkeypatch, 2, 0, 2)  # the first of another machine
    assert not compiling(tell_nothing).is_compiling


def test_a_copy_that_is_killed_while_it_forecasts_has_no_answer(forecast, compiling, configured, monkeypatch):
    monkeypatch.setattr(compiling_beside, "ask_here", lambda *asked: os.kill(os.getpid(), signal.SIGKILL))
    begun = compiling(tell_nothing)
    assert begun.forecast(find_question(configured()), GPUS) is None
    assert begun.wait().problem == KILLED


def test_a_forecast_is_not_waited_for_for_ever(forecast, compiling, configured, monkeypatch):
    monkeypatch.setattr(compiling_beside, "ask_here", lambda *asked: time.sleep(600))
    monkeypatch.setattr(compiling_beside.plan_process, "LONGEST_SECONDS", 0.3)
    begun = compiling(tell_nothing)
    assert "not there after" in begun.forecast(find_question(configured()), GPUS).problem
    assert not begun.is_compiling  # nor waited for again


def test_who_has_no_copy_has_no_answer(configured, monkeypatch):
    monkeypatch.setattr(compiling_beside, "_can_begin", lambda config: False)
    assert CompilingBeside(configured()).forecast(configured(), GPUS) is None


def test_a_copy_forecasts_what_a_process_of_its_own_would(configured):
    asked = find_question(configured("training.kernels=torch"))
    assert ask_here(asked, GPUS) == run_plan(asked, GPUS)


def test_a_note_that_cannot_be_written_is_told(compiling, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setattr(compiling_beside, "find_note", lambda *given: tmp_path / "file" / "note.json")
    assert "FileExistsError" in compiling(tell_nothing).wait().problem


def run_job(mode, config_file, folder, *overrides):
    """Train in two processes; return whether each found all compiled when it built its network."""
    job = [str(Path(__file__).with_name("job_with_copy.py")), mode, str(folder), "train", str(config_file)]
    settings = [part for each in ("device=cpu", "training.epochs=1", *overrides) for part in ("--set", each)]
    launch([*job, *settings], 2)
    return [(folder / f"built_{rank}").read_text(encoding="utf-8") for rank in range(2)]


@pytest.mark.usefixtures("ready_python")
@pytest.mark.parametrize(("mesh", "compiled"), [("parallel.data=2", "2 1"), ("parallel.data=null", "1 2")])
def test_all_processes_wait_for_what_one_copy_compiles(mesh, compiled, config_file, tmp_path):
    assert run_job("well", config_file, tmp_path, mesh) == ["True", "True"]
    assert (tmp_path / "compiled").read_text(encoding="utf-8") == compiled


@pytest.mark.usefixtures("ready_python")
@pytest.mark.parametrize("mode", ["copy is killed", "copy hangs"])
def test_a_job_goes_on_without_its_copy(mode, config_file, tmp_path):
    assert run_job(mode, config_file, tmp_path, "parallel.data=2") == ["False", "False"]
    wait_until_gone(wait_for(tmp_path / "copy"))


@pytest.mark.usefixtures("ready_python")
@pytest.mark.parametrize("mode", ["leader is killed", "leader fails"])
def test_nobody_waits_for_a_copy_whose_process_is_gone(mode, config_file, tmp_path):
    with pytest.raises(ParallelError, match="process 0 of 2"):
        run_job(mode, config_file, tmp_path, "parallel.data=2")
    wait_until_gone(wait_for(tmp_path / "copy"))
