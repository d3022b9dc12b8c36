"""The settings of a command: CONFIG, ``--set`` and what is said about the files, given the same way in every command."""

import inspect
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from tailguard.config import Config
    from tailguard.market.files import FileConfig

Command = Callable[..., None]
CONFIG_HELP = "YAML file with settings; `tailguard init` writes one."
FILES = "Files"

# Options of all commands that read files: their names are those of the section `files` of the configuration.
FILE_OPTIONS: dict[str, Any] = {
    "columns": Annotated[
        str | None,
        typer.Option(help="Which column is what: time=Date,close=Last; numbers count from 1.", rich_help_panel=FILES),
    ],
    "separator": Annotated[str | None, typer.Option(help="Between the columns; tab is a name.", rich_help_panel=FILES)],
    "decimal": Annotated[str | None, typer.Option(help="Decimal mark, . or ,", rich_help_panel=FILES)],
    "time_format": Annotated[str | None, typer.Option(help="Of the times: %d/%m/%Y %H:%M", rich_help_panel=FILES)],
    "timezone": Annotated[str | None, typer.Option(help="Of times that name none: America/New_York", rich_help_panel=FILES)],
    "adjusted": Annotated[bool, typer.Option("--adjusted", help="Use prices adjusted for dividends.", rich_help_panel=FILES)],
    "calendar": Annotated[
        str | None, typer.Option(help="Exchange whose holidays are no gaps: XNYS, XLON.", rich_help_panel=FILES)
    ],
}
CONFIG_OPTIONS: dict[str, Any] = {
    "config": Annotated[Path | None, typer.Option("--config", "-c", help=CONFIG_HELP)],
    "overrides": Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a setting, e.g. trading.fee=0.0005.")
    ],
}
CONFIG_ARGUMENT: dict[str, Any] = {"path": Annotated[Path | None, typer.Argument(metavar="[CONFIG]", help=CONFIG_HELP)]}


@dataclass(frozen=True)
class Settings:
    """The settings that a command was given.

    :param path: of the configuration; None for the defaults.
    :param overrides: each ``a.b=c``.
    """

    path: Path | None
    overrides: tuple[str, ...]

    def load(self) -> "Config":
        """Return the configuration: the defaults, the file, the overrides."""
        from tailguard.config import load_config

        return load_config(self.path, self.overrides)

    def files(self, base: "FileConfig | None" = None) -> "FileConfig":
        """Return what is said about the files, for a command that takes no other settings.

        :param base: what holds where nothing is said.
        """
        from tailguard.market.files import FileConfig
        from tailguard.validation import build

        known = {} if base is None else base.model_dump()
        given = {
            key.removeprefix("files."): json.loads(value) for key, _, value in (text.partition("=") for text in self.overrides)
        }
        return build(FileConfig, known | given, "files")


def takes_settings(*, argument: bool = False, config: bool = True) -> Callable[[Command], Command]:
    """Give a command the options of settings and files; it gets them as its parameter ``settings``.

    :param argument: the configuration may be named without ``--config``, too.
    :param config: False leaves out the configuration, for commands that read files and nothing else.
    """
    options = (CONFIG_ARGUMENT if argument else {}) | (CONFIG_OPTIONS if config else {}) | FILE_OPTIONS

    def decorate(function: Command) -> Command:
        @wraps(function)
        def command(**values: Any) -> None:
            given = {name: values.pop(name) for name in options}
            function(settings=_settings(given), **values)

        own = [parameter for parameter in inspect.signature(function).parameters.values() if parameter.name != "settings"]
        added = [_parameter(name, annotation) for name, annotation in options.items()]
        parameters = [*added[: int(argument)], *own, *added[int(argument) :]]
        parameters = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters} | {"return": None}
        return command

    return decorate


def _parameter(name: str, annotation: Any) -> inspect.Parameter:
    default = False if name == "adjusted" else None
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _settings(given: dict[str, Any]) -> Settings:
    named = [path for path in (given.get("path"), given.get("config")) if path is not None]
    if len(set(named)) > 1:
        raise ValueError(f"two configurations, {named[0]} and {named[1]}: name one of them")
    overrides = [*(given.get("overrides") or [])]
    for key in FILE_OPTIONS:
        value = given[key]
        if value not in (None, False):
            overrides.append(f"files.{key}={json.dumps(_columns(value) if key == 'columns' else value)}")
    return Settings(named[0] if named else None, tuple(overrides))


def _columns(text: str) -> dict[str, str]:
    pairs = [part.partition("=") for part in text.split(",")]
    if not all(name.strip() and column.strip() for name, _, column in pairs):
        raise ValueError(f"--columns {text!r}: must look like time=Date,close=Last")
    return {name.strip(): column.strip() for name, _, column in pairs}


def single_source(data: Sequence[str] | None, configured: Sequence[str]) -> str:
    """Return the one series that a command is about: what was named, or the only one of the configuration."""
    named = tuple(data or configured)
    if not named:
        raise ValueError(
            "no data: name a shipped set or a file with --data (a+b is a portfolio), or set data in the configuration"
        )
    if len(named) > 1:
        raise ValueError(f"{len(named)} data sets, {' and '.join(named)}: name one with --data; a+b trades both as a portfolio")
    return named[0]
