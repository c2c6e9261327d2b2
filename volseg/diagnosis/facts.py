"""What is known of a machine: plain values, which cross from the processes that gathered them as JSON."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

__all__ = [
    "AllReduceFacts",
    "CompilerFacts",
    "DriverFacts",
    "Facts",
    "FolderFacts",
    "FoldersFacts",
    "Gpu",
    "ImportFacts",
    "LinkFacts",
    "NotGathered",
    "PackageFacts",
    "PciGpu",
    "Peer",
    "PythonFacts",
    "SystemFacts",
    "TorchFacts",
]


@dataclass(frozen=True, kw_only=True)
class PythonFacts:
    """The interpreter, and the text and processes it makes."""

    version: str
    executable: str = ""
    in_environment: bool = True
    """Whether it is that of a virtual or conda environment, or of a container."""
    encoding: str = "utf-8"
    """Of file names and of files that are opened without naming one."""
    locale: str = "C.UTF-8"
    start_method: str = "fork"
    """By which ``multiprocessing`` starts processes."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Of the environment: those that torch, CUDA, NCCL, Triton, OpenMP and volseg read."""


@dataclass(frozen=True, kw_only=True)
class SystemFacts:
    """Memory, cores and limits of the machine, and of the container in it."""

    memory_bytes: int
    available_bytes: int
    memory_limit_bytes: int | None = None
    """Of the container or job (cgroup), where that is less than the machine has."""
    cores: int
    """That this process may run on."""
    core_limit: float | None = None
    """Cores' worth of time that the container may take."""
    shared_memory_bytes: int | None = None
    """Of ``/dev/shm``; None where there is none."""
    shared_memory_free_bytes: int | None = None
    open_files: int
    """How many a process may have open (``ulimit -n``)."""
    open_files_hard: int
    """To how many it may raise that."""
    processes: int | None = None
    """How many the user may have (``ulimit -u``); None without a limit."""
    in_container: bool = False
    now: float = 1.8e9
    """Of the clock, in seconds since 1970."""
    built: float = 0.0
    """When the newest file of volseg was written, by which the clock cannot be behind."""


@dataclass(frozen=True, kw_only=True)
class FolderFacts:
    """A folder that volseg writes to."""

    role: Literal["cache", "runs", "temporary"]
    path: str
    existing: str
    """The folder itself, or the nearest one above it that is there."""
    file_system: str = "ext4"
    total_bytes: int
    free_bytes: int
    refused: str | None = None
    """Why nothing could be written there; None where it could."""
    clock_skew_s: float = 0.0
    """How far the time that the file system gives to a new file is ahead of this machine's."""


@dataclass(frozen=True, kw_only=True)
class FoldersFacts:
    """The folders that volseg writes to."""

    folders: tuple[FolderFacts, ...]


@dataclass(frozen=True, kw_only=True)
class PackageFacts:
    """Installed packages, by their metadata."""

    versions: Mapping[str, str | None]
    """Of what volseg requires."""
    unmet: tuple[str, ...] = ()
    """Requirements of volseg and of what it requires that are not met, a sentence each."""
    twice: tuple[str, ...] = ()
    """Packages of these that lie in two places, of which one shadows the other."""
    is_installed: bool = True
    """Whether volseg is; otherwise a checkout is on the path, and the packages beside it are not looked at."""


@dataclass(frozen=True, kw_only=True)
class ImportFacts:
    """What happened when packages were imported one after the other."""

    refused: Mapping[str, str] = field(default_factory=dict)
    """Name to the error."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU as torch sees it."""

    index: int
    name: str
    capability: tuple[int, int]
    memory_bytes: int
    free_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class TorchFacts:
    """The installed build of torch, and which GPUs it sees."""

    version: str
    cuda: str | None = None
    """Of the build; None for a CPU build."""
    rocm: str | None = None
    cudnn: int | None = None
    """As cuDNN gives it: 91002 is 9.10.2."""
    nccl: str | None = None
    architectures: tuple[str, ...] = ()
    """That the build has code for: ``sm_70``, ``compute_90``."""
    gpus: tuple[Gpu, ...] = ()
    refused: str | None = None
    """Why CUDA could not be started."""
    threads: int = 1
    """That torch computes with on the CPU."""


@dataclass(frozen=True, kw_only=True)
class PciGpu:
    """An NVIDIA GPU on the bus, driver or not."""

    address: str
    device: int
    """Its number at NVIDIA."""


@dataclass(frozen=True, kw_only=True)
class DriverFacts:
    """The NVIDIA driver, and the GPUs that the machine has whether it drives them or not."""

    version: str | None = None
    """None where no driver is loaded."""
    is_open: bool | None = None
    """Whether the kernel module is the open one; None where that is not told."""
    on_bus: tuple[PciGpu, ...] = ()
    nodes: tuple[str, ...] = ()
    """Device files such as ``/dev/nvidia0``."""
    compute_modes: tuple[str, ...] = ()
    """Of each GPU, as ``nvidia-smi`` says it."""
    refused: str | None = None
    """What ``nvidia-smi`` said where it failed."""


@dataclass(frozen=True, kw_only=True)
class Peer:
    """What passes between two GPUs."""

    source: int
    target: int
    has_access: bool
    """Whether the one reads the other's memory."""
    link: str | None = None
    """As ``nvidia-smi topo`` names it: ``NV18`` for 18 links of NVLink, ``PHB``, ``SYS`` ..."""
    gb_per_s: float | None = None
    """Of a copy of 256 MB, measured."""
    is_right: bool | None = None
    """Whether the values arrived."""


@dataclass(frozen=True, kw_only=True)
class LinkFacts:
    """Every ordered pair of GPUs."""

    peers: tuple[Peer, ...] = ()


@dataclass(frozen=True, kw_only=True)
class AllReduceFacts:
    """A sum over processes, one for each GPU."""

    backend: str
    processes: int
    size_bytes: int
    seconds: float
    is_right: bool


@dataclass(frozen=True, kw_only=True)
class CompilerFacts:
    """What Triton needs to compile a kernel, and whether it did."""

    compiler: str | None
    """That Triton takes: ``$CC``, gcc, clang or cc."""
    headers: str
    """Where ``Python.h`` should be."""
    refused: str | None = None
    """What the compiler said to a module of C with Python's headers; None where it built it."""
    triton: str | None = None
    """Version; None where it is not installed."""
    kernel: Literal["right", "wrong", "not run"] = "not run"
    """A kernel, compiled and run on the first GPU."""
    kernel_refused: str | None = None
    seconds: float | None = None
    """Of compiling it and running it once."""


@dataclass(frozen=True, kw_only=True)
class NotGathered:
    """A gatherer that failed, or was ended."""

    name: str
    reason: str
    timed_out: bool = False


@dataclass(frozen=True, kw_only=True)
class Facts:
    """All that was gathered; None for what was not asked for, or failed (then in ``failures``)."""

    python: PythonFacts | None = None
    system: SystemFacts | None = None
    folders: FoldersFacts | None = None
    packages: PackageFacts | None = None
    imports: ImportFacts | None = None
    torch: TorchFacts | None = None
    driver: DriverFacts | None = None
    links: LinkFacts | None = None
    all_reduce: AllReduceFacts | None = None
    compiler: CompilerFacts | None = None
    failures: tuple[NotGathered, ...] = ()
