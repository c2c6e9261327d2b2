"""``DataParallel``: replicas of a network that share each batch, exact to the batch of one process."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from volseg.parallel.replicas import Replicas

__all__ = ["DataParallel", "find_replicas"]


class DataParallel(nn.Module):
    """Replicas of a network, each of which computes its rows of every batch.

    Parameters
    ----------
    model
        A network on one device, `FastKernels`, or a `ModelParallel`. It is used in place; its parameters get the values
        of the first process.
    replicas
        How many there are, and which of them this process computes; see ``Mesh.replicas``.

    Examples
    --------
    >>> import torch
    >>> net = torch.nn.Conv3d(1, 2, 3, padding=1)
    >>> model = DataParallel(net, Replicas(2))
    >>> sorted(model.state_dict())
    ['bias', 'weight']
    >>> batch = torch.randn(5, 1, 8, 8, 8)
    >>> for share in model.replicas.shares(len(batch)):
    ...     with model.as_replica(share.replica):
    ...         loss = model(batch[share.rows]).square().mean() * share.weight
    ...     loss.backward()
    """

    module: nn.Module
    replicas: Replicas

    def __init__(self, model: nn.Module, replicas: Replicas) -> None:
        super().__init__()
        object.__setattr__(self, "module", model)
        self.replicas = replicas
        for name in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            object.__setattr__(self, name, getattr(model, name))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the network on rows of one replica."""
        return self.module(*args, **kwargs)

    @contextmanager
    def as_replica(self, replica: int) -> Iterator[None]:
        """Compute another than the first of the own replicas in here."""
        assert replica in self.replicas.own
        yield

    def check_alike(self) -> None:
        """Refuse replicas whose networks differ."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the plain network's state under its plain keys."""
        return self.module.state_dict(*args, **kwargs)


def find_replicas(network: nn.Module) -> Replicas | None:
    """Return the replicas among which a network's batches are dealt; None where there are none."""
    return network.replicas if isinstance(network, DataParallel) else None
