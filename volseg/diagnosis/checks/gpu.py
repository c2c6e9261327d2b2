"""Check the build of torch and the NVIDIA driver against each other and against the machine's GPUs."""

from packaging.version import Version

from volseg.diagnosis.facts import DriverFacts, Facts, Gpu, TorchFacts
from volseg.diagnosis.findings import MachineFinding, error, note, ok, warning

# The build of torch against the GPUs of the machine.
#
# .. [1] 2.9 runs 3D convolutions under autocast four times slower: pytorch#166122.
# .. [2] cuDNN 9.8 to 9.14 computes large 3D convolutions in half precision wrongly (pytorch#163539); torch from 2.9.1
#        on does not use it for these, unless in the layout channels last (pytorch#166480,
#        ``ATen/native/Convolution.cpp``).
# .. [3] cuDNN 9.11 dropped compute capability 7.0; builds of torch with CUDA 12.8 from 2.11 on and all with CUDA 13
#        have no code for it; those with CUDA 12.6 do up to torch 2.14: pytorch#157517, #172352, #190385.


VOLTA = (7, 0)
AMPERE = (8, 0)
BLACKWELL = (10, 0)
LEAST_TORCH = Version("2.8")
FIRST_GUARDED = Version("2.9.1")
"""The first torch that avoids the wrong kernels of cuDNN."""

WRONG_CUDNN = range(90800, 91500)
FIRST_CUDNN_WITHOUT_VOLTA = 91100

INSTALL = "pip install --force-reinstall"
FOR_VOLTA = f'{INSTALL} "torch>=2.10,<2.15" --index-url https://download.pytorch.org/whl/cu126'


def check_torch(build: TorchFacts) -> list[MachineFinding]:
    """Report the build of torch, and whether its version works."""
    kind = f"CUDA {build.cuda}" if build.cuda else f"ROCm {build.rocm}" if build.rocm else "CPU"
    told = f"torch {build.version} ({kind}{f', NCCL {build.nccl}' if build.nccl else ''})"
    version = Version(build.version)
    if version < LEAST_TORCH:
        why = f"volseg and MONAI need torch {LEAST_TORCH} or later"
        remedy = f'{INSTALL} "torch>=2.10" --index-url {_index(build)}'
        return [error("torch", told, why, remedy)]
    if version.release[:2] == (2, 9):
        why = "torch 2.9 runs 3D convolutions under autocast up to four times slower, and takes more memory"
        remedy = FOR_VOLTA if _has(build, VOLTA) else f'{INSTALL} "torch>=2.10" --index-url {_index(build)}'
        return [warning("torch", told, why, remedy)]
    if build.rocm:
        why = "nobody has tried volseg on AMD's GPUs; its fast kernels are for NVIDIA's"
        return [note("torch", told, why)]
    return [ok("torch", told)]


def _index(build: TorchFacts) -> str:
    """Return the package index of builds of the same kind."""
    kind = f"cu{build.cuda.replace('.', '')}" if build.cuda else "cpu"
    return f"https://download.pytorch.org/whl/{kind}"


def _has(build: TorchFacts, capability: tuple[int, int]) -> bool:
    return any(gpu.capability == capability for gpu in build.gpus)


def check_architectures(build: TorchFacts) -> list[MachineFinding]:
    """Report for each kind of GPU whether the build has code for it."""
    if not build.architectures:
        return []
    return [_check_architecture(build, gpus) for gpus in _by_kind(build.gpus)]


def _by_kind(gpus: tuple[Gpu, ...]) -> list[list[Gpu]]:
    """Return the GPUs grouped by kind, for one finding per kind."""
    kinds: dict[tuple[str, tuple[int, int]], list[Gpu]] = {}
    for gpu in gpus:
        kinds.setdefault((gpu.name, gpu.capability), []).append(gpu)
    return list(kinds.values())


def _check_architecture(build: TorchFacts, gpus: list[Gpu]) -> MachineFinding:
    major, minor = gpus[0].capability
    told = f"{len(gpus)} x {gpus[0].name}, sm_{major}{minor}"
    if has_code_for(gpus[0].capability, build.architectures):
        return ok("gpu.architecture", f"{told}, among what the build has code for")
    if gpus[0].capability == VOLTA:
        remedy = FOR_VOLTA
        why = "a V100 needs a build for CUDA 12.6, of torch up to 2.14; others end with 'no kernel image is available'"
    elif gpus[0].capability < VOLTA:
        remedy, why = FOR_VOLTA, "builds for CUDA 12.6 alone still have code for GPUs as old as this"
    else:
        newest = "cu128" if gpus[0].capability >= BLACKWELL else "cu126"
        remedy = f'{INSTALL} "torch>=2.10" --index-url https://download.pytorch.org/whl/{newest}'
        why = "its kernels end with 'no kernel image is available for execution on the device'"
    has = f"this build (torch {build.version}) has code for {', '.join(build.architectures)}"
    return error("gpu.architecture", f"{told}; {has}", why, remedy)


def has_code_for(capability: tuple[int, int], architectures: tuple[str, ...]) -> bool:
    """Return whether a build has code for a GPU: binaries of the same generation, or PTX of an earlier or the same one.

    >>> has_code_for((7, 0), ("sm_75", "sm_80")), has_code_for((8, 9), ("sm_80",))
    (False, True)
    >>> has_code_for((9, 0), ("compute_80",))
    True
    """
    for architecture in architectures:
        kind, _, number = architecture.partition("_")
        digits = number.rstrip("af")  # sm_90a, sm_100f
        own = (int(digits[:-1]), int(digits[-1]))
        if kind == "compute" and own <= capability:
            return True
        if kind == "sm" and own[0] == capability[0] and own[1] <= capability[1]:
            return True
    return False


def check_precision(build: TorchFacts) -> list[MachineFinding]:
    """Report GPUs without bfloat16 and fast kernels."""
    old = [gpus for gpus in _by_kind(build.gpus) if gpus[0].capability < AMPERE]
    return [
        note(
            "gpu.precision",
            f"{gpus[0].name} has no bfloat16",
            "training.precision: auto takes fp16 there, and training.kernels: auto torch's kernels",
        )
        for gpus in old
    ]


def check_cudnn(build: TorchFacts) -> list[MachineFinding]:
    """Report whether cuDNN supports the GPUs, and whether its version computes 3D convolutions correctly."""
    if build.cuda is None:
        return []
    if build.cudnn is None:
        why = "convolutions run several times slower without it"
        remedy = f"{INSTALL} torch --index-url {_index(build)}"
        return [warning("cudnn", "there is no cuDNN", why, remedy)]
    told = f"cuDNN {build.cudnn // 10000}.{build.cudnn // 100 % 100}.{build.cudnn % 100}"
    if _has(build, VOLTA) and build.cudnn >= FIRST_CUDNN_WITHOUT_VOLTA:
        why = "cuDNN from 9.11 on does not run on a V100"
        remedy = f'{FOR_VOLTA} && pip install "nvidia-cudnn-cu12<9.11"'
        return [error("cudnn", told, why, remedy)]
    if build.cudnn not in WRONG_CUDNN:
        return [ok("cudnn", told)]
    if Version(build.version) < FIRST_GUARDED:
        why = "cuDNN 9.8 to 9.14 may compute 3D convolutions of large volumes wrongly in half precision"
    else:
        why = (
            "torch does not use cuDNN 9.8 to 9.14 for 3D convolutions in half precision, unless they lie channels last"
        )
    if _has(build, VOLTA):
        remedy = "volseg train CONFIG --set training.memory_format=channels_last (later ones of cuDNN have no V100)"
    else:
        remedy = f'pip install "nvidia-cudnn-cu{build.cuda.partition(".")[0]}>=9.15"'
    return [warning("cudnn", told, why, remedy)]


# The NVIDIA driver against the GPUs on the bus and the build of torch.
#
# .. [1] 580 is the last branch with Maxwell, Pascal and Volta (NVIDIA's Unix deprecation schedule); the open kernel
#        module drives Turing and later only.
# .. [2] Builds for CUDA 12 need branch 525 or later, for CUDA 13 branch 580 (NVIDIA, CUDA compatibility, table 1).


LAST_WITH_VOLTA = 580
VOLTA_DEVICES = range(0x1D80, 0x1E00)
"""NVIDIA's numbers of GV100: V100 and Titan V."""

LEAST_BRANCH = {"12": 525, "13": 580}
"""Least driver branch by CUDA's major version."""

DRIVER_FOR_VOLTA = (
    "sudo apt-get install nvidia-driver-580-server   (proprietary; not nvidia-driver-580-server-open), then sudo reboot"
)


def check_driver(facts: Facts) -> list[MachineFinding]:
    """Report the driver, and whether it supports these GPUs and this build of torch."""
    driver = facts.driver
    if driver is None or driver.version is None:
        return []
    branch = int(driver.version.partition(".")[0])
    told = f"NVIDIA driver {driver.version}{_kind(driver)}"
    if _has_volta(facts) and (branch > LAST_WITH_VOLTA or driver.is_open):
        why = (
            "the open kernel module drives no Volta; it needs the proprietary one"
            if branch <= LAST_WITH_VOLTA
            else "580 is the last branch that drives Volta (V100), with its proprietary kernel module"
        )
        return [error("driver", told, why, DRIVER_FOR_VOLTA)]
    cuda = facts.torch.cuda if facts.torch is not None else None
    least = LEAST_BRANCH.get((cuda or "").partition(".")[0])
    if least is not None and branch < least:
        why = f"CUDA {cuda} needs branch {least} or later"
        remedy = (
            "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu126"
            if branch >= LEAST_BRANCH["12"]
            else f"sudo apt-get install nvidia-driver-{LAST_WITH_VOLTA}-server, then sudo reboot"
        )
        return [error("driver", f"{told}, and torch is built for CUDA {cuda}", why, remedy)]
    return [ok("driver", told)]


def _kind(driver: DriverFacts) -> str:
    return "" if driver.is_open is None else ", open kernel module" if driver.is_open else ", proprietary kernel module"


def _has_volta(facts: Facts) -> bool:
    on_bus = facts.driver is not None and any(gpu.device in VOLTA_DEVICES for gpu in facts.driver.on_bus)
    seen = facts.torch is not None and any(gpu.capability[0] == 7 and gpu.capability[1] < 5 for gpu in facts.torch.gpus)
    return on_bus or seen


def check_gpus_seen(facts: Facts) -> list[MachineFinding]:
    """Report how many GPUs torch sees, and why it sees none of those present."""
    build, driver = facts.torch, facts.driver
    if build is None or driver is None:
        return []
    there, seen = max(len(driver.on_bus), len(driver.compute_modes)), len(build.gpus)
    if seen:
        fewer = f" of {there}" if there > seen else ""
        return [ok("gpu.seen", f"torch sees {seen}{fewer} GPU{'s' if seen > 1 else ''}")]
    if not there and not driver.nodes:
        why = "trainings run on the CPU, tens of times slower"
        return [note("gpu.seen", "there is no NVIDIA GPU", why)]
    found = f"{max(there, len(driver.nodes))} NVIDIA GPU(s) in the machine, of which torch sees none"
    cause, remedy = _find_cause(facts)
    said = f" ({build.refused})" if build.refused else f" ({driver.refused})" if driver.refused else ""
    return [error("gpu.seen", found + said, cause, remedy)]


def _find_cause(facts: Facts) -> tuple[str, str]:
    """Return cause and remedy for unusable GPUs; the most obvious cause is tried first."""
    build, driver = facts.torch, facts.driver
    assert build is not None
    assert driver is not None
    variables = facts.python.variables if facts.python is not None else {}
    if "CUDA_VISIBLE_DEVICES" in variables:
        hidden = f"CUDA_VISIBLE_DEVICES is {variables['CUDA_VISIBLE_DEVICES']!r}, which hides them"
        return hidden, "unset CUDA_VISIBLE_DEVICES"
    if build.cuda is None:
        index = "cu126" if _has_volta(facts) else "cu128"
        return (
            "this torch is a build for CPUs",
            f"pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/{index}",
        )
    if driver.version is None:
        needed = DRIVER_FOR_VOLTA if _has_volta(facts) else "sudo apt-get install nvidia-driver-580-server-open"
        return "no NVIDIA driver is loaded", needed
    if not driver.nodes and facts.system is not None and facts.system.in_container:
        return "the container was started without them", "docker run --gpus all ... (needs nvidia-container-toolkit)"
    return "driver, GPU and build do not fit each other", "nvidia-smi; dmesg | grep -i -e nvrm -e xid"


def check_compute_modes(driver: DriverFacts) -> list[MachineFinding]:
    """Report GPUs that accept only one process, or none."""
    other = sorted({mode for mode in driver.compute_modes if mode not in ("Default", "[N/A]")})
    return [
        warning(
            "gpu.compute_mode",
            mode,
            "a GPU that one process may use at a time refuses the second of a training, and tests beside it",
            "sudo nvidia-smi -c DEFAULT",
        )
        for mode in other
    ]
