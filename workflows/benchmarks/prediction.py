"""From an image file to a label map's file: ours beside MONAI's sliding window and nnU-Net's predictor, part by part.

python workflows/benchmarks/prediction.py --result workflows/benchmarks/results/prediction.json

Rows of further calls are added to the same file. Every row of every case is a process of its own, with a limit: one
that is cut or fails keeps the parts that it ended, and says so. All rows predict by one network with the same random
weights (DynUNet, 32 to 320 channels, bfloat16 or float16), windows of 128^3 that overlap by half, on a synthetic CT
from a ``.nii.gz``, resampled from 0.8 x 0.8 x 1 mm to 0.82 x 0.82 x 1.02 mm and back, which leaves the 441 windows of
512 x 512 x 600 (``--spacing file`` leaves the grid as it is). ``--network`` takes one of `networks_listed`, of 3
classes. A small volume goes first, so that libraries are loaded,
kernels compiled and recorded: ``warm_up``.

- ``ours``: what ``volseg predict`` does: `overlapped` around `Predictor.predict`, fast kernels, recorded; the image is
  prepared on the GPU. ``of_read_the_file`` is the part of ``read`` for file and checks.
- ``monai``: ``SlidingWindowInferer``, blended on the device, ``SpatialResample`` back and arg-max there.
- ``nnunet``: nnunetv2's ``predict_sliding_window_return_logits`` and its export's resampling of logits; both MONAI's
  and nnU-Net's rows read and preprocess by our reader, since they are compared for what comes after it.

``ours`` computes and resamples slab by slab in turns; ``resample`` is what the device needs for resampling, arg-max and
the way to the host (`Decision.take`), and is taken off ``compute``. Host memory is the resident set's peak over what it
was before the case, less the image in float32.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import torch
from isal import igzip_threaded
from monai.data import MetaTensor
from networks_listed import CLASSES, NETWORKS, build
from results import make_parser, read_result, write_result
from torch import nn

from volseg.data.case_store.preprocessed import prepare, preprocess
from volseg.data.cases import Task
from volseg.data.checks.reading import read_case
from volseg.fields import Case
from volseg.inference.original_grid import Decision, Prediction
from volseg.inference.predictor import Predictor
from volseg.inference.prefetching import overlapped, prepare_on, suits
from volseg.inference.writing import write_prediction
from volseg.models.networks import DynUNet
from volseg.transforms.preprocessing import Preprocessing, build_preprocessing

CASES = ("512x512x600x3", "512x512x600x15", "512x512x600x117", "512x512x1000x117")
"""Voxels of the file along its three axes, and classes."""

FILE_SPACING = (0.8, 0.8, 1.0)
NETWORK_SPACING = (0.82, 0.82, 1.02)
INTENSITIES = {"name": "ClipZScore", "lower": -900.0, "upper": 900.0, "mean": 0.0, "std": 400.0}


def main() -> None:
    """Measure every row on every case, or one row on one case in this process."""
    parser = make_parser(__doc__)
    parser.add_argument("--cases", nargs="+", default=CASES, metavar="DxHxWxK", help="default the four of the table")
    parser.add_argument("--rows", nargs="+", choices=tuple(ROWS), help="default all that are installed")
    parser.add_argument("--spacing", choices=("network", "file"), default="network", help="of the network's grid")
    parser.add_argument("--window", nargs=3, type=int, default=(128, 128, 128))
    parser.add_argument("--network", choices=NETWORKS, help="default a DynUNet of --filters")
    parser.add_argument("--filters", nargs="+", type=int, default=(32, 64, 128, 256, 320, 320))
    parser.add_argument(
        "--windows", type=int, help="that go through the network together; by default as predict chooses"
    )
    parser.add_argument("--seconds", type=float, default=90, help="limit of a row on a case, the warm-up included")
    parser.add_argument("--total", type=float, default=float("inf"), help="seconds after which no row is begun")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--scratch", type=Path, help="folder for images and label maps; by default one that is removed")
    parser.add_argument("--result", type=Path, help="JSON; rows that it has of the same settings stay")
    parser.add_argument("--only", nargs=2, metavar=("ROW", "CASE"), help="measure here; a line of JSON after each part")
    chosen = parser.parse_args()
    if chosen.only:
        measure_here(*chosen.only, chosen)
        return
    if chosen.result is None:
        parser.error("name the file for the result by --result")
    rows = chosen.rows or [row for row in ROWS if row != "nnunet" or find_spec("nnunetv2")]
    with tempfile.TemporaryDirectory() as scratch:
        chosen.scratch = chosen.scratch or Path(scratch)
        measure_all(rows, chosen)


def measure_all(rows: Sequence[str], chosen: argparse.Namespace) -> None:
    """Measure case by case; write the result after each row, since a machine may be taken away."""
    begin = time.perf_counter()
    measured = read_result(chosen.result).get("rows", [])
    for case in chosen.cases:
        for row in rows:
            if time.perf_counter() - begin > chosen.total:
                outcome: dict[str, Any] = {"failed": f"not begun: {chosen.total:.0f} s were over"}
            else:
                outcome = measure_apart(row, case, chosen)
            described = {"row": row, "case": case, "spacing": chosen.spacing, "windows": chosen.windows}
            described["network"] = chosen.network
            measured = [one for one in measured if {key: one.get(key) for key in described} != described]
            measured.append(described | outcome)
            print(json.dumps(measured[-1]), flush=True)
            write(chosen, measured)


def write(chosen: argparse.Namespace, measured: Sequence[dict[str, Any]]) -> None:
    """Write what was measured so far, and how many times the others' speed ours is."""
    timed = [one for one in measured if "seconds" in one]
    places = [", ".join(filter(None, (one.get("network"), one["case"], one["spacing"]))) for one in timed]
    seconds = {(place, one["row"]): one for place, one in zip(places, timed, strict=True)}
    faster = {}
    for (place, row), one in seconds.items():
        ours = seconds.get((place, "ours"), {})
        if row != "ours" and "failed" not in one and "failed" not in ours and ours:
            faster.setdefault(place, {})[row] = {
                part: one["seconds"][part] / ours["seconds"][part] for part in ("compute", "all")
            }
    network = {"filters": list(chosen.filters), "window": list(chosen.window), "overlap": 0.5}
    write_result(chosen.result, network=network, ours_is_faster_by=faster, rows=list(measured))


def measure_apart(row: str, case: str, chosen: argparse.Namespace) -> dict[str, Any]:
    """Measure in a process of its own; of one that is cut or fails the parts that it ended stay."""
    image = make_image(chosen.scratch, parse(case)[0])
    again = [str(Path(__file__).resolve()), *sys.argv[1:], "--scratch", str(chosen.scratch), "--only", row, case]
    words = chosen.scratch / "words"
    with words.open("wb") as told:
        process = subprocess.Popen([sys.executable, *again], stdout=subprocess.PIPE, stderr=told)
        try:
            out, _ = process.communicate(timeout=chosen.seconds)
            failed = None if process.returncode == 0 else words.read_text(encoding="utf-8", errors="replace")[-600:]
        except subprocess.TimeoutExpired:
            process.kill()
            out, _ = process.communicate()
            failed = f"cut after {chosen.seconds:.0f} s"
    lines = [line for line in out.decode("utf-8").splitlines() if line.startswith("{")]
    ended = json.loads(lines[-1]) if lines else {}
    said = [line for line in words.read_text(encoding="utf-8", errors="replace").splitlines() if "CUDA graph" in line]
    described = {"image_gib": image.stat().st_size / 2**30, "said": said, **ended}
    return described | ({} if failed is None else {"failed": failed})


def parse(case: str) -> tuple[tuple[int, int, int], int]:
    """Return the voxels and the number of classes of a case."""
    depth, height, width, classes = map(int, case.split("x"))
    return (depth, height, width), classes


def make_image(folder: Path, shape: Sequence[int]) -> Path:
    """Return a synthetic CT: an ellipse of soft tissue with noise and bone, in air that is constant."""
    path = folder / f"{'x'.join(map(str, shape))}.nii.gz"
    if path.exists():
        return path
    generator = np.random.default_rng(0)
    x, y = np.meshgrid(*(np.linspace(-1, 1, side, dtype=np.float32) for side in shape[:2]), indexing="ij")
    inside = (x / 0.85) ** 2 + (y / 0.6) ** 2
    planes = np.where(inside < 1, 40 + 60 * np.sin(9 * x) * np.cos(11 * y), -1000)
    planes = np.where((inside < 0.1) | ((inside > 0.8) & (inside < 0.9)), 700, planes)
    noise = generator.normal(0, 12, (*shape[:2], 8)) * (inside < 1)[..., None]
    voxels = np.empty(tuple(shape), dtype=np.int16, order="F")
    for w in range(shape[2]):
        voxels[:, :, w] = planes * (1 + 0.1 * np.sin(w / 25)) * (inside < 1) + noise[..., w % 8] - 1000 * (inside >= 1)
    header = nibabel.Nifti1Image(voxels[:1, :1, :1], np.diag([*FILE_SPACING, 1.0])).header
    header.set_data_shape(shape)
    header.set_data_offset(352)
    content = header.binaryblock + bytes(4) + voxels.tobytes(order="F")
    with igzip_threaded.open(path, "wb", threads=os.cpu_count() or 1) as file:
        file.write(content)
    return path


class Parts:
    """What a row has found so far; told on the output after each part, so that a row that is cut keeps it."""

    def __init__(self, warms_up: bool = False) -> None:
        self.warms_up = warms_up
        self.known: dict[str, Any] = {}
        self.seconds: dict[str, float] = {}

    def tell(self) -> None:
        """Print what is known."""
        if self.warms_up:
            return
        print(json.dumps(self.known | {"seconds": self.seconds}), flush=True)

    @contextmanager
    def part(self, name: str, device: torch.device) -> Iterator[None]:
        """Time a part, to the end of what the device was given."""
        begin = time.perf_counter()
        yield
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self.seconds[name] = time.perf_counter() - begin
        self.tell()


@contextmanager
def watched_memory(parts: Parts, device: torch.device, image_bytes: int) -> Iterator[None]:
    """Note how far the resident set and the device's memory went."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the resident set's peak begins anew
    before = read_status("VmRSS")
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    try:
        yield
    finally:
        peak = read_status("VmHWM") - before
        parts.known |= {
            "host_peak_gib": peak / 2**30,
            "image_in_float32_gib": image_bytes / 2**30,
            "host_above_image_gib": (peak - image_bytes) / 2**30,
        }
        if device.type == "cuda":
            parts.known["gpu_peak_gib"] = torch.cuda.max_memory_allocated(device) / 2**30
            parts.known["gpu_reserved_gib"] = torch.cuda.max_memory_reserved(device) / 2**30


def read_status(field: str) -> int:
    """Return a size in bytes that Linux knows of this process."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    (size,) = [line.split()[1] for line in lines if line.startswith(f"{field}:")]
    return int(size) * 1024


def measure_here(row: str, case: str, chosen: argparse.Namespace) -> None:
    """Warm up on a small volume, then predict the case; print a line of JSON after each part."""
    shape, classes = parse(case)
    device = torch.device(chosen.device, *([0] if chosen.device == "cuda" else []))
    torch.manual_seed(0)
    network = make_network(chosen, classes).to(device).eval()
    measured = ROWS[row](network, classes, device, chosen)
    # Windows enough that a batch of them is recorded.
    small = make_image(chosen.scratch, [6 * chosen.window[0], *chosen.window[1:]])
    parts = Parts()
    begin = time.perf_counter()
    measured(small, Parts(warms_up=True))
    parts.known["warm_up_seconds"] = time.perf_counter() - begin
    parts.tell()
    with watched_memory(parts, device, 4 * int(np.prod(shape))):
        begin = time.perf_counter()
        written = measured(make_image(chosen.scratch, shape), parts)
        parts.seconds["all"] = time.perf_counter() - begin
    parts.known["label_map_mib"] = written.stat().st_size / 2**20
    parts.tell()


def make_network(chosen: argparse.Namespace, classes: int) -> nn.Module:
    """Return the network of all rows, with random weights."""
    if chosen.network is not None:
        assert classes == CLASSES, "the listed networks have 3 classes"
        return build(chosen.network, tuple(chosen.window))
    filters, levels = chosen.filters, len(chosen.filters)
    return DynUNet(
        spatial_dims=3,
        in_channels=1,
        out_channels=classes,
        kernel_size=[3] * levels,
        strides=[1] + [2] * (levels - 1),
        upsample_kernel_size=[2] * (levels - 1),
        filters=list(filters),
        norm_name=("INSTANCE", {"affine": True}),
    )


def prepared(image: Path, chosen: argparse.Namespace) -> Case:
    """Read the image and bring it to the network's grid on the CPU, as MONAI's and nnU-Net's rows do."""
    return prepare({"case": "ct", "image": image}, make_preprocessing(chosen))


def make_preprocessing(chosen: argparse.Namespace) -> Preprocessing:
    """Return the way to the network's grid and intensities."""
    spacing = [] if chosen.spacing == "file" else [{"name": "Spacing", "spacing": list(NETWORK_SPACING)}]
    return build_preprocessing([*spacing, INTENSITIES])


Measure = Callable[[Path, Parts], Path]
"""From an image to the label map's file, part by part."""


def ours(network: nn.Module, classes: int, device: torch.device, chosen: argparse.Namespace) -> Measure:
    """Predict as ``volseg predict`` does."""
    predictor = Predictor(
        model=network,
        num_classes=classes,
        window=chosen.window,
        windows_per_step=chosen.windows,
        device=device,
        autocast=torch.bfloat16 if device.type == "cuda" else None,
    )

    def save(case: Case, prediction: Prediction) -> Path:
        return write_prediction(prediction.labels, case["image"], chosen.scratch / "ours.nii.gz")

    preprocessing = make_preprocessing(chosen)
    on_device = suits(preprocessing, device)
    task = Task(name="CT", root=Path(), modalities=("CT",), labels={0: "background"}, training=(), test=())

    def measure(image: Path, parts: Parts) -> Path:
        inner: dict[str, float] = {}

        def read(case: Case) -> Case:
            begin = time.perf_counter()
            checked = read_case(case, task, digests=False)
            if checked.problems:
                raise RuntimeError(checked.problems[0].message)
            inner["file"] = time.perf_counter() - begin
            read = dict(checked.case)
            return read if on_device else preprocess(read, case, preprocessing, keep_reference=False)

        def finish(read: Case) -> Case:
            return prepare_on(device, dict(read), preprocessing)

        with timed_decisions(device) as spans:
            given = [{"case": "ct", "image": image}]
            (outcome,) = overlapped(given, read, predictor.predict, save, finish=finish if on_device else None)
        if outcome.fault is not None:
            raise outcome.fault
        resample = sum(spans())
        compute = outcome.seconds["compute"] - resample
        parts.seconds.update({**outcome.seconds, "compute": compute, "resample": resample})
        parts.seconds["of_read_the_file"] = inner["file"]
        assert outcome.file is not None
        return outcome.file

    return measure


@contextmanager
def timed_decisions(device: torch.device) -> Iterator[Callable[[], list[float]]]:
    """Give the seconds that the device spends in each `Decision.take` of the block; ask after its end."""
    spans: list[tuple[Any, Any]] = []
    take = Decision.take

    def mark() -> Any:
        if device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(device))
        return event

    def timed(*arguments: Any) -> None:
        begin = mark()
        take(*arguments)
        spans.append((begin, mark()))

    def measure() -> list[float]:
        if device.type != "cuda":
            return [end - begin for begin, end in spans]
        torch.cuda.synchronize(device)
        return [begin.elapsed_time(end) / 1000 for begin, end in spans]

    Decision.take = timed  # type: ignore[method-assign]
    try:
        yield measure
    finally:
        Decision.take = take  # type: ignore[method-assign]


def monai(network: nn.Module, classes: int, device: torch.device, chosen: argparse.Namespace) -> Measure:
    """Blend the logits of all classes on the device, resample them there, and take the largest."""
    del classes
    # Named here, since the other rows need none of them.
    from monai.inferers import SlidingWindowInferer
    from monai.transforms import SpatialResample

    windows = chosen.windows or 1
    inferer = SlidingWindowInferer(chosen.window, sw_batch_size=windows, overlap=0.5, mode="gaussian")
    back = SpatialResample(mode="bilinear", padding_mode="border", align_corners=False, dtype=np.float32)

    def measure(image: Path, parts: Parts) -> Path:
        with parts.part("read", device):
            case = prepared(image, chosen)
        volume = case["image"]
        with torch.no_grad():
            with parts.part("compute", device), torch.autocast(device.type, torch.bfloat16, device.type == "cuda"):
                logits = inferer(volume.as_tensor()[None].to(device), network)[0]
            if parts.warms_up:
                return image
            with parts.part("resample", device):
                if chosen.spacing == "network":
                    placed = MetaTensor(logits, affine=volume.affine)
                    del logits
                    original = volume.meta["original_affine"]
                    logits = back(placed, dst_affine=original, spatial_size=volume.meta["spatial_shape"]).as_tensor()
                labels = logits.argmax(0).to(torch.uint8).cpu()
        with parts.part("write", device):
            return write_prediction(labels, volume, chosen.scratch / "monai.nii.gz")

    return measure


def nnunet(network: nn.Module, classes: int, device: torch.device, chosen: argparse.Namespace) -> Measure:
    """Run nnU-Net's sliding window, and the resampling of its export."""
    for variable in ("nnUNet_raw", "nnUNet_preprocessed", "nnUNet_results"):
        os.environ[variable] = str(chosen.scratch)  # looked at when nnunetv2 is imported
    # Needed for this row only, and installed by who wants it.
    from nnunetv2.imageio.simpleitk_reader_writer import SimpleITKIO
    from nnunetv2.inference.export_prediction import convert_predicted_logits_to_segmentation_with_correct_shape
    from nnunetv2.inference.predict_from_raw_data import nnUNetPredictor
    from nnunetv2.utilities.plans_handling.plans_handler import PlansManager

    plans = PlansManager(nnunet_plans(chosen))
    configuration = plans.get_configuration("3d_fullres")
    labels = {"background": 0} | {f"structure {value}": value for value in range(1, classes)}
    dataset = {"channel_names": {"0": "CT"}, "labels": labels, "numTraining": 1, "file_ending": ".nii.gz"}
    predictor = nnUNetPredictor(
        tile_step_size=0.5, use_mirroring=False, perform_everything_on_device=device.type == "cuda", device=device
    )
    predictor.allow_tqdm = False
    predictor.manual_initialization(network, plans, configuration, None, dataset, "nnUNetTrainer", None)

    def measure(image: Path, parts: Parts) -> Path:
        with parts.part("read", device):
            volume = prepared(image, chosen)["image"]
        shape = tuple(volume.meta["spatial_shape"])
        properties = {
            "spacing": FILE_SPACING,
            "shape_before_cropping": shape,
            "shape_after_cropping_and_before_resampling": shape,
            "bbox_used_for_cropping": [[0, side] for side in shape],
            "sitk_stuff": {"spacing": FILE_SPACING[::-1], "origin": (0.0,) * 3, "direction": tuple(np.eye(3).ravel())},
        }
        with torch.no_grad():
            with parts.part("compute", device):
                logits = predictor.predict_sliding_window_return_logits(volume.as_tensor())
            if parts.warms_up:  # resampling of many classes on the CPU is nothing to warm up
                return image
            with parts.part("resample", device):
                found = convert_predicted_logits_to_segmentation_with_correct_shape(
                    logits.cpu(), plans, configuration, predictor.label_manager, properties
                )
        path = chosen.scratch / "nnunet.nii.gz"
        with parts.part("write", device):
            SimpleITKIO().write_seg(found, str(path), properties)
        return path

    return measure


def nnunet_plans(chosen: argparse.Namespace) -> dict[str, Any]:
    """Return of nnU-Net's plans file what a prediction reads."""
    resampling = {"is_seg": False, "order": 1, "order_z": 0, "force_separate_z": None}
    configuration = {
        "architecture": {"network_class_name": "given", "arch_kwargs": {}, "_kw_requires_import": []},
        "batch_size": 2,
        "patch_size": list(chosen.window),
        "spacing": list(NETWORK_SPACING if chosen.spacing == "network" else FILE_SPACING),
        "resampling_fn_probabilities": "resample_data_or_seg_to_shape",
        "resampling_fn_probabilities_kwargs": resampling,
    }
    return {
        "dataset_name": "Dataset001_CT",
        "plans_name": "nnUNetPlans",
        "transpose_forward": [0, 1, 2],
        "transpose_backward": [0, 1, 2],
        "configurations": {"3d_fullres": configuration},
        "label_manager": "LabelManager",
    }


ROWS: dict[str, Callable[[nn.Module, int, torch.device, argparse.Namespace], Measure]] = {
    "ours": ours,
    "monai": monai,
    "nnunet": nnunet,
}

if __name__ == "__main__":
    main()
