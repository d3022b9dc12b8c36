"""What members log in other processes, brought to the driver: whoever reads its log sees all of them."""

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

LOGGER = "tailguard"


class _Collector(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep it in a form that can travel."""
        record.msg, record.args = record.getMessage(), None
        record.exc_info = None
        self.records.append(record)


@contextmanager
def collected() -> Iterator[list[logging.LogRecord]]:
    """In the process of a member: what Tailguard logs meanwhile, from INFO on, instead of printing it."""
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


def relay(records: Iterable[logging.LogRecord]) -> None:
    """In the driver: log what a member has logged, where it is wanted."""
    for record in records:
        logger = logging.getLogger(record.name)
        if logger.isEnabledFor(record.levelno):
            logger.handle(record)
