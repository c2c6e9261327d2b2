"""Memory that a step kept and nobody wanted: of recomputed blocks, and of pipelines."""

from collections.abc import Sequence

import pytest
import torch
from monai.networks.nets import UNet
from torch import nn

from volseg.errors import UnsupportedOperatorError
from volseg.estimate.candidate import Candidate
from volseg.estimate.candidate_trace import trace_candidate
from volseg.estimate.gpu_kinds import find_kind
from volseg.estimate.network_plan import describe_network
from volseg.estimate.step_memory import compute_memory_use
from volseg.estimate.trace import Allocate, Free, Mark, StepTrace
from volseg.parallel.spatial.sources import Watched


def trace(net: nn.Module, shape: Sequence[int], candidate: Candidate) -> Sequence[StepTrace]:
    """Return what a network's steps under autocast take and free."""
    return trace_candidate(describe_network(net, shape, dtype=torch.bfloat16), candidate, find_kind("h200"))


@pytest.mark.parametrize("checkpoint", ["all", "tiled"])
def test_a_recomputed_step_takes_less_than_a_plain_one(checkpoint):
    """What a recomputed block saved was kept, to see whether it was changed in place meanwhile.

    Versions were compared by holding the tensors, in a list that a saved-tensor hook held, which autograd holds: V-Net
    took 1438 bytes per voxel with ``checkpoint="all"``, not 777. Results were right, and no test counted bytes.
    """

    net = UNet(3, 1, 2, (16, 32), (2,), num_res_units=2, norm="INSTANCE")
    recomputed, plain = (
        compute_memory_use(trace(net, (1, 1, 64, 64, 64), Candidate(checkpoint=each))[-1]).used
        for each in (checkpoint, None)
    )
    assert recomputed < 0.9 * plain


def test_a_version_is_watched_without_the_memory():
    tensor = torch.zeros(1000)
    storage = torch.multiprocessing.reductions.StorageWeakRef(tensor.untyped_storage())
    watched, view = Watched(tensor), tensor[:10]
    del tensor
    watched.check()
    view.add_(1)
    with pytest.raises(UnsupportedOperatorError, match=r"a tensor of shape \(1000,\) .* was changed in place"):
        watched.check()
    del view
    assert storage.expired()


def list_held_after_forward(steps: StepTrace) -> list[int]:
    """Return the bytes that are held where each step's loss begins."""
    held: dict[int, int] = {}
    found = []
    for event in steps.events:
        match event:
            case Allocate(block, size):
                held[block] = size
            case Free(block):
                held.pop(block, None)
            case Mark("loss"):
                found.append(sum(held.values()))
    return found


def test_measuring_a_network_under_autocast_leaves_no_activation_behind() -> None:
    """Autocast took what separates one measured part from the next for weights, and kept all activations and their
    gradients up to the end of the first batch: of SegResNet at 96^3 5.3 GB of 10.3 on an H200."""

    # Norms hand float32 to convolutions, which autocast casts.
    layers = [layer for _ in range(6) for layer in (nn.Conv3d(4, 4, 3, padding=1), nn.GroupNorm(2, 4))]
    net = nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), *layers)
    for steps in trace(net, (4, 1, 16, 16, 16), Candidate(pipeline=2, split_size=1)):
        first, second = list_held_after_forward(steps)
        assert first <= second
