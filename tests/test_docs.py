"""The documentation builds as a site, strictly and without a network, and its links lead somewhere."""

import importlib
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def headings(path):
    """The anchors of a document, as GitHub and the site make them."""
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", title.lower())).strip("-") for title in titles}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_between_documents_lead_somewhere(path):
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"\w+://", link):
            continue
        file, _, anchor = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        assert target.exists(), f"{path.name} links to {link}"
        assert not anchor or anchor in headings(target), f"{path.name} links to {link}, which has no such heading"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_imports_that_a_document_shows_work(path):
    statements = re.findall(
        r"^(?:\| `)?from (tailguard[\w.]*) import ([\w, ]+)", path.read_text(encoding="utf-8"), re.MULTILINE
    )
    for module, names in statements:
        for name in names.split(","):
            getattr(importlib.import_module(module), name.strip())


def test_the_readme_is_short_and_its_figures_name_their_machine():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(readme.split()) <= 900
    assert re.search(r"two cores of an? .*?: `make demo` takes", readme, re.DOTALL)


class Loaded(HTMLParser):
    """Addresses that a browser loads by itself when it opens a page."""

    def __init__(self):
        super().__init__()
        self.addresses = []

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        if tag in ("script", "img", "iframe"):
            self.addresses.append(found.get("src") or "")
        elif tag == "link" and found.get("rel") in ("stylesheet", "icon", "preload", "preconnect"):
            self.addresses.append(found.get("href") or "")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return folder


def test_every_document_is_a_page(site):
    pages = {path.relative_to(ROOT / "docs").with_suffix(".html") for path in DOCUMENTS if path.is_relative_to(ROOT / "docs")}
    assert {page for page in pages if not (site / page).exists()} == set()


def test_pages_load_nothing_from_a_network(site):
    for path in site.rglob("*.html"):
        page = Loaded()
        page.feed(path.read_text(encoding="utf-8"))
        assert [address for address in page.addresses if re.match(r"(\w+:)?//", address)] == [], path.name


def test_the_api_is_documented(site):
    algorithm, market = ((site / "api" / f"{name}.html").read_text(encoding="utf-8") for name in ("ppo", "market"))
    assert 'id="tailguard.ppo.algorithm.DistributionalPPO.train"' in algorithm
    assert 'id="tailguard.market.accounting.simulate"' in market
    assert "target_weights" in market
