"""YAML texts that anybody may have written: plain values only, and no more of them than a configuration has."""

import math
from typing import Any

import yaml

from tailguard.validation import require

MOST_VALUES = 20_000


class NotYaml(ValueError):
    """A text is not YAML, or holds more than plain values."""


def parse_yaml(text: str) -> Any:
    """Return the values of a text, unless its aliases stand for far more than it holds (a "billion laughs" bomb).

    :raises NotYaml: for a text that is none.
    :raises ValueError: for more values than :data:`MOST_VALUES`.
    """
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if root is not None:
            size = _expanded(root, {})
            legal = f"at most {MOST_VALUES:,}, with its aliases"
            require(size <= MOST_VALUES, "the configuration", f"{size:.3g} values", legal)
        return yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise NotYaml(f"is not YAML ({' '.join(str(error).split())})") from None


def _expanded(node: yaml.Node, known: dict[int, float]) -> float:
    """Return how many values a node stands for when every alias in it is written out; infinite if it holds itself."""
    if isinstance(node, yaml.ScalarNode):
        return 1.0
    if id(node) not in known:
        known[id(node)] = math.inf  # until it is known: whoever asks is inside of it
        parts = [part for pair in node.value for part in (pair if isinstance(pair, tuple) else (pair,))]
        known[id(node)] = 1.0 + sum(_expanded(part, known) for part in parts)
    return known[id(node)]
