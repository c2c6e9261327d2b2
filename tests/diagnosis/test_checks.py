"""Findings on simulated machines, each bad in one way."""

from typing import Any

import pytest

from volseg.diagnosis.doctor import CHECKS, LIMITS_S, Facts, MachineFinding, check
from volseg.diagnosis.gpu_checks import has_code_for
from volseg.diagnosis.machine_checks import HARMFUL

GIB = 2**30
V100, H200 = (7, 0), (9, 0)
CU126 = ("sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90")
CU128 = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")


def gpus(name: str, capability: tuple[int, int], count: int = 4) -> list[dict]:
    return [{"index": i, "name": name, "capability": capability} for i in range(count)]


P3 = {
    "version": "2.8.0+cu126",
    "cuda": "12.6",
    "rocm": None,
    "cudnn": 90701,
    "nccl": None,
    "refused": None,
    "architectures": CU126,
    "gpus": gpus("Tesla V100", V100),
    "threads": 1,
}
H200S = {
    **P3,
    "version": "2.11.0+cu128",
    "cuda": "12.8",
    "cudnn": 91900,
    "architectures": CU128,
    "gpus": gpus("H200", H200, 2),
}
BUS_OF_V100 = [{"address": "0000:00:1e.0", "device": 0x1DB1}]
SOUND: dict[str, Any] = {
    "python": {"version": "3.12.4", "executable": "/usr/bin/python", "start_method": "fork", "variables": {}},
    "system": {
        "memory_bytes": 244 * GIB,
        "available_bytes": 200 * GIB,
        "memory_limit_bytes": None,
        "cores": 32,
        "core_limit": None,
        "in_container": False,
        "shared_memory_bytes": 122 * GIB,
        "shared_memory_free_bytes": 122 * GIB,
        "open_files": 65536,
        "open_files_hard": 65536,
    },
    "folders": {
        "folders": [
            {
                "role": "runs",
                "path": "/runs",
                "existing": "/",
                "refused": None,
                "total_bytes": 100 * GIB,
                "free_bytes": 90 * GIB,
            }
        ]
    },
    "packages": {"versions": {"monai": "1.6.1"}, "unmet": [], "is_installed": True},
    "torch": P3,
    "driver": {
        "version": "580.95.05",
        "is_open": False,
        "on_bus": BUS_OF_V100 * 4,
        "nodes": ["nvidia0"],
        "refused": None,
    },
    "links": {"peers": [{"source": 0, "target": 1, "has_access": True, "gb_per_s": 48.0, "is_right": True}]},
    "all_reduce": {"backend": "nccl", "processes": 4, "size_bytes": 2**26, "seconds": 1e-3, "is_right": True},
    "compiler": {"triton": "3.4.0", "kernel": "right", "refused": None, "seconds": 2.0},
    "failures": [],
}


def said(facts: Facts, name: str) -> MachineFinding:
    """Return the worst that is said of one thing."""
    order = ("ok", "note", "warning", "error")
    return max((one for one in check(facts) if one.check == name), key=lambda one: order.index(one.level))


def change(section: str, facts: Facts = SOUND, **changes: object) -> dict[str, Any]:
    """Return facts with other values in one section."""
    return {**facts, section: {**facts[section], **changes}}


def change_folder(**changes: object) -> dict[str, Any]:
    return change("folders", folders=[{**SOUND["folders"]["folders"][0], **changes}])


def change_peer(**changes: object) -> dict[str, Any]:
    return change("links", peers=[{**SOUND["links"]["peers"][0], **changes}])


def change_variables(**variables: str) -> dict[str, Any]:
    return change("python", variables=variables)


def fail(name: str, reason: str, facts: Facts = SOUND, *, timed_out: bool = False) -> dict[str, Any]:
    """Return facts without a section, and with a failure of its gatherer."""
    rest = {key: section for key, section in facts.items() if key != name}
    return {**rest, "failures": [{"name": name, "reason": reason, "timed_out": timed_out}]}


NO_DRIVER = {"version": None, "is_open": None, "nodes": []}
H200S_SOUND = {**SOUND, "torch": H200S}
DOCKERS = change("system", shared_memory_bytes=64 * 2**20, shared_memory_free_bytes=64 * 2**20)


def test_a_sound_p3_has_nothing_to_mend() -> None:
    findings = check(SOUND)
    assert {finding.level for finding in findings} == {"ok"}
    assert len({finding.check for finding in findings}) >= 14


BAD = {
    "V100 with a build for CUDA 12.8": (change("torch", version="2.11.0+cu128", cuda="12.8", architectures=CU128),
        "gpu.architecture", "error", "sm_70", "whl/cu126"),
    "V100 with the newest build of PyPI": (
        change("torch", version="2.15.0", cuda="13.2", architectures=("sm_75", "sm_80", "sm_90", "compute_120")),
        "gpu.architecture", "error", "2.15.0", "<2.15"),
    "Blackwell with a build for CUDA 12.6": (change("torch", version="2.10.0+cu126", gpus=gpus("B200", (10, 0))),
        "gpu.architecture", "error", "sm_100", "whl/cu128"),
    "torch 2.9": (change("torch", version="2.9.0+cu126", gpus=gpus("A100", (8, 0))),
        "torch", "warning", "2.9.0", "whl/cu126"),
    "torch too old": (change("torch", version="2.6.0+cu126"), "torch", "error", "2.6.0", "torch>=2.10"),
    "torch for AMD": (change("torch", version="2.10.0", cuda=None, rocm="6.4"), "torch", "note", "ROCm", ""),
    "cuDNN that is wrong": (change("torch", cudnn=91002, gpus=gpus("A100", (8, 0))),
        "cudnn", "warning", "9.10.2", "nvidia-cudnn-cu12>=9.15"),
    "the same on a V100, which has no later one": (change("torch", version="2.12.0+cu126", cudnn=91002),
        "cudnn", "warning", "9.10.2", "memory_format=channels_last"),
    "cuDNN without V100": (change("torch", cudnn=91500), "cudnn", "error", "9.15.0", "<9.11"),
    "no cuDNN": (change("torch", cudnn=None), "cudnn", "warning", "no cuDNN", "torch"),
    "driver without Volta": (change("driver", version="595.91.07"), "driver", "error", "595", "driver-580-server"),
    "open driver on a V100": (change("driver", is_open=True), "driver", "error", "open kernel", "not nvidia"),
    "driver too old for CUDA 13": (
        change("driver", change("torch", H200S_SOUND, cuda="13.0"), version="570.86.10", is_open=True, on_bus=[]),
        "driver", "error", "570.86.10", "whl/cu126"),
    "driver too old for CUDA 12": (change("driver", H200S_SOUND, version="470.57.02", is_open=None, on_bus=[]),
        "driver", "error", "470", "reboot"),
    "GPUs without a driver": (change("driver", change("torch", gpus=[]), **NO_DRIVER, on_bus=BUS_OF_V100),
        "gpu.seen", "error", "1 NVIDIA GPU", "not nvidia-driver-580-server-open"),
    "a GPU and a torch for CPUs": (
        change("torch", version="2.13.0+cpu", cuda=None, cudnn=None, architectures=(), gpus=[]),
        "gpu.seen", "error", "torch sees none", "whl/cu126"),
    "a container without its GPUs": (
        change("driver", change("torch", change("system", in_container=True), gpus=[]), nodes=[]),
        "gpu.seen", "error", "torch sees none", "--gpus all"),
    "GPUs that a variable hides": (change("torch", change_variables(CUDA_VISIBLE_DEVICES=""), gpus=[]),
        "gpu.seen", "error", "torch sees none", "unset CUDA_VISIBLE_DEVICES"),
    "Docker's shared memory": (DOCKERS,
        "shared_memory", "error", "64 MiB", "--ipc=host"),
    "the same with one GPU": (
        change("torch", DOCKERS, gpus=P3["gpus"][:1]),
        "shared_memory", "note", "64 MiB", "--ipc=host"),
    "no shared memory": (change("system", shared_memory_bytes=None, shared_memory_free_bytes=None),
        "shared_memory", "error", "/dev/shm does not exist", "--shm-size"),
    "little memory": (change("system", available_bytes=2 * GIB), "memory", "warning", "2.0 GiB free", "ps aux"),
    "a container of little memory": (change("system", memory_limit_bytes=4 * GIB),
        "memory", "warning", "may use 4.0 GiB", "--memory"),
    "few cores": (change("system", cores=8), "cores", "warning", "2 per GPU", "--cpus"),
    "a quota of cores": (change("system", core_limit=2.0), "cores", "warning", "may use 2", "--cpus"),
    "more threads than cores": (change("torch", change("system", core_limit=2.0), threads=32),
        "threads", "warning", "32 threads on 2 cores", "OMP_NUM_THREADS=2"),
    "few open files": (change("system", open_files=512), "open_files", "warning", "512", "ulimit -n 65536"),
    "hardly any open files, and no more to be had": (change("system", open_files=64, open_files_hard=64),
        "open_files", "error", "64", "--ulimit nofile"),
    "a full disk": (change_folder(free_bytes=2**28), "disk.runs", "error", "256 MiB", "--output"),
    "a disk that refuses": (change_folder(refused="Read-only file system"),
        "disk.runs", "error", "Read-only", "--output"),
    "little room for the cache": (change_folder(role="cache", free_bytes=5 * GIB),
        "disk.cache", "warning", "5.0 GiB", "VOLSEG_CACHE"),
    "values that do not arrive": (change_peer(source=1, target=0, is_right=False),
        "links", "error", "1 to 0", "NCCL_P2P_DISABLE=1"),
    "GPUs that do not see each other": (change_peer(has_access=False, gb_per_s=9.0),
        "links", "note", "no peer access: 0 to 1", "parallel.data"),
    "a slow link": (change_peer(gb_per_s=1.5), "links", "warning", "slow: 0 to 1", "parallel.data"),
    "wrong sums": (change("all_reduce", is_right=False), "all_reduce", "error", "sums are wrong", "ACS"),
    "sums that hang": (fail("all_reduce", "no answer", timed_out=True),
        "all_reduce", "error", "timed out", "NCCL_DEBUG=INFO"),
    "no torch": (fail("torch", "No module named 'torch'"), "torch", "error", "No module", "pip install"),
    "no C compiler": (
        change("compiler", H200S_SOUND, refused="RuntimeError: Failed to find C compiler.", kernel="not run"),
        "triton", "error", "C compiler", "apt-get install gcc"),
    "no headers of Python": (
        change("compiler", H200S_SOUND, refused="Command 'gcc' returned non-zero exit status 1.", kernel="not run"),
        "triton", "error", "gcc", "python3-dev"),
    "a kernel that is wrong": (change("compiler", H200S_SOUND, kernel="wrong"),
        "triton", "error", "wrong values", "training.kernels=torch"),
    "no Triton on a new GPU": (change("compiler", H200S_SOUND, triton=None),
        "triton", "warning", "not installed", "pip install triton"),
    "a package that is too old": (change("packages", unmet=["volseg needs monai>=1.6, but 1.4.0 is installed"]),
        "packages", "error", "1.4.0", 'pip install "monai>=1.6"'),
    "a checkout on PYTHONPATH": (change("packages", is_installed=False),
        "packages", "note", "from a checkout", "pip install -e ."),
}  # fmt: skip
"""By what is bad: the facts, the check, its level, and parts of what was found and of the remedy."""


@pytest.mark.parametrize(("facts", "name", "level", "found", "remedy"), BAD.values(), ids=BAD)
def test_a_bad_machine_is_told_of(facts: Facts, name: str, level: str, found: str, remedy: str) -> None:
    finding = said(facts, name)
    assert finding.level == level
    assert found in finding.found
    assert remedy in finding.remedy


HARMFUL_VALUES = {
    **dict.fromkeys(("CUDA_LAUNCH_BLOCKING", "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "TRITON_INTERPRET"), "1"),
    "LD_LIBRARY_PATH": "/usr/local/cuda-11.8/lib64", "PYTHONHOME": "/opt/python", "RANK": "3",
    "PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync", "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
}  # fmt: skip


@pytest.mark.parametrize("name", HARMFUL)
def test_a_variable_that_hurts_is_told_of(name: str) -> None:
    value = HARMFUL_VALUES[name]
    finding = said(change_variables(**{name: value}), "variables")
    assert (finding.level, finding.found) == (HARMFUL[name][1], f"{name}={value}")
    assert f"unset {name}" in finding.remedy


def test_a_variable_that_does_no_harm_is_listed() -> None:
    facts = change_variables(NCCL_DEBUG="WARN", LD_LIBRARY_PATH="/x")
    assert said(facts, "variables").level == "ok"
    assert said(facts, "variables").found == "NCCL_DEBUG=WARN"


@pytest.mark.parametrize("name", LIMITS_S)
def test_a_gatherer_that_gives_no_answer_is_told_of_and_stops_no_other_check(name: str) -> None:
    findings = check(fail(name, "no answer within 30 s", timed_out=True))
    assert not [finding for finding in findings if "this check raised" in finding.found]
    told = next(finding for finding in findings if finding.check == name)
    assert told.level in ("warning", "error")
    assert "no answer within 30 s" in told.found
    assert told.remedy


def test_nothing_is_said_of_what_was_not_gathered() -> None:
    assert check({"failures": []}) == []


def test_a_check_that_fails_is_a_finding() -> None:
    facts = change("torch", version="not a version")
    found = said(facts, "torch")
    assert found.level == "error"
    assert "this check raised InvalidVersion" in found.found
    assert said(facts, "driver").level == "ok"
    assert len(CHECKS) >= 16


@pytest.mark.parametrize(
    ("capability", "architectures", "runs"),
    [
        (V100, CU126, True),
        (V100, CU128, False),
        ((8, 9), CU126, True),
        ((8, 9), ("sm_80",), True),
        ((8, 0), ("sm_86",), False),
        (H200, ("sm_90a",), True),
        ((12, 0), ("sm_90", "compute_90"), True),
        ((12, 0), CU128, True),
        ((10, 3), CU128, True),
        (V100, ("compute_80",), False),
        (H200, (), False),
    ],
)
def test_code_runs_on_its_generation_and_ptx_on_later_ones(capability, architectures, runs) -> None:
    assert has_code_for(capability, architectures) == runs
