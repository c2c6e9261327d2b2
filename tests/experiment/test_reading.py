"""A reader reads the cases of its replica, a follower is sent its slabs."""

import pytest
import torch
from in_group import in_group
from torch import nn

from volseg.experiment.cases import choose_cases
from volseg.experiment.reading import Follower, Reader, choose_reading
from volseg.experiment.settling import settle_mesh


def test_one_process_reads(configured):
    _, mesh = settle_mesh(configured(), choose_cases(configured()).task, "cpu")
    assert type(choose_reading(configured(), mesh)) is Reader


def read(config):
    """Prepare the cases; a follower's batches are sent, and of a model that is not shared it can have none."""
    chosen = choose_cases(config)
    settled, mesh = settle_mesh(config, chosen.task, torch.device("cpu"))
    reading = choose_reading(settled, mesh)
    prepared = reading.prepare(chosen)
    if type(reading) is Follower:
        with pytest.raises(AssertionError, match="a follower of a model that is not shared"):
            reading.make_batches(prepared, chosen.task, nn.Conv3d(1, 1, 1), torch.device("cpu"))
    return {
        "role": type(reading).__name__,
        "training": len(prepared.training),
        "validation": len(prepared.validation),
        "order": len(prepared.order),
    }


def test_a_follower_reads_no_case(configured):
    leader, follower = in_group(2, read, configured("parallel.spatial=2"))
    assert leader == {"role": "Reader", "training": 4, "validation": 2, "order": 2}
    assert follower == {"role": "Follower", "training": 0, "validation": 0, "order": 2}
