"""Playing an agent: memory warmed up before, rewards counted after, the same account as the environment's."""

import numpy as np
import pytest

from tailguard.evaluate.agent import play, target_weights
from tailguard.market import FeatureConfig, TradingSettings, build_features, load_bars, random_walk

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
    played = play(agent, "agent", bars, features, settings, (100, 250))
    np.testing.assert_allclose(played.track.equity[1:], np.exp(np.cumsum(played.rewards)), rtol=1e-9)
    assert len(played.track.returns) == len(played.targets) == 149
    assert not played.ruined


def test_several_assets_share_the_leverage():
    both = load_bars({"a": random_walk(200, seed=1), "b": random_walk(200, seed=2)})
    settings = TradingSettings(fee=0.001)
    agent = Scripted(lambda count: np.array([np.sin(count), np.cos(3.0 * count)]))
    played = play(agent, "agent", both, build_features(both, SHORT), settings, (100, 180))
    np.testing.assert_allclose(played.track.equity[1:], np.exp(np.cumsum(played.rewards)), rtol=1e-9)
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
    played = play(agent, "agent", bars, features, TradingSettings(), (100, 250), warmup=30)
    assert agent.calls == list(range(179))
    assert agent.starts == [True] + [False] * 178
    assert played.warmup == 30
    assert played.targets[0, 0] == pytest.approx(0.30)
    assert len(played.observations) == len(played.rewards) == len(played.starts) == 179
    # The agent that counts sees an account that has run since the warm-up; the track begins in cash.
    assert agent.seen[30][-3] == pytest.approx(0.29, rel=0.1)
    assert played.track.turnover[0] == pytest.approx(0.30, rel=0.01)
    assert len(played.track.returns) == 149


def test_a_warm_up_ends_where_features_begin(bars, features):
    agent = Scripted(lambda count: np.array(0.5))
    played = play(agent, "agent", bars, features, TradingSettings(), (features.warmup + 3, 60), warmup=30)
    assert played.warmup == 3
    with pytest.raises(ValueError, match="where features begin"):
        play(agent, "agent", bars, features, TradingSettings(), (features.warmup - 1, 60))
    with pytest.raises(ValueError, match="warmup is -1"):
        play(agent, "agent", bars, features, TradingSettings(), (100, 200), warmup=-1)


def test_what_has_been_earned_is_counted_from_the_first_bar_that_counts(bars, features):
    agent = Scripted(lambda count: np.array(0.9))
    played = play(agent, "agent", bars, features, TradingSettings(), (100, 250), return_gamma=0.9, warmup=30)
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
    played = play(agent, "agent", crashed, build_features(crashed, SHORT), TradingSettings(), (100, 250), warmup=20)
    assert played.ruined
    assert len(agent.calls) == 70  # rows 80 to 149; the crash is the bar after the last
    assert (played.targets[:50] == 1.0).all()
    assert (played.targets[50:] == 0.0).all()
    assert played.track.equity[-1] < 0.05
    assert (played.track.returns[50:] == 0.0).all()


def test_a_ruin_in_the_warm_up_is_not_the_agents(bars):
    crashed = crash(bars, 90)
    agent = Scripted(lambda count: np.array(1.0))
    played = play(agent, "agent", crashed, build_features(crashed, SHORT), TradingSettings(), (100, 250), warmup=20)
    assert not played.ruined
    assert np.flatnonzero(played.starts).tolist() == [0, 10]
    assert agent.calls == [*range(10), *range(159)]
    assert played.track.equity[-1] > 0.3


def test_bars_after_a_decision_do_not_change_it(bars):
    """The agent here acts on what it sees, so that anything that leaks would show."""
    weights = np.random.default_rng(0).normal(size=build_features(bars, SHORT).values.shape[1] + 3)

    class Seeing:
        def predict(self, observation, state, episode_start, deterministic):
            return np.tanh(observation @ weights)[:, None], None

    def targets(table):
        return play(Seeing(), "agent", table, build_features(table, SHORT), TradingSettings(), (100, 250), warmup=20).targets

    changed = bars.copy()
    changed.iloc[181:, :4] *= np.linspace(1.0, 3.0, len(bars) - 181)[:, None]
    before, after = targets(bars), targets(changed)
    np.testing.assert_array_equal(before[:81], after[:81])  # decided at rows 100 to 180
    assert (before[81:] != after[81:]).any()
