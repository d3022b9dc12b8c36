"""What is shown as the tail of an agent at work says whether it was right out of sample."""

import dataclasses
import json
import math

import numpy as np
import pandas as pd
import pytest
from scipy.stats import binom, norm

from tailguard.cli import main
from tailguard.config import load_config
from tailguard.evaluate.critic_calibration import compare
from tailguard.evaluate.record import RECORD_FOLDER, save_record
from tailguard.experiments.evaluation import evaluate_run
from tailguard.experiments.prepared_market import load_market
from tailguard.experiments.run import Run, train
from tailguard.experiments.tail_check import TailCheck, check_of, recorded_check
from tailguard.market import random_walk

TINY = [
    "training.steps=128",
    "training.n_envs=2",
    "training.n_steps=32",
    "training.policy=MlpPolicy",
    "training.tensorboard=null",
]
LEVELS = np.array([0.01, 0.05, 0.1, 0.5, 0.9])


def months(exceptions, period="month"):
    """60 months of a standard normal prediction, of which so many came out below its 5 % quantile, and as many up to 10 %."""
    outcomes = np.full(60, 0.3)
    outcomes[:exceptions], outcomes[exceptions : 2 * exceptions] = -2.0, -1.5
    times = pd.date_range("2015-01-01", periods=60, freq="MS")
    calibration = compare(21, times, outcomes, np.tile(norm.ppf(LEVELS), (60, 1)), LEVELS)
    return dataclasses.replace(calibration, period=period)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("agent")
    random_walk(400, seed=0).to_csv(folder / "bars.csv")
    config = load_config(None, [*TINY, "trading.guard={max_loss: 0.05, period: 1M}"])
    run = Run.create(folder / "run", config, str(folder / "bars.csv"), load_market(str(folder / "bars.csv"), config))
    train(run, lambda *_: None)
    return Run.open(run.path)


@pytest.fixture(scope="module")
def record(run):
    evaluation = evaluate_run(run, None)

    def save(folder, calibration):
        save_record(dataclasses.replace(evaluation, calibration=calibration), folder / RECORD_FOLDER)

    return save


def test_the_test_that_decides_is_the_one_with_the_smallest_p_value():
    check = check_of(months(10))
    tails = [binom.sf(n - 1, 60, level) for level, n in ((0.05, 10), (0.1, 20))]
    assert (check.held, check.period, check.outcomes) == (False, "month", 60)
    level = 0.05 if tails[0] < tails[1] else 0.1
    assert (check.level, check.exceptions, check.expected) == (level, 10 if level == 0.05 else 20, 60 * level)
    assert check.p_value == pytest.approx(min(tails))  # no count below is as improbable
    assert check_of(months(3)).held
    assert check_of(None) is None
    assert check_of(months(10, period="")) is None  # of a critic


def test_act_and_paper_say_what_the_record_says(run, record, capsys):

    def output(name, *options):
        with pytest.raises(SystemExit) as ended:
            main([name, str(run.path), "--bars", str(run.path.parent / "bars.csv"), "--since", "2001-01-30", *options])
        assert not ended.value.code
        return capsys.readouterr().out

    def last_of_act():
        return json.loads(output("act").splitlines()[-1])

    def paper(name):
        return " ".join(output("paper", "--ledger", str(run.path / name), "--quiet").split())

    line = last_of_act()
    assert line["tail"] is not None
    assert line["calibration"] is None
    assert "this prediction: not checked out of sample" in paper("unchecked")
    record(run.path, months(10))
    line = last_of_act()
    assert line["calibration"] == recorded_check(run)._asdict()
    assert not line["calibration"]["held"]
    assert math.isfinite(line["tail"]["cvar_5"])
    assert "this prediction: not calibrated, do not rely on it: 20 of 60 returns over a month" in paper("failed")
    record(run.path, months(3))
    assert last_of_act()["calibration"]["held"]
    assert "this prediction: 3 of 60 returns over a month fell below the predicted 5% quantile" in paper("held")
    record(run.path, months(3, period="week"))  # of another period than is shown
    assert last_of_act()["calibration"] is None
    assert "not checked out of sample" in paper("another")


def test_a_deployed_agent_has_the_record_of_its_walk_forward(run, record, tmp_path):
    deployed = Run(tmp_path / "run", run.config, run.info | {"deployed": {"walkforward": str(tmp_path), "kind": "refit"}})
    assert recorded_check(deployed) is None
    record(tmp_path, months(10))
    found = recorded_check(deployed)
    assert isinstance(found, TailCheck)
    assert not found.held
