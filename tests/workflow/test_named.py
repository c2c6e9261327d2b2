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


def test_a_missing_field_names_the_module_what_it_needs_and_what_there_is():
    named = Named(SumAndDifference(), inputs=["left", "right"], outputs=["sum", "difference"])
    with pytest.raises(
        BatchFieldError, match=r"SumAndDifference needs \['right'\], but the batch has \['image', 'left'\]"
    ):
        named({"left": 1, "image": 2})


@pytest.mark.parametrize(("outputs", "named"), [(["a", "b", "c"], 3)])
def test_surplus_and_lacking_results_are_refused(outputs, named):
    with pytest.raises(BatchFieldError, match=rf"SumAndDifference returned 2 result\(s\), but {named} are named"):
        Named(SumAndDifference(), inputs=["x", "y"], outputs=outputs)({"x": 1, "y": 2})


def test_one_output_takes_a_list_of_heads_whole():
    heads = [torch.zeros(1), torch.ones(1)]
    assert Named(lambda x: heads, inputs=["x"], outputs=["logits"])({"x": 0})["logits"] is heads


@pytest.mark.parametrize("inputs", ["image", [], ["a", "a"]])
def test_fields_must_be_a_list_of_different_names(inputs):
    with pytest.raises(ConfigError, match="inputs must be a list of different field names"):
        Named(SumAndDifference(), inputs=inputs, outputs=["x"])


def test_parameters_of_the_module_are_reached():
    net = nn.Conv3d(1, 1, 1)
    assert {id(p) for p in Named(net, ["image"], ["logits"]).parameters()} == {id(p) for p in net.parameters()}
