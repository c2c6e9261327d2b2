"""Test, without CUDA, when a step is recorded and that all processes make the same decision."""

import pytest
import torch
import torch.distributed as dist
from in_group import in_group

from volseg.parallel.record_policy import MOST_KINDS, Recorder, Recordings


class Played:
    """A recording with a number."""

    is_free = True

    def __init__(self, name):
        self.name, self.released = name, False

    def __call__(self, *inputs):
        return f"replayed {self.name}"

    def release(self):
        self.released = True


class Stateless:
    def begin(self):
        pass

    keep = put_back = done = find_change = begin


@pytest.fixture
def made():
    return []


@pytest.fixture
def make(made):
    def record(x):
        made.append(Played(tuple(x.shape)))
        return made[-1]

    def make(record=record, agree=lambda yes: yes, **options):
        return Recorder(lambda x: "ran", record, agree, **{"warm_up": 2, "limit": 2, "state": Stateless(), **options})

    return make


def called(recorder, *sizes):
    return [recorder(torch.zeros(size)) for size in sizes]


def test_each_shape_runs_some_times_before_it_is_recorded_also_after_a_release(make, made):
    recorder = make()
    assert called(recorder, 1, 2, 1, 1, 2, 2) == ["ran", "ran", "ran", "replayed (1,)", "ran", "replayed (2,)"]
    assert called(recorder, 1, 2) == ["replayed (1,)", "replayed (2,)"]
    recorder.release()
    assert made[0].released
    assert called(recorder, 1, 1, 1) == ["ran", "ran", "replayed (1,)"]


def test_shapes_beyond_the_limit_run_as_they_are(make, made):
    recorder = make(limit=1)
    assert called(recorder, 1, 1, 1) == ["ran", "ran", "replayed (1,)"]
    assert called(recorder, 2, 2, 2, 2, 1) == [*4 * ["ran"], "replayed (1,)"]
    assert len(made) == recorder.num_recorded == 1


def test_a_failed_recording_is_told_once_not_tried_again_and_leaves_others(make, caplog):
    tries = []

    def record(x):
        tries.append(x)
        if len(x) == 1:
            return Played(1)
        raise ValueError("looks at values\nmore")

    recorder = make(record)
    assert called(recorder, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 1) == ["ran", "ran", "replayed 1", *7 * ["ran"], "replayed 1"]
    assert len(tries) == 2
    assert recorder.refused == "looks at values"
    assert caplog.text.count("cannot be recorded as a CUDA graph and runs kernel by kernel (looks at values)") == 1


def test_an_interrupt_is_not_taken_for_a_failure(make):
    def record(x):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        called(make(record), 1, 1, 1)


def test_a_recording_that_is_long_idle_gives_way_to_another_where_idleness_has_a_limit():
    recordings = Recordings(warm_up=1, limit=1, idle=3)
    first, second = recordings.find_kind("first"), recordings.find_kind("second")
    for kind in (first, second):
        assert not recordings.is_warm(kind)
        recordings.count(kind)
        assert recordings.is_warm(kind)
    held = Played("first")
    recordings.keep(first, held)
    assert recordings.use(first) is held
    found = []
    for _ in range(4):
        found.append(recordings.make_room())
        recordings.count(second)
    assert found == [False, False, True, True]
    assert held.released
    assert first.recording is None
    assert not recordings.kept
    assert recordings  # `if recorder:` asks for the recorder, not for its recordings
    unlimited = Recordings(warm_up=0, limit=1)
    unlimited.keep(unlimited.find_kind("first"), Played("first"))
    for _ in range(1000):
        unlimited.count(unlimited.find_kind("second"))
    assert not unlimited.make_room()


def test_kinds_are_refused_one_by_one_or_all_together():
    recordings = Recordings(warm_up=0, limit=2)
    one, other = recordings.find_kind(1), recordings.find_kind(2)
    recordings.refuse("looks at values", one)
    assert (recordings.is_warm(one), recordings.is_warm(other)) == (False, True)
    recordings.refuse("out of memory")
    assert not recordings.is_warm(other)
    assert (one.refused, other.refused, recordings.refused) == ("looks at values", None, "out of memory")


def test_kinds_that_are_ever_new_are_forgotten_but_for_those_with_recordings():
    recordings = Recordings(warm_up=0, limit=1)
    kept = recordings.find_kind("kept")
    recordings.keep(kept, Played("kept"))
    counted = recordings.find_kind("counted")
    recordings.count(counted)
    for number in range(MOST_KINDS):
        recordings.find_kind(number)
    assert recordings.find_kind("kept") is kept
    assert recordings.find_kind("counted").calls == 0


def recorded_together():
    """Sum over two processes in every call; recording fails on one of them, the first time around."""
    rank = dist.get_rank()

    def total(x):
        x = x.clone()
        dist.all_reduce(x)
        return x.item()

    class Replay(Played):
        def __call__(self, x):
            return total(x) + 1000

    def agree(yes):
        vote = torch.tensor([int(yes)])
        dist.all_reduce(vote, op=dist.ReduceOp.MIN)
        return bool(vote)

    def fails_on_one(x):
        if rank == 1:
            raise RuntimeError("out of memory")
        return Replay("here")

    results = {}
    for name, record in (("fails", fails_on_one), ("works", lambda x: Replay("everywhere"))):
        recorder = Recorder(total, record, agree, warm_up=1, limit=1, state=Stateless())
        results[name] = [recorder(torch.full((size,), 1.0 + rank)) for size in (1, 1, 1)]
        results[f"{name}: refused"] = recorder.refused
    return results


def test_processes_of_which_one_fails_go_on_together():
    first, second = in_group(2, recorded_together)
    assert first["fails"] == second["fails"] == [3, 3, 3]
    assert first["works"] == second["works"] == [3, 1003, 1003]
    assert (first["fails: refused"], second["fails: refused"]) == ("in another process", "out of memory")
