"""The halo that is kept comes back to where it was."""

import pytest
import torch

from volseg.parallel.spatial.transport.halo import copy_halo, put_halo_back


@pytest.mark.parametrize("own", [(0, 0), (1, 1), (2, 2), (1, 0), (0, 2), (2, 1)])
@pytest.mark.parametrize("last", [False, True])
def test_edges_come_back(own: tuple[int, int], last: bool) -> None:
    layout = torch.channels_last_3d if last else torch.contiguous_format
    buffer = torch.randn(2, 3, 6, 4, 5).contiguous(memory_format=layout)
    before, behind = own
    kept = copy_halo(buffer, own)
    assert len(kept) == len({planes for planes in own if planes})
    changed = buffer.clone()
    changed[:, :, :before] = changed[:, :, 6 - behind :] = 0
    put_halo_back(changed, own, kept)
    assert torch.equal(changed, buffer)
    part = changed[:, 1:].contiguous(memory_format=layout).zero_()  # some of the channels
    put_halo_back(part, own, [edge.narrow(1, 1, 2) for edge in kept])
    assert torch.equal(part[:, :, :before], buffer[:, 1:, :before])
    assert torch.equal(part[:, :, 6 - behind :], buffer[:, 1:, 6 - behind :])
