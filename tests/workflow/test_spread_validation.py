"""A validation spread over processes gives the numbers of one process, and ends on all at once."""

import os
import signal

import pytest
import torch
import torch.distributed as dist
from in_group import in_group
from torch import nn

from volseg.data.case_store.preparing import meet_readers, prepare_together
from volseg.data.case_store.preprocessed import prepare_all
from volseg.data.layouts import load_task
from volseg.data.synthetic import make_task
from volseg.errors import DataError
from volseg.evaluation.scoring import Scoring
from volseg.evaluation.summary import read_summary
from volseg.inference.predictor import Predictor
from volseg.transforms.preprocessing import build_preprocessing
from volseg.workflow.checks import StopRequested, catch_signals
from volseg.workflow.components import build_metric
from volseg.workflow.distributed import SpreadValidation
from volseg.workflow.validation import Validation

NUM_CASES = 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a small task."""
    return make_task(tmp_path_factory.mktemp("data") / "Task00_Synthetic", num_cases=NUM_CASES, num_test=0)


class Interrupting(nn.Module):
    """A network; what it does besides happens on the given process only, at its second volume."""

    def __init__(self, num_classes, rank=None, then=None):
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv3d(4, num_classes, 1))
        self.rank, self.then, self.calls = rank, then, 0

    def forward(self, image):
        self.calls += 1
        if self.then is not None and dist.get_rank() == self.rank and self.calls == 2:
            self.then()
        return self.layers(image)


def validation(folder, own, *, num_cases=NUM_CASES, output=None, rank=None, then=None):
    task = load_task(folder)
    cases = prepare_all(
        [task.training[index] for index in range(num_cases) if own(index)],
        build_preprocessing([{"name": "Orientation"}, {"name": "ZScore"}]),
        keep_reference=True,
    )
    model = Interrupting(task.num_classes, rank, then)
    metrics = [
        build_metric({"name": name}, inputs=["pred", "label"], output=name, num_classes=task.num_classes)
        for name in ("MeanIoU", "DiceMetric")
    ]
    predictor = Predictor(model=model, num_classes=task.num_classes)
    labels = {**task.labels, 9: "Absent"}  # no case has it: its numbers are NaN
    scoring = Scoring(tolerances=dict.fromkeys((1, 2), 1.0))  # whose distances are infinite where a label is missed
    made = Validation(predictor, cases, labels, metrics=metrics, scoring=scoring, folder=output, num_examples=1)
    return made, [case["case"] for case in task.training[:num_cases]]


def spread(folder, num_cases, output):
    """Validate in this process's share of the cases: every size-th, from the last process on."""
    rank, size = dist.get_rank(), dist.get_world_size()
    made, order = validation(
        folder, lambda index: (index + 1) % size == rank, num_cases=num_cases, output=output / "out"
    )
    own = SpreadValidation(made, order, dist.group.WORLD)
    first, second = own(), own()
    assert repr(first) == repr(second)
    return repr(first), [example.case for example in own.examples]


@pytest.mark.parametrize(("processes", "num_cases"), [(4, 3), (2, 5)])
def test_scores_are_those_of_one_process(folder, tmp_path, processes, num_cases):
    alone, order = validation(folder, lambda index: True, num_cases=num_cases, output=tmp_path / "out")
    expected = alone()
    assert repr(SpreadValidation(alone, order, None)()) == repr(expected)
    written = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    for path in (tmp_path / "out").iterdir():
        path.unlink()
    told = in_group(processes, spread, folder, num_cases, tmp_path)
    assert all(found == repr(expected) for found, _ in told)  # the repr of a float tells every bit
    # Whoever made a prediction wrote it, and one process the summary.
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == written
    read = read_summary(tmp_path / "out" / "summary.json")
    assert repr({key: read[key] for key in expected.summary}) == repr(expected.summary)
    own = [order[index] for index in range(num_cases) if (index + 1) % processes == 0]
    assert [examples for _, examples in told] == [own[:1], *[[]] * (processes - 1)]


def ended(folder, what):
    def fail():
        raise {"error": ValueError, "ours": DataError}[what]("the weights are gone")

    def interrupt():
        os.kill(os.getpid(), signal.SIGTERM)

    rank = dist.get_rank()
    then = {"signal": interrupt, "misdealt": None}.get(what, fail)
    own = (lambda index: index < 3) if what == "misdealt" else (lambda index: (index == 0) == (rank == 0))
    made, order = validation(folder, own, rank=1, then=then)
    with catch_signals() as caught:
        try:
            SpreadValidation(made, order, dist.group.WORLD)()
        except (StopRequested, Exception) as fault:
            return type(fault).__name__, str(fault), bool(caught)
    return "went on", None, None


GONE = "the weights are gone"


@pytest.mark.parametrize(
    ("what", "first", "second"),
    [
        ("signal", ("StopRequested", "", False), ("StopRequested", "", True)),  # process 0 has judged its case before
        ("error", ("ParallelError", f"process 1 failed, so this process stops too: ValueError: {GONE}", False), None),
        ("ours", ("DataError", GONE, False), ("DataError", GONE, False)),
        ("misdealt", ("DataError", "the processes of a validation must together have each of its 5", False), None),
    ],
)
def test_what_ends_one_process_ends_all(folder, what, first, second):
    found = in_group(2, ended, folder, what)
    second = second or (("ValueError", GONE, False) if what == "error" else first)
    for (kind, text, caught), (expected, begin, was_caught) in zip(found, (first, second), strict=True):
        assert (kind, caught) == (expected, was_caught)
        assert text.startswith(begin)


def real_validation(folder, output):
    """Read, preprocess and judge real cases as a training does, in however many processes there are."""
    group = dist.group.WORLD if dist.is_initialized() else None
    task = load_task(folder)
    prepared = prepare_together(
        task.training[:3],
        task.training[3:9],
        task,
        build_preprocessing([{"name": "Orientation"}, {"name": "ZScore"}]),
        readers=meet_readers(group),
    )
    predictor = Predictor(model=Interrupting(task.num_classes), num_classes=task.num_classes)
    own = Validation(predictor, prepared.validation, task.labels, folder=output)
    return repr(SpreadValidation(own, prepared.order, group)())


@pytest.mark.real_data
def test_real_cases_are_judged_as_by_one_process(msd_task04, tmp_path):
    expected = real_validation(msd_task04, tmp_path)
    written = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert len(written) == 7
    assert in_group(2, real_validation, msd_task04, tmp_path) == [expected] * 2
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == written
