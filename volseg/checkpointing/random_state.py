"""The state of every random number generator, as a checkpoint holds it."""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from volseg.parallel import ModelParallel
from volseg.parallel.devices import list_gpus
from volseg.parallel.state.random import CommonSeeds

__all__ = ["random_state", "restore_random_state"]


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
