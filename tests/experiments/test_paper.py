"""Paper trading is the backtest, bar by bar, whatever happens to the process, and it stops when it is told to."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from tailguard.config import load_config
from tailguard.evaluate.backtest_window import BacktestWindow
from tailguard.experiments.broker import Account, PaperBroker
from tailguard.experiments.paper import BROKER, KILL, LEDGER, PaperTrading
from tailguard.experiments.prepared_market import load_market
from tailguard.experiments.run import Run, train
from tailguard.experiments.trader import PredictedTail, Trader
from tailguard.io import journal as journal_module
from tailguard.io.journal import Journal
from tailguard.market import random_walk
from tailguard.market.account_tail import account_tail
from tailguard.market.accounting import bar_array, simulate_bars
from tailguard.market.bars import symbols_of
from tailguard.market.rules import GuardConfig, TradingRules
from tailguard.periods import Period

TINY = [
    "training.steps=128",
    "training.n_envs=4",
    "training.n_steps=16",
    "training.n_epochs=1",
    "training.test_share=0.15",
    "training.tensorboard=null",
    "selection=null",
    "training.policy=MlpLstmPolicy",
    "training.lstm_hidden_size=8",
    "training.risk={objective: cvar, alpha: 0.2, period: 1W}",
    "features.horizons=[1, 5]",
    "features.drawdown_window=21",
    "features.slow_window=21",
    "walkforward.warmup=5",
]
AWKWARD = [
    "trading.fee=0.002",
    "trading.slippage=0.001",
    "trading.cash=1000000",
    "trading.lot=1",
    "trading.min_trade=20",
    "trading.stop_loss=0.01",
    "trading.take_profit=0.015",
    "trading.participation=0.001",
    "trading.cash_rate=0.03",
    "trading.borrow_rate=0.02",
    "trading.fill=next_close",
]


def silent(*_):
    """Report to nobody."""


def made(folder, symbols, settings):
    files = []
    for seed, symbol in enumerate(symbols):
        files.append(folder / f"{symbol}.csv")
        random_walk(400, seed=seed).assign(volume=5000.0).to_csv(files[-1])
    config = load_config(None, [*TINY, *settings])
    source = "+".join(map(str, files))
    run = Run.create(folder / "run", config, source, load_market(source, config))
    train(run, silent)
    return Run.open(run.path)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return made(tmp_path_factory.mktemp("plain"), ["a"], [])


@pytest.fixture(scope="module")
def portfolio(tmp_path_factory):
    return made(tmp_path_factory.mktemp("portfolio"), ["a", "b"], AWKWARD)


def paper(run, folder, bars, **options):
    broker = PaperBroker(folder / BROKER, symbols_of(bars), run.config.trading)
    try:
        return PaperTrading(run, folder, broker, bars, **options)
    except ValueError:
        broker.books.journal.close()
        raise


def close(trading):
    trading.journal.close()
    trading.broker.books.journal.close()


def records(folder, *kinds):
    path = folder / LEDGER
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    whole = [json.loads(line) for line in lines if line.endswith("\n")]
    return [record for record in whole if record["kind"] in kinds]


def assert_is_the_simulation(run, folder, bars):
    """The accounts in the ledger are those of `simulate` with the weights in the ledger, to the last digit."""
    accounts, orders = records(folder, "begin", "bar"), records(folder, "order")
    assert [order["number"] for order in orders] == list(range(1, len(orders) + 1))
    weights = {pd.Timestamp(order["time"]): order["weights"] for order in orders}
    first = bars.index.get_loc(pd.Timestamp(accounts[0]["time"]))
    assert [account["time"] for account in accounts] == [time.isoformat() for time in bars.index[first : first + len(accounts)]]
    rules = TradingRules(**run.config.trading.model_dump(include=set(TradingRules.model_fields)))
    array = bar_array(bars, rules)[first : first + len(accounts)]
    nothing = [0.0] * len(symbols_of(bars))  # is ordered after a liquidation
    targets = [weights.get(time, nothing) for time in bars.index[first : first + len(accounts)]]
    expected = simulate_bars(array, np.array(targets), rules)
    assert [account["cash"] for account in accounts] == expected.cash.tolist()
    assert [account["units"] for account in accounts] == expected.units.tolist()
    assert [account["carry"] for account in accounts] == expected.carry.tolist()
    return expected


@pytest.mark.parametrize("name", ["plain", "portfolio"])
def test_paper_over_replayed_bars_is_the_simulation(request, tmp_path, name):
    run = request.getfixturevalue(name)
    bars = run.market().bars
    trading = paper(run, tmp_path, bars)
    expected = assert_is_the_simulation(run, tmp_path, bars)
    assert [status.equity for status in trading.history] == expected.equity.tolist()
    assert trading.history[0].time == bars.index[run.split.test[0]]  # not a bar that it was trained on
    settled = records(tmp_path, "bar")
    fees = [sum(fill[4] for fill in record["fills"]) for record in settled]
    np.testing.assert_allclose(fees, expected.fees[1:], rtol=1e-12)
    if name == "plain":
        judged = trading.judged().evaluation.agent.returns
        np.testing.assert_allclose(judged, np.diff(expected.equity) / expected.equity[:-1], rtol=0.0, atol=1e-12)
    else:
        assert any(any(record["unfilled"]) for record in settled)  # participation left something
        sides = [[fill[1] for fill in record["fills"]] for record in settled]
        assert any(len(set(symbols)) < len(symbols) for symbols in sides)  # a stop, and an order in the same bar


@pytest.mark.parametrize("power", [None, 2.0])
def test_decisions_are_those_of_act(plain, tmp_path, power):
    run, bars = Run.open(plain.path), plain.market().bars
    scaled = run.config.trading.model_copy(update={"volatility_power": power})
    run.config = run.config.model_copy(update={"trading": scaled})
    trading = paper(run, tmp_path, bars, since=bars.index[0])
    trader = Trader(run.agent(), run.scaler, run.config.features, run.config.trading)
    decisions = trader.add(bars)
    assert [decision.time for decision in decisions] == [status.time for status in trading.history]
    assert np.array_equal([decision.weights for decision in decisions], [status.weights for status in trading.history])


def test_with_a_guard_paper_act_and_backtest_hold_the_same(plain, tmp_path):
    run, bars = Run.open(plain.path), plain.market().bars.iloc[:170]
    free = run.config.trading
    guarded = free.model_copy(update={"guard": GuardConfig(max_loss=1e-5, period="1M")})
    run.config = run.config.model_copy(update={"trading": guarded})
    trading = paper(run, tmp_path, bars.iloc[:160], since=bars.index[0])
    trading.add(bars)
    unlimited, acting = (Trader(run.agent(), run.scaler, run.config.features, rules) for rules in (free, guarded))
    asked, held = unlimited.add(bars), acting.add(bars)
    assert np.array_equal([decision.weights for decision in held], [status.weights for status in trading.history])
    first = int(bars.index.get_loc(held[0].time))
    window = BacktestWindow(bars, guarded, (first, len(bars)))
    targets = np.array([decision.weights for decision in asked])
    assert np.array_equal(window.guarded(targets[:-1]), [decision.weights for decision in held[:-1]])
    assert any("the limit is" in decision.guard for decision in held)  # an agent that has learnt nothing holds little
    assert held[0].guard == "nothing is held: there are too few bars for a forecast"
    # The tail of the last decision is that of the account which trades the guarded weights.
    tail = account_tail(
        bars, np.concatenate([np.zeros((first, 1)), [d.weights for d in held]]), Period.parse("1M"), first=first
    )
    assert held[-1].tail == PredictedTail(
        "month", tail.rows.to_go[-1], tail.to_date[-1], tail.expected[-1], tail.value_at_risk(0.05)[-1], tail.cvar(0.05)[-1]
    )
    assert trading.predicted().tails == [held[-1].tail]
    history = [status.weights.tolist() for status in trading.history]
    close(trading)
    again = paper(run, tmp_path, bars)  # from its ledger
    assert [status.weights.tolist() for status in again.history] == history
    # What was ordered is judged as it is: it has been guarded already.
    equity = np.array([status.equity for status in again.history])
    np.testing.assert_allclose(again.judged().evaluation.agent.returns, equity[1:] / equity[:-1] - 1.0, rtol=0.0, atol=1e-12)


def test_bars_may_come_one_by_one_and_again(plain, tmp_path):
    bars = plain.market().bars
    whole = paper(plain, tmp_path / "whole", bars)
    piecewise = paper(plain, tmp_path / "pieces", bars.iloc[:10])
    for last in range(335, len(bars) + 1, 5):
        piecewise.add(bars.iloc[max(last - 9, 0) : last]) if last > 339 else piecewise.add(bars.iloc[:last])
    assert [status.equity for status in piecewise.history] == [status.equity for status in whole.history]
    changed = bars.copy()
    changed.iloc[-1, 3] *= 1.001
    with pytest.raises(ValueError, match="are not those that"):
        piecewise.add(changed)


class PowerCut(Exception):
    """The machine is off."""


class Disk:
    """The disk under the journals: the machine goes off in the middle of one of its writes.

    :param at: number of that write.
    """

    def __init__(self, monkeypatch, at):
        self.at, self.writes, self.synced, self.real = at, 0, {}, os.write
        monkeypatch.setattr(journal_module.os, "write", self.write)
        monkeypatch.setattr(journal_module.os, "fsync", self.sync)

    def write(self, file, data):
        self.writes += 1
        if self.writes == self.at:
            self.real(file, data[: len(data) // 2])
            raise PowerCut
        return self.real(file, data)

    def sync(self, file):
        self.synced[os.readlink(f"/proc/self/fd/{file}")] = os.fstat(file).st_size

    def lose(self, folder, share):
        """Forget a share of what was written and not synced."""
        for path in map(str, (folder / LEDGER, folder / BROKER)):
            if os.path.exists(path):
                safe = self.synced.get(path, 0)
                os.truncate(path, safe + round((1.0 - share) * (os.path.getsize(path) - safe)))


@pytest.mark.parametrize("share", [0.0, 1.0], ids=["killed", "unsynced lost"])
def test_no_order_is_lost_or_doubled_when_the_machine_goes_off_at_any_write(plain, tmp_path, monkeypatch, share):
    bars = plain.market().bars.iloc[:345]
    whole = paper(plain, tmp_path / "whole", bars)
    assert len(whole.history) == 5
    cuts = 0
    for at in range(1, 20):
        folder = tmp_path / str(at)
        with monkeypatch.context() as patch:
            disk = Disk(patch, at)
            try:
                paper(plain, folder, bars)
            except PowerCut:
                cuts += 1
            # The descriptors go with the process.
            for name in os.listdir("/proc/self/fd"):
                path = os.path.realpath(f"/proc/self/fd/{name}")
                if path.startswith(str(folder)):
                    os.close(int(name))
            disk.lose(folder, share)
        resumed = paper(plain, folder, bars)
        assert [status.equity for status in resumed.history] == [status.equity for status in whole.history]
        assert_is_the_simulation(plain, folder, bars)
        close(resumed)
        sent = [
            record["number"]
            for record in map(json.loads, (folder / BROKER).read_text().splitlines())
            if record["kind"] == "order"
        ]
        assert sent == list(range(1, 6))
    assert 14 <= cuts < 19  # every write of the process was tried


def command(run, folder, file, *options):
    return [sys.executable, "-m", "tailguard", "paper", str(run.path), "--bars", str(file), "--ledger", str(folder), *options]


def test_a_process_that_is_killed_resumes(plain, tmp_path):
    bars, file, folder = plain.market().bars, plain.info["data"], tmp_path / "paper"
    lines = Path(file).read_bytes().splitlines(keepends=True)
    process = subprocess.Popen(command(plain, folder, "-", "--quiet"), stdin=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdin.write(b"".join(lines[:-1]))
    process.stdin.flush()  # and it stays open: the process cannot end by itself before it is killed
    while process.poll() is None and len(records(folder, "order")) < 10:
        time.sleep(0.02)
    time.sleep(random.Random(0).random() * 0.01)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert 10 <= len(records(folder, "order")) < 60
    subprocess.run(command(plain, folder, file), check=True, capture_output=True)
    assert len(records(folder, "order")) == 60
    assert_is_the_simulation(plain, folder, bars)
    assert "<html" in (folder / "report.html").read_text()


class Thief(PaperBroker):
    """A broker who takes something for himself."""

    def settle(self, bars, row):
        settled = super().settle(bars, row)
        stolen = settled.account.cash * 0.999
        return settled._replace(account=Account(stolen, settled.account.units, settled.account.entries))


def test_the_brokers_account_must_be_what_the_fills_add_up_to(plain, tmp_path):
    bars = plain.market().bars
    thief = Thief(tmp_path / BROKER, symbols_of(bars), plain.config.trading)
    with pytest.raises(ValueError, match=r"the broker has .* in cash, .* it should be .*: nothing was ordered"):
        PaperTrading(plain, tmp_path, thief, bars)
    assert len(records(tmp_path, "order")) == 1


def test_the_kill_switch_sells_everything_and_stays_thrown(plain, tmp_path):
    bars = plain.market().bars
    trading = paper(plain, tmp_path, bars.iloc[:360])
    assert trading.history[-1].weights.any()
    (tmp_path / KILL).touch()
    trading.check()  # between two bars: the order that waits is replaced
    trading.check()
    assert not trading.history[-1].weights.any()
    assert not trading.finished
    trading.add(bars.iloc[:370])
    assert trading.finished
    assert trading.history[-1].time == bars.index[360]  # sold at its open
    assert len(records(tmp_path, "kill")) == 1
    assert_is_the_simulation(plain, tmp_path, bars)
    close(trading)
    with pytest.raises(ValueError, match=r"KILL exists; delete .*KILL, and --rearm trades again"):
        paper(plain, tmp_path, bars)
    (tmp_path / KILL).unlink()
    again = paper(plain, tmp_path, bars, rearm=True)
    assert not again.killed
    assert again.history[-1].time == bars.index[-1]
    assert_is_the_simulation(plain, tmp_path, bars)


def test_a_loss_throws_the_switch(plain, tmp_path):
    bars = plain.market().bars
    whole = paper(plain, tmp_path / "whole", bars)
    equity = np.array([status.equity for status in whole.history])
    limit = 0.5 * (1.0 - equity.min())
    assert limit > 0.0
    trading = paper(plain, tmp_path / "limited", bars, max_loss=limit)
    first = int(np.argmax(equity < 1.0 - limit))
    assert trading.killed.endswith(f"more than the limit of {limit:.2%}")
    assert [status.equity for status in trading.history][: first + 1] == equity[: first + 1].tolist()
    assert len(trading.history) == first + 2
    assert not records(tmp_path / "limited", "bar")[-1]["units"][0]


def test_a_liquidated_account_trades_no_more(plain, tmp_path):
    crash = plain.market().bars.copy()
    crash.iloc[360:, :4] *= 0.001
    run = Run.open(plain.path)
    held = run.config.trading.model_copy(update={"core": (1.0,), "active": 0.0})
    run.config = run.config.model_copy(update={"trading": held})
    trading = paper(run, tmp_path, crash)
    assert trading.finished
    assert trading.history[-1].time == crash.index[360]
    assert_is_the_simulation(run, tmp_path, crash)
    close(trading)
    with pytest.raises(ValueError, match="the account was liquidated"):
        paper(run, tmp_path, crash)


def test_a_ledger_belongs_to_its_agent_rules_and_process(plain, portfolio, tmp_path):
    bars = plain.market().bars
    trading = paper(plain, tmp_path, bars)
    with pytest.raises(ValueError, match="in use by another process"):
        Journal(tmp_path / LEDGER)
    close(trading)
    other = Run.open(plain.path)
    other.agent = lambda: _untrained(plain)
    with pytest.raises(ValueError, match="this agent decides otherwise"):
        paper(other, tmp_path, bars)
    with pytest.raises(ValueError, match="other symbols or rules"):
        PaperBroker(tmp_path / BROKER, [""], portfolio.config.trading)
    at_the_close = plain.config.trading.model_copy(update={"fill": "close"})
    with pytest.raises(ValueError, match="next_open can be traded"):
        PaperBroker(tmp_path / "new", [""], at_the_close)


def _untrained(run):
    from tailguard.experiments.training import build_model

    return build_model(run.market(), run.config.training.model_copy(update={"seed": 9}))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--bars", "missing.csv"], "missing.csv"),
        (["--bars", "FILE", "--max-loss", "2"], "max-loss"),
        (["--bars", "FILE", "--since", "never"], "--since is 'never'"),
        (["--bars", "HOURLY"], "bars of 1 hour, but the agent was trained on bars of 1 day"),
        (["--bars", "FILE", "--ledger", "FILE"], "is a file, but --ledger must name a folder"),
        (["--bars", "FILE", "--cash", "0"], "trading.cash"),
    ],
)
def test_mistakes_end_with_one_line(plain, tmp_path, capsys, arguments, message):
    from tailguard.cli import main

    random_walk(300, seed=0, freq="1h").to_csv(tmp_path / "hourly.csv")
    files = {"FILE": plain.info["data"], "HOURLY": str(tmp_path / "hourly.csv")}
    ledger = [] if "--ledger" in arguments else ["--ledger", str(tmp_path / "ledger")]
    with pytest.raises(SystemExit) as stopped:
        main(["paper", str(plain.path), *ledger, "--quiet", *(files.get(argument, argument) for argument in arguments)])
    assert stopped.value.code == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    assert len(lines) == 1
    assert message in lines[0]
    assert not (tmp_path / "ledger").exists()


def test_the_start_is_fixed_once_trading_has_begun(plain, tmp_path):
    bars = plain.market().bars
    early = paper(plain, tmp_path, bars, since=bars.index[-1] + pd.Timedelta("1D"))
    assert not early.history
    close(early)
    begun = paper(plain, tmp_path, bars, since=bars.index[350])
    assert begun.history[0].time == bars.index[350]
    close(begun)
    resumed = paper(plain, tmp_path, bars)
    assert [status.time for status in resumed.history] == [status.time for status in begun.history]
    close(resumed)
    with pytest.raises(ValueError, match="leave --since out"):
        paper(plain, tmp_path, bars, since=bars.index[351])


def test_bars_that_do_not_fit_leave_the_ledger_as_it_is(plain, tmp_path):
    bars = plain.market().bars
    trading = paper(plain, tmp_path, bars.iloc[:390])
    before = (tmp_path / LEDGER).read_bytes()
    later = random_walk(2000, seed=1, freq="1min")
    later.index += bars.index[-1] - later.index[0]
    with pytest.raises(ValueError, match="bars of 1 minute"):
        trading.add(later)
    assert (tmp_path / LEDGER).read_bytes() == before


def test_a_command_that_is_killed_while_it_waits_for_bars_ends_in_good_order(plain, tmp_path):
    folder, pipes = tmp_path / "paper", dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command(plain, folder, "-", "--quiet", "--max-loss", "1e-6"), text=True, **pipes) as process:
        with open(plain.info["data"], encoding="utf-8") as file:
            process.stdin.write(file.read())
        process.stdin.flush()  # and it stays open: the command waits for more, until a loss ends it
        output = (process.stdout.read(), process.stderr.read())
    assert process.returncode == 130, output
    assert "more than the limit of 0.00%; --rearm trades again" in output[1]
    assert records(folder, "kill")
