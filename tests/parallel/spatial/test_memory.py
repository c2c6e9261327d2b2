"""The tensors that a forward pass keeps, counted one by one."""

import gc
import weakref
from typing import Any

import pytest
import torch
from beside_plain import RunLayers
from monai.networks.nets import DynUNet
from torch.utils._python_dispatch import TorchDispatchMode

from volseg.parallel import ModelParallel


class Living(TorchDispatchMode):
    """Storages that operators made and that are still alive and hold memory."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                self.storages.setdefault(storage._cdata, weakref.ref(storage, self._forget(storage._cdata)))
        return result

    def _forget(self, number: int) -> Any:
        def forget(_: Any) -> None:
            self.storages.pop(number, None)

        return forget

    def of_size(self, size: int) -> int:
        """Return how many hold exactly so many bytes."""
        living = [reference() for reference in self.storages.values()]
        return sum(storage is not None and storage.nbytes() == size for storage in living)


@pytest.mark.parametrize(("checkpoint", "finest", "next_level"), [(None, 5, 5), ("all", 2, 2)])
def test_a_level_keeps_one_volume_on_each_way_where_it_is_recomputed(
    checkpoint: str | None, finest: int, next_level: int
) -> None:
    """Without: four convolutions' outputs and the transposed one's (of the next level the norm behind, too)."""
    net = DynUNet(3, 1, 3, [3] * 4, [1, 2, 2, 2], [2] * 3, filters=[4, 12, 16, 16])
    model = ModelParallel(net, strategy="spatial", devices=["cpu"], checkpoint=checkpoint)
    volume = torch.randn(1, 1, 16, 16, 16)
    with Living() as living:
        output = model(volume)
        gc.collect()
        # 4 channels of 16^3, and 12 of 8^3, in float32.
        assert living.of_size(4 * 4 * 16**3) == finest
        assert living.of_size(4 * 12 * 8**3) == next_level + (checkpoint is None)
        output.sum().backward()


def test_a_skip_takes_no_memory_while_it_waits() -> None:
    """Its recipe can write it again; so can a join's that forward still names."""
    seen = []

    def run(net: Any, x: torch.Tensor) -> torch.Tensor:
        skip = net.norm(net.first(x))
        low = net.second(skip)
        seen.append(skip)
        joined = torch.cat([skip, low], 1)
        result = net.last(joined)
        seen.append(joined)
        return result

    layers = {"first": (1, 4), "second": (4, 4), "last": (8, 1)}
    convolutions = {name: torch.nn.Conv3d(*channels, 3, padding=1) for name, channels in layers.items()}
    net = RunLayers(run, **convolutions, norm=torch.nn.InstanceNorm3d(4))
    model = ModelParallel(net, strategy="spatial", devices=["cpu"])
    model(torch.randn(1, 1, 8, 8, 8)).sum().backward()
    assert [volume._slabs[0].untyped_storage().nbytes() for volume in seen] == [0, 0]
    # Whoever looks gets it back.
    skip, joined = seen
    torch.testing.assert_close(joined.to_local()[:, :4], skip.to_local())
    assert skip.to_local().abs().sum() > 0


def test_a_sum_at_the_end_of_a_recomputed_block_keeps_nothing_but_itself() -> None:
    """It is deferred to an activation; outside the block, autograd would have kept both terms."""

    class Block(torch.nn.Module):
        def __init__(self, channels: int) -> None:
            super().__init__()
            self.first = torch.nn.Conv3d(channels, 4, 3, padding=1)
            self.second, self.norm = torch.nn.Conv3d(4, 4, 3, padding=1), torch.nn.InstanceNorm3d(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first = torch.nn.functional.relu(self.norm(self.first(x)))
            return torch.nn.functional.elu(self.norm(self.second(first)) + first)

    net = torch.nn.Sequential(Block(1), Block(4), Block(4))
    model = ModelParallel(net, strategy="spatial", devices=["cpu"], checkpoint="all")
    with Living() as living:
        output = model(torch.randn(1, 1, 16, 16, 16))
        gc.collect()
        # Of three blocks, the last of which is the result.
        assert living.of_size(4 * 4 * 16**3) == 3
        output.sum().backward()
