"""The calls of ``test_vector_losses`` and ``test_gradients_of_volumes`` where each process holds one slab.

``python test_calls_ranks.py FOLDER`` in each process of a group writes what differs from one device.
"""

import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from volseg.parallel import launch
from volseg.parallel.spatial import ShardedVolume
from volseg.parallel.spatial.context import Context
from volseg.parallel.spatial.transport.process_group import ProcessGroupShards
from volseg.parallel.spatial.volume import from_whole


def test_calls_on_processes_equal_those_on_one_device(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("ranks")
    launch([__file__, str(folder)], 2)
    for rank in range(2):
        verdicts = json.loads((folder / f"{rank}.json").read_text())
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


def main(folder: Path) -> None:
    import test_gradients_of_volumes as gradients  # beside this script; pytest does not look there
    import test_vector_losses as losses

    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    context = Context(ProcessGroupShards(dist.group.WORLD, (2,), torch.device("cpu")))
    verdicts = {name: compared(call, gradients.random, context) for name, call in gradients.CALLS.items()}
    for name, call in losses.CALLS.items():
        # Its weighted sum of the results has their gradients in the input.
        verdicts[name] = compared(lambda x, y, own=call: losses.outcome(own, x, y), losses.random, context)
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(verdicts))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
