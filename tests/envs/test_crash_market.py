"""The crash market's optimum, against brute force over positions and against play."""

import numpy as np
import pytest

from tailguard.envs.crash_market import CrashMarket


def worst_share(results: np.ndarray, probabilities: np.ndarray, alpha: float) -> float:
    """Return the CVaR of a discrete distribution, atom by atom."""
    left, total = alpha, 0.0
    for result, probability in sorted(zip(results, probabilities, strict=True)):
        taken = min(left, probability)
        total, left = total + taken * result, left - taken
    return total / alpha


@pytest.mark.parametrize("alpha", [1.0, 0.5, 0.2, 0.05, 0.01])
@pytest.mark.parametrize("settings", [{}, {"premium": 0.3, "crash_probability": 0.1, "impact": 2.0}, {"impact": 3.0}])
def test_no_position_has_a_higher_cvar(settings: dict[str, float], alpha: float) -> None:
    market = CrashMarket(**settings)
    q = market.crash_probability
    positions = np.linspace(0.0, 1.0, 2001)
    quiet = market.premium * positions
    crash = quiet - market.impact * positions**2 / 2.0
    by_position = [worst_share(np.array(pair), np.array([1.0 - q, q]), alpha) for pair in zip(quiet, crash, strict=True)]
    best = int(np.argmax(by_position))
    solution = market.solve(alpha)
    assert solution.position == pytest.approx(positions[best], abs=0.5 / 2000 + 1e-9)
    assert by_position[best] <= solution.objective + 1e-12
    assert solution.objective == pytest.approx(by_position[best], abs=market.impact / 2.0 * 0.001**2)
    for position, value in list(zip(positions, by_position, strict=True))[::200]:
        assert market.cvar(position, alpha) == pytest.approx(value, abs=1e-12)


def test_play_has_the_distribution_that_was_solved() -> None:
    market = CrashMarket(200_000, seed=1)
    market.reset()
    position = 0.3
    _, rewards, terminated, truncated, _ = market.step(np.full((market.num_envs, 1), 2.0 * position - 1.0))
    assert terminated.all()
    assert not truncated.any()
    values, counts = np.unique(rewards.round(12), return_counts=True)
    assert values == pytest.approx([0.3 - 25.0 * 0.09 / 2.0, 0.3])
    shares = counts / market.num_envs
    assert shares[0] == pytest.approx(0.05, abs=4.0 * np.sqrt(0.05 * 0.95 / market.num_envs))
    assert market.cvar(position) == pytest.approx(0.95 * values[1] + 0.05 * values[0])


def test_a_smaller_tail_never_asks_for_a_larger_position() -> None:
    positions = [CrashMarket().solve(alpha).position for alpha in (1.0, 0.5, 0.2, 0.05, 0.02)]
    assert positions == sorted(positions, reverse=True)
    assert positions[-2] == positions[-1] == pytest.approx(1.0 / 25.0)


@pytest.mark.parametrize(
    ("name", "value"), [("premium", 0.0), ("crash_probability", 0.0), ("crash_probability", 1.0), ("impact", -1.0)]
)
def test_impossible_settings_are_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        CrashMarket(**{name: value})


def test_impossible_questions_are_refused() -> None:
    with pytest.raises(ValueError, match="alpha"):
        CrashMarket().solve(0.0)
    with pytest.raises(ValueError, match="position"):
        CrashMarket().cvar(1.1)
