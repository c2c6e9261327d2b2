"""Steps that are followed without a GPU, within a process that does other things too."""

import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import numpy as np
import pytest
import torch
from ready_python import wait_until
from torch import nn

import volseg
from volseg.device.fake_gpu import fake_device
from volseg.device.gpus import has_values, is_gpu, make_stream
from volseg.errors import ConfigError, ParallelError
from volseg.estimate import StepPlan
from volseg.estimate.candidate import Candidate, Estimate
from volseg.estimate.fake_step.tracing import tracing
from volseg.estimate.gpu_kinds import find_kind
from volseg.lifetime import is_running
from volseg.parallel.forking import ForkedWorkers, ask_copy


def build() -> nn.Module:
    return nn.Sequential(
        nn.Conv3d(1, 4, 3, padding=1), nn.BatchNorm3d(4), nn.Dropout(0.1), nn.ReLU(), nn.Conv3d(4, 2, 3, padding=1)
    )


def plan(net: nn.Module, side: int = 16) -> StepPlan:
    return volseg.plan(net, (1, 1, side, side, side), devices=1, gpu="v100-16")


def test_random_numbers_go_on_as_if_nothing_had_been_followed() -> None:
    # A plan in the process that trains drew from torch's generator, and dropout was another one than without a plan.
    torch.manual_seed(0)
    net = build()
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002 (of networks)
    plan(net)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.random.get_state()[1].tolist() == states[2]  # noqa: NPY002


@contextmanager
def float64_by_default() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


AROUND: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "anomaly": lambda: torch.autograd.set_detect_anomaly(True),
    "float64": float64_by_default,
}


@pytest.mark.parametrize("around", AROUND)
def test_forecast_does_not_depend_on_what_goes_on_around_it(around: str) -> None:
    # ModelParallel(strategy="auto") plans within the first call, wherever that is made: refused, or other bytes.
    net = build()
    alone = plan(net)
    with AROUND[around]():
        assert plan(net).forecasts == alone.forecasts
        weight = torch.ones(2, 2, dtype=torch.float32)
        assert (weight @ weight).dtype == (torch.bfloat16 if torch.is_autocast_enabled("cpu") else torch.float32)


def test_other_threads_have_no_fake_gpus() -> None:
    # A thread that copied cases to a real GPU meanwhile would have got streams and events that wait for nothing.
    said = []

    def look() -> None:
        said.append((has_values(), is_gpu(fake_device(0)), is_gpu(torch.device("cuda", 0))))

    with tracing(find_kind("v100-16")):
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        assert is_gpu(fake_device(0))
        assert make_stream(fake_device(0)).number == 1
    assert said == [(True, False, True)]


@pytest.fixture
def uses_no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever tests before have asked CUDA: copies of a process that has are told so, where torch is built for it."""
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: False)


def end_process_of(lost: Candidate, candidate: Candidate) -> Estimate:
    if candidate == lost:
        os._exit(9)
    return Estimate(candidate=candidate, refused="as asked")


@pytest.mark.usefixtures("uses_no_cuda")
def test_process_that_ends_while_it_follows_is_an_error() -> None:
    # `volseg plan` waited for ever: the pool began another process, and nobody told of the lost candidate.
    lost, well = Candidate(spatial=2), Candidate()
    if os.cpu_count() == 1:
        pytest.skip("one core follows in this process")
    with ForkedWorkers(lost, forks=True) as copies:
        copies.begin(end_process_of, well)
        with pytest.raises(ParallelError, match="worker process died"):
            copies.ask(end_process_of, lost)


def tell_process(shared: int, number: int) -> tuple[int, int]:
    return os.getpid(), shared + number


def tell_own_process() -> int:
    return os.getpid()


@pytest.mark.usefixtures("uses_no_cuda")
def test_copies_end_with_a_process_that_is_killed() -> None:
    # They waited for their next step for ever: each holds the other end of the pipe that it reads.
    if os.cpu_count() == 1:
        pytest.skip("one core follows in this process")
    receiver, sender = multiprocessing.Pipe(duplex=False)
    asking = os.fork()
    if asking == 0:
        with ForkedWorkers(1, forks=True) as copies:
            sender.send(copies.ask(tell_process, 2)[0])
            time.sleep(600)
    copy = receiver.recv()
    os.kill(asking, signal.SIGKILL)
    os.waitpid(asking, 0)
    wait_until(lambda: not is_running(copy), 60)


def ask_process() -> int:
    with ForkedWorkers(1, forks=True) as copies:
        asked, told = copies.ask(tell_process, 2)
    assert told == 3
    return asked


@pytest.mark.usefixtures("uses_no_cuda")
def test_processes_that_use_cuda_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    # `volseg plan --here` had asked CUDA for its GPUs, and every step failed by "CUDA error: initialization error".
    own = os.getpid()
    assert (ask_process() == own) == (os.cpu_count() == 1)
    assert ask_copy(tell_own_process) != own
    with monkeypatch.context() as patched:
        patched.setattr(torch.cuda, "is_initialized", lambda: True)
        assert ask_process() == own
        assert ask_copy(tell_own_process) == own
    # Counted by CUDA, of which torch tells copies alone.
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    assert ask_process() == own
    assert ask_copy(tell_own_process) == own


def test_processes_of_a_job_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert ask_process() == os.getpid()


def test_settings_of_the_allocator_are_those_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    # They were modelled, tested, and read by nobody.
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    net = nn.Sequential(nn.Conv3d(1, 24, 3, padding=1), nn.ReLU(), nn.Conv3d(24, 2, 3, padding=1))
    usual = plan(net, 56).forecasts[0]
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    changed = plan(net, 56).forecasts[0]
    assert usual.memory is not None
    assert changed.memory is not None
    assert changed.memory.reserved < 0.8 * usual.memory.reserved
    assert changed.memory.used == pytest.approx(usual.memory.used, rel=0.01)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:False")  # torch takes it before the other
    assert plan(net, 56).forecasts[0] == usual
    for setting, said in (
        ("garbage_collection_threshold:0.8", "not modelled"),
        ("max_split_size_mb:128", "not modelled"),
        ("roundup_power2_divisions:[256:1,>:4]", "not modelled"),
        ("backend:cudaMallocAsync", "not modelled"),
        ("expandable_segments:true", "True or False"),
    ):
        monkeypatch.setenv("PYTORCH_ALLOC_CONF", setting)
        with pytest.raises(ConfigError, match=said):
            plan(net, 56)
