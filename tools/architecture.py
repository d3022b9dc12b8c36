"""Read the packages from their imports: `python tools/architecture.py` rewrites the tables of docs/architecture.md.

Every import statement in the source counts, also those inside functions and under ``TYPE_CHECKING``. The only file that is left
out is ``tailguard/__init__.py``: it names what is public, and loads it on first use.
"""

import argparse
import ast
import re
import sys
from collections.abc import Iterable, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "tailguard"
DOCUMENT = ROOT / "docs" / "architecture.md"
NAME = "tailguard"
FOUNDATION = "foundation"
# From the ground up. A package imports from layers below its own, and the packages of one layer do not know each other.
LAYERS: tuple[tuple[str, ...], ...] = (
    (FOUNDATION,),
    ("envs",),
    ("io",),
    ("parallel",),
    ("market", "optim", "population", "robust"),
    ("ppo",),
    ("evaluate",),
    ("config",),
    ("experiments",),
    ("cli",),
    ("__main__",),
)
# Files beside the packages that are packages of their own; all other files there are the foundation.
ALONE = {"config": "config", "config_help": "config", "__main__": "__main__"}
Graph = dict[str, set[str]]


def modules(source: Path = SOURCE) -> dict[str, Path]:
    """Return the paths of all modules but ``tailguard/__init__.py``, by dotted name; a package is its ``__init__``."""
    found = {}
    for path in sorted(source.rglob("*.py")):
        parts = path.relative_to(source).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        if parts:
            found[".".join(parts)] = path
    return found


def imported(path: Path, known: Mapping[str, Path]) -> set[str]:
    """Return the modules of Tailguard that a file imports, wherever the statement stands.

    :param path: the file.
    :param known: all modules, from :func:`modules`.
    :raises ValueError: at a relative import, or one of a module that does not exist.
    """
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            if node.level or node.module is None:
                raise ValueError(f"{path}:{node.lineno}: a relative import; write the whole name")
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    own = {name.removeprefix(f"{NAME}.") for name in names if name.startswith(f"{NAME}.")}
    return {module for name in own if (module := _module_of(name, known, path)) is not None}


def _module_of(name: str, known: Mapping[str, Path], path: Path) -> str | None:
    """Return the module of a dotted name; None for a name of ``tailguard/__init__.py``, such as the version."""
    if name in known:
        return name
    owner, dot, _ = name.rpartition(".")
    if not dot:
        return None
    if owner not in known:
        raise ValueError(f"{path}: imports {NAME}.{name}, and there is no module {NAME}.{owner}")
    return owner


def module_graph(source: Path = SOURCE) -> Graph:
    """Return the imports of every module."""
    known = modules(source)
    return {name: imported(path, known) - {name} for name, path in known.items()}


def package_of(module: str) -> str:
    """Return the package of a module, or the file itself where it is a package of its own."""
    head, dot, _ = module.partition(".")
    return ALONE.get(head, head if dot or (SOURCE / head).is_dir() else FOUNDATION)


def package_graph(graph: Graph) -> Graph:
    """Return the imports of every package."""
    packages: Graph = {package_of(module): set() for module in graph}
    for module, targets in graph.items():
        packages[package_of(module)] |= {package_of(target) for target in targets} - {package_of(module)}
    return packages


def backward(packages: Graph) -> list[tuple[str, str]]:
    """Return the imports that do not lead to a lower layer.

    :param packages: from :func:`package_graph`.
    :raises ValueError: for a package without a layer.
    """
    height = {package: level for level, layer in enumerate(LAYERS) for package in layer}
    missing = sorted(set(packages) - set(height))
    if missing:
        raise ValueError(f"packages without a layer: {', '.join(missing)}")
    return sorted(
        (package, target) for package, targets in packages.items() for target in targets if height[target] >= height[package]
    )


def cycle(graph: Graph) -> list[str]:
    """Return a cycle of imports; empty where there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def layer_cake() -> str:
    """Return the layers as text, the highest on top."""
    rows = ["   ".join(layer) for layer in reversed(LAYERS)]
    width = max(map(len, rows))
    return "\n".join(["```text", *(row.center(width).rstrip() for row in rows), "```"])


def drawings(graph: Graph) -> dict[str, str]:
    """Return the text of every drawing, by the name of its markers."""
    packages = package_graph(graph)
    table = ["| package | imports |", "|---|---|"]
    ordered = [package for layer in reversed(LAYERS) for package in layer]
    table += [f"| `{package}` | {_names(packages[package])} |" for package in ordered]
    return {"layers": layer_cake(), "packages": "\n".join(table)}


def _names(packages: Iterable[str]) -> str:
    return ", ".join(f"`{package}`" for package in sorted(packages)) or "nothing"


def redrawn(text: str, drawn: Mapping[str, str]) -> str:
    """Return the document with every drawing in its place.

    :param text: of the document.
    :param drawn: from :func:`drawings`.
    :raises ValueError: when a drawing has no place, or a place has no drawing.
    """
    places = re.findall(r"<!-- drawn: ([\w.]+) -->", text)
    if sorted(places) != sorted(drawn):
        raise ValueError(f"the document has places for {sorted(places)}, the imports need {sorted(drawn)}")
    for name, drawing in drawn.items():
        start, end = f"<!-- drawn: {name} -->", "<!-- end -->"
        head, _, rest = text.partition(start)
        _, found, tail = rest.partition(end)
        if not found:
            raise ValueError(f"the drawing {name} has no {end}")
        text = f"{head}{start}\n\n{drawing}\n\n{end}{tail}"
    return text


def main() -> None:
    """Rewrite the drawings, or check them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 when something has changed")
    check = parser.parse_args().check
    graph = module_graph()
    wrong = [f"{package} imports {target}, which is not below it" for package, target in backward(package_graph(graph))]
    wrong += [f"modules that import each other: {' -> '.join(found)}"] if (found := cycle(graph)) else []
    if wrong:
        sys.exit("\n".join(wrong))
    before = DOCUMENT.read_text(encoding="utf-8")
    after = redrawn(before, drawings(graph))
    if check:
        sys.exit("docs/architecture.md is not what the imports say: python tools/architecture.py" if before != after else 0)
    DOCUMENT.write_text(after, encoding="utf-8")


if __name__ == "__main__":
    main()
