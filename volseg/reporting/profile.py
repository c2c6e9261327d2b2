"""Report the profile of a training step, as a page and in short form."""

from collections.abc import Sequence
from pathlib import Path

from volseg.files import replacing
from volseg.profiling.report import ProfileReport
from volseg.profiling.table import (
    KIND_HEADER,
    LAYER_HEADER,
    format_seconds,
    get_busiest_device,
    list_device_cells,
    list_kind_cells,
    list_layer_cells,
)
from volseg.reporting import content
from volseg.reporting.page import write_markdown, write_page
from volseg.version import __version__

PAGE, BRIEF = "profile.html", "profile.md"

MOST_LAYERS = 16
"""Maximum number of layers in the short form; the page shows all layers."""


def write_profile(report: ProfileReport, folder: str | Path) -> Path:
    """Write a profile into a folder, as a page and in short form; return the page's path."""
    for name, text in ((PAGE, write_page(describe_profile(report))), (BRIEF, format_profile(report))):
        with replacing(Path(folder) / name) as partial:
            partial.write_text(text, encoding="utf-8")
    return Path(folder) / PAGE


def format_profile(report: ProfileReport) -> str:
    """Return the short form of a profile's report, which the command also prints."""
    return write_markdown(describe_profile(report))


def describe_profile(report: ProfileReport) -> content.ReportContent:
    """Return the report of a profile."""
    shape = " x ".join(map(str, report.shape))
    device = get_busiest_device(report.devices)
    kinds = [[row.kind, *list_kind_cells(row)] for row in report.kinds]
    layers = list(map(list_layer_cells, report.layers))
    times = {
        f"device {each.device}, {name}": cell
        for each in report.devices
        for name, cell in list_device_cells(each).items()
    }
    limit: list[content.Block] = [content.Text(f"{report.limit[:1].upper()}{report.limit[1:]}.")]
    limit += [content.Items([f"{one}." for one in report.advice])] if report.advice else []
    notes: list[content.Block] = [content.NamedValues(_list_facts(report))]
    notes += [content.Items(report.notes)] if report.notes else []
    sections = [
        content.Section(title="What limits the step", blocks=limit, brief=True),
        content.Section(title="The step", blocks=[content.NamedValues(times)], brief=True),
        _tabulate("Kinds of kernels", "Kernels by kind, per step; share of the step", KIND_HEADER, kinds, brief=True),
        _tabulate(
            "Slowest layers", "By direction, per step", LAYER_HEADER, layers[:MOST_LAYERS], brief=True, only_brief=True
        ),
        _tabulate("Layers", "Every layer by direction, per step", LAYER_HEADER, layers),
        content.Section(title="Measurement", blocks=notes, brief=True),
    ]
    return content.ReportContent(
        title=f"Profile of {report.name}",
        subtitle=f"{report.network}, {shape}, {report.precision}, {report.device}, {report.parallel}",
        state=report.source,
        headline=[
            ("step", format_seconds(report.step_seconds)),
            ("computing", f"{device.computing / device.step:.0%}"),
            ("kernels", f"{report.kernels_per_step:.0f}"),
            ("recorded", "yes" if report.recorded else "no"),
        ],
        sections=content.list_sections(sections),
        written=f"volseg {__version__}",
    )


def _tabulate(
    title: str, caption: str, header: Sequence[str], rows: Sequence[Sequence[str]], **kind: bool
) -> content.Section:
    """Return a section with a table, without empty columns."""
    filled = [number for number in range(len(header)) if any(row[number] for row in rows)]
    header, *rows = ([row[number] for number in filled] for row in (header, *rows))
    table = content.TextTable(caption=caption, header=header, rows=rows, sortable=True)
    return content.Section(title=title, blocks=[table] if rows else [], **kind)


def _list_facts(report: ProfileReport) -> dict[str, str]:
    """Return how the profile was measured."""
    facts: dict[str, str | None] = {
        "profiled steps": str(report.steps),
        "not recorded because": report.not_recorded,
        "share of kernel time with a known layer": None if report.matched is None else f"{report.matched:.1%}",
        "wait for the batch": format_seconds(report.batch_seconds),
    }
    if report.peaks is not None:
        facts["peak memory bandwidth"] = f"{report.peaks.bytes_per_second / 1e12:.3g} TB/s"
        facts["peak of the tensor cores"] = f"{report.peaks.flops_per_second / 1e12:.4g} TFLOP/s"
        facts["source"] = report.peaks.source
    return {name: value for name, value in facts.items() if value}
