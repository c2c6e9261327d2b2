"""What no memory holds is one typed error with the sizes and the remedies, before or in the middle of the work."""

import subprocess
import sys

import pytest
import torch

from volseg.errors import ConfigError, OutOfMemoryError
from volseg.experiment import train
from volseg.experiment.placement.out_of_memory import explaining_memory, is_out_of_memory


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["patch.size=[4000,4000,4000]"],
            r"patch: size \[4000, 4000, 4000\] and batch 2 takes 1907 GiB for a network's",
        ),
        (["patch.batch=1000000000"], r"patch: size \[16, 16, 16\] and batch 1000000000 takes 61035 GiB"),
        (["inference.window=[4000,4000,4000]"], r"inference\.window: \[4000, 4000, 4000\] takes 954 GiB"),
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
    remedies = ["smaller patch.batch", "smaller patch.size", "parallel.spatial", "parallel.checkpoint: all"]
    places = [message.index(remedy) for remedy in remedies]
    assert places == sorted(places)


@pytest.mark.parametrize(
    "said",
    [
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
        "NCCL error in: ProcessGroupNCCL.cpp, unhandled cuda error\nCuda failure 2 'out of memory'",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory",
    ],
)
def test_libraries_without_a_class_of_their_own_are_known_by_their_words(said):
    assert is_out_of_memory(RuntimeError(said))


@pytest.mark.parametrize(
    "fault", [RuntimeError("the scanner's store is out of memory cards"), ValueError("CUDA is out of memory")]
)
def test_who_only_speaks_of_memory_is_passed_on(fault):
    # A loss of somebody's own that raised such words was called out of memory, and replanned.
    assert not is_out_of_memory(fault)


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
    assert "Take a smaller patch.batch" in ended.stderr
    assert "Traceback" not in ended.stderr
