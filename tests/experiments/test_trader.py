"""An agent at work decides as it does in an evaluation, however the bars arrive."""

import io
import itertools
import json
import subprocess
import sys
import time

import numpy as np
import pandas as pd
import pytest

from tailguard.config import load_config
from tailguard.evaluate.play import play, return_rule_of
from tailguard.experiments import bar_stream
from tailguard.experiments.bar_stream import bar_chunks
from tailguard.experiments.prepared_market import default_split, prepare_market
from tailguard.experiments.run import Run, train
from tailguard.experiments.trader import Trader
from tailguard.experiments.training import build_model
from tailguard.market import load_bars, random_walk
from tailguard.market.bars import DataError

TINY = [
    "training.steps=256",
    "training.n_envs=4",
    "training.n_steps=32",
    "selection=null",
    "training.policy=MlpLstmPolicy",
    "training.lstm_hidden_size=8",
    "training.tensorboard=null",
]


def made(bars, *settings):
    config = load_config(None, [*TINY, *settings])
    market = prepare_market(bars, config, default_split(len(bars), config.training))
    model = build_model(market, config.training).learn(config.training.steps)
    return model, market, config


def trader_of(model, market, config):
    return Trader(model, market.scaler, config.features, config.trading)


@pytest.mark.parametrize(
    "risk", ["{}", "{objective: cvar, alpha: 0.2, period: 7}", "{objective: cvar, alpha: 0.2, period: 1W}"]
)
@pytest.mark.parametrize(("portfolio", "power"), [(False, 0), (True, 0), (True, 2)])
def test_decisions_are_those_of_an_evaluation_however_the_bars_arrive(risk, portfolio, power):
    bars = random_walk(400, seed=0)
    if portfolio:
        bars = load_bars({"a": bars, "b": random_walk(400, seed=1)})
    rules = ["trading.fee=0.002", "trading.long_only=true", f"trading.volatility_power={power}"]
    model, market, config = made(bars, f"training.risk={risk}", *rules)
    first = market.features.warmup
    rule = return_rule_of(model)
    (expected,) = play(model, bars, market.features, config.trading, [(first, len(bars))], returns=rule)
    at_once = trader_of(model, market, config).add(bars)
    assert [decision.time for decision in at_once] == list(bars.index[first:])
    assert np.array_equal([decision.weights for decision in at_once][:-1], expected.targets)
    trader, cuts = trader_of(model, market, config), [0, 40, first + 1, first + 2, first + 3, 300, 301, 350, 400]
    piecewise = [decision for low, high in itertools.pairwise(cuts) for decision in trader.add(bars.iloc[low:high])]
    assert [decision.time for decision in piecewise] == [decision.time for decision in at_once]
    assert np.array_equal([decision.weights for decision in piecewise], [decision.weights for decision in at_once])
    assert [decision.equity for decision in piecewise] == [decision.equity for decision in at_once]


def test_bars_out_of_order_are_refused():
    bars = random_walk(400, seed=0)
    trader = trader_of(*made(bars))
    trader.add(bars.iloc[:390])
    with pytest.raises(ValueError, match="bars must come in order"):
        trader.add(bars.iloc[389:391])


def test_a_ruined_account_decides_no_more():
    bars = random_walk(400, seed=0)
    model, market, config = made(bars)
    model.predict = lambda *_: (np.ones((1, 1), np.float32), None)  # all in, always
    crash = bars.copy()
    crash.iloc[350:, :4] *= 0.001
    trader = trader_of(model, market, config)
    assert trader.add(crash)[-1].time == bars.index[349]
    assert trader.ruined
    assert trader.add(random_walk(401, seed=0).iloc[400:]) == []


class TestStream:
    def rows(self, text, **options):
        return pd.concat(list(bar_chunks(io.BytesIO(text.encode()), **options)))

    def test_csv_and_json_lines_are_the_same_bars(self):
        bars = random_walk(20, seed=0)
        lines = "".join(json.dumps({"time": str(time), **row}) + "\n" for time, row in bars.to_dict("index").items())
        pd.testing.assert_frame_equal(self.rows(bars.to_csv()), bars, check_freq=False)
        pd.testing.assert_frame_equal(self.rows(lines), bars, check_freq=False)

    def test_a_portfolio_has_an_object_per_symbol(self):
        bars = load_bars({"a": random_walk(20, seed=0), "b": random_walk(20, seed=1)})
        lines = [
            {"time": str(time), "a": bars.loc[time, "a"].to_dict(), "b": bars.loc[time, "b"].to_dict()} for time in bars.index
        ]
        table = self.rows("".join(json.dumps(line) + "\n" for line in lines))
        pd.testing.assert_frame_equal(table, bars, check_freq=False)

    @pytest.mark.parametrize("line", ["{", "[1]", '{"open": 1}'])
    def test_a_line_that_is_no_bar_is_named(self, line):
        good = json.dumps({"time": "2020-01-01", "open": 1, "high": 1, "low": 1, "close": 1, "volume": 1})
        with pytest.raises(DataError):
            self.rows(f"{good}\n{line}\n")


def test_the_command_reads_a_pipe_and_a_file_that_grows(tmp_path):
    data = tmp_path / "bars.csv"
    bars = random_walk(400, seed=0)
    bars.to_csv(data)
    config = load_config(None, TINY)
    market = prepare_market(load_bars(data), config, default_split(400, config.training))
    run = Run.create(tmp_path / "run", config, str(data), market)
    model = train(run, lambda done, total, text: None)
    expected = trader_of(model, market, config).add(load_bars(data))
    command = [sys.executable, "-m", "tailguard", "act", str(run.path)]
    piped = subprocess.run(command, input=data.read_text(), capture_output=True, text=True, check=True)
    lines = [json.loads(line) for line in piped.stdout.splitlines()]
    assert [line["weight"] for line in lines] == [decision.weights[0] for decision in expected]

    growing, whole = tmp_path / "growing.csv", data.read_text().splitlines(keepends=True)
    growing.write_text("".join(whole[:399]))
    process = subprocess.Popen(
        [*command, "--bars", str(growing), "--follow", "--since", str(bars.index[-3])], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    first = json.loads(process.stdout.readline())
    with growing.open("a") as file:
        file.write(whole[399][:20])
        file.flush()
        time.sleep(0.5)
        file.write(whole[399][20:] + whole[400])
    more = [json.loads(process.stdout.readline()) for _ in range(2)]
    process.kill()
    process.communicate()
    assert [line["weight"] for line in (first, *more)] == [decision.weights[0] for decision in expected[-3:]]


class TestLimitsOfAStream:
    def test_an_endless_line_is_refused(self):
        with open("/dev/zero", "rb") as endless, pytest.raises(DataError, match="a line of more than"):
            list(bar_chunks(endless))

    def test_lines_without_a_bar_are_refused(self):
        text = b"nothing to see\n" * 20_000
        with pytest.raises(DataError, match="no bar in the first"):
            list(bar_chunks(io.BytesIO(text)))

    def test_a_compressed_file_without_an_end_is_refused(self, monkeypatch):
        monkeypatch.setattr(bar_stream, "LARGEST_WHOLE", 2**21)
        stream = io.BytesIO(b"\x1f\x8b" + bytes(2**22))
        with pytest.raises(DataError, match="without an end"):
            list(bar_chunks(stream))

    def test_a_compressed_file_with_long_lines_is_read(self, tmp_path, monkeypatch):
        monkeypatch.setattr(bar_stream, "LONGEST_LINE", 64)
        bars = random_walk(300, seed=0)
        bars.to_csv(tmp_path / "bars.csv.gz")
        (whole,) = bar_chunks(io.BytesIO((tmp_path / "bars.csv.gz").read_bytes()))
        assert len(whole) == 300
