"""MONAI's networks on slabs are exact or refused with a reason, never wrong.

The counts, and what each network does, are in ``spatial_census.json``, which the slow test compares. After a change
that is meant, write it anew: ``PYTHONPATH=tests python tests/equivalence/test_spatial_census.py``.
"""

import json
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from monai_networks import NETWORKS
from torch import Tensor, nn

from volseg.errors import ParallelError, UnsupportedOperatorError
from volseg.parallel import ModelParallel
from volseg.parallel.verification.comparison import (
    TOLERANCE,
    Values,
    compare_values,
    default_objective,
    eager_step,
    observe,
)

TABLE = Path(__file__).with_name("spatial_census.json")

FAST = (
    "UNet, residual",
    "DynUNet, supervised",
    "SegResNet, transposed",
    "AttentionUnet",
    "MedNeXt",
    "RegUNet",
    "UNETR",
    "ViT",
    "Classifier",
)

SINGLE = 1e-3
"""Tolerance for the networks that compute in float32 whatever their weights are."""


def observed(net: nn.Module, inputs: list[Tensor], learns: bool) -> Values:
    """Return the results of a forward pass, and of a backward pass if the network ``learns``."""
    torch.manual_seed(5)
    step = eager_step(net, default_objective, gradients=learns)
    return observe(net, inputs, step, leaves=learns)[0]


def no_draw(like: Tensor) -> Tensor:
    """Replace ``torch.randn_like``, whose numbers differ on slabs, as dropout's do."""
    return (like.detach() * 100).cos()


FORMS = ((1, True), (3, True), (1, False))
"""Samples, and whether gradients are compared: batch norm refuses one voxel of one sample (and of two, gradients vanish
in round-off); some networks change in place what autograd needs when they are evaluated."""


def trial(case: Any, train: bool) -> tuple[str, str]:
    """Return "exact", "refused", "WRONG", "CRASH" or "torch refuses", and the reason."""
    for batch, learns in FORMS:
        inputs = list(case.inputs(batch))
        try:
            expected = observed(case.build().train(train), inputs, learns)
            break
        except (RuntimeError, ValueError) as fault:
            reason = str(fault).partition("\n")[0]
    else:
        return "torch refuses", reason
    model = ModelParallel(case.build().train(train), strategy="spatial", devices=["cpu", "cpu:1"])
    try:
        found = observed(model, inputs, learns)
    except (UnsupportedOperatorError, ParallelError) as fault:
        return "refused", _in_short(str(fault))
    except Exception:
        return "CRASH", traceback.format_exc().strip()
    tolerance = TOLERANCE if case.dtype == torch.float64 else SINGLE
    errors = compare_values(expected, found, tolerance=tolerance).wrong
    wrong = [f"{name} by {error:.0e}" for name, error in errors.items()]
    return ("WRONG", ", ".join(wrong[:5])) if wrong else ("exact", "")


def _in_short(message: str) -> str:
    """Return the operator that is missing and why, without place and shapes."""
    operator, _, rest = message.partition(" called from ")
    reason = rest.partition("): ")[2].partition(". Write it")[0] or message.partition("\n")[0]
    return f"{operator}: {reason}" if rest else reason


def verdicts(name: str) -> dict[str, str]:
    """Return a network's verdict in each mode."""
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")
        patch.setattr(torch, "randn_like", no_draw)
        found = {mode: trial(NETWORKS[name], mode == "train") for mode in ("train", "eval")}
    return {mode: f"{verdict}: {reason}" if reason else verdict for mode, (verdict, reason) in found.items()}


def counts(table: dict[str, dict[str, str]]) -> dict[str, int]:
    """Count networks by the worse of their two modes."""
    order = ["WRONG", "CRASH", "refused", "torch refuses", "exact"]
    kinds = [{text.partition(":")[0] for text in modes.values()} for modes in table.values()]
    found = Counter(next(kind for kind in order if kind in modes) for modes in kinds)
    return {kind: found[kind] for kind in order}


def written() -> dict[str, Any]:
    """Return the committed table."""
    return json.loads(TABLE.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", FAST)
def test_what_a_network_does_is_in_the_table(name: str) -> None:
    assert verdicts(name) == written()["networks"][name]


def test_no_network_is_wrong() -> None:
    table = written()
    assert sorted(table["networks"]) == sorted(NETWORKS)
    assert table["counts"] == counts(table["networks"])
    assert (table["counts"]["WRONG"], table["counts"]["CRASH"]) == (0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NETWORKS if name not in FAST])
def test_what_every_network_does_is_in_the_table(name: str) -> None:
    assert verdicts(name) == written()["networks"][name]


if __name__ == "__main__":
    torch.set_num_threads(1)
    table = {name: verdicts(name) for name in NETWORKS}
    TABLE.write_text(json.dumps({"counts": counts(table), "networks": table}, indent=1) + "\n", encoding="utf-8")
