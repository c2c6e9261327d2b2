"""The NVIDIA driver and the GPUs on the bus, asked of the system: torch sees none that the driver does not drive."""

import re
import shutil
import subprocess
from pathlib import Path

from volseg.diagnosis.facts import DriverFacts, PciGpu

__all__ = ["gather", "list_bus", "read_module"]

BUS = Path("/sys/bus/pci/devices")
MODULE = Path("/proc/driver/nvidia/version")
NVIDIA = "0x10de"
DISPLAY = "0x03"
"""Class of devices that are GPUs, in its first two digits."""


def gather() -> DriverFacts:
    """Return what the kernel, ``/dev`` and ``nvidia-smi`` say."""
    version, is_open = read_module(MODULE)
    modes: tuple[str, ...] = ()
    refused = None
    program = shutil.which("nvidia-smi")
    if program is not None:
        query = [program, "--query-gpu=driver_version,compute_mode", "--format=csv,noheader"]
        told = subprocess.run(query, capture_output=True, encoding="utf-8", errors="replace", check=False)  # noqa: S603
        if told.returncode:
            refused = (told.stdout + told.stderr).strip().partition("\n")[0] or f"exit status {told.returncode}"
        else:
            rows = [line.split(", ") for line in told.stdout.splitlines() if line.strip()]
            version = version or next((row[0] for row in rows), None)
            modes = tuple(row[-1] for row in rows)
    nodes = sorted(path.name for path in Path("/dev").glob("nvidia[0-9]*"))
    return DriverFacts(
        version=version, is_open=is_open, on_bus=list_bus(BUS), nodes=tuple(nodes), compute_modes=modes, refused=refused
    )


def read_module(path: Path) -> tuple[str | None, bool | None]:
    """Return the version of the kernel module, and whether it is the open one; None where none is loaded."""
    if not path.is_file():
        return None, None
    text = path.read_text(encoding="utf-8", errors="replace")
    found = re.search(r"^NVRM version:.*?\s(\d+\.[\d.]+)", text, re.MULTILINE)
    return (found[1] if found else None), "Open Kernel Module" in text


def list_bus(bus: Path) -> tuple[PciGpu, ...]:
    """Return NVIDIA's GPUs among the devices that the kernel found on the bus."""
    found = []
    for device in sorted(bus.iterdir()) if bus.is_dir() else ():
        vendor, kind, number = (
            (device / name).read_text(encoding="ascii").strip() if (device / name).is_file() else ""
            for name in ("vendor", "class", "device")
        )
        if vendor == NVIDIA and kind.startswith(DISPLAY):
            found.append(PciGpu(address=device.name, device=int(number, 16)))
    return tuple(found)
