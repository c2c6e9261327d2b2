"""The rows of ``networks.py``, and what the processes of one do: build a step, wait for their turns, time it.

The process reads a row and answers how long its first steps took. For ``turn`` it runs some steps and answers
``{"ms": ...}``; for ``kernels`` it writes those of two steps.
"""

import gc
import gzip
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from monai.losses import DiceCELoss
from networks_listed import CLASSES, build, find_logits
from results import ROW, WIDTH, Bar, draw_bars, text, write
from torch import Tensor, nn
from workers import Row, serve, take_place

from volseg.device import fusions
from volseg.device.torch_internals import tree_map
from volseg.losses.dice_cross_entropy import Terms, dice_cross_entropy
from volseg.parallel import CompiledNetwork, FastKernels, ModelParallel
from volseg.parallel.batches import from_slab, slab_shape
from volseg.parallel.recorded_step import RecordedStep
from volseg.parallel.spatial import Spatial
from volseg.parallel.verification.comparison import compare_values, default_objective, eager_step, observe

__all__ = ["BY_DEFAULT", "ROWS", "MeasuredStep", "Row", "check_exactness", "compare", "plot"]

Rows = Mapping[str, Mapping[str, Any]]

COLOURS = {"plain": "#b5b5b5", "compiled": "#d9a441", "ours": "#1b6ca8"}

DEFAULT, OVERHEAD, TRIALS = "default", "reduce-overhead", "max-autotune-no-cudagraphs"

ROWS: dict[str, Row] = {
    "plain": {"kind": "plain"},
    "plain, channels last": {"kind": "plain", "channels_last": True},
    "compiled": {"kind": "plain", "compile": DEFAULT},
    "compiled, channels last": {"kind": "plain", "compile": DEFAULT, "channels_last": True},
    "compiled, reduce-overhead": {"kind": "plain", "compile": OVERHEAD},
    "compiled, reduce-overhead, channels last": {"kind": "plain", "compile": OVERHEAD, "channels_last": True},
    "compiled with the loss, channels last": {
        "kind": "plain", "compile": DEFAULT, "channels_last": True, "with_loss": True,
    },
    "compiled, max-autotune": {"kind": "plain", "compile": TRIALS},
    "compiled, max-autotune, channels last": {"kind": "plain", "compile": TRIALS, "channels_last": True},
    "ours": {"kind": "ours"},
    "ours, recorded": {"kind": "ours", "record": True},
    "ours, recorded, torch's attention": {"kind": "ours", "record": True, "without": ["attention", "layer norms"]},
    "recorded, compiled": {"kind": "compiled", "record": True},
    "recorded, compiled, channels last": {"kind": "compiled", "record": True, "channels_last": True},
    "exactness": {"kind": "exactness"},
    "exactness on 2 GPUs": {"kind": "exactness", "gpus": 2},
    "ours, recomputed": {"kind": "slabs", "checkpoint": "all"},
    "ours, by tiles": {"kind": "slabs", "checkpoint": "tiled"},
    "ours on each GPU alone": {"kind": "ours", "record": True, "gpus": 2},
    "ours on each of 4 GPUs alone": {"kind": "ours", "record": True, "gpus": 4},
    "ours on each of 8 GPUs alone": {"kind": "ours", "record": True, "gpus": 8},
}  # fmt: skip
"""By name. Rows of as many GPUs are compared with one another.

``recorded, compiled`` is ``training.kernels: compiled``: the network by torch.compile, the loss and the rest of the
step as in ``ours``, and all of it one CUDA graph.
"""

for _gpus in (2, 4, 8):
    ROWS[f"ours on {_gpus} GPUs"] = {"kind": "slabs", "record": True, "gpus": _gpus}
    ROWS[f"ours on {_gpus} GPUs, eager"] = {"kind": "slabs", "gpus": _gpus}
    ROWS[f"ours on {_gpus} GPUs, recomputed"] = {"kind": "slabs", "checkpoint": "all", "gpus": _gpus}

RARE = ("max-autotune", "torch's attention", "recomputed", "by tiles", "GPUs, eager")
BY_DEFAULT = tuple(name for name in ROWS if not any(words in name for words in RARE))

WARM_UP = 5
"""Steps before any that is timed: kernels are compiled, chosen and recorded in them."""

WINDOW_S = 0.4
"""So long a turn lasts, but for at least three steps."""


def answer(messages: Iterator[Row]) -> Iterator[Row]:
    """Build a row's step, and run it whenever it is its turn."""
    row = next(messages)
    device = find_device(row)
    if row["kind"] == "exactness":
        yield check_exactness(row, device)
        return
    with fusions.without(*row.get("without", ())):
        step = MeasuredStep(row, device)
        yield step.warm_up()
        for message in messages:
            if message["asks"] == "turn":
                yield {"ms": step.time()}
            else:
                path = Path(f"{message['file']}_rank{row['number']}.json.gz")
                step.write_kernels(path)
                yield {"kernels": str(path)}


def find_device(row: Row) -> torch.device:
    """Return the device of this process, which its row names."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = row["kind"] != "exactness"
    take_place(row)
    if row["device"] == "cpu":
        torch.set_num_threads(1)
        return torch.device("cpu")
    device = torch.device("cuda", row["number"] if row.get("gpus", 1) > 1 else row["gpu"])
    torch.cuda.set_device(device)
    return device


class LogitsAlone(nn.Module):
    """A network without its coarser outputs, which the loss leaves out: a compiled one would give them gradients."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, image: Tensor) -> Tensor:
        """Return the finest logits."""
        return find_logits(self.net(image))


class MeasuredStep:
    """Forward, loss, backward and SGD in bfloat16 on one volume that stays the same, as a row says."""

    def __init__(self, row: Row, device: torch.device) -> None:
        self.row, self.device = row, device
        self.is_gpu = device.type == "cuda"
        processes = row.get("gpus", 1)
        whole = (1, 1, row["sides"][0] * (processes if row["kind"] == "slabs" else 1), *row["sides"][1:])
        net = build(row["network"], whole[2:], small=row["small"]).to(device).train()
        self.model = self._place(net)
        self.run: Callable[..., Tensor] = self._make_step()
        generator = torch.Generator(device).manual_seed(1)
        own = slab_shape(self.model, whole) if row["kind"] == "slabs" else whole  # type: ignore[arg-type]
        self.image: Any = torch.randn(own, device=device, generator=generator)
        self.label: Any = torch.randint(0, CLASSES, own, device=device, dtype=torch.uint8, generator=generator)
        if row["kind"] == "slabs":
            parts = (self.image, self.label)
            self.image, self.label = (from_slab(self.model, part, whole) for part in parts)  # type: ignore[arg-type]
        elif row.get("channels_last"):
            self.image = self.image.contiguous(memory_format=torch.channels_last_3d)
        if processes > 1 and not torch.distributed.is_initialized():
            torch.distributed.init_process_group(device_id=device if self.is_gpu else None)
        self.records = bool(row.get("record")) and self.is_gpu  # there is nothing to record on a CPU
        if self.records:
            self.run = RecordedStep(self.model, self.run)  # type: ignore[arg-type]
        self.steps = 3

    def _place(self, net: nn.Module) -> nn.Module:
        if self.row["kind"] == "ours":
            return FastKernels(net, self.device)
        if self.row["kind"] == "slabs":
            strategy = Spatial(checkpoint=self.row.get("checkpoint"))
            return ModelParallel(
                net, strategy=strategy, devices=[self.device] if self.row.get("gpus", 1) == 1 else None
            )
        if self.row.get("channels_last"):
            net.to(memory_format=torch.channels_last_3d)  # type: ignore[call-overload]
        return CompiledNetwork(LogitsAlone(net)) if self.row["kind"] == "compiled" else net

    def _make_step(self) -> Callable[[Any, Any], Tensor]:
        optimizer = torch.optim.SGD(self.model.parameters(), 1e-3, momentum=0.9, nesterov=True)
        monai_loss, plain = DiceCELoss(softmax=True, to_onehot_y=True), self.row["kind"] == "plain"

        def run_forward(image: Any, label: Any) -> Tensor:
            with torch.autocast(self.device.type, torch.bfloat16):
                logits = find_logits(self.model(image))
            return monai_loss(logits.float(), label) if plain else dice_cross_entropy(logits, label, Terms())

        mode = self.row.get("compile")
        if mode is not None and self.row.get("with_loss"):
            run_forward = torch.compile(run_forward, mode=mode)
        elif mode is not None:
            self.model = torch.compile(self.model, mode=mode)  # type: ignore[assignment]

        def step(image: Any, label: Any) -> Tensor:
            if mode == OVERHEAD:
                torch.compiler.cudagraph_mark_step_begin()
            optimizer.zero_grad(set_to_none=True)
            loss = run_forward(image, label)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    def warm_up(self) -> Row:
        """Run until nothing is compiled, chosen or recorded any more; return memory, the loss, and seconds of it."""
        begin = time.perf_counter()
        used = 0
        for number in range(WARM_UP):
            if self.records and number == self.run.warm_up:  # type: ignore[attr-defined]  # this call records
                torch.cuda.reset_peak_memory_stats(self.device)
            loss = self.run(self.image, self.label)
        first = float(loss)
        told: Row = {"warm_up_s": time.perf_counter() - begin, "loss": first, "recorded": self.records}
        if self.records and self.run.refused is not None:  # type: ignore[attr-defined]
            raise RuntimeError(f"nothing was recorded: {self.run.refused}")  # type: ignore[attr-defined]
        if self.is_gpu:
            used = torch.cuda.max_memory_allocated(self.device)
            if not self.records and self.row.get("compile") != OVERHEAD:  # what choosing kernels took is no step's
                self._give_back()
                torch.cuda.reset_peak_memory_stats(self.device)
                self.run(self.image, self.label)
                used = torch.cuda.max_memory_allocated(self.device)
            voxels = self.row["sides"][0] * self.row["sides"][1] * self.row["sides"][2]
            reserved = torch.cuda.memory_reserved(self.device)
            told |= {"used_bytes_per_voxel": used / voxels, "reserved_bytes_per_voxel": reserved / voxels}
        begin = time.perf_counter()
        self.run(self.image, self.label)
        self._wait()
        self.steps = max(3, min(50, int(WINDOW_S / (time.perf_counter() - begin))))
        if not self.is_gpu:
            self.steps = 1
        if self.row.get("gpus", 1) > 1:  # all processes take the same number of steps
            agreed = torch.tensor([self.steps], device=self.device)
            torch.distributed.all_reduce(agreed, torch.distributed.ReduceOp.MIN)
            self.steps = int(agreed)
        self._give_back()
        return told

    def time(self) -> float:
        """Return the milliseconds of a step, the mean over a turn: the device is waited for at its ends only."""
        self.run(self.image, self.label)  # memory that was given back for the others' turns is taken again
        self._wait()
        begin = time.perf_counter()
        for _ in range(self.steps):
            self.run(self.image, self.label)
        self._wait()
        ms = (time.perf_counter() - begin) / self.steps * 1e3
        self._give_back()
        return ms

    def write_kernels(self, path: Path) -> None:
        """Write the kernels of two steps."""
        self.run(self.image, self.label)
        self._wait()
        profile(self.run, self.image, self.label, path)

    def _wait(self) -> None:
        if self.row.get("gpus", 1) > 1:
            torch.distributed.barrier()
        if self.is_gpu:
            torch.cuda.synchronize(self.device)

    def _give_back(self) -> None:
        """Leave the memory to the others, whose turn it is."""
        gc.collect()
        if self.is_gpu:
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()


def check_exactness(row: Row, device: torch.device) -> Row:
    """Return how far ours lies from the plain network in float32, and each of them from float64; in bfloat16 as well.

    Two steps of gradient descent: outputs, every gradient, buffers and parameters; the largest error relative to the
    largest value of its tensor. On volumes of 64 voxels a side at most: float64 takes much memory, and is slow. In
    bfloat16 (autocast) ours should be as far from float64 as the plain network is.
    """
    sides = tuple(min(64, side) for side in row["sides"])
    image = torch.randn(1, 1, *sides, generator=torch.Generator().manual_seed(2))

    def look(kind: str, dtype: torch.dtype, *, half: bool = False) -> list[dict[str, Any]]:
        net = build(row["network"], sides, small=row["small"]).to(device, dtype).train()
        model = net if kind == "plain" else wrap(net)
        eager = eager_step(model, default_objective)

        def step(arguments: Sequence[Any]) -> Any:
            with torch.autocast(device.type, torch.bfloat16, enabled=half):
                return eager(arguments)

        seen = observe(model, [image.to(device, dtype)], step, steps=2, leaves=False)
        named = [{name: value for name, value in values.items() if isinstance(value, Tensor)} for values in seen]
        return tree_map(lambda leaf: leaf.float() if isinstance(leaf, Tensor) else leaf, named)

    def wrap(net: nn.Module) -> nn.Module:
        return ModelParallel(net, strategy="spatial") if row.get("gpus", 1) > 1 else FastKernels(net, device)

    plain, ours = look("plain", torch.float32), look("ours", torch.float32)
    found: Row = {"compared_sides": sides, "ours_to_plain": worst(plain, ours)}
    if row.get("to_float64", True):
        exact = look("plain", torch.float64)
        found |= {"plain_to_float64": worst(exact, plain), "ours_to_float64": worst(exact, ours)}
        for kind in ("plain", "ours"):
            found[f"{kind}_in_bfloat16_to_float64"] = worst(exact, look(kind, torch.float32, half=True))
    return found


def worst(theirs: Sequence[dict[str, Any]], ours: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the largest error of the outputs, of the gradients, and of all else, in either step."""
    found = {"outputs": 0.0, "gradients": 0.0, "others": 0.0}
    for one, other in zip(theirs, ours, strict=True):
        for name, error in compare_values(one, other).errors.items():
            group = {"output": "outputs", "gradient": "gradients"}.get(name.partition(" ")[0], "others")
            found[group] = error if error != error else max(found[group], error)
    return found


def profile(run: Any, image: Any, label: Any, path: Path) -> None:
    """Write the kernels of two steps on this rank: start and duration (us), stream, name and grid."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        run(image, label)
        run(image, label)
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    kernels = [
        (round(e["ts"], 1), round(e["dur"], 2), e["args"].get("stream"), e["name"][:90], e["args"].get("grid"))
        for e in events
        if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    ]
    path.write_bytes(gzip.compress(json.dumps(sorted(kernels)).encode()))


def compare(networks: Mapping[str, Mapping[str, Rows]]) -> list[dict[str, Any]]:
    """Return a row for each network and size: speeds in Mvoxel/s, the best of each kind, and ratios.

    What is compiled inside of our recorded step counts neither as the compiler's best nor as ours.
    """
    compared = []
    for name, sizes in networks.items():
        for sides, rows in sizes.items():
            speeds = {row: told["mvoxel_per_s"] for row, told in rows.items() if "mvoxel_per_s" in told}
            found: dict[str, Any] = {"network": name, "sides": sides}
            best = {kind: _find_best(speeds, kind) for kind in ("plain", "compiled")}
            for kind, row in best.items():
                if row is not None:
                    found |= {kind: speeds[row], f"{kind} by": row}
            found["ours"] = max((speeds[row] for row in ("ours", "ours, recorded") if row in speeds), default=None)
            if found["ours"] is not None:
                found |= {
                    f"ours / {kind}": found["ours"] / speeds[row] for kind, row in best.items() if row is not None
                }
            if (recorded := _find_best(speeds, "recorded, compiled")) is not None:
                found |= {"recorded, compiled": speeds[recorded], "recorded, compiled by": recorded}
            for gpus, by_itself, times in (
                (2, "each GPU", "twice"),
                (4, "each of 4 GPUs", "four times"),
                (8, "each of 8 GPUs", "eight times"),
            ):
                alone, together = speeds.get(f"ours on {by_itself} alone"), speeds.get(f"ours on {gpus} GPUs")
                if alone and together:
                    found |= {f"ours on {gpus} GPUs": together, f"of {times} one GPU": together / alone}
            found["failed"] = sorted(row for row, told in rows.items() if "error" in told)
            compared.append(found)
    return compared


def _find_best(speeds: Mapping[str, float], kind: str) -> str | None:
    return max((row for row in speeds if row.startswith(kind)), key=speeds.__getitem__, default=None)


def plot(compared: list[dict[str, Any]], path: Path) -> None:
    """Draw the speeds of each network as bars; beside them ours over the compiler's best."""
    groups = {}
    for found in compared:
        bars = [
            Bar(label=kind, size=found[kind], colour=colour, told=f"{found[kind]:.1f} Mvoxel/s")
            for kind, colour in COLOURS.items()
            if found.get(kind)
        ]
        ratio = f": {found['ours / compiled']:.2f} x compiled" if "ours / compiled" in found else ""
        groups |= {f"{found['network']}, {found['sides']}{ratio}": bars} if bars else {}
    title = text(10, 14, "forward, loss, backward, SGD; bfloat16, one volume")
    rows = sum(len(bars) + 2 for bars in groups.values())
    write(path, [title, *draw_bars(groups)], WIDTH, ROW * (rows + 2))


if __name__ == "__main__":
    serve(answer)
