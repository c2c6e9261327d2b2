"""What ``pipeline.py`` measures: the networks, the wrappers around them, and one row of the results."""

import contextlib
import logging
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from workers import Row

FIFTY_EPOCHS = 450
"""Batches: nine per epoch, as 260 volumes make of 32."""


WARM = {"graphs": 6, "auto": 6, "eager": 3}
"""Steps before those that are timed: batches are observed, and recorded, in them."""


class Block(nn.Module):
    """One of many equal residual blocks."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv3d(channels, channels, 3, padding=1), nn.InstanceNorm3d(channels, affine=True)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` plus an activated, normalised convolution of it."""
        return x + F.leaky_relu(self.norm(self.conv(x)), 0.01)


class Tutorial(nn.Module):
    """The tutorial's two halves, with or without its pipeline [1]_."""

    def __init__(self, split_size: int | None) -> None:
        super().__init__()
        from torchvision.models import resnet50

        net = resnet50()
        self.front = nn.Sequential(net.conv1, net.bn1, net.relu, net.maxpool, net.layer1, net.layer2).to("cuda:0")
        self.back = nn.Sequential(net.layer3, net.layer4, net.avgpool).to("cuda:1")
        self.fc, self.split_size = net.fc.to("cuda:1"), split_size

    def forward(self, x: Tensor) -> Tensor:
        """Hand micro-batch after micro-batch from one half to the other."""
        pieces = iter(x.split(self.split_size or len(x)))
        waiting = self.front(next(pieces)).to("cuda:1")
        outputs = []
        for piece in pieces:
            outputs.append(self.fc(self.back(waiting).flatten(1)))
            waiting = self.front(piece).to("cuda:1")
        outputs.append(self.fc(self.back(waiting).flatten(1)))
        return torch.cat(outputs)


def build(name: str) -> nn.Module:
    """Return a network by the benchmark's name for it."""
    if name.startswith("blocks"):
        return nn.Sequential(*(Block(int(name.removeprefix("blocks"))) for _ in range(32)))
    if name == "vnet-eisen":
        from eisen.models.segmentation import VNet as EisenVNet

        return EisenVNet(1, 2, outputs_activation="none")
    if name == "resnet50":
        from torchvision.models import resnet50

        return resnet50()
    from monai.networks.nets import SwinUNETR, VNet

    if name == "swin":
        return SwinUNETR(1, 2, feature_size=48)
    net = VNet(out_channels=2)
    for module in net.modules():  # every wrapper would draw masks of its own
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
    return net


def wrap(row: Row, net: nn.Module) -> nn.Module:
    """Put the network on its devices, by the row's kind."""
    gpus, kind = list(range(row["gpus"])), row["kind"]
    if kind == "plain":
        return net.cuda()
    if kind == "data parallel":
        return nn.DataParallel(net.cuda(), gpus)
    if kind == "eisen":
        from eisen.utils import ModelParallel as EisenModelParallel

        return EisenModelParallel(net.cuda(), row["split"], gpus)
    from volseg.parallel import ModelParallel

    if kind == "spatial":
        return ModelParallel(net.cuda(), strategy="spatial", devices=gpus)
    record = {"eager": False, "graphs": True}.get(row["launch"], "auto")
    return ModelParallel(net.cuda(), strategy="pipeline", devices=gpus, split_size=row["split"], record=record)


def batch_of(row: Row) -> tuple[Tensor, Tensor]:
    """Return random images and labels on the current GPU."""
    shape = row["shape"]
    image = torch.randn(shape, device="cuda")
    if row["net"] == "resnet50":
        return image, torch.randint(0, 1000, shape[:1], device="cuda")
    return image, torch.randint(0, 2, (shape[0], *shape[2:]), device="cuda")


def objective(row: Row, output: Any, label: Tensor) -> Tensor:
    """Return a loss that costs little."""
    if row["kind"] == "spatial":
        output = output.full_tensor()
    if row["net"].startswith("blocks"):
        return output.square().mean()
    return F.cross_entropy(output.float(), label.to(output.device))


def synchronize(gpus: int) -> None:
    """Wait for every GPU of a row."""
    for index in range(gpus):
        torch.cuda.synchronize(index)


def step_of(row: Row, model: nn.Module) -> Callable[[], float]:
    """Return a function that trains one step and returns its milliseconds."""
    image, label = batch_of(row)
    made: list[torch.optim.Optimizer] = []
    # A replica has one GPU of its own.
    wait = torch.cuda.synchronize if row["kind"] == "ddp" else lambda: synchronize(row["gpus"])

    def step() -> float:
        wait()
        start = time.perf_counter()
        output = model(image)
        loss = objective(row, output, label)
        if not made:  # eisen-core exchanges parameters in its first forward
            made.append(torch.optim.SGD(list(model.parameters()) or [image.new_zeros(1).requires_grad_()], lr=1e-4))
        made[0].zero_grad()
        loss.backward()
        made[0].step()
        wait()
        return (time.perf_counter() - start) * 1e3

    return step


def measure(row: Row) -> Row:
    """Train some steps; return time, memory and, for ours, how near the bound it came."""
    if row["kind"] == "ddp":
        return measure_replicas(row)
    torch.manual_seed(0)
    if row.get("fraction"):
        for index in range(row["gpus"]):
            torch.cuda.set_per_process_memory_fraction(row["fraction"], index)
    start = time.perf_counter()
    model = Tutorial(row["split"]) if row["kind"] == "tutorial" else wrap(row, build(row["net"]))
    step = step_of(row, model)
    with messages() as said:
        for _ in range(row.get("warm", WARM.get(row.get("launch", ""), 3))):
            step()
    setup_s = time.perf_counter() - start
    for index in range(row["gpus"]):
        torch.cuda.reset_peak_memory_stats(index)
    times = [step() for _ in range(row.get("steps", 5))]
    found: Row = {
        **speed(row, times),
        "setup_s": setup_s,
        "peak_gib": peak_gib(row["gpus"]),
        "reserved_gib": [torch.cuda.max_memory_reserved(i) / 2**30 for i in range(row["gpus"])],
    }
    if row["kind"] == "ours":
        found |= explain(model, row, found["ms"]) | {"said": said}
    if row.get("timeline"):
        found["timeline"] = timeline(step, row["gpus"])
    return found


def peak_gib(gpus: int) -> list[float]:
    """Return the most memory that tensors and recordings held on each GPU.

    The allocator counts what a recording uses between its kernels as free; but nothing else may use it.
    """
    peaks = [torch.cuda.max_memory_allocated(index) for index in range(gpus)]
    for segment in torch.cuda.memory_snapshot():
        if segment.get("segment_pool_id", (0, 0)) != (0, 0) and segment["device"] < gpus:
            peaks[segment["device"]] += segment["total_size"] - segment["allocated_size"]
    return [peak / 2**30 for peak in peaks]


def speed(row: Row, times: list[float]) -> Row:
    """Return the median of some steps, and what follows from it."""
    ms = statistics.median(times)
    found = {"ms": ms, "ms_all": times, "samples_per_s": row["shape"][0] / ms * 1e3}
    if row["shape"] == [32, 1, 64, 64, 64]:
        found["fifty_epochs_s_extrapolated"] = FIFTY_EPOCHS * ms / 1e3
    return found


@contextlib.contextmanager
def messages() -> Iterator[list[str]]:
    """Collect what the pipeline logs: its choices, and why something was refused."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage()[:500])  # type: ignore[method-assign]
    logger = logging.getLogger("volseg.parallel.pipeline")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)


def measure_replicas(row: Row) -> Row:
    """Train DistributedDataParallel, one process per GPU, each with its share of the batch."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(replica, (row, folder), nprocs=row["gpus"])
        found = [torch.load(Path(folder, str(rank)), weights_only=True) for rank in range(row["gpus"])]
    # A step ends when the slowest replica's does.
    times = [max(step) for step in zip(*(times for times, _ in found), strict=True)]
    return speed(row, times) | {"peak_gib": [gib for _, gib in found]}


def replica(rank: int, row: Row, folder: str) -> None:
    """Be one of the processes; leave the times of the steps in ``folder``."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.cuda.set_device(rank)
    store = torch.distributed.FileStore(str(Path(folder, "store")), row["gpus"])
    torch.distributed.init_process_group("nccl", store=store, rank=rank, world_size=row["gpus"])
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(build(row["net"]).cuda(), [rank])
    share = row["shape"][0] // row["gpus"]
    step = step_of({**row, "shape": [share, *row["shape"][1:]]}, model)
    for _ in range(3):
        step()
    torch.cuda.reset_peak_memory_stats()
    times = [step() for _ in range(5)]
    torch.save((times, torch.cuda.max_memory_allocated() / 2**30), Path(folder, str(rank)))
    torch.distributed.destroy_process_group()


def explain(model: Any, row: Row, ms: float) -> Row:
    """Compare with the bound of the measured partition."""
    partition = model.partition
    micro_batches = -(-row["shape"][0] // partition.samples)
    bound_ms = (micro_batches + len(partition.stages) - 1) * partition.slowest_ms
    return {
        "recorded": model.strategy.is_replaying,
        "micro_batches": micro_batches,
        "stage_ms": [stage.ms for stage in partition.stages],
        "layers_ms": partition.total_ms,
        "heaviest": [*partition.heaviest.modules, partition.heaviest.ms],
        "bound_gain": partition.bound(micro_batches),
        "bound_ms": bound_ms,
        "of_bound": bound_ms / ms,
        "table": str(partition),
    }


def timeline(step: Callable[[], float], gpus: int, bins: int = 200) -> list[list[float]]:
    """Return, per GPU, the share of each of ``bins`` intervals of one step in which a kernel ran."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        step()
    spans = [
        (event.device_index, event.time_range.start, event.time_range.end)
        for event in profile.events()
        if str(event.device_type).endswith("CUDA") and not event.name.startswith(("Memcpy", "Memset"))
    ]
    first, last = min(span[1] for span in spans), max(span[2] for span in spans)
    width = (last - first) / bins
    busy = [[0.0] * bins for _ in range(gpus)]
    for device, begin, end in spans:
        for place in range(int((begin - first) / width), min(bins, int((end - first) / width) + 1)):
            low = first + place * width
            busy[device][place] += max(0.0, min(end, low + width) - max(begin, low)) / width
    return [[round(min(1.0, share), 3) for share in row] for row in busy]


def check(row: Row) -> Row:
    """Compare training steps, from eager to recorded, with the plain network's by micro-batches, in float64."""
    torch.manual_seed(0)
    net = build(row["net"]).double().cuda().eval()
    plain = build(row["net"]).double().cuda().eval()
    plain.load_state_dict(net.state_dict())
    model: Any = wrap(row, net)
    worst = 0.0
    for _ in range(11):  # eager, recorded, recorded in two lanes
        image = torch.randn(row["shape"], device="cuda:0", dtype=torch.float64)
        actual, expected = model(image), torch.cat([plain(piece) for piece in image.split(row["split"])])
        worst = max(worst, (actual - expected).abs().max().item())
        actual.square().mean().backward()
        expected.square().mean().backward()
    pairs = [
        (p.grad, q.grad.to(p.device))
        for p, q in zip(net.parameters(), plain.parameters(), strict=True)
        if p.grad is not None and q.grad is not None
    ]
    # A bias before a norm has a gradient of nothing but round-off: the largest of all gives the scale.
    scale = max(theirs.abs().max().item() for _, theirs in pairs)
    gradient = max((mine - theirs).abs().max().item() for mine, theirs in pairs) / scale
    recorded = model.strategy.is_replaying
    return {"largest_output_error": worst, "largest_relative_gradient_error": gradient, "recorded": recorded}
