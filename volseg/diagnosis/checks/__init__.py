"""Derive findings from facts by pure functions, in the order of the report."""

from collections.abc import Callable, Sequence
from typing import Any

from volseg.diagnosis.checks import gpu, machine, software
from volseg.diagnosis.facts import Facts
from volseg.diagnosis.findings import MachineFinding, error

__all__ = ["CHECKS", "check"]

CHECKS: Sequence[tuple[str | None, Callable[[Any], list[MachineFinding]]]] = (
    *((None, software.check_failures), ("python", software.check_python), ("python", software.check_text)),
    *(("torch", gpu.check_torch), (None, gpu.check_gpus_seen), (None, gpu.check_driver)),
    *(("torch", gpu.check_architectures), ("torch", gpu.check_precision), ("torch", gpu.check_cudnn)),
    *(("driver", gpu.check_compute_modes), ("links", machine.check_links), ("all_reduce", machine.check_all_reduce)),
    *((None, machine.check_compiler), ("packages", software.check_packages), ("imports", software.check_imports)),
    *(("system", machine.check_memory), (None, machine.check_shared_memory), (None, machine.check_cores)),
    *(("system", machine.check_open_files), ("folders", machine.check_folders), (None, machine.check_clock)),
    (None, software.check_variables),
)
"""Checks with the one section that each needs; None for checks that need several and test for missing sections."""


def check(facts: Facts) -> list[MachineFinding]:
    """Return the findings of all checks; a check that raises becomes a finding.

    >>> from volseg.diagnosis.facts import NotGathered
    >>> [finding.check for finding in check(Facts(failures=(NotGathered(name="torch", reason="a test"),)))]
    ['torch']
    """
    found: list[MachineFinding] = []
    for section, one in CHECKS:
        needed = facts if section is None else getattr(facts, section)
        try:
            found += [] if needed is None else one(needed)
        except Exception as fault:  # an unexpected fact must not hide the other findings
            failed = f"this check failed itself: {type(fault).__name__}: {fault}"
            why, remedy = (
                "nothing is known of what it looks at",
                "volseg doctor --json > doctor.json, and send that file with a bug report",
            )
            found.append(error(one.__name__.removeprefix("check_"), failed, why, remedy))
    return found
