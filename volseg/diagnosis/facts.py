"""Define the facts of a machine: plain values, which the gathering processes send as JSON."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class PythonFacts:
    """The interpreter, with its settings for text and processes."""

    version: str
    executable: str = ""
    in_environment: bool = True
    """Whether the interpreter belongs to a virtual or conda environment, or to a container."""
    encoding: str = "utf-8"
    """Default encoding of files."""
    locale: str = "C.UTF-8"
    start_method: str = "fork"
    """Start method of ``multiprocessing``."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that torch, CUDA, NCCL, Triton, OpenMP and volseg read."""


@dataclass(frozen=True, kw_only=True)
class SystemFacts:
    """Memory, cores and limits of the machine, and of the container in it."""

    memory_bytes: int
    available_bytes: int
    memory_limit_bytes: int | None = None
    """Limit of the container or job (cgroup), if less than the machine's memory."""
    cores: int
    """Cores that this process may run on."""
    core_limit: float | None = None
    """Limit of the container's CPU time, in cores."""
    shared_memory_bytes: int | None = None
    """Size of ``/dev/shm``; None if absent."""
    shared_memory_free_bytes: int | None = None
    open_files: int
    """Limit of open files per process (``ulimit -n``)."""
    open_files_hard: int
    """Hard limit, up to which a process may raise its own."""
    processes: int | None = None
    """Limit of processes per user (``ulimit -u``); None without a limit."""
    in_container: bool = False
    now: float = 1.8e9
    """Time of the clock, in seconds since 1970."""
    built: float = 0.0
    """Time of volseg's newest file, in seconds since 1970: a correct clock is later."""


@dataclass(frozen=True, kw_only=True)
class FolderFacts:
    """A folder that volseg writes to."""

    role: Literal["cache", "runs", "temporary"]
    path: str
    existing: str
    """The folder itself, or its nearest existing parent."""
    file_system: str = "ext4"
    total_bytes: int
    free_bytes: int
    refused: str | None = None
    """Why the folder is not writable; None if it is."""
    clock_skew_s: float = 0.0
    """Seconds by which the file system's clock is ahead of this machine's."""


@dataclass(frozen=True, kw_only=True)
class FoldersFacts:
    """The folders that volseg writes to."""

    folders: tuple[FolderFacts, ...]


@dataclass(frozen=True, kw_only=True)
class PackageFacts:
    """Installed packages, by their metadata."""

    versions: Mapping[str, str | None]
    """Versions of the packages that volseg requires; None if missing."""
    unmet: tuple[str, ...] = ()
    """Unmet requirements of volseg and of its dependencies, one sentence each."""
    twice: tuple[str, ...] = ()
    """Those of these packages that are installed in two places, where one shadows the other."""
    is_installed: bool = True
    """Whether volseg is installed; otherwise a checkout is on the path, and packages are not checked."""


@dataclass(frozen=True, kw_only=True)
class ImportFacts:
    """Result of importing packages one after the other."""

    refused: Mapping[str, str] = field(default_factory=dict)
    """Errors by name of the package."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """Properties of a GPU from torch."""

    index: int
    name: str
    capability: tuple[int, int]
    memory_bytes: int
    free_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class TorchFacts:
    """The installed build of torch, and the GPUs that it sees."""

    version: str
    cuda: str | None = None
    """CUDA version of the build; None for a CPU build."""
    rocm: str | None = None
    cudnn: int | None = None
    """Version in cuDNN's form: 91002 is 9.10.2."""
    nccl: str | None = None
    architectures: tuple[str, ...] = ()
    """Architectures in the build: ``sm_70``, ``compute_90``."""
    gpus: tuple[Gpu, ...] = ()
    refused: str | None = None
    """Why CUDA could not be initialised."""
    threads: int = 1
    """Number of torch's CPU threads."""


@dataclass(frozen=True, kw_only=True)
class PciGpu:
    """An NVIDIA GPU on the bus, with or without a driver."""

    address: str
    device: int
    """NVIDIA's device number."""


@dataclass(frozen=True, kw_only=True)
class DriverFacts:
    """The NVIDIA driver, and the machine's GPUs, whether supported or not."""

    version: str | None = None
    """Version; None if no driver is loaded."""
    is_open: bool | None = None
    """Whether the kernel module is the open one; None if unknown."""
    on_bus: tuple[PciGpu, ...] = ()
    nodes: tuple[str, ...] = ()
    """Device files such as ``/dev/nvidia0``."""
    compute_modes: tuple[str, ...] = ()
    """Compute mode of each GPU, from ``nvidia-smi``."""
    refused: str | None = None
    """Message of ``nvidia-smi`` if it failed."""


@dataclass(frozen=True, kw_only=True)
class Peer:
    """Link from one GPU to another."""

    source: int
    target: int
    has_access: bool
    """Whether the target can access the source's memory."""
    link: str | None = None
    """Name in ``nvidia-smi topo``: ``NV18`` for 18 links of NVLink, ``PHB``, ``SYS`` ..."""
    gb_per_s: float | None = None
    """Measured rate of copies of 256 MiB."""
    is_right: bool | None = None
    """Whether the copied values are right."""


@dataclass(frozen=True, kw_only=True)
class LinkFacts:
    """Links of every ordered pair of GPUs."""

    peers: tuple[Peer, ...] = ()


@dataclass(frozen=True, kw_only=True)
class AllReduceFacts:
    """Result of an all-reduce over processes, one per GPU."""

    backend: str
    processes: int
    size_bytes: int
    seconds: float
    is_right: bool


@dataclass(frozen=True, kw_only=True)
class CompilerFacts:
    """Triton's requirements for compiling a kernel, and the result of a trial."""

    compiler: str | None
    """Compiler that Triton uses: ``$CC``, gcc, clang or cc."""
    headers: str
    """Folder of ``Python.h``."""
    refused: str | None = None
    """Compiler's message for a C module with Python's headers; None if it was built."""
    triton: str | None = None
    """Version; None if Triton is not installed."""
    kernel: Literal["right", "wrong", "not run"] = "not run"
    """Result of a kernel, compiled and run on the first GPU."""
    kernel_refused: str | None = None
    seconds: float | None = None
    """Time for compiling the kernel and running it once."""


@dataclass(frozen=True, kw_only=True)
class NotGathered:
    """A gatherer that failed, or exceeded its time limit."""

    name: str
    reason: str
    timed_out: bool = False


@dataclass(frozen=True, kw_only=True)
class Facts:
    """All facts by section; None for sections that were not requested or failed (see ``failures``)."""

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
