"""What a package index, a librarian and a newcomer read: consistent, and true."""

import re
import subprocess
import tomllib
from pathlib import Path

import yaml

import tailguard

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
CITATION = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))


def test_the_version_and_the_licence_are_the_same_everywhere():
    assert CITATION["version"] == PROJECT["project"]["version"] == tailguard.__version__
    assert CITATION["license"] == PROJECT["project"]["license"] == "Apache-2.0"
    licence = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in licence
    assert "Version 2.0, January 2004" in licence
    assert "END OF TERMS AND CONDITIONS" in licence


def test_the_citation_has_what_its_format_requires():
    assert {"cff-version", "message", "title", "authors"} <= CITATION.keys()
    assert all("name" in author or "family-names" in author for author in CITATION["authors"])


def test_every_pinned_dependency_is_pinned_once_and_every_one_is_pinned():
    pinned = re.findall(r"^([\w.-]+)==", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    names = [_normal(name) for name in pinned]
    assert len(names) == len(set(names))
    extras = PROJECT["project"]["optional-dependencies"]
    assert "tailguard[docs]" in extras["dev"]  # the tests build the documentation
    needed = [*PROJECT["project"]["dependencies"], *extras["dev"], *extras["bench"], *extras["docs"]]
    required = {_normal(re.split(r"[<>=~!\[ ]", requirement)[0]) for requirement in needed} - {"tailguard"}
    assert sorted(required - set(names)) == []


def test_data_files_are_shipped():
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["tailguard"]
    source = ROOT / "src" / "tailguard"
    shipped = {path for pattern in patterns for path in source.glob(pattern)}
    kept = (path for path in source.rglob("*") if "__pycache__" not in path.parts)
    others = {path for path in kept if path.is_file() and path.suffix != ".py"}
    assert others == {path for path in shipped if path.is_file()}


def test_commands_that_contributors_are_told_exist():
    made = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    told = set(re.findall(r"make ([a-z][\w-]*)", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")))
    scripts = {f"bench-{path.stem}" for path in (ROOT / "benchmarks").glob("*.py")}
    assert told - made - scripts == set()


def _normal(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def test_the_bill_of_materials_is_made_by_a_tool_of_its_own():
    """`make sbom` needs a network, so only its commands are looked at: the tool must not end up in the environment it lists."""
    commands = subprocess.run(["make", "-n", "sbom"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert ".venv/sbom/bin/cyclonedx-py environment .venv/bin/python" in commands
    assert "--output-file artifacts/sbom.cdx.json" in commands
