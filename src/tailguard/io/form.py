"""The form of a tree of values: which keys it has, and of which type each value is.

Checksums say that a file is as it was written, not that Tailguard wrote it. A form is written down like the tree itself: a
mapping of keys to forms, a list with the form of its entries, a tuple of forms for entries of different kinds, or a leaf.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tailguard.validation import require


@dataclass(frozen=True)
class Leaf:
    """A value without parts.

    :param legal: in words.
    :param fits: says whether a value is legal.
    """

    legal: str
    fits: Callable[[Any], bool]


@dataclass(frozen=True)
class Maybe:
    """A value, or None.

    :param form: of the value.
    """

    form: Any


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or (_is_whole(value) and abs(value) < 2**128)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


NUMBER = Leaf("a finite number", lambda value: _is_number(value) and math.isfinite(value))
EXTENDED = Leaf("a number", lambda value: _is_number(value) and not math.isnan(value))  # infinite, too
COUNT = Leaf("a whole number, 0 to 2^63", lambda value: _is_whole(value) and 0 <= value < 2**63)
INTEGER = Leaf("a whole number", lambda value: _is_whole(value) and abs(value) < 2**128)  # generators keep 128 bits
TEXT = Leaf("text", lambda value: isinstance(value, str))
FLAG = Leaf("true or false", lambda value: isinstance(value, bool))
ANYTHING = Leaf("anything", lambda value: True)
MAPPING = Leaf("a mapping", lambda value: isinstance(value, Mapping))
TENSOR = Leaf("a tensor", lambda value: isinstance(value, Tensor))
ARRAY = Leaf("an array", lambda value: isinstance(value, np.ndarray))


def tensor_like(example: Tensor, *, finite: bool = True) -> Leaf:
    """Return the form of tensors of the same type and shape.

    :param finite: refuse infinite numbers, too, not only NaN.
    """
    kind, shape = example.dtype, tuple(example.shape)

    def fits(value: Any) -> bool:
        return isinstance(value, Tensor) and value.dtype == kind and tuple(value.shape) == shape and _sound(value, finite)

    return Leaf(f"{kind} numbers of shape {list(shape)}, {'all finite' if finite else 'none of them NaN'}", fits)


def array_like(example: np.ndarray[Any, Any], *, finite: bool = True) -> Leaf:
    """Return the form of arrays of the same type and shape; see :func:`tensor_like`."""
    kind, shape = example.dtype, example.shape

    def fits(value: Any) -> bool:
        same = isinstance(value, np.ndarray) and value.dtype == kind and value.shape == shape
        return same and _sound(torch.from_numpy(value) if kind.kind == "f" else torch.empty(0), finite)

    return Leaf(f"{kind} numbers of shape {list(shape)}, {'all finite' if finite else 'none of them NaN'}", fits)


def _sound(values: Tensor, finite: bool) -> bool:
    return not values.is_floating_point() or bool(values.isfinite().all() if finite else not values.isnan().any())


def form_of(example: Any) -> Any:
    """Return the form of a tree that is like an example: the same keys, types and shapes; lists may have another length."""
    if isinstance(example, Mapping):
        return {key: form_of(value) for key, value in example.items()}
    if isinstance(example, Tensor):
        return tensor_like(example)
    if isinstance(example, np.ndarray):
        return array_like(example)
    if isinstance(example, list | tuple):
        return tuple(form_of(entry) for entry in example)
    if isinstance(example, float):
        return NUMBER if math.isfinite(example) else EXTENDED
    leaves = {bool: FLAG, int: INTEGER, str: TEXT}
    return leaves.get(type(example), ANYTHING)


def require_form(value: Any, form: Any, name: str) -> None:
    """Raise a :class:`ValueError` for a tree of another form.

    :param value: the tree.
    :param form: as the head of this module describes it.
    :param name: of the tree, for the message; empty for a whole file.
    """
    if isinstance(form, Leaf):
        require(form.fits(value), name, _brief(value), form.legal)
    elif isinstance(form, Maybe):
        if value is not None:
            require_form(value, form.form, name)
    elif isinstance(form, Mapping):
        require(isinstance(value, Mapping), name, _brief(value), "a mapping")
        missing, unknown = (sorted(map(str, keys)) for keys in (set(form) - set(value), set(value) - set(form)))
        require(not missing, name or "it", f"a mapping without {', '.join(missing[:5])}", "complete")
        require(not unknown, name or "it", f"a mapping with {', '.join(unknown[:5])[:100]}", "one without")
        for key, part in form.items():
            require_form(value[key], part, f"{name}.{key}" if name else str(key))
    else:
        require(isinstance(value, list | tuple), name, _brief(value), "a list")
        forms = form if isinstance(form, tuple) else form * len(value)
        require(len(forms) == len(value), name, f"a list of {len(value)}", f"one of {len(forms)}")
        for place, (entry, part) in enumerate(zip(value, forms, strict=True)):
            require_form(entry, part, f"{name}.{place}")


def _brief(value: Any) -> str:
    if isinstance(value, Tensor | np.ndarray):
        return f"{value.dtype} numbers of shape {list(value.shape)}"
    return repr(value)[:60] if isinstance(value, int | float | str | None) else f"a {type(value).__name__}"
