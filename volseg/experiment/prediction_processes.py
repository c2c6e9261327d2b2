"""Spread the cases of a prediction over GPUs: a process per GPU, which asks for the next case when it has room for one.

::

    process               this one
    {"asks": true}   ->
                     <-   {"case": "ct_7", "image": ["ct_7.nii.gz"]}, or null: there are no more
    {"case": ...}    ->   what became of one
    {"remarks": ...} ->   what was found in all that it had
    {"ends": ...}    ->   what would keep any case from being predicted, such as a full disk

So a slow case holds nobody up. Each process loads the network itself and writes label maps itself; one that fails is
named with the cases that it had, and the others go on with the rest.
"""

import json
import logging
import os
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory
from threading import Lock, Thread
from typing import Any

from volseg.commands import run_module
from volseg.data.cases import Case
from volseg.data.checks import Remark
from volseg.data.readers import list_files
from volseg.errors import ConfigError
from volseg.experiment.own_components import components_arguments
from volseg.experiment.predicted import CaseResult
from volseg.launched import OWN_LAUNCHER

__all__ = ["FoundInCases", "predict_in_processes", "serve_cases"]

logger = logging.getLogger(__name__)

NUM_LAST_LINES = 15

Answer = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class FoundInCases:
    """What was found in images, beside what was predicted of them."""

    remarks: tuple[Remark, ...]
    digests: tuple[tuple[str, str], ...]
    """Of cases, by which images are found that stand under several names."""


Ended = CaseResult | FoundInCases | ConfigError | None
"""What a process tells; None after its last."""


def predict_in_processes(
    cases: Sequence[Case], gpus: Sequence[str | None], order: Mapping[str, Any]
) -> Iterator[CaseResult | FoundInCases]:
    """Yield what became of each case, in the order in which they end, and what each process found in its cases.

    Closing the generator, Ctrl-C and errors end the processes; what they are writing is whole or not there.

    Parameters
    ----------
    cases : sequence of Case
        With paths.
    gpus : sequence of str or None
        Values of CUDA_VISIBLE_DEVICES, a process each; None where they share the CPU. See `choose_gpus`.
    order : mapping
        What the processes are to predict with; `serve_cases` gets it.

    Raises
    ------
    ConfigError
        What would keep every case from being predicted, as soon as one process has met it.
    """
    command = run_module("volseg", "predict-cases", *components_arguments())
    waiting, lock = deque(cases), Lock()
    ended: SimpleQueue[Ended] = SimpleQueue()
    with TemporaryDirectory(prefix="volseg_predict_") as folder:
        workers = [
            _Worker(number, gpu, _start(command, gpu, len(gpus), Path(folder) / f"{number}.log"), Path(folder))
            for number, gpu in enumerate(gpus)
        ]
        threads = [
            Thread(target=worker.serve, args=(order, waiting, lock, ended), name="predicting", daemon=True)
            for worker in workers
        ]
        try:
            for thread in threads:
                thread.start()
            missing = len(threads)  # each of which ends with None
            while missing:
                result = ended.get()
                if isinstance(result, ConfigError):
                    raise result
                if result is None:
                    missing -= 1
                else:
                    yield result
            for case in waiting:  # nobody is left who could ask for it
                # Without that of one that had cases: it is said of these.
                why = "; ".join(worker.end for worker in workers if worker.end) or "see what became of the other cases"
                words = f"every process that predicted has failed: {why}"
                yield CaseResult(case=case["case"], state="failed", error="ParallelError", message=words)
        finally:
            for worker in workers:
                worker.is_stopped = True
                worker.process.terminate()
            for worker in workers:
                worker.process.wait()
            for thread in threads:
                thread.join()


@dataclass(eq=False)
class _Worker:
    """A process that predicts, and the cases that it has."""

    number: int
    gpu: str | None
    process: "subprocess.Popen[str]"
    folder: Path
    held: dict[str, Case] = field(default_factory=dict)
    is_over: bool = False
    is_stopped: bool = False
    """Whether it ends because this process ends it."""
    end: str = ""
    """How it failed, if that was in the middle of no case."""

    def serve(self, order: Mapping[str, Any], waiting: deque[Case], lock: Lock, ended: "SimpleQueue[Ended]") -> None:
        """Give cases to the process as it asks for them, and pass on what became of them, until it ends."""
        try:
            self._talk(order, waiting, lock, ended)
        except (BrokenPipeError, json.JSONDecodeError):
            pass  # it has ended in the middle of a line: the status says how
        finally:
            for pipe in (self.process.stdin, self.process.stdout):
                with suppress(OSError):  # what was on its way to a process that has ended
                    pipe.close()  # type: ignore[union-attr]
            status = self.process.wait()
            message = f"process {self.number} ({self._name_device()}) ended with status {status}{self._last_words()}"
            if status and not self.held and not self.is_stopped:
                self.end = message
                logger.error("%s", message)
            for name in self.held:
                ended.put(CaseResult(case=name, state="failed", error="ParallelError", message=message))
            self.is_over = True
            ended.put(None)

    def _talk(self, order: Mapping[str, Any], waiting: deque[Case], lock: Lock, ended: "SimpleQueue[Ended]") -> None:
        told, answers = self.process.stdin, self.process.stdout
        assert told is not None
        assert answers is not None
        _say(told, order)
        for line in answers:
            answer = json.loads(line)
            if "ends" in answer:
                ended.put(ConfigError(answer["ends"]))
                continue
            if "remarks" in answer:
                remarks = tuple(Remark(**{**told, "file": Path(told["file"])}) for told in answer["remarks"])
                ended.put(FoundInCases(remarks=remarks, digests=tuple(map(tuple, answer["digests"]))))
                continue
            if not answer.get("asks"):
                self.held.pop(answer["case"])
                file = answer.pop("file")
                ended.put(CaseResult(**answer, file=None if file is None else Path(file)))
                continue
            with lock:
                case = waiting.popleft() if waiting else None
            if case is not None:
                self.held[case["case"]] = case
            _say(told, None if case is None else {"case": case["case"], "image": _encode(case["image"])})

    def _name_device(self) -> str:
        return "CPU" if self.gpu is None else f"GPU {self.gpu}"

    def _last_words(self) -> str:
        text = (self.folder / f"{self.number}.log").read_text(encoding="utf-8", errors="replace")
        lines = [line for line in text.splitlines() if line.strip()][-NUM_LAST_LINES:]
        return "; its last lines:\n" + "\n".join(f"  | {line}" for line in lines) if lines else ""


def _start(command: Sequence[str], gpu: str | None, num_processes: int, log: Path) -> "subprocess.Popen[str]":
    # By its number the process ends with this one, even if that is killed: see volseg.lifetime.
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", OWN_LAUNCHER: str(os.getpid())}
    environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_processes)))
    if gpu is not None:
        environment["CUDA_VISIBLE_DEVICES"] = gpu
    with log.open("wb") as words:
        return subprocess.Popen(  # noqa: S603 (our own interpreter and arguments; no shell)
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=words,
            env=environment,
            encoding="utf-8",
            start_new_session=True,  # or the terminal's Ctrl-C reaches it beside the end that this process makes
        )


def _say(file: Any, message: Any) -> None:
    file.write(json.dumps(message) + "\n")
    file.flush()


def _encode(image: Any) -> list[str]:
    return [str(path) for path in list_files(image)]


def serve_cases(predict_each: Callable[[Answer, Iterator[Case]], Iterator[CaseResult | FoundInCases]]) -> None:
    """Predict the cases that the process which started this one names, until there are no more.

    Parameters
    ----------
    predict_each : callable
        From the order and the cases, which are asked for one by one, to what became of each and what was found.
    """
    # What a library prints must not get between the answers.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def ask() -> Iterator[Case]:
        while True:
            _say(answers, {"asks": True})
            line = sys.stdin.readline()
            if (case := json.loads(line or "null")) is None:
                return
            files = tuple(map(Path, case["image"]))
            yield {"case": case["case"], "image": files[0] if len(files) == 1 else files}

    order = json.loads(sys.stdin.readline())
    try:
        for result in predict_each(order, ask()):
            told = asdict(result)
            if isinstance(result, FoundInCases):
                told["remarks"] = [{**one, "file": str(one["file"])} for one in told["remarks"]]
            elif result.file is not None:
                told["file"] = str(result.file)
            _say(answers, told)
    except ConfigError as fault:
        _say(answers, {"ends": str(fault)})
        raise
