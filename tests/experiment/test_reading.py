"""A reader reads the cases of its replica, a follower is sent its slabs."""

import pytest
import torch
from in_group import in_group
from torch import nn

from volseg.experiment.cases import choose_cases
from volseg.experiment.placement.mesh_resolution import resolve_mesh
from volseg.experiment.placement.training_mesh import CaseReading


def test_one_process_reads(configured):
    _, mesh = resolve_mesh(configured(), choose_cases(configured()).task, "cpu")
    assert CaseReading(configured(), mesh).mesh.reads


def read(config):
    """Prepare the cases; a follower's batches are sent, and of a model that is not shared it can have none."""
    chosen = choose_cases(config)
    settled, mesh = resolve_mesh(config, chosen.task, torch.device("cpu"))
    reading = CaseReading(settled, mesh)
    prepared = reading.prepare(chosen)
    if not reading.mesh.reads:
        with pytest.raises(AssertionError, match="a follower of a model that is not shared"):
            reading.make_batches(prepared, chosen.task, nn.Conv3d(1, 1, 1), torch.device("cpu"))
    return {
        "reads": reading.mesh.reads,
        "training": len(prepared.training),
        "validation": len(prepared.validation),
        "order": len(prepared.order),
    }


def test_a_follower_reads_no_case(configured):
    leader, follower = in_group(2, read, configured("parallel.spatial=2"))
    assert leader == {"reads": True, "training": 4, "validation": 2, "order": 2}
    assert follower == {"reads": False, "training": 0, "validation": 0, "order": 2}
