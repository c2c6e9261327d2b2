"""Machines that can be rented: their GPUs, what connects these, and a price with its date.

Prices change, and differ by region and contract: they are there to compare candidates by, and are printed with their
date. Where a family is no longer, or not everywhere, to be had, its figures still say what it would take.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from volseg.errors import ConfigError
from volseg.estimate.gpu_kinds import KINDS, GpuKind, read_table
from volseg.estimate.links import Links, read_links

__all__ = ["INSTANCES", "Instance", "find_instance", "find_links"]

GIGA = 1e9

PRICES = (
    "list price on demand, Linux, us-east-1, US dollars, as public price lists gave it between April and August 2026 "
    "(https://github.com/dstackai/dstack/pull/4110 of 2026-08-06 for p5en; repositories' copies of AWS's list for the "
    "others); p4d and p5 after the cut of June 2025; today's: https://aws.amazon.com/ec2/pricing/on-demand/"
)

SPECIFICATIONS = "https://aws.amazon.com/ec2/instance-types/accelerated-computing/ (from memory, 2026-11)"

OF_A_LINK = 0.87
"""Of a link's rate that copies get: 390 of 450 GB/s between two H200. Taken for other links too."""

COPY_S = 13e-6
"""Of a copy between two GPUs that NVLink connects, however small: measured on H200, taken for others too."""

_NO_LINK = Links(kind="one GPU", bandwidth=1.0, latency_s=0.0, source="there is no other GPU")

_CUBE_MESH = Links(
    kind="NVLink 2, hybrid cube mesh: one or two links of 25 GB/s between neighbours, some pairs of eight have none",
    bandwidth=OF_A_LINK * 25 * GIGA,
    latency_s=COPY_S,
    source="https://images.nvidia.com/content/pdf/dgx1-v100-system-architecture-whitepaper.pdf: each V100 has six "
    "links of 25 GB/s; counted with the single link that every pair of neighbours has",
)
_SWITCHED_A100 = Links(
    kind="NVLink 3 through switches, 300 GB/s in each direction",
    bandwidth=OF_A_LINK * 300 * GIGA,
    latency_s=COPY_S,
    source="https://www.nvidia.com/en-us/data-center/a100/",
)
_SWITCHED_H100 = Links(
    kind="NVLink 4 through switches, 450 GB/s in each direction",
    bandwidth=OF_A_LINK * 450 * GIGA,
    latency_s=COPY_S,
    source="copies between two H200: docs/measurements.md; https://www.nvidia.com/en-us/data-center/h100/",
)
_PCIE_4 = Links(
    kind="PCIe 4 through the host",
    bandwidth=8 * GIGA,
    latency_s=30e-6,
    source="an estimate: these GPUs do not write to each other's memory, so that each byte crosses PCIe twice",
)
_PCIE_3 = Links(
    kind="PCIe 3 through the host",
    bandwidth=5 * GIGA,
    latency_s=30e-6,
    source="an estimate, as for PCIe 4",
)


@dataclass(frozen=True, kw_only=True)
class Instance:
    """A machine with GPUs."""

    name: str
    gpu: GpuKind
    num_gpus: int
    vcpus: int
    host_memory_gib: float
    links: Links
    price_per_hour: float | None
    """US dollars; None where it is not sold by the hour to everybody."""
    price_source: str = PRICES
    source: str = SPECIFICATIONS

    def price(self, seconds: float) -> float | None:
        """Return what so many seconds cost."""
        return None if self.price_per_hour is None else self.price_per_hour * seconds / 3600


def _make(
    name: str, gpu: str, num_gpus: int, vcpus: int, host_memory_gib: float, links: Links, price: float | None
) -> Instance:
    return Instance(
        name=name,
        gpu=KINDS[gpu],
        num_gpus=num_gpus,
        vcpus=vcpus,
        host_memory_gib=host_memory_gib,
        links=_NO_LINK if num_gpus == 1 else links,
        price_per_hour=price,
    )


_ALL = (
    _make("p3.2xlarge", "v100-16", 1, 8, 61, _CUBE_MESH, 3.06),
    _make("p3.8xlarge", "v100-16", 4, 32, 244, _CUBE_MESH, 12.24),
    _make("p3.16xlarge", "v100-16", 8, 64, 488, _CUBE_MESH, 24.48),
    _make("p3dn.24xlarge", "v100-32", 8, 96, 768, _CUBE_MESH, 31.212),
    _make("p4d.24xlarge", "a100-40", 8, 96, 1152, _SWITCHED_A100, 21.957642),
    _make("p4de.24xlarge", "a100-80", 8, 96, 1152, _SWITCHED_A100, 27.44705),
    _make("p5.48xlarge", "h100", 8, 192, 2048, _SWITCHED_H100, 55.04),
    _make("p5e.48xlarge", "h200", 8, 192, 2048, _SWITCHED_H100, None),
    _make("p5en.48xlarge", "h200", 8, 192, 2048, _SWITCHED_H100, 63.296),
    _make("g4dn.xlarge", "t4", 1, 4, 16, _PCIE_3, 0.526),
    _make("g4dn.12xlarge", "t4", 4, 48, 192, _PCIE_3, 3.912),
    _make("g5.xlarge", "a10g", 1, 4, 16, _PCIE_4, 1.006),
    _make("g5.2xlarge", "a10g", 1, 8, 32, _PCIE_4, 1.212),
    _make("g5.4xlarge", "a10g", 1, 16, 64, _PCIE_4, 1.624),
    _make("g5.8xlarge", "a10g", 1, 32, 128, _PCIE_4, 2.448),
    _make("g5.16xlarge", "a10g", 1, 64, 256, _PCIE_4, 4.096),
    _make("g5.12xlarge", "a10g", 4, 48, 192, _PCIE_4, 5.672),
    _make("g5.24xlarge", "a10g", 4, 96, 384, _PCIE_4, 8.144),
    _make("g5.48xlarge", "a10g", 8, 192, 768, _PCIE_4, 16.288),
    _make("g6.xlarge", "l4", 1, 4, 16, _PCIE_4, 0.8048),
    _make("g6.2xlarge", "l4", 1, 8, 32, _PCIE_4, 0.9776),
    _make("g6.4xlarge", "l4", 1, 16, 64, _PCIE_4, 1.3232),
    _make("g6.8xlarge", "l4", 1, 32, 128, _PCIE_4, 2.0144),
    _make("g6.16xlarge", "l4", 1, 64, 256, _PCIE_4, 3.3968),
    _make("g6.12xlarge", "l4", 4, 48, 192, _PCIE_4, 4.6016),
    _make("g6.24xlarge", "l4", 4, 96, 384, _PCIE_4, 6.6752),
    _make("g6.48xlarge", "l4", 8, 192, 768, _PCIE_4, 13.3504),
)

INSTANCES: Mapping[str, Instance] = {instance.name: instance for instance in _ALL}
"""By name."""


def find_instance(name: str) -> Instance:
    """Return a machine by its name, or by that of its family where that has one size only.

    Raises
    ------
    ConfigError
        For a family of several sizes, with all of them; for a name that is none, with the nearest ones.

    Examples
    --------
    >>> find_instance("p4d").name
    'p4d.24xlarge'
    """
    wanted = name.strip().lower()
    if wanted in INSTANCES:
        return INSTANCES[wanted]
    family = [known for known in INSTANCES if known.split(".")[0] == wanted.split(".")[0]]
    if family and "." not in wanted:
        if len(family) == 1:
            return INSTANCES[family[0]]
        raise ConfigError(f"{name!r} is a family of {len(family)} machines: name one of {', '.join(family)}")
    near = get_close_matches(wanted, INSTANCES, n=3, cutoff=0.5)
    nearest = list(dict.fromkeys([*near, *family]))[:5] or list(INSTANCES)
    raise ConfigError(
        f"no machine is known by the name {name!r}; the nearest are {', '.join(nearest)}; for others give the "
        "number of GPUs and the memory of one"
    )


def find_links(kind: GpuKind) -> Links:
    """Return what connects GPUs of a kind where no machine is named: as measured, else as in the machines that have it.

    GPUs of a kind that is never sold several at a time are taken to be connected by PCIe.
    """
    if kind.measured:
        return read_links(read_table().links, _SWITCHED_H100)
    of_several = [i.links for i in _ALL if i.gpu.name == kind.name and i.num_gpus > 1]
    return of_several[0] if of_several else _PCIE_4
