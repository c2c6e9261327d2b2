"""What telling of a training costs: milliseconds of a step with everything that watches it, and with nothing, by turns.

python workflows/benchmarks/logging_cost.py configs/task04_unet.yaml DIR/Task04_Hippocampus \
        --result workflows/benchmarks/results/unet_h200_logging.json
python workflows/benchmarks/logging_cost.py configs/task04_unet.yaml --set parallel.strategy=pipeline \
        --set parallel.devices=2 --result workflows/benchmarks/results/unet_h200x2_pipeline_logging.json

Without a task's folder the cases are synthetic. A turn is an epoch; one without and one with follow each other in one
process, and a ratio is that of two neighbours. Watched are: a bar on a terminal, status and times every five seconds,
TensorBoard with all its numbers and texts, history.jsonl, memory, and of a pipeline its timeline (in the first turn,
which is not counted). What is written at the end of an epoch is part of its time. Pictures are drawn after a
validation, and measured apart. Besides, the main thread's own time in each event of the watching hooks is told, which
hardly depends on what else the machine does: over an epoch's seconds it is the share that telling takes where the host
sets the pace, and more than it takes where GPUs do.
"""

import argparse
import json
import os
import shlex
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from volseg import experiment
from volseg.checkpointing.state import EpochRecord
from volseg.data.layouts import load_task
from volseg.data.preprocessed import prepare_all
from volseg.data.synthetic import make_task
from volseg.experiment.building import build_batches, build_training, preprocessing_of
from volseg.experiment.placed_network import build_model, choose_device
from volseg.monitoring.environment import environment
from volseg.monitoring.loggers import History, LoggedRun
from volseg.monitoring.memory import FirstSteps, GpuMeter
from volseg.monitoring.pictures import draw_slices
from volseg.monitoring.progress import Progress
from volseg.monitoring.signs_of_life import SignsOfLife
from volseg.monitoring.stage_times import StageTimes
from volseg.monitoring.tensorboard import TensorBoard
from volseg.monitoring.training_log import TrainingLog
from volseg.workflow import Hook, Training

NUM_CASES = 16
WARM_UP = 2
"""Turns that are not counted: kernels are chosen and steps recorded in them."""


class Turns(Hook):
    """Let the watching hooks hear of every other epoch, and time each; the only hook that always listens."""

    def __init__(self, folder: Path, texts: Mapping[str, str]) -> None:
        self.folder, self.texts = folder, texts
        self.ms: dict[bool, list[float]] = {False: [], True: []}
        self.host_ms: list[dict[str, float]] = []
        """Of each watched turn, by event: milliseconds of the main thread in the watching hooks."""
        self.others_ms: dict[bool, list[float]] = {False: [], True: []}
        """Of each turn: milliseconds of all other threads, those that write and draw among them."""
        self._in_events: dict[str, float] = defaultdict(float)
        self._held: ExitStack | None = None

    def on_epoch_begin(self, training: Training) -> None:
        """Begin a turn."""
        watches = training.epoch % 2 == 1 or training.epoch == 0
        glimpse = training._glimpse
        vars(glimpse).pop("exchange", None)
        if watches:
            self._held = ExitStack()
            self._watch(training, self._held)
        else:
            vars(glimpse)["exchange"] = _take_nothing
        _synchronize()
        self._begin, self._others_begin = time.perf_counter(), _time_others()

    def _watch(self, training: Training, held: ExitStack) -> None:
        signs = SignsOfLife()
        held.enter_context(signs.writing(self.folder))
        memory = FirstSteps(GpuMeter())
        run = LoggedRun(name="cost", folder=self.folder)
        log = TrainingLog([TensorBoard(), History()], run, texts=self.texts, more=memory.scalars)
        hooks = [Progress(), memory, StageTimes(log), log, signs]
        for hook in hooks:
            self._time_events(hook)
            # A training gives memory back once, before its first step; in every turn the steps would take it anew.
            if hook is not memory or training.epoch == 0:
                hook.on_training_begin(training)
            hook.on_epoch_begin(training)
            held.callback(hook.on_training_end, training)
        self._in_events.clear()  # of what a training does once
        training.hooks = [*hooks, self]

    def on_epoch_end(self, training: Training, record: EpochRecord) -> None:
        """End the turn; the hooks before have told of it."""
        _synchronize()
        ms = 1000 * (time.perf_counter() - self._begin) / training.num_batches
        watched = self._held is not None
        if record.epoch >= WARM_UP:
            self.ms[watched].append(ms)
            self.others_ms[watched].append(1000 * (_time_others() - self._others_begin))
            if watched:
                self.host_ms.append({event: 1000 * seconds for event, seconds in self._in_events.items()})
            print(f"{'watched' if watched else 'alone  '} {ms:8.3f} ms per step", flush=True)
        if self._held is not None:
            self._held.close()
            self._held = None
        training.hooks = [self]

    def _time_events(self, hook: Hook) -> None:
        """Have each event of one hook add its time to the turn's."""

        def time_event(event: str, handle: Callable[..., None]) -> Callable[..., None]:
            def timed(*args: Any) -> None:
                begin = time.thread_time()
                handle(*args)
                self._in_events[event] += time.thread_time() - begin

            return timed

        for event in [name for name in vars(Hook) if name.startswith("on_")]:
            vars(hook)[event] = time_event(event, getattr(hook, event))


def main() -> None:
    """Measure the turns and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("root", type=Path, nargs="?", help="the task's folder")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--iterations", type=int, default=250, help="steps of a turn: an epoch")
    parser.add_argument("--result", type=Path, required=True)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        root = chosen.root or make_task(Path(scratch) / "Task00_Synthetic", num_cases=NUM_CASES, num_test=0)
        own = [f"training.epochs={WARM_UP + 2 * chosen.rounds}", f"training.iterations={chosen.iterations}"]
        config = experiment.load_config(chosen.config, [*own, *chosen.overrides, f"data.root={root}"])
        device, task = choose_device(config), load_task(root)
        cases = prepare_all(task.training[:NUM_CASES], preprocessing_of(config))
        turns = Turns(Path(scratch), {"network": "a text " * 2000})
        training = build_training(
            config,
            build_model(config, task, device),
            build_batches(config, task, cases, device),
            validation=None,
            hooks=[turns],
            task=task,
        )
        with _terminal():
            training.run()
    ratios = [watched / alone for alone, watched in zip(turns.ms[False], turns.ms[True], strict=True)]
    result = {
        "command": shlex.join(["python", *sys.argv]),
        "environment": environment(),
        "config": config.model_dump(mode="json"),
        "ms_alone": turns.ms[False],
        "ms_watched": turns.ms[True],
        "ratios": ratios,
        "median_ratio": statistics.median(ratios),
        "host_ms_of_an_epoch": _median_events(turns.host_ms),
        "other_threads_ms_of_an_epoch": {
            "alone": statistics.median(turns.others_ms[False]),
            "watched": statistics.median(turns.others_ms[True]),
        },
        "seconds_of_a_picture": _time_picture(),
    }
    chosen.result.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"a watched step takes {100 * (result['median_ratio'] - 1):+.2f} % (median of {len(ratios)} pairs)")
    by_event = result["host_ms_of_an_epoch"]
    print(f"the main thread takes {by_event['all']:.2f} ms of an epoch for it: {by_event}")
    print(f"other threads take, ms of an epoch: {result['other_threads_ms_of_an_epoch']}")
    print(f"a picture takes {result['seconds_of_a_picture']:.2f} s, after a validation")


def _median_events(turns: list[dict[str, float]]) -> dict[str, float]:
    """Median over the turns of what each event took, and of the sum."""
    events = sorted({event for turn in turns for event in turn})
    medians = {event: statistics.median(turn.get(event, 0.0) for turn in turns) for event in events}
    return {**medians, "all": statistics.median(sum(turn.values()) for turn in turns)}


def _time_others() -> float:
    return time.process_time() - time.thread_time()


def _take_nothing(losses: Mapping[str, Any]) -> None:
    """Stand in for what brings losses from the device for display."""
    del losses


def _time_picture() -> float:
    image, label = torch.rand(1, 128, 128, 96), torch.zeros(128, 128, 96, dtype=torch.long)
    label[40:90, 40:90, 30:60] = 1
    begin = time.perf_counter()
    draw_slices(image, label, label.roll(3, 0), spacing=(1.0, 1.0, 1.5))
    return time.perf_counter() - begin


def _terminal() -> ExitStack:
    """Have the bar drawn on a terminal that nobody sees, until the block ends."""
    reading, writing = os.openpty()
    held, before = ExitStack(), sys.stderr

    def drain() -> None:
        try:
            while os.read(reading, 65536):
                pass
        except OSError:  # its other end is closed
            os.close(reading)

    threading.Thread(target=drain, daemon=True).start()
    os.environ["TERM"] = "xterm"
    sys.stderr = held.enter_context(os.fdopen(writing, "w"))
    held.callback(setattr, sys, "stderr", before)
    return held


def _synchronize() -> Any:
    for gpu in range(torch.cuda.device_count()):
        torch.cuda.synchronize(gpu)


if __name__ == "__main__":
    main()
