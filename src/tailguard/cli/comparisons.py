"""The common parts of `hedge` and `execute`: settings from the configuration and the command line, and the files of a run."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from pydantic import BaseModel

from tailguard.cli.terminal import print_table, say

if TYPE_CHECKING:
    from tailguard.evaluate.record import Estimate

REPORT, AGENT = "report.html", "agent"

Section = TypeVar("Section", bound=BaseModel)


class Comparison(Protocol):
    """A report that compares an agent with its rivals."""

    @property
    def title(self) -> str:
        """The comparison in words."""
        ...

    def statistics(self) -> dict[str, dict[str, "Estimate"]]:
        """Return figures by name."""
        ...

    def headline(self) -> str:
        """Return the finding."""
        ...

    def to_json(self) -> dict[str, Any]:
        """Return everything but the paths."""
        ...

    def html(self) -> str:
        """Return the report as a page."""
        ...


def overridden(section: Section, name: str, options: Mapping[str, Any]) -> Section:
    """Return a section of the configuration with the options that were given on the command line in its place.

    :param section: of the configuration.
    :param name: its key.
    :param options: by the names of its keys; None was not given.
    """
    from tailguard.validation import build

    given = {key: value for key, value in options.items() if value is not None}
    return build(type(section), section.model_dump() | given, name) if given else section


def write_comparison(save_agent: Callable[[Path], None], comparison: Comparison, folder: Path, figures: str) -> None:
    """Write the agent, the figures and the report into a folder.

    :param save_agent: writes the agent to a path.
    :param comparison: with its rivals.
    :param folder: made where it is missing.
    :param figures: name of the file of the figures.
    """
    from tailguard.evaluate.report.report import write_page
    from tailguard.io.atomic import atomic, make_folder

    make_folder(folder)
    save_agent(folder / AGENT)
    with atomic(folder / figures) as file:
        file.write(json.dumps(comparison.to_json(), indent=2).encode())
    write_page(comparison.html(), folder / REPORT)


def print_comparison(comparison: Comparison, folder: Path, heading: str, decimals: int) -> None:
    """Print the figures, the finding and where the report is.

    :param comparison: of an agent and its rivals.
    :param folder: of the report.
    :param heading: of the names.
    :param decimals: of the figures.
    """
    statistics = comparison.statistics()
    keys = list(next(iter(statistics.values())))
    rows = [[name, *(f"{figures[key].value:.{decimals}f}" for key in keys)] for name, figures in statistics.items()]
    print_table(comparison.title, [heading, *keys], rows, numbers=True)
    say(comparison.headline(), style="bold")
    say(f"report: {folder / REPORT}")
