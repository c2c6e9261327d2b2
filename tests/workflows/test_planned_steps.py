"""The benchmark of the planned networks: its row of ours runs, and nnU-Net's gets the plan that nnU-Net wrote."""

import json
import sys
from pathlib import Path

import pytest

from volseg.data.catalogue import list_public_tasks

sys.path.insert(0, str(Path(__file__).parents[2] / "workflows" / "benchmarks"))

import planned_steps
from planned_steps import nnunet_plans, summarise

TINY = ["patch.size=[16, 16, 16]", "patch.batch=1", "network.filters=[2, 2, 2, 2]"]


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["planned_steps.py", "--device", "cpu", *arguments])
    planned_steps.main()


def test_a_row_is_measured_in_this_process(monkeypatch, capsys):
    overrides = [part for override in TINY for part in ("--set", override)]
    lengths = ["--warm-up", "1", "--window", "2", "--windows", "2"]
    run(monkeypatch, "--only", "ours", "Task04_Hippocampus", *lengths, *overrides)
    measured = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert measured["patch"] == [16, 16, 16]
    assert measured["seconds_per_250_iterations"] > 0
    assert measured["peak_allocated_gib"] > 0


def test_rounds_are_compared_and_a_failure_loses_nothing(monkeypatch, tmp_path):
    told = iter([4.0, 8.0, None, 6.0, 12.0, 10.0])

    def measure(process, chosen):
        seconds = next(told)
        return {"failed": "no memory"} if seconds is None else {"seconds_per_250_iterations": seconds}

    # The processes, which the test above is about.
    monkeypatch.setattr(planned_steps, "start_apart", lambda row, task, chosen: None)
    monkeypatch.setattr(planned_steps, "finish_apart", measure)
    result = tmp_path / "steps.json"
    run(monkeypatch, "--tasks", "9", "--rows", "ours", "nnunet", "--result", str(result))
    [found] = json.loads(result.read_text(encoding="utf-8"))["tasks"].values()
    assert found["ours"]["seconds_per_250_iterations"] == 8.0  # the median of 4 and 12
    assert found["nnunet"]["seconds_per_250_iterations"] == 8.0
    assert found["ours_over_nnunet"] == 1.0


def test_what_failed_always_says_why():
    assert summarise([{"failed": "a"}, {"failed": "b"}]) == {"failed": "b"}


@pytest.mark.parametrize("task", list_public_tasks(), ids=lambda task: task.name)
def test_nnunet_gets_its_own_plan(task):
    known = task.manifest["nnunet"]
    configuration = nnunet_plans(task.manifest)["configurations"]["3d_fullres"]
    architecture = configuration["architecture"]["arch_kwargs"]
    assert configuration["patch_size"] == known["patch"][::-1]
    assert configuration["batch_size"] == known["batch"]
    assert architecture["strides"] == [stride[::-1] for stride in known["strides"]]
    assert architecture["n_stages"] == len(architecture["kernel_sizes"]) == len(architecture["n_conv_per_stage"])


def test_a_result_needs_a_file(monkeypatch):
    with pytest.raises(SystemExit):
        run(monkeypatch, "--rounds", "1")
