"""A network whose layers stand under two names each, as DynUNet's do, was left on the meta device by its rehearsal."""

import pytest

from volseg.data import load_task
from volseg.experiment.rehearsing import rehearse_network
from volseg.models import FitGrid, build_network


@pytest.mark.parametrize("name", ["DynUNet", "ResEncUNet"])
def test_a_rehearsed_network_keeps_its_parameters(name, task, configured):
    net = FitGrid(build_network({"name": name}, in_channels=1, out_channels=3, patch_size=(16, 16, 16)))
    before = {key: tensor.clone() for key, tensor in net.state_dict().items()}
    rehearse_network(net, configured("patch.size=[16, 16, 16]"), load_task(task))
    after = net.state_dict()
    assert all(after[key].equal(tensor) for key, tensor in before.items())
