"""Check Python, packages, memory, cores, limits, disks and environment variables, and report failed gatherers.

`volseg.diagnosis.gpu_checks` describes the parameters and results of a check.
"""

import re
from collections.abc import Mapping, Sequence

from volseg.diagnosis.gpu_checks import MEND_COPIES, Said, Section

GIB = 2**30
SCARCE_MEMORY = 8 * GIB
"""Imports need 1 GiB per process; the rest is for preparing cases: a CT of 512 x 512 x 500 voxels is 0.5 GiB of
float32, and the preparation keeps several copies. An estimate: small tasks need less, so it is not an error."""

ENOUGH_SHARED_MEMORY = 2**29
"""NCCL uses about 10 MB per direction and pair of GPUs without peer access; Docker provides 64 MiB by default."""

CORES_PER_GPU = 4
"""One core launches the GPU's kernels, one prefetches patches, the others prepare cases. An estimate: rented machines
have 8 to 24 per GPU; with fewer, only the first epoch waits."""

SCARCE_FILES, FEW_FILES = 256, 1024
"""1024 is the default per process on Linux, and was enough for all our runs; 256 is the lowest default (macOS).
Estimates: the need grows with the numbers of processes and of mapped cases."""

SCARCE_DISK, FEW_DISK = GIB, 20 * GIB
"""A run folder of V-Net needs 1 GiB with its checkpoints; prepared cases of a Decathlon task need tens of GiB."""


def gib(num_bytes: float) -> str:
    """Return a size in MiB, or in GiB from 1 GiB on.

    >>> gib(64 * 2**20), gib(24.2 * 2**30)
    ('64 MiB', '24.2 GiB')
    """
    return f"{num_bytes / 2**20:.0f} MiB" if num_bytes < GIB else f"{num_bytes / GIB:.1f} GiB"


def check_python(python: Section) -> Said:
    """Report the version, path and start method of Python."""
    told = f"Python {python['version']}, {python['executable']} (starts processes by {python['start_method']})"
    yield "python", "ok", told


def check_packages(packages: Section) -> Said:
    """Report the installed versions, and the conflicts between them."""
    if not packages["is_installed"]:
        found, why = "imported from a checkout, not installed as a package", "its requirements cannot be checked"
        yield "packages", "note", found, why, "pip install -e . in the checkout"
        return
    for sentence in packages["unmet"]:
        needed = sentence.removeprefix("volseg needs ").partition(", but ")[0]
        why = "volseg is untested without it, or known to fail"
        yield "packages", "error", sentence, why, f'pip install "{needed}"'
    if not packages["unmet"]:
        known = [f"{name} {version}" for name, version in packages["versions"].items() if version]
        yield "packages", "ok", ", ".join(known)


def check_memory(system: Section) -> Said:
    """Report the main memory that a training may use."""
    limit, there = system["memory_limit_bytes"], system["memory_bytes"]
    whole = there if limit is None else min(limit, there)
    free = min(system["available_bytes"], whole)
    told = f"{gib(whole)} of memory, {gib(free)} free"
    if whole < there:
        told += f" (this container may use {gib(whole)} of the machine's {gib(there)})"
    if free >= SCARCE_MEMORY:
        yield "memory", "ok", told
        return
    remedy = "stop other programs (ps aux --sort=-rss | head), or use a machine with more memory"
    if whole < min(there, SCARCE_MEMORY):
        remedy = "docker run --memory=0 ..., or ask the scheduler for more: srun --mem=32G"
    why = "preparing a case needs several copies of it in memory; the system kills processes when memory runs out"
    yield "memory", "warning", told, why, remedy


def check_shared_memory(system: Section, torch: Section | None = None) -> Said:
    """Report whether ``/dev/shm`` has room for NCCL."""
    size, free = system["shared_memory_bytes"] or 0, system["shared_memory_free_bytes"] or 0
    told = f"/dev/shm has {gib(size)}, {gib(free)} free" if size else "/dev/shm does not exist"  # noqa: S108
    if free >= ENOUGH_SHARED_MEMORY:
        yield "shared_memory", "ok", told
        return
    remedy = "docker run --ipc=host ... (or --shm-size=8g)"
    if size >= ENOUGH_SHARED_MEMORY:
        remedy = "ls -lh /dev/shm, and remove the files of dead processes"
    if torch and len(torch["gpus"]) > 1:
        why = (
            "NCCL allocates buffers there for every pair of GPUs; if it is full, NCCL reports 'unhandled system error'"
        )
        yield "shared_memory", "error", told, why, remedy
    else:
        why = "training on one GPU does not use it; training on several GPUs and torch's DataLoader workers do"
        yield "shared_memory", "note", told, why, remedy


def check_cores(system: Section, torch: Section | None = None) -> Said:
    """Report the number of cores per GPU."""
    there, limit = system["cores"], system["core_limit"]
    cores, gpus, threads = (
        min(there, limit or there),
        len(torch["gpus"]) if torch else 0,
        torch["threads"] if torch else 1,
    )
    told = f"{there} cores" + (f" (the container may use {limit:g})" if cores < there else "")
    told += f", {cores / gpus:g} per GPU" if gpus else ""
    if cores < gpus * CORES_PER_GPU:
        why = f"with fewer than {CORES_PER_GPU} per GPU, the first epoch waits while cases are prepared"
        remedy = "docker run --cpus=0 ..., srun --cpus-per-task=16, or keep data.cache=auto to prepare cases only once"
        yield "cores", "warning", told, why, remedy
    else:
        yield "cores", "ok", told
    if threads > cores + 1:
        told = f"torch uses {threads} threads on {cores:g} cores"
        why = "with more threads than cores, training and preparing on the CPU run several times slower"
        yield "threads", "warning", told, why, f"export OMP_NUM_THREADS={max(1, int(cores))}"


def check_limits(system: Section) -> Said:
    """Report the limit of open files per process."""
    files, hard = system["open_files"], system["open_files_hard"]
    told = f"at most {files} open files per process"
    if files < FEW_FILES:
        why = "opening cases, libraries and connections between processes can fail with 'Too many open files'"
        remedy = "docker run --ulimit nofile=65536 ..., or nofile in /etc/security/limits.conf"
        if hard >= FEW_FILES:
            remedy = f"ulimit -n {max(FEW_FILES, min(hard, 65536))}"
        yield "open_files", "error" if files < SCARCE_FILES else "warning", told, why, remedy
    else:
        yield "open_files", "ok", told


WAYS = {
    "cache": "export VOLSEG_CACHE=FOLDER on a larger disk, or volseg data cache clear",
    "runs": "volseg train ... --output FOLDER on a larger disk",
    "temporary": "export TMPDIR=FOLDER on a larger disk",
}
"""Remedies by role of the folder: how to write elsewhere."""


def check_folders(folders: Section) -> Said:
    """Report for each folder that volseg writes to whether it has room and is writable."""
    for folder in folders["folders"]:
        role, free = folder["role"], folder["free_bytes"]
        name, remedy = f"disk.{role}", WAYS[role]
        told = f"{folder['path']}: {gib(free)} free of {gib(folder['total_bytes'])}"
        if folder["refused"] is not None:
            found = f"{folder['existing']} is not writable: {folder['refused']}"
            why = "each run prepares its cases again" if role == "cache" else "results cannot be saved"
            yield name, "warning" if role == "cache" else "error", found, why, remedy
        elif free < SCARCE_DISK and role != "temporary":
            why = "checkpoints and prepared cases need more; a full disk ends the training"
            yield name, "error", told, why, remedy
        elif free < FEW_DISK and role == "cache":
            yield name, "warning", told, "prepared cases of a large task take tens of GiB", remedy
        else:
            yield name, "ok", told


HARMFUL: Mapping[str, tuple[str, str, str]] = {
    "CUDA_LAUNCH_BLOCKING": ("1", "warning", "Python waits for every kernel, and steps cannot be recorded"),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": (".+", "warning", "every tensor requests its memory from the driver"),
    "PYTORCH_CUDA_ALLOC_CONF": (
        ".*backend:cudaMallocAsync.*",
        "warning",
        "this allocator captures CUDA graphs differently from torch's own, and volseg plan does not model it",
    ),
    "NCCL_P2P_DISABLE": ("1", "warning", "GPUs communicate through main memory instead of NVLink"),
    "NCCL_SHM_DISABLE": ("1", "warning", "GPUs without peer access communicate over the network"),
    "TRITON_INTERPRET": ("1", "error", "kernels are interpreted line by line, thousands of times slower"),
    "LD_LIBRARY_PATH": (
        "(?i:.*(cuda|cudnn|nccl).*)",
        "warning",
        "the CUDA libraries of this folder replace those that torch includes",
    ),
    "PYTHONHOME": (".+", "warning", "Python uses the standard library of another installation"),
    "RANK": (".+", "warning", "volseg assumes that this is one process of a job, and waits for the others"),
}
"""Pattern that matches a whole harmful value, level, and effect, by variable."""


def check_variables(python: Section) -> Said:
    """Report environment variables that change the behaviour of torch, CUDA and NCCL."""
    variables, quiet = python["variables"], []
    for name, value in variables.items():
        pattern, level, why = HARMFUL.get(name, ("(?!)", "ok", ""))
        if re.fullmatch(pattern, value):
            remedy = "unset RANK WORLD_SIZE" if name == "RANK" else f"unset {name}"
            yield "variables", level, f"{name}={value}", why, remedy
        elif name.startswith(("NCCL_", "PYTORCH_", "CUDA_", "VOLSEG_", "OMP_")):
            quiet.append(f"{name}={value}")
    if quiet:
        yield "variables", "ok", ", ".join(quiet)


MEANINGS = {
    "torch": (
        "error",
        "training and prediction need torch",
        "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cpu   "
        "(or cu126, cu128 ... in place of cpu); if it hangs: nvidia-smi, and restart the machine if that hangs too",
    ),
    "driver": (
        "warning",
        "training hangs if the driver does not respond",
        "nvidia-smi; if that hangs: restart the machine, and look for Xid errors: dmesg | grep -i xid",
    ),
    "all_reduce": (
        "error",
        "training on more than one process cannot sum gradients",
        "NCCL_DEBUG=INFO volseg doctor; often the cause is shared memory (docker run --ipc=host) or the network "
        "interface (export NCCL_SOCKET_IFNAME=lo GLOO_SOCKET_IFNAME=lo); if GPUs hang: export NCCL_P2P_DISABLE=1",
    ),
    "links": (
        "error",
        "GPUs cannot train together unless copies between them work",
        f"{MEND_COPIES}; restart the machine after Xid errors: dmesg | grep -i xid",
    ),
    "folders": (
        "error",
        "a training hangs if a folder that it reads or writes does not respond",
        "df -h; export VOLSEG_CACHE=FOLDER on a disk that responds, and volseg train ... --output FOLDER",
    ),
}
"""Level, meaning and remedy of failures by gatherer; other failures only mean that a section is unknown."""

UNKNOWN = ("this could not be checked", "volseg doctor --json > doctor.json, and attach the file to a bug report")


def check_failures(failures: Sequence[Section], torch: Section | None = None) -> Said:
    """Report the sections that could not be gathered, and the meaning of each failure."""
    for failure in failures:
        level, why, remedy = MEANINGS.get(failure["name"], ("warning", *UNKNOWN))
        if failure["name"] == "all_reduce" and not (torch and torch["gpus"]):
            level = "warning"
        ended = "timed out" if failure["timed_out"] else "failed"
        yield failure["name"], level, f"{ended}: {failure['reason']}", why, remedy


CHECKS = (
    *(check_failures, check_python, check_packages, check_memory, check_shared_memory, check_cores),
    *(check_limits, check_folders, check_variables),
)
