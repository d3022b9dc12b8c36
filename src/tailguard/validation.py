"""Errors about bad values: one line that names the key, the value and what is legal."""

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

Model = TypeVar("Model", bound=BaseModel)


def require(condition: bool, name: str, value: object, legal: str) -> None:
    """Refuse an impossible parameter.

    :param condition: what must hold; write it so that NaN makes it false.
    :param name: the name of the parameter.
    :param value: the value it was given.
    :param legal: the values it may take, in words.
    """
    if not condition:
        raise ValueError(f"{name} is {value!r}, but it must be {legal}")


def build(model: type[Model], values: Mapping[str, Any]) -> Model:
    """Make a checked settings object.

    :raises ValueError: one line per wrong key.
    """
    try:
        return model(**values)
    except ValidationError as error:
        raise ValueError(explain(error, model)) from None


def explain(error: ValidationError, model: type[BaseModel]) -> str:
    """The errors of a validation as ``path: reason (got value)``, joined by semicolons."""
    return "; ".join(_one(details, model) for details in error.errors(include_url=False))


def _one(details: Any, model: type[BaseModel]) -> str:
    # pydantic adds the name of the tried type to the path of a union; only keys of the settings belong there.
    path = ".".join(str(part) for part in details["loc"] if not str(part).endswith("]"))
    if details["type"] == "extra_forbidden":
        return f"{path}: unknown key; known are {', '.join(_known_keys(model, details['loc'][:-1]))}"
    reason = details["msg"].removeprefix("Value error, ")
    if details["type"] in ("value_error", "missing"):  # the message of our own validators already names the values
        return f"{path}: {reason}" if path else reason
    return f"{path}: {reason} (got {details['input']!r})"


def _known_keys(model: type[BaseModel], path: tuple[int | str, ...]) -> list[str]:
    for part in path:
        field = model.model_fields.get(str(part))
        if field is None or not (isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)):
            return []
        model = field.annotation
    return sorted(model.model_fields)
