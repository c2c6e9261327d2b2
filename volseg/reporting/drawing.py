"""Draw charts as inline SVG: lines over the epochs, boxes over the cases.

Each chart is as wide as a phone, and wide screens show charts side by side, so that their text stays readable. Colours
are classes of the page's style sheet, which has a light and a dark mode.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
from markupsafe import Markup, escape

from volseg.reporting.content import Boxes, Chart, Line


def tag(name: str, /, *children: str | Markup, **attributes: str | float) -> Markup:
    """Return an element; in names of attributes ``_`` stands for ``-``, and a final ``_`` (``class_``) is removed.

    Examples
    --------
    >>> tag("text", "<script>", class_="name", x=0.123)
    Markup('<text class="name" x="0.12">&lt;script&gt;</text>')
    """
    told = ""
    for key, value in attributes.items():
        text = f"{value:.2f}" if isinstance(value, float) else value
        told += f' {key.rstrip("_").replace("_", "-")}="{escape(text)}"'
    return Markup(f"<{name}{told}>{Markup().join(children)}</{name}>")  # noqa: S704 - all its parts are escaped


WIDTH, HEIGHT = 340, 190
LEFT, RIGHT, TOP, BOTTOM = 46, 8, 8, 24
NUM_COLOURS = 7
MOST_POINTS = 600
"""Maximum number of points of a line."""

ROW = 44
"""Height of a box with its name above it."""


def draw(chart: Chart | Boxes) -> Markup:
    """Return a chart, with a legend if it has more than one line."""
    if isinstance(chart, Boxes):
        return draw_boxes(chart)
    names = [(line.name, line.colour) for line in chart.lines]
    return draw_chart(chart) + (draw_legend(names) if len(names) > 1 else Markup())


def draw_chart(chart: Chart) -> Markup:
    """Return a chart of lines over the epochs, or over another axis."""
    ys = [y for line in chart.lines for y in line.ys if math.isfinite(y)]
    xs = [x for line in chart.lines for x in line.xs]
    ticks = choose_ticks(min(ys), max(ys))
    low, high = min(*ys, *ticks), max(*ys, *ticks)
    scale = math.log10 if chart.log else float
    first, last = scale(min(xs)), scale(max(xs))

    def place(x: float, y: float) -> tuple[float, float]:
        # A single epoch is drawn in the middle of the axis.
        across = LEFT + (WIDTH - LEFT - RIGHT) * ((scale(x) - first) / (last - first) if last > first else 0.5)
        return across, TOP + (HEIGHT - TOP - BOTTOM) * (1 - (y - low) / (high - low))

    parts = []
    for tick in ticks:
        _, height = place(xs[0], tick)
        parts.append(tag("line", class_="grid", x1=LEFT, x2=WIDTH - RIGHT, y1=height, y2=height))
        parts.append(tag("text", format_number(tick), x=LEFT - 6, y=height + 4, text_anchor="end"))
    below = [tick for tick in choose_ticks(first, last, 5) if first <= tick <= last]
    marks = [10.0**tick if chart.log else tick for tick in below if not chart.counts or tick == int(tick)]
    parts += [
        tag("text", format_number(mark), x=place(mark, low)[0], y=HEIGHT - 6, text_anchor="middle") for mark in marks
    ]
    for line in chart.lines:
        parts.extend(_draw_line(line, place))
    return _frame(parts, HEIGHT, f"{chart.title} over {chart.over}: {'; '.join(map(_tell_line, chart.lines))}")


def draw_boxes(boxes: Boxes) -> Markup:
    """Return a row per label: quartiles as a box, whiskers to the last value within 1.5 box lengths, dots for cases."""
    values = [value for _, cases in boxes.groups for _, value in cases if math.isfinite(value)]
    ticks = choose_ticks(min(values), max(values), 4)
    low, high = min(*values, *ticks), max(*values, *ticks)
    height = ROW * len(boxes.groups) + BOTTOM

    def place(value: float) -> float:
        return 8 + (WIDTH - 24) * (value - low) / (high - low)

    parts = []
    for tick in ticks:
        parts.append(tag("line", class_="grid", x1=place(tick), x2=place(tick), y1=0, y2=height - BOTTOM + 4))
        parts.append(tag("text", format_number(tick), x=place(tick), y=height - 6, text_anchor="middle"))
    told = []
    for number, (name, cases) in enumerate(boxes.groups):
        known = np.array([value for _, value in cases if math.isfinite(value)])
        absent = len(cases) - len(known)
        title = f"{name} ({absent} of {len(cases)} undefined)" if absent else name
        parts.append(tag("text", title, class_="name", x=8, y=ROW * number + 13))
        if not known.size:
            continue
        told.append(f"{name}: median {format_number(float(np.median(known)))} of {known.size}")
        middle, colour = ROW * number + 29, _paint(number, "stroke", "fill")
        parts.extend(_draw_box(known, middle, colour, place))
        for order, (case, value) in enumerate(cases):
            if math.isfinite(value):
                # Spread over three heights, so that equal values stay visible.
                dot = {"cx": place(value), "cy": middle + 5.0 * (order % 3 - 1), "r": 2.2}
                shown = tag("title", f"{case}: {value:.4g}")
                parts.append(tag("circle", shown, class_="dot", style=colour, **dot))
    return _frame(parts, height, f"{boxes.title}: {'; '.join(told)}")


def draw_legend(names: Sequence[tuple[str, int]]) -> Markup:
    """Return names with their colours."""
    keys = (tag("li", tag("i", style=_paint(colour, "background")), name) for name, colour in names)
    return tag("ul", *keys, class_="legend")


def choose_ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Return about ``count`` round numbers from ``low`` or just below to ``high`` or just above.

    Examples
    --------
    >>> choose_ticks(0.13, 0.94)
    [0.0, 0.25, 0.5, 0.75, 1.0]
    >>> choose_ticks(5, 5)
    [4.0, 5.0, 6.0]
    """
    if not math.isfinite(high - low):  # too large for a float: a diverged training
        return [low, 0.0, high]
    if high - low <= 1e-12 * max(abs(low), abs(high)):
        margin = abs(low) / 5 or 1.0
        return [low - margin, float(low), low + margin]
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * nice for nice in (1, 2, 2.5, 5, 10) if power * nice >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(number * step, 12 - math.floor(math.log10(step))) for number in range(first, last + 1)]


def format_number(value: float) -> str:
    """Return a number as short text.

    Examples
    --------
    >>> format_number(0.25), format_number(3.0), format_number(2e6), format_number(1e-05)
    ('0.25', '3', '2M', '1e-05')
    """
    for factor, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= factor:
            return f"{value / (1000 if letter == 'k' else factor):.4g}{letter}"
    return f"{value:.4g}"


def _paint(number: int, *properties: str) -> str:
    """Return a style in a colour of the palette; further colours repeat it in paler tones."""
    painted = ";".join(f"{one}:var(--c{number % NUM_COLOURS})" for one in properties)
    return painted if number < NUM_COLOURS else f"{painted};opacity:.4"


def _draw_line(line: Line, place: Callable[[float, float], tuple[float, float]]) -> list[Markup]:
    stroke = _paint(line.colour, "stroke")
    stride = -(-len(line.xs) // MOST_POINTS)
    points = list(zip(line.xs, line.ys, strict=True))
    points = [*points[::stride], *points[-1:]] if stride > 1 else points
    if line.dots:
        fill = stroke.replace("stroke", "fill")
        return [tag("circle", cx=x, cy=y, r=2.5, style=fill) for x, y in (place(*point) for point in points)]
    pieces: list[list[tuple[float, float]]] = [[]]
    for x, y in points:
        if math.isfinite(y):
            pieces[-1].append(place(x, y))
        elif pieces[-1]:
            pieces.append([])
    drawn = []
    for piece in pieces:
        if len(piece) == 1:  # between two gaps
            drawn.append(tag("circle", cx=piece[0][0], cy=piece[0][1], r=2.5, style=stroke.replace("stroke", "fill")))
        elif piece:
            path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in piece)
            drawn.append(tag("path", class_="curve", d=path, style=stroke))
    return drawn


def _draw_box(known: np.ndarray, middle: float, colour: str, place: Callable[[float], float]) -> list[Markup]:
    lower, median, upper = (float(value) for value in np.quantile(known, [0.25, 0.5, 0.75]))
    reach = 1.5 * (upper - lower)
    inside = known[(known >= lower - reach) & (known <= upper + reach)]
    ends = [(float(inside.min()), lower), (upper, float(inside.max()))]
    whiskers = [tag("line", x1=place(a), x2=place(b), y1=middle, y2=middle, style=colour) for a, b in ends]
    box = tag("rect", class_="box", x=place(lower), y=middle - 9, height=18, style=colour,
              width=max(place(upper) - place(lower), 1.0))  # fmt: skip
    line = {"x1": place(median), "x2": place(median), "y1": middle - 9, "y2": middle + 9}
    return [*whiskers, box, tag("line", class_="median", style=colour, **line)]


def _tell_line(line: Line) -> str:
    known = [y for y in line.ys if math.isfinite(y)]
    if not known:
        return f"{line.name}: no value"
    lowest, highest = format_number(min(known)), format_number(max(known))
    return f"{line.name} from {format_number(known[0])} to {format_number(known[-1])}, between {lowest} and {highest}"


def _frame(parts: Sequence[Markup], height: float, told: str) -> Markup:
    return tag("svg", *parts, viewBox=f"0 0 {WIDTH} {height:g}", role="img", aria_label=told)
