"""The heads' own kernels against convolution in float64."""

import pytest
import torch
import torch.nn.functional as F

from volseg.device.convolution import one_voxel

SHAPES: dict[str, tuple[tuple[int, ...], int]] = {
    "U-Net": ((9, 32, 20, 28, 20), 3),
    "V-Net, whose head has as many features as classes": ((1, 3, 16, 7, 15), 3),
    "odd features, one class": ((2, 40, 3, 5, 7), 1),
    "widest": ((1, 256, 9, 9, 9), 16),
}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_kernels_equal_float64(name: str, with_bias: bool, channels_last: bool, dtype: torch.dtype) -> None:
    shape, classes = SHAPES[name]
    layout = torch.channels_last_3d if channels_last else torch.contiguous_format
    x = torch.randn(shape, device="cuda").to(dtype).contiguous(memory_format=layout)
    weight = (torch.randn(classes, shape[1], 1, 1, 1, device="cuda") / 5).to(dtype)
    bias = torch.randn(classes, device="cuda").to(dtype)
    exact = [tensor.double().requires_grad_() for tensor in (x, weight, bias)]
    expected = F.conv3d(exact[0], exact[1], exact[2] if with_bias else 0 * exact[2])
    gradient = torch.randn_like(expected).to(dtype).contiguous(memory_format=layout)
    wanted = torch.autograd.grad(expected, exact, gradient.double())
    got = one_voxel.forward(x, weight, bias if with_bias else None)
    assert got.is_contiguous()
    rounding = {torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]  # once, of sums in float32
    torch.testing.assert_close(got.double(), expected.detach(), rtol=rounding, atol=1e-4)
    derived = one_voxel.backward(gradient, x, weight, needs_input=True)
    again = one_voxel.backward(gradient, x, weight, needs_input=False)
    assert again[0] is None
    assert again[1].equal(derived[1])
    for one, other in zip(derived, wanted if with_bias else wanted[:2], strict=False):
        assert one is not None
        assert float((one.double() - other).abs().max() / other.abs().max()) < 2 * rounding  # of the largest


@pytest.mark.gpu
@pytest.mark.parametrize("classes", [17, 118, 300])
@pytest.mark.parametrize("features", [32, 256])
def test_many_classes_forward(classes: int, features: int) -> None:
    x = torch.randn(2, features, 12, 9, 17, device="cuda").bfloat16().contiguous(memory_format=torch.channels_last_3d)
    weight = (torch.randn(classes, features, 1, 1, 1, device="cuda") / 5).bfloat16()
    bias = torch.randn(classes, device="cuda").bfloat16()
    got = one_voxel.forward(x, weight, bias)
    assert got.is_contiguous()
    # Rounded once, of sums in float32.
    torch.testing.assert_close(
        got.double(), F.conv3d(x.double(), weight.double(), bias.double()), rtol=2**-8, atol=1e-3
    )


@pytest.mark.gpu
def test_part_of_a_wider_tensor_is_read_where_it_lies() -> None:
    wide = torch.randn(2, 64, 6, 5, 7, device="cuda").half().contiguous(memory_format=torch.channels_last_3d)
    weight = torch.randn(3, 24, 1, 1, 1, device="cuda").half()
    part = wide[:, 8:32, 1:4]
    assert one_voxel.forward(part, weight, None).equal(
        one_voxel.forward(part.contiguous(memory_format=torch.channels_last_3d), weight, None)
    )


@pytest.mark.gpu
def test_permuted_gradients_and_inputs() -> None:
    x = torch.randn(2, 32, 6, 5, 7, device="cuda").half().contiguous(memory_format=torch.channels_last_3d)
    weight = torch.randn(3, 32, 1, 1, 1, device="cuda").half()
    gradient = torch.randn(2, 3, 6, 5, 7, device="cuda").half()
    expected = one_voxel.backward(gradient, x, weight, needs_input=True)
    for dims in ((2, 4), (3, 4)):
        permuted = [tensor.transpose(*dims).contiguous().transpose(*dims) for tensor in (gradient, x)]
        assert one_voxel.forward(permuted[1], weight, None).equal(one_voxel.forward(x, weight, None))
        for one, other in zip(one_voxel.backward(*permuted, weight, needs_input=True), expected, strict=True):
            torch.testing.assert_close(one, other)
