"""Rows of ``spatial.py`` that compare instead of timing: inference on N GPUs, and tensors above 2**31 elements."""

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from volseg.device.norm import choice
from volseg.device.norm.activation import Activation
from volseg.losses.dice import choice as dice
from volseg.parallel import ModelParallel

__all__ = ["CHECKS"]


def relative(actual: Tensor, expected: Tensor) -> float:
    """Return the largest difference over the largest value."""
    return float((actual.float() - expected.float()).abs().max() / expected.float().abs().max().clamp_min(1e-12))


def inference(row: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Compare a whole-volume prediction on all processes with the plain network's on this one."""
    from monai.networks.nets import DynUNet

    kernel, strides = [3] * 5, [1, 2, 2, 2, 2]
    widths = [32, 64, 128, 256, 320]
    nets: list[nn.Module] = []
    for _ in range(2):
        torch.manual_seed(0)
        nets.append(DynUNet(3, 1, 3, kernel, strides, strides[1:], filters=widths).to(device).eval())
    plain, model = nets[0], ModelParallel(nets[1], strategy="spatial")
    volume = torch.randn(1, 1, *row["shape"], device=device, generator=torch.Generator(device).manual_seed(1))
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    with torch.inference_mode():
        expected = plain(volume)
        whole = model(volume).full_tensor()
        with torch.autocast(device.type, torch.bfloat16):
            half = plain(volume).argmax(1)
            ours = model(volume).argmax(1)
        ours = ours.full_tensor()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    exact = expected.argmax(1)
    return {
        "float32_relative": relative(whole, expected),
        "float32_same_class": float((whole.argmax(1) == exact).double().mean()),
        "bf16_same_class": float((ours == half).double().mean()),
        "bf16_like_float32": float((ours == exact).double().mean()),
        "plain_bf16_like_float32": float((half == exact).double().mean()),
        "processes": dist.get_world_size() if dist.is_initialized() else 1,
    }


def elements(row: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Compare kernels and convolutions on one tensor of more than 2**31 elements with the same a slice at a time."""
    if int(os.environ.get("RANK", "0")) > 0:
        return {}
    channels, (depth, *plane) = 32, row["shape"]
    last = torch.channels_last_3d
    slab = torch.empty(1, channels, depth, *plane, device=device, dtype=torch.bfloat16, memory_format=last)
    gradient = torch.empty_like(slab)
    for tensor in (slab, gradient):
        for start in range(0, depth, 32):
            tensor[:, :, start : start + 32].normal_()
    found: dict[str, Any] = {"elements": slab.numel(), "above": slab.numel() > 2**31}
    found |= _norms(slab, gradient)
    found |= _convolutions(slab, gradient)
    found |= _loss(row, device)
    return found


def _slices(depth: int, count: int = 64) -> list[slice]:
    return [slice(start, min(start + count, depth)) for start in range(0, depth, count)]


def _norms(slab: Tensor, gradient: Tensor) -> dict[str, float]:
    """Compare statistics, a norm and its gradient."""
    act = Activation("leaky", 0.01)
    mean, variance = choice.moments(slab).unbind(0)
    depth = slab.shape[2]
    parts = [torch.stack([slab[:, :, s].float().sum((2, 3, 4)), slab[:, :, s].float().square().sum((2, 3, 4))]).double()
             for s in _slices(depth, 16)]  # fmt: skip
    sums = torch.stack(parts).sum(0) / slab.shape[2:].numel()
    scale, shift = variance.rsqrt(), -mean * variance.rsqrt()
    out = choice.affine(slab, scale, shift, act)
    worst = {"mean": relative(mean, sums[0]), "variance": relative(variance, sums[1] - sums[0] ** 2)}
    total = choice.gradient_sums_of_parts(gradient, slab, mean, scale, shift, act).sum(0)
    by_slice = torch.zeros_like(total)
    slope = offset = torch.full_like(scale, 1e-3)
    back = choice.gradient_input(gradient, slab, scale, shift, slope, offset, act)
    worst["norm"] = worst["norm gradient"] = 0.0
    for s in _slices(depth):
        own, g = slab[:, :, s], gradient[:, :, s]
        worst["norm"] = max(worst["norm"], relative(out[:, :, s], choice.affine(own, scale, shift, act)))
        expected = choice.gradient_input(g, own, scale, shift, slope, offset, act)
        worst["norm gradient"] = max(worst["norm gradient"], relative(back[:, :, s], expected))
        by_slice += choice.gradient_sums_of_parts(g, own, mean, scale, shift, act).sum(0)
    return worst | {"norm sums": relative(total, by_slice)}


def _convolutions(slab: Tensor, gradient: Tensor) -> dict[str, float]:
    """Compare a convolution with padding, and its gradients of input and weight."""
    weight = torch.randn(32, 32, 3, 3, 3, device=slab.device, dtype=slab.dtype).to(memory_format=torch.channels_last_3d)
    depth = slab.shape[2]

    def settings(padding: int) -> tuple:
        return [1] * 3, [padding, 1, 1], [1] * 3, False, [0] * 3, 1

    out = torch.ops.aten.convolution(slab, weight, None, *settings(1))
    worst = {"convolution": 0.0, "input gradient": 0.0}
    for s in _slices(depth):
        before, behind = min(s.start, 1), min(depth - s.stop, 1)
        own = torch.nn.functional.pad(
            slab[:, :, s.start - before : s.stop + behind], (0, 0, 0, 0, 1 - before, 1 - behind)
        ).contiguous(memory_format=torch.channels_last_3d)
        worst["convolution"] = max(
            worst["convolution"], relative(out[:, :, s], torch.ops.aten.convolution(own, weight, None, *settings(0)))
        )
    del out
    back, weight_gradient, _ = torch.ops.aten.convolution_backward(
        gradient, slab, weight, None, *settings(1), [True, True, False]
    )
    by_slice = torch.zeros(weight.shape, device=slab.device)
    for s in _slices(depth):
        before, behind = min(s.start, 1), min(depth - s.stop, 1)
        pad = (0, 0, 0, 0, 1 - before, 1 - behind)
        around = slice(s.start - before, s.stop + behind)
        own, g = (
            torch.nn.functional.pad(t[:, :, around], pad).contiguous(memory_format=torch.channels_last_3d)
            for t in (slab, gradient)
        )
        here = gradient[:, :, s].contiguous(memory_format=torch.channels_last_3d)
        by_slice += torch.ops.aten.convolution_backward(here, own, weight, None, *settings(0), [False, True, False])[1]
        # The gradient of planes inside comes from the planes around them.
        expected = torch.ops.aten.convolution_backward(g, own, weight, None, *settings(1), [True, False, False])[0]
        worst["input gradient"] = max(worst["input gradient"], relative(back[:, :, s], expected[:, :, 1:-1]))
    return worst | {"weight gradient": relative(weight_gradient, by_slice)}


def _loss(row: dict[str, Any], device: torch.device) -> dict[str, float]:
    """Compare Dice plus cross entropy, of ten times the voxels and three classes."""
    depth, *plane = row["shape"]
    depth *= 10
    logits = torch.empty(1, 3, depth, *plane, device=device, dtype=torch.bfloat16)
    label = torch.empty(1, 1, depth, *plane, device=device, dtype=torch.uint8)
    for s in _slices(depth):
        logits[:, :, s].normal_()
        label[:, :, s].random_(0, 3)
    total = dice.sums(logits, label, False).double().sum(0)
    slopes = torch.ones_like(total, dtype=torch.float32) * torch.arange(1, 5, device=device).view(4, 1, 1)
    back = dice.gradient(logits, label, slopes, False)
    by_slice, worst = torch.zeros_like(total), 0.0
    for s in _slices(depth, 320):
        own, truth = logits[:, :, s].contiguous(), label[:, :, s].contiguous()
        by_slice += dice.sums(own, truth, False).double().sum(0)
        worst = max(worst, relative(back[:, :, s], dice.gradient(own, truth, slopes, False)))
    return {"loss elements": float(logits.numel()), "loss sums": relative(total, by_slice), "loss gradient": worst}


CHECKS: dict[str, Callable[[dict[str, Any], torch.device], dict[str, Any]]] = {
    "inference": inference,
    "elements": elements,
}
