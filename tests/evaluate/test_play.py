"""The one loop that plays an agent: warm-up before, rewards counted after, the account of the environment, many at once."""

import numpy as np
import pytest

from tailguard.envs.return_observer import ReturnRule
from tailguard.evaluate.backtest_window import BacktestWindow
from tailguard.evaluate.play import play, target_weights
from tailguard.market import FeatureConfig, TradingSettings, build_features, load_bars, random_walk


def playing(agent, bars, features, settings, span, **options):
    """One account over one span, and its history in a backtest window."""
    (played,) = play(agent, bars, features, settings, [span], **options)
    return played


def history_of(played, bars, settings, span):
    return BacktestWindow(bars, settings, span).trade("agent", played.targets)


SHORT = FeatureConfig(horizons=(1,), volatility_window=5, slow_window=5, drawdown_window=5, macd=(3, 6, 3), calendar=False)


class Scripted:
    """Acts by the number of calls since its memory began, which is its memory, and notes what it is shown."""

    def __init__(self, actions):
        self.actions, self.calls, self.starts, self.seen = actions, [], [], []

    def predict(self, observation, state, episode_start, deterministic):
        assert deterministic
        count = 0 if state is None or episode_start[0] else int(state[0][0])
        self.calls.append(count)
        self.starts.append(bool(episode_start[0]))
        self.seen.append(observation[0].copy())
        return np.atleast_2d(self.actions(count)), (np.array([count + 1]),)


@pytest.fixture(scope="module")
def bars():
    return random_walk(300, seed=0)


@pytest.fixture(scope="module")
def features(bars):
    return build_features(bars, SHORT)


@pytest.mark.parametrize("fill", ["next_open", "next_close"])
@pytest.mark.parametrize("long_only", [True, False])
def test_the_track_is_the_account_of_the_environment(bars, features, fill, long_only):
    settings = TradingSettings(fee=0.002, slippage=0.001, fill=fill, long_only=long_only, leverage=1.5)
    agent = Scripted(lambda count: np.sin(count * 1.7))
    played = playing(agent, bars, features, settings, (100, 250))
    history = history_of(played, bars, settings, (100, 250))
    np.testing.assert_allclose(history.equity[1:], np.exp(np.cumsum(played.rewards)), rtol=1e-9)
    np.testing.assert_allclose(history.equity, played.equity, rtol=1e-9)
    assert len(history.returns) == len(played.targets) == 149
    assert not played.ruined


def test_several_assets_share_the_leverage():
    both = load_bars({"a": random_walk(200, seed=1), "b": random_walk(200, seed=2)})
    settings = TradingSettings(fee=0.001)
    agent = Scripted(lambda count: np.array([np.sin(count), np.cos(3.0 * count)]))
    played = playing(agent, both, build_features(both, SHORT), settings, (100, 180))
    history = history_of(played, both, settings, (100, 180))
    np.testing.assert_allclose(history.equity[1:], np.exp(np.cumsum(played.rewards)), rtol=1e-9)
    assert np.abs(played.targets).sum(axis=1).max() == pytest.approx(1.0)


def test_weights_of_actions_by_hand():
    free, long = TradingSettings(fee=0.0, leverage=2.0), TradingSettings(fee=0.0, leverage=2.0, long_only=True)
    np.testing.assert_allclose(target_weights(np.array([0.5]), free), [1.0])
    np.testing.assert_allclose(target_weights(np.array([-3.0]), free), [-2.0])
    np.testing.assert_allclose(target_weights(np.array([0.5]), long), [1.5])
    np.testing.assert_allclose(target_weights(np.array([1.0, -1.0]), free), [1.0, -1.0])  # gross 4 is cut to 2
    np.testing.assert_allclose(target_weights(np.array([0.0, 0.0]), long), [1.0, 1.0])


def test_memory_is_warmed_up_and_nothing_of_it_is_counted(bars, features):
    agent = Scripted(lambda count: np.array(0.01 * count))
    played = playing(agent, bars, features, TradingSettings(), (100, 250), warmup=30)
    assert agent.calls == list(range(179))
    assert agent.starts == [True] + [False] * 178
    assert played.warmup == 30
    assert played.targets[0, 0] == pytest.approx(0.30)
    assert len(played.observations) == len(played.rewards) == len(played.starts) == 179
    # The agent that counts sees an account that has run since the warm-up; the history begins in cash.
    assert agent.seen[30][-3] == pytest.approx(0.29, rel=0.1)
    history = history_of(played, bars, TradingSettings(), (100, 250))
    assert history.turnover[0] == pytest.approx(0.30, rel=0.01)
    assert len(history.returns) == 149


def test_a_warm_up_ends_where_features_begin(bars, features):
    agent = Scripted(lambda count: np.array(0.5))
    played = playing(agent, bars, features, TradingSettings(), (features.warmup + 3, 60), warmup=30)
    assert played.warmup == 3
    with pytest.raises(ValueError, match="where features begin"):
        playing(agent, bars, features, TradingSettings(), (features.warmup - 1, 60))
    with pytest.raises(ValueError, match="warmup is -1"):
        playing(agent, bars, features, TradingSettings(), (100, 200), warmup=-1)


def test_what_has_been_earned_is_counted_from_the_first_bar_that_counts(bars, features):
    agent = Scripted(lambda count: np.array(0.9))
    played = playing(agent, bars, features, TradingSettings(), (100, 250), returns=ReturnRule(0.9), warmup=30)
    earned, discounts = np.array(agent.seen)[:, -2], np.array(agent.seen)[:, -1]
    for first, last in ((0, 30), (30, 80)):  # counting begins with the warm-up, and again after it
        powers = 0.9 ** np.arange(last - first)
        np.testing.assert_allclose(discounts[first:last], powers, rtol=1e-6)
        sums = np.concatenate([[0.0], np.cumsum(powers * played.rewards[first:last])[:-1]])
        np.testing.assert_allclose(earned[first:last], sums, rtol=1e-4, atol=1e-7)
    np.testing.assert_array_equal(played.observations, np.array(agent.seen))


def crash(bars, row):
    """The price falls to a hundredth over the bar `row` and stays there."""
    changed = bars.copy()
    changed.iloc[row:, :4] *= 0.01
    return changed


def test_a_ruin_ends_the_play(bars):
    crashed = crash(bars, 150)
    agent = Scripted(lambda count: np.array(1.0))
    played = playing(agent, crashed, build_features(crashed, SHORT), TradingSettings(), (100, 250), warmup=20)
    assert played.ruined
    assert len(agent.calls) == 70  # rows 80 to 149; the crash is the bar after the last
    assert (played.targets[:50] == 1.0).all()
    assert (played.targets[50:] == 0.0).all()
    history = history_of(played, crashed, TradingSettings(), (100, 250))
    assert history.equity[-1] < 0.05
    assert (history.returns[50:] == 0.0).all()


def test_a_ruin_in_the_warm_up_is_not_the_agents(bars):
    crashed = crash(bars, 90)
    agent = Scripted(lambda count: np.array(1.0))
    played = playing(agent, crashed, build_features(crashed, SHORT), TradingSettings(), (100, 250), warmup=20)
    assert not played.ruined
    assert np.flatnonzero(played.starts).tolist() == [0, 10]
    assert agent.calls == [*range(10), *range(159)]
    assert history_of(played, crashed, TradingSettings(), (100, 250)).equity[-1] > 0.3


def test_bars_after_a_decision_do_not_change_it(bars):
    """The agent here acts on what it sees, so that anything that leaks would show."""
    weights = np.random.default_rng(0).normal(size=build_features(bars, SHORT).values.shape[1] + 3)

    class Seeing:
        def predict(self, observation, state, episode_start, deterministic):
            return np.tanh(observation @ weights)[:, None], None

    def targets(table):
        return playing(Seeing(), table, build_features(table, SHORT), TradingSettings(), (100, 250), warmup=20).targets

    changed = bars.copy()
    changed.iloc[181:, :4] *= np.linspace(1.0, 3.0, len(bars) - 181)[:, None]
    before, after = targets(bars), targets(changed)
    np.testing.assert_array_equal(before[:81], after[:81])  # decided at rows 100 to 180
    assert (before[81:] != after[81:]).any()


class Noting:
    """Acts on what it sees, row by row, and counts the steps of each account since it started."""

    def predict(self, observation, state, episode_start, deterministic):
        count = np.zeros(len(observation)) if state is None else np.where(episode_start, 0.0, state[0])
        signal = np.sin(3.0 * observation[:, 0] + 5.0 * observation[:, -1])
        return (signal * np.cos(count))[:, None], (count + 1.0,)


@pytest.mark.parametrize("returns", [None, ReturnRule(0.9), ReturnRule.of(1.0, 7), ReturnRule.of(1.0, "1W")])
def test_accounts_side_by_side_are_accounts_alone(bars, returns):
    """Spans of different lengths, one of them ruined early, one that ends with the data, with what is left of a warm-up."""
    crashed = crash(bars, 150)
    features, settings = build_features(crashed, SHORT), TradingSettings(leverage=3.0)
    spans = [(100, 250), (features.warmup + 3, 60), (160, 300), (200, 203), (120, 155)]
    options = {"returns": returns, "warmup": 20}
    together = play(Noting(), crashed, features, settings, spans, **options)
    assert [account.ruined for account in together][1] is False
    assert {account.warmup for account in together} == {20, 3}
    for span, account in zip(spans, together, strict=True):
        alone = playing(Noting(), crashed, features, settings, span, **options)
        for name in alone._fields:
            np.testing.assert_array_equal(getattr(account, name), getattr(alone, name), err_msg=f"{span} {name}")
        assert len(account.targets) == span[1] - span[0] - 1


def test_progress_is_reported_to_the_end(bars, features):
    told = []
    play(Noting(), bars, features, TradingSettings(), [(50, 300), (60, 300)], report=told.append)
    assert told == [100, 200, 249]


def test_spans_outside_of_the_bars_are_refused(bars, features):
    for span in ((100, 301), (100, 101)):
        with pytest.raises(ValueError, match="at least two rows each, within 300 bars"):
            playing(Noting(), bars, features, TradingSettings(), span)
