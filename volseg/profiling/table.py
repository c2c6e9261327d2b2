"""A profile in a terminal: what limits the step, then kernels by kind, then the layers that take longest."""

import sys
from collections.abc import Sequence
from io import StringIO
from typing import Literal, TextIO

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from volseg.profiling.report import DeviceTimes, KindRow, LayerRow, ProfileReport
from volseg.profiling.words import find_far
from volseg.streams import make_printable

__all__ = [
    "KIND_HEADER",
    "LAYER_HEADER",
    "list_device_cells",
    "list_kind_cells",
    "list_layer_cells",
    "show_profile",
    "tell_seconds",
]

MOST_LAYERS = 16
"""Rows that a terminal shows; the page and the JSON have all."""

WIDE, PIPED = 120, 140
"""Columns from which all are shown; and those of what is no terminal, which nobody has made narrow."""

KIND_HEADER = ("kernels", "calls", "time", "share", "memory", "tensor", "bound", "x bound")
"""``memory`` and ``tensor``: the share of the memory's bandwidth, and of the tensor cores, that was reached; of a
device whose speed nobody knows, bytes and floating-point operations per second."""

LAYER_HEADER = ("layer", "module", "direction", *KIND_HEADER[1:])
NARROW, NARROW_KINDS = (0, 2, 4, 5, 6, 7, 9), (0, 1, 2, 3, 4, 5, 7)
"""Columns of layers and of kinds that 80 columns have room for."""

SHORT = {"forward": "fwd", "backward": "bwd", "recompute": "again", "communication": "sent"}


def tell_seconds(seconds: float | None) -> str:
    """Return a time with three digits.

    >>> [tell_seconds(seconds) for seconds in (1.5, 0.0123, 4.56e-6, 0, None)]
    ['1.5 s', '12.3 ms', '4.56 us', '0', '']
    """
    if seconds is None:
        return ""
    if seconds < 1e-11:  # what is left of a difference
        return "0"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.2g} us"


def _tell_share(share: float | None) -> str:
    return "" if share is None else f"{share:.2f}"


def _tell_rate(amount: float | None, seconds: float, unit: str) -> str:
    """Return how much is done in a second, where nobody knows how much could be."""
    return f"{amount / seconds / 1e9:.3g} G{unit}/s" if amount and seconds else ""


def list_kind_cells(row: KindRow | LayerRow) -> list[str]:
    """Return the cells of a row behind its name."""
    return [
        f"{row.calls:.0f}",
        tell_seconds(row.seconds),
        f"{row.share:.1%}",
        _tell_share(row.bandwidth_share) or _tell_rate(row.bytes_moved, row.seconds, "B"),
        _tell_share(row.flop_share) or _tell_rate(row.flops, row.seconds, "FLOP"),
        tell_seconds(row.bound),
        _tell_share(row.times_bound),
    ]


def list_layer_cells(row: LayerRow) -> list[str]:
    """Return the cells of a layer."""
    layer = row.layer if row.device == 0 else f"{row.layer} on {row.device}"
    return [layer, row.module, row.direction, *list_kind_cells(row)]


def list_device_cells(device: DeviceTimes) -> dict[str, str]:
    """Return what a device does in a step, by name."""
    cells = {"computing": device.computing, "waiting for Python": device.waiting}
    if device.communicating:
        cells |= {"communication, hidden": device.hidden, "communication, exposed": device.exposed}
    return {name: f"{tell_seconds(seconds)} ({seconds / device.step:.0%})" for name, seconds in cells.items()}


def show_profile(report: ProfileReport, *, file: TextIO | None = None, width: int | None = None) -> None:
    """Print a profile.

    Parameters
    ----------
    report
        What is told.
    file
        Where to; standard output by default.
    width
        Columns; those of the terminal by default.
    """
    output = file or sys.stdout
    console = Console(file=output, width=width or (None if output.isatty() else PIPED), highlight=False)
    shape = " x ".join(map(str, report.shape))
    how = "recorded" if report.recorded else "eager"
    console.print(
        f"{make_printable(report.network)}, {shape}, {report.precision}, {report.device}, {report.parallel}, {how}: "
        f"{tell_seconds(report.step_seconds)} a step ({report.source}), {report.kernels_per_step:.0f} kernels",
        markup=False,
    )
    for device in report.devices:
        name = "" if len(report.devices) == 1 else f"device {device.device}: "
        console.print(name + ", ".join(f"{what} {cell}" for what, cell in list_device_cells(device).items()))
    console.print()
    kinds = [[row.kind, *list_kind_cells(row)] for row in report.kinds]
    layers = [list_layer_cells(row) for row in report.layers[:MOST_LAYERS]]
    columns: tuple[Sequence[int], Sequence[int]] = range(len(KIND_HEADER)), range(len(LAYER_HEADER))
    if console.width < WIDE:
        layers = [[*cells[:2], SHORT.get(cells[2], ""), *cells[3:]] for cells in layers]
        columns = NARROW_KINDS, NARROW
    for header, rows, taken in zip((KIND_HEADER, LAYER_HEADER), (kinds, layers), columns, strict=True):
        cells = [[row[number] for number in taken] for row in rows]
        console.print(_format_table([header[number] for number in taken], cells, console.width), markup=False)
        console.print()
    if len(report.layers) > MOST_LAYERS:
        console.print(f"... and {len(report.layers) - MOST_LAYERS} more rows: -o FOLDER writes all, --json prints them")
    far = find_far(report.layers)
    if far:
        told = ", ".join(f"{make_printable(row.layer)} {row.direction} ({row.times_bound:.1f})" for row in far[:4])
        console.print(f"\nFarthest above their bound, in time: {told}; {len(far)} in all.", markup=False)
    console.print(f"\n{report.limit[:1].upper()}{report.limit[1:]}.", markup=False)
    for advice in report.advice:
        console.print(f"Try: {advice}.", markup=False)
    for note in report.notes:
        console.print(f"Note: {make_printable(note)}.", markup=False)


def _format_table(header: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> str:
    """Return a table without the columns that nobody fills; ASCII, as a pipe or a log may have no other encoding."""
    filled = [number for number in range(len(header)) if any(row[number] for row in rows)]
    table = Table(box=box.MARKDOWN, padding=(0, 1))
    for number in filled:
        name = header[number]
        justify: Literal["left", "right"] = "left" if name in WORDS else "right"
        # A direction needs no title, which would take room in narrow terminals.
        title = "" if name == "direction" else name
        table.add_column(title, justify=justify, overflow="fold", no_wrap=name != "layer")
    for row in rows:
        table.add_row(*(escape(make_printable(row[number])) for number in filled))
    written = StringIO()
    Console(file=written, width=width, color_system=None, force_terminal=False, highlight=False).print(table)
    return "\n".join(line.rstrip() for line in written.getvalue().splitlines()).strip("\n")


WORDS = ("layer", "module", "direction", "kernels")
"""Columns of words, which are set to the left."""
