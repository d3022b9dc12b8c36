"""The perturbation of CartPole's observations at which no linear controller holds the pole: `python benchmarks/pole_limits.py`.

A linear controller pushes to the right where w . s > 0. Within a ball of radius eps (largest move of a column, in the units of
that column) an adversary can change w . s by eps sum |w_i| u_i and no more, so its worst move is known exactly. Random
controllers play against it: moved towards the other choice always, at a random share of the steps, three times out of four (and
the other way otherwise), to one side always, and not at all. The worst of the five counts. What remains at a radius says how
much room there is for an agent without memory to be robust there.
"""

import argparse

import numpy as np

# What is drawn: position, velocity, angle and rate count about as much as in controllers that work.
TYPICAL = np.array([0.1, 0.2, 1.0, 0.5])
# Standard deviations of the observations of a PPO agent that plays well (seed 100, 200,000 steps).
DEVIATIONS = np.array([0.40, 0.33, 0.026, 0.24])
ADVERSARIES = ("always", "at times", "mostly", "to one side", "never")


def moved(choice: np.ndarray, reach: np.ndarray, adversary: str, rate: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return w . s as the controller sees it."""
    against = -np.sign(choice) * reach
    if adversary == "always":
        return choice + against
    if adversary == "at times":
        return choice + against * (rng.random(choice.shape) < rate)
    if adversary == "mostly":
        return choice + against * np.where(rng.random(choice.shape) < 0.75, 1.0, -1.0)
    return choice - reach if adversary == "to one side" else choice


def step(state: np.ndarray, right: np.ndarray) -> np.ndarray:
    """CartPole-v1's equations of motion, ``state[..., 4]``."""
    x, speed, angle, rate = np.moveaxis(state, -1, 0)
    cos, sin = np.cos(angle), np.sin(angle)
    push = (np.where(right, 10.0, -10.0) + 0.05 * rate**2 * sin) / 1.1
    turn = (9.8 * sin - cos * push) / (0.5 * (4.0 / 3.0 - 0.1 * cos**2 / 1.1))
    pull = push - 0.05 * turn * cos / 1.1
    return np.stack((x + 0.02 * speed, speed + 0.02 * pull, angle + 0.02 * rate, rate + 0.02 * turn), -1)


def returns(weights: np.ndarray, reach: np.ndarray, adversary: str, episodes: int, rng: np.random.Generator) -> np.ndarray:
    """Mean return of each controller ``weights[n, 4]``, at most 500."""
    state = rng.uniform(-0.05, 0.05, (len(weights), episodes, 4))
    upright, total = np.ones(state.shape[:2], bool), np.zeros(state.shape[:2])
    rate = rng.random(state.shape[:2])
    for _ in range(500):
        choice = np.einsum("nec,nc->ne", state, weights)
        state = step(state, moved(choice, reach[:, None], adversary, rate, rng) > 0.0)
        total += upright
        upright &= (np.abs(state[..., 0]) < 2.4) & (np.abs(state[..., 2]) < np.radians(12.0))
    return total.mean(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--controllers", type=int, default=20_000)
    parser.add_argument("--episodes", type=int, default=4)
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    weights = TYPICAL * np.exp(1.2 * rng.normal(size=(options.controllers, 4)))
    print(f"numpy {np.__version__}, seed 0, {options.controllers:,} controllers, {options.episodes} episodes each\n")
    print("| units | epsilon | keep 400 of 500 | best |\n|---|---|---|---|")
    for name, units, radii in (("raw", np.ones(4), (0.06, 0.08, 0.1)), ("deviations", DEVIATIONS, (0.8, 1.0, 1.2))):
        for radius in radii:
            reach = radius * np.abs(weights) @ units
            worst = np.min([returns(weights, reach, one, options.episodes, rng) for one in ADVERSARIES], axis=0)
            print(f"| {name} | {radius} | {(worst >= 400.0).mean():.2%} | {worst.max():.0f} |", flush=True)


if __name__ == "__main__":
    main()
