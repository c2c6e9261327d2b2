"""How long data take from GPU to GPU of a machine."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from volseg.estimate.trace import Sent

__all__ = ["Links", "read_links"]

Points = tuple[tuple[int, float], ...]
"""Bytes and seconds, both rising."""


@dataclass(frozen=True, kw_only=True)
class Links:
    """What connects the GPUs of one machine.

    Where times were measured they are read between their points; else a message takes ``latency_s`` and its bytes
    travel at ``bandwidth``.
    """

    kind: str
    """In words: ``NVLink through switches``, ``PCIe``."""
    bandwidth: float
    """Bytes per second from one GPU to its neighbour, in one direction, as messages get it."""
    latency_s: float
    """Of a message."""
    source: str
    measured: bool = False
    points: Mapping[str, Points] = field(default_factory=dict)
    """By kind of message, between two GPUs."""

    def seconds(self, sent: Sent) -> float:
        """Return how long a message takes; one that nobody else takes part in takes none."""
        if sent.devices < 2 or sent.size <= 0:
            return 0.0
        # A sum over a ring sends each byte twice, less what the device itself holds.
        share = 2 * (sent.devices - 1) / sent.devices if sent.kind == "all_reduce" else 1.0
        if points := self.points.get(sent.kind):
            return read_curve(points, sent.size * share)
        return (
            self.latency_s * (sent.devices - 1 if sent.kind == "all_reduce" else 1) + sent.size * share / self.bandwidth
        )


def read_curve(points: Points, size: float) -> float:
    """Return seconds between measured sizes, no fewer than those of the first, in proportion behind the last."""
    sizes, seconds = np.array(points).T
    beyond = max(1.0, size / sizes[-1])
    return float(beyond * np.exp(np.interp(np.log(size), np.log(sizes), np.log(seconds))))


def read_links(rows: Iterable[Mapping[str, Any]], otherwise: Links) -> Links:
    """Return the links of rows as ``calibration.links`` measures them between two GPUs; the rest as ``otherwise``.

    Those of recorded messages: without what Python takes to send them. Planes of a halo travel through peer memory up
    to the size at which the rows of that way end, and by NCCL above.
    """
    found: dict[str, dict[int, float]] = {}
    for row in sorted(rows, key=lambda row: row["way"].startswith("peer")):
        is_copy = row["kind"] == "copy" and row["way"] == "peer"
        if row["devices"] == 2 and (is_copy or row["way"].endswith("recorded")):
            found.setdefault(row["kind"], {})[int(row["size"])] = float(row["seconds"])
    return replace(otherwise, measured=True, points={kind: _rise(values) for kind, values in found.items()})


def _rise(values: Mapping[int, float]) -> Points:
    """Return points of which no larger message is faster than a smaller one."""
    found: list[tuple[int, float]] = []
    for size, seconds in sorted(values.items()):
        found.append((size, max(seconds, found[-1][1] if found else 0.0)))
    return tuple(found)
