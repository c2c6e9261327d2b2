"""List kinds of GPUs with their memory and speed, measured here or published by their vendor.

The H200 was measured, and has its own table. The speed of another kind is estimated from its vendor's figures, assuming
that it reaches the same share of them as the H200 does. Its times are marked ``published`` until it is calibrated
(`volseg.profiling.calibration`).
"""

import gzip
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from volseg.config.nearest import did_you_mean
from volseg.device.fake_gpu import GpuLike
from volseg.errors import ConfigError
from volseg.estimate.roofline import FULL, KernelClass, Peaks, RateTable, classify, name_dtype
from volseg.estimate.trace import KernelRun

BY_CUDA_CORES = 0.6
"""Share of the CUDA cores' float32 peak that convolutions reach: cuDNN's usual efficiency without matrix units, not
measured by us."""

MOST_KNOWN = 50_000
"""Most kernels whose seconds a kind caches: some megabytes."""

OF_SLABS = 3.6
"""Python's time for a kernel in an eager step on slabs, over that for one of volseg's kernels otherwise. A step of a
DynUNet, 185 kernels and convolutions, took 24 to 39 ms in four runs: 173 us each, against 48
(workflows/benchmarks/results/networks_h200_*.json)."""

MESSAGE_S, EXCHANGE_S = 60e-6, 0.7e-3
"""Seconds of an eager all-reduce of a few bytes, and of an eager exchange of halos, in which one process waits for the
other's Python: on two H200s."""


HostRates = Mapping[str, float]
"""Seconds of Python and of kernel launches, per operator or message.

``convolution forward``, ``norm backward`` and so on: an operator of torch with autograd, of the kinds ``convolution``,
``norm`` and ``pointwise``; ``operator``: one without autograd; ``triton``: one of volseg's kernels; ``slab``: a
convolution, or one of volseg's kernels, in a network on slabs, including the code around it; ``exchange``: an exchange
of halos between processes that both launch their kernels one by one; ``message``: any other message of a process group;
``replay``: the launch of a replay, of any length.
"""


@dataclass(frozen=True, kw_only=True)
class GpuKind(GpuLike):
    """One kind of GPU."""

    peaks: Peaks
    source: str
    """Source of these figures, with a date."""
    measured: bool = False
    """Whether the table in the package was measured on this kind."""
    factors: Mapping[str, float] | None = None
    """Measured over estimated seconds of a calibrated GPU's kernels, by `name_group`."""
    host: HostRates | None = None
    _known: dict[KernelRun, float] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Cached seconds of kernels: a plan asks for the same thousands of kernels many times."""

    def takes_bfloat16(self) -> bool:
        """Return whether the matrix units support bfloat16, and float32 as TF32: see ``volseg.workflow.precision``."""
        return self.capability >= (8, 0)

    @property
    def is_measured(self) -> bool:
        """Whether the times are based on measurements of this kind of GPU."""
        return self.measured or self.factors is not None

    def seconds(self, run: KernelRun) -> float:
        """Return the seconds of a kernel."""
        if run not in self._known:
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            factor = (self.factors or {}).get(name_group(run), 1.0)
            self._known[run] = factor * sum(self._time(kernel) for kernel in classify(run))
        return self._known[run]

    def _time(self, kernel: KernelClass) -> float:
        table, _ = read_table()
        if kernel.on_cores and not table.knows(kernel):
            by_bytes = self._time(kernel._replace(flops=0, on_cores=False))
            return max(by_bytes, table.gap + kernel.flops / self.peaks.cores / BY_CUDA_CORES)
        if self.measured:
            return table.seconds(kernel)
        seconds = table.seconds(kernel, self.peaks, self.processors)
        if kernel.dtype == FULL and kernel.flops and not self.takes_bfloat16():
            return min(seconds, table.gap + self.peaks.bound(kernel) / BY_CUDA_CORES)
        return seconds

    def host_rates(self) -> HostRates:
        """Return the host's rates: those of a calibrated GPU's machine, else of the H200's machine."""
        return self.host or read_table()[1]


def name_group(run: KernelRun) -> str:
    """Return the group of a kernel; a calibration has one factor per group."""
    computes = any(kernel.flops for kernel in classify(run))
    return f"{'products' if computes else 'passes'}, {name_dtype(run.dtype)}"


def read_host_rates(host: Mapping[str, float]) -> HostRates:
    """Return the rates that ``calibration.measure_host`` measured, and those that it does not measure."""
    return {"slab": OF_SLABS * host["triton"], "exchange": EXCHANGE_S, "message": MESSAGE_S, **host}


@cache
def read_table() -> tuple[RateTable, HostRates]:
    """Return the H200's kernels and its host's rates (from ``workflows/benchmarks/kernel_rates.py``)."""
    stored = json.loads(gzip.decompress(files("volseg.estimate").joinpath("tables", "h200.json.gz").read_bytes()))
    machine, host = stored["machine"], stored["host"]
    rates = RateTable(stored["rows"], KINDS["h200"].peaks, machine["processors"], host["graph"])
    return rates, read_host_rates(host)


MACHINES: Mapping[str, Any] = yaml.safe_load(
    files("volseg.estimate").joinpath("tables", "machines.yaml").read_text(encoding="utf-8")
)
"""Kinds of GPUs, links between GPUs, and machines for rent, with their sources."""

RATES = "bandwidth", "half", "full", "cores"

KINDS: Mapping[str, GpuKind] = {
    short: GpuKind(
        name=row["name"],
        memory=row["memory"],
        processors=row["processors"],
        capability=tuple(row["capability"]),
        peaks=Peaks(**{rate: 1e12 * row[rate] for rate in RATES}),
        source=row["source"],
        measured=short == "h200",
    )
    for short, row in MACHINES["gpus"].items()
}
"""Kinds by their names in options."""


def find_kind(name: str) -> GpuKind:
    """Return a kind by its short name, or by its name in CUDA.

    Raises
    ------
    ConfigError
        If the name is unknown.
    """
    wanted = name.strip().lower()
    if wanted in KINDS:
        return KINDS[wanted]
    called = [kind for kind in KINDS.values() if kind.name.lower() == wanted]
    if called:
        return called[0]
    near = [known for known in KINDS if known.startswith(wanted)] or KINDS
    raise ConfigError(f"the speed of a GPU called {name!r} is not known ({did_you_mean(wanted, near)})")
