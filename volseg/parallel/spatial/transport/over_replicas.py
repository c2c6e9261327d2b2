"""Exchange values between all slabs of all replicas that share a batch, for norms over the batch.

If all GPUs reach each other's memory, the kernel that uses the values exchanges them, also on a mesh of replicas and
slabs: once, among all of its processes. Otherwise one message relays them. On CPUs there are no kernels.
"""

from functools import cached_property
from typing import TYPE_CHECKING

import torch

from volseg.device.peer.values import RelayedValues, ValueExchange, ValueMailbox
from volseg.device.triton_tiles import takes
from volseg.parallel.spatial.transport.communicator import Communicator

if TYPE_CHECKING:
    from volseg.parallel.replicas import Replicas


class SlabsOfReplicas:
    """All slabs of all replicas; the numbers of those of one replica are neighbours.

    Parameters
    ----------
    communicator
        The slabs of this replica.
    replicas
        All replicas; each process computes one.
    """

    def __init__(self, communicator: Communicator, replicas: "Replicas") -> None:
        self.communicator, self.replicas = communicator, replicas

    @cached_property
    def values(self) -> ValueExchange | None:
        """Exchange of values in kernels, or None; made at the first use, which all processes reach together.

        With either exchange, the same kernels add in the order of the slabs, and so get the same bits.
        """
        communicator = self.communicator
        here = len(communicator.devices)
        group = self.replicas.group if here == communicator.num_shards else self.replicas.everyone
        if group is None or not takes(torch.empty(0, device=communicator.home)):
            return None
        mailbox = ValueMailbox.connect(group, communicator.home) if here == 1 else None
        return mailbox or RelayedValues(group, communicator.home, here)
