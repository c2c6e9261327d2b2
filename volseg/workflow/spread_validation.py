"""Spread one validation over several processes: each scores some cases, and all get all scores.

The numbers travel as JSON without loss, and are sorted in the order of the cases before they are averaged. The scores
thus equal those of a single process, bit for bit.
"""

import os
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from volseg.errors import DataError
from volseg.parallel.processes.progress import Rounds, run_together
from volseg.workflow.interrupts import StopRequested, stop_if_requested
from volseg.workflow.validation import Example, JudgedCase, Validated, Validation, read_evaluated


class SpreadValidation:
    """Validate with a process group: every process scores the cases that it holds.

    Each process writes its own predictions; ``summary.json`` is written by the group's first process. A request to stop
    one process stops all, between two cases; an error in one process is raised in all.

    Parameters
    ----------
    validation : Validation
        Validation of this process's own cases, possibly none.
    order : sequence of str
        Ids of the cases of all processes, in order: `PreparedCases.order`.
    group : ProcessGroup or None
        Gloo group of the processes that share the cases, in exclusive use. All of them call this object. None: only
        this process.

    Examples
    --------
    If the model is cut over processes too, the followers of each process follow as in a validation by one process::

        GroupValidation(model, SpreadValidation(validation, prepared.order, readers.group), predictor.autocast)
    """

    def __init__(self, validation: Validation, order: Sequence[str], group: dist.ProcessGroup | None) -> None:
        self.validation = validation
        self.order = list(order)
        self.group = group

    @property
    def examples(self) -> list[Example]:
        """Example cases of the last call, in the first process; none in the others."""
        return self.validation.examples

    def __call__(self) -> Validated:
        """Score this process's cases; return the result over the cases of all processes.

        Raises
        ------
        StopRequested
            In every process, if one was asked to stop.
        DataError
            If the processes together do not hold each case once.
        """
        told = run_together(self.group, self._judge, stops=StopRequested, poll=stop_if_requested)
        judged = [(name, case) for cases in told for name, case in cases]
        by_name = {name: JudgedCase(evaluated=read_evaluated(case), further=case["further"]) for name, case in judged}
        names = sorted(name for name, _ in judged)
        if names != sorted(self.order):
            raise DataError(
                f"the processes of a validation must hold each of its {len(self.order)} cases once, got {names}; "
                "give every process its own share of the cases, and all of them the same order"
            )
        return self.validation.conclude([by_name[name] for name in self.order], writes=self._is_first())

    def _is_first(self) -> bool:
        return self.group is None or dist.get_rank(self.group) == 0

    def _judge(self, rounds: Rounds) -> list[tuple[str, Any]]:
        judged = []
        for name, case in self.validation.judge(keeps_examples=self._is_first()):
            judged.append((name, _describe(case)))
            rounds.count()
            rounds.check()
        return judged


def _describe(case: JudgedCase) -> dict[str, Any]:
    """Return a case's numbers as plain values for JSON."""
    return {
        "metrics": {str(label): dict(metrics) for label, metrics in case.evaluated.metrics.items()},
        "prediction_file": _path(case.evaluated.prediction_file),
        "reference_file": _path(case.evaluated.reference_file),
        "further": dict(case.further),
    }


def _path(file: str | os.PathLike[str] | None) -> str | None:
    return None if file is None else os.fspath(file)
