import pytest

from volseg.parallel.pipeline.trial import Trial


def trial(*steps: tuple[bool | None, float]) -> Trial:
    """Steps of so many seconds, recorded, eager, or (``None``) neither."""
    now, times = 0.0, [0.0]
    for _, seconds in steps:
        now += seconds
        times.append(now)
    made = Trial(iter(times).__next__)
    for is_recorded in (*(mode for mode, _ in steps), None):
        made.begin(is_recorded)
    return made


EAGER = ((False, 5.0), (False, 4.0))


@pytest.mark.parametrize(("seconds", "pays"), [(2.0, True), (3.95, False), (6.0, False)])
def test_recording_must_be_quicker_by_more_than_noise(seconds, pays):
    made = trial(*EAGER, (None, 60.0), (True, seconds), (True, seconds + 1))
    assert made.is_over
    assert made.pays == pays


def test_one_slow_step_of_each_is_forgiven():
    assert trial((False, 4.0), (False, 90.0), (None, 60.0), (True, 300.0), (True, 2.0)).pays


def test_both_ways_are_needed():
    assert not trial(*EAGER).is_over
    assert not trial(*EAGER, (None, 60.0), (True, 1.0)).is_over
