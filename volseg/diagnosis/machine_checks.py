"""Check Python, packages, memory, cores, limits, disks and environment variables, and report failed gatherers.

What a check needs and yields says `volseg.diagnosis.gpu_checks`.
"""

import re
from collections.abc import Mapping, Sequence

from volseg.diagnosis.gpu_checks import MEND_COPIES, Said, Section

GIB = 2**30
SCARCE_MEMORY = 8 * GIB
"""Imports take 1 GiB per process; the rest is for preparing cases: a CT of 512 x 512 x 500 voxels is 0.5 GiB of
float32, and preparing holds several copies. A judgement: small tasks need less, hence no error."""

ENOUGH_SHARED_MEMORY = 2**29
"""NCCL takes some 10 MB per pair of GPUs without peer access and per direction; Docker gives 64 MiB by default."""

CORES_PER_GPU = 4
"""One core launches the GPU's kernels, one prefetches patches, the others prepare cases. A judgement: rented machines
have 8 to 24 per GPU, and with fewer only the first epoch waits."""

SCARCE_FILES, FEW_FILES = 256, 1024
"""1024 is Linux's default per process, with which everything here was run. 256 is the least default (macOS).
Judgements: the need grows with the numbers of processes and of mapped cases."""

SCARCE_DISK, FEW_DISK = GIB, 20 * GIB
"""A run folder of V-Net takes 1 GiB with its checkpoints; prepared cases of a Decathlon task some tens."""


def gib(num_bytes: float) -> str:
    """Return a size in MiB, or in GiB from 1 GiB on.

    >>> gib(64 * 2**20), gib(24.2 * 2**30)
    ('64 MiB', '24.2 GiB')
    """
    return f"{num_bytes / 2**20:.0f} MiB" if num_bytes < GIB else f"{num_bytes / GIB:.1f} GiB"


def check_python(python: Section) -> Said:
    """Report the Python."""
    told = f"Python {python['version']}, {python['executable']} (starts processes by {python['start_method']})"
    yield "python", "ok", told


def check_packages(packages: Section) -> Said:
    """Report the installed versions, and the conflicts between them."""
    if not packages["is_installed"]:
        found, why = "imported from a checkout, not installed as a package", "whether packages fit it is not known"
        yield "packages", "note", found, why, "pip install -e . in the checkout"
        return
    for sentence in packages["unmet"]:
        needed = re.split(", (?:installed is|which is not)", sentence.removeprefix("volseg needs "))[0]
        why = "it is not known to work, or known not to"
        yield "packages", "error", sentence, why, f'pip install "{needed}"'
    if not packages["unmet"]:
        known = [f"{name} {version}" for name, version in packages["versions"].items() if version]
        yield "packages", "ok", ", ".join(known)


def check_memory(system: Section) -> Said:
    """Report the main memory that a training may use."""
    limit, there = system["memory_limit_bytes"], system["memory_bytes"]
    whole = there if limit is None else min(limit, there)
    free = min(system["available_bytes"], whole)
    told = f"{gib(whole)} of memory, {gib(free)} of it free"
    if whole < there:
        told += f" (this container may take {gib(whole)} of the machine's {gib(there)})"
    if free >= SCARCE_MEMORY:
        yield "memory", "ok", told
        return
    remedy = (
        "end what else runs (ps aux --sort=-rss | head), or a larger machine; volseg train ... --set data.keep=auto"
    )
    if whole < min(there, SCARCE_MEMORY):
        remedy = "docker run --memory=0 ..., or ask the scheduler for more: srun --mem=32G"
    why = "cases are kept in memory while they are prepared; the system ends processes that take more than there is"
    yield "memory", "warning", told, why, remedy


def check_shared_memory(system: Section, torch: Section | None = None) -> Said:
    """Report whether ``/dev/shm`` has room for NCCL."""
    size, free = system["shared_memory_bytes"] or 0, system["shared_memory_free_bytes"] or 0
    told = f"/dev/shm of {gib(size)}, {gib(free)} of it free" if size else "there is no /dev/shm"  # noqa: S108
    if free >= ENOUGH_SHARED_MEMORY:
        yield "shared_memory", "ok", told
        return
    remedy = "docker run --ipc=host ... (or --shm-size=8g)"
    if size >= ENOUGH_SHARED_MEMORY:
        remedy = "ls -lh /dev/shm, and remove what ended processes left there"
    if torch and len(torch["gpus"]) > 1:
        why = "NCCL takes room there for every pair of GPUs, and ends with 'unhandled system error' where it is full"
        yield "shared_memory", "error", told, why, remedy
    else:
        why = "volseg needs none on one GPU; torch's DataLoader with workers, and trainings on several GPUs do"
        yield "shared_memory", "note", told, why, remedy


def check_cores(system: Section, torch: Section | None = None) -> Said:
    """Report the number of cores per GPU."""
    there, limit = system["cores"], system["core_limit"]
    cores, gpus, threads = (
        min(there, limit or there),
        len(torch["gpus"]) if torch else 0,
        torch["threads"] if torch else 1,
    )
    told = f"{there} cores" + (f" (the container may take {limit:g})" if cores < there else "")
    told += f", {cores / gpus:g} for each GPU" if gpus else ""
    if cores < gpus * CORES_PER_GPU:
        why = f"with fewer than {CORES_PER_GPU} for each GPU the first epoch waits for cases that are prepared"
        remedy = "docker run --cpus=0 ..., srun --cpus-per-task=16, or keep data.cache so that it happens once"
        yield "cores", "warning", told, why, remedy
    else:
        yield "cores", "ok", told
    if threads > cores + 1:
        told = f"torch computes with {threads} threads on {cores:g} cores"
        why = "threads that wait for each other make trainings and preparation on the CPU several times slower"
        yield "threads", "warning", told, why, f"export OMP_NUM_THREADS={max(1, int(cores))}"


def check_limits(system: Section) -> Said:
    """Report the limit of open files per process."""
    files, hard = system["open_files"], system["open_files_hard"]
    told = f"{files} open files a process"
    if files < FEW_FILES:
        why = "cases, libraries and connections between processes end with 'Too many open files'"
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
"""Remedies by role of the folder: ways to write elsewhere."""


def check_folders(folders: Section) -> Said:
    """Report for each folder that volseg writes to whether it has room and is writable."""
    for folder in folders["folders"]:
        role, free = folder["role"], folder["free_bytes"]
        name, remedy = f"disk.{role}", WAYS[role]
        told = f"{folder['path']}: {gib(free)} free of {gib(folder['total_bytes'])}"
        if folder["refused"] is not None:
            found = f"{folder['existing']} takes no file: {folder['refused']}"
            why = "cases are prepared anew in each run" if role == "cache" else "nothing that is made could be kept"
            yield name, "warning" if role == "cache" else "error", found, why, remedy
        elif free < SCARCE_DISK and role != "temporary":
            why = "checkpoints and prepared cases need more; a full disk ends the training"
            yield name, "error", told, why, remedy
        elif free < FEW_DISK and role == "cache":
            yield name, "warning", told, "prepared cases of a large task take tens of GiB", remedy
        else:
            yield name, "ok", told


HARMFUL: Mapping[str, tuple[str, str, str]] = {
    "CUDA_LAUNCH_BLOCKING": ("1", "warning", "every kernel is waited for, and steps cannot be recorded"),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": (".+", "warning", "every tensor asks the driver for memory"),
    "PYTORCH_CUDA_ALLOC_CONF": (
        ".*backend:cudaMallocAsync.*",
        "warning",
        "CUDA graphs are captured in another way than with torch's own allocator, and volseg plan does not model it",
    ),
    "NCCL_P2P_DISABLE": ("1", "warning", "GPUs talk over main memory in place of NVLink"),
    "NCCL_SHM_DISABLE": ("1", "warning", "GPUs without peer access talk over the network"),
    "TRITON_INTERPRET": ("1", "error", "kernels are interpreted line by line, thousands of times slower"),
    "LD_LIBRARY_PATH": (
        "(?i:.*(cuda|cudnn|nccl).*)",
        "warning",
        "torch brings its own CUDA libraries, and those of this folder are taken in their place",
    ),
    "PYTHONHOME": (".+", "warning", "Python takes another one's library"),
    "RANK": (".+", "warning", "volseg takes itself for one process of a job, and waits for the others"),
}
"""Pattern of the harmful values (of the whole value), level, and effect by variable."""


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
        "nothing can be trained or predicted without torch",
        "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cpu   "
        "(or cu126, cu128 ... in place of cpu); where it hangs: nvidia-smi, and restart the machine if that hangs too",
    ),
    "driver": (
        "warning",
        "a driver that does not answer ends in trainings that hang",
        "nvidia-smi; if that hangs: restart the machine, and look for Xid errors: dmesg | grep -i xid",
    ),
    "all_reduce": (
        "error",
        "trainings on several processes cannot add up their gradients",
        "NCCL_DEBUG=INFO volseg doctor; often the shared memory (docker run --ipc=host) or the network interface "
        "(export NCCL_SOCKET_IFNAME=lo GLOO_SOCKET_IFNAME=lo); between GPUs that hang: export NCCL_P2P_DISABLE=1",
    ),
    "links": (
        "error",
        "what GPUs send each other does not arrive, so several of them cannot train together",
        f"{MEND_COPIES}; restart the machine after Xid errors: dmesg | grep -i xid",
    ),
    "folders": (
        "error",
        "a folder that does not answer stops the training that reads or writes there",
        "df -h; export VOLSEG_CACHE=FOLDER on a disk that answers, and volseg train ... --output FOLDER",
    ),
}
"""Level, meaning and remedy of failures by gatherer; other failures only mean that a section is unknown."""

UNKNOWN = ("nothing is known of what it looks at", "volseg doctor --json > doctor.json, and send it with a report")


def check_failures(failures: Sequence[Section], torch: Section | None = None) -> Said:
    """Report the sections that could not be gathered, and the meaning of each failure."""
    for failure in failures:
        level, why, remedy = MEANINGS.get(failure["name"], ("warning", *UNKNOWN))
        if failure["name"] == "all_reduce" and not (torch and torch["gpus"]):
            level = "warning"
        ended = "ended by its time limit" if failure["timed_out"] else "failed"
        yield failure["name"], level, f"{ended}: {failure['reason']}", why, remedy


CHECKS = (
    *(check_failures, check_python, check_packages, check_memory, check_shared_memory, check_cores),
    *(check_limits, check_folders, check_variables),
)
