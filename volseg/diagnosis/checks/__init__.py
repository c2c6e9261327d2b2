"""What facts mean: pure functions from `Facts` to findings, in the order in which they are told."""

from collections.abc import Callable, Sequence

from volseg.diagnosis.checks.build import check_architectures, check_cudnn, check_precision, check_torch
from volseg.diagnosis.checks.driver import check_compute_modes, check_driver, check_gpus_seen
from volseg.diagnosis.checks.failures import check_failures
from volseg.diagnosis.checks.machine import (
    check_clock,
    check_cores,
    check_folders,
    check_memory,
    check_open_files,
    check_shared_memory,
)
from volseg.diagnosis.checks.software import check_imports, check_packages, check_python, check_text, check_variables
from volseg.diagnosis.checks.trials import check_all_reduce, check_compiler, check_links
from volseg.diagnosis.facts import Facts
from volseg.diagnosis.findings import MachineFinding

__all__ = ["CHECKS", "check"]

CHECKS: Sequence[Callable[[Facts], list[MachineFinding]]] = (
    check_failures,
    check_python,
    check_text,
    check_torch,
    check_gpus_seen,
    check_driver,
    check_architectures,
    check_precision,
    check_cudnn,
    check_compute_modes,
    check_links,
    check_all_reduce,
    check_compiler,
    check_packages,
    check_imports,
    check_memory,
    check_shared_memory,
    check_cores,
    check_open_files,
    check_folders,
    check_clock,
    check_variables,
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
            name = one.__name__.removeprefix("check_")
            found.append(
                MachineFinding(
                    check=name,
                    level="error",
                    found=f"this check failed itself: {type(fault).__name__}: {fault}",
                    why="nothing is known of what it looks at",
                    remedy="volseg doctor --json > doctor.json, and send that file with a bug report",
                )
            )
    return found
