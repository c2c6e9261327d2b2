"""List machines for rent: their GPUs, the links between the GPUs, and a price with its date.

Prices change, and differ by region and contract: they serve to compare candidates, and are printed with their date.
Some families are no longer on offer, or not in every region; their figures still allow an estimate.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import numpy as np

from volseg.config.nearest import did_you_mean
from volseg.errors import ConfigError
from volseg.estimate.gpu_kinds import KINDS, GpuKind, read_table
from volseg.estimate.trace import Sent

Points = tuple[tuple[int, float], ...]
"""Pairs of bytes and seconds, both rising."""


@dataclass(frozen=True, kw_only=True)
class Links:
    """The links between the GPUs of one machine.

    Measured times are interpolated between their points; otherwise a message takes ``latency_s``, and its bytes travel
    at ``bandwidth``.
    """

    bandwidth: float
    """Achieved bytes per second from one GPU to its neighbour, in one direction."""
    latency_s: float
    """Latency of a message in seconds."""
    points: Mapping[str, Points] = field(default_factory=dict)
    """Measured times between two GPUs, by kind of message."""

    def seconds(self, sent: Sent) -> float:
        """Return the seconds of a message; a message to no other device takes 0 s."""
        if sent.devices < 2 or sent.size <= 0:
            return 0.0
        # An all-reduce over a ring sends each byte twice, except the device's own share.
        share = 2 * (sent.devices - 1) / sent.devices if sent.kind == "all_reduce" else 1.0
        if points := self.points.get(sent.kind):
            return read_curve(points, sent.size * share)
        messages = sent.devices - 1 if sent.kind == "all_reduce" else 1
        return self.latency_s * messages + sent.size * share / self.bandwidth


def read_curve(points: Points, size: float) -> float:
    """Interpolate seconds between measured sizes: constant below the first, proportional above the last."""
    sizes, seconds = np.array(points).T
    beyond = max(1.0, size / sizes[-1])
    return float(beyond * np.exp(np.interp(np.log(size), np.log(sizes), np.log(seconds))))


def read_links(rows: Iterable[Mapping[str, Any]], otherwise: Links) -> Links:
    """Return the links of rows that ``calibration.links`` measures between two GPUs; the rest as ``otherwise``.

    Only recorded messages count, so Python's time to send them is excluded. Planes of a halo travel through peer memory
    up to the largest size measured that way, and through NCCL above.
    """
    found: dict[str, dict[int, float]] = {}
    for row in sorted(rows, key=lambda row: row["way"].startswith("peer")):
        is_copy = row["kind"] == "copy" and row["way"] == "peer"
        if row["devices"] == 2 and (is_copy or row["way"].endswith("recorded")):
            found.setdefault(row["kind"], {})[int(row["size"])] = float(row["seconds"])
    points = {}
    for kind, values in found.items():
        sizes = sorted(values)
        # Seconds do not fall as sizes rise.
        points[kind] = tuple(zip(sizes, accumulate((values[size] for size in sizes), max), strict=True))
    return replace(otherwise, points=points)


GIGA = 1e9

PRICES = (
    "list price on demand, Linux, us-east-1, US dollars, as public price lists gave it between April and August 2026 "
    "(https://github.com/dstackai/dstack/pull/4110 of 2026-08-06 for p5en; repositories' copies of AWS's list for the "
    "others); p4d and p5 after the cut of June 2025; today's: https://aws.amazon.com/ec2/pricing/on-demand/"
)

OF_A_LINK = 0.87
"""Share of a link's rate that copies reach: 390 of 450 GB/s between two H200s. Assumed for other links too."""

COPY_S = 13e-6
"""Least seconds of a copy between two GPUs over NVLink: measured on H200s, assumed for others too."""

_NO_LINK = Links(bandwidth=1.0, latency_s=0.0)

_CUBE_MESH = Links(bandwidth=OF_A_LINK * 25 * GIGA, latency_s=COPY_S)
"""NVLink 2, hybrid cube mesh: each V100 has six links of 25 GB/s, one or two between neighbours, and some pairs of
eight have none; modelled with the single link that every pair of neighbours has.
https://images.nvidia.com/content/pdf/dgx1-v100-system-architecture-whitepaper.pdf"""

_SWITCHED_A100 = Links(bandwidth=OF_A_LINK * 300 * GIGA, latency_s=COPY_S)
"""NVLink 3 through switches, 300 GB/s in each direction: https://www.nvidia.com/en-us/data-center/a100/"""

_SWITCHED_H100 = Links(bandwidth=OF_A_LINK * 450 * GIGA, latency_s=COPY_S)
"""NVLink 4 through switches, 450 GB/s in each direction: copies between two H200s (docs/measurements.md);
https://www.nvidia.com/en-us/data-center/h100/"""

_PCIE_4, _PCIE_3 = Links(bandwidth=8 * GIGA, latency_s=30e-6), Links(bandwidth=5 * GIGA, latency_s=30e-6)
"""PCIe through the host, an estimate: these GPUs do not write to each other's memory, so each byte crosses it twice."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A machine with GPUs of one kind, here or for rent."""

    gpu: GpuKind
    num_gpus: int
    links: Links
    """Links between the GPUs."""
    gpu_bytes: int
    """Memory of one GPU."""
    instance: str | None = None
    """The vendor's name of the machine."""
    price_per_hour: float | None = None
    """Price in US dollars; None if the machine has no public hourly price."""
    price_source: str | None = None


_FAMILIES: Mapping[str, tuple[str, Links, Mapping[str, tuple[int, float | None]]]] = {
    "p3": ("v100-16", _CUBE_MESH, {"2xlarge": (1, 3.06), "8xlarge": (4, 12.24), "16xlarge": (8, 24.48)}),
    "p3dn": ("v100-32", _CUBE_MESH, {"24xlarge": (8, 31.212)}),
    "p4d": ("a100-40", _SWITCHED_A100, {"24xlarge": (8, 21.957642)}),
    "p4de": ("a100-80", _SWITCHED_A100, {"24xlarge": (8, 27.44705)}),
    "p5": ("h100", _SWITCHED_H100, {"48xlarge": (8, 55.04)}),
    "p5e": ("h200", _SWITCHED_H100, {"48xlarge": (8, None)}),
    "p5en": ("h200", _SWITCHED_H100, {"48xlarge": (8, 63.296)}),
    "g4dn": ("t4", _PCIE_3, {"xlarge": (1, 0.526), "12xlarge": (4, 3.912)}),
    "g5": (
        "a10g",
        _PCIE_4,
        {"xlarge": (1, 1.006), "2xlarge": (1, 1.212), "4xlarge": (1, 1.624), "8xlarge": (1, 2.448)}
        | {"16xlarge": (1, 4.096), "12xlarge": (4, 5.672), "24xlarge": (4, 8.144), "48xlarge": (8, 16.288)},
    ),
    "g6": (
        "l4",
        _PCIE_4,
        {"xlarge": (1, 0.8048), "2xlarge": (1, 0.9776), "4xlarge": (1, 1.3232), "8xlarge": (1, 2.0144)}
        | {"16xlarge": (1, 3.3968), "12xlarge": (4, 4.6016), "24xlarge": (4, 6.6752), "48xlarge": (8, 13.3504)},
    ),
}
"""By family: the kind of GPU, its links, and for each size the number of GPUs and US dollars per hour.
https://aws.amazon.com/ec2/instance-types/accelerated-computing/ (from memory, 2026-11)"""

INSTANCES: Mapping[str, Machine] = {
    f"{family}.{size}": Machine(
        gpu=KINDS[gpu],
        num_gpus=num_gpus,
        links=_NO_LINK if num_gpus == 1 else links,
        gpu_bytes=KINDS[gpu].memory,
        instance=f"{family}.{size}",
        price_per_hour=price,
        price_source=PRICES,
    )
    for family, (gpu, links, sizes) in _FAMILIES.items()
    for size, (num_gpus, price) in sizes.items()
}
"""Machines by name."""


def get_instance(name: str) -> Machine:
    """Return a machine by its name, or by its family's name if the family has only one size.

    Raises
    ------
    ConfigError
        If a family has several sizes (lists them), or if the name is unknown (suggests the nearest).

    Examples
    --------
    >>> get_instance("p4d").instance
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
    raise ConfigError(
        f"no machine is known by the name {name!r} ({did_you_mean(wanted, INSTANCES)}); for others give the number of "
        "GPUs and the memory of one"
    )


def get_links(kind: GpuKind) -> Links:
    """Return the links of a kind of GPU without a named machine: measured ones, else those of a machine with this kind.

    If no machine has several GPUs of the kind, PCIe is assumed.
    """
    if kind.measured:
        return read_links(read_table().links, _SWITCHED_H100)
    of_several = [i.links for i in INSTANCES.values() if i.gpu.name == kind.name and i.num_gpus > 1]
    return of_several[0] if of_several else _PCIE_4
