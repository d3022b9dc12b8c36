"""The help of all settings, read from their classes: key, type and range, default, meaning.

``docs/config.md`` and ``tailguard config --explain`` are written from it, so they cannot say anything else than the code does.
"""

import inspect
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from textwrap import fill
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from tailguard.config import Config
from tailguard.validation import names_of, sections_of, union_members

WIDTH = 100


@dataclass(frozen=True)
class Setting:
    """One key of the configuration.

    :param key: its full path, such as ``training.risk.alpha``.
    :param type: type and range in words.
    :param default: its default as it stands in YAML; "required" where there is none.
    :param meaning: what it does, and what comes of moving it.
    """

    key: str
    type: str
    default: str
    meaning: str


@dataclass(frozen=True)
class Section:
    """A group of keys.

    :param key: its full path; empty for the whole tree.
    :param summary: what the group is about.
    :param settings: its keys, sections among them.
    """

    key: str
    summary: str
    settings: tuple[Setting, ...]


def sections(model: type[BaseModel] = Config, key: str = "") -> Iterator[Section]:
    """Yield the section of a class and, after it, those inside it."""
    meanings = _meanings(model)
    below = f"{key}." if key else ""
    settings = tuple(
        Setting(below + name, _type(field.annotation, field.metadata), _default(field), _meaning(name, field, meanings))
        for name, field in model.model_fields.items()
    )
    yield Section(key, _in_yaml(plain(_summary(model))), settings)
    for name, field in model.model_fields.items():
        for inner in sections_of(field.annotation):
            listed = any(
                get_origin(member) is tuple and inner in get_args(member) for member in union_members(field.annotation)
            )
            named = any(get_origin(member) is dict for member in union_members(field.annotation))
            yield from sections(inner, f"{below}{name}{'[]' if listed else '.NAME' if named else ''}")


def explain_key(key: str | None = None) -> str:
    """Return the reference of a key or a section as text; of the whole tree if `key` is None.

    :param key: a full path such as ``training.risk``, or its last parts, such as ``risk.alpha``.
    :raises ValueError: when there is no such key, with the nearest.
    """
    tree = list(sections())
    if key is None:
        return "\n".join(_section_text(section) for section in tree)
    settings = {setting.key.replace("[]", ""): setting for section in tree for setting in section.settings}
    name = key.removesuffix("[]")
    paths = [name] if name in settings else [path for path in settings if path.endswith(f".{name}")]
    if not paths:
        near = get_close_matches(name, sorted({part for path in settings for part in (path, path.rsplit(".", 1)[-1])}), 1)
        hint = f"did you mean {near[0]}?" if near else "`tailguard config --explain` lists all of them"
        raise ValueError(f"no setting named {key!r}; {hint}")
    return "\n".join(_setting_and_below(settings[path], path, tree) for path in paths)


def plain(text: str) -> str:
    """Return a docstring's text in one line, with single backticks for code."""
    text = " ".join(text.split())
    text = re.sub(r":\w+:`~?(?:[\w.]*\.)?(\w+)`", r"`\1`", text)
    return text.replace("``", "`")


def _setting_and_below(setting: Setting, path: str, tree: list[Section]) -> str:
    below = [section for section in tree if f"{section.key.replace('[]', '')}.".startswith(f"{path}.")]
    return "\n".join([_setting_text(setting), *(_section_text(section) for section in below)])


def _section_text(section: Section) -> str:
    title = section.key or "all sections"
    rows = [_setting_text(setting) for setting in section.settings]
    return "\n".join([title, "-" * len(title), fill(section.summary, WIDTH), "", *rows])


def _setting_text(setting: Setting) -> str:
    first = f"{setting.key}: {setting.type}" + (f"; default {setting.default}" if setting.default else "")
    body = fill(setting.meaning, WIDTH, initial_indent="    ", subsequent_indent="    ")
    return f"{first.replace('`', '')}\n{body}\n"


def _summary(model: type[BaseModel]) -> str:
    return (inspect.getdoc(model) or "").split(":param", 1)[0]


def _meanings(model: type[BaseModel]) -> dict[str, str]:
    """The text of every ``:param``, of the class before those that it inherits from."""
    meanings: dict[str, str] = {}
    for ancestor in model.__mro__:
        for part in re.split(r"^:param ", inspect.cleandoc(ancestor.__doc__ or ""), flags=re.MULTILINE)[1:]:
            name, _, text = part.partition(":")
            meanings.setdefault(name, plain(text))
    return meanings


def _meaning(name: str, field: FieldInfo, meanings: dict[str, str]) -> str:
    if name not in meanings:
        raise ValueError(f"{name} has no :param in the docstring of its class")
    text = _in_yaml(meanings[name][:1].upper() + meanings[name][1:])
    older = names_of(name, field)[1:]
    return text if not older else f"{text} Older name: {', '.join(f'`{old}`' for old in older)}."


def _in_yaml(text: str) -> str:
    return re.sub(r"\bNone\b", "`null`", text)


def _default(field: FieldInfo) -> str:
    if field.default_factory is not None:
        return ""
    if field.default is PydanticUndefined:
        return "required"
    return f"`{json.dumps(field.default)}`"


def _type(annotation: Any, metadata: list[Any]) -> str:
    """A type and its range in words."""
    words = _alternatives(annotation, metadata)
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def _alternatives(annotation: Any, metadata: list[Any]) -> list[str]:
    """Return what a value may be, one entry for each possibility."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _alternatives(arguments[0], [*arguments[1:], *metadata])
    if origin is Literal:
        return [f"`{value}`" for value in arguments]
    if origin is tuple:
        inner = _type(arguments[0], [])
        number = "" if arguments[-1] is Ellipsis else f"{len(arguments)} "
        return [f"list of {number}{_plural(f'({inner})' if ' or ' in inner else inner)}"]
    if origin is dict:
        return [f"keys with {_plural(_type(arguments[1], []))}"]
    if arguments:  # a union
        return [word for member in arguments for word in _alternatives(member, [])]
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return ["section"]
    words = {bool: ["true", "false"], int: ["integer"], float: ["number"], str: ["text"], NoneType: ["null"]}
    return [word + _range(metadata) for word in words[annotation]]


def _plural(words: str) -> str:
    return re.sub(r"\b(integer|number|section)\b", r"\1s", words)


def _range(metadata: list[Any]) -> str:
    limits = [limit for entry in metadata for limit in (entry.metadata if isinstance(entry, FieldInfo) else [entry])]
    low: tuple[Any, str] | None = next(((limit.ge, "[") for limit in limits if isinstance(limit, Ge)), None)
    low = next(((limit.gt, "(") for limit in limits if isinstance(limit, Gt)), low)
    high: tuple[Any, str] | None = next(((limit.le, "]") for limit in limits if isinstance(limit, Le)), None)
    high = next(((limit.lt, ")") for limit in limits if isinstance(limit, Lt)), high)
    if low and high:
        return f" in {low[1]}{low[0]:g}, {high[0]:g}{high[1]}"
    if low:
        return f" {'>=' if low[1] == '[' else '>'} {low[0]:g}"
    if high:
        return f" {'<=' if high[1] == ']' else '<'} {high[0]:g}"
    return ""
