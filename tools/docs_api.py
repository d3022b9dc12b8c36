"""A hook of mkdocs: fill the API pages with every public name, each on the page of the package that defines it.

A page says ``<!-- api: market -->`` and gets a directive of mkdocstrings for each public class and function of that package.
Public is what stands in an ``__all__``, and the few names of ``MORE``. So no page has to be edited when a name moves.
"""

import ast
import inspect
import re
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).parents[1] / "src" / "tailguard"
MARK = re.compile(r"<!-- api: (\w+) -->")
# Import paths that scripts outside the project use and that no `__all__` lists.
MORE = {
    "tailguard.ppo.quantiles": ("quantile_huber_loss", "cvar", "cvar_categorical"),
    "tailguard.ppo.targets": ("gae", "sr_lambda_targets"),
    "tailguard.envs.vec_env": ("GymVectorAdapter",),
    "tailguard.population.member": ("Learner",),
}


def public_names() -> Iterator[tuple[str, str]]:
    """Yield module and name of everything public."""
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and any(getattr(target, "id", "") == "__all__" for target in node.targets):
                parts = path.relative_to(SOURCE.parent).with_suffix("").parts
                module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
                yield from ((module, name) for name in ast.literal_eval(node.value))
    yield from ((module, name) for module, names in MORE.items() for name in names)


@cache
def directives() -> dict[str, list[str]]:
    """Return the full names of public classes and functions by the package that defines them."""
    found: dict[str, set[str]] = {}
    for module, name in public_names():
        thing: Any = getattr(import_module(module), name)
        if inspect.isclass(thing) or inspect.isfunction(thing):
            parts = thing.__module__.split(".")
            if parts[0] == "tailguard":
                found.setdefault(parts[1], set()).add(f"{thing.__module__}.{thing.__qualname__}")
    return {package: sorted(names, key=lambda full: full.rpartition(".")[2].lower()) for package, names in found.items()}


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace the mark of a page by its directives (called by mkdocs).

    :param markdown: the page.
    """
    return MARK.sub(lambda match: "\n\n".join(f"::: {name}" for name in directives()[match.group(1)]), markdown)
