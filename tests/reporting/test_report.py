"""Reports of runs: finished, in progress, failed, with missing files, and damaged."""

import json
import math
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from typer.testing import CliRunner

from tests.reporting.run_folders import BEGUN, SCRIPT, make_crossed, make_run
from volseg.cli import app
from volseg.commands import spell
from volseg.errors import ConfigError
from volseg.evaluation.summary import read_summary, scores_table
from volseg.monitoring.run_files import RunStatus, write_status
from volseg.reporting import write_brief, write_report
from volseg.reporting.content import Chart, Line
from volseg.reporting.drawing import NUM_COLOURS, WIDTH, choose_ticks, draw_chart, draw_legend
from volseg.reporting.reading import ReportedCase, read_run
from volseg.reporting.sections import add_spans, choose_extremes


class Page(HTMLParser):
    """What a browser would make of a page."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.texts, self.attributes = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes.extend((tag, key, value) for key, value in attrs)

    def handle_data(self, data):
        self.texts.append(data)

    @property
    def text(self):
        return " ".join(self.texts)


def read_page(folder):
    return Page(write_report(folder).read_text(encoding="utf-8"))


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path / "run")


def test_the_page_is_whole_and_alone(run):
    page = read_page(run)
    for heading in ("Curves", "Scores", "Cases", "Published results", "Time", "GPU memory", "Config", "Next"):
        assert heading in page.texts
    assert page.tags.count("script") == 1
    links = [value for tag, key, value in page.attributes if key in ("src", "href", "srcset", "action")]
    assert links
    assert all(link.startswith(("data:", "#")) for link in links)
    assert page.tags.count("img") == 10
    assert f"{SCRIPT}: voxels are NaN" in page.texts
    assert "default-src 'none'" in " ".join(value for _, key, value in page.attributes if key == "content")
    # What came before a resume counts.
    spans = {"reading": 60, "training": 3500, "validation": 90, "the rest": 20}
    assert add_spans(read_run(run).parts) == spans
    assert "1 h 1 min in 2 parts" in page.text
    assert "| total      | 1 h 1 min" in write_brief(run)


def test_each_gpu_is_told_and_the_forecast_of_the_fullest(run):
    gib = 2**30
    measured = [
        {"device": f"cuda:{number}", "used": (3 + number) * gib, "reserved": (5 + number) * gib, "process": 0}
        for number in range(2)
    ]
    memory = {"measured": [{"steps": 8, "devices": measured}], "forecast": {"used": 4 * gib, "reserved": 7 * gib}}
    (run / "memory.json").write_text(json.dumps(memory), encoding="utf-8")
    rows = [line for line in write_brief(run).splitlines() if line.startswith(("| process 0", "| the fullest"))]
    cells = [[cell.strip() for cell in row.split("|")[2:6]] for row in rows]
    assert cells == [["3.00", "5.00", "", ""], ["4.00", "6.00", "", ""], ["", "", "4.00", "7.00"]]
    assert rows[-1].startswith("| the fullest")


def test_a_chart_without_two_values_is_not_drawn(run):
    with (run / "history.jsonl").open("a", encoding="utf-8") as history:
        for epoch in (21, 22):
            flat = {f"val/{name}": 0.0 for name in ("undefined/Anterior", "undefined/Posterior")}
            line = {"epoch": epoch, "step": 1, "time": 0.0, "scalars": {**flat, "val/nsd/Anterior": epoch / 30}}
            history.write(json.dumps(line) + "\n")
    page = read_page(run)
    assert "Validation: undefined" not in page.texts
    assert "Validation: NSD" in page.texts
    first = (run / "history.jsonl").read_text(encoding="utf-8").splitlines()[0]
    (run / "history.jsonl").write_text(first + "\n", encoding="utf-8")
    page = read_page(run)
    assert "Curves" not in page.texts
    assert "No curves: history.jsonl has only 1 epoch(s)." in page.text


@pytest.mark.parametrize("cases", [9, 10])
def test_intervals_are_of_ten_cases_or_more(tmp_path, cases):
    brief = write_brief(make_run(tmp_path / "run", cases=cases))
    assert ("95 % interval" in brief) == (cases >= 10)
    assert "bootstrap intervals for 10 cases or more" in read_page(tmp_path / "run").text


def test_an_infinite_median_is_told_as_evaluate_does(run):
    file = run / "validation" / "summary.json"
    summary = json.loads(file.read_text(encoding="utf-8"))
    for case in summary["metric_per_case"]:
        case["metrics"]["1"] |= {"HD95": None, "n_pred": 0}
    summary["mean"]["1"]["HD95"] = summary["median"]["1"]["HD95"] = None
    summary["foreground_mean"]["HD95"] = 3.0
    summary["undefined"]["1"]["HD95"] = len(summary["metric_per_case"])
    file.write_text(json.dumps(summary), encoding="utf-8")
    (row,) = [line for line in write_brief(run).splitlines() if line.startswith("| Anterior") and "HD95" in line]
    told = [cell.strip() for cell in row.split("|")[3:-1]]
    table = scores_table(read_summary(file), {"1": "Anterior"}, ["HD95"])
    (evaluated,) = [line for line in table.splitlines() if "Anterior" in line]
    assert told == ["-", "", "infinite", "12"]
    assert [cell.strip() for cell in evaluated.split("|")[3:-1]] == ["-", "- to -", "infinite", "12"]


def test_a_run_says_which_of_its_files_are_missing_or_damaged(run):
    lines = (run / "history.jsonl").read_text(encoding="utf-8").splitlines()
    (run / "history.jsonl").write_text("\n".join([lines[0], "{", *lines[1:]]) + "\n", encoding="utf-8")
    assert "is not a line of a history" in read_page(run).text
    for name in ("history.jsonl", "times.json", "status.json", "told.json", "memory.json", "environment.json"):
        (run / name).unlink()
    shutil.rmtree(run / "validation" / "overlays")
    page = read_page(run)
    assert "Not shown" in page.texts
    for words in ("No curves: history.jsonl", "No time budget", "No pictures of cases", "environment.json is missing"):
        assert words in page.text
    assert "state unknown" in page.texts
    (run / "report.md").touch()  # which only a finished training leaves
    assert "finished" in read_page(run).texts


@pytest.mark.parametrize("state", ["training", "interrupted", "failed"])
def test_an_unfinished_run_says_how_far_it_came_and_how_it_goes_on(run, state):
    shutil.rmtree(run / "validation")
    message = f"loss is not finite <{state}>"
    status = RunStatus(state=state, time=BEGUN, started=BEGUN, host="h", pid=1, best=0.7123, message=message)
    write_status(run / "status.json", status)
    page = read_page(run)
    assert spell(f"volseg train {run / 'config.yaml'} -o {run} --resume") in page.texts
    assert "best mean Dice so far" in page.texts
    assert "0.7123" in page.texts
    assert state in page.text
    assert (message in page.text) == (state == "failed")
    assert "summary.json is missing: the report lacks the scores." in page.text
    assert "finished" in Page(write_report(run, state="finished").read_text(encoding="utf-8")).texts
    (run / "history.jsonl").write_text("", encoding="utf-8")  # in its first epoch
    write_status(run / "status.json", replace(status, epoch=0, epochs=20, batch=7))
    page = read_page(run)
    assert "0 of 20" in page.texts
    assert "No curves: history.jsonl has only 0 epoch(s)." in page.text


def test_no_two_names_of_a_legend_are_painted_alike():
    styles = re.findall(r'style="([^"]*)"', str(draw_legend([(f"{n}", n) for n in range(2 * NUM_COLOURS)])))
    assert len(styles) == len({*styles}) == 2 * NUM_COLOURS


@pytest.mark.parametrize("kept", [0, 8, 40, 60])
def test_a_damaged_picture_leaves_its_text(run, kept):
    """A process that was killed while it drew left half of one, and no report could be written."""
    file = sorted((run / "validation" / "overlays").iterdir())[0]
    file.write_bytes(file.read_bytes()[:kept])
    page = read_page(run)
    assert [value for _, key, value in page.attributes if key == "src"].count("data:,") == 1
    assert page.tags.count("img") == 10


def test_numbers_that_are_none_leave_gaps(run):
    with (run / "history.jsonl").open("a", encoding="utf-8") as history:
        for epoch in (21, 22):
            line = {"epoch": epoch, "step": 1, "time": 0.0, "scalars": {"train/loss": None, "train/only_nan": None}}
            history.write(json.dumps(line) + "\n")
    page = read_page(run)
    assert "Losses or gradients were not finite in 2 epoch(s), first in epoch 21." in page.text
    numbers = " ".join(
        value for tag, key, value in page.attributes if tag in ("path", "circle", "line", "text") and key != "class"
    )
    assert "nan" not in numbers
    assert "inf" not in numbers


def test_a_cross_validation_has_a_page_of_its_own_and_pictures_come_before_charts(tmp_path, run):
    folder = make_crossed(tmp_path / "crossed")
    for page in (read_page(run), read_page(folder)):
        assert page.tags.index("img") < page.tags.index("svg")
    assert "Cross-validation of DynUNet on Task00_<i>" in page.texts
    assert "2-fold cross-validation" in page.texts
    assert page.tags.count("img") == 10
    assert "finished" in page.texts
    (folder / "cross_validation.json").unlink()
    (folder / "summary.json").unlink()
    page = read_page(folder)
    assert "0 of 2 folds" in page.texts
    assert "cross_validation.json is missing" in page.text


def test_commands_name_the_files_of_components_of_ones_own(run):
    source = {"file": "/home/me/my net.py", "sha256": "0"}
    told = [{"kind": kind, "name": "mine", "from": source} for kind in ("network", "loss")]
    told.append({"kind": "hook", "name": "theirs", "from": {"package": "theirs", "version": "1"}})
    (run / "components.json").write_text(json.dumps(told), encoding="utf-8")
    page = read_page(run)
    assert spell(f"volseg predict {run} IMAGES... -o predictions --components '/home/me/my net.py'") in page.texts
    (run / "components.json").write_text('{"a": 1}', encoding="utf-8")
    page = read_page(run)
    assert spell(f"volseg predict {run} IMAGES... -o predictions") in page.texts
    assert "components.json cannot be read" in page.text


def test_another_folder_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"has none of config\.yaml, cross_validation\.json and search\.json; name"):
        write_report(tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_best_and_the_worst_are_no_case_twice():
    cases = [
        ReportedCase(name=f"{n}", metrics={"1": {"Dice": dice}}) for n, dice in enumerate([0.5, 0.1, math.nan, 0.9])
    ]
    worst, best = choose_extremes(cases)
    assert [case.name for case in worst] == ["1", "0"]
    assert [case.name for case in best] == ["3"]
    many = [ReportedCase(name=f"{n:02}", metrics={"0": {"Dice": 1.0}, "1": {"Dice": n / 20}}) for n in range(20)]
    worst, best = choose_extremes(many)
    assert [case.name for case in (*worst, *best)] == ["00", "01", "02", "03", "04", "19", "18", "17", "16", "15"]


@pytest.mark.parametrize(("low", "high"), [(0, 0), (-3e-9, 2e-9), (0.1, 0.1000001), (-5, 1e7), (1e300, 2e300)])
def test_ticks_enclose_what_is_drawn(low, high):
    ticks = choose_ticks(low, high)
    assert ticks[0] <= low
    assert ticks[-1] >= high
    assert 2 <= len(ticks) <= 8
    assert ticks == sorted(set(ticks))


def test_a_curve_of_one_epoch_has_that_epoch_alone_on_its_axis():
    """Its axis went from 1 to 2, with the point at the left border."""
    drawn = Page(str(draw_chart(Chart(title="Loss", lines=[Line(name="loss", xs=[7], ys=[0.5], colour=0)]))))
    centred = [value for kind, key, value in drawn.attributes if (kind, key) == ("text", "text-anchor")]
    assert centred.count("middle") == 1
    assert drawn.texts.count("7") == 1
    (x,) = (float(value) for kind, key, value in drawn.attributes if (kind, key) == ("circle", "cx"))
    assert WIDTH / 3 < x < 2 * WIDTH / 3


def test_the_verb_writes_it_and_imports_no_torch(run, tmp_path):
    result = CliRunner().invoke(app, ["report", str(run), "-o", str(tmp_path / "new" / "page.html")])
    assert result.exit_code == 0, result.output
    assert re.sub(r"\s", "", result.output) == str(tmp_path / "new" / "page.html")
    assert (tmp_path / "new" / "page.html").stat().st_size > 10_000
    code = (
        f"import sys, volseg.reporting; volseg.reporting.write_report({str(run)!r}); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=200).returncode == 0
