"""``volseg plan`` with ``patch.size=[100000,100000,100000]`` never answered.

A loss goes through a volume by pieces of some million voxels, a recomputed step by tiles, and a followed step goes
through all of them: 10^15 voxels are hundreds of millions of pieces. A step is given up once a GPU would hold many
times its memory, and a batch whose bytes torch cannot count is not begun with.
"""

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from volseg.cli import app
from volseg.estimate.candidate import Candidate, Freedom
from volseg.estimate.estimator import Machine, Planned
from volseg.estimate.gpu_kinds import find_kind
from volseg.estimate.instances import get_links
from volseg.estimate.network_plan import describe_network
from volseg.estimate.planning import _find_volumes

SMALL = ["--set", "network={name: UNet, channels: [4, 8, 8], strides: [4, 4]}", "--instance", "p3.2xlarge"]


def run(request, size, *arguments):
    config = str(request.config.rootpath / "configs" / "task04_vnet.yaml")
    patch = f"patch={{size: {size}, batch: 2}}"
    return CliRunner().invoke(app, ["plan", config, *SMALL, "--set", patch, *arguments])


@pytest.mark.parametrize("side", [100_000, 10**9])
@pytest.mark.parametrize("form", [[], ["--json"]])
def test_a_patch_that_no_gpus_could_hold_is_refused_in_words(request, side, form):
    told = run(request, [side] * 3, *form)
    assert told.exit_code == 1
    assert not told.stdout
    said = str(told.exception)
    assert "take smaller patches or volumes, or a smaller batch" in said
    assert str(side) in said


def make(sides):
    return describe_network(nn.Conv3d(1, 2, 3, padding=1), (1, 1, *sides), dtype=torch.float32)


def test_the_largest_volume_is_found_from_such_a_size():
    kind = find_kind("v100-16")
    machine = Machine(gpu=kind, num_gpus=1, links=get_links(kind), gpu_bytes=kind.memory)

    def find(side):
        planned = Planned(
            work=make((side,) * 3),
            machine=machine,
            free=Freedom(),
            resize=lambda sides: (make(sides), 0),
            divisors=(64, 64, 64),
        )
        return _find_volumes(planned, Candidate(kernels="torch"), [(1, 1, 1)])[0]

    found = find(100_000)
    assert found == find(256)
    assert found is not None
    assert found.needed <= kind.memory
    forecast = Planned(work=make((100_000,) * 3), machine=machine).follow(Candidate(kernels="torch"))
    assert forecast.more_than is not None
    assert forecast.memory is None
    assert not forecast.runs
