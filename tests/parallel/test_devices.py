"""The module that reports devices and processes."""

import re
from pathlib import Path

import pytest
import torch

import volseg
from volseg.errors import ParallelError
from volseg.parallel import ModelParallel, devices

QUESTIONS = re.compile(
    r"LOCAL_RANK|WORLD_SIZE|\bRANK\b|is_initialized\(|get_world_size\(\)|get_rank\(\)|device_count|cuda\.is_available"
)
ROOM = "parallel/devices.py"
SPARED = {
    "launched.py": "what the room reads, also before torch is imported",
    "signals.py": "what a handler asks before anything is imported",
    "exchange/formats.py": "what a bundle asks where MONAI runs it",
}


@pytest.fixture
def gpus(monkeypatch):
    """Make so many GPUs visible; the last is the current one."""

    def seen(count):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: count - 1)

    return seen


def test_nobody_else_asks():
    package = Path(volseg.__file__).parent
    found = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if QUESTIONS.search(path.read_text(encoding="utf-8"))
    }
    # What lies below asks about a tensor that it was given; about a group that one was given anybody may ask.
    # The doctor asks what torch itself says, in processes of its own.
    outside = {path for path in found if not path.startswith(("parallel/", "device/", "diagnosis/"))}
    assert ROOM in found
    assert outside == set(SPARED)


def test_a_process_alone(monkeypatch):
    for name in ("LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert (devices.count_launched(), devices.count_processes(), devices.get_process_rank()) == (1, 1, 0)
    assert devices.is_main_process()
    assert not any(ask() for ask in (devices.is_launched, devices.is_distributed, devices.has_process_group))


def test_a_launched_process_has_the_gpu_of_its_local_rank(monkeypatch, gpus):
    """Unless the job stays on the CPU: its group was one of GPUs, and refused its tensors."""
    monkeypatch.setenv("LOCAL_RANK", "5")
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setattr(devices, "_on_cpu", False)
    assert devices.is_launched()
    assert devices.count_launched() == 8
    assert not devices.is_distributed()  # it has not joined the others yet
    for visible, stays, expected in ((4, False, "cuda:1"), (4, True, "cpu"), (4, False, "cuda:1"), (0, False, "cpu")):
        gpus(visible)
        devices.stay_on_cpu(stays)
        assert devices.get_own_device() == torch.device(expected)
        assert expected in devices.name_own_place()


def test_named_devices(gpus):
    gpus(3)
    assert devices.name_devices(None) == [torch.device("cuda", index) for index in range(3)]
    named = ["cpu", 1, torch.device("cuda:7"), "cuda", "cpu:1"]
    expected = ["cpu", "cuda:1", "cuda:7", "cuda:2", "cpu:1"]
    assert devices.name_devices(named) == [torch.device(name) for name in expected]
    gpus(0)
    assert devices.name_devices(None) == [torch.device("cpu")]
    for wrong in ([], "cuda:0", 2):
        with pytest.raises(ParallelError, match=r"devices must be a sequence of at least one device, such as .*, got"):
            devices.name_devices(wrong)
    with pytest.raises(ParallelError, match=r"devices names cuda, but no GPU is visible, got \['cuda'\]; use cpu"):
        devices.name_devices(["cuda"])
    gpus(1)
    for unknown in ("gpu", "cuda:x", 1.5):
        with pytest.raises(
            ParallelError, match=rf"devices names {unknown!r}, which is not a device; available: cpu, cuda:0"
        ):
            devices.name_devices(["cpu", unknown])


def test_a_network_is_placed_on_devices_that_are_there(gpus):
    gpus(0)
    for strategy in ("auto", "spatial", "pipeline"):
        with pytest.raises(ParallelError, match="devices names cuda:0, which does not exist; available: cpu"):
            ModelParallel(torch.nn.Conv3d(1, 2, 3), strategy=strategy, devices=["cuda:0", "cuda:1"])
    gpus(2)
    with pytest.raises(ParallelError, match="names cuda:2, which does not exist; available: cpu, cuda:0, cuda:1"):
        ModelParallel(torch.nn.Conv3d(1, 2, 3), devices=[2])


def test_devices_that_must_be_there(gpus):
    gpus(2)
    assert devices.require_devices(2, "cuda") == ["cuda:0", "cuda:1"]
    assert devices.require_devices(3, "cpu") == ["cpu", "cpu", "cpu"]
    assert devices.require_devices(["cuda", "cpu", "cuda:1"], "cuda") == ["cuda", "cpu", "cuda:1"]
    with pytest.raises(ParallelError, match=r"devices is 3, but only 2 GPU\(s\) are visible; use at most as many"):
        devices.require_devices(3, "cuda")
    with pytest.raises(ParallelError, match="names cuda:2, which does not exist; available: cpu, cuda:0, cuda:1"):
        devices.require_devices(["cuda:2"], "cuda")
