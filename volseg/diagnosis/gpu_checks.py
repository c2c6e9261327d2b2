"""Check torch, the NVIDIA driver and the GPUs against each other, and the results of the trials on them.

The parameters of a check are the sections of the facts that it needs. It yields name, level, the value found, why that
matters, and a remedy.

.. [1] torch 2.9 runs 3D convolutions under autocast four times slower: pytorch#166122.
.. [2] cuDNN 9.8 to 9.14 computes large 3D convolutions in half precision wrongly (pytorch#163539); torch 2.9.1 and
       later use it for these only in channels-last layout (pytorch#166480, ``ATen/native/Convolution.cpp``).
.. [3] cuDNN 9.11 dropped compute capability 7.0. Builds of torch 2.11 and later for CUDA 12.8, and all builds for CUDA
       13, have no code for it; builds for CUDA 12.6 do up to torch 2.14: pytorch#157517, #172352, #190385.
.. [4] 580 is the last driver branch that supports Maxwell, Pascal and Volta (NVIDIA's Unix deprecation schedule); the
       open kernel module supports only Turing and later.
.. [5] Builds for CUDA 12 need branch 525 or later, builds for CUDA 13 branch 580 (CUDA compatibility, table 1).
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from packaging.version import Version

Section = Mapping[str, Any]
Said = Iterator[tuple[str, ...]]

VOLTA, AMPERE, BLACKWELL = (7, 0), (8, 0), (10, 0)
LEAST_TORCH = Version("2.8")
WRONG_CUDNN = range(90800, 91500)
FIRST_CUDNN_WITHOUT_VOLTA = 91100

INSTALL = "pip install --force-reinstall"
WHEELS = "--index-url https://download.pytorch.org/whl/"
FOR_VOLTA = f'{INSTALL} "torch>=2.10,<2.15" {WHEELS}cu126'


def check_torch(torch: Section) -> Said:
    """Report the build of torch, and whether its version works."""
    kind = f"CUDA {torch['cuda']}" if torch["cuda"] else f"ROCm {torch['rocm']}" if torch["rocm"] else "CPU"
    nccl = f", NCCL {torch['nccl']}" if torch["nccl"] else ""
    told = f"torch {torch['version']} ({kind}{nccl})"
    version, remedy = Version(torch["version"]), f'{INSTALL} "torch>=2.10" {_index(torch)}'
    if version < LEAST_TORCH:
        yield "torch", "error", told, f"volseg and MONAI need torch {LEAST_TORCH} or later", remedy
    elif version.release[:2] == (2, 9):
        why = "torch 2.9 runs 3D convolutions under autocast up to four times slower, and needs more memory"
        yield "torch", "warning", told, why, FOR_VOLTA if VOLTA in _list_capabilities(torch) else remedy
    elif torch["rocm"]:
        yield "torch", "note", told, "volseg is untested on AMD GPUs; its fast kernels need NVIDIA GPUs"
    else:
        yield "torch", "ok", told


def _index(torch: Section) -> str:
    """Return the option for the package index of builds of the same kind."""
    return WHEELS + (f"cu{torch['cuda'].replace('.', '')}" if torch["cuda"] else "cpu")


def _list_capabilities(torch: Section | None) -> list[tuple[int, int]]:
    return [tuple(gpu["capability"]) for gpu in torch["gpus"]] if torch else []


def check_architectures(torch: Section) -> Said:
    """Report for each kind of GPU whether the build has code for it."""
    kinds = Counter((gpu["name"], tuple(gpu["capability"])) for gpu in torch["gpus"] if torch["architectures"])
    for (name, capability), count in kinds.items():
        told = f"{count} x {name}, sm_{capability[0]}{capability[1]}"
        if has_code_for(capability, torch["architectures"]):
            yield "gpu.architecture", "ok", f"{told}, supported by this build of torch"
            continue
        newer = f'{INSTALL} "torch>=2.10" {WHEELS}{"cu128" if capability >= BLACKWELL else "cu126"}'
        remedy = FOR_VOLTA if capability <= VOLTA else newer
        why = "every kernel fails with 'no kernel image is available for execution on the device'"
        has = f"this build (torch {torch['version']}) only has code for {', '.join(torch['architectures'])}"
        yield "gpu.architecture", "error", f"{told}; {has}", why, remedy


def has_code_for(capability: tuple[int, int], architectures: Sequence[str]) -> bool:
    """Return whether a build has code for a GPU: binaries of the same generation, or PTX of the same or an earlier one.

    >>> has_code_for((7, 0), ("sm_75", "sm_80")), has_code_for((8, 9), ("sm_80",))
    (False, True)
    >>> has_code_for((9, 0), ("compute_80",))
    True
    """
    for architecture in architectures:
        kind, _, number = architecture.partition("_")
        digits = number.rstrip("af")  # sm_90a, sm_100f
        own = (int(digits[:-1]), int(digits[-1]))
        if own <= capability and (kind == "compute" or (kind == "sm" and own[0] == capability[0])):
            return True
    return False


def check_cudnn(torch: Section) -> Said:
    """Report whether cuDNN supports the GPUs, and whether its version computes 3D convolutions correctly."""
    number = torch["cudnn"]
    if torch["cuda"] is None:
        return
    if number is None:
        why = "convolutions run several times slower without it"
        yield "cudnn", "warning", "this build of torch has no cuDNN", why, f"{INSTALL} torch {_index(torch)}"
        return
    told = f"cuDNN {number // 10000}.{number // 100 % 100}.{number % 100}"
    has_volta = VOLTA in _list_capabilities(torch)
    if has_volta and number >= FIRST_CUDNN_WITHOUT_VOLTA:
        remedy = f'{FOR_VOLTA} && pip install "nvidia-cudnn-cu12<9.11"'
        yield "cudnn", "error", told, "cuDNN 9.11 and later do not support the V100", remedy
    elif number not in WRONG_CUDNN:
        yield "cudnn", "ok", told
    else:
        why = (
            "cuDNN 9.8 to 9.14 can give wrong results for 3D convolutions of large volumes in half precision; "
            "torch 2.9.1 and later use it for these only in channels-last layout"
        )
        remedy = f'pip install "nvidia-cudnn-cu{torch["cuda"].partition(".")[0]}>=9.15"'
        if has_volta:
            remedy = "volseg train CONFIG --set training.memory_format=channels_last (later cuDNN drops the V100)"
        yield "cudnn", "warning", told, why, remedy


LAST_WITH_VOLTA = 580
VOLTA_DEVICES = range(0x1D80, 0x1E00)
"""PCI device ids of GV100: V100 and Titan V."""

LEAST_BRANCH = {"12": 525, "13": 580}
"""Oldest driver branch that works, by CUDA's major version."""

DRIVER_FOR_VOLTA = (
    "sudo apt-get install nvidia-driver-580-server   (proprietary; not nvidia-driver-580-server-open), then sudo reboot"
)


def check_driver(driver: Section, torch: Section | None = None) -> Said:
    """Report the driver, and whether it supports these GPUs and this build of torch."""
    if driver["version"] is None:
        return
    branch = int(driver["version"].partition(".")[0])
    kinds = {None: "", True: ", open kernel module", False: ", proprietary kernel module"}
    told = f"NVIDIA driver {driver['version']}{kinds[driver['is_open']]}"
    cuda = torch["cuda"] if torch else None
    least = LEAST_BRANCH.get((cuda or "").partition(".")[0], 0)
    if _has_volta(driver, torch) and (branch > LAST_WITH_VOLTA or driver["is_open"]):
        why = (
            "the open kernel module does not support Volta (V100); only the proprietary one does"
            if branch <= LAST_WITH_VOLTA
            else "580 is the last branch that supports Volta (V100), with the proprietary kernel module"
        )
        yield "driver", "error", told, why, DRIVER_FOR_VOLTA
    elif branch < least:
        remedy = f"{INSTALL} torch {WHEELS}cu126"
        if branch < LEAST_BRANCH["12"]:
            remedy = f"sudo apt-get install nvidia-driver-{LAST_WITH_VOLTA}-server, then sudo reboot"
        found = f"{told}, but torch is built for CUDA {cuda}"
        yield "driver", "error", found, f"CUDA {cuda} needs driver branch {least} or later", remedy
    else:
        yield "driver", "ok", told


def _has_volta(driver: Section, torch: Section | None) -> bool:
    on_bus = any(gpu["device"] in VOLTA_DEVICES for gpu in driver["on_bus"])
    return on_bus or any(VOLTA <= capability < (7, 5) for capability in _list_capabilities(torch))


def check_gpus_seen(
    torch: Section, driver: Section, python: Section | None = None, system: Section | None = None
) -> Said:
    """Report how many GPUs torch sees, and why it sees none of those present."""
    there, seen = len(driver["on_bus"]), len(torch["gpus"])
    if seen:
        fewer = f" of {there}" if there > seen else ""
        yield "gpu.seen", "ok", f"torch sees {seen}{fewer} GPU{'s' if seen > 1 else ''}"
    elif not there and not driver["nodes"]:
        yield "gpu.seen", "note", "this machine has no NVIDIA GPU", "training runs on the CPU, tens of times slower"
    else:
        found = f"torch sees none of the {max(there, len(driver['nodes']))} NVIDIA GPU(s) of this machine"
        said = torch["refused"] or driver["refused"]
        hidden = python["variables"].get("CUDA_VISIBLE_DEVICES") if python else None
        cause = _find_cause(torch, driver, hidden, bool(system and system["in_container"]))
        yield "gpu.seen", "error", found + (f" ({said})" if said else ""), *cause


def _find_cause(torch: Section, driver: Section, hidden: str | None, in_container: bool) -> tuple[str, str]:
    """Return cause and remedy for unusable GPUs; try the most obvious cause first."""
    has_volta = _has_volta(driver, torch)
    if hidden is not None:
        return f"CUDA_VISIBLE_DEVICES={hidden!r} hides them", "unset CUDA_VISIBLE_DEVICES"
    if torch["cuda"] is None:
        return "this torch is a CPU-only build", f"{INSTALL} torch {WHEELS}{'cu126' if has_volta else 'cu128'}"
    if driver["version"] is None:
        needed = DRIVER_FOR_VOLTA if has_volta else "sudo apt-get install nvidia-driver-580-server-open"
        return "no NVIDIA driver is loaded", needed
    if not driver["nodes"] and in_container:
        return "the container was started without GPUs", "docker run --gpus all ... (needs nvidia-container-toolkit)"
    return "the driver, the GPU and the build of torch do not match", "nvidia-smi; dmesg | grep -i -e nvrm -e xid"


SLOW_LINK = 5.0
"""GB/s. PCIe 3 reaches 12, NVLink 40 or more; a slower link uses main memory or a narrow slot."""

BROKEN = "training on these GPUs together would silently use wrong values"
MEND_COPIES = "export NCCL_P2P_DISABLE=1, or switch off the IOMMU (ACS) in the machine's firmware"


def check_links(links: Section) -> Said:
    """Report the links between GPUs; pairs with the same fault share a finding."""
    peers = links["peers"]
    if not peers:
        return
    if wrong := [peer for peer in peers if not peer["is_right"]]:
        yield "links", "error", f"copies arrive with wrong values: {_name_pairs(wrong)}", BROKEN, MEND_COPIES
        return
    without = [peer for peer in peers if not peer["has_access"]]
    slow = [peer for peer in peers if peer["gb_per_s"] < SLOW_LINK]
    speeds = [peer["gb_per_s"] for peer in peers]
    told = f"{len(peers)} pairs of GPUs, {min(speeds):.0f} to {max(speeds):.0f} GB/s"
    if not without and not slow:
        yield "links", "ok", f"{told}, all with peer access"
        return
    found = f"{told}; {'no peer access' if without else 'slow'}: {_name_pairs(without or slow)}"
    why = "cut volumes and pipelines copy activations within each step; replicas (parallel.data) copy only gradients"
    remedy = "volseg train CONFIG --set parallel.data=N, or use GPUs connected by NVLink (nvidia-smi topo -m)"
    yield "links", "warning" if slow else "note", found, why, remedy


def _name_pairs(peers: Sequence[Section]) -> str:
    named = [f"{peer['source']} to {peer['target']}" for peer in peers]
    return ", ".join(named[:6]) + (f" and {len(named) - 6} more" if len(named) > 6 else "")


def check_all_reduce(all_reduce: Section) -> Said:
    """Report whether an all-reduce over processes gives the right sums."""
    size = all_reduce["size_bytes"]
    told = f"{all_reduce['processes']} processes sum {size >> 20} MiB with {all_reduce['backend']}"
    told += f", {size / 1e9 / max(all_reduce['seconds'], 1e-9):.3g} GB/s"
    if all_reduce["is_right"]:
        yield "all_reduce", "ok", told
    else:
        yield "all_reduce", "error", f"{told}; the sums are wrong", BROKEN, MEND_COPIES


def check_compiler(compiler: Section, torch: Section | None = None) -> Said:
    """Report whether Triton compiles kernels that compute correctly, and the likely fix if not."""
    capabilities = _list_capabilities(torch)
    takes_fast = any(capability >= AMPERE for capability in capabilities)
    triton = compiler["triton"]
    if not capabilities:
        yield "triton", "ok", f"{f'Triton {triton}' if triton else 'no Triton'}; no GPU to run a kernel on"
    elif triton is None:
        why = "the fast kernels need it; volseg uses torch's kernels instead"
        remedy = "pip install triton   (CUDA builds of torch include it)"
        yield "triton", "warning" if takes_fast else "note", "Triton is not installed", why, remedy
    elif compiler["kernel"] == "right":
        yield "triton", "ok", f"Triton {triton} compiled and ran a kernel in {compiler['seconds']:.1f} s"
    else:
        said = compiler["refused"] or f"a kernel gave {compiler['kernel']} values"
        why = "training.kernels: auto uses fast kernels, which Triton compiles on first use"
        remedy = (
            "volseg train CONFIG --set training.kernels=torch, or rm -rf ~/.triton/cache if another machine filled it"
        )
        if any(sign in said for sign in ("C compiler", "No such file", "not found", "non-zero exit status")):
            remedy = "sudo apt-get install gcc libc6-dev python3-dev (dnf install gcc python3-devel), or export CC=FILE"
        yield "triton", "error" if takes_fast else "warning", f"Triton {triton}: {said}", why, remedy


CHECKS = (
    *(check_torch, check_gpus_seen, check_driver, check_architectures, check_cudnn),
    *(check_links, check_all_reduce, check_compiler),
)
