"""Export a network for other programs: as TorchScript, as ONNX, or as a MONAI bundle.

An export to TorchScript or ONNX traces one path through the network's code, for the sizes of its example. The result is
therefore compared with the network on other values, on several volumes at once and on another size, and refused if it
differs.

MONAI runs a bundle without volseg: ``python -m monai.bundle run`` prepares, predicts and writes. MONAI's own networks
are described by their name and parameters, with weights in ``models/model.pt``; another network is TorchScript in
``models/model.ts``, so that neither needs volseg. The preprocessing becomes MONAI's transforms; a step without a
counterpart is refused, since the bundle would predict differently from its run.
"""

import io
import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from monai.networks import nets
from torch import Tensor, nn

from volseg.errors import ConfigError
from volseg.files import replacing
from volseg.version import __version__


@dataclass(frozen=True, kw_only=True, slots=True)
class BundleSource:
    """Contents of a bundle."""

    name: str
    network: nn.Module
    spec: Mapping[str, Any]
    """Name and all parameters of the network."""
    script: bytes | None
    """The network as TorchScript, if it is not MONAI's."""
    channels: Sequence[str]
    labels: Mapping[int, str]
    preprocessing: Sequence[Mapping[str, Any]]
    window: Sequence[int] | None
    overlap: float
    multiple: Sequence[int]
    """Divisors of a volume's sides."""
    minimum: Sequence[int]
    licence: str


def write_bundle(source: BundleSource, folder: Path) -> None:
    """Write the files of a bundle into ``folder``, an existing, empty folder.

    Raises
    ------
    ConfigError
        If a step of the preprocessing has no counterpart in MONAI.
    """
    (folder / "configs").mkdir()
    (folder / "models").mkdir()
    contents = {"metadata.json": _describe(source), "inference.json": _list_steps(source)}
    for name, content in contents.items():
        (folder / "configs" / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    if source.script is None:
        torch.save(dict(source.network.state_dict()), folder / "models" / "model.pt")
    else:
        (folder / "models" / "model.ts").write_bytes(source.script)


def is_monais(spec: Mapping[str, Any], network: nn.Module) -> bool:
    """Return whether MONAI builds the network by its name, with the same names of weights."""
    kind = getattr(nets, str(spec.get("name")), None)
    return isinstance(kind, type) and isinstance(network, kind)


def _describe(source: BundleSource) -> dict[str, Any]:
    shape: Sequence[int | str] = source.window or ["*", "*", "*"]
    return {
        "schema": "https://github.com/Project-MONAI/MONAI-extra-test-data/releases/download/0.8.1/meta_schema_20220324.json",
        "version": "0.1.0",
        "changelog": {"0.1.0": f"exported by volseg {__version__}"},
        "monai_version": "1.6.0",
        "pytorch_version": torch.__version__.partition("+")[0],
        "numpy_version": "1.26.0",
        "optional_packages_version": {"nibabel": "5.3.0"},
        "task": f"segmentation: {source.name}",
        "description": f"{source.name}, trained with volseg {__version__}",
        "authors": "not stated",
        "copyright": "not stated",
        "license": source.licence,
        "network_data_format": {
            "inputs": {"image": _describe_volume("magnitude", [], shape, source.channels)},
            "outputs": {"pred": _describe_volume("segmentation", [0, 1], shape, [*source.labels.values()])},
        },
    }


def _describe_volume(
    kind: str, values: Sequence[int], shape: Sequence[int | str], names: Sequence[str]
) -> dict[str, Any]:
    return {
        "type": "image",
        "format": kind,
        "num_channels": len(names),
        "spatial_shape": [*shape],
        "dtype": "float32",
        "value_range": [*values],
        "is_patch_data": "*" not in shape,
        "channel_def": {str(number): name for number, name in enumerate(names)},
    }


def _list_steps(source: BundleSource) -> dict[str, Any]:
    """Return ``inference.json``: it predicts the volumes in ``dataset_dir`` and writes to ``output_dir``."""
    prepared = [
        _apply("LoadImaged", ensure_channel_first=True),
        *(_translate(component, len(source.channels)) for component in source.preprocessing),
    ]
    if source.window is None:
        prepared.append(_apply("SpatialPadd", spatial_size=list(source.minimum)))
        prepared.append(_apply("DivisiblePadd", k=list(source.multiple)))
    prepared.append(_apply("EnsureTyped", dtype="$torch.float32"))
    inferer: dict[str, Any] = {"_target_": "SimpleInferer"}
    if source.window is not None:
        inferer = {
            "_target_": "SlidingWindowInferer",
            "roi_size": list(source.window),
            "sw_batch_size": 1,
            "overlap": source.overlap,
            "mode": "gaussian",
        }
    values = list(source.labels)
    indices = list(range(len(values)))
    renamed = _apply("MapLabelValued", "pred", orig_labels=indices, target_labels=values)
    back = {"transform": "@preprocessing", "orig_keys": "image", "nearest_interp": False, "to_tensor": True}
    written = {"output_dir": "@output_dir", "output_postfix": "seg", "separate_folder": False, "resample": False}
    dtype = "$torch.uint8" if max(values) < 256 else "$torch.int32"
    return {
        "imports": ["$import glob", "$import os", "$import torch"],
        "bundle_root": ".",
        "dataset_dir": "$@bundle_root + '/images'",
        "output_dir": "$@bundle_root + '/eval'",
        "datalist": "$[{'image': file} for file in sorted(glob.glob(os.path.join(@dataset_dir, '*.nii.gz')))]",
        "device": "$torch.device('cuda:0' if torch.cuda.is_available() else 'cpu')",
        **_describe_network(source),
        "preprocessing": {"_target_": "Compose", "transforms": prepared},
        "inferer": inferer,
        "postprocessing": {
            "_target_": "Compose",
            "transforms": [
                _apply("Invertd", "pred", **back),
                _apply("AsDiscreted", "pred", argmax=True),
                *([] if values == indices else [renamed]),
                _apply("SaveImaged", "pred", **written, output_dtype=dtype),
            ],
        },
        # What is blended are probabilities, as in volseg. Invertd finds back by the meta data, which goes through the
        # network with the image.
        "probabilities": "$lambda windows: torch.softmax(@network(windows), 1)",
        "predict": (
            "$lambda case: @postprocessing("
            "{**case, 'pred': @inferer(case['image'][None].to(@device), @probabilities)[0].cpu()})"
        ),
        "initialize": ["$torch.set_grad_enabled(False)"],
        "run": ["$[@predict(@preprocessing(case)) for case in @datalist]"],
    }


def _describe_network(source: BundleSource) -> dict[str, Any]:
    if source.script is not None:
        return {"network": "$torch.jit.load(@bundle_root + '/models/model.ts', map_location=@device).eval()"}
    parameters = {key: value for key, value in source.spec.items() if key != "name"}
    sizes: dict[str, Any] = {"in_channels": len(source.channels), "out_channels": len(source.labels)}
    kind = getattr(nets, str(source.spec["name"]))
    if "spatial_dims" in kind.__init__.__code__.co_varnames:
        sizes["spatial_dims"] = 3
    return {
        "network_def": {"_target_": f"monai.networks.nets.{source.spec['name']}", **sizes, **parameters},
        "checkpoint": "$torch.load(@bundle_root + '/models/model.pt', map_location='cpu', weights_only=True)",
        "network": "$(@network_def.load_state_dict(@checkpoint), @network_def.to(@device).eval())[1]",
    }


def _apply(transform: str, keys: str = "image", /, **parameters: Any) -> dict[str, Any]:
    """Return the entry of a MONAI transform in a bundle."""
    return {"_target_": transform, "keys": keys, **parameters}


def _translate(component: Mapping[str, Any], channels: int) -> dict[str, Any]:
    """Return the MONAI transform for a preprocessing step."""
    given = {key: value for key, value in component.items() if key != "name"}
    of_all = given.get("channels") in (None, list(range(channels)))
    match component.get("name"):
        case "Orientation":
            labels = [["L", "R"], ["P", "A"], ["I", "S"]]
            return _apply("Orientationd", axcodes=given.get("axcodes", "RAS"), labels=labels)
        case "Spacing" if given.get("thick_slices", "linear") == "linear":
            return _apply("Spacingd", pixdim=list(given["spacing"]), mode="bilinear", padding_mode="border")
        case "CropForeground" if given.get("above") is None:
            chosen = {"source_key": "image", "select_fn": "$lambda image: image != 0"}
            return _apply("CropForegroundd", **chosen, margin=given.get("margin", 0), allow_smaller=True)
        case "ZScore" if of_all:
            return _apply("NormalizeIntensityd", nonzero=given.get("nonzero", False), channel_wise=True)
        case "ClipZScore" if given.get("mean") is not None and of_all:
            low, high, mean, std = (given[key] for key in ("lower", "upper", "mean", "std"))
            scaled = {"b_min": (low - mean) / std, "b_max": (high - mean) / std}
            return _apply("ScaleIntensityRanged", a_min=low, a_max=high, **scaled, clip=True)
    raise ConfigError(
        f"a MONAI bundle cannot contain the preprocessing step {dict(component)}; supported: Orientation, Spacing "
        "(thick_slices: linear), CropForeground, ZScore, ClipZScore (with mean and std). Export an archive instead"
    )


TOLERANCE = 1e-4
"""Largest difference of logits, relative to the largest logit: other kernels sum float32 in another order."""

OPSET = 18

Sizes = Sequence[Sequence[int]]


def write_torchscript(network: nn.Module, shapes: Sizes, path: Path) -> Path:
    """Write a network as TorchScript.

    Parameters
    ----------
    network : nn.Module
        Maps (B, C, D, H, W) to logits; on the CPU, in evaluation mode.
    shapes : sequence of shapes
        Shapes (B, C, D, H, W): the network is traced on the first and compared on all.
    path : Path
        Path of the file.

    Raises
    ------
    ConfigError
        If the network cannot be traced, or the trace gives other logits.
    """
    content = trace(network, shapes)
    with replacing(path) as partial:
        partial.write_bytes(content)
    return path


def trace(network: nn.Module, shapes: Sizes) -> bytes:
    """Return a network as the bytes of a TorchScript file; see `write_torchscript`."""
    stream = io.BytesIO()
    with torch.no_grad(), _refusing("TorchScript", network), warnings.catch_warnings():
        # Newer torch warns that torch.jit is deprecated, and of Python numbers; the comparison detects wrong ones.
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.trace(network, _draw(shapes[0]), check_trace=False), stream)
        stream.seek(0)
        loaded = torch.jit.load(stream)
    require_same_logits(network, loaded, shapes, "TorchScript")
    return stream.getvalue()


def write_onnx(network: nn.Module, shapes: Sizes, path: Path) -> Path:
    """Write a network as ONNX, opset 18, for any number of volumes of the first shape's size; see `write_torchscript`.

    Raises
    ------
    ConfigError
        If the packages are not installed, the network cannot be traced, or onnxruntime gives other logits.
    """
    try:
        # Imported here: optional packages that take seconds to import.
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
            warnings.simplefilter("ignore")  # torch warns about its own use of onnxscript
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

        require_same_logits(network, run, [(batch, *shapes[0][1:]) for batch in (1, 2, 3)], "ONNX")
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
            f"{type(network).__name__} cannot be written as {kind}: {lines[0]}; export an archive instead, with which "
            "volseg predicts"
        ) from fault


def _draw(shape: Sequence[int]) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def require_same_logits(network: nn.Module, made: Callable[[Tensor], Any], shapes: Sizes, kind: str) -> None:
    """Raise unless the network and its export return the same logits for every shape."""
    for image in map(_draw, shapes):
        with torch.no_grad(), _refusing(kind, network):
            expected, found = network(image), made(image)
        if not isinstance(found, Tensor) or found.shape != expected.shape:
            raise ConfigError(f"the {kind} export returns another shape for {tuple(image.shape)}: it is not written")
        apart = float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-12))
        if not apart <= TOLERANCE:
            raise ConfigError(
                f"the {kind} export returns other logits for {tuple(image.shape)}: they differ by {apart:.2g} of the "
                f"largest logit, but at most {TOLERANCE:g} is allowed: it is not written"
            )
