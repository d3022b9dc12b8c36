"""What sections are made of: markup, charts and tabs, turned into HTML with unique ids and the charts collected."""

from collections.abc import Sequence
from dataclasses import dataclass

from tailguard.evaluate.report.figures import Chart
from tailguard.evaluate.report.markup import Html, join, tag


@dataclass(frozen=True)
class Tabs:
    """Alternatives, one of which is shown on a screen and all of which are printed.

    :param id: unique on the page.
    :param label: what the tabs choose.
    :param panes: from the names of the tabs to what they show.
    """

    id: str
    label: str
    panes: dict[str, "list[Block]"]


Block = Html | Chart | Tabs


@dataclass(frozen=True)
class Section:
    """A part of the page.

    :param id: unique on the page, and the target of links.
    :param title: short, for the contents.
    :param headline: what was found, as a sentence.
    :param lead: one or two sentences that say how to read what follows.
    :param blocks: in order.
    """

    id: str
    title: str
    headline: str
    lead: str
    blocks: Sequence[Block]

    def html(self) -> Html:
        """As markup."""
        head = join(
            tag("p", self.title, class_="kicker"),
            tag("h2", self.headline, id=f"{self.id}-title"),
            tag("p", self.lead, class_="lead") if self.lead else Html(""),
        )
        return tag("section", tag("header", head), render(self.blocks), id=self.id, aria_labelledby=f"{self.id}-title")


def render(blocks: Sequence[Block]) -> Html:
    """Blocks as markup."""
    return join(*(_render(block) for block in blocks))


def charts(blocks: Sequence[Block]) -> list[Chart]:
    """All charts, those in tabs included."""
    found: list[Chart] = []
    for block in blocks:
        if isinstance(block, Chart):
            found.append(block)
        elif isinstance(block, Tabs):
            found += [chart for pane in block.panes.values() for chart in charts(pane)]
    return found


def _render(block: Block) -> Html:
    if isinstance(block, Chart):
        return _figure(block)
    if isinstance(block, Tabs):
        return _tabs(block)
    return block


def _figure(chart: Chart) -> Html:
    """The summary is read aloud with the chart; on the page the title and the note say the same to the eye."""
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
