"""The choice of an agent inside the training bars: what it may know, what it trusts, and the figures it decides by."""

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
import torch
from scipy.optimize import minimize_scalar
from scipy.stats import norm, ttest_1samp

from tailguard.config import SelectionConfig, load_config
from tailguard.evaluate.folds import cut_into_blocks
from tailguard.evaluate.play import play
from tailguard.experiments import selection, trials
from tailguard.experiments.engines import Engine
from tailguard.experiments.prepared_market import Split, default_split, market_features, prepare_market
from tailguard.experiments.selection import (
    PREMIUM,
    PREMIUM_SPREAD,
    Candidate,
    Selection,
    beyond,
    constant_mix,
    load_selection,
    save_selection,
    select,
    selection_table,
    stops_of,
    t_statistic,
    trust,
)
from tailguard.experiments.training import build_model, train_model
from tailguard.experiments.trials import Kept, Play, Trial
from tailguard.market import align_bars, random_walk, simulate
from tailguard.market.planted import planted_market
from tailguard.market.relevance import FLOOR
from tailguard.market.rules import TradingSettings
from tailguard.market.volatility import exposure_scale

MLP, LSTM = "MlpPolicy", "MlpLstmPolicy"
TINY = [
    "training.steps=128",
    "training.n_envs=4",
    "training.n_steps=16",
    "training.n_epochs=1",
    "training.network={net_arch: [4], lstm_hidden_size: 4}",
    "walkforward.warmup=16",
    "selection={blocks: 3, seeds: 1, stops: [0.5, 1.0]}",
]
# Enough to learn a strong edge in two seconds.
SMALL = [
    "training.steps=12288",
    "training.n_envs=16",
    "training.n_steps=64",
    "training.policy=MlpPolicy",
    "trading.fee=0.0005",
    "selection={blocks: 3, seeds: 1, stops: [0.5, 1.0]}",
]


def chosen(bars, *settings, tiny=TINY, report=None):
    config = load_config(None, [*tiny, *settings])
    return select(bars, config, default_split(len(bars), config.training), market_features(bars, config), report)


@pytest.fixture(scope="module")
def bars():
    return random_walk(600, seed=0)


@pytest.fixture(scope="module")
def once(bars):
    return chosen(bars)


# What is chosen.


def test_an_agent_that_earns_on_held_out_bars_is_trusted():
    bars = planted_market("ar", 3000, sharpe=3.0, seed=0).bars
    selection = chosen(bars, tiny=SMALL)
    assert selection.active == 1.0
    assert selection.chosen.t_statistic > 3.0
    assert selection.chosen.sharpe > 1.0
    assert max(selection.features, key=selection.features.get) == "return_1"  # which is what predicts the next one


def test_an_agent_that_asks_for_little_is_given_more_and_trained_as_before():
    """A short training knows the direction; the gain is the largest that costs at most a twentieth of its Sharpe ratio."""
    bars = planted_market("ar", 3000, sharpe=3.0, seed=0).bars
    early = [each for each in SMALL if not each.startswith("selection")] + ["selection={blocks: 3, seeds: 1, stops: [0.17]}"]
    selection = chosen(bars, tiny=early)
    assert selection.chosen.gain > 1.0
    assert selection.chosen.growth > 0.02
    config = selection.applied(load_config(None, early))
    market = prepare_market(bars, config, default_split(len(bars), config.training))
    assert market.trading.gain == selection.chosen.gain
    assert market.training_env(2, 0).batch.settings.gain == 1.0


def test_where_nothing_can_be_learnt_nothing_is_steered():
    """What is steered by chance has a mean of 0.19 and a deviation of 0.33 (60 such markets, seeds from 200)."""
    shares = [chosen(planted_market("none", 1500, seed=seed).bars, tiny=SMALL).active for seed in range(5)]
    assert np.median(shares) == 0.0
    assert np.mean(shares) <= 0.19 + 2.0 * 0.33 / 5**0.5


def test_the_stop_with_the_best_ratio_wins_and_its_doubts_set_the_share(once):
    stops = [candidate for candidate in once.candidates if candidate.policy == once.policy]
    assert once.steps == max(stops, key=lambda candidate: candidate.sharpe).steps
    assert once.active == trust(once.chosen.t_statistic, once.chosen.expected_t, SelectionConfig().doubt)
    assert [(each.policy, each.steps) for each in once.candidates] == [(MLP, 64), (MLP, 128), (LSTM, 64), (LSTM, 128)]


@pytest.mark.parametrize(("doubt", "share"), [(-100.0, 1.0), (100.0, 0.0)])
def test_doubt_decides_how_much_is_believed(bars, doubt, share):
    settings = ["training.policy=MlpPolicy", f"selection.doubt={doubt}", "selection.stops=[1.0]", "selection.blocks=2"]
    selection = chosen(bars, *settings)
    assert selection.active == share
    assert selection.policy == MLP
    assert {candidate.policy for candidate in selection.candidates} == {MLP}
    evidence = max(selection.chosen.t_statistic, selection.chosen.expected_t)
    half = chosen(bars, *settings, f"selection.doubt={evidence - 0.25}")
    assert half.active == pytest.approx(0.25, abs=1e-9)


@pytest.mark.parametrize(
    ("alpha_t", "expected_t", "share"),
    [
        (1.0, -3.0, 0.5),  # an agent that earned is believed: it may know what no linear forecast does
        (5.0, 0.0, 1.0),
        (-1.0, 1.0, 0.5),  # and one that was unlucky, where returns can be predicted and pay their costs
        (0.4, 9.0, 1.0),
        (0.4, 0.4, 0.0),
        (1.2, None, 0.7),
    ],
)
def test_evidence_is_what_was_earned_or_what_forecasts_say_should_have_been(alpha_t, expected_t, share):
    assert trust(alpha_t, expected_t, doubt=0.5) == pytest.approx(share)


def test_the_expected_alpha_is_the_true_one_but_for_chance():
    """Of agents that have learnt what a linear forecast says; the truth is what the conditional mean makes of their weights."""
    config = load_config(None, [*TINY, "trading.fee=0.0005", "trading.volatility_power=0"])
    misses = []
    for seed in range(12):
        market = planted_market("ar", 2000, sharpe=1.0, seed=300 + seed)
        features = market_features(market.bars, config)
        split = Split((features.warmup, 2000), (2000, 2000))
        blocks = cut_into_blocks(split.train, 3, "blocks")
        trials = selection._Trials(market.bars, config, split, features, blocks, None)
        alphas, costs, gain = [], 0.0, 0.0
        for number, (first, last) in enumerate(trials.spans):
            mean = market.expected[first : last - 1]
            targets = np.clip(400.0 * mean, -1.0, 1.0)
            before = trials.spans[number - 1]  # traded in sample
            trials.plays[MLP, 128, number, 0] = Play(targets, np.zeros((before[1] - before[0] - 1, 1)))
            history = trials.windows[number].trade("agent", targets)
            alphas.append(beyond(history.excess, trials.market_excess[number]))
            costs += float(history.costs.sum())
            gain += float(((targets - targets.mean()) * mean).sum())
        alpha = np.concatenate(alphas)
        truth = (gain - costs) / (alpha.std() * len(alpha) ** 0.5)
        candidate = trials.score(MLP, 128).candidate
        assert candidate.t_statistic == pytest.approx(t_statistic(alpha))
        misses.append((candidate.expected_t - truth, truth))
        assert candidate.turnover > 1.0
    miss, truth = np.array(misses).T
    assert truth.mean() > 1.0
    assert abs(miss.mean()) < 2.0 * miss.std() / 12**0.5 < 1.0


def test_trades_that_no_forecast_explains_are_expected_to_cost_what_they_cost(tried):
    """Random positions: what they earned is luck, what they paid is not."""
    market, rng = planted_market("ar", 2000, sharpe=2.0, seed=7).bars, np.random.default_rng(0)
    result, _ = tried(
        lambda policy, stop, span: rng.choice([-1.0, 1.0], span[1] - span[0] - 1), "trading.fee=0.01", table=market
    )
    assert result.forecast_t > 3.0
    assert result.chosen.expected_t < -5.0


def test_what_is_held_on_average_is_no_alpha_though_blocks_differ_in_it():
    """The agent of a block that fell was trained on the blocks that rose: its exposure follows the other blocks' means."""
    generator = np.random.default_rng(0)
    blocks = [generator.normal(mean, 0.01, 500) for mean in (0.003, -0.003)]
    held = np.concatenate([beyond(share * block, block) for share, block in zip((0.1, 0.9), blocks, strict=True)])
    np.testing.assert_allclose(held, 0.0, atol=1e-15)
    np.testing.assert_allclose(beyond(blocks[0], np.zeros(500)), blocks[0])  # a market that does not move has no beta


# A challenger. Trainings are replaced by made-up decisions, so that it is known who should win.


@pytest.fixture
def tried(bars, monkeypatch):
    """Return a function that selects between made-up targets, and the trainings that it asked for."""

    def select_between(decide, *settings, table=bars):
        asked = []

        def pretend(trial, shared, reached):
            asked.append(tuple(trial))
            rows = [shared.spans[trial.block], shared.spans[trial.block - 1]]
            return {
                stop: Play(*(np.array(decide(trial.policy, stop, span), float)[:, None] for span in rows))
                for stop in shared.stops
            }

        monkeypatch.setattr(Trial, "work", pretend)
        settings = ["trading.fee=0", "trading.fill=close", "selection.seeds=2", *settings]
        return chosen(table, *settings), asked

    return select_between


def moves_of(bars, span):
    """The returns that decisions at the closes of a span earn until the next close."""
    first, last = span
    return bars["close"].pct_change().to_numpy()[first + 1 : last]


@pytest.mark.parametrize(
    ("bets", "winner"),
    [
        ([1.0, 1.0], LSTM),  # two gains of the same size lead by 1.4 standard errors
        ([1.0, -0.5], MLP),  # a gain and a loss of half its size by 0.4
    ],
)
def test_memory_wins_only_if_it_leads_by_more_than_one_standard_error(bars, tried, bets, winner):
    def decide(policy, stop, span):
        moves = moves_of(bars, span)
        targets = np.zeros(len(moves))
        if policy == LSTM and span[0] < 200:  # in the first block, with the whole account on two bars
            largest = np.argsort(-np.abs(moves))[:2]
            targets[largest] = np.array(bets) * 0.005 / moves[largest]
        return targets

    result, asked = tried(decide, "trading.volatility_power=0")
    growth = {candidate.policy: candidate.growth for candidate in result.candidates}
    assert growth[LSTM] > growth[MLP] == 0.0
    assert result.policy == winner
    assert asked == [
        *[(MLP, number, seed) for number in range(3) for seed in range(2)],
        *[(LSTM, 0, 0), (LSTM, 2, 0)],  # half of the blocks first, with one seed
        *[(LSTM, 0, 1), (LSTM, 1, 0), (LSTM, 1, 1), (LSTM, 2, 1)],
    ]


def test_memory_that_falls_behind_on_half_of_the_blocks_is_given_up(bars, tried):
    def decide(policy, stop, span):
        ahead = np.sign(moves_of(bars, span))
        return -0.1 * ahead if policy == LSTM else np.zeros(len(ahead))

    result, asked = tried(decide)
    assert result.policy == MLP
    assert [task for task in asked if task[0] == LSTM] == [(LSTM, 0, 0), (LSTM, 2, 0)]
    assert {candidate.policy: candidate.blocks for candidate in result.candidates} == {MLP: 3, LSTM: 2}


def test_the_earliest_of_equal_stops_wins_and_a_better_later_one_does(bars, tried):
    still, _ = tried(lambda policy, stop, span: np.zeros(span[1] - span[0] - 1))
    assert (still.policy, still.steps, still.active) == (MLP, 64, 0.0)
    late, _ = tried(lambda policy, stop, span: 0.2 * (stop == 128) * np.sign(moves_of(bars, span)))
    assert (late.policy, late.steps, late.active) == (MLP, 128, 1.0)


def test_a_constant_share_of_the_market_is_no_alpha(tried):
    result, _ = tried(lambda policy, stop, span: np.full(span[1] - span[0] - 1, 0.5), "trading.volatility_power=0")
    assert abs(result.chosen.t_statistic) < 1.0
    assert result.active == 0.0


def test_neither_is_one_that_volatility_scales(bars, tried):
    scale = exposure_scale(bars, 1.0)[:, 0]
    assert scale.min() < 0.8  # there is something to scale
    result, _ = tried(lambda policy, stop, span: 0.5 * scale[span[0] : span[1] - 1])
    assert result.volatility_power == 1.0
    assert abs(result.chosen.t_statistic) < 1.0
    assert result.active == 0.0


def test_volatility_scales_a_neutral_agent_and_not_the_mix_beside_it(bars, tried):
    result, _ = tried(lambda policy, stop, span: 0.2 * np.sign(moves_of(bars, span)))
    trading = result.applied(load_config(None, TINY)).trading
    assert (trading.volatility_power, trading.scale_core) == (1.0, False)
    assert "it holds less where volatility is above its usual level, by its power of -1" in result.reason
    by_hand, _ = tried(lambda policy, stop, span: 0.2 * np.sign(moves_of(bars, span)), "trading.volatility_power=2")
    trading = by_hand.applied(load_config(None, TINY)).trading
    assert (trading.volatility_power, trading.scale_core) == (2.0, True)


def test_interest_on_cash_is_no_alpha(bars, tried):
    weekdays = bars.set_axis(pd.bdate_range("2000-01-03", periods=len(bars), unit="ns", name="time"))  # more over weekends
    idle = lambda policy, stop, span: np.zeros(span[1] - span[0] - 1)  # noqa: E731
    result, _ = tried(idle, "trading.cash_rate=0.05", table=weekdays)
    assert result.chosen.sharpe == pytest.approx(0.0, abs=1e-6)
    assert result.chosen.t_statistic == pytest.approx(0.0, abs=1e-6)


# Agents that are averse to the tail of their periods.

AVERSE = "training.risk={objective: cvar, alpha: 0.1, period: 5}"


def test_a_risk_averse_agent_is_chosen_by_its_tail_and_not_by_its_sharpe_ratio(bars, tried):
    """At the first stop it earns more per risk, at the second it avoids the worst bars. How much to hold is as for growth."""

    def decide(policy, stop, span):
        moves = moves_of(bars, span)
        worst = moves < np.quantile(moves, 0.1)
        return np.where((moves > 0.0) | worst, 0.5, 0.0) if stop == 64 else np.where(worst, 0.0, 0.5)

    averse, _ = tried(decide, AVERSE)
    neutral, _ = tried(decide)
    assert (neutral.steps, averse.steps) == (64, 128)
    assert averse.core == neutral.core
    assert averse.core[0] > 0.0
    assert averse.active == 1.0
    assert (averse.volatility_power, averse.scale_core) == (0.0, True)  # of a random walk it tells nothing
    ratio, objective = ([getattr(each, name) for each in averse.candidates[:2]] for name in ("sharpe", "objective"))
    assert ratio[0] > ratio[1]
    assert objective[0] < objective[1]
    assert "the average of the worst 10% of returns over 5 bars" in averse.reason
    assert "objective" in averse.table()
    assert "objective" not in neutral.table()


def test_who_holds_less_is_not_chosen_or_trusted_for_it(bars, tried):
    timing = lambda span: np.where(moves_of(bars, span) < -0.01, 0.0, 1.0)  # noqa: E731
    result, _ = tried(lambda policy, stop, span: timing(span) if stop == 128 else np.full(span[1] - span[0] - 1, 0.01), AVERSE)
    assert result.steps == 128
    constant, _ = tried(lambda policy, stop, span: np.full(span[1] - span[0] - 1, 0.01), AVERSE)
    assert constant.chosen.t_statistic == pytest.approx(0.0, abs=1e-6)


def test_an_agent_in_cash_is_not_chosen_for_losing_nothing(bars, tried):
    """Its objective is 0 and that of the other below 0, though the other sits out half of the bars that fall most."""

    def decide(policy, stop, span):
        moves = moves_of(bars, span)
        timing = np.where((moves < np.quantile(moves, 0.2)) & (np.arange(len(moves)) % 2 == 0), 0.0, 1.0)
        return np.zeros(len(moves)) if stop == 64 else timing

    result, _ = tried(decide, AVERSE)
    assert result.steps == 128
    cash, invested = result.candidates[:2]
    assert invested.objective < cash.objective == 0.0


def test_volatility_scales_the_mix_where_that_spares_the_tail(tried):
    """Held-out phases of danger, in which volatility is four times as high and crashes come, and as many of calm."""
    crashes = crash_bars(1500)
    result, _ = tried(lambda policy, stop, span: np.ones(span[1] - span[0] - 1), AVERSE, table=crashes)
    assert result.volatility_power == 2.0
    assert result.active == 0.0  # holding all the time is worse than the scaled mix
    assert result.core[0] > 0.0
    assert "so it steers nothing; the account is the mix" in result.reason
    assert "scaled by volatility to the power of -2" in result.reason
    applied = result.applied(load_config(None, TINY)).trading
    assert (applied.volatility_power, applied.active, applied.core) == (2.0, 0.0, result.core)
    unscaled, _ = tried(
        lambda policy, stop, span: np.ones(span[1] - span[0] - 1), AVERSE, "trading.volatility_power=0", table=crashes
    )
    assert unscaled.volatility_power == 0.0
    assert unscaled.mix_objective < result.mix_objective  # at equal mean exposure
    neutral, _ = tried(lambda policy, stop, span: np.ones(span[1] - span[0] - 1), table=crashes)
    assert neutral.applied(load_config(None, TINY)).trading.volatility_power == 1.0  # of the agent alone


def test_an_agent_must_be_better_than_the_scaled_mix_and_not_than_holding(tried):
    """What the scale does anyway is no merit of the agent, however well volatility can be forecast."""
    crashes = crash_bars(1500)
    scale = exposure_scale(crashes, 2.0)[:, 0]
    result, _ = tried(lambda policy, stop, span: 0.5 * scale[span[0] : span[1] - 1], AVERSE, table=crashes)
    assert result.forecast_t > 2.0
    assert result.chosen.t_statistic == pytest.approx(0.0, abs=1e-6)
    assert result.active == 0.0


def crash_bars(n):
    """Return bars with phases of calm and of danger, a tenth of whose days are crashes; on average both pay the same."""
    rng = np.random.default_rng(0)
    danger = np.arange(n) // 60 % 3 == 2
    crash = danger & (np.arange(n) % 60 > 8) & (rng.random(n) < 0.1)
    std = np.where(danger, 0.02, 0.005)
    close = 100.0 * np.cumprod(1.0 + 0.0008 + danger * 0.009 + std * rng.normal(size=n) - crash * 0.1)
    opens = np.append(100.0, close[:-1]) * (1.0 + 0.0003 * rng.normal(size=n))
    above, below = np.abs(rng.normal(size=(2, n))) * 0.3 * std
    prices = {"open": opens, "high": np.maximum(opens, close) * (1 + above), "low": np.minimum(opens, close) * (1 - below)}
    index = pd.bdate_range("2000-01-03", periods=n, name="time", unit="ns")
    return pd.DataFrame({**prices, "close": close, "volume": 1e6}, index=index)


def test_a_risk_averse_agent_that_loses_steers_nothing(bars, tried):
    """It bets against every move."""
    result, _ = tried(lambda policy, stop, span: -0.1 * np.sign(moves_of(bars, span)), AVERSE)
    assert result.chosen.sharpe < 0.0
    assert result.active == 0.0


# What it may know.


def test_it_is_deterministic_and_its_seed_matters(bars, once):
    assert chosen(bars).tree() == once.tree()
    assert chosen(bars, "training.seed=1").tree() != once.tree()


def test_bars_after_the_training_have_no_part_in_it(bars, once):
    first_unseen = default_split(len(bars), load_config(None, TINY).training).test[0]
    changed = bars.copy()
    changed.iloc[first_unseen:, :4] *= np.linspace(1.0, 3.0, len(bars) - first_unseen)[:, None]
    changed.iloc[first_unseen:, 4] *= 7.0
    assert json.dumps(chosen(changed).tree()) == json.dumps(once.tree())
    seen = bars.copy()
    seen.iloc[first_unseen - 5 : first_unseen, :4] *= 1.1
    assert chosen(seen).tree() != once.tree()


def test_agents_learn_nothing_of_the_block_that_they_are_tested_on(bars, monkeypatch):
    """The second of two blocks is changed: the agent trained without it is the same to the last bit, the other is not."""
    trained = []
    honest = trials.build_model
    monkeypatch.setattr(trials, "build_model", lambda *inputs: trained.append(honest(*inputs)) or trained[-1])
    config = load_config(None, TINY)
    split = default_split(len(bars), config.training)
    first, last = cut_into_blocks((market_features(bars, config).warmup, split.train[1]), 2, "blocks")[1]
    changed = bars.copy()
    changed.iloc[first:last, :4] *= np.linspace(1.0, 1.5, last - first)[:, None]
    for table in (bars, changed):
        chosen(table, "training.policy=MlpLstmPolicy", "selection.blocks=2")
    same = [torch.equal(one.flat.tensor, other.flat.tensor) for one, other in zip(trained[:2], trained[2:], strict=True)]
    assert same == [False, True]


def test_more_blocks_than_bars_are_refused(bars):
    with pytest.raises(ValueError, match=r"selection\.blocks is 100, but it must be at most"):
        chosen(bars.iloc[:400], "selection.blocks=100")


# The figures, from the public parts and nothing of the selection.


def test_the_figures_of_a_candidate_are_those_of_agents_trained_by_hand(bars):
    settings = ["training.policy=MlpLstmPolicy", "selection={blocks: 2, seeds: 2, stops: [1.0]}"]
    result = chosen(bars, *settings).chosen
    assert result.gain > 2.0  # after two updates
    config = load_config(None, [*TINY, *settings])
    split = default_split(len(bars), config.training)
    known, features = bars.iloc[: split.train[1]], market_features(bars, config)[: split.train[1]]
    config = load_config(None, [*TINY, *settings, "trading.volatility_power=1"])
    scale = exposure_scale(known, 1.0)[:, 0]
    blocks = cut_into_blocks((features.warmup, split.train[1]), 2, "blocks")
    unseen, seen, holding, turnover, exposures = [], [], [], 0.0, []
    for number, block in enumerate(blocks):
        market = prepare_market(known, config, split, features, block)
        spans = [(max(blocks[k][0] - 1, features.warmup), blocks[k][1]) for k in (number, 1 - number)]
        decisions = []
        for seed in range(2):
            drawn = int(np.random.SeedSequence([config.training.seed, number, seed]).generate_state(1)[0])
            model = build_model(market, config.training.model_copy(update={"seed": drawn}))
            train_model(model, config.training.steps)
            decisions.append([part.targets for part in play(model, known, market.features, market.trading, spans, warmup=16)])
        exposures += [np.abs(each[0]).mean() for each in decisions]
        for k, collected in enumerate((unseen, seen)):
            held_back = scale[slice(*spans[k])][:-1]
            asked = np.mean([each[k] for each in decisions], axis=0)[:, 0] / held_back
            targets = np.append(held_back * np.clip(result.gain * asked, -1.0, 1.0), np.nan)
            account = simulate(known.iloc[slice(*spans[k])], targets, fee=config.trading.fee)
            collected.append(account.equity[1:] / account.equity[:-1] - 1.0)
            turnover += account.turnover.sum() if k == 0 else 0.0
        market = np.append(scale[slice(*spans[0])][:-1], np.nan)
        held = simulate(known.iloc[slice(*spans[0])], market, fee=config.trading.fee)
        holding.append(held.equity[1:] / held.equity[:-1] - 1.0)
    lines = [sm.OLS(own, sm.add_constant(held)).fit() for own, held in zip(unseen, holding, strict=True)]
    alphas = np.concatenate([line.params[0] + line.resid for line in lines])  # of every block, with its own beta
    unseen, seen = np.concatenate(unseen), np.concatenate(seen)
    year = 365.25 * len(known) / ((known.index[-1] - known.index[0]) / pd.Timedelta(days=1) + 1.0)
    n = len(unseen)
    assert result.gain == pytest.approx(min(8.0, max(1.0, 0.2 / np.mean(exposures))), rel=1e-6)
    assert result.growth == pytest.approx(np.log1p(unseen).mean() * year, rel=2e-3)
    assert result.turnover == pytest.approx(turnover * year / n, rel=2e-3)
    assert result.sharpe == pytest.approx(unseen.mean() / unseen.std() * np.sqrt(year), rel=2e-3)
    assert result.in_sample_sharpe == pytest.approx(seen.mean() / seen.std() * np.sqrt(year), rel=2e-3)
    assert result.t_statistic == pytest.approx(ttest_1samp(alphas, 0.0).statistic, rel=1e-2)
    assert result.blocks == 2


def test_progress_rises_to_what_was_tried(bars):
    said = []
    chosen(bars, "training.policy=MlpPolicy", report=lambda *line: said.append(line))
    assert [line[:2] for line in said] == [(2, 6), (4, 6), (6, 6)]
    assert said[0][2] == "choosing: MlpPolicy, block 1 of 3"


# Where and when candidates are trained.


def select_on(bars, **options):
    config = load_config(None, TINY)
    return select(bars, config, default_split(len(bars), config.training), market_features(bars, config), **options)


def test_candidates_that_are_trained_in_processes_give_the_same_choice(bars, once):
    assert select_on(bars, engine=Engine("process", processes=2)) == once


def test_a_choice_that_was_stopped_continues_with_what_is_missing(bars, once, tmp_path, monkeypatch, caplog):
    kept, trained, work = Kept(tmp_path, "mine"), [], Trial.work

    def counted(trial, shared, reached):
        if len(trained) == 3:
            raise KeyboardInterrupt
        trained.append(trial.name)
        return work(trial, shared, reached)

    monkeypatch.setattr(Trial, "work", counted)
    with pytest.raises(KeyboardInterrupt):
        select_on(bars, kept=kept)
    assert sorted(path.stem for path in tmp_path.iterdir()) == sorted(trained)
    monkeypatch.setattr(Trial, "work", lambda *arguments: trained.append(arguments[0].name) or work(*arguments))
    finished, trained[:] = list(trained), []
    assert select_on(bars, kept=kept) == once
    assert not set(trained) & set(finished)
    assert set(trained) | set(finished) == {path.stem for path in tmp_path.iterdir()}
    trained.clear()
    assert select_on(bars, kept=kept) == once
    assert trained == []
    assert caplog.messages == []


def test_trainings_that_are_damaged_foreign_or_of_another_form_are_done_again(bars, once, tmp_path, monkeypatch, caplog):
    kept, trained, work = Kept(tmp_path, "mine"), [], Trial.work
    select_on(bars, kept=kept)
    damaged, foreign, exchanged, formed, *_ = sorted(tmp_path.iterdir())
    damaged.write_bytes(damaged.read_bytes()[:-1])
    Kept(tmp_path, "another").save(foreign.stem, {})
    exchanged.write_bytes((tmp_path / f"{MLP}-block-2-seed-0.safetensors").read_bytes())
    content = kept.load(formed.stem, lambda tree: tree)
    kept.save(formed.stem, {**content, "64": {**content["64"], "held_out": np.full(3, np.nan)}})
    monkeypatch.setattr(Trial, "work", lambda *arguments: trained.append(arguments[0].name) or work(*arguments))
    assert select_on(bars, kept=kept) == once
    assert sorted(trained) == [damaged.stem, foreign.stem, exchanged.stem, formed.stem]
    assert all(line.endswith("; that is done again") for line in caplog.messages)
    assert len(caplog.messages) == 4


def test_t_statistics_are_those_of_scipy():
    returns = np.random.default_rng(0).normal(0.001, 0.01, 200)
    with_n = np.sqrt(200.0 / 199.0)  # scipy divides the variance by n - 1
    assert t_statistic(returns) == pytest.approx(ttest_1samp(returns, 0.0).statistic * with_n, rel=1e-12)
    assert t_statistic(np.full(50, 0.01)) == 0.0


# Stops.


@pytest.mark.parametrize(
    ("steps", "shares", "expected"),
    [
        (65_536, (0.125, 0.25, 0.5, 1.0), [8192, 16_384, 32_768, 65_536]),
        (60_000, (0.5, 1.0), [30_720, 61_440]),  # 30 updates
        (5000, (0.125, 0.25, 0.5, 1.0), [2048, 4096, 6144]),  # 3 updates: 1.5 are 2
        (1, (0.5, 1.0), [2048]),
        (65_536, (0.3,), [20_480]),
    ],
)
def test_stops_are_whole_updates(steps, shares, expected):
    training = load_config(None, [f"training.steps={steps}"]).training
    assert (training.n_steps, training.n_envs) == (64, 32)
    assert stops_of(training, SelectionConfig(stops=shares)) == expected


def test_a_training_of_the_chosen_steps_ends_at_its_stop(bars):
    config = load_config(None, TINY)
    market = prepare_market(bars, config, default_split(len(bars), config.training))
    for stop in stops_of(config.training, config.selection):
        model = build_model(market, config.training)
        train_model(model, stop)
        assert model.num_timesteps == stop


@pytest.mark.parametrize("stops", [(), (0.5, 0.5), (1.0, 0.5), (0.0, 1.0), (0.5, 1.1)])
def test_impossible_stops_are_refused(stops):
    with pytest.raises(ValueError, match="stops"):
        SelectionConfig(stops=stops)


# The constant mix.


def market_of(returns, symbols=1):
    """Daily bars whose closes have these returns; with several symbols ``[n, symbols]``."""
    returns = np.asarray(returns).reshape(len(returns), -1)
    index = pd.date_range("2000-01-01", periods=len(returns) + 1, freq="1D", unit="ns", name="time")
    tables = []
    for column in returns.T:
        close = 100.0 * np.cumprod(np.append(1.0, 1.0 + column))
        prices = dict.fromkeys(("open", "high", "low", "close"), close)
        tables.append(pd.DataFrame({**prices, "volume": 1.0}, index=index))
    return tables[0] if symbols == 1 else align_bars({f"s{i}": table for i, table in enumerate(tables)})


def mix_of(bars, spans=None, **rules):
    return constant_mix(bars, [(0, len(bars))] if spans is None else spans, TradingSettings(fill="close", **rules))


def standardised(n, mean, deviation, seed=0):
    """Normal returns with exactly this mean and deviation."""
    noise = np.random.default_rng(seed).standard_normal(n)
    return mean + deviation * (noise - noise.mean()) / noise.std()


def test_with_a_long_past_the_mix_grows_most():
    """500 years of ten bars each, against the maximum of the mean of the log."""
    returns = standardised(5000, 0.004, 0.05)
    best = minimize_scalar(lambda w: -np.log1p(w * returns).mean(), bounds=(0.0, 4.0)).x
    assert mix_of(market_of(returns), leverage=4.0, bars_per_year=10.0)[0] == pytest.approx(best, rel=0.03)


@pytest.mark.parametrize("years", [0.5, 4.0, 30.0])
def test_the_mix_expects_the_posterior_mean_of_the_sharpe_ratio(years):
    """Normal prior times normal likelihood, integrated numerically."""
    n = round(250 * years)
    volatility = 0.2
    returns = standardised(n, 0.9 * volatility / 250.0, volatility / np.sqrt(250.0))  # a Sharpe ratio of 0.9 was seen
    grid = np.linspace(-5.0, 5.0, 100_001)
    density = norm.pdf(grid, PREMIUM, PREMIUM_SPREAD) * norm.pdf(0.9, grid, 1.0 / np.sqrt(years))
    expected = (grid * density).sum() / density.sum()
    mix = mix_of(market_of(returns), leverage=100.0, bars_per_year=250.0)
    assert mix[0] == pytest.approx(expected / volatility, rel=1e-6)


def test_a_market_that_fell_for_long_is_left_and_never_sold_short():
    returns = standardised(5000, -0.001, 0.01)
    assert mix_of(market_of(returns)) == (0.0,)


@pytest.mark.parametrize("leverage", [0.5, 1.0, 3.0])
def test_the_mix_never_exceeds_the_leverage(leverage):
    assert sum(mix_of(market_of(standardised(2000, 0.01, 0.01)), leverage=leverage)) == leverage
    for seed in range(5):
        several = np.random.default_rng(seed).normal(0.0003, 0.01, (300, 3))
        mix = mix_of(market_of(several, symbols=3), leverage=leverage)
        assert len(set(mix)) == 1
        assert 0.0 <= sum(mix) <= leverage * (1.0 + 1e-12)


def test_several_assets_are_one_portfolio_of_equal_shares():
    several = np.random.default_rng(1).normal(0.0004, 0.02, (1500, 4))
    together = mix_of(market_of(several.mean(axis=1)), leverage=100.0)
    assert sum(mix_of(market_of(several, symbols=4), leverage=100.0)) == pytest.approx(together[0], rel=1e-9)


def test_prices_that_stand_still_support_no_exposure():
    assert mix_of(market_of(np.zeros(100))) == (0.0,)
    assert mix_of(market_of(np.zeros((100, 2)), symbols=2)) == (0.0, 0.0)


def test_the_mix_looks_at_its_spans_only():
    bars = random_walk(400, seed=2)
    spans = [(50, 150), (250, 300)]
    elsewhere = bars.copy()
    outside = np.ones(400, bool)
    for first, last in spans:
        outside[first:last] = False
    elsewhere.loc[outside, ["open", "high", "low", "close"]] *= 3.0
    assert mix_of(elsewhere, spans, leverage=100.0) == mix_of(bars, spans, leverage=100.0) != mix_of(bars, leverage=100.0)


# The result as data.


def made_up(**changes):
    candidates = (
        Candidate(MLP, 4096, 1.5, 0.8, 0.10, 12.0, 1.2, 4),
        Candidate(MLP, 8192, 2.5, 0.9, 0.12, 14.0, 1.4, 4, gain=4.0, expected_t=2.3),
        Candidate(LSTM, 8192, 4.0, 0.2, 0.02, 40.0, -0.3, 2),
    )
    values = {
        "policy": MLP, "steps": 8192, "core": (0.3, 0.3), "active": 0.4, "forecast_t": 2.1, "mix_growth": 0.05,
        "candidates": candidates, "features": {"return_1": 0.9, "lag_2": 0.3},
    }  # fmt: skip
    return Selection(**values | changes)


def test_a_selection_survives_a_file(tmp_path, once):
    for number, each in enumerate((made_up(), once)):
        save_selection(each, tmp_path / f"{number}.json")
        assert load_selection(tmp_path / f"{number}.json") == each


def test_files_from_before_there_was_a_forecast_are_read(tmp_path):
    path = tmp_path / "selection.json"
    later = ("forecast_t", "volatility_power", "scale_core", "horizon")
    old = {name: value for name, value in made_up().tree().items() if name not in later}
    path.write_text(json.dumps(old))
    assert load_selection(path) == made_up(forecast_t=0.0)


def test_files_from_before_alphas_were_expected_are_read(tmp_path):
    tree, path = made_up().tree(), tmp_path / "selection.json"
    for candidate in tree["candidates"]:
        del candidate["expected_t"]
    path.write_text(json.dumps(tree))
    assert load_selection(path).chosen.expected_t is None
    assert "a t-statistic of 1.4 (linear forecasts of the returns, which have one of 2.1), so" in load_selection(path).reason


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: text.replace('"mix_growth"', '"mixed_growth"'),
        lambda text: text.replace('"turnover"', '"turned"', 1),
        lambda text: "[1, 2]",
    ],
)
def test_a_damaged_file_is_named(tmp_path, damage):
    path = tmp_path / "selection.json"
    save_selection(made_up(), path)
    path.write_text(damage(path.read_text()))
    with pytest.raises(ValueError, match=r"selection\.json is damaged .*: delete it to have the selection made again") as error:
        load_selection(path)
    assert "\n" not in str(error.value)


def test_it_is_applied_to_policy_steps_core_and_share_and_to_nothing_else():
    config = load_config(None, [*TINY, "training.seed=5", "trading.fee=0.002"])
    applied = made_up(core=(0.3,)).applied(config)
    assert (applied.training.policy, applied.training.steps, applied.selection) == (MLP, 8192, None)
    assert (applied.trading.core, applied.trading.active, applied.trading.gain) == ((0.3,), 0.4, 4.0)
    back = applied.model_copy(update={"training": config.training, "trading": config.trading, "selection": config.selection})
    assert back == config
    assert applied.training.model_copy(update={"policy": "auto", "steps": 128}) == config.training
    assert applied.trading.model_copy(update={"core": (), "active": 1.0, "gain": 1.0}) == config.trading


def test_the_table_has_a_row_per_fold_and_candidate():
    table = selection_table({0: made_up(), 1: None, 2: made_up(steps=4096, active=0.0)})
    assert table["fold"].tolist() == [0, 0, 0, 2, 2, 2]
    assert table["chosen"].tolist() == [False, True, False, True, False, False]
    assert table["active"].tolist() == [0.4] * 3 + [0.0] * 3
    assert table["sharpe"].tolist() == [0.8, 0.9, 0.2] * 2
    assert table["reason"].tolist()[0] == made_up().reason
    assert selection_table({0: None}) is None


@pytest.mark.parametrize(
    ("active", "says"), [(0.0, "so it steers nothing"), (0.4, "so it steers 40% of the account"), (1.0, "the whole account")]
)
def test_the_reason_names_the_figures_that_decided(active, says):
    reason = made_up(active=active).reason
    assert reason.startswith(
        "MlpPolicy after 8,192 steps, with 4 times the weights that it asked for, had the best Sharpe ratio on "
    )
    assert "held-out blocks, 0.90 (it grew +12.0% a year, the constant mix +5.0%)" in reason
    assert "t-statistic of 1.4, and of 2.3 by linear forecasts of the returns, which have one of 2.1, so" in reason
    assert reason.endswith(says)


def test_features_are_those_that_say_something_the_loudest_first(once):
    weights = list(once.features.values())
    assert weights == sorted(weights, reverse=True)
    assert all(weight > FLOOR for weight in weights)
    assert replace(once, features={}).tree()["features"] == {}
