"""HTML and SVG built from calls: every text is escaped, whatever it holds; only what was built here is not."""

from html import escape

__all__ = ["Markup", "join", "tag"]

VOID = {"meta", "img", "br", "link", "path", "line", "rect", "circle"}


class Markup(str):
    """Text that is markup already."""

    __slots__ = ()


def tag(name: str, /, *children: str | Markup, **attributes: str | float | bool | None) -> Markup:
    """Return an element.

    An attribute's name has ``_`` for ``-`` and may end with one where Python has a word of that name; True is an
    attribute without a value, None and False leave it out.

    Examples
    --------
    >>> tag("td", "<script>", class_="number")
    '<td class="number">&lt;script&gt;</td>'
    """
    told = ""
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        key = key.rstrip("_").replace("_", "-")
        told += f" {key}" if value is True else f' {key}="{escape(_format(value))}"'
    if name in VOID and not children:
        return Markup(f"<{name}{told}/>")
    return Markup(f"<{name}{told}>{join(children)}</{name}>")


def join(children: "tuple[str | Markup, ...] | list[Markup]") -> Markup:
    """Return several after each other, with what is no markup escaped."""
    return Markup("".join(child if isinstance(child, Markup) else escape(child) for child in children))


def _format(value: str | float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
