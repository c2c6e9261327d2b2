"""Report the resources of a run: time, memory and kernels."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from volseg.formatting import format_duration, format_moment
from volseg.monitoring import run_files
from volseg.reporting import content
from volseg.reporting.reading import RunRecord

GIB = 2**30


def add_spans(parts: Sequence[run_files.RunPart]) -> dict[str, float]:
    """Return the seconds of all parts by what was done, and what no span accounts for."""
    spans: dict[str, float] = {}
    for part in parts:
        for name, seconds in part.spans.items():
            spans[name] = spans.get(name, 0.0) + seconds
    told = spans.pop(run_files.THE_REST, 0.0)  # by the parts that have ended
    # Spans are measured one by one: what they leave may be a hair below nothing.
    left = max(sum(part.seconds for part in parts) - math.fsum(spans.values()), told)
    return {**spans, run_files.THE_REST: left}


def describe_time(parts: Sequence[run_files.RunPart], said: str, caption: str) -> list[content.Block]:
    """Return where the time of several processes went; ``said`` follows their sum."""
    if not parts:
        return []
    whole = sum(part.seconds for part in parts)
    spans = add_spans(parts)
    rows = [[name, format_duration(part), f"{100 * part / (whole or 1):.0f} %"] for name, part in spans.items()]
    rows.append(["in all", format_duration(whole), "100 %"])
    bold = frozenset([len(rows) - 1])
    table = content.TextTable(caption=caption, header=("", "time", "share"), rows=rows, bold=bold)
    return [content.Text(f"{format_duration(whole)} {said}."), content.Shares(title="Time", parts=spans), table]


def describe_time_of_run(record: RunRecord) -> list[content.Block]:
    """Return the use of time over all parts of the run."""
    parts = record.parts
    how = "in one go" if len(parts) == 1 else f"in {len(parts)} parts, as it was resumed; all are counted"
    said = f"{how}; begun {format_moment(parts[0].begun)}" if parts else ""
    return describe_time(parts, said, "What the time went by with")


def describe_memory(record: RunRecord) -> list[content.Block]:
    """Return the memory of the first steps on each GPU, beside the forecast."""
    memory = record.memory
    if not memory or not memory.get("measured"):
        return []
    reading = memory["measured"][-1]
    forecast = memory.get("forecast") or {}
    rows = [
        [f"process {device.get('process', 0)}, {device['device']}", *_list_gib(device), "", ""]
        for device in reading["devices"]
    ]
    if forecast.get("reserved"):
        rows.append(["the fullest", "", "", *_list_gib(forecast)])
    table = content.TextTable(
        caption=f"Peaks after {reading['steps']} steps, in GiB; forecasts are of a step, without cases",
        header=("GPU", "used", "reserved", "forecast used", "forecast reserved"),
        rows=rows,
    )
    told = record.told.memory
    return [*([content.Text(f"{told[0].upper()}{told[1:]}.")] if told else []), table]


def _list_gib(memory: Mapping[str, Any]) -> list[str]:
    return [f"{memory[key] / GIB:.2f}" if key in memory else "" for key in ("used", "reserved")]


def describe_kernels(record: RunRecord) -> list[content.Block]:
    """Return the measured and chosen kernels, if the config asks for measurements."""
    if record.kernels is None:
        return []
    times = {kind: f"{ms:.3g} ms a step" for kind, ms in (record.kernels.get("milliseconds") or {}).items()}
    lacking = {kind: f"not to be had: {reason}" for kind, reason in (record.kernels.get("refused") or {}).items()}
    return [content.NamedValues({"taken": str(record.kernels.get("chosen")), **times, **lacking})]
