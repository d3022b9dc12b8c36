"""The out-of-sample check of the tail that `act` and `paper` show, from the record of the agent.

The forecast is calibrated by the account's own past, which does not always suffice. So an evaluation or a walk-forward
compares what would have been shown on unseen bars with what came (:mod:`tailguard.evaluate.tail_calibration`), and a forecast
that failed there is not presented as calibrated by `act` and `paper` either.
"""

from pathlib import Path
from typing import NamedTuple

from tailguard.evaluate.record import METRICS_FILE, RECORD_FOLDER, Calibration, load_record
from tailguard.experiments.run import Run


class TailCheck(NamedTuple):
    """The test of coverage (Kupiec) with the smallest p-value: it decides whether the calibration has held.

    :param held: False if the test rejects at 5 %: do not rely on the predicted tail.
    :param period: that was predicted, in words, such as ``month``.
    :param level: of the quantile.
    :param outcomes: number of periods that were predicted.
    :param exceptions: of them, with returns below the predicted quantile.
    :param expected: number of exceptions that was predicted.
    :param p_value: exact, from the binomial distribution.
    """

    held: bool
    period: str
    level: float
    outcomes: int
    exceptions: int
    expected: float
    p_value: float

    @property
    def sentence(self) -> str:
        """The check in words."""
        counts = f"{self.exceptions} of {self.outcomes} returns over a {self.period} fell below the predicted {self.level:.0%} "
        counts += f"quantile out of sample, {self.expected:.1f} were expected"
        return counts if self.held else f"not calibrated, do not rely on it: {counts} (p = {self.p_value:.2g})"


UNCHECKED = "not checked out of sample: no record of this agent compares it with what came"


def recorded_check(run: Run) -> TailCheck | None:
    """Return what the record of a run says; of a deployed one, that of its walk-forward. None if there is none.

    :raises ValueError: if the record was changed since it was written.
    """
    deployed = run.info.get("deployed")
    for folder in (run.path, *([Path(deployed["walkforward"])] if deployed else [])):
        if (folder / RECORD_FOLDER / METRICS_FILE).exists():
            return check_of(load_record(folder / RECORD_FOLDER).calibration)
    return None


def check_of(calibration: Calibration | None) -> TailCheck | None:
    """Return the check of a calibration; None where the tail of an account was not compared with enough periods.

    :param calibration: of a record; in records of earlier versions it may be that of a critic, which nobody shows.
    """
    if calibration is None or not calibration.period:
        return None
    level, test = min(calibration.coverage.items(), key=lambda item: item[1].exact_p_value)
    return TailCheck(
        calibration.holds, calibration.period, level, test.bars, test.exceptions, test.expected, test.exact_p_value
    )
