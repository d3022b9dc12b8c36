"""Selling an order on the user's bars: the rivals' figures, the report and the command."""

import json

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from tailguard.cli import app
from tailguard.envs import OptimalExecution
from tailguard.envs.desk_config import ExecutionSettings
from tailguard.evaluate.report.execution import ExecutionComparison, tail_terms
from tailguard.experiments.execution import (
    agent_schedules,
    execute_bars,
    play_costs,
    schedule_actions,
    schedule_for_tail,
    times_of_day,
    train_seller,
    tune_almgren_chriss,
)
from tailguard.experiments.minibatches import minibatch_size
from tailguard.market import load_dataset


def test_the_schedule_for_a_tail_has_the_least_cvar_of_many():
    env = OptimalExecution(40_000, risk_aversion=0.0)
    best = schedule_for_tail(env, 0.1)
    rivals = [env.almgren_chriss(aversion) for aversion in np.geomspace(1e-4, 1e-1, 7)]
    cvars = [tail_terms(play_costs(env, schedule_actions(env, schedule), seed=1), 0.1).mean() for schedule in (best, *rivals)]
    assert cvars[0] <= min(cvars[1:]) + 0.3
    # 1.755 is the density of the normal at its tenth percentile over 0.1
    assert cvars[0] == pytest.approx(best.expected_cost + 1.755 * best.variance**0.5, rel=0.01)


def test_the_schedules_of_an_agent_cost_what_its_episodes_do():
    market = {"steps": 8, "risk_aversion": (1e-3, 1e-1)}
    model = train_seller(OptimalExecution(64, seed=0, **market), alpha=None, steps=5_120, seed=0)
    env = OptimalExecution(4_000, **market)
    obs, _ = env.reset(seed=3)
    aversions, total, running = env.risk_aversion, np.zeros(env.num_envs), np.ones(env.num_envs, bool)
    for _ in range(env.steps):
        obs, rewards, terminated, _, _ = env.step(model.predict(obs, deterministic=True)[0])
        total += np.where(running, rewards, 0.0)
        running &= ~terminated
    schedules = agent_schedules(model, env, aversions)
    exact = [schedule.objective(aversion) for schedule, aversion in zip(schedules, aversions, strict=True)]
    assert -total.mean() == pytest.approx(np.mean(exact), abs=4.0 * (total + exact).std() / env.num_envs**0.5)


def test_a_seller_learns_from_relative_rewards_and_leaves_the_market_as_it_was():
    env = OptimalExecution(64, steps=50, risk_aversion=(1e-3, 1e-1), expected_rewards=True, seed=0)
    model = train_seller(env, alpha=None, steps=2_560, seed=0)
    assert not env.relative_rewards
    assert (model.n_steps, model.batch_size) == (100, 640)  # whole episodes, and as many updates as short ones have


@pytest.mark.parametrize(("steps", "copies", "alpha"), [(1, 1, None), (7, 3, None), (33, 128, None), (7, 3, 0.05)])
def test_orders_of_any_length_cut_their_rollouts_into_equal_minibatches(steps, copies, alpha):
    env = OptimalExecution(copies, steps=steps, risk_aversion=0.0 if alpha else (1e-3, 1e-1), seed=0)
    model = train_seller(env, alpha=alpha, steps=1, seed=0)
    assert model.n_steps * copies % model.batch_size == 0


def test_the_minibatch_is_the_largest_that_divides():
    assert [minibatch_size(n, most) for n, most in ((5120, 1280), (8448, 1280), (714, 70), (1, 0), (7, 3))] == [
        1280,
        1056,
        51,
        1,
        1,
    ]


def test_schedules_are_asked_for_within_the_range_and_without_regimes():
    market = {"steps": 4, "risk_aversion": (1e-3, 1e-1)}
    model = train_seller(OptimalExecution(16, seed=0, **market), alpha=None, steps=128, seed=0)
    with pytest.raises(ValueError, match="risk_aversions"):
        agent_schedules(model, OptimalExecution(**market), [1.0])
    with pytest.raises(ValueError, match="range of risk aversions"):
        agent_schedules(model, OptimalExecution(steps=4, risk_aversion=0.01), [0.01])


def test_tail_terms_average_the_worst_costs():
    costs = np.random.default_rng(0).normal(size=10_000)
    assert tail_terms(costs, 0.05).mean() == pytest.approx(np.sort(costs)[-500:].mean(), rel=1e-3)
    assert tail_terms(costs, 1.0).mean() == pytest.approx(costs.mean())


def test_the_comparison_names_the_best_rival_and_says_when_there_is_no_difference():
    draws = np.random.default_rng(0).normal(size=5000)
    better, same, worse = (
        ExecutionComparison("t", {"agent": draws, "a": draws + shift, "b": draws + 9.0}, 0.1, {"data": "d"})
        for shift in (3.0, 0.0, -3.0)
    )
    assert "In the worst 10% of the paths the agent pays less than its best rival (a): the saving is 3.00" in better.headline()
    assert "pays more than its best rival (a): the excess is 3.00" in worse.headline()
    assert better.savings()["a"].value == pytest.approx(3.0)
    assert "about as much as" in same.headline()
    assert json.loads(json.dumps(better.to_json()))["saved_bps"]["b"]["value"] == pytest.approx(9.0)


def test_the_command_writes_an_agent_figures_and_a_report(tmp_path):
    options = ["--steps", "10240", "--paths", "1000", "--bars", "5", "--output", str(tmp_path / "out")]
    result = CliRunner().invoke(app, ["execute", "--data", "nasdaq-1d", *options])
    assert result.exit_code == 0, result.output
    figures = json.loads((tmp_path / "out" / "execution.json").read_text())
    assert list(figures["statistics"]) == ["agent", "Almgren-Chriss", "VWAP", "TWAP", "at once"]
    assert "Almgren-Chriss" in (tmp_path / "out" / "report.html").read_text()
    assert figures["headline"] in result.output.replace("\n", " ")


def test_bars_without_volume_are_refused():
    with pytest.raises(ValueError, match="volume"):
        execute_bars(load_dataset("nasdaq-1d").drop(columns="volume"), ExecutionSettings())


@pytest.fixture(scope="module")
def intraday():
    """Bars of seven hours a day, whose volume is four times as large in the first and the last hour as at noon."""
    days = pd.bdate_range("2022-01-03", periods=400)
    times = pd.DatetimeIndex([day + pd.Timedelta(hours=hour) for day in days for hour in range(9, 16)])
    rng, hours = np.random.default_rng(0), np.tile(np.arange(7), 400)
    close = 50.0 * np.exp(np.cumsum(rng.normal(0.0, 0.004, len(times))))
    volume = 1000.0 * (1.0 + 3.0 * ((hours - 3.0) / 3.0) ** 2) * np.exp(rng.normal(0.0, 0.1, len(times)))
    return pd.DataFrame({"open": close, "high": close, "low": close, "close": close, "volume": volume}, index=times)


def test_the_times_of_a_day_are_counted_where_there_are_several(intraday):
    np.testing.assert_array_equal(times_of_day(pd.DatetimeIndex(intraday.index)), np.tile(np.arange(7), 400))
    assert not times_of_day(pd.DatetimeIndex(intraday.index[::7])).any()  # daily bars
    seconds = np.random.default_rng(0).integers(0, 10**8, 2000)
    assert not times_of_day(pd.DatetimeIndex(np.sort(np.unique(seconds)).astype("datetime64[s]"))).any()  # at no regular times


def test_vwap_of_the_users_volumes_is_cheaper_than_even_selling(intraday):
    settings = ExecutionSettings(bars=7, permanent=0.0, half_spread=0.0, steps=5_000, paths=20_000)
    _, comparison = execute_bars(intraday, settings)
    mean = {name: figures["mean"] for name, figures in comparison.statistics().items()}
    # Without noise an even pace costs mean(1 / v) and VWAP 1 / mean(v).
    profile = 1.0 + 3.0 * ((np.arange(7) - 3.0) / 3.0) ** 2
    assert mean["VWAP"].value / mean["TWAP"].value == pytest.approx(1.0 / (profile.mean() * (1.0 / profile).mean()), rel=0.1)
    assert "7 times of day" in comparison.facts["volume"]
    assert "10.0% of what is traded" in comparison.facts["order"]


def test_the_schedule_of_almgren_and_chriss_knows_what_a_share_pays_on_average():
    """It is tuned on the training bars, where volume is uneven: with the mean volume's impact it would sell too fast."""
    _, comparison = execute_bars(load_dataset("btcusd-1h"), ExecutionSettings(steps=5_000, paths=5_000))
    tail = {name: figures["CVaR 0.05"].value for name, figures in comparison.statistics().items()}
    assert tail["Almgren-Chriss"] < 1.05 * tail["TWAP"]


def test_the_tuned_schedule_is_that_of_the_closed_form_where_its_market_is_played():
    env = OptimalExecution(20_000, risk_aversion=0.0)
    tuned, best = tune_almgren_chriss(env, env, 0.1, seed=1), schedule_for_tail(env, 0.1)
    assert np.abs(np.cumsum(tuned.trades) - np.cumsum(best.trades)).max() < 0.05


def test_the_order_may_stand_in_the_configuration_and_options_come_before_it(tmp_path):
    (tmp_path / "order.yaml").write_text(
        "data: [nasdaq-1d]\nexecution: {bars: 4, order: 0.5, steps: 4096, paths: 1000, half_spread: 3.0}\n"
    )
    arguments = ["execute", str(tmp_path / "order.yaml"), "--set", "execution.impact=0.5", "--bars", "3"]
    result = CliRunner().invoke(app, [*arguments, "--output", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    figures = json.loads((tmp_path / "out" / "execution.json").read_text())
    assert "0.5 of a mean day's volume, sold within 3 bars" in figures["facts"]["order"]
    assert "0.25 times" not in figures["title"]
