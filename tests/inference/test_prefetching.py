"""Cases that are read, predicted and written in parallel give the results of the plain loop."""

import gc
import threading
import weakref
from functools import partial

import pytest
import torch
from monai.data import MetaTensor
from torch import nn

from volseg.errors import NonFinitePredictionError, ReaderError
from volseg.inference.original_grid import Prediction
from volseg.inference.predictor import Predictor
from volseg.inference.prefetching import overlapped
from volseg.inference.writing import write_prediction

PATIENCE = 60
"""Seconds after which a thread that nobody lets go on says so; no test waits for them."""


def paths(count: int) -> list[dict]:
    return [{"case": f"case_{number}", "number": number} for number in range(count)]


def prepare(case: dict) -> dict:
    image = torch.randn(1, 6, 5, 7, generator=torch.Generator().manual_seed(case["number"]))
    return {**case, "image": MetaTensor(image, affine=torch.eye(4, dtype=torch.float64))}


def predictor(**settings) -> Predictor:
    torch.manual_seed(1)
    network = nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv3d(4, 3, 1))
    return Predictor(model=network, num_classes=3, **settings)


def write_into(folder, case: dict, prediction: Prediction):
    return write_prediction(prediction.labels, case["image"], folder / f"{case['case']}.nii.gz")


class StopError(Exception):
    """A request to stop, as a signal makes one."""


@pytest.fixture
def write(tmp_path):
    return partial(write_into, tmp_path)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("finishes", [False, True])
def test_files_are_those_of_the_plain_loop(tmp_path, batch, finishes):
    """Also for cases whose preparation ends in the computing thread."""
    cases, model, readers = paths(7), predictor(), set()

    def read(case):
        readers.add(threading.current_thread())
        return dict(case)

    def finish(case):
        assert threading.current_thread() not in readers
        if case["number"] == 2:
            raise ReaderError("of no use after all")
        return prepare(case)

    parts = (read, finish) if finishes else (prepare, None)
    write = partial(write_into, tmp_path / "overlapped")
    outcomes = list(overlapped(iter(cases), parts[0], model.predict, write, finish=parts[1], batch_size=batch))
    assert sorted((outcome.case for outcome in outcomes), key=cases.index) == cases  # as they were given
    assert [str(outcome.fault) for outcome in outcomes if outcome.fault] == ["of no use after all"] * finishes
    for outcome in outcomes:
        if outcome.file is not None:
            prepared = prepare(outcome.case)
            plain = write_into(tmp_path / "plain", prepared, Prediction(labels=model(prepared)))
            assert outcome.file.read_bytes() == plain.read_bytes()
            assert outcome.seconds.keys() == {"read", "compute", "write"}


@pytest.mark.parametrize("batch", [1, 2, 4])
def test_the_fault_of_a_case_is_its_outcome_and_the_others_go_on(tmp_path, batch):
    def read(case):
        if case["number"] in (1, 2):
            raise ReaderError(f"{case['case']} is damaged")
        prepared = prepare(case)
        if case["number"] == 4:
            prepared["image"][0, 0, 0, 0] = torch.nan
        return prepared

    def write(case, prediction):
        if case["number"] == 6:
            raise OSError(28, "No space left on device")
        return write_into(tmp_path, case, prediction)

    found = overlapped(paths(9), read, predictor().predict, write, batch_size=batch)
    outcomes = {outcome.case["number"]: outcome for outcome in found}
    assert (list(outcomes) if batch == 1 else sorted(outcomes)) == list(range(9))  # in the order of the cases
    faults = {number: outcome.fault for number, outcome in outcomes.items() if outcome.fault}
    assert {number: type(fault) for number, fault in faults.items()} == {
        1: ReaderError,
        2: ReaderError,
        4: NonFinitePredictionError,
        6: OSError,
    }
    assert "case_4" in str(faults[4])
    for number in set(outcomes) - set(faults):
        plain = write_into(tmp_path / "plain", case := prepare(paths(9)[number]), Prediction(labels=predictor()(case)))
        assert outcomes[number].file.read_bytes() == plain.read_bytes()


def test_the_next_case_is_read_and_the_last_one_written_while_one_is_computed(tmp_path):
    """Computing the second case waits until the third is being read, and the first is being written waits for both."""
    is_reading, is_writing = threading.Event(), threading.Event()
    computed = threading.Event()

    def read(case):
        if case["number"] == 2:
            is_reading.set()
        return prepare(case)

    def predict(cases):
        if cases[0]["number"] == 1:
            assert is_reading.wait(PATIENCE)
            assert is_writing.wait(PATIENCE)
            computed.set()
        return predictor().predict(cases)

    def write(case, prediction):
        if case["number"] == 0:
            is_writing.set()
            assert computed.wait(PATIENCE)
        return write_into(tmp_path, case, prediction)

    assert [outcome.fault for outcome in overlapped(paths(3), read, predict, write)] == [None] * 3


def test_no_more_than_three_cases_are_in_memory(write):
    alive, most, lock = 0, 0, threading.Lock()

    def died():
        nonlocal alive
        with lock:
            alive -= 1

    class Volume(dict):
        """A case whose deletion can be observed."""

    def read(case):
        nonlocal alive, most
        with lock:
            alive += 1
            most = max(most, alive)
        prepared = Volume(prepare(case))
        weakref.finalize(prepared, died)
        return prepared

    for _ in overlapped(paths(12), read, predictor().predict, write):
        pass
    assert 2 <= most <= 3
    assert alive == 0


def test_a_fault_that_is_kept_holds_no_volume(write):
    seen = []

    def read(case):
        prepared = prepare(case)
        seen.append(weakref.ref(prepared["image"]))
        return prepared

    def predict(cases):
        probabilities = cases[0]["image"] * 2
        seen.append(weakref.ref(probabilities))
        raise RuntimeError("CUDA out of memory")

    outcomes = list(overlapped(paths(3), read, predict, write))
    assert [str(outcome.fault) for outcome in outcomes] == ["CUDA out of memory"] * 3
    gc.collect()
    assert len(seen) == 6
    assert not [volume for volume in seen if volume() is not None]


def count_threads() -> int:
    return sum(thread.name.startswith(("reading", "writing")) for thread in threading.enumerate())


@pytest.mark.parametrize("where", ["read", "finish", "compute", "write"])
def test_what_ends_everything_comes_after_what_was_predicted_before(write, where):
    def stop_at(place, case):
        if place == where and case["number"] == 3:
            raise StopError

    def read(case):
        stop_at("read", case)
        return prepare(case)

    def finish(case):
        stop_at("finish", case)
        return case

    def predict(cases):
        stop_at("compute", cases[0])
        return predictor().predict(cases)

    def write_some(case, prediction):
        stop_at("write", case)
        return write(case, prediction)

    done = []
    with pytest.raises(StopError):
        done.extend(overlapped(paths(9), read, predict, write_some, finish=finish, ends=(StopError,)))
    # extend() keeps what came before the error
    assert [outcome.case for outcome in done[:3]] == paths(3)
    assert all(outcome.file.exists() for outcome in done)
    assert count_threads() == 0


def test_whatever_ends_it_leaves_no_thread_and_whole_files(tmp_path, write):
    def interrupted(cases):
        if cases[0]["number"] == 2:
            raise KeyboardInterrupt
        return predictor().predict(cases)

    def listed():
        yield from paths(2)
        raise ValueError("the table ends in the middle of a row")

    with pytest.raises(KeyboardInterrupt):
        list(overlapped(paths(9), prepare, interrupted, write))
    assert count_threads() == 0
    assert {file.name for file in tmp_path.iterdir()} <= {"case_0.nii.gz", "case_1.nii.gz"}  # and no partial one
    with pytest.raises(ValueError, match="middle of a row"):
        list(overlapped(listed(), prepare, predictor().predict, write))
    assert count_threads() == 0
    outcomes = overlapped(paths(9), prepare, predictor().predict, write)
    assert next(outcomes).case["case"] == "case_0"
    outcomes.close()
    assert count_threads() == 0
