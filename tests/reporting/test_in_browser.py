"""The report in a real browser: no requests, no errors, at a phone's width and in dark mode."""

import sys
from itertools import pairwise
from pathlib import Path

import pytest

from tests.reporting.run_folders import LABELS, SCRIPT, make_crossed, make_run
from volseg.reporting import write_report

sys.path.insert(0, str(Path(__file__).parents[2] / "docs" / "site"))

from headless_browser import Browser, find_chromium
from screenshots import MOST_BYTES, take_report

pytestmark = pytest.mark.skipif(find_chromium() is None, reason="needs a browser (Debian: apt install chromium)")

LUMINANCE = """(() => {
  const [r, g, b] = getComputedStyle(document.documentElement).backgroundColor.match(/[\\d.]+/g).map(Number);
  return (0.2126 * r + 0.7152 * g + 0.0722 * b) / 255;
})()"""

CONTRASTS = """(() => {
  const light = (text) => text.match(/[\\d.]+/g).slice(0, 3).map((part) => {
    const c = Number(part) / 255;
    return c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  }).reduce((sum, c, place) => sum + c * [0.2126, 0.7152, 0.0722][place], 0);
  const behind = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const colour = getComputedStyle(at).backgroundColor;
      if (!/, 0\\)$/.test(colour)) return colour;
    }
  };
  const low = [];
  for (const element of document.querySelectorAll("h1,h2,h3,p,a,dt,dd,th,td,li,pre,summary,figcaption,text,.state")) {
    const style = getComputedStyle(element);
    const front = element.tagName === "text" ? style.fill : style.color;
    const [one, other] = [light(front), light(behind(element))].sort((a, b) => b - a);
    if ((one + 0.05) / (other + 0.05) < 4.5) low.push(`${element.tagName} ${element.className} ${front}`);
  }
  return low;
})()"""


@pytest.fixture(scope="module")
def browser():
    with Browser() as started:
        yield started


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    runs = {"run": make_run(folder / "run"), "crossed": make_crossed(folder / "crossed")}
    return {name: write_report(run).as_uri() for name, run in runs.items()}


@pytest.mark.parametrize("kind", ["run", "crossed"])
def test_the_page_asks_nobody_and_nothing_is_wrong_with_it(browser, pages, kind):
    tab = browser.open(pages[kind])
    assert tab.list_requests() == [pages[kind]]
    assert tab.list_complaints() == []
    assert tab.evaluate("document.images.length") > 0
    assert tab.evaluate("[...document.images].every((image) => image.complete && image.naturalWidth && image.alt)")
    # What is called like markup is shown as it is called.
    assert tab.evaluate("document.scripts.length") == 1
    assert SCRIPT.replace("/", "_") in tab.evaluate("document.body.innerText")
    assert LABELS["2"] in tab.evaluate("document.body.innerText")


def test_a_request_and_a_complaint_would_be_seen(browser, tmp_path):
    """What the other tests find nothing of is found where it is."""
    page = tmp_path / "asking.html"
    page.write_text(
        "<body style='width:2000px'><img src='http://127.0.0.1:9/x.png'><script>undefined.call()</script>",
        encoding="utf-8",
    )
    tab = browser.open(page.as_uri(), width=390, height=844)
    assert "http://127.0.0.1:9/x.png" in tab.list_requests()
    assert any("TypeError" in told for told in tab.list_complaints())
    assert tab.evaluate("document.documentElement.scrollWidth > innerWidth")


@pytest.mark.parametrize("kind", ["run", "crossed"])
@pytest.mark.parametrize("dark", [False, True])
def test_it_is_read_on_a_phone_by_day_and_by_night(browser, pages, kind, dark):
    tab = browser.open(pages[kind], width=390, height=844, dark=dark)
    assert tab.evaluate("innerWidth") == 390
    assert tab.evaluate("document.documentElement.scrollWidth") == 390
    boxes = "[...document.querySelectorAll('.scroll')].every((box) => box.getBoundingClientRect().right <= 390)"
    assert tab.evaluate(boxes)
    smallest = (
        "Math.min(...[...document.querySelectorAll('svg text')].map((text) => text.getBoundingClientRect().height))"
    )
    assert tab.evaluate(smallest) > 9
    luminance = tab.evaluate(LUMINANCE)
    assert (luminance < 0.1) if dark else (luminance > 0.9)
    assert tab.evaluate(CONTRASTS) == []


def test_a_press_on_a_head_sorts_a_table(browser, pages):
    tab = browser.open(pages["run"])
    column = (
        "[...document.querySelector('table:has(th button)').tBodies[0].rows].map((row) => row.cells[{}].textContent)"
    )

    def press(place):
        tab.evaluate(f"document.querySelectorAll('th button')[{place}].click()")
        return tab.evaluate(column.format(place))

    names = press(0)
    assert sorted(names) == sorted(tab.evaluate(column.format(0)))
    rising, falling = press(2), press(2)
    assert [float(text) for text in rising] == sorted(map(float, rising))
    assert falling == rising[::-1]
    assert tab.evaluate("document.querySelectorAll('th button')[2].closest('th').ariaSort") == "descending"
    assert press(4)[-1] == "infinite"  # what is no number comes last, whichever way it is sorted
    assert press(4)[-1] == "infinite"


def test_it_can_be_read_without_eyes_and_on_paper(browser, pages):
    tab = browser.open(pages["run"])
    levels = tab.evaluate("[...document.querySelectorAll('h1,h2,h3')].map((head) => Number(head.tagName[1]))")
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(later - earlier <= 1 for earlier, later in pairwise(levels))
    assert tab.evaluate("document.documentElement.lang") == "en"
    unnamed = "[...document.querySelectorAll('svg,[role=region],table,nav')].filter((part) => !part.ariaLabel).length"
    assert tab.evaluate(unnamed) == 0
    assert tab.evaluate("[...document.querySelectorAll('th')].every((head) => head.scope)")
    targets = "[...document.querySelectorAll('nav a')].every((link) => document.querySelector(link.hash))"
    assert tab.evaluate(targets)
    tab.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert tab.evaluate("[...document.querySelectorAll('details')].every((part) => part.open)")


def test_the_pictures_of_the_docs_can_be_taken_again(browser, tmp_path):
    """Of the report; those of TensorBoard take its server and half a minute."""
    pictures = list(take_report(browser, make_run(tmp_path / "run"), tmp_path))
    assert len(pictures) == 4
    for picture in pictures:
        assert 1000 < picture.stat().st_size <= MOST_BYTES
