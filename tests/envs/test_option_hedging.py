"""Option hedging against closed forms, parity, simulation, a tree solved by brute force, and the limit of many dates."""

import itertools
import math
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.error import ResetNeeded
from gymnasium.utils.env_checker import check_env
from scipy.integrate import quad
from scipy.stats import norm
from stable_baselines3.common.env_checker import check_env as check_env_sb3

from tailguard.envs import BandHedging, BlockBootstrap, GeometricBrownianMotion, Heston, Option, OptionHedging
from tailguard.envs.hedging_rivals import (
    HedgingResult,
    band_width,
    delta_hedge,
    expected_shortfall,
    leland,
    no_hedge,
    play_hedge,
    tune_whalley_wilmott,
    whalley_wilmott,
)
from tailguard.envs.heston import calibrate_heston, heston_price

TREE = GeometricBrownianMotion(shocks="trinomial")
RETURNS = np.random.default_rng(0).standard_t(5, 500) * 0.01
BOOK = (Option("call", 95.0, -2.0), Option("put", 90.0, 1.0, expiry=3), Option("put", 105.0, -1.0, knock_out=85.0))
CASES = {
    "gbm": {},
    "costs": {"cost": 0.01, "fixed_cost": 0.02, "rate": 0.05},
    "tree": {"process": TREE},
    "heston": {"process": Heston()},
    "bootstrap": {"process": BlockBootstrap(RETURNS)},
    "book": {"book": BOOK, "process": Heston(), "rate": 0.03, "cost": 0.002},
}
every_case = pytest.mark.parametrize("settings", CASES.values(), ids=CASES)


def lognormal_price(payoff: Any, spot: float, years: float, sigma: float, rate: float) -> float:
    """Return the discounted expectation of a payoff by quadrature, independently of any option formula."""
    spread = sigma * math.sqrt(years)

    def integrand(z: float) -> float:
        return payoff(spot * math.exp((rate - sigma**2 / 2.0) * years + spread * z)) * norm.pdf(z)

    return math.exp(-rate * years) * sum(quad(integrand, a, a + 0.5, epsabs=1e-12)[0] for a in np.arange(-9.0, 9.0, 0.5))


def mean_within(values: np.ndarray, truth: float, errors: float = 4.0) -> None:
    assert values.mean() == pytest.approx(truth, abs=errors * values.std() / math.sqrt(len(values)))


# ------------------------------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize("kind", ["call", "put"])
@pytest.mark.parametrize(("spot", "strike", "years", "sigma", "rate"), [(100, 100, 0.25, 0.2, 0.0), (80, 95, 1.5, 0.4, 0.06)])
def test_black_scholes_value_delta_and_gamma(kind, spot, strike, years, sigma, rate):
    def price(at: float) -> float:
        sign = 1.0 if kind == "call" else -1.0
        return lognormal_price(lambda s: max(sign * (s - strike), 0.0), at, years, sigma, rate)

    env = OptionHedging(
        book=[Option(kind, strike, 1.0)], process=GeometricBrownianMotion(sigma), spot=spot, maturity=years, rate=rate
    )
    env.reset(seed=0)
    value, delta, gamma = (float(greek[0]) for greek in env.greeks(env.state))
    assert value == env.premium == pytest.approx(price(spot), abs=1e-5)
    h = 0.01 * spot
    up, mid, down = price(spot + h), price(spot), price(spot - h)
    assert delta == pytest.approx((up - down) / (2.0 * h), abs=1e-3)
    assert gamma == pytest.approx((up - 2.0 * mid + down) / h**2, rel=2e-2)
    assert env.state.hedge[0] == -delta


@pytest.mark.parametrize("process", [GeometricBrownianMotion(0.3), Heston()])
def test_put_call_parity_and_spreads_are_sums_of_legs(process):
    settings = {"process": process, "maturity": 0.5, "rate": 0.04, "spot": 103.0}
    call, put, both = (
        OptionHedging(book=book, **settings).premium
        for book in ([Option("call", 98.0, 1.0)], [Option("put", 98.0, 1.0)], [Option("call", 98.0, 2.0), Option("put", 98.0)])
    )
    assert call - put == pytest.approx(103.0 - 98.0 * math.exp(-0.02), abs=1e-9)
    assert both == pytest.approx(2.0 * call - put)


@pytest.mark.parametrize("process", [Heston(), Heston(0.09, 0.03, 1.0, 0.9, -0.3), Heston(0.02, 0.05, 3.0, 0.3, 0.5)])
def test_heston_prices_are_the_means_of_the_environments_payoffs(process):
    for book in ([Option("call", 100.0)], [Option("put", 92.0)], [Option("call", 112.0)]):
        env = OptionHedging(30_000, book=book, process=process, maturity=0.5, dates=12, rate=0.03)
        # Hedged with the delta the mean stays the same and the noise becomes small.
        mean_within(play_hedge(env, delta_hedge, seed=1).pnl, 0.0)


def test_heston_without_volatility_of_variance_is_black_scholes():
    calm = Heston(0.04, 0.04, 2.0, 1e-4, 0.0)
    flat = OptionHedging(book=[Option("call", 107.0, 1.0)], maturity=0.5)
    assert heston_price("call", 100.0, 107.0, 0.5, calm) == pytest.approx(flat.premium, abs=1e-5)


def test_a_calibration_finds_the_process_that_made_the_returns():
    made = Heston(0.04, 0.04, 4.0, 0.8, -0.6)
    spots = spots_of(1, 0, process=made, dates=30_000, maturity=30_000 / 252.0)
    found = calibrate_heston(np.diff(np.log(np.ravel(spots))), 1.0 / 252.0)
    assert found.long_run_variance == pytest.approx(0.04, rel=0.1)
    assert found.mean_reversion == pytest.approx(4.0, rel=0.4)
    assert found.vol_of_variance == pytest.approx(0.8, rel=0.25)
    assert found.correlation == pytest.approx(-0.6, abs=0.15)
    with pytest.raises(ValueError, match="returns"):
        calibrate_heston(RETURNS[:50], 1.0 / 252.0)


def test_a_calibrated_correlation_is_right_on_average():
    """The mean of a log return falls with half the variance, which by itself looks like a correlation of -0.1 here."""
    spots = spots_of(30, 5, process=Heston(0.04, 0.04, 2.0, 0.8, 0.3), dates=20_000, maturity=20_000 / 252.0)
    moves = np.diff(np.log(np.array(spots)), axis=0)
    found = [calibrate_heston(path, 1.0 / 252.0).correlation for path in moves.T]
    assert np.mean(found) == pytest.approx(0.3, abs=0.06)


@pytest.mark.parametrize(
    ("kind", "strike", "level"),
    [*itertools.product(["call", "put"], [97.0, 104.0], [92.0, 112.0]), ("call", 90.0, 94.0), ("put", 112.0, 108.0)],
)
def test_knock_outs_are_worth_their_mean_payoff(kind, strike, level):
    option = Option(kind, strike, -1.0, knock_out=level)
    env = OptionHedging(20_000, book=[option], dates=25, maturity=0.25, rate=0.05)
    mean_within(play_hedge(env, no_hedge, seed=2).pnl, 0.0, errors=4.5)
    plain = OptionHedging(book=[Option(kind, strike, -1.0)], dates=25, maturity=0.25, rate=0.05)
    far = OptionHedging(
        book=[Option(kind, strike, -1.0, knock_out=1.0 if level < 100.0 else 1e4)], dates=25, maturity=0.25, rate=0.05
    )
    assert far.premium == pytest.approx(plain.premium, rel=1e-9)


@pytest.mark.parametrize(("level", "dates"), [(97.0, 5), (99.0, 21), (95.0, 21)])
def test_a_barrier_near_the_spot_is_sold_at_what_hedging_it_costs(level, dates):
    """The continuous barrier's formula with a shift is off by up to a fifth here. The delta hedge takes most of the noise."""
    env = OptionHedging(200_000, book=[Option("put", 100.0, -1.0, knock_out=level)], dates=dates)
    mean_within(play_hedge(env, delta_hedge, seed=3).pnl, 0.0)


@pytest.mark.parametrize(("level", "kind"), [(95.0, "call"), (107.0, "put")])
def test_a_barrier_on_one_date_is_an_integral(level, kind):
    sign = 1.0 if kind == "call" else -1.0

    def payoff(spot: float) -> float:
        return max(sign * (spot - 101.0), 0.0) * ((spot > level) == (level < 100.0))

    env = OptionHedging(book=[Option(kind, 101.0, 1.0, knock_out=level)], dates=1, maturity=0.25, rate=0.03)
    assert env.premium == pytest.approx(lognormal_price(payoff, 100.0, 0.25, 0.2, 0.03), rel=1e-6)


# --------------------------------------------------------------------------------------------------------- rewards and paths


@every_case
def test_rewards_add_up_to_the_final_profit_and_loss(settings):
    """The account is kept here once more, in plain money: cash earns the rate, and payoffs are paid when they are due."""
    env = OptionHedging(40, dates=7, **settings)
    env.reset(seed=3)
    draws, step, rate = np.random.default_rng(0), env.maturity / env.dates, env.rate
    spots = spots_of(40, 3, dates=7, **settings)
    cash, held, total, void = np.full(40, -env.premium), np.zeros(40), np.zeros(40), np.zeros((40, len(env.book)), bool)
    for date in range(env.dates + 1):
        spot, last = spots[date], date == env.dates
        for k, leg in enumerate(env.book):
            if leg.knock_out is not None:
                void[:, k] |= (spot <= leg.knock_out) == (leg.knock_out < env.spot)
            if date == (leg.expiry or env.dates):
                payoff = np.maximum((spot - leg.strike) * (1.0 if leg.kind == "call" else -1.0), 0.0)
                cash += leg.quantity * np.where(void[:, k], 0.0, payoff)
        target = np.zeros(40) if last else draws.uniform(-1.0, 1.0, 40).astype(np.float32).astype(float)
        cash -= (target - held) * spot + env.cost * abs(target - held) * spot + env.fixed_cost * (target != held)
        held = target
        if not last:
            np.testing.assert_allclose(env.state.spot, spot, rtol=1e-12)
            total += env.step(target[:, None] / env.limit)[1]
            cash *= math.exp(rate * step)
    np.testing.assert_allclose(total, cash * math.exp(-rate * env.maturity), atol=1e-9)


def spots_of(n: int, seed: int, **settings: Any) -> list[np.ndarray]:
    """Return the prices of all paths at all dates, from what one unit earns without costs."""
    settings = {**settings, "cost": 0.0, "fixed_cost": 0.0, "limit": 1.0}
    flat, long = OptionHedging(n, **settings), OptionHedging(n, **settings)
    flat.reset(seed=seed)
    long.reset(seed=seed)
    discounts = np.exp(-flat.rate * flat.maturity / flat.dates * np.arange(flat.dates + 1))
    spots = [flat.state.spot]
    for now, then in itertools.pairwise(discounts):
        gains = long.step(np.ones((n, 1)))[1] - flat.step(np.zeros((n, 1)))[1]
        spots.append((gains + now * spots[-1]) / then)
    return spots


@every_case
def test_the_price_grows_by_the_drift_and_no_strategy_earns_without_costs(settings):
    settings = {**settings, "cost": 0.0, "fixed_cost": 0.0}
    env = OptionHedging(40_000, dates=5, **settings)
    held = play_hedge(env, lambda state: 0.7 * np.ones_like(state.spot), seed=4).pnl - play_hedge(env, no_hedge, seed=4).pnl
    mean_within(held, 0.0)


def test_the_tree_has_the_moments_of_the_normal():
    moves = np.log(spots_of(100_000, 0, process=TREE, dates=1)[1] / 100.0)
    values, counts = np.unique(moves.round(9), return_counts=True)
    assert len(values) == 3
    np.testing.assert_allclose(counts / 100_000, [1 / 6, 2 / 3, 1 / 6], atol=0.006)
    np.testing.assert_allclose(np.diff(values), math.sqrt(3.0) * 0.2 * math.sqrt(1.0 / 12.0), atol=1e-8)


def test_a_bootstrapped_path_keeps_the_order_inside_its_blocks():
    returns = 0.001 * np.arange(1, 101)
    spots = spots_of(200, 0, process=BlockBootstrap(returns, mean_block=10.0), dates=60)
    moves = np.diff(np.log(spots), axis=0)
    steps = np.round((np.diff(moves, axis=0)) / 0.001).astype(int) % 100
    assert (steps == 1).mean() == pytest.approx(0.9, abs=0.02)


# ------------------------------------------------------------------------------------------------------------- the interface


@every_case
@pytest.mark.parametrize("name", ["tailguard/OptionHedging-v0", "tailguard/BandHedging-v0"])
def test_the_single_environment_passes_the_checks_of_gymnasium_and_sb3(name, settings):
    single = gymnasium.make(name, dates=4, **settings).unwrapped
    check_env(single, skip_render_check=True)
    check_env_sb3(single)


@every_case
@pytest.mark.parametrize("kind", [OptionHedging, BandHedging])
def test_a_copy_in_a_batch_equals_a_single_environment(kind, settings):
    batch = kind(5, dates=4, **settings)
    singles = [kind(1, dates=4, **settings) for _ in range(5)]
    shown = [batch.reset(seed=11)[0], *(env.reset(seed=11 + i)[0] for i, env in enumerate(singles))]
    batch.action_space.seed(0)
    for _ in range(11):
        np.testing.assert_array_equal(shown[0], np.concatenate(shown[1:]))
        actions = batch.action_space.sample()
        steps = [batch.step(actions), *(env.step(actions[i : i + 1]) for i, env in enumerate(singles))]
        shown = [step[0] for step in steps]
        for part in (1, 2):
            np.testing.assert_array_equal(steps[0][part], np.concatenate([step[part] for step in steps[1:]]))


@pytest.mark.parametrize("name", ["tailguard/OptionHedging-v0", "tailguard/BandHedging-v0"])
def test_the_gymnasium_id_makes_batches_and_single_environments_alike(name):
    batch = gymnasium.make_vec(name, num_envs=3, vectorization_mode="vector_entry_point", cost=0.01)
    single = gymnasium.make(name, cost=0.01)
    obs, first = batch.reset(seed=5)[0], single.reset(seed=5)[0]
    for _ in range(30):
        np.testing.assert_array_equal(obs[0], first)
        action = batch.action_space.sample()
        obs, rewards, ended, _, _ = batch.step(action)
        first, reward, over, _, _ = single.step(action[0])
        assert (reward, over) == (rewards[0], ended[0])
        first = single.reset()[0] if over else first
    with pytest.raises(ResetNeeded):
        gymnasium.make("tailguard/OptionHedging-v0").unwrapped.step(action[0])


@every_case
def test_a_saved_state_is_resumed_exactly(settings):
    env, other = (BandHedging(6, dates=5, seed=seed, **settings) for seed in (0, 1))
    env.reset()
    other.reset()
    actions = np.random.default_rng(0).uniform(-1.0, 1.0, (9, 6, 2))
    for action in actions[:3]:
        env.step(action)
    other.load_state_dict(env.state_dict())
    for action in actions:
        for one, two in zip(env.step(action)[:4], other.step(action)[:4], strict=True):
            np.testing.assert_array_equal(one, two)


def test_the_edges_of_a_band_are_traded_to_and_its_inside_is_not():
    env = BandHedging(4, reach=1.0, dates=9, cost=0.01)
    env.reset(seed=0)
    hedge = env.state.hedge[0]
    env.step(env.action([[-0.1, 0.1], [0.2, 0.3], [-1.0, 1.0], [0.15, -0.05]]))
    np.testing.assert_allclose(env.state.holding, [hedge - 0.1, hedge + 0.2, 0.0, hedge + 0.05], atol=1e-7)
    held = env.state.holding
    env.step(np.array([[-1.0, 1.0]] * 4))
    np.testing.assert_array_equal(env.state.holding, held)


@pytest.mark.parametrize(("strike", "slope"), [(100.0, 1.0), (90.0, 0.18916), (111.11111, 0.18916), (50.0, 0.05)])
def test_small_actions_are_finer_the_farther_the_strike_is(strike, slope):
    env = BandHedging(2, book=(Option("put", strike, -2.0),))
    tiny = 1e-4
    assert tiny / env.action([[0.0, 2.0 * tiny]])[0, 1] == pytest.approx(slope, rel=1e-3)
    assert env.action([[-2.0, 2.0]])[0] == pytest.approx([-1.0, 1.0])


@pytest.mark.parametrize("strike", [100.0, 90.0])
def test_a_literature_band_is_a_policy_of_the_band_environment(strike):
    settings = {"dates": 6, "cost": 0.01, "book": (Option("call", strike, -3.0),)}
    env, plain = BandHedging(500, **settings), OptionHedging(500, **settings)
    rival = play_hedge(plain, whalley_wilmott(plain, 1.0), seed=0)
    env.reset(seed=0)
    pnl = np.zeros(500)
    for _ in range(6):
        width = band_width(env, env.state, 1.0)
        pnl += env.step(env.action(np.stack((-width, width), axis=1)))[1]
    np.testing.assert_allclose(pnl, rival.pnl, atol=1e-9)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("strike", {"book": [{"strike": 0.0}]}),
        ("kind", {"book": [{"kind": "digital"}]}),
        ("quantity", {"book": [{"quantity": 0.0}]}),
        ("expiry", {"book": [{"expiry": 22}]}),
        ("knock_out", {"book": [{"knock_out": 100.0}]}),
        ("dates", {"dates": 0}),
        ("cost", {"cost": -0.1}),
        ("maturity", {"maturity": math.nan}),
        ("limit", {"limit": 0.0}),
        ("premium", {"premium": math.inf}),
    ],
)
def test_impossible_settings_are_refused(name, settings):
    with pytest.raises(ValueError, match=name):
        OptionHedging(**{**settings, "book": [Option(**leg) for leg in settings.get("book", [{}])]})


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("volatility", lambda: GeometricBrownianMotion(0.0)),
        ("correlation", lambda: Heston(correlation=-1.0)),
        ("vol_of_variance", lambda: Heston(vol_of_variance=-0.1)),
        ("returns", lambda: BlockBootstrap([0.1] * 5)),
        ("mean_block", lambda: BlockBootstrap(RETURNS, mean_block=0.5)),
        ("reach", lambda: BandHedging(reach=0.0)),
        ("process", lambda: OptionHedging().solve("cvar")),
        ("book", lambda: OptionHedging(process=TREE, book=[Option(knock_out=90.0)]).solve("cvar")),
        ("criterion", lambda: OptionHedging(process=TREE).solve("mean")),
    ],
)
def test_impossible_processes_and_questions_are_refused(name, make):
    with pytest.raises(ValueError, match=name):
        make()


# --------------------------------------------------------------------------------------------------------------------- rivals


def test_the_hedge_error_of_the_delta_shrinks_with_the_root_of_the_dates():
    """Its standard deviation is sqrt(pi / 4 / dates) times vega times sigma at the money (Kamal and Derman 1999)."""
    errors = [play_hedge(OptionHedging(20_000, dates=n), delta_hedge, seed=0).pnl.std() for n in (16, 64, 256)]
    vega_sigma = 100.0 * math.sqrt(1.0 / 12.0) * norm.pdf(0.0) * 0.2
    for n, error in zip((16, 64, 256), errors, strict=True):
        assert error == pytest.approx(math.sqrt(math.pi / 4.0 / n) * vega_sigma, rel=0.06)


def test_leland_hedges_with_his_variance():
    env = OptionHedging(2, cost=0.005, dates=10, maturity=0.25)
    env.reset(seed=0)
    sigma = 0.2 * math.sqrt(1.0 + math.sqrt(8.0 / math.pi) * 0.005 / (0.2 * math.sqrt(0.025)))
    expected = OptionHedging(process=GeometricBrownianMotion(sigma), dates=10, maturity=0.25)
    expected.reset(seed=0)
    assert leland(env)(env.state)[0] == pytest.approx(expected.state.hedge[0], abs=1e-12)
    bought = OptionHedging(book=[Option(quantity=1.0)], cost=0.005, dates=10, maturity=0.25)
    bought.reset(seed=0)
    lower = 0.2 * math.sqrt(1.0 - math.sqrt(8.0 / math.pi) * 0.005 / (0.2 * math.sqrt(0.025)))
    d1 = 0.5 * lower * math.sqrt(0.25)
    assert leland(bought)(bought.state)[0] == pytest.approx(-norm.cdf(d1), abs=1e-12)


def test_lelands_premium_pays_for_the_expected_costs():
    """With his volatility, the premium of the enlarged variance covers option and costs on average, up to the last trades."""
    env = OptionHedging(40_000, cost=0.002, dates=100, maturity=0.5, final_cost=False)
    sigma = 0.2 * math.sqrt(1.0 + math.sqrt(8.0 / math.pi) * 0.002 / (0.2 * math.sqrt(0.005)))
    dearer = OptionHedging(process=GeometricBrownianMotion(sigma), maturity=0.5, dates=100).premium
    result = play_hedge(env, leland(env), seed=1)
    first = 0.002 * 100.0 * leland(env)(env.state)[0]  # he does not count the purchase of the first hedge
    assert result.costs.mean() - first == pytest.approx(env.premium - dearer, rel=0.06)


def test_the_width_of_the_band_and_its_limits():
    env = OptionHedging(3, cost=0.004, rate=0.05, maturity=0.5, dates=10)
    env.reset(seed=0)
    for _ in range(4):
        env.step(env.state.hedge[:, None])
    state = env.state
    left = 0.5 * 0.6
    gamma = norm.pdf((np.log(state.spot / 100.0) + (0.05 + 0.02) * left) / (0.2 * math.sqrt(left)))
    gamma /= state.spot * 0.2 * math.sqrt(left)
    expected = (1.5 * math.exp(-0.05 * left) * 0.004 * state.spot * gamma**2 / 0.7) ** (1.0 / 3.0)
    np.testing.assert_allclose(band_width(env, state, 0.7), expected, rtol=1e-9)
    paths = OptionHedging(500, cost=0.004, dates=10)
    delta, narrow = play_hedge(paths, delta_hedge, 1), play_hedge(paths, whalley_wilmott(paths, 1e15), 1)
    np.testing.assert_allclose(narrow.pnl, delta.pnl, atol=1e-3)
    _, tuned = tune_whalley_wilmott(paths, 0.05, 1)
    assert tuned.cvar() <= min(delta.cvar(), narrow.cvar()) + 1e-9


def test_expected_shortfall_counts_a_part_of_the_last_path():
    pnl = np.array([3.0, -4.0, 1.0, -2.0, 0.0])
    assert expected_shortfall(pnl, 0.2) == 4.0
    assert expected_shortfall(pnl, 0.3) == pytest.approx((4.0 + 0.5 * 2.0) / 1.5)
    assert expected_shortfall(pnl, 1.0) == pytest.approx(-pnl.mean())
    assert HedgingResult(pnl, pnl, pnl).cvar(0.4) == 3.0


# ------------------------------------------------------------------------------------------------------------------- optimum


def brute_force(env: OptionHedging, holdings: np.ndarray, criterion: str, alpha: float) -> float:
    """Return the best objective over all policies on two dates: a first holding, and one for each of the three nodes."""
    spread = 0.2 * math.sqrt(env.maturity / 2.0) * math.sqrt(3.0)
    growth = -math.log((2.0 + math.cosh(spread)) / 3.0)
    moves, odds = np.exp(growth + spread * np.array([-1.0, 0.0, 1.0])), np.array([1.0, 4.0, 1.0]) / 6.0
    first = 100.0 * moves
    last = first[:, None] * moves
    weights = (odds[:, None] * odds).ravel()
    best = math.inf
    for start, *later in itertools.product(holdings, repeat=4):
        held = np.array(later)
        pnl = (
            -env.premium
            - np.maximum(last - 100.0, 0.0)
            + start * (first - 100.0)[:, None]
            + held[:, None] * (last - first[:, None])
        )
        pnl = pnl - env.cost * (start * 100.0 + (abs(held - start) * first)[:, None] + held[:, None] * last)
        order = np.argsort(pnl.ravel())
        values, mass = pnl.ravel()[order], weights[order]
        tail = np.clip(alpha - (np.cumsum(mass) - mass), 0.0, mass)
        best = min(best, -float(tail @ values) / alpha if criterion == "cvar" else float(mass @ values**2))
    return best


@pytest.mark.parametrize("criterion", ["quadratic", "cvar"])
def test_the_optimum_on_a_tree_is_that_of_all_policies(criterion):
    env = OptionHedging(process=TREE, dates=2, cost=0.004)
    best = brute_force(env, np.linspace(0.0, 1.0, 9), criterion, 0.1)
    found = env.solve(criterion, 0.1, n_holdings=9, n_wealth=6001)
    assert found.objective == pytest.approx(best, rel=2e-3)
    assert found.objective >= best - 1e-9


@pytest.mark.parametrize("settings", [{}, {"cost": 0.005}, {"cost": 0.01, "fixed_cost": 0.05, "rate": 0.03}])
def test_the_optimum_is_reached_by_playing_it_and_by_no_rival(settings):
    env = OptionHedging(20_000, process=TREE, dates=5, **settings)
    best = env.solve("cvar", 0.1, n_holdings=31, n_wealth=401)
    played = play_hedge(env, best.hedge, seed=1)
    assert played.cvar(0.1) == pytest.approx(best.objective, rel=0.03)
    assert best.target == pytest.approx(np.quantile(played.pnl, 0.1), abs=0.1)
    rivals = [delta_hedge, leland(env), whalley_wilmott(env, 1.0), whalley_wilmott(env, 10.0)]
    assert played.cvar(0.1) < 0.95 * min(play_hedge(env, hedge, seed=1).cvar(0.1) for hedge in rivals)
    square = env.solve("quadratic", n_holdings=31, n_wealth=401)
    assert (play_hedge(env, square.hedge, seed=1).pnl ** 2).mean() == pytest.approx(square.objective, rel=0.02)
    assert square.objective < min((play_hedge(env, hedge, seed=1).pnl ** 2).mean() for hedge in rivals)


def rivals_of(env: OptionHedging) -> list[HedgingResult]:
    hedges = [no_hedge, delta_hedge, leland(env), *(whalley_wilmott(env, aversion) for aversion in (1.0, 10.0, 100.0))]
    return [play_hedge(env, hedge, seed=1) for hedge in hedges]


@pytest.mark.parametrize("strike", [80.0, 92.0, 108.0, 112.0])
def test_the_optimum_of_any_strike_is_reached_by_playing_it_and_by_no_rival(strike):
    """In the money the premium is mostly intrinsic value, out of it next to nothing: neither is the size of the hedge error."""
    env = OptionHedging(80_000, process=TREE, dates=5, cost=0.005, book=[Option("call", strike)])
    rivals = rivals_of(env)
    best = env.solve("cvar", n_holdings=31)
    played = play_hedge(env, best.hedge, seed=1).cvar()
    assert best.objective == pytest.approx(played, rel=0.03)
    # Far in the money there is nothing to do but hold a unit, as every rival does.
    assert played <= min(result.cvar() for result in rivals) * (1.001 if strike == 80.0 else 0.98)
    square = env.solve("quadratic", n_holdings=31, n_wealth=401)
    played = (play_hedge(env, square.hedge, seed=1).pnl ** 2).mean()
    assert square.objective == pytest.approx(played, rel=0.04)
    assert played <= 0.99 * min((result.pnl**2).mean() for result in rivals)


def test_an_option_that_was_given_away_has_the_same_best_hedge():
    """A premium moves every profit and loss by the same amount."""
    fair, free = (OptionHedging(process=TREE, dates=4, cost=0.005, premium=premium) for premium in (None, 0.0))
    bests = [env.solve("cvar", n_holdings=21, n_wealth=401) for env in (fair, free)]
    assert bests[1].objective == pytest.approx(bests[0].objective - fair.premium, rel=0.01)


@pytest.mark.parametrize("criterion", ["quadratic", "cvar"])
def test_a_grid_of_profits_and_losses_that_is_too_narrow_is_refused(criterion):
    env = OptionHedging(process=TREE, dates=4, cost=0.005, book=[Option("call", 108.0)])
    with pytest.raises(ValueError, match="worst"):
        env.solve(criterion, n_holdings=21, n_wealth=201, worst=0.3)
