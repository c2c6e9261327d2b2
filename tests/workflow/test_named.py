import pytest
import torch
from torch import nn

from volseg.errors import BatchFieldError, ConfigError
from volseg.workflow import Named


class SumAndDifference(nn.Module):
    def forward(self, a, b):
        return a + b, a - b


def test_fields_bind_by_name_whatever_the_order_of_the_batch():
    named = Named(SumAndDifference(), inputs=["left", "right"], outputs=["sum", "difference"])
    results = named({"right": torch.tensor(2.0), "other": torch.tensor(9.0), "left": torch.tensor(5.0)})
    assert {name: value.item() for name, value in results.items()} == {"sum": 7.0, "difference": 3.0}


def test_what_does_not_fit_the_fields_is_told():
    named = Named(SumAndDifference(), inputs=["left", "right"], outputs=["a", "b", "c"])
    with pytest.raises(BatchFieldError, match=r"Difference needs \['right'\], but the batch has \['image', 'left'\]"):
        named({"left": 1, "image": 2})
    with pytest.raises(BatchFieldError, match=r"SumAndDifference returned 2 result\(s\), but 3 are named"):
        named({"left": 1, "right": 2})
    for inputs in ("image", [], ["a", "a"]):
        with pytest.raises(ConfigError, match="inputs must be a list of different field names"):
            Named(SumAndDifference(), inputs=inputs, outputs=["x"])


def test_one_output_takes_a_list_of_heads_whole():
    heads = [torch.zeros(1), torch.ones(1)]
    assert Named(lambda x: heads, inputs=["x"], outputs=["logits"])({"x": 0})["logits"] is heads
