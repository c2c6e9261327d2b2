"""The NVIDIA driver against the GPUs on the bus and the build of torch.

.. [1] 580 is the last branch with Maxwell, Pascal and Volta (NVIDIA's Unix deprecation schedule); the open kernel
       module drives Turing and later only.
.. [2] Builds for CUDA 12 need branch 525 or later, for CUDA 13 branch 580 (NVIDIA, CUDA compatibility, table 1).
"""

from volseg.diagnosis.facts import DriverFacts, Facts
from volseg.diagnosis.findings import MachineFinding, ok

__all__ = ["check_compute_modes", "check_driver", "check_gpus_seen"]

LAST_WITH_VOLTA = 580
VOLTA_DEVICES = range(0x1D80, 0x1E00)
"""NVIDIA's numbers of GV100: V100 and Titan V."""

LEAST_BRANCH = {"12": 525, "13": 580}
"""By CUDA's first number."""

DRIVER_FOR_VOLTA = (
    "sudo apt-get install nvidia-driver-580-server   (proprietary; not nvidia-driver-580-server-open), then sudo reboot"
)


def check_driver(facts: Facts) -> list[MachineFinding]:
    """Say which driver there is, and whether it drives these GPUs and this build of torch."""
    driver = facts.driver
    if driver is None or driver.version is None:
        return []
    branch = int(driver.version.partition(".")[0])
    told = f"NVIDIA driver {driver.version}{_kind(driver)}"
    if _has_volta(facts) and (branch > LAST_WITH_VOLTA or driver.is_open):
        why = (
            "the open kernel module drives no Volta; it needs the proprietary one"
            if branch <= LAST_WITH_VOLTA
            else "580 is the last branch that drives Volta (V100), with its proprietary kernel module"
        )
        return [MachineFinding(check="driver", level="error", found=told, why=why, remedy=DRIVER_FOR_VOLTA)]
    cuda = facts.torch.cuda if facts.torch is not None else None
    least = LEAST_BRANCH.get((cuda or "").partition(".")[0])
    if least is not None and branch < least:
        return [
            MachineFinding(
                check="driver",
                level="error",
                found=f"{told}, and torch is built for CUDA {cuda}",
                why=f"CUDA {cuda} needs branch {least} or later",
                remedy="pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu126"
                if branch >= LEAST_BRANCH["12"]
                else f"sudo apt-get install nvidia-driver-{LAST_WITH_VOLTA}-server, then sudo reboot",
            )
        ]
    return [ok("driver", told)]


def _kind(driver: DriverFacts) -> str:
    return "" if driver.is_open is None else ", open kernel module" if driver.is_open else ", proprietary kernel module"


def _has_volta(facts: Facts) -> bool:
    on_bus = facts.driver is not None and any(gpu.device in VOLTA_DEVICES for gpu in facts.driver.on_bus)
    seen = facts.torch is not None and any(gpu.capability[0] == 7 and gpu.capability[1] < 5 for gpu in facts.torch.gpus)
    return on_bus or seen


def check_gpus_seen(facts: Facts) -> list[MachineFinding]:
    """Say why torch sees none of the GPUs that are there, or fewer."""
    build, driver = facts.torch, facts.driver
    if build is None or driver is None:
        return []
    there, seen = max(len(driver.on_bus), len(driver.compute_modes)), len(build.gpus)
    if seen:
        fewer = f" of {there}" if there > seen else ""
        return [ok("gpu.seen", f"torch sees {seen}{fewer} GPU{'s' if seen > 1 else ''}")]
    if not there and not driver.nodes:
        why = "trainings run on the CPU, tens of times slower"
        return [MachineFinding(check="gpu.seen", level="note", found="there is no NVIDIA GPU", why=why)]
    found = f"{max(there, len(driver.nodes))} NVIDIA GPU(s) in the machine, of which torch sees none"
    cause, remedy = _find_cause(facts)
    said = f" ({build.refused})" if build.refused else f" ({driver.refused})" if driver.refused else ""
    return [MachineFinding(check="gpu.seen", level="error", found=found + said, why=cause, remedy=remedy)]


def _find_cause(facts: Facts) -> tuple[str, str]:
    """Return why GPUs that are there cannot be used, the plainest cause first."""
    build, driver = facts.torch, facts.driver
    assert build is not None
    assert driver is not None
    variables = facts.python.variables if facts.python is not None else {}
    if "CUDA_VISIBLE_DEVICES" in variables:
        hidden = f"CUDA_VISIBLE_DEVICES is {variables['CUDA_VISIBLE_DEVICES']!r}, which hides them"
        return hidden, "unset CUDA_VISIBLE_DEVICES"
    if build.cuda is None:
        index = "cu126" if _has_volta(facts) else "cu128"
        return (
            "this torch is a build for CPUs",
            f"pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/{index}",
        )
    if driver.version is None:
        needed = DRIVER_FOR_VOLTA if _has_volta(facts) else "sudo apt-get install nvidia-driver-580-server-open"
        return "no NVIDIA driver is loaded", needed
    if not driver.nodes and facts.system is not None and facts.system.in_container:
        return "the container was started without them", "docker run --gpus all ... (needs nvidia-container-toolkit)"
    return "driver, GPU and build do not fit each other", "nvidia-smi; dmesg | grep -i -e nvrm -e xid"


def check_compute_modes(facts: Facts) -> list[MachineFinding]:
    """Say where GPUs take one process only, or none."""
    modes = facts.driver.compute_modes if facts.driver is not None else ()
    other = sorted({mode for mode in modes if mode not in ("Default", "[N/A]")})
    return [
        MachineFinding(
            check="gpu.compute_mode",
            level="warning",
            found=mode,
            why="a GPU that one process may use at a time refuses the second of a training, and tests beside it",
            remedy="sudo nvidia-smi -c DEFAULT",
        )
        for mode in other
    ]
