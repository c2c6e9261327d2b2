"""The processes of the benchmarks answer together, and if one fails all end with its reason."""

import argparse
import os
import time
from pathlib import Path

import pytest
import task04
import workers
from workers import Worker, ask, number_jobs, share_gpus

SCRIPT = f"""
import os, sys, time
sys.path.insert(0, {str(Path(workers.__file__).parent)!r})
from workers import serve, take_place

def answer(messages):
    for message in messages:
        take_place(message)
        if message.get("fails") == message["number"]:
            print("last words", flush=True)
            {{"raises": lambda: 1 / 0, "dies": lambda: os._exit(7), "hangs": lambda: time.sleep(600)}}[message["how"]]()
        yield {{"rank": os.environ.get("RANK"), "process": os.getpid()}}

serve(answer)
"""


@pytest.fixture
def group(tmp_path):
    """Return two workers of one script."""
    (tmp_path / "script.py").write_text(SCRIPT, encoding="utf-8")
    made = [Worker(tmp_path / "script.py") for _ in range(2)]
    yield made
    for worker in made:
        worker.end()


@pytest.mark.parametrize(
    ("how", "told"), [("raises", "ZeroDivisionError"), ("dies", "its process ended by 7"), ("hangs", workers.LATE)]
)
def test_a_worker_answers_again_and_one_that_fails_ends_all_with_the_reason(group, how, told):
    first, second = (ask(group, number_jobs({}, 2), 60) for _ in range(2))
    assert [answer["rank"] for answer in first] == ["0", "1"]
    assert first == second
    [failed] = ask(group, number_jobs({"fails": 1, "how": how}, 2), 60 if how != "hangs" else 1)
    assert told in failed["error"]
    assert "last words" in failed["log"] or how == "hangs"  # whose words may come later


def test_a_worker_that_has_ended_is_told_nothing_and_says_so(tmp_path):
    (tmp_path / "script.py").write_text("raise SystemExit(3)", encoding="utf-8")
    worker = Worker(tmp_path / "script.py")
    time.sleep(0.5)
    assert ask([worker], [{}], 60)[0]["error"] == "its process ended by 3"


def test_jobs_share_the_gpus_and_one_that_fails_loses_no_other():
    finished = {}
    assert share_gpus({"a": lambda gpu: gpu, "b": lambda gpu: -gpu}, 1, finished.__setitem__) == {"a": 0, "b": 0}
    with pytest.raises(SystemExit, match="ZeroDivisionError"):
        share_gpus({"a": lambda gpu: 1 / 0, "c": lambda gpu: gpu}, 2, finished.__setitem__)
    assert finished.keys() == {"a", "b", "c"}


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two folds at a time need two cores")
def test_each_fold_has_the_cores_of_its_place_whichever_thread_starts_it(monkeypatch):
    """A thread that had trained a fold counted the cores of that fold only, and the next one had none."""
    places, own = [], sorted(os.sched_getaffinity(0))

    def run(command, env, check):
        places.append((own[int(env["CUDA_VISIBLE_DEVICES"])], *os.sched_getaffinity(0)))

    monkeypatch.setattr(task04.subprocess, "run", run)
    chosen = argparse.Namespace(folds=[0, 1, 2, 3, 4, 5], gpus=2, cores=1, cold=False)
    assert task04.train_folds(chosen).keys() == {*chosen.folds}
    assert all(core == allowed for core, allowed in places)
