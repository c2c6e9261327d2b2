"""What facts mean: pure functions from `Facts` to findings, in the order in which they are told."""

from collections.abc import Callable, Sequence

from volseg.diagnosis.checks import gpu, machine, software
from volseg.diagnosis.facts import Facts
from volseg.diagnosis.findings import MachineFinding, error

__all__ = ["CHECKS", "check"]

CHECKS: Sequence[Callable[[Facts], list[MachineFinding]]] = (
    *(software.check_failures, software.check_python, software.check_text),
    *(gpu.check_torch, gpu.check_gpus_seen, gpu.check_driver, gpu.check_architectures, gpu.check_precision),
    *(gpu.check_cudnn, gpu.check_compute_modes),
    *(machine.check_links, machine.check_all_reduce, machine.check_compiler),
    *(software.check_packages, software.check_imports),
    *(machine.check_memory, machine.check_shared_memory, machine.check_cores, machine.check_open_files),
    *(machine.check_folders, machine.check_clock, software.check_variables),
)
"""Each says nothing of what was not gathered."""


def check(facts: Facts) -> list[MachineFinding]:
    """Return what all checks find; one that fails itself is among the findings.

    >>> from volseg.diagnosis.facts import NotGathered
    >>> [finding.check for finding in check(Facts(failures=(NotGathered(name="torch", reason="a test"),)))]
    ['torch']
    """
    found: list[MachineFinding] = []
    for one in CHECKS:
        try:
            found += one(facts)
        except Exception as fault:  # a fact that nobody thought of shall not hide what the others have to say
            failed = f"this check failed itself: {type(fault).__name__}: {fault}"
            why, remedy = (
                "nothing is known of what it looks at",
                "volseg doctor --json > doctor.json, and send that file with a bug report",
            )
            found.append(error(one.__name__.removeprefix("check_"), failed, why, remedy))
    return found
