"""Export a network for other programs: as TorchScript or as ONNX.

An export traces one path through the network's code, for the sizes of its example. So the result is compared with the
network on other numbers, on several volumes at once and on another size before it is kept, and refused if it differs.
"""

import io
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from volseg.errors import ConfigError
from volseg.files import replacing

TOLERANCE = 1e-4
"""Largest difference of logits, relative to the largest logit: other kernels sum float32 in another order."""

OPSET = 18

Sizes = Sequence[Sequence[int]]


def write_torchscript(network: nn.Module, shapes: Sizes, path: Path) -> Path:
    """Write a network as TorchScript.

    Parameters
    ----------
    network : nn.Module
        From (B, C, D, H, W) to logits, on the CPU, in evaluation mode.
    shapes : sequence of shapes
        (B, C, D, H, W) each; it is followed on the first and compared on all.
    path : Path
        Of the file.

    Raises
    ------
    ConfigError
        If the network cannot be followed, or what came out gives other logits.
    """
    stream = io.BytesIO()
    with torch.no_grad(), _refusing("TorchScript", network), warnings.catch_warnings():
        # Newer torch calls torch.jit deprecated, and warns of Python numbers, which the comparison is there for.
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.trace(network, _draw(shapes[0]), check_trace=False), stream)
        stream.seek(0)
        loaded = torch.jit.load(stream)
    _require_same_logits(network, loaded, shapes, "TorchScript")
    with replacing(path) as partial:
        partial.write_bytes(stream.getvalue())
    return path


def write_onnx(network: nn.Module, shapes: Sizes, path: Path) -> Path:
    """Write a network as ONNX, opset 18, for any number of volumes of the first shape's size; parameters as above.

    Raises
    ------
    ConfigError
        If the packages are not installed, the network cannot be followed, or onnxruntime gives other logits.
    """
    try:
        # Only here: an optional extra, and seconds of imports.
        import onnx
        import onnxruntime
        import onnxscript
    except ImportError as fault:
        raise ConfigError(
            f"ONNX needs packages that are not installed ({fault.name}): pip install onnx onnxruntime onnxscript"
        ) from fault
    del onnxscript  # torch imports it
    with TemporaryDirectory() as folder:
        file = Path(folder) / "network.onnx"
        with torch.no_grad(), _refusing("ONNX", network), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch about its own use of onnxscript
            torch.onnx.export(
                network,
                (_draw((2, *shapes[0][1:])),),
                str(file),
                input_names=["image"],
                output_names=["logits"],
                opset_version=OPSET,
                dynamo=True,
                dynamic_shapes=({0: torch.export.Dim("batch", min=1, max=1024)},),
                external_data=False,
            )
            onnx.checker.check_model(str(file))
            session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])

        def run(image: Tensor) -> Tensor:
            return torch.from_numpy(session.run(["logits"], {"image": image.numpy()})[0])

        _require_same_logits(network, run, [(batch, *shapes[0][1:]) for batch in (1, 2, 3)], "ONNX")
        with replacing(path) as partial:
            partial.write_bytes(file.read_bytes())
    return path


@contextmanager
def _refusing(kind: str, network: nn.Module) -> Iterator[None]:
    """Turn any error of torch's exporters into a `ConfigError`."""
    try:
        yield
    except Exception as fault:  # torch's exporters raise errors of many kinds
        lines = str(fault).strip().splitlines() or [type(fault).__name__]
        raise ConfigError(
            f"{type(network).__name__} cannot be written as {kind}: {lines[0]}; export it as an archive, "
            "which volseg predicts with"
        ) from fault


def _draw(shape: Sequence[int]) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def _require_same_logits(network: nn.Module, made: Callable[[Tensor], Any], shapes: Sizes, kind: str) -> None:
    """Raise unless both give the same logits on every shape."""
    for image in map(_draw, shapes):
        with torch.no_grad(), _refusing(kind, network):
            expected, found = network(image), made(image)
        if not isinstance(found, Tensor) or found.shape != expected.shape:
            raise ConfigError(f"as {kind} the network gives another shape on {tuple(image.shape)}; it is not kept")
        apart = float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-12))
        if not apart <= TOLERANCE:
            raise ConfigError(
                f"as {kind} the network gives other logits on {tuple(image.shape)}: they differ by {apart:.2g} of the "
                f"largest one, at most {TOLERANCE:g} is allowed; it is not kept"
            )
