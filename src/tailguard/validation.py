"""Errors about bad values: one line that names the key, the value and what is legal."""

import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from types import UnionType
from typing import Annotated, Any, NamedTuple, TypeVar, Union, get_args, get_origin

from pydantic import AliasChoices, BaseModel, ValidationError
from pydantic.fields import FieldInfo

Model = TypeVar("Model", bound=BaseModel)
Location = tuple[int | str, ...]


def require(condition: bool, name: str, value: object, legal: str) -> None:
    """Raise a :class:`ValueError` for an impossible parameter.

    :param condition: must be true; write it so that NaN makes it false.
    :param name: the name of the parameter.
    :param value: the value it was given.
    :param legal: the values it may take, in words.
    """
    if not condition:
        raise ValueError(f"{name} is {value!r}, but it must be {legal}")


def build(model: type[Model], values: Mapping[str, Any], section: str = "") -> Model:
    """Make a checked settings object.

    :param section: where it belongs, for the paths in the message, such as ``critic``.
    :raises ValueError: one line that names every wrong key by its full path, with its value and what is legal.
    """
    try:
        return model(**values)
    except ValidationError as error:
        raise ValueError(explain(error, model, section)) from None


def explain(error: ValidationError, model: type[BaseModel], section: str = "") -> str:
    """Return the errors of a validation as ``path is value: must be ...``, joined by semicolons."""
    above = (section,) if section else ()
    return "; ".join(_merged([_mistake(details, model, above) for details in error.errors(include_url=False)]))


def sections_of(annotation: Any) -> list[type[BaseModel]]:
    """Return the settings classes among the types that a field may have, inside lists as well."""
    members = (inner for member in union_members(annotation) for inner in (member, *map(without_constraints, get_args(member))))
    return [member for member in members if isinstance(member, type) and issubclass(member, BaseModel)]


def union_members(annotation: Any) -> Iterator[Any]:
    """Yield the types that a union is made of, without their constraints; a type that is no union yields itself."""
    annotation = without_constraints(annotation)
    if get_origin(annotation) in (Union, UnionType):
        for member in get_args(annotation):
            yield from union_members(member)
    else:
        yield annotation


def without_constraints(annotation: Any) -> Any:
    """Return a type without its constraints."""
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def names_of(name: str, field: FieldInfo) -> tuple[str, ...]:
    """Return the name of a field and, after it, its older names."""
    alias = field.validation_alias
    return (name, *(str(old) for old in alias.choices if old != name)) if isinstance(alias, AliasChoices) else (name,)


class _Mistake(NamedTuple):
    path: tuple[str, ...]
    text: str  # with the path in it
    reason: str
    tagged: bool  # one of several tries of a union


def _mistake(details: Any, model: type[BaseModel], above: tuple[str, ...]) -> _Mistake:
    location: Location = details["loc"]
    if details["type"] == "extra_forbidden":
        return _unknown_key(model, location, above)
    below, sections, tagged = _keys(model, location)
    keys = (*above, *below)
    path, reason = ".".join(keys), _reworded(details["msg"])
    if details["type"] == "missing":
        return _Mistake(keys, f"{path}: is missing", "is missing", tagged)
    if details["type"] == "value_error":  # the message of our own validators already names the values
        names_a_key = any(re.split(r"[ .]", reason, maxsplit=1)[0] in section.model_fields for section in sections)
        return _Mistake(keys, f"{path}{'.' if names_a_key else ': '}{reason}" if path else reason, reason, tagged)
    return _Mistake(keys, f"{path} is {details['input']!r}: {reason}", reason, tagged)


def _unknown_key(model: type[BaseModel], location: Location, above: tuple[str, ...]) -> _Mistake:
    below, sections, _ = _keys(model, location[:-1])
    key = str(location[-1])
    known = sorted({name for section in sections for name in section.model_fields})
    near = get_close_matches(key, known, 1)
    reason = f"unknown key; known are {', '.join(known)}" + (f"; did you mean {near[0]}?" if near else "")
    keys = (*above, *below, key)
    return _Mistake(keys, f"{'.'.join(keys)}: {reason}", reason, False)


def _reworded(message: str) -> str:
    message = message.removeprefix("Value error, ").replace("Input should ", "must ")
    message = re.sub(r"a valid dictionary( or (instance of \w+|object to extract fields from))?", "keys and values", message)
    return message.replace("a valid tuple", "a list")


def _keys(model: type[BaseModel], location: Location) -> tuple[tuple[str, ...], list[type[BaseModel]], bool]:
    """Return the keys of a location, the sections that they end in, and whether it also named a type that was tried.

    pydantic adds the name of the tried type to the path of a union; only keys of the settings belong there.
    """
    keys: list[str] = []
    annotation: Any = model
    tagged = False
    for part in location:
        sections = sections_of(annotation)
        fields = [
            field for section in sections for name, field in section.model_fields.items() if part in names_of(name, field)
        ]
        if fields:
            annotation = fields[0].annotation
        if fields or isinstance(part, int):
            keys.append(str(part))
        else:
            tagged = True
    return tuple(keys), sections_of(annotation), tagged


def _merged(mistakes: list[_Mistake]) -> Iterator[str]:
    """Yield one text per path; of the tries of a union, those that came farthest."""
    by_path: dict[tuple[str, ...], list[_Mistake]] = {}
    for mistake in mistakes:
        if not (mistake.tagged and any(_below(other, mistake) for other in mistakes)):
            by_path.setdefault(mistake.path, []).append(mistake)
    for first, *others in by_path.values():
        yield " or ".join([first.text, *(other.reason for other in others)])


def _below(other: _Mistake, mistake: _Mistake) -> bool:
    return len(other.path) > len(mistake.path) and other.path[: len(mistake.path)] == mistake.path
