"""What makes a training repeatable: the state of every random number generator, and kernels that sum in one order."""

import os
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import nn

from volseg.data.threads import compute_in_one_thread
from volseg.errors import ConfigError
from volseg.parallel import ModelParallel
from volseg.parallel.devices import list_gpus
from volseg.parallel.state.random import CommonSeeds

__all__ = ["deterministic", "random_state", "restore_random_state", "seed_everything"]


def seed_everything(seed: int) -> None:
    """Seed Python's, NumPy's and torch's generators, on every device."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - libraries draw from the global generator
    torch.manual_seed(seed)


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Let only kernels run that give the same bits each time, if that is ``wanted``; torch refuses the others by name.

    Must begin before the process first uses cuBLAS, which reads the size of its workspace once. Without a GPU one
    thread computes everything: else the number of a process's cores would decide the order of sums.

    Raises
    ------
    ConfigError
        Where torch refuses an operator; names it.
    """
    if not wanted:
        yield
        return
    cudnn = torch.backends.cudnn
    fills: Any = torch.utils.deterministic  # whose one setting torch's stubs do not know
    before = torch.are_deterministic_algorithms_enabled(), cudnn.deterministic, cudnn.benchmark
    filled = fills.fill_uninitialized_memory
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    cudnn.deterministic, cudnn.benchmark = True, False
    fills.fill_uninitialized_memory = False  # a pass over every new tensor, to tell what reads before it writes
    try:
        with nullcontext() if list_gpus() else compute_in_one_thread():
            yield
    except RuntimeError as fault:
        if "have a deterministic" not in str(fault) and "not deterministic" not in str(fault):
            raise
        reason = str(fault).partition(", but you set")[0]
        raise ConfigError(
            f"training.deterministic is true, but {reason}. Choose another layer, loss or device, or set it to false"
        ) from fault
    finally:
        torch.use_deterministic_algorithms(before[0])
        cudnn.deterministic, cudnn.benchmark = before[1:]
        fills.fill_uninitialized_memory = filled


def random_state(network: nn.Module | None = None) -> dict[str, Any]:
    """Return the generators' states; plain numbers and tensors only, so ``weights_only=True`` loads them.

    Parameters
    ----------
    network : nn.Module, optional
        Whose passes may draw from seeds that several processes have in common; those are part of the state then.
    """
    seeds = _find_seeds(network)
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()  # noqa: NPY002
    return {
        "python": {"version": version, "words": list(words), "gauss": gauss},
        "numpy": {
            "name": str(name),
            "keys": torch.from_numpy(np.asarray(keys).astype(np.int64)),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        },
        "torch": torch.get_rng_state(),
        "cuda": [torch.cuda.get_rng_state(gpu) for gpu in list_gpus()],
        "passes": None if seeds is None else seeds.get_state(),
    }


def restore_random_state(state: Mapping[str, Any], network: nn.Module | None = None) -> None:
    """Set the generators to a saved state; generators of devices that are not here are left out.

    Parameters
    ----------
    state : mapping
        As `random_state` returned it.
    network : nn.Module, optional
        See `random_state`; all processes that run it together call this together.
    """
    seeds = _find_seeds(network)
    if seeds is not None:
        seeds.set_state(state.get("passes"))
    python, numpy = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(python["words"]), python["gauss"]))
    keys = numpy["keys"].numpy().astype(np.uint32)
    np.random.set_state((numpy["name"], keys, numpy["position"], numpy["has_gauss"], numpy["cached"]))  # noqa: NPY002
    torch.set_rng_state(state["torch"].cpu())
    for gpu, saved in zip(list_gpus(), state["cuda"], strict=False):
        torch.cuda.set_rng_state(saved.cpu(), gpu)


def _find_seeds(network: nn.Module | None) -> CommonSeeds | None:
    return network.seeds if isinstance(network, ModelParallel) else None
