"""The own rates of the machine one sits at: measured once, and kept in the user's cache folder."""

import json
import logging
import os
import re
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from volseg.errors import ConfigError
from volseg.files import replacing
from volseg.forecast.calibration.kernels import describe_machine, measure_cases, measure_host
from volseg.forecast.calibration.links import measure_copies
from volseg.forecast.calibration.listing import list_cases
from volseg.forecast.gpu_kinds import KINDS, GpuKind, parse_table
from volseg.forecast.rates import Peaks

__all__ = ["calibrate", "find_file", "read_calibration"]

logger = logging.getLogger(__name__)

VERSION = 1
"""Of the file's form."""

TERA = 1e12

SECONDS = 90.0
"""In which kernels are measured."""


def calibrate(device: torch.device, folder: str | Path | None = None, seconds: float = SECONDS) -> GpuKind:
    """Return this GPU with its own rates, which are measured unless they have been, with this version of torch.

    Parameters
    ----------
    device
        A GPU that nobody else uses meanwhile.
    folder
        Where rates are kept: by default ``volseg/rates`` in ``$XDG_CACHE_HOME``, else in ``~/.cache``.
    seconds
        In which kernels are measured; those that come behind are forecast from the others.

    Raises
    ------
    ConfigError
        If the device is no GPU.
    """
    if device.type != "cuda":
        raise ConfigError(f"only a GPU can be measured, got {device}; name a kind of GPU or a machine instead")
    machine = describe_machine(device)
    file = find_file(machine["gpu"], machine["torch"], folder)
    stored = read_calibration(file, machine)
    if stored is None:
        stored = _measure(device, machine, seconds)
        with replacing(file) as partial:
            partial.write_text(json.dumps(stored), encoding="utf-8")
    return describe_kind(stored)


def find_file(gpu: str, version: str, folder: str | Path | None = None) -> Path:
    """Return where the rates of a GPU and a version of torch are kept."""
    if folder is None:
        home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        folder = os.path.join(home, "volseg", "rates")
    name = re.sub(r"[^A-Za-z0-9.]+", "-", f"{gpu}-torch-{version}")
    return Path(folder, f"{name}.json")


def read_calibration(file: Path, machine: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return what is kept of a machine; None, with a word why, where it has to be measured anew."""
    try:
        stored = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as fault:
        logger.warning("%s cannot be read (%s): the GPU is measured anew", file, fault)
        return None
    if not isinstance(stored, dict) or stored.get("version") != VERSION:
        found = stored.get("version") if isinstance(stored, dict) else type(stored).__name__
        logger.warning("%s is of form %s, and this is form %s: the GPU is measured anew", file, found, VERSION)
        return None
    told = stored.get("machine", {})
    if differs := [key for key in ("gpu", "torch", "cudnn") if told.get(key) != machine[key]]:
        words = ", ".join(f"{key} {told.get(key)} instead of {machine[key]}" for key in differs)
        logger.warning("%s is of another machine (%s): the GPU is measured anew", file, words)
        return None
    return dict(stored)


def _measure(device: torch.device, machine: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    logger.warning("measuring %s, once, for about %.0f seconds", machine["gpu"], seconds + 15)
    host = measure_host(device)
    rows, left_out = measure_cases(list_cases(), device, time.monotonic() + seconds)
    return {
        "version": VERSION,
        "machine": dict(machine),
        "host": host,
        "rows": rows,
        "left_out": left_out,
        "links": measure_copies(),
    }


def describe_kind(stored: Mapping[str, Any]) -> GpuKind:
    """Return the kind of GPU that was measured."""
    machine = stored["machine"]
    known = next((kind for kind in KINDS.values() if kind.name == machine["gpu"]), None)
    # The bounds only order the measured kernels: any of the right size serves.
    base = known or replace(KINDS["h200"], name=machine["gpu"], capability=tuple(machine["capability"]))
    peaks = base.peaks if known else find_peaks(stored["rows"])
    table = parse_table(stored, peaks)
    return replace(
        base,
        memory=machine["total_memory"],
        processors=machine["processors"],
        peaks=peaks,
        source=f"measured here on {machine['date']} with torch {machine['torch']}",
        measured=False,
        rates=table.rates,
        host=table.host,
    )


def find_peaks(rows: list[Mapping[str, Any]]) -> Peaks:
    """Return the fastest that was seen, as peaks of a GPU whose vendor's figures are not known."""
    half = [row for row in rows if row["dtype"] in ("bfloat16", "float16")]
    full = [row for row in rows if row["dtype"] == "float32"]
    return Peaks(
        bandwidth=max(row["bytes_moved"] / row["seconds"] for row in rows),
        half=max([TERA, *(row["flops"] / row["seconds"] for row in half)]),
        full=max([TERA, *(row["flops"] / row["seconds"] for row in full)]),
    )
