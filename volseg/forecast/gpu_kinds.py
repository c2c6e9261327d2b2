"""Kinds of GPUs: their memory and speed, measured here or published by their vendor.

A kind that was measured has a table of its own. One that was not is forecast from its vendor's figures, as near to
them as the measured one came to its own: its times are marked ``published``, and are estimates.
"""

import gzip
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from typing import Any

import torch

from volseg.errors import ConfigError
from volseg.forecast.kernel_class import FULL, KernelClass, classify
from volseg.forecast.rates import Peaks, RateTable
from volseg.forecast.trace import KernelRun

__all__ = ["KINDS", "GpuKind", "HostRates", "find_kind", "name_kinds", "read_table"]

GIB = 2**30
TERA, GIGA = 1e12, 1e9

BY_CUDA_CORES = 0.6
"""Of the peak of float32 without matrix units, which convolutions come to: cuDNN's usual efficiency there, and no
measurement of ours."""


MOST_KNOWN = 50_000
"""Kernels whose seconds a kind keeps: some megabytes."""

OF_SLABS = 3.6
"""Times what a kernel of our own alone takes Python. An eager step of a DynUNet on slabs, 185 kernels and convolutions,
took 24 to 39 ms in four runs, 32 in the middle: 173 us each beside 48. A V-Net's, 212 of them and 1,150 small
operators, took 36 to 59 ms, 42 in the middle (workflows/benchmarks/results/networks_h200_*.json)."""

MESSAGE_S = 60e-6
"""Of a sum of a few bytes, one eager call behind the other: of the H200's table of links."""

EXCHANGE_S = 0.7e-3
"""Of an eager exchange of halos: what it takes Python, and how long the one process waits for the other's Python. By
the difference that is left of the eager steps of four networks on two H200."""


@dataclass(frozen=True, kw_only=True)
class HostRates:
    """What Python and the launch of kernels take, in seconds."""

    forward: Mapping[str, float]
    """Of an operator with autograd: of a ``convolution``, a ``norm``, and one that is ``pointwise``."""
    backward: Mapping[str, float]
    operator: float
    """Of one without autograd."""
    triton: float
    """Of a kernel of our own."""
    slab: float
    """Of a convolution, or a kernel of our own, in a network that runs on slabs: what leads to it included."""
    exchange: float
    """Of an exchange of halos between processes that both start their kernels one by one."""
    message: float
    """Of another message of a process group's."""
    replay: float
    """Of a recording, whatever it holds."""


@dataclass(frozen=True, kw_only=True)
class GpuKind:
    """One kind of GPU."""

    name: str
    """As CUDA calls it, or its vendor."""
    memory: int
    """Bytes that CUDA says there are, which is less than what is sold: the driver and error correction keep some."""
    processors: int
    """Multiprocessors."""
    capability: tuple[int, int]
    peaks: Peaks
    source: str
    """Of these figures, with a date."""
    has_tf32: bool = True
    """Whether matrix units take float32; else ``peaks.full`` is that of CUDA's cores."""
    table: str = "h200"
    """Name of the table that times are read from."""
    measured: bool = False
    """Whether that table is its own."""
    rates: RateTable | None = None
    """Where this machine was measured: its table, in place of the one that comes with the package."""
    host: HostRates | None = None
    _known: dict[KernelRun, float] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Seconds of kernels that were asked for: a plan asks for the same thousands many times over."""

    @property
    def memory_gib(self) -> float:
        """In GiB."""
        return self.memory / GIB

    def takes_bfloat16(self) -> bool:
        """Say whether its matrix units take bfloat16: see ``volseg.workflow.precision``."""
        return self.capability >= (8, 0)

    def seconds(self, run: KernelRun) -> float:
        """Return how long a kernel runs."""
        if run not in self._known:
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            self._known[run] = sum(self._time(kernel) for kernel in classify(run))
        return self._known[run]

    def _time(self, kernel: KernelClass) -> float:
        table = self.rates or read_table(self.table).rates
        if kernel.on_cores and not table.knows(kernel):
            by_bytes = self._time(kernel._replace(flops=0, on_cores=False))
            return max(by_bytes, table.gap + kernel.flops / self.peaks.by_cores / BY_CUDA_CORES)
        if self.measured or self.rates is not None:
            return table.seconds(kernel)
        seconds = table.seconds(kernel, self.peaks, self.processors)
        if kernel.dtype == FULL and kernel.flops and not self.has_tf32:
            return min(seconds, table.gap + self.peaks.bound(kernel) / BY_CUDA_CORES)
        return seconds

    def host_rates(self) -> HostRates:
        """Return what the host takes: that of the measured machine, unless this one was measured."""
        return self.host or read_table(self.table).host


@dataclass(frozen=True)
class Table:
    """What was measured of one machine."""

    machine: Mapping[str, Any]
    rates: RateTable
    host: HostRates
    links: tuple[Mapping[str, Any], ...]


def parse_table(stored: Mapping[str, Any], peaks: Peaks) -> Table:
    """Return a table from what ``calibration`` has written."""
    machine, host = stored["machine"], stored["host"]
    rates = RateTable.of_rows(stored["rows"], peaks, machine["processors"], host["graph"])
    parts = "convolution", "norm", "pointwise"
    told = HostRates(
        forward={name: host[f"{name} forward"] for name in parts},
        backward={name: host[f"{name} backward"] for name in parts},
        operator=host["operator"],
        triton=host["triton"],
        slab=host.get("slab", OF_SLABS * host["triton"]),
        exchange=host.get("exchange", EXCHANGE_S),
        message=host.get("message", MESSAGE_S),
        replay=host["replay"],
    )
    return Table(machine, rates, told, tuple(stored["links"]))


@cache
def read_table(name: str) -> Table:
    """Return a table that comes with the package."""
    stored = files("volseg.forecast").joinpath("tables", f"{name}.json.gz").read_bytes()
    return parse_table(json.loads(gzip.decompress(stored)), KINDS[name].peaks)


NVIDIA = "https://www.nvidia.com/en-us/data-center"

KINDS: Mapping[str, GpuKind] = {
    "h200": GpuKind(
        name="NVIDIA H200",
        memory=150_109_880_320,
        processors=132,
        capability=(9, 0),
        peaks=Peaks(bandwidth=4.8 * TERA, half=989 * TERA, full=494 * TERA, cores=67 * TERA),
        source=f"{NVIDIA}/h200/ (peaks, 2026-11); times measured, see workflows/benchmarks/kernel_rates.py",
        measured=True,
    ),
    "h100": GpuKind(
        name="NVIDIA H100 80GB HBM3",
        memory=85_028_765_696,
        processors=132,
        capability=(9, 0),
        peaks=Peaks(bandwidth=3.35 * TERA, half=989 * TERA, full=494 * TERA, cores=67 * TERA),
        source=f"{NVIDIA}/h100/ (SXM, 2026-11)",
    ),
    "a100-80": GpuKind(
        name="NVIDIA A100-SXM4-80GB",
        memory=84_974_239_744,
        processors=108,
        capability=(8, 0),
        peaks=Peaks(bandwidth=2.039 * TERA, half=312 * TERA, full=156 * TERA, cores=19.5 * TERA),
        source=f"{NVIDIA}/a100/ (2026-11)",
    ),
    "a100-40": GpuKind(
        name="NVIDIA A100-SXM4-40GB",
        memory=42_298_834_944,
        processors=108,
        capability=(8, 0),
        peaks=Peaks(bandwidth=1.555 * TERA, half=312 * TERA, full=156 * TERA, cores=19.5 * TERA),
        source=f"{NVIDIA}/a100/ (2026-11)",
    ),
    "v100-16": GpuKind(
        name="Tesla V100-SXM2-16GB",
        memory=16_935_682_048,
        processors=80,
        capability=(7, 0),
        peaks=Peaks(bandwidth=0.9 * TERA, half=125 * TERA, full=15.7 * TERA, cores=15.7 * TERA),
        source="https://images.nvidia.com/content/technologies/volta/pdf/volta-v100-datasheet-update-us-1165301-r5.pdf",
        has_tf32=False,
    ),
    "v100-32": GpuKind(
        name="Tesla V100-SXM2-32GB",
        memory=34_079_637_504,
        processors=80,
        capability=(7, 0),
        peaks=Peaks(bandwidth=0.9 * TERA, half=125 * TERA, full=15.7 * TERA, cores=15.7 * TERA),
        source="https://images.nvidia.com/content/technologies/volta/pdf/volta-v100-datasheet-update-us-1165301-r5.pdf",
        has_tf32=False,
    ),
    "a10g": GpuKind(
        name="NVIDIA A10G",
        memory=23_609_475_072,
        processors=80,
        capability=(8, 6),
        peaks=Peaks(bandwidth=0.6 * TERA, half=70 * TERA, full=35 * TERA, cores=31.2 * TERA),
        source="https://d1.awsstatic.com/product-marketing/ec2/NVIDIA_AWS_A10G_DataSheet_FINAL_02_17_2022.pdf",
    ),
    "l4": GpuKind(
        name="NVIDIA L4",
        memory=23_580_639_232,
        processors=58,
        capability=(8, 9),
        peaks=Peaks(bandwidth=0.3 * TERA, half=121 * TERA, full=60 * TERA, cores=30.3 * TERA),
        source=f"{NVIDIA}/l4/ (2026-11, without sparsity)",
    ),
    "t4": GpuKind(
        name="Tesla T4",
        memory=15_655_829_504,
        processors=40,
        capability=(7, 5),
        peaks=Peaks(bandwidth=0.32 * TERA, half=65 * TERA, full=8.1 * TERA, cores=8.1 * TERA),
        source=f"{NVIDIA}/tesla-t4/ (2026-11)",
        has_tf32=False,
    ),
}
"""By the name that options take. Memory as CUDA tells it on these GPUs, from memory but for the H200's."""


def name_kinds() -> list[str]:
    """Return the names that ``find_kind`` takes."""
    return list(KINDS)


def find_kind(name: str) -> GpuKind:
    """Return a kind by its short name, or by what CUDA calls it.

    Raises
    ------
    ConfigError
        For a name that is none.
    """
    wanted = name.strip().lower()
    if wanted in KINDS:
        return KINDS[wanted]
    called = [kind for kind in KINDS.values() if kind.name.lower() == wanted]
    if called:
        return called[0]
    near = [known for known in KINDS if known.startswith(wanted)] or get_close_matches(wanted, KINDS, n=2, cutoff=0.4)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    raise ConfigError(f"the speed of a GPU called {name!r} is not known; known are {', '.join(KINDS)}{hint}")


def scale_memory(kind: GpuKind, memory: int) -> GpuKind:
    """Return the kind with another amount of memory, in bytes."""
    return replace(kind, memory=memory)


def describe_here(device: torch.device) -> tuple[str, int]:
    """Return the name and the bytes of a GPU of this machine."""
    told = torch.cuda.get_device_properties(device)
    return told.name, int(told.total_memory)
