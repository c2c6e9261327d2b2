"""On a CPU the duration of a training is reported after its first batches, with advice if it takes hours."""

from itertools import accumulate, repeat

import pytest
import torch

from volseg import Training
from volseg.monitoring.advice import Duration


def train(caplog, *, epochs, seconds, first=100.0):
    """Train for real, by a clock on which each batch takes so many seconds."""
    network = torch.nn.Conv3d(1, 2, 1)
    batches = [{"image": torch.ones(1, 1, 2, 2, 2), "label": torch.zeros(1, 2, 2, 2).long()}] * 8
    clock = accumulate(repeat(seconds), initial=first).__next__
    optimizer, loss = torch.optim.SGD(network.parameters(), lr=0.1), torch.nn.functional.cross_entropy
    Training(network, loss, optimizer, batches, epochs=epochs, hooks=Duration(clock)).run()
    return [record.getMessage() for record in caplog.records]


def test_hours_are_told_once_with_what_to_do(caplog):
    (told,) = train(caplog, epochs=40, seconds=600.0)
    assert told.startswith("314 batches of 10 min will take about 2 d 4 h on this CPU")
    assert "--set training.epochs=5 --set training.iterations=50 takes about 1 d 17 h" in told
    assert "task04_cpu.yaml trains Task04" in told


@pytest.mark.parametrize(("epochs", "seconds"), [(40, 20.0), (3, 600.0)], ids=["short batches", "few batches"])
def test_a_short_training_gets_no_advice(caplog, epochs, seconds):
    caplog.set_level("INFO")
    train(caplog, epochs=epochs, seconds=seconds)
    (told,) = [record for record in caplog.records if "will take about" in record.getMessage()]
    assert told.levelname == "INFO"
