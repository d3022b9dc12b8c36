"""Risk-averse objectives, learnt on a game whose return distribution under any policy can be computed."""

import numpy as np
import pytest
import torch
from test_risk import ended

from tailguard import DistributionalPPO
from tailguard.market import BettingGame
from tailguard.ppo.config import RiskConfig
from tailguard.ppo.risk import Budget, RiskObjective
from tailguard.ppo.rollout import _same_scale
from tailguard.ppo.schedules import LinearSchedule

ALPHA = 0.2


def trained(risk: dict[str, object], steps: int) -> DistributionalPPO:
    rollouts = steps // (24 * 256)
    model = DistributionalPPO(
        "MlpPolicy",
        BettingGame(256, seed=0),
        n_steps=24,
        batch_size=3072,
        gamma=1.0,
        gae_lambda=0.98,
        learning_rate=LinearSchedule(4e-3, 0.0),
        entropy={"initial": 0.05, "final": 0.0, "decay_steps": int(0.9 * rollouts)},
        critic={"twin": False},
        normalize_obs=True,
        risk=risk,
        seed=0,
    )
    return model.learn(steps)


def exact_law(model: DistributionalPPO) -> tuple[np.ndarray, np.ndarray]:
    """Every way that six rounds can go with the most likely actions, one by one: results and probabilities."""
    game = BettingGame()
    nodes = [(float(game.chips), 1.0)]
    for played in range(game.rounds):
        chips = np.array([amount for amount, _ in nodes])
        columns = [chips / game.cap, np.full(len(chips), played / game.rounds)]
        if model.risk_config.return_augmented:
            columns += [chips - game.chips, np.ones(len(chips))]
        bets = model.predict(np.column_stack(columns).astype(np.float32), deterministic=True)[0]
        won, lost = game.outcomes(chips, bets)
        p = game.win_probability
        nodes = [(up, mass * p) for up, (_, mass) in zip(won, nodes, strict=True)] + [
            (down, mass * (1.0 - p)) for down, (_, mass) in zip(lost, nodes, strict=True)
        ]
    results, masses = np.array(nodes).T
    order = np.argsort(results)
    return results[order] - game.chips, masses[order]


def worst(results: np.ndarray, masses: np.ndarray, alpha: float) -> float:
    below = np.cumsum(masses) - masses
    return float(np.clip(alpha - below, 0.0, masses) @ results / alpha)


def test_the_tail_is_reached_that_the_mean_gives_away() -> None:
    neutral = exact_law(trained({"objective": "neutral"}, 150_000))
    careful = exact_law(trained({"objective": "cvar", "alpha": ALPHA, "anneal": 0.4}, 200_000))
    best_mean, best_tail = BettingGame().solve(), BettingGame().solve(ALPHA)
    assert neutral[1].sum() == pytest.approx(1.0)
    assert neutral[0] @ neutral[1] > 0.9 * best_mean.mean
    assert worst(*careful, ALPHA) > 0.6 * best_tail.objective
    # Neither can have what the other has: the best mean has no more than this in the tail, and the best tail this mean.
    assert worst(*neutral, ALPHA) < 0.6 * best_tail.objective
    assert careful[0] @ careful[1] < 0.6 * best_mean.mean
    assert worst(*careful, ALPHA) <= best_tail.objective + 1e-9


def test_caps_between_levels_are_interpolated_and_infinite_ones_stay_so() -> None:
    budget = Budget(RiskConfig(objective="cvar", alpha=(0.05, 0.8), levels=3))
    alphas = torch.tensor([0.01, 0.05, 0.2, 0.8, 1.0], dtype=torch.float64)
    assert torch.equal(budget.cap_at(alphas), torch.full((5,), float("inf"), dtype=torch.float64))
    budget.caps.copy_(torch.tensor([1.0, 3.0, 7.0]))
    assert budget.cap_at(alphas).tolist() == pytest.approx([1.0, 1.0, 3.0, 7.0, 7.0])
    assert budget.cap_at(torch.tensor([0.1, 0.4], dtype=torch.float64)).tolist() == pytest.approx([2.0, 5.0])


def test_the_policy_can_tell_small_budgets_apart() -> None:
    """Whatever the unit, a budget used up is 0, and one per cent of a standard deviation is seen."""
    budget = Budget(RiskConfig(objective="cvar", alpha=0.2))
    budget.caps.fill_(10.0)
    columns = torch.tensor([[10.0, 1.0], [9.0, 1.0], [11.0, 1.0], [-1e9, 1.0]])
    budget.unit.copy_(torch.tensor([0.0, 100.0]))
    shown = budget(columns)
    assert shown.shape == (4, budget.features)
    used_up, little, overdrawn, plenty = shown[:, 1].tolist()
    assert used_up == 0.0
    assert little == pytest.approx(-overdrawn)
    assert little > 0.2
    assert np.isfinite(plenty)


def test_every_alpha_has_advantages_of_one_scale() -> None:
    generator = torch.Generator().manual_seed(0)
    alphas = torch.tensor([0.05, 0.5]).repeat(40, 8)
    advantages = torch.randn(40, 16, generator=generator) * torch.where(alphas < 0.1, 0.01, 30.0) + alphas
    scaled = _same_scale(advantages, torch.ones(40, 16), alphas)
    for alpha in (0.05, 0.5):
        one, raw = scaled[alphas == alpha], advantages[alphas == alpha]
        assert one.mean().item() == pytest.approx(0.0, abs=1e-5)
        assert one.std(correction=0).item() == pytest.approx(1.0, abs=1e-3)
        assert torch.equal(one.argsort(), raw.argsort())


def test_a_limit_out_of_reach_is_reported_and_one_within_reach_is_not() -> None:
    masses = np.ones(1)
    for limit, hopeless in ((30.0, True), (5.0, False)):  # the worst fifth of 0 .. 99 has the mean 9.5
        config = RiskConfig(objective="constrained", alpha=ALPHA, limit=limit)
        objective = RiskObjective(config, Budget(config))
        objective.remember(ended(np.arange(100.0)))
        seen = [objective.adapt(0.0, masses) for _ in range(60)]
        assert seen[-1]["risk/cvar"] == pytest.approx(9.5)
        assert ("warn/cvar_limit_infeasible" in seen[-1]) is hopeless
        assert "warn/cvar_limit_infeasible" not in seen[0]
        assert (objective.multiplier > 0.0) is hopeless


def test_the_tail_starts_where_it_is_told_but_not_below_alpha() -> None:
    """Halfway it is the geometric mean of its start and alpha."""
    masses = np.ones(1)
    for start, first, at_half in ((1.0, 1.0, 0.1), (0.04, 0.04, 0.02), (0.001, 0.01, 0.01)):
        config = RiskConfig(objective="cvar", alpha=0.01, anneal=0.5, anneal_from=start)
        objective = RiskObjective(config, Budget(config))
        objective.remember(ended(np.arange(1000.0)))
        tails = [objective.adapt(progress, masses)["risk/alpha_annealed"] for progress in (0.0, 0.25, 0.5, 1.0)]
        assert tails == pytest.approx([first, at_half, 0.01, 0.01])
    config = RiskConfig(objective="cvar", alpha=0.01, anneal=0.5, anneal_from=0.5)
    objective = RiskObjective(config, Budget(config))
    objective.remember(ended(np.arange(1000.0)))
    assert objective.adapt(0.0, masses)["risk/cap"] == 499.0  # the median, as the first cap is taken at once
