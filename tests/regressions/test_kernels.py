"""Kernels that were right in the interpreter or for one sample, but wrong on a GPU or for several."""

import math

import pytest
import torch
import torch.nn.functional as F
from kernels import DEVICE, INTERPRETED, with_kernels

from volseg.device import gpus
from volseg.device.convolution import choice
from volseg.device.convolution.choice import ConvolutionCall
from volseg.device.convolution.settings import Settings
from volseg.device.layout import DIM
from volseg.device.norm import addition_passes, passes, reference
from volseg.device.norm.activation import Activation, Term
from volseg.inference.original_grid import LabelRule, decide, measure_entropy
from volseg.inference.sampling import Aligned, Held, sample_grid
from volseg.transforms.grid import Grid

# Kernels that Triton's interpreter found right, and a GPU would not have.


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
    """A norm with NaN statistics and an ELU gave 0 everywhere, so the loss stayed finite.

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
    from volseg.inference import triton_prediction

    return triton_prediction.decide(sampling, Held(values), (range(4),) * 3, None, torch.uint8, entropy=True)


# With ``checkpoint="tiled"`` and two samples a convolution of single voxels took an output's gradient for dense, which
# the planes of a tile are not: three quarters of the weight's gradient were wrong.


CONVOLUTIONS = [
    ((20, 16, 1, 1, 1), 1, "few taps"),
    ((32, 1, 3, 3, 3), 1, "few taps"),
    ((16, 1, 5, 5, 5), 1, "few channels in"),
    ((3, 16, 5, 5, 5), 1, "few channels out"),
    ((8, 1, 3, 3, 3), 8, "depthwise"),
    ((3, 16, 1, 1, 1), 1, None),  # whose backward pass is one kernel
    ((3, 3, 3, 3, 3), 1, None),  # of which the input's gradient is ours
]
"""Weights, groups, and who computes the gradient of the weight."""

CLOSE = 2**-9
"""By norm: ours round once to float16, by 2**-11 at most; torch, which computes the rest, adds in float16 on a CPU."""


@with_kernels
@pytest.mark.parametrize(("shape", "groups", "name"), CONVOLUTIONS)
def test_gradients_from_planes_of_two_samples(shape, groups, name, monkeypatch):
    out, own, side, *_ = shape
    around = (side // 2,) * 3
    x, gradient = (torch.randn(2, channels, 6, 5, 7, device=DEVICE).half() for channels in (own * groups, out))
    weight = torch.randn(shape, device=DEVICE).half()
    x, gradient = (volume.contiguous(memory_format=torch.channels_last_3d) for volume in (x, gradient))
    exact = [x[:, :, 1:4].double().requires_grad_(), weight.double().requires_grad_()]
    output = F.conv3d(*exact, padding=around, groups=groups)
    planes = gradient.narrow(DIM, 2, 3)  # both samples are there, and do not lie one behind the other
    wanted = torch.autograd.grad(output, exact, planes.double())
    slab, settings = x.narrow(DIM, 1, 3), Settings((1, 1, 1), around, (1, 1, 1), False, (0, 0, 0), groups)
    if INTERPRETED:
        monkeypatch.setattr(gpus, "on_gpu", lambda tensor: True)
        monkeypatch.setattr(gpus, "get_capability", lambda device: (9, 0))
    call = ConvolutionCall(slab, weight, None, settings, planes)
    found = choice.choose("weight gradient", call)
    assert (None if found is None else found.name) == name
    # Tiles are cut of what `lay_out_gradient` has laid out.
    got = choice.differentiate(planes, slab, weight, None, settings, True, [True, True, False])
    for mine, other in zip(got, wanted, strict=False):
        assert float((mine.double() - other).norm() / other.norm()) < CLOSE
