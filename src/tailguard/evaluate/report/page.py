"""A self-contained HTML page of sections: markup, style, data and script in one file that loads nothing.

Text is escaped unless :func:`tag` or :func:`join` made it. A content security policy also names the page's own style and
script by their checksums: markup that slipped in through a name could neither run nor load anything.
"""

import base64
import hashlib
import html
import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from tailguard.evaluate.report.charts import Chart

Attribute = str | int | bool | None
MOST_ON_PAPER = 10  # columns
VOID = frozenset({"meta", "link", "br", "hr", "img", "input"})
SCRIPTS = ("scales.js", "marks.js", "zoom.js", "panel.js", "rows.js", "figure.js", "page.js")
STYLES = ("tokens.css", "page.css", "charts.css", "print.css")


class Html(str):
    """Text that is markup already; only :func:`tag` and :func:`join` make it from other text."""

    __slots__ = ()


def text(value: str) -> Html:
    """Return text as markup, escaped unless it is markup already."""
    return value if isinstance(value, Html) else Html(html.escape(value, quote=True))


def tag(name: str, /, *children: str, **attributes: Attribute) -> Html:
    """Return an element.

    :param name: of the element, such as ``p``.
    :param children: text, which is escaped, or markup, which is not.
    :param attributes: an underscore in a name stands for a hyphen, one at its end for nothing (``class_``); None and
        False leave the attribute out, True gives it without a value.
    """
    written = "".join(_attribute_text(key.rstrip("_").replace("_", "-"), value) for key, value in attributes.items())
    opened = f"<{name}{written}>"
    return Html(opened if name in VOID else f"{opened}{join(*children)}</{name}>")


def join(*parts: str) -> Html:
    """Concatenate markup; text among it is escaped."""
    return Html("".join(text(part) for part in parts))


def table(head: list[str], rows: list[list[str]], caption: str, numbers_from: int = 1) -> Html:
    """Return a table that scrolls sideways where it does not fit.

    :param head: names of the columns.
    :param rows: cells; the first of each row names it.
    :param caption: what the table shows, in one sentence.
    :param numbers_from: columns from this one on hold numbers and are set to the right.
    """
    kinds = [None if i < numbers_from else "number" for i in range(len(head))]
    top = join(*(tag("th", cell, scope="col", class_=kind) for cell, kind in zip(head, kinds, strict=True)))
    body = join(*(tag("tr", *_cells(row, kinds)) for row in rows))
    inside = join(tag("caption", caption), tag("thead", tag("tr", top)), tag("tbody", body))
    # A browser shrinks the printed page to its widest element, so tables that fit on no paper are not printed.
    look = "scroll" if len(head) <= MOST_ON_PAPER else "scroll screen"
    return tag("div", tag("table", inside), class_=look, tabindex=0, role="region", aria_label=caption)


def _cells(row: list[str], look: list[str | None]) -> list[Html]:
    first = tag("th", row[0], scope="row", class_=look[0])
    return [first, *(tag("td", cell, class_=kind) for cell, kind in zip(row[1:], look[1:], strict=True))]


def _attribute_text(name: str, value: Attribute) -> str:
    if value is None or value is False:
        return ""
    return f" {name}" if value is True else f' {name}="{html.escape(str(value), quote=True)}"'


@dataclass(frozen=True)
class Tabs:
    """Alternatives, of which a screen shows one and paper shows all.

    :param id: unique on the page.
    :param label: the choice that the tabs offer.
    :param panes: content by name of the tab.
    """

    id: str
    label: str
    panes: dict[str, "list[Block]"]


Block = Html | Chart | Tabs


@dataclass(frozen=True)
class ReportSection:
    """A section of the page.

    :param id: unique on the page, and the target of links.
    :param title: short, for the contents.
    :param headline: the finding, as a sentence.
    :param lead: one or two sentences on how to read the section.
    :param blocks: in order.
    """

    id: str
    title: str
    headline: str
    lead: str
    blocks: Sequence[Block]

    def html(self) -> Html:
        """Return the section as markup."""
        head = join(
            tag("p", self.title, class_="kicker"),
            tag("h2", self.headline, id=f"{self.id}-title"),
            tag("p", self.lead, class_="lead") if self.lead else Html(""),
        )
        return tag("section", tag("header", head), render(self.blocks), id=self.id, aria_labelledby=f"{self.id}-title")


def render(blocks: Sequence[Block]) -> Html:
    """Return blocks as markup."""
    return join(*(_render(block) for block in blocks))


def charts_of(blocks: Sequence[Block]) -> list[Chart]:
    """Return all charts, those in tabs included."""
    charts: list[Chart] = []
    for block in blocks:
        if isinstance(block, Chart):
            charts.append(block)
        elif isinstance(block, Tabs):
            charts += [chart for pane in block.panes.values() for chart in charts_of(pane)]
    return charts


def _render(block: Block) -> Html:
    if isinstance(block, Chart):
        return _figure(block)
    if isinstance(block, Tabs):
        return _tabs(block)
    return block


def _figure(chart: Chart) -> Html:
    """Return a chart with its title, note and download; screen readers also read the summary."""
    download = tag(
        "button", "Data as CSV", type="button", class_="quiet", data_csv=chart.id, aria_label=f"Data as CSV: {chart.title}"
    )
    caption = tag(
        "figcaption",
        tag("h3", chart.title, id=f"figure-{chart.id}-title"),
        tag("p", chart.summary, class_="summary", id=f"figure-{chart.id}-summary"),
    )
    note = tag("p", tag("span", chart.note), download, class_="note")
    return tag(
        "figure",
        caption,
        tag("div", class_="chart", data_figure=chart.id),
        note,
        aria_labelledby=f"figure-{chart.id}-title",
        aria_describedby=f"figure-{chart.id}-summary",
    )


def _tabs(tabs: Tabs) -> Html:
    names = list(tabs.panes)
    buttons = [
        tag(
            "button",
            name,
            type="button",
            role="tab",
            id=f"{tabs.id}-tab-{i}",
            aria_controls=f"{tabs.id}-pane-{i}",
            aria_selected="true" if i == 0 else "false",
        )
        for i, name in enumerate(names)
    ]
    panes = [
        tag(
            "div",
            tag("p", name, class_="pane-name"),
            render(tabs.panes[name]),
            role="tabpanel",
            id=f"{tabs.id}-pane-{i}",
            aria_labelledby=f"{tabs.id}-tab-{i}",
        )
        for i, name in enumerate(names)
    ]
    return join(tag("div", *buttons, role="tablist", aria_label=tabs.label, class_="tabs"), *panes)


def page(
    title: str, top: Html, sections: Sequence[ReportSection], files: dict[str, dict[str, str]], *, intraday: bool = False
) -> str:
    """Return a whole page.

    :param title: of the window.
    :param top: markup above the table of contents.
    :param sections: in order; their ids and those of their charts are unique.
    :param files: downloads by key, each with ``name``, ``type`` and ``text``.
    :param intraday: True shows the time of day.
    """
    figures = {chart.id: chart.data() for section in sections for chart in charts_of(section.blocks)}
    data = {"figures": figures, "files": files, "intraday": intraday}
    style, script = (_assets(names) for names in (STYLES, SCRIPTS))
    # Function scope: the script cannot clash with names that a browser adds to the window.
    script = f'"use strict";\n(() => {{\n{script}\n}})();\n'
    policy = (
        f"default-src 'none'; script-src {_checksum(script)}; style-src {_checksum(style)}; base-uri 'none'; form-action 'none'"
    )
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", title),
        tag("style", Html(style)),
    )
    body = tag(
        "body",
        tag("a", "Skip to the verdict", href="#content", class_="skip"),
        tag("main", top, _contents(sections), *(section.html() for section in sections), id="content"),
        tag("noscript", tag("p", "The charts need JavaScript. All tables and texts are shown without it.")),
        tag("script", Html(_embedded(data)), type="application/json", id="report-data"),
        tag("script", Html(script)),
    )
    return f"<!DOCTYPE html>\n{tag('html', head, body, lang='en')}\n"


def _contents(sections: Sequence[ReportSection]) -> Html:
    links = join(*(tag("li", tag("a", section.title, href=f"#{section.id}")) for section in sections))
    return tag("nav", tag("ol", links), aria_label="Contents")


def _assets(names: Sequence[str]) -> str:
    folder = resources.files("tailguard.evaluate.report").joinpath("assets")
    return "\n".join(folder.joinpath(name).read_text(encoding="utf-8") for name in names)


def _checksum(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _embedded(data: dict[str, Any]) -> str:
    """Return JSON for a script element: without angle brackets it cannot end the element."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"), ensure_ascii=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text
