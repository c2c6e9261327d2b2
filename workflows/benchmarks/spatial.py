"""Measure spatial model parallelism: speed, scaling, memory, and the plain network beside it.

    python workflows/benchmarks/spatial.py --gpus 1 2 4 --output results.json

Every measurement is a torchrun of its own with a time limit, so that one failure loses one row. A row is forward, loss, backward and
optimizer step in bf16 at batch 1, the median of several steps. The JSON is rewritten after every row.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from volseg.parallel import ModelParallel
from volseg.parallel.sharding.graphs import CapturedStep
from volseg.parallel.sharding.scatter import from_slab, slab_shape

CLASSES = 3


def build(name: str) -> nn.Module:
    """Return a stock network of MONAI."""
    from monai.networks.nets import DynUNet, VNet

    if name == "dynunet":
        kernels, strides = [3] * 5, [1, 2, 2, 2, 2]
        return DynUNet(3, 1, CLASSES, kernels, strides, strides[1:], filters=[32, 64, 128, 256, 320])
    net = VNet(out_channels=CLASSES)
    for module in net.modules():  # the plain network and ours would draw different masks
        if isinstance(module, nn.Dropout3d):
            module.p = 0.0
    return net


def measure(row: dict[str, Any]) -> dict[str, Any]:
    """Return time per step, memory and loss of one configuration, in this process group."""
    from monai.losses import DiceCELoss

    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    torch.manual_seed(0)
    net = build(row["net"]).to(device)
    shape = tuple(row["shape"])
    plain = row["kind"] == "plain"
    if plain:
        layout = torch.channels_last_3d if row.get("channels_last") else torch.contiguous_format
        model: nn.Module = net.to(memory_format=layout)
        own = (1, 1, *shape)
    else:
        model = ModelParallel(
            net, strategy="spatial", checkpoint=row.get("checkpoint"), channels_last=row.get("channels_last")
        )
        own = slab_shape(model, (1, 1, *shape))
    # Each process makes its own planes: no process could hold a whole large volume.
    image: Any = torch.randn(own, device=device)
    label: Any = torch.randint(0, CLASSES, own, device=device, dtype=torch.uint8)
    if not plain:
        image, label = (from_slab(model, part, (1, 1, *shape)) for part in (image, label))  # type: ignore[arg-type]
    objective = DiceCELoss(softmax=True, to_onehot_y=True)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9, nesterov=True)

    def step(image: Any, label: Any) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16):
            output = model(image)
        loss = objective(output.float(), label)
        loss.backward()
        optimizer.step()
        return loss.detach()

    run: Any = CapturedStep(model, step) if row.get("graph") else step  # type: ignore[arg-type]
    for _ in range(5):
        loss = run(image, label)
    first_loss = float(loss)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(row.get("steps", 8)):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        loss = run(image, label)
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    # A graph's memory is in its private pool, reserved rather than allocated.
    peak = torch.cuda.memory_reserved() if row.get("graph") else torch.cuda.max_memory_allocated()
    voxels = shape[0] * shape[1] * shape[2]
    world = int(os.environ["WORLD_SIZE"])
    median = statistics.median(times)
    return {
        "ms": median,
        "ms_min": min(times),
        "ms_all": times,
        "mvoxel_per_s": voxels / median / 1e3,
        "peak_gib": peak / 2**30,
        "bytes_per_voxel": peak * world / voxels,
        "loss": first_loss,
        "loss_last": float(loss),
    }


def worker(row: dict[str, Any], path: Path) -> None:
    """Run one row on this rank; the first rank writes it."""
    warnings.simplefilter("ignore")
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = bool(row.get("cudnn_benchmark", False))
    result = measure(row)
    if int(os.environ["RANK"]) == 0:
        path.write_text(json.dumps(result))
    if dist.is_initialized():
        dist.destroy_process_group()
    os._exit(0)


def rows(gpus: list[int], chosen: set[str]) -> list[dict[str, Any]]:
    """Return what to measure, the most telling first."""
    found: list[dict[str, Any]] = []
    for net in ("dynunet", "vnet"):
        found += [
            {"part": "plain", "kind": "plain", "net": net, "gpus": 1, "shape": [128] * 3, "channels_last": last}
            for last in (False, True)
        ]
    for net in ("dynunet", "vnet"):
        for count in gpus:
            common = {"kind": "spatial", "net": net, "gpus": count}
            found += [
                {"part": "weak128", **common, "shape": [128 * count, 128, 128], "graph": True},
                {"part": "weak320", **common, "shape": [160 * count, 320, 320]},
                {"part": "strong256", **common, "shape": [256] * 3, "graph": True},
            ]
            found.append({"part": "eager128", **common, "shape": [128 * count, 128, 128]})
            found.append({"part": "checkpoint", **common, "shape": [160 * count, 320, 320], "checkpoint": "all"})
    return [row for row in found if not chosen or row["part"] in chosen]


def main() -> None:
    """Run all rows and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", type=int, nargs="+", default=[torch.cuda.device_count()])
    parser.add_argument("--parts", nargs="*", default=[])
    parser.add_argument("--nets", nargs="*", default=["dynunet", "vnet"])
    parser.add_argument("--rows", help="JSON list of rows to run instead")
    parser.add_argument("--limit", type=float, default=60, help="seconds per row")
    parser.add_argument("--total", type=float, default=500, help="seconds after which no row is started")
    parser.add_argument("--output", type=Path, default=Path("workflows/benchmarks/results/spatial.json"))
    arguments = parser.parse_args()
    wanted = json.loads(arguments.rows) if arguments.rows else rows(arguments.gpus, set(arguments.parts))
    report: dict[str, Any] = {
        "command": " ".join(sys.argv),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "date": time.strftime("%Y-%m-%d"),
        "rows": [],
    }
    begin = time.time()
    for number, row in enumerate(row for row in wanted if row["net"] in arguments.nets):
        if time.time() - begin > arguments.total:
            row["error"] = "not started: out of time"
            report["rows"].append(row)
            continue
        path = arguments.output.with_suffix(f".{number}.tmp")
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(row["gpus"])]
        command += ["--master-port", str(29600 + number), __file__, "--worker", json.dumps(row), str(path)]
        started = time.time()
        try:
            done = subprocess.run(
                command, timeout=row.get("limit", arguments.limit), capture_output=True, text=True, check=False
            )
            result = json.loads(path.read_text()) if path.exists() else {"error": done.stderr[-3000:]}
            path.unlink(missing_ok=True)
        except subprocess.TimeoutExpired:
            result = {"error": "took too long"}
        row |= result | {"wall_s": time.time() - started}
        report["rows"].append(row)
        arguments.output.write_text(json.dumps(report, indent=1))
        told = {key: value for key, value in row.items() if key not in ("ms_all", "kind", "steps")}
        told |= {key: round(value, 3) for key, value in told.items() if isinstance(value, float)}
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    if "--worker" in sys.argv:
        worker(json.loads(sys.argv[-2]), Path(sys.argv[-1]))
    main()
