"""The guard: inside its limit, causal, explained, and the same in a backtest window."""

import numpy as np
import pandas as pd
import pytest
from tail_series import bars_from, crashes, garch, holding, long_short, portfolio, regimes, walk

import tailguard
import tailguard.market.guard as guard_module
from tailguard.evaluate.backtest_window import BacktestWindow
from tailguard.market import TradingRules, align_bars, simulate
from tailguard.market.account_tail import account_tail
from tailguard.market.bars import symbols_of
from tailguard.market.guard import guard
from tailguard.market.model_account import FREE, NO_FORECAST, REST_OF_PERIOD, WHOLE_PERIOD
from tailguard.periods import Period


def monthly(bars: pd.DataFrame, weights: np.ndarray, first: int = 500) -> np.ndarray:
    equity = pd.Series(simulate(bars, weights, fee=0.001).equity, bars.index).iloc[first:]
    return equity.groupby(equity.index.to_period("M")).last().pct_change().to_numpy()[1:]


def cvar(returns: np.ndarray) -> float:
    ordered = np.sort(returns)
    return float(ordered[: max(round(0.05 * len(ordered)), 1)].mean())


@pytest.mark.parametrize("limit", [0.03, 0.05, 0.1])
@pytest.mark.parametrize("draw", [garch, regimes, crashes], ids=["garch", "regimes", "crashes"])
def test_realised_tails_of_months_are_near_the_limit_and_not_far_inside(draw, limit: float) -> None:
    bars = draw(5)
    guarded = guard(np.ones(len(bars)), bars, max_loss=limit, period="1M")
    free, held = cvar(monthly(bars, np.ones(len(bars)))), cvar(monthly(bars, guarded.weights))
    assert held > 1.25 * -limit
    assert held < 0.55 * max(-limit, free)


@pytest.mark.parametrize("limit", [0.03, 0.05, 0.1])
@pytest.mark.parametrize("draw", [garch, regimes, crashes], ids=["garch", "regimes", "crashes"])
def test_the_prediction_for_the_guarded_account_is_inside_the_limit_and_true(draw, limit: float) -> None:
    bars = draw(5)
    guarded = guard(np.ones(len(bars)), bars, max_loss=limit, period="1M")
    known = ~np.isnan(guarded.predicted_cvar)
    lost = known & (guarded.to_date < -limit)
    assert (guarded.predicted_cvar[known & ~lost] >= -limit - 1e-12).all()
    assert (guarded.exposure[lost] == 0.0).all()  # what a period has lost already cannot be won back by holding
    np.testing.assert_allclose(guarded.predicted_cvar[lost], guarded.to_date[lost])
    assert lost.mean() < 0.05
    # Not because it promises too much: the worst months are about as bad as was predicted when they began.
    begins = known & Period.parse("1M").rows(pd.DatetimeIndex(bars.index)).restarts
    predicted, realised = guarded.predicted_cvar[begins].mean(), cvar(monthly(bars, guarded.weights))
    assert 0.8 * predicted > realised > 1.25 * predicted


def test_an_asset_that_is_listed_later_does_not_empty_the_account() -> None:
    """Only the new one waits for its first forecast, whether it was asked for all along or again at every close."""
    first, second = walk(0, 500), walk(1, 500)
    bars = align_bars({"A": first, "B": second.iloc[300:]})
    for asked in (np.full((500, 2), 0.5), np.full((500, 2), np.nan)):
        asked[0] = 0.5
        guarded = guard(asked, bars, max_loss=0.5, period="1M")
        alone = guard(asked[:, 0], first, max_loss=0.5, period="1M")
        weights = pd.DataFrame(guarded.weights).ffill().to_numpy()
        np.testing.assert_allclose(guarded.exposure[300:360], alone.exposure[300:360])
        assert (guarded.exposure[300:360] > 0.9).all()
        assert (weights[300:360, 0] > 0.4).all()
        assert (weights[300:360, 1] == 0.0).all()
        assert weights[361, 1] > 0.3  # what is held since the first bar has fallen until then
        assert guarded.reason(330) == "B not held: too few bars for a forecast"
        assert guarded.reason(30) == "nothing is held: there are too few bars for a forecast"
        assert guarded.reason(499) == ""


def test_all_costs_of_trading_count() -> None:
    bars = portfolio(0, 600)
    rules = TradingRules(
        fee=0.001, half_spread=0.0004, slippage=0.0006, assets={symbols_of(bars)[0]: {"fee": 0.02}},
        guard={"max_loss": 0.03, "period": "1W"},
    )  # fmt: skip
    window = BacktestWindow(bars, rules, (300, 600))
    asked = np.where(np.arange(299) % 2 == 0, 0.3, -0.3)[:, None] * np.ones(len(symbols_of(bars)))
    costs = np.full(len(symbols_of(bars)), 0.002)
    costs[0] = 0.021
    targets = np.concatenate([np.zeros((300, 3)), asked, np.full((1, 3), np.nan)])
    expected = guard(targets, bars, max_loss=0.03, period="1W", fee=costs, first=300)
    np.testing.assert_array_equal(window.guard(asked).to_date, expected.to_date)
    np.testing.assert_array_equal(
        window.tail(asked).to_date, account_tail(bars, targets, Period.parse("1W"), fee=costs, first=300).to_date
    )
    with pytest.raises(ValueError, match="the shape of fee"):
        guard(targets, bars, max_loss=0.03, period="1W", fee=np.ones(7))


def test_every_row_depends_on_the_past_only() -> None:
    bars = portfolio(0, 600)
    weights = long_short(bars)
    weights[np.random.default_rng(1).random(600) < 0.5] = np.nan
    whole = guard(weights, bars, max_loss=0.03, period="1M")
    for rows in (300, 455, 521):
        part = guard(weights[:rows], bars.iloc[:rows], max_loss=0.03, period="1M")
        np.testing.assert_array_equal(part.weights, whole.weights[:rows])
        np.testing.assert_array_equal(part.predicted_cvar, whole.predicted_cvar[:rows])
        assert part.reasons == whole.reasons[:rows]
    changed, other = bars.copy(), weights.copy()
    changed.iloc[500:] *= 0.7
    other[500:] = 0.1
    np.testing.assert_array_equal(guard(other, changed, max_loss=0.03, period="1M").weights[:500], whole.weights[:500])
    assert not np.array_equal(guard(weights, changed, max_loss=0.03, period="1M").weights[500:], whole.weights[500:])


def test_weights_are_scaled_and_never_raised() -> None:
    bars = portfolio(0, 600)
    asked = long_short(bars)
    guarded = guard(asked, bars, max_loss=0.03, period="1M")
    traded = ~np.isnan(guarded.weights)
    np.testing.assert_allclose(guarded.weights[traded], (guarded.exposure[:, None] * asked)[traded], rtol=1e-12)
    assert ((guarded.exposure >= 0.0) & (guarded.exposure <= 1.0)).all()
    assert guarded.exposure[100:].min() < 0.9


def test_holding_stays_holding_where_the_exposure_stays() -> None:
    bars = walk(0, 700)
    weights = np.full(700, np.nan)
    weights[0] = 1.0
    guarded = guard(weights, bars, max_loss=0.05, period="1M")
    changes = np.flatnonzero(np.diff(guarded.exposure)) + 1
    np.testing.assert_array_equal(np.flatnonzero(~np.isnan(guarded.weights))[1:], changes)
    assert 0 < len(changes) < 200


def test_causes_are_told_with_their_figures() -> None:
    bars = regimes(0, 1500)
    guarded = guard(holding(bars), bars, max_loss=0.06, period="1M")
    causes = guarded.cause
    assert set(causes.tolist()) == {FREE, NO_FORECAST, WHOLE_PERIOD, REST_OF_PERIOD}
    rows = {cause: int(np.flatnonzero(causes == cause)[-1]) for cause in (FREE, NO_FORECAST, WHOLE_PERIOD, REST_OF_PERIOD)}
    assert guarded.reason(rows[FREE]) == ""
    assert "too few bars" in guarded.reason(rows[NO_FORECAST])
    whole, rest = rows[WHOLE_PERIOD], rows[REST_OF_PERIOD]
    assert f"the worst 5% of months would lose {-guarded.whole_cvar[whole]:.1%}" in guarded.reason(whole)
    assert f"{guarded.to_date[rest]:+.1%} so far this month" in guarded.reason(rest)
    assert f"{guarded.rest_cvar[rest]:+.1%} predicted for the rest" in guarded.reason(rest)


def test_a_generous_limit_changes_nothing_after_the_first_bars() -> None:
    bars = walk(0, 400)
    guarded = guard(np.ones(400), bars, max_loss=0.9, period="1W")
    np.testing.assert_array_equal(guarded.weights[80:], 1.0)
    assert (guarded.predicted_cvar[80:] > -0.2).all()


def test_what_is_lost_cannot_be_lost_again() -> None:
    bars = walk(0, 400)
    bars.iloc[350:] *= 0.8  # a gap of 20 % in the middle of a month
    guarded = guard(np.ones(400), bars, max_loss=0.05, period="1M")
    rows = Period.parse("1M").rows(pd.DatetimeIndex(bars.index))
    rest = np.flatnonzero((np.arange(400) >= 350) & (rows.next == rows.own[350]))
    assert guarded.to_date[350] < -0.05
    np.testing.assert_array_equal(guarded.exposure[rest], 0.0)
    assert guarded.exposure[rest[-1] + 1] > 0.0


def still(n: int) -> pd.DataFrame:
    """Return bars that do not move."""
    times = pd.bdate_range("1995-01-02", periods=n, name="time")
    return pd.DataFrame(100.0, times, ["open", "high", "low", "close", "volume"])


def test_a_price_that_has_never_moved_is_unknown_from_its_first_move_on() -> None:
    bars, moving = still(700), walk(0, 400)
    bars.iloc[300:] = moving.to_numpy() * (100.0 / moving["open"].iloc[0])
    guarded = guard(np.ones(700), bars, max_loss=0.02, period="1M")
    assert (guarded.exposure[60:299] == 1.0).all()
    assert (guarded.exposure[300:359] == 0.0).all()  # sixty bars that move make a forecast
    alone = guard(np.ones(400), moving, max_loss=0.02, period="1M")
    np.testing.assert_allclose(guarded.whole_cvar[500:], alone.whole_cvar[200:], rtol=0.15)
    tail = account_tail(bars, np.full(700, 3.0), Period.parse("1Q"))
    assert not np.isinf(tail.quantiles).any()


def test_an_asset_that_never_moves_is_as_good_as_cash() -> None:
    both = align_bars({"A": walk(0, 600), "B": still(600)})
    guarded = guard(np.full((600, 2), 0.5), both, max_loss=0.03, period="1M")
    alone = guard(np.full(600, 0.5), walk(0, 600), max_loss=0.03, period="1M")
    np.testing.assert_allclose(guarded.rest_cvar[60:], alone.rest_cvar[60:], rtol=0.1)
    assert guarded.exposure[100:].min() < 1.0


def test_leverage_over_a_long_time_stays_in_the_range_of_numbers() -> None:
    bars = walk(0, 700)
    bars.iloc[300, :4] *= 50.0  # a tick that is wrong
    tail = account_tail(bars, np.full(700, -3.0), Period.parse("1Y"))
    assert np.isfinite(tail.quantiles[100:]).all()
    assert (np.diff(tail.quantiles[100:], axis=1) >= 0.0).all()


def test_a_window_guards_as_the_function_does() -> None:
    bars = garch(0, 900)
    rules = TradingRules(fee=0.002, guard={"max_loss": 0.04, "period": "1M"})
    window = BacktestWindow(bars, rules, (600, 900))
    asked = np.ones((299, 1))
    targets = np.concatenate([np.zeros(600), np.ones(300)])
    expected = guard(targets, bars, max_loss=0.04, period="1M", fee=0.002, first=600).weights[600:899]
    np.testing.assert_array_equal(window.guarded(asked)[:, 0], expected)
    assert BacktestWindow(bars, TradingRules(), (600, 900)).guarded(asked) is not None
    np.testing.assert_array_equal(BacktestWindow(bars, TradingRules(), (600, 900)).guarded(asked), asked)


@pytest.mark.parametrize("wrong", [{"max_loss": 0.0}, {"max_loss": 1.5}, {"level": 0.0}, {"period": "soon"}])
def test_impossible_limits_are_refused(wrong) -> None:
    settings = {"max_loss": 0.05, "period": "1M"} | wrong
    with pytest.raises(ValueError, match=next(iter(wrong))):
        tailguard.guard(np.ones(100), walk(0, 100), **settings)


def falling(seed: int) -> pd.DataFrame:
    """Return a calm market that falls by a tenth overnight, every half a year on average."""
    rng = np.random.default_rng(seed)
    n = 3000
    falls = np.where(rng.random(n) < 1 / 120, -0.1, 0.0)
    return bars_from(np.full(n, 0.006), np.full(n, 1e-3), falls, rng)


def test_losses_that_no_cut_avoids_count_in_the_accounts_own_record(monkeypatch) -> None:
    bars, limit = falling(3), 0.05
    guarded = guard(np.ones(len(bars)), bars, max_loss=limit, period="1M")
    monkeypatch.setattr(guard_module, "RECORD", (1e12, 0.5, 1.0))  # what is predicted counts for any number of periods
    without = guard(np.ones(len(bars)), bars, max_loss=limit, period="1M")
    realised, before = (cvar(monthly(bars, account.weights, 1000)) for account in (guarded, without))
    assert before < -limit
    assert realised > 0.95 * before
    assert (guarded.predicted_cvar[guarded.exposure > 0.0] >= -limit - 1e-12).all()


def test_months_without_a_position_are_no_record() -> None:
    bars = walk(0, 1500)
    idle = np.zeros(1500)
    idle[1000:] = 1.0
    late, alone = (
        guard(idle, bars, max_loss=0.03, period="1M"),
        guard(idle[900:], bars.iloc[900:], max_loss=0.03, period="1M"),
    )
    # Only the forecast knows more where there are more bars; a thousand idle ones are no evidence that losses are small.
    np.testing.assert_allclose(late.exposure[1000:1010], alone.exposure[100:110], rtol=0.1)
