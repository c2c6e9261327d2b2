"""Spread the cases of a prediction over GPUs: a worker per GPU, which asks for the next case when it has room for one.

::

    worker                this process
    {"asks": true}   ->
                     <-   {"case": "ct_7", "image": ["ct_7.nii.gz"]}, or null: there are no more
    {"case": ...}    ->   what became of one
    {"remarks": ...} ->   what was found in all that it had
    {"ends": ...}    ->   what would keep any case from being predicted, such as a full disk

A slow case delays no other one. Each worker loads the network and writes label maps by itself. The results name a
worker that fails with the cases that it had; the other workers predict the rest.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from volseg.commands import run_module
from volseg.data.cases import Case
from volseg.data.checks import Remark
from volseg.data.readers import list_files
from volseg.errors import ConfigError
from volseg.experiment.own_components import components_arguments
from volseg.experiment.predicted import CaseResult
from volseg.parallel.processes.workers import Worker, WorkerPool, open_channel

__all__ = ["FoundInCases", "predict_in_processes", "serve_cases"]

logger = logging.getLogger(__name__)

Answer = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class FoundInCases:
    """What was found in images, beside what was predicted of them."""

    remarks: tuple[Remark, ...]
    digests: tuple[tuple[str, str], ...]
    """Of cases, by which images are found that stand under several names."""


def predict_in_processes(
    cases: Sequence[Case],
    gpus: Sequence[str | None],
    order: Mapping[str, Any],
    command: Sequence[str] | None = None,
) -> Iterator[CaseResult | FoundInCases]:
    """Yield what became of each case, in the order in which they end, and what each worker found in its cases.

    Closing the generator, Ctrl-C and errors end the workers; what they are writing is whole or not there.

    Parameters
    ----------
    cases : sequence of Case
        With paths.
    gpus : sequence of str or None
        Values of CUDA_VISIBLE_DEVICES, a worker each; None where they share the CPU. See `choose_gpus`.
    order : mapping
        What the workers are to predict with; `serve_cases` gets it.
    command : sequence of str, optional
        What each of them runs, by default the verb that calls `serve_cases`.

    Raises
    ------
    ConfigError
        What would keep every case from being predicted, as soon as one worker has met it.
    """
    command = command or run_module("volseg", "predict-cases", *components_arguments())
    waiting = deque(cases)
    failures: list[str] = []
    with TemporaryDirectory(prefix="volseg_predict_") as folder, WorkerPool(len(gpus)) as pool:
        held: dict[Worker, dict[str, Case]] = {}
        for number, gpu in enumerate(gpus):
            name = f"process {number} ({'CPU' if gpu is None else f'GPU {gpu}'})"
            worker = pool.start(name, command, Path(folder) / f"{number}.log", gpu=gpu, talks=True)
            held[worker] = {}
            worker.send(order)
        while pool.running and (heard := pool.hear()) is not None:
            worker, answer = heard
            if answer is None:
                yield from _fail(worker, held.pop(worker), failures)
            elif answer.get("asks"):
                case = waiting.popleft() if waiting else None
                if case is not None:
                    held[worker][case["case"]] = case
                worker.send(case and {"case": case["case"], "image": [str(path) for path in list_files(case["image"])]})
            else:
                held[worker].pop(answer.get("case", ""), None)
                yield _decode(answer)
    why = "; ".join(failures) or "see what became of the other cases"
    for case in waiting:  # no worker is left that could ask for it
        yield CaseResult(
            case=case["case"],
            state="failed",
            error="ParallelError",
            message=f"every process that predicted has failed: {why}",
        )


def _fail(worker: Worker, held: Mapping[str, Case], failures: list[str]) -> Iterator[CaseResult]:
    """Yield the cases that a worker had when it ended; note its end where it had none."""
    message = worker.describe_end()
    for name in held:
        yield CaseResult(case=name, state="failed", error="ParallelError", message=message)
    if worker.process.returncode and not held:
        failures.append(message)
        logger.error("%s", message)


def _decode(answer: dict[str, Any]) -> CaseResult | FoundInCases:
    """Return what a worker says of a case, or of all its cases.

    Raises
    ------
    ConfigError
        If it says what would keep any case from being predicted.
    """
    if "ends" in answer:
        raise ConfigError(answer["ends"])
    if "remarks" in answer:
        remarks = tuple(Remark(**{**told, "file": Path(told["file"])}) for told in answer["remarks"])
        return FoundInCases(remarks=remarks, digests=tuple(map(tuple, answer["digests"])))
    file = answer.pop("file")
    return CaseResult(**answer, file=None if file is None else Path(file))


def serve_cases(predict_each: Callable[[Answer, Iterator[Case]], Iterator[CaseResult | FoundInCases]]) -> None:
    """Predict the cases that the process which started this one names, until there are no more.

    Parameters
    ----------
    predict_each : callable
        From the order and the cases, which are asked for one by one, to what became of each and what was found.
    """
    channel = open_channel()

    def ask() -> Iterator[Case]:
        while True:
            channel.send({"asks": True})
            if (case := channel.receive()) is None:
                return
            files = tuple(map(Path, case["image"]))
            yield {"case": case["case"], "image": files[0] if len(files) == 1 else files}

    order = channel.receive()
    try:
        for result in predict_each(order, ask()):
            told = asdict(result)
            if isinstance(result, FoundInCases):
                told["remarks"] = [{**one, "file": str(one["file"])} for one in told["remarks"]]
            elif result.file is not None:
                told["file"] = str(result.file)
            channel.send(told)
    except ConfigError as fault:
        channel.send({"ends": str(fault)})
        raise
