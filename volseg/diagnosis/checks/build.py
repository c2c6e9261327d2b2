"""The build of torch against the GPUs of the machine.

.. [1] 2.9 runs 3D convolutions under autocast four times slower: pytorch#166122.
.. [2] cuDNN 9.8 to 9.14 computes large 3D convolutions in half precision wrongly (pytorch#163539); torch from 2.9.1 on
       does not use it for these, unless in the layout channels last (pytorch#166480, ``ATen/native/Convolution.cpp``).
.. [3] cuDNN 9.11 dropped compute capability 7.0; builds of torch with CUDA 12.8 from 2.11 on and all with CUDA 13 have
       no code for it; those with CUDA 12.6 do up to torch 2.14: pytorch#157517, #172352, #190385.
"""

from packaging.version import Version

from volseg.diagnosis.facts import Facts, Gpu, TorchFacts
from volseg.diagnosis.findings import MachineFinding, ok

__all__ = ["check_architectures", "check_cudnn", "check_precision", "check_torch", "has_code_for"]

VOLTA = (7, 0)
AMPERE = (8, 0)
BLACKWELL = (10, 0)
LEAST_TORCH = Version("2.8")
FIRST_GUARDED = Version("2.9.1")
"""The first torch that keeps away from the wrong kernels of cuDNN."""

WRONG_CUDNN = range(90800, 91500)
FIRST_CUDNN_WITHOUT_VOLTA = 91100

INSTALL = "pip install --force-reinstall"
FOR_VOLTA = f'{INSTALL} "torch>=2.10,<2.15" --index-url https://download.pytorch.org/whl/cu126'


def check_torch(facts: Facts) -> list[MachineFinding]:
    """Say which build it is, and whether its version is one that works."""
    build = facts.torch
    if build is None:
        return []
    kind = f"CUDA {build.cuda}" if build.cuda else f"ROCm {build.rocm}" if build.rocm else "CPU"
    told = f"torch {build.version} ({kind}{f', NCCL {build.nccl}' if build.nccl else ''})"
    version = Version(build.version)
    if version < LEAST_TORCH:
        return [
            MachineFinding(
                check="torch",
                level="error",
                found=told,
                why=f"volseg and MONAI need torch {LEAST_TORCH} or later",
                remedy=f'{INSTALL} "torch>=2.10" --index-url {_index(build)}',
            )
        ]
    if version.release[:2] == (2, 9):
        return [
            MachineFinding(
                check="torch",
                level="warning",
                found=told,
                why="torch 2.9 runs 3D convolutions under autocast up to four times slower, and takes more memory",
                remedy=FOR_VOLTA if _has(build, VOLTA) else f'{INSTALL} "torch>=2.10" --index-url {_index(build)}',
            )
        ]
    if build.rocm:
        why = "nobody has tried volseg on AMD's GPUs; its fast kernels are for NVIDIA's"
        return [MachineFinding(check="torch", level="note", found=told, why=why)]
    return [ok("torch", told)]


def _index(build: TorchFacts) -> str:
    """Return where builds of the same kind are."""
    kind = f"cu{build.cuda.replace('.', '')}" if build.cuda else "cpu"
    return f"https://download.pytorch.org/whl/{kind}"


def _has(build: TorchFacts, capability: tuple[int, int]) -> bool:
    return any(gpu.capability == capability for gpu in build.gpus)


def check_architectures(facts: Facts) -> list[MachineFinding]:
    """Say for each kind of GPU whether the build has code for it."""
    build = facts.torch
    if build is None or not build.architectures:
        return []
    return [_check_architecture(build, gpus) for gpus in _by_kind(build.gpus)]


def _by_kind(gpus: tuple[Gpu, ...]) -> list[list[Gpu]]:
    """Return the GPUs in groups of one kind, since eight times the same is said once."""
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
    return MachineFinding(check="gpu.architecture", level="error", found=f"{told}; {has}", why=why, remedy=remedy)


def has_code_for(capability: tuple[int, int], architectures: tuple[str, ...]) -> bool:
    """Tell whether a build's code runs: binaries of the same generation, or PTX of no later one.

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


def check_precision(facts: Facts) -> list[MachineFinding]:
    """Say where bfloat16 and the fast kernels cannot be had."""
    build = facts.torch
    old = [gpus for gpus in _by_kind(build.gpus) if gpus[0].capability < AMPERE] if build is not None else []
    return [
        MachineFinding(
            check="gpu.precision",
            level="note",
            found=f"{gpus[0].name} has no bfloat16",
            why="training.precision: auto takes fp16 there, and training.kernels: auto torch's kernels",
        )
        for gpus in old
    ]


def check_cudnn(facts: Facts) -> list[MachineFinding]:
    """Say whether cuDNN fits the GPUs, and is one of those that compute 3D convolutions wrongly or not at all."""
    build = facts.torch
    if build is None or build.cuda is None:
        return []
    if build.cudnn is None:
        why = "convolutions run several times slower without it"
        remedy = f"{INSTALL} torch --index-url {_index(build)}"
        return [MachineFinding(check="cudnn", level="warning", found="there is no cuDNN", why=why, remedy=remedy)]
    told = f"cuDNN {build.cudnn // 10000}.{build.cudnn // 100 % 100}.{build.cudnn % 100}"
    if _has(build, VOLTA) and build.cudnn >= FIRST_CUDNN_WITHOUT_VOLTA:
        return [
            MachineFinding(
                check="cudnn",
                level="error",
                found=told,
                why="cuDNN from 9.11 on does not run on a V100",
                remedy=f'{FOR_VOLTA} && pip install "nvidia-cudnn-cu12<9.11"',
            )
        ]
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
    return [MachineFinding(check="cudnn", level="warning", found=told, why=why, remedy=remedy)]
