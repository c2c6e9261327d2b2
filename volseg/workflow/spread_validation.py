"""Spread one validation over several processes: each scores some cases, and all get the scores of all.

The numbers travel as JSON with every bit, and are put in the order of the cases before anything is averaged, so that
the scores are those of one process, bit for bit, however many share the work.
"""

import os
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from volseg.errors import DataError
from volseg.parallel.processes.progress_sync import Rounds, run_together
from volseg.workflow.interrupts import StopRequested, stop_if_requested
from volseg.workflow.validation import Example, JudgedCase, Validated, Validation, read_evaluated

__all__ = ["SpreadValidation"]


class SpreadValidation:
    """A validation to which every process of a group contributes the cases that it holds.

    Each process writes its own predictions; ``summary.json`` is written by the group's first process. A process that is
    asked to stop stops all, between two cases of each; an error of one is raised in all.

    Parameters
    ----------
    validation : Validation
        Of this process's own cases, which may be none.
    order : sequence of str
        The ids of the cases of all processes, in their order: `PreparedCases.order`.
    group : ProcessGroup or None
        Of the processes that share the cases, on gloo, and used by nothing else meanwhile. All of them call this. None:
        only this process.

    Examples
    --------
    Where a model is cut over processes too, the followers of each process follow as they do in a validation by one::

        GroupValidation(model, SpreadValidation(validation, prepared.order, readers.group), predictor.autocast)
    """

    def __init__(self, validation: Validation, order: Sequence[str], group: dist.ProcessGroup | None) -> None:
        self.validation = validation
        self.order = list(order)
        self.group = group

    @property
    def examples(self) -> list[Example]:
        """The first process's own cases to look at, of the last call; none in the others."""
        return self.validation.examples

    def __call__(self) -> Validated:
        """Judge this process's cases; return what those of all processes come to.

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
    """Return a case's numbers as JSON can say them."""
    return {
        "metrics": {str(label): dict(metrics) for label, metrics in case.evaluated.metrics.items()},
        "prediction_file": _path(case.evaluated.prediction_file),
        "reference_file": _path(case.evaluated.reference_file),
        "further": dict(case.further),
    }


def _path(file: str | os.PathLike[str] | None) -> str | None:
    return None if file is None else os.fspath(file)
