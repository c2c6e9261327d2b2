import pytest

from volseg.parallel.pipeline.record.trial import EAGER, Trial


def tried(*steps: tuple[int | None, float], ways: tuple[int, ...]) -> Trial:
    """A trial of steps of so many seconds, run in a way or (``None``) not timed."""
    now = 0.0
    trial = Trial(lambda: now, ways)
    for way, seconds in steps:
        if way is None:
            trial.end()
        else:
            trial.begin(way)
        now += seconds
    trial.end()
    return trial


EAGERLY = ((EAGER, 5.0), (EAGER, 4.0))


@pytest.mark.parametrize(("seconds", "way"), [(2.0, 1), (3.95, EAGER), (6.0, EAGER)])
def test_recording_must_be_quicker_by_more_than_noise(seconds, way):
    trial = tried(*EAGERLY, (None, 60.0), (1, seconds), (1, seconds + 1), ways=(EAGER, 1))
    assert trial.is_over
    assert trial.way == way


def test_one_slow_step_of_each_is_forgiven():
    steps = ((EAGER, 4.0), (EAGER, 90.0), (None, 60.0), (1, 300.0), (1, 2.0))
    assert tried(*steps, ways=(EAGER, 1)).way == 1


def test_ways_come_in_order_until_each_has_been_timed():
    seen = []
    trial = Trial(lambda: 0.0, (EAGER, 1, 2))
    while not trial.is_over:
        seen.append(trial.way)
        trial.begin(trial.way)
        trial.end()
    assert seen == [EAGER, EAGER, 1, 1, 2, 2]


@pytest.mark.parametrize(("two", "way"), [(1.0, 2), (3.0, 1)])
def test_best_of_three(two, way):
    assert tried(*EAGERLY, (1, 2.0), (1, 2.0), (2, two), (2, two), ways=(EAGER, 1, 2)).way == way


def test_impossible_ways_leave_the_others_and_at_last_the_eager_one():
    trial = Trial(lambda: 0.0, (1, 2))
    trial.exclude(1)
    assert trial.way == 2
    assert trial.is_over
    trial.exclude(2)
    assert trial.way == EAGER
