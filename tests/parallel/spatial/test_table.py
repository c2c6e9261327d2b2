"""The operator table contains each function once: a second registration would hide one of the two."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from volseg.parallel.spatial.operators.random import dropout
from volseg.parallel.spatial.table import TABLE, handles, sharded_form


def handler(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    raise AssertionError("registered, not called")


AGAIN: dict[str, tuple[Callable[[], Any], str]] = {
    "another handler": (lambda: handles("Dropout", "F.dropout")(handler), "F.dropout is handled by dropout already"),
    "the same handler": (lambda: handles("Dropout", "F.dropout")(dropout), "F.dropout is handled by dropout already"),
    "another name of it": (lambda: handles("Dims", "Tensor.__abs__")(handler), "handled by pointwise already"),
    "a composite": (lambda: handles("Dims", "torch.pixel_shuffle")(handler), "handled by gathered already"),
    "one's own form": (lambda: sharded_form(F.dropout)(handler), "dropout is handled by dropout already"),
}


@pytest.mark.parametrize("case", AGAIN)
def test_a_second_registration_is_refused(case: str) -> None:
    register, message = AGAIN[case]
    before = dict(TABLE)
    with pytest.raises(ValueError, match=message):
        register()
    assert before == TABLE


def test_a_function_known_by_several_names_is_one_entry() -> None:
    assert torch.Tensor.__rdiv__ is torch.Tensor.__rtruediv__
    assert TABLE[torch.Tensor.__rdiv__].family == "Pointwise arithmetic"
