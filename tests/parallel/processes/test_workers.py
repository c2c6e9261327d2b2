"""Workers receive their tasks, end cleanly, and never outlive the process that started them."""

import os
import signal
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest

from volseg.lifetime import is_running
from volseg.parallel.processes.workers import WorkerPool, run_queue

ECHO = """
import os, sys
from volseg.lifetime import end_with_launcher
from volseg.parallel.processes.workers import open_channel

end_with_launcher()
channel = open_channel()
print("a library says something")
while (message := channel.receive()) is not None:
    if message == "end":
        os.kill(os.getpid(), 9)
    channel.send({"heard": message, "rank": os.environ.get("RANK"), "gpu": os.environ.get("CUDA_VISIBLE_DEVICES")})
"""


def python(script: str) -> list[str]:
    return [sys.executable, "-c", script]


def wait_until(holds) -> None:
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.usefixtures("ready_python")
def test_a_worker_answers_is_none_of_the_job_and_is_heard_to_end(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    with WorkerPool(2) as pool:
        worker = pool.start("process 0", python(ECHO), tmp_path / "log", gpu="7", talks=True)
        worker.send({"case": "é"})
        assert pool.hear(120) == (worker, {"heard": {"case": "é"}, "rank": None, "gpu": "7"})
        worker.send(None)
        assert pool.hear(120) == (worker, None)
        assert not pool.running
    assert worker.process.returncode == 0
    assert "a library says something" in (tmp_path / "log").read_text(encoding="utf-8")


@pytest.mark.usefixtures("ready_python")
def test_a_worker_that_is_killed_says_by_what_and_what_it_said_last(tmp_path):
    (tmp_path / "log").write_text("of an earlier worker\n", encoding="utf-8")
    with WorkerPool() as pool:
        worker = pool.start("fold 3", python(ECHO), tmp_path / "log", talks=True)
        worker.send("end")
        assert pool.hear(120) == (worker, None)
        worker.send("lost, and no error")
        half = pool.start("kernels", python("print('{\"half', flush=True)"), tmp_path / "half", talks=True)
        assert pool.hear(120) == (half, None)  # half a message is none
    assert worker.describe_end(str(worker.log)).startswith("fold 3 was killed by SIGKILL")
    assert "earlier" not in worker.describe_end()


@pytest.mark.usefixtures("ready_python")
@pytest.mark.parametrize("at_once", [False, True])
def test_the_end_of_the_block_ends_the_workers(at_once, tmp_path):
    with WorkerPool() as pool:
        workers = [pool.start("one", python(ECHO), tmp_path / "log", talks=True) for _ in range(2)]
        for worker in workers:
            worker.send(1)
        for _ in workers:
            assert pool.hear(120) is not None
        assert pool.hear(0.01) is None
        if at_once:
            pool.stop_workers(at_once=True)
    assert {worker.process.returncode for worker in workers} == {-9 if at_once else -15}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks Linux for it")
def test_a_worker_ends_with_a_process_that_is_killed(tmp_path):
    parent = os.fork()
    if parent == 0:
        pool = WorkerPool()
        worker = pool.start("one", python(ECHO), tmp_path / "log", talks=True)
        worker.send(1)
        pool.hear()
        (tmp_path / "partial").write_text(str(worker.process.pid), encoding="utf-8")
        (tmp_path / "partial").replace(tmp_path / "worker")
        time.sleep(600)
    wait_until((tmp_path / "worker").exists)
    worker = int((tmp_path / "worker").read_text(encoding="utf-8"))
    assert is_running(worker)
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    wait_until(lambda: not is_running(worker))


@pytest.mark.usefixtures("ready_python")
def test_a_queue_has_one_worker_for_each_gpu_and_goes_on_after_a_failure(tmp_path):
    def start(pool, item, gpu):
        script = f"import os; raise SystemExit({item} if os.environ['CUDA_VISIBLE_DEVICES'] == '{gpu}' else 99)"
        worker = pool.start(f"fold {item}", python(script), tmp_path / f"{item}.log", gpu=gpu)
        assert len(pool.running) <= 2
        return worker

    ended = list(run_queue(range(5), ["0", "1"], start, lambda: None))
    assert sorted(item for item, _ in ended) == list(range(5))
    assert all(worker.process.returncode == item for item, worker in ended)


@pytest.mark.usefixtures("ready_python")
def test_a_signal_is_passed_on_once_and_nothing_is_begun_after_it(tmp_path):
    waiting = "import signal, sys, time; signal.signal(2, lambda *_: sys.exit(5)); print('up', flush=True)"
    number = []

    def start(pool, item, gpu):
        return pool.start(f"fold {item}", python(f"{waiting}; time.sleep(600)"), tmp_path / f"{item}.log", gpu=gpu)

    def interrupt():
        wait_until(lambda: (tmp_path / "0.log").exists() and "up" in Path(tmp_path / "0.log").read_text("utf-8"))
        number.append(signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with closing(run_queue([0, 1], [None], start, lambda: number[0] if number else None)) as ended:
        assert [(item, worker.process.returncode) for item, worker in ended] == [(0, 5)]
    thread.join()
    assert not (tmp_path / "1.log").exists()
