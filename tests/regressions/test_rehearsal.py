"""A rehearsed network has the weights it had.

MONAI's DynUNet registers each block in two places. `torch.func.functional_call` lent it the tensors of the rehearsal by
all names and gave back its own by one of them, so that every DynUNet stood on the meta device before its training.
"""

import copy

import pytest
from annotated_tasks import make_annotated_task

from volseg.config.schema import ExperimentConfig
from volseg.data import load_task
from volseg.experiment.rehearsing import rehearse_network
from volseg.models import FitGrid, build_network

DYNUNET = {"name": "DynUNet", "filters": [4, 8, 8], "strides": [1, 2, 2], "deep_supervision": True}


@pytest.mark.parametrize("batch", [False, True])
def test_a_network_whose_blocks_stand_in_two_places(batch: bool, tmp_path) -> None:
    task = load_task(make_annotated_task(tmp_path, "gaps", num_cases=2))
    spec = {**DYNUNET, "norm_name": "batch"} if batch else DYNUNET
    network = FitGrid(build_network(spec, in_channels=1, out_channels=3))
    every = {"remove_duplicate": False}
    named = [*network.named_parameters(**every), *network.named_buffers(**every)]
    before, places = copy.deepcopy(network.state_dict()), {name: id(tensor) for name, tensor in named}
    config = ExperimentConfig.model_validate(
        {
            "name": "a",
            "data": {"root": tmp_path},
            "patch": {"size": [8, 8, 8]},
            "network": spec,
            "optimizer": {"name": "SGD", "lr": 0.1},
        }
    )
    rehearse_network(network, config, task)
    after = [*network.named_parameters(**every), *network.named_buffers(**every)]
    assert {name: id(tensor) for name, tensor in after} == places
    assert all(tensor.equal(before[name]) for name, tensor in network.state_dict().items())
