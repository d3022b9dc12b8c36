"""The bootstrap: its draws against the definition, its figures against the plain functions, its intervals against the truth."""

import math

import arch.bootstrap
import numpy as np
import pytest
from scipy.signal import lfilter

from tailguard.evaluate import statistics
from tailguard.evaluate.stats.superiority import _standard_error

METRICS_BY_HAND = {
    "sharpe": lambda r: statistics.sharpe(r, 252),
    "sortino": lambda r: statistics.sortino(r, 252),
    "cagr": lambda r: statistics.cagr(statistics.equity_of(r), 252),
    "volatility": lambda r: statistics.volatility(r, 252),
    "max_drawdown": lambda r: statistics.max_drawdown(statistics.equity_of(r)),
    "calmar": lambda r: statistics.calmar(statistics.equity_of(r), 252),
    "ulcer": lambda r: statistics.ulcer(statistics.equity_of(r)),
    "cvar_1": lambda r: statistics.cvar(r, 0.01),
    "cvar_5": lambda r: statistics.cvar(r, 0.05),
}


@pytest.fixture(scope="module")
def strategies():
    rng = np.random.default_rng(0)
    market = rng.standard_normal(330) * np.repeat([0.005, 0.03, 0.01], 110) + 0.0005  # volatility comes in spells
    lazy = np.where(rng.random(330) < 0.1, market, 0.0)
    return {"hold": market, "half": 0.5 * market, "lazy": lazy, "other": rng.standard_normal(330) * 0.02}


def test_every_metric_of_every_resample_is_that_of_the_plain_function(strategies):
    drawn = statistics.bootstrap(strategies, 252, draws=40, seed=5)
    assert set(METRICS_BY_HAND) == set(statistics.METRICS) == set(drawn.draws)
    assert drawn.block == statistics.return_block_length(strategies)
    assert drawn.risk_block == statistics.risk_block_length(strategies) > drawn.block
    for metric, by_hand in METRICS_BY_HAND.items():
        block = drawn.block if metric in ("sharpe", "sortino", "cagr") else drawn.risk_block
        bars = statistics.stationary_indices(330, 40, block, seed=5)
        for column, returns in enumerate(strategies.values()):
            expected = [by_hand(returns[resample]) for resample in bars]
            np.testing.assert_allclose(drawn.draws[metric][:, column], expected, rtol=1e-9, atol=1e-13, err_msg=metric)
            assert drawn.estimates[metric][column] == by_hand(returns)


def test_every_metric_of_every_resample_is_in_excess_of_the_riskless_series(strategies):
    """Ratios, volatility and block lengths are of excess returns; growth, drawdowns and CVaR are of the account itself."""
    riskless = np.where(np.arange(330) % 5 == 0, 3e-4, 1e-4)  # more over weekends
    by_hand = METRICS_BY_HAND | {
        "sharpe": lambda r, cash: statistics.sharpe(r - cash, 252),
        "sortino": lambda r, cash: statistics.sortino(r - cash, 252),
        "volatility": lambda r, cash: statistics.volatility(r - cash, 252),
        "calmar": lambda r, cash: statistics.calmar(statistics.equity_of(r), 252, cash),
    }
    of_excess = {"sharpe", "sortino", "volatility", "calmar"}
    drawn = statistics.bootstrap(strategies, 252, riskless=riskless, draws=20, seed=5)
    excess = {name: returns - riskless for name, returns in strategies.items()}
    assert (drawn.block, drawn.risk_block) == (statistics.return_block_length(excess), statistics.risk_block_length(excess))
    for metric, function in by_hand.items():
        block = drawn.block if metric in ("sharpe", "sortino", "cagr") else drawn.risk_block
        for column, returns in enumerate(strategies.values()):
            bars = [np.arange(330), *statistics.stationary_indices(330, 20, block, seed=5)]
            arguments = [(returns[rows], riskless[rows]) if metric in of_excess else (returns[rows],) for rows in bars]
            expected = [function(*each) for each in arguments]
            found = [drawn.estimates[metric][column], *drawn.draws[metric][:, column]]
            np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-13, err_msg=metric)


def test_an_account_in_cash_has_ratios_of_zero_in_every_resample(strategies):
    """Its returns are the riskless ones up to rounding, as a ratio of two equities leaves them."""
    riskless = np.where(np.arange(330) % 5 == 0, 3e-4, 1e-4)
    equity = statistics.equity_of(riskless)
    cash = equity[1:] / equity[:-1] - 1.0
    drawn = statistics.bootstrap({"cash": cash, **strategies}, 8766, riskless=riskless, draws=50)
    for metric in ("sharpe", "sortino", "volatility", "calmar"):
        assert drawn.estimates[metric][0] == 0.0
        assert (drawn.draws[metric][:, 0] == 0.0).all()
    assert drawn.difference("sharpe", "hold", "cash").estimate == drawn.estimates["sharpe"][1]


def test_intervals_and_differences_are_percentiles_of_the_draws(strategies):
    drawn = statistics.bootstrap(strategies, 252, draws=999, block=4.0, seed=6)
    assert drawn.block == drawn.risk_block == 4.0
    one = drawn.interval("cvar_5", "other", level=0.9)
    ordered = np.sort(drawn.draws["cvar_5"][:, 3])
    assert (one.low, one.high) == (ordered[49], ordered[949])  # the 50th and the 950th of 999
    pair = drawn.difference("sharpe", "hold", "other")
    paired = drawn.draws["sharpe"][:, 0] - drawn.draws["sharpe"][:, 3]
    assert pair.estimate == pytest.approx(
        statistics.sharpe(strategies["hold"], 252) - statistics.sharpe(strategies["other"], 252)
    )
    assert pair.error == pytest.approx(paired.std(ddof=1))
    assert pair.p_higher == pytest.approx((1 + (paired >= 2 * pair.estimate).sum()) / 1000)
    assert pair.p_lower == pytest.approx((1 + (paired <= 2 * pair.estimate).sum()) / 1000)
    assert pair.low < pair.estimate < pair.high


def test_a_strategy_and_its_half_have_one_sharpe_ratio_in_every_resample(strategies):
    pair = statistics.bootstrap(strategies, 252, draws=100).difference("sharpe", "half", "hold")
    assert max(abs(pair.low), abs(pair.high)) < 1e-12
    assert pair.p_higher > 0.9 or pair.p_lower > 0.9


def test_the_same_seed_gives_the_same_resamples_and_another_does_not(strategies):
    one, two, three = (statistics.bootstrap(strategies, 252, draws=50, seed=seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(one.draws["ulcer"], two.draws["ulcer"])
    assert not np.allclose(one.draws["ulcer"], three.draws["ulcer"])


@pytest.mark.parametrize("block", [1.0, 3.5, 40.0])
def test_blocks_are_geometric_start_anywhere_and_wrap_around(block):
    n, draws = 200, 3000
    bars = statistics.stationary_indices(n, draws, block, seed=7)
    assert bars.min() == 0
    assert bars.max() == n - 1
    follows = bars[:, 1:] == (bars[:, :-1] + 1) % n
    expected = 1.0 - (1.0 - 1.0 / n) / block  # a new block may start by chance where the old one would have gone on
    assert follows.mean() == pytest.approx(expected, abs=4.0 * math.sqrt(expected * (1 - expected) / follows.size) + 1e-12)
    # Runs without a break are geometric: P(at least 3 more bars) = (1 - 1/block)^3, up to the 1/n above.
    assert (follows[:, :-2] & follows[:, 1:-1] & follows[:, 2:]).mean() == pytest.approx(expected**3, abs=0.01)
    counts = np.bincount(bars.ravel(), minlength=n)  # every bar is equally likely, with a variance that grows with the block
    assert np.abs(counts / draws - 1.0).max() < 5.0 * math.sqrt(2.0 * block / draws)


def test_resampled_means_have_the_variance_that_arch_and_the_closed_form_say():
    rng = np.random.default_rng(8)
    series = np.convolve(rng.standard_normal(420), np.ones(20) / 20, mode="valid")[:400]
    error = _standard_error(series, 10.0)
    ours = series[statistics.stationary_indices(400, 20_000, 10.0)].mean(axis=1).std()
    theirs = arch.bootstrap.StationaryBootstrap(10, series, seed=9).apply(np.mean, reps=4000).std()
    assert ours == pytest.approx(error, rel=0.02)
    assert theirs == pytest.approx(error, rel=0.05)


def coverage(block, rho, seed, n=500, runs=250):
    """Return how often the 95 % interval holds the true Sharpe ratio per bar of 0.05 of AR(1) returns."""
    rng, held = np.random.default_rng(seed), 0
    for _ in range(runs):
        shocks = lfilter([math.sqrt(1.0 - rho**2)], [1.0, -rho], rng.standard_normal(n + 100))[100:]
        interval = statistics.bootstrap({"a": 0.01 * (shocks + 0.05)}, 1.0, draws=400, block=block, seed=1).interval(
            "sharpe", "a"
        )
        held += interval.low <= 0.05 <= interval.high
    return held / runs


def test_intervals_hold_the_truth_as_often_as_they_say():
    assert 0.91 <= coverage(None, 0.0, seed=10) <= 0.985


def test_blocks_are_needed_where_returns_trend():
    """AR(1) 0.4: independent draws take sqrt(1.4 / 0.6) = 1.53 times too narrow intervals, which hold in 80 %."""
    alone, blocks = coverage(1.0, 0.4, seed=11), coverage(None, 0.4, seed=11)
    assert alone < 0.86
    assert blocks > 0.89


def garch(n, seed):
    rng = np.random.default_rng(seed)
    variance, series = 1.0, np.empty(n + 300)
    for t, shock in enumerate(rng.standard_normal(n + 300)):
        series[t] = math.sqrt(variance) * shock
        variance = 0.05 + 0.15 * series[t] ** 2 + 0.80 * variance
    return 0.01 * series[300:]


def test_clusters_of_volatility_need_the_blocks_of_risk():
    truth, held = statistics.cvar(garch(400_000, seed=12), 0.05), {"return": 0, "risk": 0}
    for seed in range(120):
        series = {"a": garch(1500, seed=(13, seed))}
        for kind, block in (("return", statistics.return_block_length(series)), ("risk", statistics.risk_block_length(series))):
            interval = statistics.bootstrap(series, 252, draws=300, block=block).interval("cvar_5", "a")
            held[kind] += interval.low <= truth <= interval.high
    assert held["risk"] / 120 > held["return"] / 120 + 0.1
    assert held["risk"] / 120 > 0.75


def test_equity_bands_are_percentiles_of_resampled_equity():
    returns = np.random.default_rng(14).standard_normal(60) * 0.01 + 0.001
    at, band = statistics.equity_bands(returns, (0.1, 0.9), points=7, draws=500, block=3.0, seed=15)
    np.testing.assert_array_equal(at, [0, 10, 20, 30, 40, 50, 60])
    bars = statistics.stationary_indices(60, 500, 3.0, seed=15)
    equity = np.concatenate([np.ones((500, 1)), np.cumprod(1.0 + returns[bars], axis=1)], axis=1)
    expected = np.exp(np.quantile(np.log(equity[:, at]), (0.1, 0.9), axis=0))
    np.testing.assert_allclose(band, expected, rtol=1e-12)
    at, band = statistics.equity_bands(returns)
    assert (len(at), band.shape) == (61, (3, 61))
    np.testing.assert_array_equal(band[:, 0], 1.0)


def test_an_account_that_never_moves_has_figures_of_0_and_riskless_gains_cannot_be_compared():
    series = {"idle": np.zeros(50), "cash": np.full(50, 0.0001), "market": np.random.default_rng(16).standard_normal(50) * 0.01}
    drawn = statistics.bootstrap(series, 252, draws=50)
    for metric in statistics.METRICS:
        assert (drawn.draws[metric][:, 0] == 0.0).all()
        assert drawn.difference(metric, "idle", "idle").p_higher == 1.0
    assert drawn.interval("sharpe", "cash").low == math.inf
    assert drawn.difference("sharpe", "cash", "cash").estimate == 0.0
    with pytest.raises(ValueError, match="the difference of sharpe is -inf"):
        drawn.difference("sharpe", "market", "cash")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: statistics.bootstrap({}, 252), "returns is {}"),
        (lambda: statistics.bootstrap({"a": np.zeros(7)}, 252), r"returns\['a'\] is \(7,\)"),
        (lambda: statistics.bootstrap({"a": np.zeros(9), "b": np.zeros(8)}, 252), "the lengths of returns"),
        (lambda: statistics.bootstrap({"a": [math.nan] * 8}, 252), r"returns\['a'\]\[0\] is nan"),
        (lambda: statistics.bootstrap({"a": [-1.0] * 8}, 252), "the lowest of returns is -1.0"),
        (lambda: statistics.bootstrap({"a": np.zeros(8)}, 0), "periods is 0"),
        (lambda: statistics.bootstrap({"a": np.zeros(8)}, 252, draws=1), "draws is 1"),
        (lambda: statistics.bootstrap({"a": np.zeros(8)}, 252, block=0.5), "block is 0.5"),
        (lambda: statistics.bootstrap({"a": np.zeros(8)}, 252, block=9), "block is 9"),
        (lambda: statistics.bootstrap({"a": np.zeros(8)}, 252).interval("alpha", "a"), "metric is 'alpha'"),
        (lambda: statistics.bootstrap({"a": np.zeros(8)}, 252).interval("sharpe", "b"), "the strategy is 'b'"),
        (lambda: statistics.bootstrap({"a": np.zeros(8)}, 252).interval("sharpe", "a", 1.0), "level is 1.0"),
        (lambda: statistics.equity_bands(np.zeros(8), (0.0,)), "levels is"),
        (lambda: statistics.equity_bands(np.zeros(8), points=1), "points is 1"),
        (lambda: statistics.stationary_indices(0, 2, 1.0), "n is 0"),
    ],
)
def test_what_cannot_be_resampled_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
