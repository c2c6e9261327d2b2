"""The out-of-memory error with its remedies: other ways to run a training, and their options."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from volseg.config.loading import load_config
from volseg.errors import ConfigError, OutOfMemoryError
from volseg.estimate.candidate import Candidate, Estimate
from volseg.estimate.step_memory import MemoryUse
from volseg.experiment import REGISTRIES, register, train
from volseg.experiment.placement.alternatives import (
    Gpus,
    build_candidate,
    explaining_memory,
    get_estimate,
    is_out_of_memory,
    list_lines,
    list_overrides,
    rank_smaller,
    run_plan,
    take_candidate,
)
from volseg.models.vnet import VNet

GIB = 2**30


def forecast(gib, seconds, refused=None, **candidate):
    memory = MemoryUse(used=gib * GIB // 2, reserved=int(gib * GIB), outside=0, peak_in="backward")
    return Estimate(candidate=Candidate(**candidate), memory=memory, seconds=seconds, refused=refused)


KNOWN = [
    forecast(20, 0.1, "needs 20.0 GiB, and there are 16.0 GiB"),
    forecast(12, 0.2, checkpoint=2, kernels="fast"),
    forecast(9, 0.3, checkpoint="all", kernels="fast"),
    forecast(19.9, 0.05, kernels="torch", data=2),
    forecast(11, 0.07, spatial=2),
    Estimate(candidate=Candidate(pipeline=2, split_size=1), refused="pool has no form"),
]


def test_what_needs_clearly_less_is_ranked_by_time_on_as_many_gpus_first():
    ranked = rank_smaller(Candidate(kernels="torch"), KNOWN)
    assert [(each.candidate.num_gpus, each.candidate.checkpoint) for each in ranked] == [(1, 2), (1, "all"), (2, None)]
    assert len(rank_smaller(Candidate(spatial=4), KNOWN)) == 4, "without a forecast of what failed all that fit count"
    none = [replace(each, refused="too much") for each in KNOWN[:3]]
    assert rank_smaller(Candidate(), none) == [none[2], none[1]], "the smallest first, where nothing fits"
    # A forecast is found whichever kernels one GPU takes.
    assert get_estimate(Candidate(kernels="fast", recorded=True), KNOWN) is KNOWN[0]
    both = [KNOWN[0], replace(KNOWN[0], candidate=Candidate(kernels="torch"), seconds=9.0)]
    assert get_estimate(Candidate(kernels="torch"), both).seconds == 9.0
    assert get_estimate(Candidate(spatial=3), KNOWN) is None


def test_lines_can_be_pasted_and_have_numbers(configured, config_file):
    config = configured()
    recorded = [replace(each, candidate=replace(each.candidate, recorded=True)) for each in KNOWN[1:5]]
    lines = list_lines(config, recorded, 1)
    assert lines[0] == (
        "  --set parallel.strategy=spatial --set parallel.devices=1 --set parallel.checkpoint=2   "
        "12.0 GiB, 0.2 s per step"
    )
    assert lines[2].startswith("  --gpus 2 --set parallel.data=2   19.9 GiB of each GPU")
    for line, each in zip(lines, KNOWN[1:], strict=False):
        words = line.split("   ")[0].removeprefix("  ").split()
        pasted = load_config(config_file, [word for word in words if "=" in word])
        count = each.candidate.data * each.candidate.spatial
        assert build_candidate(pasted, pasted.mesh(count), 1) == replace(
            each.candidate, recorded=True, kernels="fast" if pasted.parallel.model_strategy == "spatial" else "torch"
        )


def test_kernels_that_were_asked_for_stay(configured):
    config = configured("training.kernels=torch")
    assert list_lines(config, [KNOWN[2]], 1) == []
    with pytest.raises(ConfigError, match=r"kernels is torch, but parallel\.strategy: spatial supports only"):
        take_candidate(config, KNOWN[2].candidate)


def test_what_is_taken_is_what_is_done(configured):
    for candidate in (
        Candidate(data=2, checkpoint="all"),
        Candidate(spatial=2),
        Candidate(spatial=2, checkpoint="tiled"),
        Candidate(pipeline=2, split_size=1, recorded=True),
    ):
        count = candidate.data * candidate.spatial
        config = take_candidate(configured(), candidate)
        found = build_candidate(config, config.mesh(count), 1)
        assert replace(found, kernels=candidate.kernels) == candidate
        assert config.mesh(count).is_open is False
        assert list_overrides(configured(), config)


H200 = Gpus(name="NVIDIA H200", memory=139 * GIB)


def test_a_training_is_estimated_and_what_takes_less(configured, monkeypatch):
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)  # it is none of the job's processes, nor waits for them
    network = "network={name: UNet, channels: [16, 32], strides: [2], num_res_units: 2}"
    config = configured("patch.size=[256,256,256]", network)
    tried = build_candidate(config, config.mesh(1), 1)
    answer = run_plan(config, H200, thorough=True)
    assert not answer.problem
    assert answer.reserve > 0
    failed, smaller = get_estimate(tried, answer.forecasts), rank_smaller(tried, answer.forecasts)
    assert failed.memory.reserved >= failed.memory.used > 0
    assert smaller
    for each in smaller:
        assert each.candidate.checkpoint is not None
        assert each.memory.used < failed.memory.used
        assert each.seconds > 0
    assert "GiB, " in list_lines(config, smaller, 1)[0]


def test_a_plan_that_does_not_come_is_told_and_raises_nothing(configured):
    """Of components that only this process knows, or in time."""
    assert run_plan(configured(), H200, seconds=0).problem == "volseg plan did not answer within 0 s"
    register("network", "OfThisTest", VNet)
    try:
        assert "OfThisTest" in run_plan(configured("network={name: OfThisTest}"), H200).problem
    finally:
        REGISTRIES["network"].forget("OfThisTest")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["patch.size=[4000,4000,4000]"],
            r"patch\.size \[4000, 4000, 4000\] times patch\.batch 2 takes .* GiB for an image and its logits, but",
        ),
        (["patch.batch=1000000000"], r"patch\.size \[16, 16, 16\] times patch\.batch 1000000000 takes .* GiB"),
        (["inference.window=[4000,4000,4000]"], r"inference\.window \[4000, 4000, 4000\] takes .* GiB"),
    ],
)
def test_sizes_beyond_all_memory_are_refused_before_a_case_is_read(configured, reads, overrides, message):
    with pytest.raises(ConfigError, match=message):
        train(configured(*overrides))
    assert not reads


@pytest.mark.parametrize(
    "call", [lambda: torch.empty(1 << 60), lambda: bytearray(1 << 60), lambda: torch.empty(1 << 62, 1 << 62)]
)
def test_every_allocator_says_it_in_the_same_words(configured, call):
    with pytest.raises(OutOfMemoryError) as caught, explaining_memory(configured("inference.window=[8,8,8]")):
        call()
    message = str(caught.value)
    assert message.startswith("out of memory on cpu, which has ")
    assert "patch.size [16, 16, 16], patch.batch 2, inference.window [8, 8, 8], inference.batch 1" in message
    remedies = ["Reduce patch.batch", "then patch.size", "parallel.spatial", "parallel.checkpoint: all"]
    places = [message.index(remedy) for remedy in remedies]
    assert places == sorted(places)


@pytest.mark.parametrize(
    ("kind", "said", "is_one"),
    [
        (RuntimeError, "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported", True),
        (RuntimeError, "NCCL error in: P.cpp, unhandled cuda error\nCuda failure 2 'out of memory'", True),
        (RuntimeError, "cuDNN error: CUDNN_STATUS_ALLOC_FAILED", True),
        (RuntimeError, "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED", True),
        (RuntimeError, "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", True),
        (RuntimeError, "[enforce fail at a.cpp:1] err == 0. DefaultCPUAllocator: can't allocate memory", True),
        # A loss of somebody's own that raised such words was called out of memory, and replanned.
        (RuntimeError, "the scanner's store is out of memory cards", False),
        (ValueError, "CUDA is out of memory", False),
    ],
)
def test_libraries_without_a_class_of_their_own_are_known_by_their_words(kind, said, is_one):
    assert is_out_of_memory(kind(said)) == is_one


def test_other_errors_pass(configured):
    with pytest.raises(RuntimeError, match="must match the size"), explaining_memory(configured()):
        torch.ones(2) + torch.ones(3)


LIMITED = (
    "import resource, runpy; resource.setrlimit(resource.RLIMIT_AS, (5 << 30, 5 << 30)); "
    "runpy.run_module('volseg', run_name='__main__', alter_sys=True)"
)


@pytest.mark.usefixtures("ready_python")
def test_a_training_out_of_memory_is_one_message_without_traceback(config_file):
    """Under a real limit: the allocator refuses in the middle of the first step."""
    command = [sys.executable, "-c", LIMITED, "train", str(config_file), "--set", "patch.size=[320,320,320]"]
    ended = subprocess.run(command, capture_output=True, encoding="utf-8", check=False)
    assert ended.returncode == 1
    assert "volseg: out of memory on cpu" in ended.stderr
    assert "Reduce patch.batch" in ended.stderr
    assert "Traceback" not in ended.stderr
