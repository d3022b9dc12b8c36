"""Objectives that look at the tail: identities of the capped return, exact trees, tails by brute force, caps, settings."""

import itertools
import math
from statistics import NormalDist

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from test_algorithm import B, Script, T, make, mlp_and_lstm, weights

from tailguard.envs.return_observer import ReturnRule, RunningReturn
from tailguard.ppo.config import RiskConfig
from tailguard.ppo.risk import ENOUGH_EPISODES, HOPELESS_MULTIPLIER, Budget, FinishedReturns, ReturnWindow, RiskObjective
from tailguard.validation import build

NO_ATOMS = np.empty((0, 4))


def ended(returns):
    """Episodes that came to their end, played for the mean."""
    return FinishedReturns(np.array(returns, float), NO_ATOMS, np.ones(len(returns)), np.empty(0))


CONDITIONED = {"objective": "cvar", "alpha": (0.1, 0.4)}


def objective(cap=None, **config):
    config = RiskConfig(**{"objective": "cvar", **config})
    found = RiskObjective(config, Budget(config))
    if cap is not None:
        found.budget.caps.fill_(cap)
    return found


def double(values):
    return torch.tensor(values, dtype=torch.float64)


# The capped return.


numbers = st.floats(-10.0, 10.0)


@given(rewards=st.lists(numbers, min_size=1, max_size=30), cap=st.floats(-30.0, 30.0), gamma=st.floats(0.5, 1.0))
@settings(max_examples=100, deadline=None)
def test_the_discounted_pay_of_an_episode_is_its_capped_return(rewards, cap, gamma):
    """sum_t gamma^t (min(r_t, c_t) - min(0, c_t)) = min(R, C) - min(0, C), whatever the cap."""
    risk, discounts = objective(cap), gamma ** np.arange(len(rewards))
    earned = np.concatenate(([0.0], np.cumsum(discounts * rewards)[:-1]))
    paid = risk.rewards(double([rewards]), double(np.stack((earned, discounts), -1)[None]))[0]
    whole = float(discounts @ rewards)
    assert float(paid.numpy() @ discounts) == pytest.approx(min(whole, cap) - min(0.0, cap), abs=1e-9)
    # From any later step on the same holds in units of its own discount.
    for t in range(len(rewards)):
        rest, budget = discounts[: len(rewards) - t] @ rewards[t:], (cap - earned[t]) / discounts[t]
        later = float(paid.numpy()[t:] @ discounts[: len(rewards) - t])
        assert later == pytest.approx(min(rest, budget) - min(0.0, budget), abs=1e-7)


def test_the_columns_of_an_observation_are_precise_enough_for_that():
    """They travel in float32 and are divided by the discount."""
    rng, gamma, cap, running = np.random.default_rng(0), 0.97, 1.5, RunningReturn(4, ReturnRule(0.97))
    rewards, columns = rng.normal(size=(100, 4)), []
    for row in rewards:
        columns.append(running.columns())
        running.add(row)
    paid = objective(cap).rewards(double(rewards), torch.from_numpy(np.stack(columns)))
    discounts = gamma ** np.arange(100.0)
    expected = np.minimum(discounts @ rewards, cap) - min(0.0, cap)
    np.testing.assert_allclose(discounts @ paid.numpy(), expected, atol=1e-5)


def test_without_a_cap_the_pay_is_the_reward_and_the_value_the_mean():
    risk, columns = objective(), double([[[2.0, 0.5]]])
    atoms = double([[[[-3.0, 1.0, 8.0]]]])
    masses = double([0.2, 0.3, 0.5])
    assert risk.rewards(double([[-7.0]]), columns).item() == -7.0
    assert risk.values(atoms, masses, columns).item() == pytest.approx(3.7)


TREE_GAMMA = 0.8


def tree(depth, rng):
    """A random tree: branches of (probability, reward, subtree); None is the end."""
    if depth == 0:
        return None
    chances = rng.dirichlet(np.ones(3))
    return [(chance, rng.normal(), tree(depth - 1, rng)) for chance in chances]


def distribution_of(node):
    """The exact distribution of the discounted return: values and masses."""
    if node is None:
        return np.zeros(1), np.ones(1)
    atoms = [(chance, reward, *distribution_of(child)) for chance, reward, child in node]
    values = np.concatenate([reward + TREE_GAMMA * values for _, reward, values, _ in atoms])
    return values, np.concatenate([chance * masses for chance, _, _, masses in atoms])


@pytest.mark.parametrize("cap", [-2.0, -0.3, 0.0, 0.4, 5.0])
@pytest.mark.parametrize(
    "config", [{}, {"objective": "mean_cvar", "weight": 0.3, "alpha": 0.25, "anneal": 0.0}], ids=["cvar", "mix"]
)
def test_values_obey_bellmans_equation_in_every_node_of_a_tree(cap, config):
    """The value from the exact distribution of Z is the expected pay plus gamma times the value of what follows."""
    risk, checked = objective(cap, **config), 0

    def value(node, earned, discount):
        values, masses = distribution_of(node)
        columns = double([[[earned, discount]]])
        return risk.values(double(values)[None, None, None], double(masses), columns).item()

    def check(node, earned, discount):
        nonlocal checked
        if node is None:
            assert value(node, earned, discount) == 0.0
            return
        now = 0.0
        for chance, reward, child in node:
            after = (earned + discount * reward, discount * TREE_GAMMA)
            pay = risk.rewards(double([[reward]]), double([[[earned, discount]]])).item()
            now += chance * (pay + TREE_GAMMA * value(child, *after))
            check(child, *after)
        assert value(node, earned, discount) == pytest.approx(now, abs=1e-9)
        checked += 1

    root = tree(4, np.random.default_rng(1))
    check(root, 0.0, 1.0)
    assert checked == 1 + 3 + 9 + 27
    if not config:
        values, masses = distribution_of(root)
        expected = masses @ np.minimum(values, cap) - min(0.0, cap)
        assert value(root, 0.0, 1.0) == pytest.approx(expected)


@given(seed=st.integers(0, 1000), alpha=st.floats(0.02, 1.0))
@settings(max_examples=50, deadline=None)
def test_maximising_the_capped_return_at_the_var_is_maximising_the_cvar(seed, alpha):
    """Rockafellar and Uryasev: C + E[min(R - C, 0)] / alpha is largest, and the CVaR, at C = VaR."""
    returns = ReturnWindow(100)
    sample = np.random.default_rng(seed).normal(size=40)
    returns.add(sample, NO_ATOMS)
    var, cvar = returns.tail(alpha, np.ones(1))

    def bound(cap):
        return cap + np.minimum(sample - cap, 0.0).mean() / alpha

    assert bound(var) == pytest.approx(cvar, abs=1e-9)
    assert max(map(bound, sample)) <= cvar + 1e-9


# Mixtures.


def test_weights_of_mean_and_tail_follow_from_the_objective():
    """mean_cvar: (1 - w) E[R] + w (C + E[min(R - C, 0)] / alpha): the capped return counts w / alpha."""
    columns = double([[[0.0, 1.0]]])
    assert objective().weights(columns) == (0.0, 1.0)
    assert objective(objective="mean_cvar", weight=0.3, alpha=0.1, anneal=0.0).weights(columns) == pytest.approx((0.7, 3.0))
    at_first = objective(objective="mean_cvar", weight=0.3, alpha=0.1, anneal=0.5, anneal_from=1.0)
    assert at_first.weights(columns) == pytest.approx((0.7, 0.3))
    constrained = objective(objective="constrained", limit=0.0, alpha=0.1)
    assert constrained.weights(columns) == (1.0, 0.0)
    constrained.multiplier = 2.0
    assert constrained.weights(columns) == pytest.approx((1.0, 20.0))


def test_conditioned_on_alpha_each_state_has_the_weight_of_its_own_tail():
    risk = objective(1.0, objective="mean_cvar", weight=0.5, alpha=(0.1, 0.4), anneal=0.0)
    columns = double([[[0.0, 1.0, 0.1], [0.0, 1.0, 0.4]]])
    mean, tail = risk.weights(columns)
    assert mean == 0.5
    torch.testing.assert_close(tail, double([[5.0, 1.25]]))
    # Reward 3, budget 1: the mean counts 3, the tail 1.
    torch.testing.assert_close(risk.rewards(double([[3.0, 3.0]]), columns), double([[1.5 + 5.0, 1.5 + 1.25]]))


# Tails of remembered episodes.


def brute_tail(values, masses, alpha):
    """Fill a bucket of size alpha from the bottom."""
    left, total, var = alpha, 0.0, None
    for value, mass in sorted(zip(values, masses, strict=True)):
        taken = min(mass, left)
        if taken > 1e-12:
            var = value
        total, left = total + taken * value, left - taken
    return var, total / (alpha - left)


@given(data=st.data(), alpha=st.one_of(st.sampled_from([0.05, 0.1, 0.25, 0.5, 1.0]), st.floats(0.01, 1.0)))
@settings(max_examples=150, deadline=None)
def test_tails_are_those_of_a_bucket_filled_from_the_bottom(data, alpha):
    """Episodes of one number and whole distributions together, each episode of the same weight, with ties."""
    masses = np.array([0.1, 0.2, 0.3, 0.4])
    grid = st.integers(-5, 5).map(float)
    episodes = data.draw(
        st.lists(
            st.one_of(st.lists(grid, min_size=1, max_size=1), st.lists(grid, min_size=4, max_size=4)), min_size=1, max_size=30
        )
    )
    returns = ReturnWindow(1000)
    half = len(episodes) // 2
    for rollout in (episodes[:half], episodes[half:]):
        atoms = [sorted(one) for one in rollout if len(one) > 1]
        returns.add(np.array([one[0] for one in rollout if len(one) == 1]), np.array(atoms).reshape(-1, 4))
    flat = [
        (value, mass / len(episodes))
        for one in episodes
        for value, mass in zip(sorted(one), masses if len(one) > 1 else [1.0], strict=True)
    ]
    var, cvar = returns.tail(alpha, masses)
    expected_var, expected_cvar = brute_tail(*zip(*flat, strict=True), alpha)
    assert cvar == pytest.approx(expected_cvar, abs=1e-9)
    assert var == expected_var


def test_only_the_last_episodes_are_remembered():
    returns = ReturnWindow(3)
    for k in range(10):
        returns.add(np.array([float(k)]), NO_ATOMS)
    assert len(returns) == 3
    assert returns.tail(1.0, np.ones(1)) == (9.0, pytest.approx(8.0))
    returns.add(np.array([10.0, 11.0]), NO_ATOMS)
    returns.add(np.empty(0), NO_ATOMS)
    assert len(returns) == 3
    assert len(returns.rollouts) == 2  # a rollout in which nothing ended leaves no trace
    returns.add(np.arange(20.0, 25.0), NO_ATOMS)
    assert len(returns) == 3
    assert returns.tail(1.0, np.ones(1)) == (24.0, pytest.approx(23.0))
    returns.add(np.array([30.0]), np.full((4, 4), 31.0))
    assert [(len(totals), len(atoms)) for totals, atoms in returns.rollouts] == [(0, 3)]


def test_episodes_go_to_the_tail_they_were_played_for():
    """As it comes back from an observation: in float32."""
    risk = objective(alpha=(0.05, 0.8), levels=5)
    levels = risk.alphas.astype(np.float32).astype(np.float64)
    atoms = np.arange(10.0).reshape(5, 2)
    risk.remember(FinishedReturns(np.arange(5.0), atoms, levels, levels[::-1]))
    found = [one.rollouts[0] for one in risk.returns]
    assert [totals.tolist() for totals, _ in found] == [[0.0], [1.0], [2.0], [3.0], [4.0]]
    assert [distribution.tolist() for _, distribution in found] == [[row] for row in atoms[::-1].tolist()]
    assert all(len(one) == 2 for one in risk.returns)


# Caps.


def test_levels_are_evenly_spaced_in_log_alpha():
    alphas = RiskConfig(objective="cvar", alpha=(0.05, 0.8), levels=5).alphas()
    np.testing.assert_allclose(alphas, [0.05, 0.1, 0.2, 0.4, 0.8])
    assert RiskConfig(objective="cvar", alpha=0.3).alphas().tolist() == [0.3]


def test_caps_between_levels_are_interpolated_in_log_alpha():
    budget = Budget(RiskConfig(objective="cvar", alpha=(0.1, 0.4), levels=3))
    budget.caps.copy_(double([-4.0, 2.0, 3.0]))
    asked = double([0.1, 0.2, 0.4, 0.1 * math.sqrt(2.0), 0.2 * math.sqrt(2.0), 0.01, 1.0])
    expected = double([-4.0, 2.0, 3.0, -1.0, 2.5, -4.0, 3.0])
    torch.testing.assert_close(budget.cap_at(asked), expected)
    columns = torch.stack((torch.ones(7), torch.full((7,), 0.5), asked.float()), -1).reshape(7, 1, 3)
    torch.testing.assert_close(budget.of(columns), ((expected - 1.0) / 0.5).unsqueeze(1), atol=1e-5, rtol=0.0)


def test_caps_that_are_not_known_yet_are_infinite_at_every_level():
    """Before ENOUGH_EPISODES have been played for a tail there is no cap."""
    config = RiskConfig(objective="cvar", alpha=(0.05, 0.5))
    found = Budget(config).cap_at(torch.from_numpy(config.alphas()))
    assert (found == math.inf).all(), found


def test_a_known_cap_does_not_depend_on_one_that_is_not():
    config = RiskConfig(objective="cvar", alpha=(0.1, 0.4), levels=3)
    budget = Budget(config)
    budget.caps[1] = 2.0
    assert budget.cap_at(torch.from_numpy(config.alphas())).tolist() == [math.inf, 2.0, math.inf]


@pytest.mark.parametrize("alpha", [(0.05, 0.5), (0.1, 1.0)])
@mlp_and_lstm
def test_an_agent_for_many_tails_can_be_trained_from_the_start(kind, alpha):
    model = make(kind, Script(), risk={"objective": "cvar", "alpha": alpha})
    model.learn(2 * T * B)
    assert weights(model.policy).isfinite().all()


def remembered(values, **config):
    risk = objective(**config)
    risk.remember(ended(values))
    return risk


def test_too_few_episodes_move_nothing():
    risk = remembered(range(ENOUGH_EPISODES - 1), alpha=0.5, anneal=0.0)
    metrics = risk.adapt(1.0, np.ones(1))
    assert risk.budget.caps.item() == math.inf
    assert "risk/cap" not in metrics


def test_the_first_cap_is_the_var_and_later_ones_follow_it_slowly():
    risk = remembered(range(100), alpha=0.1, anneal=0.0, cap_step=0.25)
    metrics = risk.adapt(0.5, np.ones(1))
    assert risk.budget.caps.item() == metrics["risk/cap"] == 9.0
    assert metrics["risk/cvar"] == pytest.approx(4.5)
    risk.remember(ended([1000.0] * 1000))
    caps = []
    for _ in range(3):
        risk.adapt(1.0, np.ones(1))
        caps.append(risk.budget.caps.item())
    assert caps == pytest.approx([1000.0 - 991.0 * 0.75**k for k in (1, 2, 3)])


def test_the_first_cap_is_the_var_to_the_last_digit():
    """Caps are float64; 20 million and one is no number of float32."""
    risk = remembered([20_000_001.0] * 20, alpha=0.5, anneal=0.0)
    risk.adapt(1.0, np.ones(1))
    assert risk.budget.caps.item() == 20_000_001.0


@pytest.mark.parametrize(
    ("progress", "power", "cap"), [(0.0, 0.0, 99.0), (0.2, 0.5, 19.0), (0.4, 1.0, 3.0), (0.5, 1.0, 1.0), (0.7, 1.0, 3.0)]
)
def test_the_tail_shrinks_to_alpha_and_the_cap_past_it_and_back(progress, power, cap):
    """alpha^power with alpha = 0.04: first 1, halfway 0.2, then alpha; the cap is the VaR, of smaller tails for a while."""
    risk = remembered(range(100), alpha=0.04, anneal=0.4, anneal_from=1.0)
    metrics = risk.adapt(progress, np.ones(1))
    assert metrics["risk/alpha_annealed"] == pytest.approx(0.04**power)
    assert risk.budget.caps.item() == cap
    assert metrics["risk/cvar"] == pytest.approx(1.5)  # always at the final alpha


def test_afterwards_the_cap_goes_to_where_the_tail_was_best():
    risk = objective(alpha=0.5, anneal=0.5, anneal_from=1.0, cap_step=1.0, window=20)
    played = {0.0: (0.0, 0.0), 0.1: (1.0, 8.0), 0.2: (3.0, 5.0), 0.3: (2.0, 2.0)}  # progress: returns of the two halves
    caps = []
    for progress, halves in played.items():
        risk.remember(ended(halves * 10))
        risk.adapt(progress, np.ones(1))
        caps.append(risk.budget.caps.item())
    # 0.0 sets the first cap; the returns of 0.2 have the best worse half, 3, and were played under the cap of 0.1.
    assert risk.best[0] == pytest.approx([3.0, caps[1]])
    risk.adapt(0.75, np.ones(1))
    assert risk.budget.caps.item() == caps[1] == 8.0
    assert risk.best[0, 0] == pytest.approx(2.0)  # what it brings now is not what it brought then
    # It does not fall below that with the VaR, but rises with it.
    for progress, values, cap in ((0.8, [1.0] * 20, 8.0), (0.9, [-50.0] * 9 + [9.0] * 11, 9.0)):
        risk.remember(ended(values))
        risk.adapt(progress, np.ones(1))
        assert risk.budget.caps.item() == pytest.approx(cap)


@pytest.mark.parametrize("anneal", [0.0, 0.1, 0.3, 0.5, 0.6, 2.0 / 3.0, 0.8, 0.95, 1.0])
@pytest.mark.parametrize("alpha", [0.05, 0.7, 1.0])
def test_for_every_setting_the_tail_never_grows_and_ends_at_alpha(anneal, alpha):
    risk, updates = remembered(range(100), alpha=alpha, anneal=anneal), 40
    tails = [risk.adapt((k + 1) / updates, np.ones(1))["risk/alpha_annealed"] for k in range(updates)]
    assert all(later <= earlier for earlier, later in itertools.pairwise(tails))
    assert tails[-1] == alpha
    assert risk._tail_of_cap(alpha) == alpha  # the search is over as well
    after_a_second_training = risk.adapt(1 / updates, np.ones(1))["risk/alpha_annealed"]
    assert after_a_second_training == alpha


def test_the_unit_is_the_spread_between_states_and_within_them():
    """One half of the periods has ended, the other was cut in states whose distributions are 0 and 6, or 2 and 4."""
    risk = objective(alpha=0.5, anneal=0.0)
    atoms = np.array([[0.0, 6.0], [2.0, 4.0]] * 10)
    risk.remember(FinishedReturns(np.array([1.0, 5.0] * 10), atoms, np.ones(20), np.ones(20)))
    risk.adapt(1.0, np.array([0.5, 0.5]))
    values = np.concatenate((np.repeat([1.0, 5.0], 20), np.repeat([0.0, 6.0, 2.0, 4.0], 10)))
    np.testing.assert_allclose(risk.budget.unit, [values.mean(), values.std()])


def test_the_caps_of_independent_rewards_converge_to_the_var_of_their_sum():
    """21 normal rewards a period: the VaR of their sum is known. The window holds 20,000 periods."""
    rng, period, alpha = np.random.default_rng(0), 21, 0.05
    risk = objective(alpha=alpha, anneal=0.0, period=period, window=20_000)
    for k in range(60):
        sums = rng.normal(0.1, 0.5, (2000, period)).sum(1)
        risk.remember(ended(sums))
        risk.adapt((k + 1) / 60, np.ones(1))
    mean, std = 0.1 * period, 0.5 * math.sqrt(period)
    exact = NormalDist(mean, std).inv_cdf(alpha)
    # Four standard errors of a quantile of 20,000: sqrt(alpha (1 - alpha) / n) over the density there.
    error = math.sqrt(alpha * (1.0 - alpha) / 20_000) / NormalDist(mean, std).pdf(exact)
    assert risk.budget.caps.item() == pytest.approx(exact, abs=4.0 * error)
    np.testing.assert_allclose(risk.budget.unit, [mean, std], atol=4.0 * std / math.sqrt(20_000))


def test_no_annealing_starts_with_the_tail_itself():
    for config in ({"anneal": 0.0}, {"anneal": 1.0, "objective": "constrained", "limit": 0.0}):
        risk = remembered(range(100), alpha=0.04, **config)
        risk.adapt(0.0, np.ones(1))
        assert risk.budget.caps.item() == 3.0


# The constraint.


def test_the_multiplier_grows_while_the_limit_is_missed_and_falls_to_zero_after():
    risk = remembered([-3.0] * 20, objective="constrained", limit=1.0, alpha=0.2, window=20, multiplier_rate=0.5)
    risk.budget.unit[1] = 2.0  # returns that are all equal have no spread, and leave the unit as it is
    found = [risk.adapt(0.5, np.ones(1)) for _ in range(3)]
    multipliers = [metrics["risk/multiplier"] for metrics in found]
    assert multipliers == pytest.approx([1.0, 3.0, 7.0])  # each time 0.5 (1 + itself) (1 + 3) / 2 more
    assert found[0]["risk/missing"] == pytest.approx(4.0)
    assert not any("warn/cvar_limit_infeasible" in metrics for metrics in found)
    risk.remember(ended([5.0] * 20))
    after = [risk.adapt(0.5, np.ones(1))["risk/multiplier"] for _ in range(4)]
    assert after == pytest.approx([0.0, 0.0, 0.0, 0.0])  # 7 - 0.5 (1 + 7) (5 - 1) / 2 is below 0
    risk.multiplier = 7.0
    risk.remember(ended([2.0] * 20))
    assert risk.adapt(0.5, np.ones(1))["risk/multiplier"] == pytest.approx(5.0)


def test_a_limit_that_cannot_be_reached_is_reported():
    risk = remembered([0.0] * 20, objective="constrained", limit=1.0, alpha=0.2, multiplier_rate=HOPELESS_MULTIPLIER * 0.6)
    warned = ["warn/cvar_limit_infeasible" in risk.adapt(0.5, np.ones(1)) for _ in range(3)]
    assert warned == [False, True, True]


# State and settings.


def test_the_state_survives_a_round_trip():
    risk = objective(objective="constrained", limit=5.0, alpha=0.2)
    for _ in range(3):
        risk.remember(FinishedReturns(np.full(5, 1.5), np.tile([1.0, 2.0, 3.0], (5, 1)), np.ones(5), np.ones(5)))
    risk.adapt(0.5, np.full(3, 1.0 / 3.0))
    assert risk.multiplier > 0.0
    twin = objective(objective="constrained", limit=5.0, alpha=0.2)
    twin.load_state_dict(risk.state_dict())
    twin.budget.load_state_dict(risk.budget.state_dict())
    assert twin.state_dict() == risk.state_dict()
    masses = np.full(3, 1.0 / 3.0)
    assert twin.adapt(0.7, masses) == risk.adapt(0.7, masses)
    assert twin.returns[0].window == risk.config.window


def test_the_state_of_another_number_of_tails_is_refused():
    with pytest.raises(ValueError, match="zip"):
        objective(**CONDITIONED).load_state_dict(objective(alpha=0.1).state_dict())


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        ({"objective": "var"}, "objective"),
        ({"alpha": 0.0}, "alpha"),
        ({"alpha": 1.1}, "alpha"),
        ({"alpha": (0.5, 0.5)}, "alpha"),
        ({"alpha": (0.5, 0.1)}, "alpha"),
        ({"alpha": (0.0, 0.5)}, "alpha"),
        ({"weight": 1.1}, "weight"),
        ({"weight": math.nan}, "weight"),
        ({"objective": "constrained"}, "limit"),
        ({"objective": "constrained", "limit": math.inf}, "limit"),
        ({"objective": "constrained", "limit": 1.0, "alpha": (0.1, 0.5)}, "alpha"),
        ({"anneal": -0.1}, "anneal"),
        ({"cap_step": 0.0}, "cap_step"),
        ({"window": ENOUGH_EPISODES - 1}, "window"),
        ({"levels": 1}, "levels"),
        ({"multiplier_rate": 0.0}, "multiplier_rate"),
        ({"quantile": 0.1}, "quantile"),
    ],
)
def test_impossible_settings_are_refused_by_name(settings_, message):
    with pytest.raises(ValidationError, match=message):
        RiskConfig(**settings_)
    with pytest.raises(ValueError, match=message):
        build(RiskConfig, settings_)


@pytest.mark.parametrize(("alpha", "observed"), [(0.2, True), ((0.05, 1.0), True), ((0.05, 1.0), False)])
@pytest.mark.parametrize("found", [True, False], ids=["caps", "no caps yet"])
@pytest.mark.parametrize("period", [None, 21], ids=["episodes", "periods"])
def test_the_compiled_budget_is_the_budget(alpha, observed, found, period):
    budget = Budget(RiskConfig(objective="cvar", alpha=alpha, observe_return=observed, period=period))
    rng = np.random.default_rng(0)
    caps = np.sort(rng.normal(size=len(budget.caps))) if found else np.full(len(budget.caps), np.inf)
    budget.caps.copy_(torch.from_numpy(caps))
    alphas = np.concatenate((np.exp(budget.log_alphas.numpy()), rng.uniform(0.01, 1.0, 200)))
    columns = np.column_stack((rng.normal(size=len(alphas)), rng.uniform(1e-30, 1.0, len(alphas)), alphas))[:, : budget.columns]
    columns[0, 1] = 0.0
    budget.unit.copy_(torch.tensor([0.3, 1.7]))
    tensor = torch.from_numpy(columns.astype(np.float32))
    shown = budget(tensor)
    assert shown.shape == (len(alphas), budget.features)
    compiled = torch.empty(shown.shape)
    budget.rows(tensor.numpy(), compiled.numpy())
    torch.testing.assert_close(compiled, shown, rtol=1e-5, atol=1e-6)
