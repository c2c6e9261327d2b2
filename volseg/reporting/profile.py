"""Report the profile of a training step, as a page and in short form."""

from collections.abc import Sequence
from pathlib import Path

from volseg.files import replacing
from volseg.profiling.report import ProfileReport
from volseg.profiling.table import (
    FAR,
    KIND_HEADER,
    LAYER_HEADER,
    format_seconds,
    get_busiest_device,
    list_device_cells,
    list_far_from_bound,
    list_kind_cells,
    list_layer_cells,
)
from volseg.reporting import content
from volseg.reporting.page import write_page
from volseg.reporting.writing import write_markdown
from volseg.version import __version__

PAGE, BRIEF = "profile.html", "profile.md"


def write_profile(report: ProfileReport, folder: str | Path) -> Path:
    """Write a profile into a folder, as a page and in short form; return the page's path."""
    said = describe_profile(report)
    for name, text in ((PAGE, write_page(said)), (BRIEF, write_markdown(said))):
        with replacing(Path(folder) / name) as partial:
            partial.write_text(text, encoding="utf-8")
    return Path(folder) / PAGE


def describe_profile(report: ProfileReport) -> content.ReportContent:
    """Return the report of a profile."""
    shape = " x ".join(map(str, report.shape))
    device, far = get_busiest_device(report.devices), list_far_from_bound(report.layers)
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
        sections=content.list_sections(
            [
                content.Section(
                    title="What limits the step",
                    blocks=[content.Text(f"{report.limit[:1].upper()}{report.limit[1:]}.")]
                    + ([content.Items([f"{one}." for one in report.advice])] if report.advice else []),
                    brief=True,
                ),
                _describe_devices(report),
                _tabulate(
                    "Kinds of kernels",
                    "Kernels by kind, per step; share of the step",
                    KIND_HEADER,
                    [[row.kind, *list_kind_cells(row)] for row in report.kinds],
                    brief=True,
                ),
                _tabulate(
                    "Above the bound",
                    f"Layers that take more than {FAR} times what the device needs at best, by the time above it",
                    (*LAYER_HEADER, "above bound"),
                    [[*list_layer_cells(row), format_seconds(row.seconds - (row.bound or 0.0))] for row in far],
                ),
                _tabulate(
                    "Layers",
                    "Every layer by direction, per step",
                    LAYER_HEADER,
                    list(map(list_layer_cells, report.layers)),
                ),
                _describe_notes(report),
            ]
        ),
        written=f"volseg {__version__}",
    )


def _describe_devices(report: ProfileReport) -> content.Section:
    blocks: list[content.Block] = []
    for each in report.devices:
        spans = {"computing": each.computing, "communication, exposed": each.exposed, "waiting": each.waiting}
        parts = {name: seconds for name, seconds in spans.items() if seconds > 0}
        blocks.append(content.Shares(title=f"Device {each.device}, seconds of a step", parts=parts))
    for each in report.devices:
        cells = {f"device {each.device}, {name}": cell for name, cell in list_device_cells(each).items()}
        blocks.append(content.NamedValues(cells))
    return content.Section(title="The step", blocks=blocks, brief=True)


def _tabulate(
    title: str, caption: str, header: Sequence[str], rows: Sequence[Sequence[str]], *, brief: bool = False
) -> content.Section:
    table = content.TextTable(caption=caption, header=header, rows=rows, sortable=True)
    return content.Section(title=title, blocks=[table] if rows else [], brief=brief)


def _describe_notes(report: ProfileReport) -> content.Section:
    peaks = report.peaks
    facts = {"steps watched": str(report.steps), "recorded": "yes" if report.recorded else "no"}
    if report.not_recorded:
        facts["not recorded, since"] = report.not_recorded
    if report.matched is not None:
        facts["of the kernels' time, layer known"] = f"{report.matched:.1%}"
    if report.batch_seconds is not None:
        facts["waited for the batch"] = format_seconds(report.batch_seconds)
    if peaks is not None:
        facts["memory at best"] = f"{peaks.bytes_per_second / 1e12:.3g} TB/s"
        facts["tensor cores at best"] = f"{peaks.flops_per_second / 1e12:.4g} TFLOP/s"
        facts["source"] = peaks.source
    return content.Section(
        title="How it was found",
        blocks=[content.NamedValues(facts), *([content.Items(report.notes)] if report.notes else [])],
    )
