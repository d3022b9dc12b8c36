"""An agent at work decides as it does in an evaluation, however the bars arrive."""

import io
import itertools
import json
import re
import subprocess
import sys
import time

import numpy as np
import pandas as pd
import pytest

from tailguard.config import load_config
from tailguard.evaluate.play import play, return_rule_of
from tailguard.experiments import bar_stream
from tailguard.experiments.bar_stream import bar_chunks, polled
from tailguard.experiments.prepared_market import default_split, prepare_market
from tailguard.experiments.run import Run, train
from tailguard.experiments.trader import LivePredictor, Trader
from tailguard.experiments.training import build_model
from tailguard.market import DataError, DataWarning, FileConfig, align_bars, load_bars, random_walk, tail_forecast
from tailguard.market.rules import TradingSettings

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


@pytest.mark.parametrize(
    "rules",
    [
        {},
        {"guard": {"max_loss": 0.03, "period": "1M"}},
        {"guard": {"max_loss": 0.02, "period": 10}, "tail_period": "1W"},
        {"guard": {"max_loss": 0.03, "period": "1W"}, "tail_period": "1Q"},
    ],
    ids=str,
)
def test_bars_one_by_one_are_predicted_as_from_scratch_with_one_prediction_each(rules, monkeypatch):
    """A restart makes all predictions once; then a bar costs one for each of the forecasts, however many came before."""
    bars = align_bars({"a": random_walk(420, seed=0), "late": random_walk(420, seed=1).iloc[250:]})
    bars.iloc[350, :5] = np.nan
    trading, first = TradingSettings(**rules), 100
    decided, asked = np.random.default_rng(0).uniform(-1.0, 1.0, (320, 2)), []
    make = tail_forecast._predict
    monkeypatch.setattr(tail_forecast, "_predict", lambda *inputs: (asked.append(int(inputs[-1].sum())), make(*inputs))[1])
    predictor, forecasts = LivePredictor(trading), 3 if rules else 1
    for rows in (300, *range(301, 360), 365, *range(366, 420)):
        count = 6 if rows == 365 else 1
        live = predictor.predict(bars[:rows], first, decided[: rows - first], count)
        if rows % 4 == 0 or rows == 365:
            made = asked[-forecasts:]
            scratch = LivePredictor(trading).predict(bars[:rows], first, decided[: rows - first], count)
            np.testing.assert_array_equal(live.weights, scratch.weights)
            assert live.tails == scratch.tails
            assert live.reasons == scratch.reasons
            assert rows == 300 or max(made) <= count
    assert live.tails[-1] is not None


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


@pytest.fixture
def received(monkeypatch):
    """Return what comes of groups of lines that arrive one after another: when they do is not left to the machine."""

    def receive(groups, **options):
        arrived = [group.splitlines(keepends=True) for group in groups]
        monkeypatch.setattr(bar_stream, "_batches", lambda stream, follow: iter(arrived))
        return list(bar_chunks(io.BytesIO(), **options))

    return receive


HOURS = random_walk(60, seed=0, freq="h").set_axis(pd.date_range("2023-11-04", periods=60, freq="h", name="time", unit="ns"))
LOCAL = HOURS.set_axis(HOURS.index.tz_localize("UTC").tz_convert("America/New_York"))
DAILY = random_walk(60, seed=0).set_axis(pd.bdate_range("2023-01-02", periods=60, name="time", unit="ns"))
QUIET = DAILY.assign(volume=np.where(np.arange(60) < 50, DAILY["volume"], 0.0))
# name: (bars, as text, options); the last bar alone could be read otherwise, or not at all
LATER = {
    "days or months": (DAILY, DAILY.to_csv(date_format="%d/%m/%Y"), {}),
    "thousands or decimals": (DAILY, DAILY.round(3).to_csv(sep=";", decimal=","), {}),
    "clocks set back": (HOURS, LOCAL.to_csv(date_format="%Y-%m-%d %H:%M"), {"config": FileConfig(timezone="America/New_York")}),
    "dates of a zone": (DAILY, DAILY.tz_localize("America/New_York").to_csv(), {"step": pd.Timedelta(days=1)}),
    "times of day as numbers": (
        HOURS,
        re.sub(r"(?m)^(\S+) (..):00:00", r"\1,\g<2>0000", HOURS.to_csv()).replace("time,", "date,time,"),
        {},
    ),
    "two volumes": (QUIET, QUIET.assign(tickvol=7.0).to_csv(), {}),
}  # fmt: skip


@pytest.mark.parametrize(("bars", "text", "options"), LATER.values(), ids=LATER)
def test_each_bar_of_a_stream_is_read_as_the_first_ones_were(bars, text, options, received):
    lines = text.splitlines(keepends=True)
    for first in (12, 40):  # from here on one at a time
        chunks = received(["".join(lines[: first + 1]), *lines[first + 1 :]], **options)
        assert len(chunks) == 1 + 60 - first
        pd.testing.assert_frame_equal(pd.concat(chunks), bars.round(3) if ";" in text else bars, check_freq=False)


def test_bars_that_can_be_read_in_two_ways_wait_for_others_that_tell(received):
    header, *lines = DAILY.to_csv(date_format="%d/%m/%Y").splitlines(keepends=True)
    groups = [header + lines[0], "".join(lines[1:30]), "".join(lines[30:])]
    with pytest.warns(DataWarning, match=r"'02/01/2023' is 2 January 2023 or 1 February 2023.*; waiting for bars"):
        chunks = received(groups)
    pd.testing.assert_frame_equal(pd.concat(chunks), DAILY, check_freq=False)
    with pytest.warns(DataWarning), pytest.raises(DataError, match="say which with --time-format"):
        received([header + lines[0]])


def test_newest_bars_first_are_read_at_the_end(received):
    header, *lines = DAILY.iloc[::-1].to_csv().splitlines(keepends=True)
    (bars,) = received([header + "".join(lines[:9]), "".join(lines[9:])])
    pd.testing.assert_frame_equal(bars, DAILY, check_freq=False)


def test_a_stream_is_described_once(caplog, received):
    caplog.set_level("INFO", logger="tailguard.market.data")
    lines = DAILY.to_csv().splitlines(keepends=True)
    assert len(received(["".join(lines[:50]), *lines[50:]])) == 12
    assert [record.getMessage().split(";")[0] for record in caplog.records] == [
        "input: 49 bars of 1 day, 2023-01-02 00:00:00 to 2023-03-09 00:00:00"
    ]


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

    @pytest.mark.parametrize("line", [b'{"a":' * 50_000, b'{"time": "2024-01-02", "open": ' + b"1" * 5_000 + b"}"])
    def test_json_that_python_does_not_read_is_refused(self, line):
        with pytest.raises(DataError, match="not a bar in JSON") as refused:
            list(bar_chunks(io.BytesIO(line + b"\n")))
        assert len(str(refused.value)) < 500

    def test_whatever_ends_the_reader_reaches_whoever_waits_for_bars(self):
        def broken():
            yield random_walk(10, seed=0)
            raise ZeroDivisionError("by intent")

        arrived = polled(broken(), seconds=200.0)
        assert len(next(arrived)) == 10
        with pytest.raises(ZeroDivisionError, match="by intent"):
            next(arrived)

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
