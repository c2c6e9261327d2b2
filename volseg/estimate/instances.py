"""List machines for rent: their GPUs, the links between the GPUs, and a price with its date."""

from collections.abc import Mapping
from dataclasses import dataclass

from volseg.config.nearest import did_you_mean
from volseg.errors import ConfigError
from volseg.estimate.gpu_kinds import KINDS, MACHINES, GpuKind
from volseg.estimate.trace import Sent


@dataclass(frozen=True, kw_only=True)
class Links:
    """The links between the GPUs of one machine: a message takes the latency, and its bytes the bandwidth."""

    bandwidth: float
    """Achieved bytes per second from one GPU to its neighbour, in one direction."""
    latency_s: float
    """Latency of a message in seconds."""
    is_direct: bool = False
    """Whether each GPU writes into the memory of all others, so that a sum takes one latency and not one per GPU."""

    def seconds(self, sent: Sent) -> float:
        """Return the seconds of a message; a message to no other device takes 0 s."""
        if sent.devices < 2 or sent.size <= 0:
            return 0.0
        # An all-reduce over a ring sends each byte twice, except the device's own share.
        share = 2 * (sent.devices - 1) / sent.devices if sent.kind == "all_reduce" else 1.0
        messages = sent.devices - 1 if sent.kind == "all_reduce" and not self.is_direct else 1
        return self.latency_s * messages + sent.size * share / self.bandwidth


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


_LINKS = {name: Links(**figures) for name, figures in MACHINES["links"].items()}

INSTANCES: Mapping[str, Machine] = {
    f"{family}.{size}": Machine(
        gpu=KINDS[row["gpu"]],
        num_gpus=num_gpus,
        links=_LINKS[row["links"]],
        gpu_bytes=KINDS[row["gpu"]].memory,
        instance=f"{family}.{size}",
        price_per_hour=price,
        price_source=MACHINES["price_source"],
    )
    for family, row in MACHINES["families"].items()
    for size, (num_gpus, price) in row["sizes"].items()
}
"""Machines by name."""


def get_instance(name: str) -> Machine:
    """Return a machine by its name.

    Raises
    ------
    ConfigError
        If the name is unknown (suggests the nearest).
    """
    wanted = name.strip().lower()
    if wanted in INSTANCES:
        return INSTANCES[wanted]
    near = [known for known in INSTANCES if known.startswith(f"{wanted}.")] or INSTANCES
    raise ConfigError(
        f"no machine is known by the name {name!r} ({did_you_mean(wanted, near)}); for others give the number of "
        "GPUs and the memory of one"
    )


def get_links(kind: GpuKind) -> Links:
    """Return the links of a machine with several GPUs of a kind; PCIe if no machine has several."""
    of_several = [i.links for i in INSTANCES.values() if i.gpu.name == kind.name and i.num_gpus > 1]
    return of_several[0] if of_several else _LINKS["pcie-4"]
