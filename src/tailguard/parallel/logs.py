"""Logs of workers: collected where they work, and logged again by the process that has started them."""

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

LOGGER = "tailguard"


class _Collector(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record in a form that can be pickled."""
        record.msg, record.args = record.getMessage(), None
        record.exc_info = None
        self.records.append(record)


@contextmanager
def collect_logs() -> Iterator[list[logging.LogRecord]]:
    """Collect the records of Tailguard's logger, from INFO on, instead of printing them; called in a worker's process."""
    logger, collector = logging.getLogger(LOGGER), _Collector()
    before = logger.level, logger.propagate
    logger.addHandler(collector)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield collector.records
    finally:
        logger.removeHandler(collector)
        logger.level, logger.propagate = before


def forward_logs(records: Iterable[logging.LogRecord]) -> None:
    """Log the records of a worker; called in the driver."""
    for record in records:
        logger = logging.getLogger(record.name)
        if logger.isEnabledFor(record.levelno):
            logger.handle(record)
