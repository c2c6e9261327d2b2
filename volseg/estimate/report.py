"""Write a plan as JSON with a schema, and as a plain-text table."""

from collections.abc import Mapping, Sequence
from io import StringIO
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from rich import box
from rich.console import Console
from rich.table import Table

from volseg.estimate.candidate import Candidate, Estimate, name_candidate
from volseg.estimate.search import GIB, describe_seconds
from volseg.estimate.step_memory import MemoryUse

WIDTH = 80
"""Columns of a terminal of the default width."""

WAY = ("data", "spatial", "pipeline", "split_size", "checkpoint", "kernels", "recorded")
"""Fields of a candidate that its row repeats."""

MARKS = {"chosen": ">", "runs": " ", "slower": " ", "refused": "x"}
"""Mark in front of each candidate of the table."""

Bytes = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Row(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class CandidateRow(_Row):
    """One way to run the training, with its memory and time."""

    name: str
    """Name of the candidate, in the keys of a config."""
    data: int
    spatial: int
    pipeline: int
    split_size: int | None
    checkpoint: Literal["all", "tiled"] | int | None
    kernels: Literal["fast", "torch"]
    recorded: bool
    num_gpus: int
    state: Literal["chosen", "runs", "refused", "slower"]
    """``slower``: not traced, as it cannot be faster than the chosen one."""
    refused: str | None = None
    """Reason why the candidate does not run."""
    more_than_bytes: Bytes | None = None
    """Lower bound on the bytes of a GPU, if the trace was stopped early because the candidate does not fit; its memory
    and times are then unknown."""
    used_bytes: Bytes | None = None
    """Peak of allocated memory on the fullest GPU (``torch.cuda.max_memory_allocated``)."""
    reserved_bytes: Bytes | None = None
    """Peak of reserved memory on the fullest GPU (``torch.cuda.max_memory_reserved``)."""
    step_reserved_bytes: Bytes | None = None
    """Peak of reserved memory in the training steps, without the validation between epochs."""
    outside_bytes: Bytes | None = None
    """Memory of the fullest GPU outside torch's allocator: context, libraries."""
    peak_in: str | None = None
    """Part of the step in which reserved memory peaks."""
    stage_used_bytes: tuple[Bytes, ...] = ()
    """``used_bytes`` of each stage of a pipeline, in order: stages hold different layers."""
    stage_reserved_bytes: tuple[Bytes, ...] = ()
    """``reserved_bytes`` of each stage."""
    step_seconds: Seconds | None = None
    least_step_seconds: Seconds | None = None
    """Lower bound on the seconds of a step, if the candidate was not traced."""
    epoch_seconds: Seconds | None = None
    """Seconds of an epoch's training steps, without validation."""
    epoch_price: Seconds | None = None
    """Price of an epoch in US dollars."""

    @property
    def candidate(self) -> Candidate:
        """The candidate of the row."""
        return Candidate(**{name: getattr(self, name) for name in WAY})

    @property
    def estimate(self) -> Estimate:
        """The estimate of the row."""
        memory = None
        if self.used_bytes is not None and self.reserved_bytes is not None:
            memory = MemoryUse(
                used=self.used_bytes,
                reserved=self.reserved_bytes,
                outside=self.outside_bytes or 0,
                peak_in=self.peak_in or "",
                reserved_by_steps=self.step_reserved_bytes,
            )
        return Estimate(candidate=self.candidate, memory=memory, seconds=self.step_seconds, refused=self.refused)


class PlanReport(_Row):
    """The JSON of ``volseg plan --json``."""

    version: Literal[1] = 1
    """Version of this format."""
    network: str
    shape: tuple[int, ...]
    """Shape of a step's images, (B, C, D, H, W)."""
    precision: str
    gpu: str
    num_gpus: int
    gpu_bytes: Bytes
    """Memory of one GPU."""
    reserve_bytes: Bytes
    """Bytes of each GPU that are kept free or used outside the step; ``notes`` give the purpose."""
    rates: Literal["measured", "published"]
    """Source of the speed of this kind of GPU."""
    instance: str | None = None
    price_per_hour: float | None = None
    price_source: str | None = None
    steps_per_epoch: int | None = None
    candidates: tuple[CandidateRow, ...]
    fits: bool
    why: str
    remedies: tuple[str, ...] = ()
    """Changes that would make the step fit, if nothing fits."""
    notes: tuple[str, ...] = ()


class LargestRow(_Row):
    """The largest patch of one aspect that a candidate can train on."""

    name: str
    """Name of the candidate, in the keys of a config."""
    aspect: tuple[int, int, int]
    """Ratios of the sides, kept as far as the network's divisors allow."""
    sides: tuple[int, int, int] | None
    """D, H, W of the largest patch that fits; null if none fits."""
    next_sides: tuple[int, int, int] | None
    """D, H, W of the next larger patch, which does not fit; null if no limit was found."""
    total_bytes: Bytes | None
    """Bytes of the fullest GPU with the largest patch."""


class VolumesReport(_Row):
    """The JSON of ``volseg plan --max-volume --json``."""

    version: Literal[1] = 1
    """Version of this format."""
    network: str
    batch_size: int
    precision: str
    gpu: str
    num_gpus: int
    gpu_bytes: Bytes
    reserve_bytes: Bytes
    rows: tuple[LargestRow, ...]

    @property
    def fits(self) -> bool:
        """Whether any patch fits."""
        return any(row.sides is not None for row in self.rows)

    def to_json(self) -> str:
        """Return the report as JSON."""
        return self.model_dump_json(indent=2)

    def words(self) -> str:
        """Return the report as plain text: a heading and a table."""
        return (
            f"{self.network}, largest patches in batches of {self.batch_size}, {self.precision}, on {self.num_gpus} x "
            f"{self.gpu} of {self.gpu_bytes / GIB:.1f} GiB\n\n{format_volumes(self.rows)}"
        )


def build_row(
    forecast: Estimate, *, chosen: bool, steps_per_epoch: int | None, price_per_hour: float | None
) -> CandidateRow:
    """Return the row of a traced candidate."""
    memory, seconds = forecast.memory, forecast.seconds
    epoch = None if seconds is None or steps_per_epoch is None else seconds * steps_per_epoch
    return CandidateRow(
        **_describe(forecast.candidate),
        state="chosen" if chosen else "runs" if forecast.runs else "refused",
        refused=forecast.refused,
        more_than_bytes=forecast.more_than,
        used_bytes=None if memory is None else memory.used,
        reserved_bytes=None if memory is None else memory.reserved,
        step_reserved_bytes=None if memory is None else memory.of_steps().reserved,
        outside_bytes=None if memory is None else memory.outside,
        peak_in=None if memory is None else memory.peak_in,
        stage_used_bytes=tuple(use.used for use in forecast.stages),
        stage_reserved_bytes=tuple(use.reserved for use in forecast.stages),
        step_seconds=seconds,
        epoch_seconds=epoch,
        epoch_price=None if epoch is None or price_per_hour is None else epoch / 3600 * price_per_hour,
    )


def build_skipped_row(candidate: Candidate, least_seconds: float) -> CandidateRow:
    """Return the row of a candidate that was not traced."""
    return CandidateRow(**_describe(candidate), state="slower", least_step_seconds=least_seconds)


def _describe(candidate: Candidate) -> dict[str, Any]:
    way = {name: getattr(candidate, name) for name in WAY}
    return {"name": name_candidate(candidate), **way, "num_gpus": candidate.num_gpus}


def format_table(rows: Sequence[CandidateRow]) -> str:
    """Return the table of candidates as plain text of `WIDTH` columns at most.

    Its columns are the GiB of the fullest GPU, the times, and the prices if known.
    """
    titles = [_title(row) for row in rows]
    kernels = [f" ({row.kernels})" if titles.count(title) > 1 else "" for title, row in zip(titles, rows, strict=True)]
    marks = [f"{MARKS[row.state]} " for row in rows]
    columns = {
        "parallel": list(map("".join, zip(marks, titles, kernels, strict=True))),
        "used": [_gib(row.used_bytes) for row in rows],
        "reserved": [_reserved(row) for row in rows],
        "step": [_step(row) for row in rows],
        "epoch": ["" if row.epoch_seconds is None else describe_seconds(row.epoch_seconds) for row in rows],
        "$/epoch": ["" if row.epoch_price is None else f"{row.epoch_price:.3g}" for row in rows],
    }
    return _format({title: cells for title, cells in columns.items() if any(cells)})


def _title(row: CandidateRow) -> str:
    """Return the short name of a candidate for a table of 80 columns."""
    title = " x ".join(f"{name} {count}" for name, count in row.candidate.list_meshes()) or "one GPU"
    if row.split_size is not None:
        title += f" by {row.split_size}"
    return title if row.checkpoint is None else f"{title}, recompute {row.checkpoint}"


def _step(row: CandidateRow) -> str:
    if row.state == "slower":
        return f">= {describe_seconds(row.least_step_seconds or 0.0)}"
    if row.step_seconds is None:
        return "" if row.more_than_bytes is not None else "refused"
    return describe_seconds(row.step_seconds)


def _reserved(row: CandidateRow) -> str:
    if row.more_than_bytes is not None:
        return f"> {_gib(row.more_than_bytes)}"
    return "" if row.reserved_bytes is None else _gib(row.reserved_bytes + (row.outside_bytes or 0))


def _gib(num_bytes: int | None) -> str:
    return "" if num_bytes is None else f"{num_bytes / GIB:.2f}"


def format_volumes(rows: Sequence[LargestRow]) -> str:
    """Return the table of largest patches as plain text of `WIDTH` columns at most."""
    return _format(
        {
            "parallel": [row.name for row in rows],
            "shape": ["cube" if len(set(row.aspect)) == 1 else "patch" for row in rows],
            "largest": [_sides(row.sides) or "none" for row in rows],
            "GiB": [_gib(row.total_bytes) for row in rows],
            "too large": [_sides(row.next_sides) for row in rows],
        }
    )


def _sides(sides: tuple[int, int, int] | None) -> str:
    return "" if sides is None else "x".join(map(str, sides))


def _format(columns: Mapping[str, Sequence[str]]) -> str:
    # Only ASCII: a pipe or a log may support no other encoding.
    table = Table(box=box.MARKDOWN, padding=(0, 1))
    for title in columns:
        table.add_column(title, justify="left" if title in ("parallel", "shape") else "right", overflow="fold")
    for cells in zip(*columns.values(), strict=True):
        table.add_row(*cells)
    written = StringIO()
    Console(file=written, width=WIDTH, color_system=None, force_terminal=False, highlight=False).print(table)
    return "\n".join(line.rstrip() for line in written.getvalue().splitlines()).strip("\n")
