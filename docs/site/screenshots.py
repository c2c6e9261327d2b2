"""Take the pictures of the docs: a run's report, viewer and TensorBoard, in a browser without a window.

    python docs/site/screenshots.py DIR/Task04_Hippocampus         trains for some minutes on a CPU first
    python docs/site/screenshots.py --run runs/task04_unet         of a run that is there

Chromium is needed (Debian: apt install chromium). TensorBoard's server listens on 127.0.0.1 alone.
"""

import argparse
import io
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from urllib.parse import quote

from headless_browser import Browser, Tab
from PIL import Image

from volseg.commands import run_module
from volseg.reporting import write_report

SCALARS = "^train/loss$|^val/dice"
BOARD = """localStorage.setItem('_tb_global_settings', JSON.stringify({
    timeSeriesSettingsPaneOpened: false, ignoreOutliers: false, stepSelectorEnabled: false, sideBarWidthInPercent: 12,
    timeSeriesCardMinWidth: 500}))"""
"""What a user of TensorBoard would set: no pane of settings, wide cards, axes that hold the whole of each curve."""
ROOT = Path(__file__).parents[2]
MOST_BYTES, MOST_OF_VIEWER = 300_000, 150_000
SMALL = (
    "network.filters=[8,16,24,32]",
    "training={epochs: 16, iterations: 25, validate_every: 4, clip: 12, ema: 0.97}",
    "patch={size: [32, 40, 32], batch: 2, foreground: 0.33}",
    "augmentation.margin=0",
    "inference.mirror=false",
    "evaluation.distances=true",
)
"""A network and a training that a CPU is done with in minutes; a Dice of 0.75 or so."""


def main() -> None:
    """Train if there is no run, and take every picture."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("data", type=Path, nargs="?", help="Task04_Hippocampus")
    parser.add_argument(
        "--run", type=Path, default=ROOT / "runs" / "screenshots", help="a run folder, trained if absent"
    )
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "docs" / "images")
    given = parser.parse_args()
    if not (given.run / "config.yaml").exists():
        if given.data is None:
            parser.error(f"{given.run} is not a run: name one by --run, or the data set to train on")
        train_small(given.data, given.run)
    given.output.mkdir(parents=True, exist_ok=True)
    with Browser() as browser:
        for picture in chain(
            *(take(browser, given.run, given.output) for take in (take_report, take_viewer, take_board))
        ):
            print(f"{picture}: {picture.stat().st_size / 1000:.0f} kB")


def train_small(data: Path, run: Path) -> None:
    """Train a small network for some minutes."""
    from volseg.experiment import load_config, train  # imports torch, which pictures of a run do not need

    overrides = [f"data.root={data}", f"output={run}", *SMALL]
    train(load_config(ROOT / "configs" / "task04_unet.yaml", overrides))


def take_report(browser: Browser, run: Path, output: Path) -> Iterator[Path]:
    """Photograph the top of the report by day and by night, its cases, and a phone's view."""
    url = write_report(run).absolute().as_uri()
    yield shrink(browser.open(url, width=1100, height=1000), output / "report_light.png")
    yield shrink(browser.open(url, width=1100, height=1000, dark=True), output / "report_dark.png")
    tab = browser.open(url, width=1100, height=640)
    tab.evaluate("document.querySelector('section:has(.pictures)').scrollIntoView()")
    yield shrink(tab, output / "report_cases.png")
    yield shrink(browser.open(url, width=390, height=844), output / "report_phone.png")


def take_viewer(browser: Browser, run: Path, output: Path) -> Iterator[Path]:
    """Photograph the case with the lowest Dice, and the same with one label switched off."""
    from volseg.experiment import view  # imports torch, which other pictures do not need

    tab = browser.open(view(run).absolute().as_uri(), width=1100, height=620)
    tab.wait_for("document.body.dataset.shown")
    yield shrink(tab, output / "view_both.png", MOST_OF_VIEWER)
    tab.evaluate("document.querySelector('#labels input').click()")
    tab.evaluate("new Promise((done) => setTimeout(done, 500))")  # drawn in a later frame
    yield shrink(tab, output / "view_label.png", MOST_OF_VIEWER)


def take_board(browser: Browser, run: Path, output: Path) -> Iterator[Path]:
    """Photograph TensorBoard's scalars and images, as high as whole cards need."""
    with serve_board(run / "tensorboard") as url:
        browser.open(url, width=1300, height=850).evaluate(BOARD)
        for name, tags, drawn, height in (
            ("scalars", SCALARS, "scalar-card .line-chart", 845),
            ("images", "hippocampus", "image-card img", 515),
        ):
            tab = browser.open(
                f"{url}?darkMode=false&smoothing=0&tagFilter={quote(tags, safe='')}#timeseries",
                width=1300,
                height=height,
            )
            tab.wait_for(f"document.querySelector('{drawn}')")
            tab.wait_for("[...document.images].every((image) => image.complete)")
            tab.evaluate(
                "new Promise((done) => setTimeout(done, 3000))"
            )  # lines are drawn by steps, of which none tells
            yield shrink(tab, output / f"tensorboard_{name}.png")


@contextmanager
def serve_board(folder: Path) -> Iterator[str]:
    """Run TensorBoard on a free port of this machine; yield its address."""
    command = run_module("tensorboard.main", "--logdir", str(folder), "--host", "127.0.0.1", "--port", "0")
    server = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, encoding="utf-8")
    try:
        assert server.stderr is not None
        for line in server.stderr:
            if address := re.search(r"http://127\.0\.0\.1:\d+/", line):
                yield address[0]
                return
        raise RuntimeError(f"TensorBoard ended with status {server.wait()} before it served anything")
    finally:
        server.terminate()
        server.wait()


def shrink(tab: Tab, file: Path, most_bytes: int = MOST_BYTES) -> Path:
    """Photograph a page in as many colours as keep the file small: of grey slices and few hues, 64 look the same."""
    tab.photograph(file)
    image = Image.open(io.BytesIO(file.read_bytes())).convert("RGB")
    for colours in (256, 128, 64, 32):
        image.quantize(colours, dither=Image.Dither.NONE).save(file, optimize=True)
        if file.stat().st_size <= most_bytes:
            return file
    raise RuntimeError(f"{file} is of {file.stat().st_size} bytes, more than the {most_bytes} that docs may hold")


if __name__ == "__main__":
    main()
