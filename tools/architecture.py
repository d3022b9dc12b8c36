"""Draw the packages from their imports: `python tools/architecture.py` rewrites the drawings of docs/architecture.md.

Every import statement in the source counts, also those inside functions and under ``TYPE_CHECKING``: an import that waits for
its first use is an arrow all the same. The only file that is left out is ``tailguard/__init__.py``: it names
what is public, and loads it on first use.
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
    ("market", "optim", "population", "robust"),
    ("ppo",),
    ("evaluate",),
    ("config",),
    ("experiments",),
    ("cli",),
    ("__main__",),
)
ALONE = ("config", "__main__")  # files beside the packages that are packages of their own; all others are the foundation
Graph = dict[str, set[str]]


def modules(source: Path = SOURCE) -> dict[str, Path]:
    """Every module but ``tailguard/__init__.py``, by its name without ``tailguard.``; a package stands for its ``__init__``."""
    found = {}
    for path in sorted(source.rglob("*.py")):
        parts = path.relative_to(source).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        if parts:
            found[".".join(parts)] = path
    return found


def imported(path: Path, known: Mapping[str, Path]) -> set[str]:
    """The modules of Tailguard that a file names in an import, wherever the statement stands.

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
    """The module that a dotted name lies in; None for a name of ``tailguard/__init__.py``, such as the version."""
    if name in known:
        return name
    owner, dot, _ = name.rpartition(".")
    if not dot:
        return None
    if owner not in known:
        raise ValueError(f"{path}: imports {NAME}.{name}, and there is no module {NAME}.{owner}")
    return owner


def module_graph(source: Path = SOURCE) -> Graph:
    """Who imports whom, module by module."""
    known = modules(source)
    return {name: imported(path, known) - {name} for name, path in known.items()}


def package_of(module: str) -> str:
    """The package of a module, or the file itself where it is a package of its own."""
    head, dot, _ = module.partition(".")
    return head if dot or head in ALONE or (SOURCE / head).is_dir() else FOUNDATION


def package_graph(graph: Graph) -> Graph:
    """Who imports whom, package by package."""
    packages: Graph = {package_of(module): set() for module in graph}
    for module, targets in graph.items():
        packages[package_of(module)] |= {package_of(target) for target in targets} - {package_of(module)}
    return packages


def backward(packages: Graph) -> list[tuple[str, str]]:
    """The arrows that do not lead to a lower layer; a package without a layer counts as a mistake, too."""
    height = {package: level for level, layer in enumerate(LAYERS) for package in layer}
    missing = sorted(set(packages) - set(height))
    if missing:
        raise ValueError(f"packages without a layer: {', '.join(missing)}")
    return sorted(
        (package, target) for package, targets in packages.items() for target in targets if height[target] >= height[package]
    )


def cycle(graph: Graph) -> list[str]:
    """A way from a module back to itself; empty where there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def reduced(graph: Graph) -> Graph:
    """Without the arrows that others imply: what can be reached stays the same. The graph must have no cycle."""
    reach: Graph = {}
    for node in TopologicalSorter(graph).static_order():
        targets = graph.get(node, set())
        reach[node] = targets.union(*(reach[target] for target in targets))
    return {node: {t for t in targets if not any(t in reach[u] for u in targets - {t})} for node, targets in graph.items()}


def mermaid(graph: Graph, labels: Mapping[str, str]) -> str:
    """A drawing; arrows lead from a module to what it imports."""
    ids = {name: re.sub(r"\W", "_", name).strip("_") + "_" for name in graph}  # "end" and the like are words of mermaid
    lines = ["```mermaid", "graph TD"]
    lines += [f'  {ids[name]}["{labels[name]}"]' for name in sorted(graph)]
    lines += [f"  {ids[name]} --> {ids[target]}" for name in sorted(graph) for target in sorted(graph[name])]
    return "\n".join([*lines, "```"])


def drawings(graph: Graph) -> dict[str, str]:
    """The text of every drawing, by the name of its markers."""
    packages = package_graph(graph)
    label = {package: f"{package}.py" if package in ALONE else package for package in packages}
    table = ["| package | imports |", "|---|---|"]
    ordered = [package for layer in reversed(LAYERS) for package in layer]
    table += [f"| `{label[package]}` | {_names(packages[package])} |" for package in ordered]
    layers = [f"{number}. {_names(layer)}" for number, layer in enumerate(LAYERS, start=1)]
    return {
        "layers": "\n".join(layers),
        "packages": "\n\n".join([mermaid(reduced(packages), label), "\n".join(table)]),
    }


def _names(packages: Iterable[str]) -> str:
    return ", ".join(f"`{package}`" for package in sorted(packages)) or "nothing"


def redrawn(text: str, drawn: Mapping[str, str]) -> str:
    """The document with every drawing in its place.

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
        text = f"{head}{start}\n{drawing}\n{end}{tail}"
    return text


def main() -> None:
    """Rewrite the drawings, or say whether they are as the imports say."""
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
