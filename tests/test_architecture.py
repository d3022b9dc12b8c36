"""Who may import whom. Read from the source, so that a lazy import counts too."""

import ast
import re
from pathlib import Path

import architecture
import pytest

import tailguard

SOURCE = Path(tailguard.__file__).parent
# A package may not import what its row names. A test engine never belongs in the product.
FORBIDDEN = {
    "": ("vectorbt", "backtesting", "empyrical", "arch", "statsmodels", "ffn"),
    "optim": ("gymnasium", "stable_baselines3"),
    "robust": ("gymnasium", "stable_baselines3"),
    "market": ("torch",),
}


def imports(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def inside(name, package):
    return name == package or name.startswith(package + ".")


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE)))
def test_libraries_stay_where_they_belong(path):
    forbidden = FORBIDDEN[""] + FORBIDDEN.get(path.relative_to(SOURCE).parts[0], ())
    crossed = [(name, wall) for name in imports(path) for wall in forbidden if inside(name, wall)]
    assert not crossed


def test_all_arrows_lead_to_a_lower_layer():
    graph = architecture.module_graph()
    assert {path.relative_to(SOURCE).with_suffix("").parts[0] for path in SOURCE.rglob("*.py")} - {"__init__"} <= {
        module.partition(".")[0] for module in graph
    }
    assert architecture.backward(architecture.package_graph(graph)) == []
    assert architecture.cycle(graph) == []


def test_the_drawings_are_what_the_imports_say():
    text = architecture.DOCUMENT.read_text(encoding="utf-8")
    drawn = architecture.drawings(architecture.module_graph())
    assert text == architecture.redrawn(text, drawn), "python tools/architecture.py redraws docs/architecture.md"
    assert all(drawing in text for drawing in drawn.values())


def test_every_package_and_every_station_is_explained():
    text = architecture.DOCUMENT.read_text(encoding="utf-8")
    packages = set(architecture.package_graph(architecture.module_graph())) - {"__main__"}
    assert set(re.findall(r"^### (\w+)$", text, re.MULTILINE)) == packages
    named = set(re.findall(r"`([a-z_]+(?:/[a-z_]+)*\.py)`", text.partition("## The packages")[0].partition("## How data")[2]))
    assert len(named) > 10
    assert [name for name in sorted(named) if not (SOURCE / name).exists()] == []


@pytest.fixture
def package_tree(tmp_path, monkeypatch):
    """A small tree of packages: who imports what, as the text of its files."""
    monkeypatch.setattr(architecture, "SOURCE", tmp_path)

    def build(**files):
        for name, text in files.items():
            path = tmp_path / (name.replace("__in__", "/") + ".py")
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        return architecture.module_graph(tmp_path)

    return build


def test_imports_are_found_wherever_they_stand(package_tree):
    graph = package_tree(
        validation="",
        errors="import tailguard.validation\n",
        market__in____init__="VALUE = 1\n",
        market__in__data="def f():\n    from tailguard.market import VALUE\n",
        ppo__in__run="from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from tailguard import errors, __version__\n",
        **{"__init__": "from tailguard.ppo.run import x\n"},
    )
    assert graph == {
        "validation": set(),
        "errors": {"validation"},
        "market": set(),
        "market.data": {"market"},
        "ppo.run": {"errors"},
    }


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("market__in__data", "from tailguard.ppo import run\n"),  # up
        ("market__in__data", "def f():\n    from tailguard.optim import run\n"),  # sideways, lazily
        ("validation", "import tailguard.market.data\n"),  # the ground knows nobody
        ("optim__in__run", "from tailguard.config import Config\n"),
    ],
)
def test_an_arrow_that_does_not_lead_down_is_found(package_tree, name, text):
    files = dict.fromkeys(("validation", "market__in__data", "optim__in__run", "ppo__in__run", "config"), "")
    inits = {f"{package}__in____init__": "" for package in ("market", "optim", "ppo")}
    assert architecture.backward(architecture.package_graph(package_tree(**files, **inits))) == []
    assert len(architecture.backward(architecture.package_graph(package_tree(**{name: text})))) == 1


def test_a_circle_of_modules_is_found(package_tree):
    init = {"market__in____init__": ""}
    graph = package_tree(
        **init, market__in__a="from tailguard.market.b import x", market__in__b="def f(): import tailguard.market.a"
    )
    assert set(architecture.cycle(graph)) == {"market.a", "market.b"}


def test_the_layers_are_drawn_from_the_top():
    rows = [row.split() for row in architecture.layer_cake().splitlines()[1:-1]]
    assert rows == [list(layer) for layer in reversed(architecture.LAYERS)]


def test_a_relative_import_is_refused(package_tree):
    with pytest.raises(ValueError, match="relative import"):
        package_tree(market__in____init__="", market__in__a="from . import b\n")


def test_a_drawing_without_a_place_is_refused():
    with pytest.raises(ValueError, match="places for"):
        architecture.redrawn("<!-- drawn: a -->\n<!-- end -->", {"a": "x", "b": "y"})
    assert (
        architecture.redrawn("<!-- drawn: a -->\nold\n<!-- end -->.", {"a": "x"}) == "<!-- drawn: a -->\n\nx\n\n<!-- end -->."
    )


def test_only_the_outside_of_the_algorithm_knows_sb3():
    knowing = {
        path.name for path in (SOURCE / "ppo").glob("*.py") if any(inside(name, "stable_baselines3") for name in imports(path))
    }
    outside = {
        "algorithm.py",
        "policy.py",
        "observations.py",
        "sb3_policy.py",
        "sb3_import.py",
        "serialization.py",
        "schedules.py",
        "actions.py",
        "callback_locals.py",
    }
    assert knowing == outside
