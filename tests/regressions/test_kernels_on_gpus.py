"""Kernels that Triton's interpreter found right, and a GPU would not have."""

import math

import pytest
import torch
from kernels import DEVICE, with_kernels

from volseg.device.norm import addition_passes, passes, reference
from volseg.device.norm.activation import Activation, Term
from volseg.inference.original_grid import LabelRule, decide, measure_entropy
from volseg.inference.sampling import Aligned, Held, sample_grid
from volseg.transforms.grid import Grid

KINDS = ["none", "leaky", "elu", "prelu", "sigmoid", "silu", "gelu"]


def find_terms(kind: str) -> tuple[torch.Tensor, Term]:
    gradient, slab = torch.ones(2, 1, 3, 4, 4, 4, device=DEVICE).unbind()
    scale, shift = torch.ones(1, 3, device=DEVICE), torch.zeros(1, 3, device=DEVICE)
    shift[0, 1] = math.nan  # a channel of a training that has diverged
    slope = torch.full((3,), 0.2, device=DEVICE) if kind == "prelu" else None
    return gradient, Term(slab, shift, scale, shift, Activation(kind, 1.0), slope)


@with_kernels
@pytest.mark.parametrize("kind", KINDS)
def test_nan_passes_through_a_norm_and_its_activation(kind):
    """A norm whose statistics are NaN with an ELU behind it gave 0 everywhere: the loss stayed a number.

    ``tl.minimum`` of NaN and 0 is 0 on a GPU, and NaN by the interpreter.
    """
    gradient, term = find_terms(kind)
    wanted = reference.affine(term)
    assert wanted[:, 1].isnan().all()
    got = passes.affine(term)
    torch.testing.assert_close(got, wanted, equal_nan=True)
    sums = passes.gradient_sums(gradient, term).sum(0)
    torch.testing.assert_close(sums, reference.gradient_sums(gradient, term), equal_nan=True)
    added = addition_passes.add(term, Term(term.slab), Activation("none"))
    torch.testing.assert_close(added, wanted + term.slab, equal_nan=True)


@with_kernels
def test_what_the_network_does_not_know_is_not_certain():
    """The entropy of probabilities that are NaN was 0, of a GPU's maximum of NaN and 0: the voxel passed for certain.

    And of classes one of which is NaN, torch takes that one, the kernel took the best of the others.
    """
    sampling = sample_grid(*[Grid((4, 4, 4), torch.eye(4, dtype=torch.float64))] * 2)
    assert isinstance(sampling, Aligned)
    values = torch.rand(5, 4, 4, 4, device=DEVICE).softmax(0)
    values[:, 1] = math.nan
    values[2, 2] = math.nan
    values[1:4:2, 3] = math.nan
    ((_, labels, entropy),) = _decide(sampling, values)
    assert labels.equal(decide(values, LabelRule.of(5, None, regions=False)))
    torch.testing.assert_close(entropy, measure_entropy(values, regions=False), atol=1e-5, rtol=0, equal_nan=True)


def _decide(sampling, values):
    from volseg.inference import triton_decision

    return triton_decision.decide(sampling, Held(values), (range(4),) * 3, None, torch.uint8, entropy=True)
