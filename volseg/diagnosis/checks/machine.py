"""Check memory, cores, limits, disks and clock, and the results of trial copies, sums and kernels."""

import time

from volseg.diagnosis.facts import AllReduceFacts, Facts, FolderFacts, FoldersFacts, LinkFacts, Peer, SystemFacts
from volseg.diagnosis.findings import Level, MachineFinding, error, gib, note, ok, warning

# Memory, cores, limits, disks and clock.


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

SCARCE_PROCESSES = 1024
"""A training has tens of threads per GPU, some hundreds with eight GPUs; the rest is for the user's other processes."""

SCARCE_DISK, FEW_DISK = GIB, 20 * GIB
"""A run folder of V-Net takes 1 GiB with its checkpoints; prepared cases of a Decathlon task some tens."""

SKEW_S = 5.0
"""A heartbeat is written every 5 s: a larger clock error makes a healthy run look late."""

INSTALLED_LATER_S = 60.0
"""Tolerance for rounded file times and for adjustments of the clock."""


def check_memory(system: SystemFacts) -> list[MachineFinding]:
    """Report the main memory that a training may use."""
    limit = system.memory_limit_bytes
    whole = system.memory_bytes if limit is None else limit
    told = f"{gib(whole)} of memory, {gib(min(system.available_bytes, whole))} of it free"
    if limit is not None:
        told += f" (this container may take {gib(limit)} of the machine's {gib(system.memory_bytes)})"
    if min(system.available_bytes, whole) >= SCARCE_MEMORY:
        return [ok("memory", told)]
    remedy = (
        "end what else runs (ps aux --sort=-rss | head), or a larger machine; volseg train ... --set data.keep=auto"
    )
    if limit is not None and limit < SCARCE_MEMORY:
        remedy = "docker run --memory=0 ..., or ask the scheduler for more: srun --mem=32G"
    why = "cases are kept in memory while they are prepared; the system ends processes that take more than there is"
    return [warning("memory", told, why, remedy)]


def check_shared_memory(facts: Facts) -> list[MachineFinding]:
    """Report whether ``/dev/shm`` has room for NCCL."""
    system, gpus = facts.system, facts.torch.gpus if facts.torch is not None else ()
    if system is None:
        return []
    size = system.shared_memory_bytes
    told = f"/dev/shm of {gib(size)}, {gib(_free(system))} of it free" if size else "there is no /dev/shm"  # noqa: S108
    if size is not None and _free(system) >= ENOUGH_SHARED_MEMORY:
        return [ok("shared_memory", told)]
    full = size is not None and size >= ENOUGH_SHARED_MEMORY
    ways = "docker run --ipc=host ... (or --shm-size=8g)"
    remedy = "ls -lh /dev/shm, and remove what ended processes left there" if full else ways
    if len(gpus) > 1:
        why = "NCCL takes room there for every pair of GPUs, and ends with 'unhandled system error' where it is full"
        return [error("shared_memory", told, why, remedy)]
    why = "volseg needs none on one GPU; torch's DataLoader with workers, and trainings on several GPUs do"
    return [note("shared_memory", told, why, remedy)]


def _free(system: SystemFacts) -> int:
    return system.shared_memory_free_bytes or 0


def check_cores(facts: Facts) -> list[MachineFinding]:
    """Report the number of cores per GPU."""
    system = facts.system
    if system is None:
        return []
    cores = min(system.cores, system.core_limit or system.cores)
    gpus = len(facts.torch.gpus) if facts.torch is not None else 0
    limited = f" (the container may take {system.core_limit:g})" if (system.core_limit or cores) < system.cores else ""
    told = f"{system.cores} cores{limited}" + (f", {cores / gpus:g} for each GPU" if gpus else "")
    findings = [ok("cores", told)]
    if gpus and cores < gpus * CORES_PER_GPU:
        why = f"with fewer than {CORES_PER_GPU} for each GPU the first epoch waits for cases that are prepared"
        remedy = "docker run --cpus=0 ..., srun --cpus-per-task=16, or keep data.cache so that it happens once"
        findings = [warning("cores", told, why, remedy)]
    threads = facts.torch.threads if facts.torch is not None else 1
    if threads > cores + 1:
        told = f"torch computes with {threads} threads on {cores:g} cores"
        why = "threads that wait for each other make trainings and preparation on the CPU several times slower"
        findings.append(warning("threads", told, why, f"export OMP_NUM_THREADS={max(1, int(cores))}"))
    return findings


def check_open_files(system: SystemFacts) -> list[MachineFinding]:
    """Report the limits of open files per process and of processes per user."""
    told = f"{system.open_files} open files a process"
    findings = [ok("open_files", told)]
    if system.open_files < FEW_FILES:
        level: Level = "error" if system.open_files < SCARCE_FILES else "warning"
        why = "cases, libraries and connections between processes end with 'Too many open files'"
        remedy = "docker run --ulimit nofile=65536 ..., or nofile in /etc/security/limits.conf"
        if system.open_files_hard >= FEW_FILES:
            remedy = f"ulimit -n {max(FEW_FILES, min(system.open_files_hard, 65536))}"
        findings = [MachineFinding("open_files", level, told, why, remedy)]
    if system.processes is not None and system.processes < SCARCE_PROCESSES:
        told = f"{system.processes} processes and threads a user"
        remedy = "ulimit -u 65536, or docker run --pids-limit=-1 ..."
        why = "a training has tens of threads for each GPU; more cannot be started then"
        findings.append(warning("processes", told, why, remedy))
    return findings


def check_folders(folders: FoldersFacts) -> list[MachineFinding]:
    """Report for each folder that volseg writes to whether it has room and is writable."""
    return [_check_folder(folder) for folder in folders.folders]


WAYS = {
    "cache": "export VOLSEG_CACHE=FOLDER on a larger disk, or volseg data cache clear",
    "runs": "volseg train ... --output FOLDER on a larger disk",
    "temporary": "export TMPDIR=FOLDER on a larger disk",
}
"""Remedies by role of the folder: ways to write elsewhere."""


def _check_folder(folder: FolderFacts) -> MachineFinding:
    name = f"disk.{folder.role}"
    told = f"{folder.path}: {gib(folder.free_bytes)} free of {gib(folder.total_bytes)} ({folder.file_system})"
    remedy = WAYS[folder.role]
    if folder.refused is not None:
        found = f"{folder.existing} takes no file: {folder.refused}"
        level: Level = "warning" if folder.role == "cache" else "error"
        why = "cases are prepared anew in each run" if folder.role == "cache" else "nothing that is made could be kept"
        return MachineFinding(name, level, found, why, remedy)
    if folder.free_bytes < SCARCE_DISK and folder.role != "temporary":
        why = "checkpoints and prepared cases need more; a full disk ends the training"
        return error(name, told, why, remedy)
    if folder.free_bytes < FEW_DISK and folder.role == "cache":
        why = "prepared cases of a large task take tens of GiB"
        return warning(name, told, why, remedy)
    if folder.file_system == "tmpfs" and folder.role != "temporary":
        why = "it lies in main memory: what is written takes memory, and is gone when the machine restarts"
        return note(name, told, why, remedy)
    return ok(name, told)


def check_clock(facts: Facts) -> list[MachineFinding]:
    """Report whether the clock is plausible, and agrees with the clocks of the disks."""
    system = facts.system
    findings = []
    if system is not None:
        told = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(system.now))
        findings = [ok("clock", told)]
        if system.now < system.built - INSTALLED_LATER_S:
            found = f"{told}, before volseg was installed"
            why = "certificates of downloads are refused, and runs are sorted wrongly"
            findings = [warning("clock", found, why, "sudo timedatectl set-ntp true")]
    findings += [
        warning(
            "clock.disk",
            f"the disk of {folder.existing} is {folder.clock_skew_s:+.0f} s from this machine's clock",
            "health checks by the age of a run's files go wrong, on this machine or the one that shares it",
            "sudo timedatectl set-ntp true, on both machines",
        )
        for folder in (facts.folders.folders if facts.folders is not None else ())
        if abs(folder.clock_skew_s) > SKEW_S
    ]
    return findings


# Results of trials: copies between GPUs, a sum over processes, a compiled kernel.


FAST_KERNELS = (8, 0)
"""Least compute capability for volseg's own kernels."""

SLOW_LINK = 5.0
"""GB/s. PCIe 3 copies 12, NVLink 40 or more; a slower link uses main memory or a narrow slot."""


def check_links(links: LinkFacts) -> list[MachineFinding]:
    """Report the links between GPUs; pairs with the same fault share a finding."""
    peers = links.peers
    if not peers:
        return []
    if wrong := [peer for peer in peers if peer.is_right is False]:
        why = "several GPUs would train on broken numbers, silently"
        remedy = "export NCCL_P2P_DISABLE=1, or switch off the IOMMU (ACS) in the machine's firmware"
        return [error("links", f"values do not arrive: {_name_pairs(wrong)}", why, remedy)]
    without = [peer for peer in peers if not peer.has_access]
    slow = [peer for peer in peers if peer.gb_per_s is not None and peer.gb_per_s < SLOW_LINK]
    speeds = sorted(peer.gb_per_s for peer in peers if peer.gb_per_s is not None)
    names = ", ".join(sorted({peer.link for peer in peers if peer.link}))
    told = f"{len(peers)} pairs of GPUs" + (f" over {names}" if names else "")
    told += f", {speeds[0]:.0f} to {speeds[-1]:.0f} GB/s" if speeds else ""
    if without or slow:
        pairs = _name_pairs(without or slow)
        why = "cut volumes and pipelines copy at every layer; replicas (parallel.data) need little of it"
        remedy = "volseg train CONFIG --set parallel.data=N, or GPUs that NVLink joins (nvidia-smi topo -m)"
        return [
            MachineFinding(
                "links",
                "note" if without and not slow else "warning",
                f"{told}; {'no peer access' if without else 'slow'}: {pairs}",
                why,
                remedy,
            )
        ]
    return [ok("links", told + ", each reads the other's memory")]


def _name_pairs(peers: list[Peer]) -> str:
    named = [f"{peer.source} to {peer.target}" for peer in peers]
    return ", ".join(named[:6]) + (f" and {len(named) - 6} more" if len(named) > 6 else "")


def check_all_reduce(tried: AllReduceFacts) -> list[MachineFinding]:
    """Report whether an all-reduce over processes gives the right sums."""
    rate = tried.size_bytes / 1e9 / max(tried.seconds, 1e-9)
    told = f"{tried.processes} processes add up {tried.size_bytes >> 20} MiB by {tried.backend}, {rate:.3g} GB/s"
    if tried.is_right:
        return [ok("all_reduce", told)]
    why = "several GPUs would train on broken numbers, silently"
    remedy = "export NCCL_P2P_DISABLE=1, or switch off the IOMMU (ACS) in the machine's firmware"
    return [error("all_reduce", f"{told}, to wrong sums", why, remedy)]


def check_compiler(facts: Facts) -> list[MachineFinding]:
    """Report whether Triton can compile kernels, and what it lacks."""
    tried, gpus = facts.compiler, facts.torch.gpus if facts.torch is not None else ()
    if tried is None:
        return []
    takes_fast = any(gpu.capability >= FAST_KERNELS for gpu in gpus)
    if not gpus:
        if tried.refused is None:
            return [ok("triton", f"{tried.compiler} builds modules for this Python; no GPU to run a kernel on")]
        why = "nothing here needs it; on a GPU the fast kernels would"
        remedy = _mend_compiler(tried.refused)
        return [note("triton", tried.refused, why, remedy)]
    if tried.triton is None:
        why = "the fast kernels are written in it; torch's are taken in their place"
        found, remedy = "Triton is not installed", "pip install triton   (CUDA builds of torch bring it)"
        level: Level = "warning" if takes_fast else "note"
        return [MachineFinding("triton", level, found, why, remedy)]
    if tried.kernel == "right":
        return [ok("triton", f"Triton {tried.triton} compiled a kernel and ran it, {tried.seconds or 0:.1f} s")]
    said = tried.kernel_refused or f"a kernel gave {tried.kernel} values"
    cause = tried.refused if tried.refused is not None else said
    why = "training.kernels: auto takes fast kernels, which Triton compiles when they are first used"
    remedy = _mend_compiler(cause)
    return [
        MachineFinding(
            "triton",
            "error" if takes_fast else "warning",
            f"Triton {tried.triton}: {said}" + (f" ({tried.refused})" if tried.refused else ""),
            why,
            remedy,
        )
    ]


def _mend_compiler(said: str) -> str:
    """Return the remedy for a compiler's message; usually the compiler or Python's headers are missing."""
    if "Python.h" in said:
        return "sudo apt-get install python3-dev   (python3.12-dev and so on; dnf install python3-devel)"
    if "no C compiler" in said or "No such file" in said or "C compiler" in said or "not found" in said:
        return "sudo apt-get install gcc libc6-dev   (dnf install gcc), or export CC=COMPILER"
    return "volseg train CONFIG --set training.kernels=torch; rm -rf ~/.triton/cache where it holds another machine's"
