"""How long a training takes on a CPU is said after its first batches, once, where that is hours."""

from itertools import accumulate, repeat

import pytest
import torch

from volseg import Training
from volseg.monitoring.advice import DurationWarning


def train(caplog, *, epochs, seconds, first=100.0):
    """Train for real, by a clock on which each batch takes so many seconds."""
    network = torch.nn.Conv3d(1, 2, 1)
    batches = [{"image": torch.ones(1, 1, 2, 2, 2), "label": torch.zeros(1, 2, 2, 2).long()}] * 8
    clock = accumulate(repeat(seconds), initial=first).__next__
    training = Training(
        network,
        torch.nn.functional.cross_entropy,
        torch.optim.SGD(network.parameters(), lr=0.1),
        batches,
        epochs=epochs,
        hooks=[DurationWarning(clock)],
    )
    training.run()
    return [record.getMessage() for record in caplog.records]


def test_hours_are_told_once_with_what_to_do(caplog):
    (told,) = train(caplog, epochs=3, seconds=600.0)
    assert told.startswith("18 batches of 600.0 s will take about 3 h on this CPU")
    assert "task04_cpu.yaml trains Task04" in told


@pytest.mark.parametrize(("epochs", "seconds"), [(3, 60.0), (1, 600.0)], ids=["short batches", "few batches"])
def test_a_short_training_says_nothing(caplog, epochs, seconds):
    assert train(caplog, epochs=epochs, seconds=seconds) == []
