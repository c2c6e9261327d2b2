"""Machines that are bad in one way each, made up, and what is said of them."""

from dataclasses import replace

import pytest

from volseg.diagnosis.checks import CHECKS, check
from volseg.diagnosis.checks.gpu import has_code_for
from volseg.diagnosis.checks.software import BY_NAME
from volseg.diagnosis.facts import (
    AllReduceFacts,
    CompilerFacts,
    DriverFacts,
    Facts,
    FolderFacts,
    FoldersFacts,
    Gpu,
    ImportFacts,
    LinkFacts,
    NotGathered,
    PackageFacts,
    PciGpu,
    Peer,
    PythonFacts,
    SystemFacts,
    TorchFacts,
)
from volseg.diagnosis.findings import MachineFinding
from volseg.diagnosis.gathering import GATHERERS

GIB = 2**30
V100, H200 = (7, 0), (9, 0)
CU126 = ("sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90")
CU128 = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")


def gpus(name: str, capability: tuple[int, int], count: int = 4) -> tuple[Gpu, ...]:
    return tuple(Gpu(index=i, name=name, capability=capability, memory_bytes=16 * GIB) for i in range(count))


P3 = TorchFacts(version="2.8.0+cu126", cuda="12.6", cudnn=90701, architectures=CU126, gpus=gpus("Tesla V100", V100))
H200S = TorchFacts(version="2.11.0+cu128", cuda="12.8", cudnn=91900, architectures=CU128, gpus=gpus("H200", H200, 2))
BUS_OF_V100 = (PciGpu(address="0000:00:1e.0", device=0x1DB1),)
SYSTEM = SystemFacts(
    memory_bytes=244 * GIB,
    available_bytes=200 * GIB,
    cores=32,
    shared_memory_bytes=122 * GIB,
    shared_memory_free_bytes=122 * GIB,
    open_files=65536,
    open_files_hard=65536,
    built=1.7e9,
)
FOLDER = FolderFacts(role="runs", path="/runs", existing="/", total_bytes=100 * GIB, free_bytes=90 * GIB)
SOUND = Facts(
    python=PythonFacts(version="3.12.4"),
    system=SYSTEM,
    folders=FoldersFacts(folders=(FOLDER,)),
    packages=PackageFacts(versions={"monai": "1.6.1"}),
    imports=ImportFacts(),
    torch=P3,
    driver=DriverFacts(version="580.95.05", is_open=False, on_bus=BUS_OF_V100 * 4, nodes=("nvidia0",)),
    links=LinkFacts(peers=(Peer(source=0, target=1, has_access=True, link="NV2", gb_per_s=48.0, is_right=True),)),
    all_reduce=AllReduceFacts(backend="nccl", processes=4, size_bytes=2**26, seconds=1e-3, is_right=True),
    compiler=CompilerFacts(compiler="/usr/bin/gcc", headers="/h", triton="3.4.0", kernel="right", seconds=2.0),
)


def said(facts: Facts, name: str) -> MachineFinding:
    """Return the worst that is said of one thing."""
    order = ("ok", "note", "warning", "error")
    return max((one for one in check(facts) if one.check == name), key=lambda one: order.index(one.level))


def with_torch(**changes: object) -> Facts:
    return replace(SOUND, torch=replace(P3, **changes))


def with_system(**changes: object) -> Facts:
    return replace(SOUND, system=replace(SYSTEM, **changes))


def with_driver(**changes: object) -> Facts:
    return replace(SOUND, driver=replace(SOUND.driver, **changes))


def with_folder(**changes: object) -> Facts:
    return replace(SOUND, folders=FoldersFacts(folders=(replace(FOLDER, **changes),)))


def with_compiler(**changes: object) -> Facts:
    return replace(SOUND, torch=H200S, compiler=replace(SOUND.compiler, **changes))


def with_peer(**changes: object) -> Facts:
    return replace(SOUND, links=LinkFacts(peers=(Peer(**{"source": 0, "target": 1, "has_access": True, **changes}),)))


def with_packages(**changes: object) -> Facts:
    return replace(SOUND, packages=PackageFacts(versions={}, **changes))


def test_a_sound_p3_has_nothing_to_mend() -> None:
    findings = check(SOUND)
    assert {finding.level for finding in findings} == {"ok", "note"}
    assert [finding.check for finding in findings if finding.level == "note"] == ["gpu.precision"]
    assert len({finding.check for finding in findings}) >= 16


BAD = {
    "V100 with a build for CUDA 12.8": (
        with_torch(version="2.11.0+cu128", cuda="12.8", architectures=CU128),
        ("gpu.architecture", "error", "sm_70", "CUDA 12.6", "whl/cu126"),
    ),
    "V100 with the newest build of PyPI": (
        with_torch(version="2.15.0", cuda="13.2", architectures=("sm_75", "sm_80", "sm_90", "compute_120")),
        ("gpu.architecture", "error", "2.15.0", "no kernel image", "<2.15"),
    ),
    "Blackwell with a build for CUDA 12.6": (
        with_torch(version="2.10.0+cu126", gpus=gpus("B200", (10, 0))),
        ("gpu.architecture", "error", "sm_100", "no kernel image", "whl/cu128"),
    ),
    "torch 2.9": (
        with_torch(version="2.9.0+cu126", gpus=gpus("A100", (8, 0))),
        ("torch", "warning", "2.9.0", "four times slower", "whl/cu126"),
    ),
    "torch too old": (with_torch(version="2.6.0+cu126"), ("torch", "error", "2.6.0", "2.8", "torch>=2.10")),
    "torch for AMD": (with_torch(version="2.10.0", cuda=None, rocm="6.4"), ("torch", "note", "ROCm", "AMD", "")),
    "cuDNN that is wrong": (
        with_torch(cudnn=91002, gpus=gpus("A100", (8, 0))),
        ("cudnn", "warning", "9.10.2", "wrongly", "nvidia-cudnn-cu12>=9.15"),
    ),
    "cuDNN that torch keeps away from": (
        with_torch(version="2.10.0+cu126", cudnn=91002, gpus=gpus("A100", (8, 0))),
        ("cudnn", "warning", "9.10.2", "does not use", "nvidia-cudnn-cu12>=9.15"),
    ),
    "the same on a V100, which has no later one": (
        with_torch(version="2.12.0+cu126", cudnn=91002),
        ("cudnn", "warning", "9.10.2", "does not use", "memory_format=channels_last"),
    ),
    "cuDNN without V100": (with_torch(cudnn=91500), ("cudnn", "error", "9.15.0", "V100", "<9.11")),
    "no cuDNN": (with_torch(cudnn=None), ("cudnn", "warning", "no cuDNN", "slower", "torch")),
    "driver without Volta": (with_driver(version="595.91.07"), ("driver", "error", "595", "580", "driver-580-server")),
    "open driver on a V100": (
        with_driver(is_open=True),
        ("driver", "error", "open kernel", "proprietary", "not nvidia"),
    ),
    "driver too old for CUDA 13": (
        replace(SOUND, torch=replace(H200S, cuda="13.0"), driver=DriverFacts(version="570.86.10", is_open=True)),
        ("driver", "error", "570.86.10", "580", "whl/cu126"),
    ),
    "driver too old for CUDA 12": (
        replace(SOUND, torch=H200S, driver=DriverFacts(version="470.57.02")),
        ("driver", "error", "470", "525", "reboot"),
    ),
    "a V100 that a new driver does not drive": (
        replace(
            with_torch(gpus=(), refused="No CUDA GPUs are available"), driver=replace(SOUND.driver, version="595.1")
        ),
        ("driver", "error", "595.1", "last branch", "580"),
    ),
    "GPUs without a driver": (
        replace(with_torch(gpus=()), driver=DriverFacts(on_bus=BUS_OF_V100)),
        ("gpu.seen", "error", "1 NVIDIA GPU", "no NVIDIA driver", "not nvidia-driver-580-server-open"),
    ),
    "a GPU and a torch for CPUs": (
        with_torch(version="2.13.0+cpu", cuda=None, cudnn=None, architectures=(), gpus=()),
        ("gpu.seen", "error", "torch sees none", "CPUs", "whl/cu126"),
    ),
    "a container without its GPUs": (
        replace(with_driver(nodes=()), torch=replace(P3, gpus=()), system=replace(SYSTEM, in_container=True)),
        ("gpu.seen", "error", "torch sees none", "container", "--gpus all"),
    ),
    "GPUs that a variable hides": (
        replace(with_torch(gpus=()), python=PythonFacts(version="3.12", variables={"CUDA_VISIBLE_DEVICES": ""})),
        ("gpu.seen", "error", "torch sees none", "hides", "unset CUDA_VISIBLE_DEVICES"),
    ),
    "a GPU for one process": (
        with_driver(compute_modes=("Default", "Exclusive_Process")),
        ("gpu.compute_mode", "warning", "Exclusive_Process", "refuses", "nvidia-smi -c DEFAULT"),
    ),
    "Docker's shared memory": (
        with_system(shared_memory_bytes=64 * 2**20, shared_memory_free_bytes=64 * 2**20),
        ("shared_memory", "error", "64 MiB", "NCCL", "--ipc=host"),
    ),
    "the same with one GPU": (
        replace(
            with_system(shared_memory_bytes=64 * 2**20, shared_memory_free_bytes=64 * 2**20),
            torch=replace(P3, gpus=P3.gpus[:1]),
        ),
        ("shared_memory", "note", "64 MiB", "needs none", "--ipc=host"),
    ),
    "full shared memory": (
        with_system(shared_memory_free_bytes=0),
        ("shared_memory", "error", "0 MiB of it free", "NCCL", "ls -lh /dev/shm"),
    ),
    "no shared memory": (
        with_system(shared_memory_bytes=None, shared_memory_free_bytes=None),
        ("shared_memory", "error", "no /dev/shm", "NCCL", "--shm-size"),
    ),
    "little memory": (
        with_system(available_bytes=2 * GIB),
        ("memory", "warning", "2.0 GiB of it free", "ends", "ps aux"),
    ),
    "a container of little memory": (
        with_system(memory_limit_bytes=4 * GIB),
        ("memory", "warning", "may take 4.0 GiB", "ends", "--memory"),
    ),
    "few cores": (with_system(cores=8), ("cores", "warning", "2 for each GPU", "waits", "--cpus")),
    "a quota of cores": (with_system(core_limit=2.0), ("cores", "warning", "may take 2", "fewer than 4", "--cpus")),
    "more threads than cores": (
        replace(with_system(core_limit=2.0), torch=replace(P3, threads=32)),
        ("threads", "warning", "32 threads on 2 cores", "slower", "OMP_NUM_THREADS=2"),
    ),
    "few open files": (with_system(open_files=512), ("open_files", "warning", "512", "Too many", "ulimit -n 65536")),
    "hardly any open files, and no more to be had": (
        with_system(open_files=64, open_files_hard=64),
        ("open_files", "error", "64", "Too many", "--ulimit nofile"),
    ),
    "few processes": (with_system(processes=200), ("processes", "warning", "200", "threads", "--pids-limit")),
    "a clock that lies behind": (
        with_system(now=1e9, built=1.75e9),
        ("clock", "warning", "2001", "certificates", "set-ntp"),
    ),
    "a disk with another clock": (
        with_folder(clock_skew_s=-300.0),
        ("clock.disk", "warning", "-300 s", "age", "set-ntp"),
    ),
    "a full disk": (with_folder(free_bytes=2**28), ("disk.runs", "error", "256 MiB", "ends the training", "--output")),
    "a disk that refuses": (
        with_folder(refused="Read-only file system"),
        ("disk.runs", "error", "Read-only", "kept", "--output"),
    ),
    "a cache that refuses": (
        with_folder(role="cache", refused="Permission denied"),
        ("disk.cache", "warning", "Permission denied", "anew", "VOLSEG_CACHE"),
    ),
    "little room for the cache": (
        with_folder(role="cache", free_bytes=5 * GIB),
        ("disk.cache", "warning", "5.0 GiB", "tens of GiB", "VOLSEG_CACHE"),
    ),
    "runs in memory": (with_folder(file_system="tmpfs"), ("disk.runs", "note", "tmpfs", "gone", "--output")),
    "values that do not arrive": (
        with_peer(source=1, target=0, is_right=False),
        ("links", "error", "1 to 0", "silently", "NCCL_P2P_DISABLE=1"),
    ),
    "GPUs that do not see each other": (
        with_peer(has_access=False, link="SYS", gb_per_s=9.0),
        ("links", "note", "no peer access: 0 to 1", "every layer", "parallel.data"),
    ),
    "a slow link": (with_peer(gb_per_s=1.5), ("links", "warning", "slow: 0 to 1", "every layer", "parallel.data")),
    "wrong sums": (
        replace(SOUND, all_reduce=replace(SOUND.all_reduce, is_right=False)),
        ("all_reduce", "error", "wrong sums", "silently", "ACS"),
    ),
    "sums that hang": (
        replace(SOUND, all_reduce=None, failures=(NotGathered(name="all_reduce", reason="no answer", timed_out=True),)),
        ("all_reduce", "error", "time limit", "gradients", "NCCL_DEBUG=INFO"),
    ),
    "the same without a GPU": (
        replace(with_torch(gpus=()), all_reduce=None, failures=(NotGathered(name="all_reduce", reason="refused"),)),
        ("all_reduce", "warning", "refused", "gradients", "GLOO_SOCKET_IFNAME"),
    ),
    "no torch": (
        replace(SOUND, torch=None, failures=(NotGathered(name="torch", reason="No module named 'torch'"),)),
        ("torch", "error", "No module", "without torch", "pip install"),
    ),
    "no C compiler": (
        with_compiler(compiler=None, refused="there is no C compiler", kernel="not run", kernel_refused="Error: no C"),
        ("triton", "error", "C compiler", "first used", "apt-get install gcc"),
    ),
    "no headers of Python": (
        with_compiler(
            refused="tried.c:1:10: fatal error: Python.h: No such file", kernel="not run", kernel_refused="gcc"
        ),
        ("triton", "error", "Python.h", "fast kernels", "python3-dev"),
    ),
    "a kernel that is wrong": (
        with_compiler(kernel="wrong"),
        ("triton", "error", "wrong values", "fast kernels", "training.kernels=torch"),
    ),
    "no Triton on a new GPU": (
        with_compiler(triton=None),
        ("triton", "warning", "not installed", "torch's are taken", "pip install triton"),
    ),
    "no compiler and no GPU": (
        replace(with_torch(gpus=()), compiler=replace(SOUND.compiler, refused="there is no C compiler")),
        ("triton", "note", "no C compiler", "nothing here", "gcc"),
    ),
    "a package that is too old": (
        with_packages(unmet=("volseg needs monai>=1.6, installed is 1.4.0",)),
        ("packages", "error", "1.4.0", "not known to work", 'pip install "monai>=1.6"'),
    ),
    "a checkout on PYTHONPATH": (
        with_packages(is_installed=False),
        ("packages", "note", "from a checkout", "not known", "pip install -e ."),
    ),
    "packages that do not fit each other": (
        with_packages(unmet=("monai needs numpy<3.0,>=1.24, which is not installed",)),
        ("packages", "warning", "numpy", "not known", 'pip install "numpy<3.0,>=1.24"'),
    ),
    "a package twice": (
        with_packages(twice=("torch lies in /a and in /b",)),
        ("packages.twice", "warning", "/a and in /b", "depends", "pip uninstall torch"),
    ),
    "a library that cannot be imported": (
        replace(SOUND, imports=ImportFacts(refused={"SimpleITK": "ImportError: libstdc++.so.6"})),
        ("imports", "error", "libstdc++", "images", "SimpleITK"),
    ),
    "the system's Python": (
        replace(SOUND, python=PythonFacts(version="3.12", in_environment=False)),
        ("python", "note", "3.12", "other projects", "venv"),
    ),
    "a locale without UTF-8": (
        replace(SOUND, python=PythonFacts(version="3.12", encoding="ANSI_X3.4-1968", locale="C")),
        ("locale", "note", "ANSI", "letters", "LC_ALL=C.UTF-8"),
    ),
}


@pytest.mark.parametrize(("facts", "expected"), BAD.values(), ids=BAD.keys())
def test_a_bad_machine_is_told_of(facts: Facts, expected: tuple[str, str, str, str, str]) -> None:
    name, level, found, why, remedy = expected
    finding = said(facts, name)
    assert finding.level == level
    assert found in finding.found
    assert why in finding.why
    assert remedy in finding.remedy


@pytest.mark.parametrize(
    ("name", "value", "level"),
    [
        ("CUDA_LAUNCH_BLOCKING", "1", "warning"),
        ("CUDA_VISIBLE_DEVICES", "1,2", "note"),
        ("LD_LIBRARY_PATH", "/usr/local/cuda-11.8/lib64", "warning"),
        ("LD_PRELOAD", "libjemalloc.so", "note"),
        ("NCCL_DEBUG", "INFO", "note"),
        ("NCCL_P2P_DISABLE", "1", "warning"),
        ("NCCL_SHM_DISABLE", "1", "warning"),
        ("PYTHONHOME", "/opt/python", "warning"),
        ("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync", "warning"),
        ("PYTORCH_NO_CUDA_MEMORY_CACHING", "1", "warning"),
        ("RANK", "3", "warning"),
        ("TORCH_CUDA_ARCH_LIST", "7.0", "note"),
        ("TRITON_INTERPRET", "1", "error"),
    ],
)
def test_a_variable_that_hurts_is_told_of(name: str, value: str, level: str) -> None:
    facts = replace(SOUND, python=PythonFacts(version="3.12", variables={name: value}))
    finding = said(facts, "variables")
    assert (finding.level, finding.found) == (level, f"{name}={value}")
    assert f"unset {name}" in finding.remedy


def test_every_variable_that_hurts_is_tried_above() -> None:
    tried = next(
        mark.args[1] for mark in test_a_variable_that_hurts_is_told_of.pytestmark if mark.name == "parametrize"
    )
    assert {name for name, _, _ in tried} == BY_NAME.keys()


def test_a_variable_that_does_no_harm_is_listed() -> None:
    facts = replace(
        SOUND, python=PythonFacts(version="3.12", variables={"NCCL_DEBUG": "WARN", "LD_LIBRARY_PATH": "/x"})
    )
    assert said(facts, "variables").level == "ok"
    assert said(facts, "variables").found == "NCCL_DEBUG=WARN"


@pytest.mark.parametrize("gatherer", GATHERERS, ids=lambda gatherer: gatherer.name)
def test_a_gatherer_that_gives_no_answer_is_told_of_and_stops_no_other_check(gatherer) -> None:
    failure = NotGathered(name=gatherer.name, reason="no answer within 30 s", timed_out=True)
    findings = check(replace(SOUND, **{gatherer.name: None}, failures=(failure,)))
    assert not [finding for finding in findings if "failed itself" in finding.found]
    told = next(finding for finding in findings if finding.check == gatherer.name)
    assert told.level in ("warning", "error")
    assert "no answer within 30 s" in told.found
    assert told.remedy


def test_nothing_is_said_of_what_was_not_gathered() -> None:
    assert check(Facts()) == []


def test_a_check_that_fails_is_a_finding() -> None:
    facts = with_torch(version="not a version")
    found = said(facts, "torch")
    assert found.level == "error"
    assert "failed itself" in found.found
    assert said(facts, "driver").level == "ok"
    assert len(CHECKS) > 20


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
