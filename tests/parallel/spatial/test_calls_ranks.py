"""The calls of ``test_vector_losses`` and ``test_gradients_of_volumes`` where each process holds one slab."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from in_group import in_group
from torch import Tensor
from torch.utils._pytree import tree_leaves

from volseg.parallel.spatial import ShardedVolume
from volseg.parallel.spatial.context import Context
from volseg.parallel.spatial.transport.process_group import ProcessGroupShards
from volseg.parallel.spatial.volume import from_whole


def test_calls_on_processes_equal_those_on_one_device() -> None:
    for verdicts in in_group(2, compared_calls):
        assert len(verdicts) > 40
        assert {name: fault for name, fault in verdicts.items() if fault} == {}


def compared(call: Callable[[Any, Any], Any], random: Callable[[int], Tensor], context: Context) -> str:
    """Say what differs, if anything."""
    try:
        x = random(0).requires_grad_()
        expected = [*tree_leaves(call(x, random(1))), x.grad]
        volume = from_whole(random(0), (2,), context)
        volume.requires_grad = True
        found = [*tree_leaves(call(volume, from_whole(random(1), (2,), context))), volume.grad]
        torch.testing.assert_close(
            [v.full_tensor() if isinstance(v, ShardedVolume) else v for v in found if v is not None],
            [v for v in expected if v is not None],
        )
    except Exception as fault:  # the test shows it
        return f"{type(fault).__name__}: {fault}"
    return ""


def compared_calls() -> dict[str, str]:
    """Say of each call what differs from one device."""
    import test_gradients_of_volumes as gradients  # beside this file; pytest does not look there
    import test_vector_losses as losses

    context = Context(ProcessGroupShards(dist.group.WORLD, (2,), torch.device("cpu")))
    verdicts = {name: compared(call, gradients.random, context) for name, call in gradients.CALLS.items()}
    for name, call in losses.CALLS.items():
        # Its weighted sum of the results has their gradients in the input.
        verdicts[name] = compared(lambda x, y, own=call: losses.outcome(own, x, y), losses.random, context)
    return verdicts
