"""One self-contained page: markup, style, data and script in a single file that loads nothing.

A content security policy names the page's own style and script by their checksums: even markup that slipped in through a name
could neither run nor load anything.
"""

import base64
import hashlib
import json
from collections.abc import Sequence
from importlib import resources
from typing import Any

from tailguard.evaluate.report.blocks import Section, charts
from tailguard.evaluate.report.markup import Html, join, tag

SCRIPTS = ("scales.js", "marks.js", "zoom.js", "panel.js", "rows.js", "figure.js", "page.js")
STYLES = ("tokens.css", "page.css", "charts.css", "print.css")


def page(
    title: str, top: Html, sections: Sequence[Section], files: dict[str, dict[str, str]], *, intraday: bool = False
) -> str:
    """A whole page.

    :param title: of the window.
    :param top: what stands above the contents.
    :param sections: in order; their ids and those of their charts are unique.
    :param files: what can be downloaded: ``name``, ``type`` and ``text`` by key.
    :param intraday: whether times are shown with their clock.
    """
    figures = {chart.id: chart.data() for section in sections for chart in charts(section.blocks)}
    data = {"figures": figures, "files": files, "intraday": intraday}
    style, script = (_assets(names) for names in (STYLES, SCRIPTS))
    # Function scope: nothing of the page's script can clash with what a browser adds to the window.
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
        tag("noscript", tag("p", "The charts need JavaScript; every table and every sentence is here without it.")),
        tag("script", Html(_embedded(data)), type="application/json", id="report-data"),
        tag("script", Html(script)),
    )
    return f"<!DOCTYPE html>\n{tag('html', head, body, lang='en')}\n"


def _contents(sections: Sequence[Section]) -> Html:
    links = join(*(tag("li", tag("a", section.title, href=f"#{section.id}")) for section in sections))
    return tag("nav", tag("ol", links), aria_label="Contents")


def _assets(names: Sequence[str]) -> str:
    folder = resources.files("tailguard.evaluate.report").joinpath("assets")
    return "\n".join(folder.joinpath(name).read_text(encoding="utf-8") for name in names)


def _checksum(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _embedded(data: dict[str, Any]) -> str:
    """JSON that can stand in a script element: without angle brackets it cannot end the element it stands in."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"), ensure_ascii=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text
