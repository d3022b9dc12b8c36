"""The pages of docs/concepts say where each equation is computed; a reader who follows them finds it there."""

import importlib
import inspect
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = {path.stem: path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs" / "concepts").glob("*.md"))}
# Every idea, the page that explains it, and the function that computes it.
IDEAS = {
    "GAE": ("gae", "gae"),
    "SR(lambda)": ("sr-lambda", "sr_lambda_targets"),
    "quantile loss": ("quantile-critics", "quantile_huber_loss"),
    "PopArt": ("popart", "ReturnScale.activate"),
    "return capping": ("cvar", "RiskObjective.rewards"),
    "VGS factor": ("vgs", "VarianceGradientScaler.factors"),
    "UPGD gate": ("upgd", "gate_factor"),
    "robust KL": ("robust", "RobustRegulariser.penalty"),
    "exploit": ("pbt", "exploit"),
    "fill price": ("market", "adverse_fraction"),
    "deflated Sharpe": ("verdict", "deflated_sharpe"),
}


def named(text):
    """File and name of everything that a page says is in the code."""
    for line in re.findall(r"^ *\*\*In the code:\*\* (.*)$", text, re.MULTILINE):
        places = re.findall(r"`(src/tailguard/[\w/]+\.py)`: ((?:`[\w.]+`(?:, )?)+)", line)
        assert places, line
        assert "; ".join(f"`{path}`: {names}" for path, names in places) == line.strip(), line
        for path, names in places:
            yield from ((path, name) for name in re.findall(r"`([\w.]+)`", names))


PLACES = sorted({(page, path, name) for page, text in PAGES.items() for path, name in named(text)})


@pytest.mark.parametrize(("page", "path", "name"), PLACES, ids=lambda part: part)
def test_what_a_page_names_is_defined_where_it_says(page, path, name):
    thing = importlib.import_module(path.removeprefix("src/").removesuffix(".py").replace("/", "."))
    for part in name.split("."):
        thing = getattr(thing, part)
    thing = thing.fget if isinstance(thing, property) else getattr(thing, "py_func", thing)  # compiled by numba
    assert Path(inspect.getsourcefile(inspect.unwrap(thing))).resolve() == ROOT / path


@pytest.mark.parametrize("idea", IDEAS)
def test_every_idea_has_its_equation_and_its_place(idea):
    page, name = IDEAS[idea]
    assert name in {found for _, found in named(PAGES[page])}
    assert "```\n" in PAGES[page]


def test_the_overview_links_every_page():
    linked = set(re.findall(r"\]\(([\w-]+)\.md\)", PAGES["index"]))
    assert linked == set(PAGES) - {"index"}


def test_a_page_is_a_page_or_two():
    assert {page: len(text.split()) for page, text in PAGES.items() if len(text.split()) > 1100} == {}
