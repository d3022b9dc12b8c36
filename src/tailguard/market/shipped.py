"""The data sets that come with the package. Listing them does not load pandas."""

import json
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable


@dataclass(frozen=True)
class DatasetInfo:
    """The provenance of a shipped data set.

    :param name: its name for :func:`tailguard.market.load_dataset`.
    :param title: its content.
    :param source: package, version and licence that it was read from.
    :param note: limitations to know before trusting a result.
    """

    name: str
    title: str
    source: str
    note: str


def list_datasets() -> list[DatasetInfo]:
    """Return the data sets shipped with the package."""
    index = json.loads(_folder().joinpath("index.json").read_text(encoding="utf-8"))
    return [DatasetInfo(**entry) for entry in index]


def dataset_file(name: str) -> Traversable:
    """Return the file of a data set."""
    return _folder().joinpath(f"{name}.csv.gz")


def _folder() -> Traversable:
    return resources.files("tailguard.market").joinpath("datasets")
