"""A profile of a training step, as a page and in short."""

from pathlib import Path

from volseg.files import replacing
from volseg.profiling.report import ProfileReport
from volseg.profiling.table import (
    KIND_HEADER,
    LAYER_HEADER,
    list_device_cells,
    list_kind_cells,
    list_layer_cells,
    tell_seconds,
)
from volseg.profiling.words import FAR, find_busiest, find_far
from volseg.reporting.content import Items, NamedValues, ReportContent, Section, Shares, Text, TextTable
from volseg.reporting.markdown import write_markdown
from volseg.reporting.page import write_page
from volseg.reporting.words import list_sections
from volseg.version import __version__

__all__ = ["BRIEF", "PAGE", "describe_profile", "write_profile"]

PAGE, BRIEF = "profile.html", "profile.md"


def write_profile(report: ProfileReport, folder: str | Path) -> Path:
    """Write a profile into a folder, as a page and in short; return the page's path."""
    content = describe_profile(report)
    for name, text in ((PAGE, write_page(content)), (BRIEF, write_markdown(content))):
        with replacing(Path(folder) / name) as partial:
            partial.write_text(text, encoding="utf-8")
    return Path(folder) / PAGE


def describe_profile(report: ProfileReport) -> ReportContent:
    """Return what is said of a profile."""
    shape = " x ".join(map(str, report.shape))
    device = find_busiest(report.devices)
    return ReportContent(
        title=f"Profile of {report.name}",
        subtitle=f"{report.network}, {shape}, {report.precision}, {report.device}, {report.parallel}",
        state=report.source,
        headline=[
            ("step", tell_seconds(report.step_seconds)),
            ("computing", f"{device.computing / device.step:.0%}"),
            ("kernels", f"{report.kernels_per_step:.0f}"),
            ("recorded", "yes" if report.recorded else "no"),
        ],
        sections=list_sections(
            [
                Section(
                    title="What limits the step",
                    blocks=[Text(f"{report.limit[:1].upper()}{report.limit[1:]}.")]
                    + ([Items([f"{one}." for one in report.advice])] if report.advice else []),
                    brief=True,
                ),
                _describe_devices(report),
                _describe_kinds(report),
                _describe_far(report),
                _describe_layers(report),
                _describe_notes(report),
            ]
        ),
        written=f"volseg {__version__}",
    )


def _describe_devices(report: ProfileReport) -> Section:
    bars = [
        Shares(
            title=f"Device {each.device}, seconds of a step",
            parts={
                name: seconds
                for name, seconds in (
                    ("computing", each.computing),
                    ("communication, exposed", each.exposed),
                    ("waiting", each.waiting),
                )
                if seconds > 0
            },
        )
        for each in report.devices
    ]
    named = [
        NamedValues({f"device {each.device}, {name}": cell for name, cell in list_device_cells(each).items()})
        for each in report.devices
    ]
    return Section(title="The step", blocks=[*bars, *named], brief=True)


def _describe_kinds(report: ProfileReport) -> Section:
    table = TextTable(
        caption="Kernels by kind, per step; share of the step",
        header=KIND_HEADER,
        rows=[[row.kind, *list_kind_cells(row)] for row in report.kinds],
        sortable=True,
    )
    return Section(title="Kinds of kernels", blocks=[table], brief=True)


def _describe_far(report: ProfileReport) -> Section:
    far = find_far(report.layers)
    rows = [[*list_layer_cells(row), tell_seconds(row.seconds - (row.bound or 0.0))] for row in far]
    table = TextTable(
        caption=f"Layers that take more than {FAR} times what the device needs at best, by the time above it",
        header=(*LAYER_HEADER, "above bound"),
        rows=rows,
        sortable=True,
    )
    return Section(title="Above the bound", blocks=[table] if rows else [])


def _describe_layers(report: ProfileReport) -> Section:
    table = TextTable(
        caption="Every layer by direction, per step",
        header=LAYER_HEADER,
        rows=[list_layer_cells(row) for row in report.layers],
        sortable=True,
    )
    return Section(title="Layers", blocks=[table])


def _describe_notes(report: ProfileReport) -> Section:
    peaks = report.peaks
    facts = {"steps watched": str(report.steps), "recorded": "yes" if report.recorded else "no"}
    if report.not_recorded:
        facts["not recorded, since"] = report.not_recorded
    if report.matched is not None:
        facts["of the kernels' time, layer known"] = f"{report.matched:.1%}"
    if report.batch_seconds is not None:
        facts["waited for the batch"] = tell_seconds(report.batch_seconds)
    if peaks is not None:
        facts["memory at best"] = f"{peaks.bytes_per_second / 1e12:.3g} TB/s"
        facts["tensor cores at best"] = f"{peaks.flops_per_second / 1e12:.4g} TFLOP/s"
        facts["source"] = peaks.source
    return Section(
        title="How it was found", blocks=[NamedValues(facts), *([Items(report.notes)] if report.notes else [])]
    )
