"""Risk-averse objectives: CVaR of a period's return by return capping, alone, mixed with the mean, or as a constraint.

Rockafellar and Uryasev (2000): CVaR_a(R) = max_C { C + E[min(R - C, 0)] / a }, reached at C = VaR_a(R). For a given cap C the
policy has to maximise E[min(R, C)], an ordinary problem once it observes its running return (Baeuerle and Ott 2011; return
capping, Mead et al. 2025); C follows the policy's VaR slowly.

R is the return of a period, the plain sum of its rewards; or, without a period, that of an episode, discounted by the agent's
own gamma. In a state with running return G and discount D (gamma^t, and 1 inside a period), the *budget* c = (C - G) / D caps
what the return from here to the end, Z, still counts. Then min(Z, c) obeys Bellman's equation with the plain rewards, and,
shifted so that the value after the end is 0,

    reward  min(r, c) - min(0, c)        value  E[min(Z, c)] - min(0, c).

The critics learn the distribution of Z itself, whatever the objective. So their predicted tail is not distorted, one set of
critics serves every cap and every mixture, and moving the cap costs them nothing. The end of a period is an end for returns,
values and caps, and for nothing else: the episode continues, with its position and recurrent state. A period that is cut by
the end of a truncated episode counts with its whole predicted distribution. One that had begun before the episode is learnt
from, but is no sample of a period's return: it has fewer bars, and the VaR is that of whole periods.

Small tails contain few periods, and an agent that starts out careful never finds what it could win. So alpha is annealed: it
begins at `anneal_from`, half of the periods or all of them, and shrinks to its final value, where it stays.

The best policy for a cap has no reason to earn more than that. So a cap that follows the VaR can fall but hardly rise, and
stays at the first local maximum of the expression above. Therefore the cap falls further for a while, to the VaR of smaller
tails, the objective reached with every cap is recorded, and then the cap returns to the best of them. From there it rises with
the VaR, but does not fall.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tailguard.jit import decorators
from tailguard.ppo.config import ENOUGH_EPISODES, RiskConfig

# The budget is an input of the policy: in standard deviations of the return, clipped to this many.
BUDGET_REACH = 4.0
# The best policy changes most where the budget is nearly used up. So a second input shows it linearly up to this share of a
# standard deviation and like a logarithm beyond: asinh(c / (FINE std)), which is about 3 FINE_UNIT at BUDGET_REACH.
FINE = 0.02
FINE_UNIT = 2.0
# Budgets beyond this are as good as infinite.
FARTHEST = 1e30
# An alpha this near to a level, as a share of the gap between two, is that level: it may have been rounded to float32.
AT_LEVEL = 1e-6
# In logarithms, the cap follows the VaR of tails up to this many times the way to alpha before the best cap is taken.
PAST = 1.5
# A spread of less than this share of the mean is one of rounding.
ROUNDING = 1e-9
# A constraint that outweighs the mean this many times and still is not met cannot be met.
HOPELESS_MULTIPLIER = 100.0

Floats = NDArray[np.float64]

compiled, _ = decorators()


class Budget(nn.Module):
    """The caps, and the policy's inputs that depend on them.

    Return-augmented observations carry, after the environment's own columns, the running return, its discount or the share of
    the period that is left, and alpha for an alpha-conditioned policy (see envs/return_observer.py).

    :param config: the objective.
    """

    caps: Tensor
    log_alphas: Tensor
    alpha: Tensor  # used where the observation has no alpha
    unit: Tensor  # mean and standard deviation of the return of a period or episode; it changes between rollouts only

    def __init__(self, config: RiskConfig) -> None:
        super().__init__()
        self.alpha_conditioned, self.observed = config.alpha_conditioned, config.observe_return
        self.per_period = config.counted_over is not None
        self.columns = (3 if config.alpha_conditioned else 2) if config.return_augmented else 0
        shown = (3 if self.per_period else 2) if config.observe_return else 0
        self.features = shown + int(config.alpha_conditioned) if config.return_augmented else 0
        alphas = torch.from_numpy(config.alphas())
        self.register_buffer("log_alphas", alphas.log(), persistent=False)
        self.register_buffer("alpha", alphas[0].clone())
        self.register_buffer("caps", torch.full((len(alphas),), float("inf"), dtype=torch.float64))
        self.register_buffer("unit", torch.tensor([0.0, 1.0], dtype=torch.float64))

    def of(self, columns: Tensor) -> Tensor:
        """Return the budget c = (C - G) / D for appended columns ``[..., 2 or 3]``, as ``[...]`` in float64."""
        cap = self.cap_at(columns[..., 2].double()) if self.alpha_conditioned else self.caps[0]
        left = cap - columns[..., 0].double()
        # Padding of a sequence is 0 in every column, and must not become NaN.
        return left if self.per_period else left / self.discount(columns).clamp(min=1e-30)

    def discount(self, columns: Tensor) -> Tensor:
        """Return the discount of the next reward, ``[...]`` in float64; inside a period it is 1."""
        second = columns[..., 1].double()
        return torch.ones_like(second) if self.per_period else second

    def cap_at(self, alpha: Tensor) -> Tensor:
        """Return the cap for any alpha in the range, interpolated in log alpha."""
        place = alpha.log().clamp(self.log_alphas[0], self.log_alphas[-1])
        above = (place[..., None] > self.log_alphas).sum(-1).clamp(1, len(self.caps) - 1)  # a search that ONNX can express
        low, high = self.log_alphas[above - 1], self.log_alphas[above]
        share = (place - low) / (high - low)
        # Caps may still be infinite, and infinity times a weight of 0 is NaN: at a level only its own cap counts.
        between = self.caps[above] * share + self.caps[above - 1] * (1.0 - share)
        at_lower, at_upper = share < AT_LEVEL, share > 1.0 - AT_LEVEL
        return torch.where(at_lower, self.caps[above - 1], torch.where(at_upper, self.caps[above], between))

    def forward(self, columns: Tensor) -> Tensor:
        """Return the policy's inputs: the budget in units of the return (coarse, fine), what is left of the period, alpha."""
        features, mean, std = [], self.unit[0], self.unit[1]
        if self.observed:
            budget = self.of(columns)
            features.append(((budget - mean) / std).clamp(-BUDGET_REACH, BUDGET_REACH).float())
            features.append(torch.asinh((budget / std).clamp(-BUDGET_REACH, BUDGET_REACH).float() / FINE) / FINE_UNIT)
            if self.per_period:
                features.append(columns[..., 1].float())
        if self.alpha_conditioned:
            low, high = self.log_alphas[0], self.log_alphas[-1]
            features.append((2.0 * (columns[..., 2].double().log().clamp(low, high) - low) / (high - low) - 1.0).float())
        return torch.stack(features, dim=-1)

    def rows(self, columns: NDArray[np.float32], features: NDArray[np.float32]) -> None:
        """Fill `features` with :meth:`forward` of ``[B, 2 or 3]``, compiled.

        For acting: the seventeen small tensor operations of :meth:`forward` take longer than the policy itself.
        """
        limits = (BUDGET_REACH, FINE, FINE_UNIT, AT_LEVEL)
        tables = (self.caps.numpy(), self.log_alphas.numpy(), self.unit.numpy())
        budget_rows(columns, *tables, limits, self.observed, self.per_period, features)


@compiled
def budget_rows(
    columns: NDArray[np.float32],
    caps: NDArray[np.float64],
    log_alphas: NDArray[np.float64],
    unit: NDArray[np.float64],
    limits: tuple[float, float, float, float],
    observed: bool,
    per_period: bool,
    features: NDArray[np.float32],
) -> None:
    """Fill `features`, ``[B, F]``, with :meth:`Budget.forward`.

    :param columns: ``[B, 2 or 3]``: running return, discount or share of the period that is left, alpha.
    :param caps: of each level; with one level there is no alpha in the columns.
    :param log_alphas: of the levels, rising.
    :param unit: ``[2]`` mean and standard deviation of the return.
    :param limits: BUDGET_REACH, FINE, FINE_UNIT and AT_LEVEL.
    :param observed: True if the budget is among the features; alpha always is where there are several levels.
    :param per_period: True if returns are those of periods, which are not discounted.
    """
    reach, fine, fine_unit, near = limits
    mean, std = unit[0], unit[1]
    levels = len(caps)
    low, high = log_alphas[0], log_alphas[levels - 1]
    for row in range(len(columns)):
        cap, place = caps[0], low
        if levels > 1:
            place = min(max(math.log(columns[row, 2]), low), high)
            above = 1
            while above < levels - 1 and place > log_alphas[above]:
                above += 1
            share = (place - log_alphas[above - 1]) / (log_alphas[above] - log_alphas[above - 1])
            if share < near:
                cap = caps[above - 1]
            elif share > 1.0 - near:
                cap = caps[above]
            else:
                cap = caps[above] * share + caps[above - 1] * (1.0 - share)
        column = 0
        if observed:
            budget = cap - columns[row, 0]
            if not per_period:
                budget /= max(np.float64(columns[row, 1]), 1e-30)
            features[row, 0] = min(max((budget - mean) / std, -reach), reach)
            features[row, 1] = math.asinh(min(max(budget / std, -reach), reach) / fine) / fine_unit
            column = 2
            if per_period:
                features[row, 2] = columns[row, 1]
                column = 3
        if levels > 1:
            features[row, column] = 2.0 * (place - low) / (high - low) - 1.0


class FinishedReturns(NamedTuple):
    """Returns of the periods, or of the episodes where there are none, that ended in a rollout.

    :param totals: ``[E]``, those that came to their end.
    :param atoms: ``[C, M]``, atoms of those that a truncation has cut, as the critics predict them.
    :param totals_alpha: ``[E]``, the alpha of the first.
    :param atoms_alpha: ``[C]``, the alpha of the second.
    """

    totals: Floats
    atoms: Floats
    totals_alpha: Floats
    atoms_alpha: Floats


class ReturnWindow:
    """The last returns of periods or episodes: one number where it is known, all atoms where a truncation has cut it.

    :param window: number of returns.
    """

    def __init__(self, window: int) -> None:
        self.window = window
        self.rollouts: deque[tuple[Floats, Floats]] = deque()  # totals ``[E]``, atoms ``[C, M]``

    def __len__(self) -> int:
        """Return the number of returns."""
        return sum(len(totals) + len(atoms) for totals, atoms in self.rollouts)

    def add(self, totals: Floats, atoms: Floats) -> None:
        """Add the returns of a rollout, and drop the oldest beyond the window."""
        if len(totals) + len(atoms):
            self.rollouts.append((totals, atoms))
        surplus = len(self) - self.window
        while surplus > 0:
            totals, atoms = self.rollouts.popleft()
            if len(totals) + len(atoms) > surplus:
                self.rollouts.appendleft((totals[surplus:], atoms[max(surplus - len(totals), 0) :]))
            surplus -= len(totals) + len(atoms)

    def distribution(self, masses: Floats) -> tuple[Floats, Floats]:
        """Return all values with their weights: every return weighs the same.

        :param masses: ``[M]`` of the atoms of truncated returns.
        """
        ended, cut = (sum(len(rollout[kind]) for rollout in self.rollouts) for kind in range(2))
        values = np.concatenate([rollout[kind].ravel() for kind in range(2) for rollout in self.rollouts])
        return values, np.concatenate((np.ones(ended), np.tile(masses, cut))) / (ended + cut)

    def moments(self, masses: Floats) -> tuple[float, float]:
        """Return mean and variance: the spread between the states in which periods begin, and that within them."""
        values, weights = self.distribution(masses)
        mean = float(weights @ values)
        return mean, float(weights @ (values - mean) ** 2)

    def tails(self, alphas: Sequence[float], masses: Floats) -> list[tuple[float, float]]:
        """Return VaR and CVaR at each of `alphas`.

        :param masses: ``[M]`` of the atoms of truncated returns.
        """
        values, weights = self.distribution(masses)
        order = np.argsort(values)
        values, weights = values[order], weights[order]
        upto = np.cumsum(weights)
        tails = []
        for alpha in alphas:
            var = values[min(int(np.searchsorted(upto, alpha - 1e-12)), len(values) - 1)]
            in_tail = np.clip(alpha - (upto - weights), 0.0, weights)
            tails.append((float(var), float(in_tail @ values / in_tail.sum())))
        return tails

    def tail(self, alpha: float, masses: Floats) -> tuple[float, float]:
        """Return VaR and CVaR at one level."""
        return self.tails((alpha,), masses)[0]


class RiskObjective:
    """Rewards and values of the risk objective, and the controllers of its caps and of its multiplier.

    :param config: the objective.
    :param budget: the caps, which are part of the policy.
    """

    def __init__(self, config: RiskConfig, budget: Budget) -> None:
        self.config, self.budget = config, budget
        self.alphas = config.alphas()
        self.returns = [ReturnWindow(config.window) for _ in self.alphas]
        self.multiplier = 0.0
        # Of the way from anneal_from to alpha, in logarithms; PAST when the search is over. It never falls.
        self.share = 0.0 if config.searches else PAST
        self.recent = np.full((len(self.alphas), 2), -np.inf)  # per level, smoothed: the objective reached, and the cap
        self.best = np.full((len(self.alphas), 2), -np.inf)  # the same at the best cap

    def _share(self, progress: float) -> float:
        """Return how far annealing and search are: to alpha after the share `anneal`, and past it only while there is time.

        The search takes half as long as the annealing, or half of what is left of the training, whichever is less.
        """
        if not self.config.searches:
            return PAST
        anneal = self.config.anneal
        return progress / anneal if progress < min(PAST * anneal, 0.5 * (1.0 + anneal)) else PAST

    @property
    def _searched(self) -> bool:
        """True when the search for the best cap is over."""
        return self.share == PAST

    def _annealed(self, alpha: Any) -> Any:
        """Return the tail that is served at present, for a number or a tensor: it shrinks to alpha evenly in the logarithm."""
        share = min(self.share, 1.0)
        start = alpha.clamp(min=self.config.anneal_from) if isinstance(alpha, Tensor) else max(self.config.anneal_from, alpha)
        return alpha * (start / alpha) ** (1.0 - share)

    def _tail_of_cap(self, alpha: float) -> float:
        """Return the tail whose VaR the cap follows: the annealed one, and smaller ones during the search."""
        return float(alpha**self.share if 1.0 < self.share < PAST else self._annealed(alpha))

    def weights(self, columns: Tensor) -> tuple[float, Tensor | float]:
        """Return the weights of the mean and of the capped return in the objective."""
        config = self.config
        alpha = columns[..., 2].double() if self.budget.alpha_conditioned else float(self.alphas[0])
        if config.objective == "cvar":
            return 0.0, 1.0
        if config.objective == "mean_cvar":
            return 1.0 - config.weight, config.weight / self._annealed(alpha)
        return 1.0, self.multiplier / alpha

    def rewards(self, rewards: Tensor, columns: Tensor) -> Tensor:
        """Return the rewards of the objective, ``[T, B]``: min(r, c) - min(0, c) where the return is capped.

        :param rewards: ``[T, B]``, of the environment.
        :param columns: ``[T, B, 2 or 3]``, appended to the observations before them.
        """
        mean, tail = self.weights(columns)
        budget, plain = self.budget.of(columns), rewards.double()
        capped = torch.minimum(plain, budget) - budget.clamp(max=0.0)
        return (mean * plain + tail * capped).to(rewards)

    def values(self, atoms: Tensor, masses: Tensor, columns: Tensor) -> Tensor:
        """Return the objective's value of states, ``[K, ...]``: E[min(Z, c)] - min(0, c) where the return is capped.

        :param atoms: ``[K, ..., M]`` of the return Z from these states.
        :param masses: ``[M]`` of the atoms.
        :param columns: ``[..., 2 or 3]``, appended to the observations of these states.
        """
        mean, tail = self.weights(columns)
        # E[min(X, b) - min(b, 0)], subtracted inside: a budget of -10^30 must not swallow X in single precision.
        limit = self.budget.of(columns).clamp(-FARTHEST, FARTHEST).to(atoms).unsqueeze(-1)
        shift = limit.clamp(max=0.0)
        capped = torch.minimum(atoms - shift, limit - shift) @ masses
        return (mean * (atoms @ masses) + tail * capped).to(atoms) if mean else (tail * capped).to(atoms)

    def remember(self, finished: FinishedReturns) -> None:
        """Add the returns of a rollout, each at the level nearest to its alpha."""
        nearest = [np.abs(np.log(alphas)[:, None] - np.log(self.alphas)).argmin(1) for alphas in finished[2:]]
        for level, returns in enumerate(self.returns):
            returns.add(finished.totals[nearest[0] == level], finished.atoms[nearest[1] == level])

    def adapt(self, progress: float, masses: Floats) -> dict[str, float]:
        """Adapt caps, their unit and the multiplier after a rollout.

        :param progress: share of the training that is done. One that falls, as in a second training, leaves the tail where it
            is.
        :param masses: ``[M]`` of the atoms of a return distribution.
        :returns: metrics.
        """
        config = self.config
        metrics: dict[str, float] = {}
        self.share = max(self.share, self._share(progress))
        self._measure_unit(masses)
        for level, (alpha, returns) in enumerate(zip(self.alphas, self.returns, strict=True)):
            if len(returns) < ENOUGH_EPISODES:
                continue
            (var, _), (_, cvar), (_, mean) = returns.tails((self._tail_of_cap(alpha), alpha, 1.0), masses)
            cap = self.budget.caps[level]
            if cap.isfinite() and config.searches:
                self._compare(level, cap.item(), mean, cvar)
                var = max(var, self.best[level, 1]) if self._searched else var
            cap.copy_(cap + config.cap_step * (var - cap) if cap.isfinite() else torch.tensor(var, dtype=cap.dtype))
            name = f"_{alpha:.3g}" if config.alpha_conditioned else ""
            metrics |= {f"risk/cap{name}": cap.item(), f"risk/cvar{name}": cvar}
        if config.objective == "constrained" and len(self.returns[0]) >= ENOUGH_EPISODES:
            assert config.limit is not None
            missing = config.limit - metrics["risk/cvar"]
            # In proportion to one plus itself, so that it can become large, and fall again, within few rollouts.
            std, rate = self.budget.unit[1].item(), config.multiplier_rate
            self.multiplier = max(0.0, self.multiplier + rate * (1.0 + self.multiplier) * missing / std)
            metrics |= {"risk/multiplier": self.multiplier, "risk/missing": missing}
            if missing > 0.0 and self.multiplier > HOPELESS_MULTIPLIER:
                metrics["warn/cvar_limit_infeasible"] = 1.0
        metrics["risk/alpha_annealed"] = float(self._annealed(self.alphas[0]))
        return metrics

    def _measure_unit(self, masses: Floats) -> None:
        """Take mean and standard deviation of the return as the unit, over the returns of all levels."""
        known = [returns.moments(masses) for returns in self.returns if len(returns) >= ENOUGH_EPISODES]
        if known:
            means, variances = np.array(known).T
            std = float(np.sqrt(variances.mean() + means.var()))
            if std > ROUNDING * abs(float(means.mean())):  # returns that are all equal have no unit
                self.budget.unit.copy_(torch.tensor([float(means.mean()), std]))

    def _compare(self, level: int, cap: float, mean: float, cvar: float) -> None:
        """Record the objective reached with the cap of a level, and whether it is the best so far."""
        weight, step = self.config.weight if self.config.objective == "mean_cvar" else 1.0, self.config.cap_step
        now, recent, best = np.array([(1.0 - weight) * mean + weight * cvar, cap]), self.recent[level], self.best[level]
        recent[:] = now if np.isinf(recent[0]) else recent + step * (now - recent)
        if recent[0] > best[0]:
            best[:] = recent
        if self._searched:  # the cap is at the best one or on its way: a new measurement corrects a lucky one
            best[0] += step * (recent[0] - best[0])

    def state_dict(self) -> dict[str, Any]:
        """Return everything but the settings and the caps, as plain numbers."""
        return {
            "multiplier": self.multiplier,
            "share": self.share,
            "recent": self.recent.tolist(),
            "best": self.best.tolist(),
            "returns": [[[totals.tolist(), atoms.tolist()] for totals, atoms in window.rollouts] for window in self.returns],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self.multiplier, self.share = state["multiplier"], state["share"]
        self.recent, self.best = np.array(state["recent"]), np.array(state["best"])
        for window, rollouts in zip(self.returns, state["returns"], strict=True):
            window.rollouts = deque((np.array(totals), np.array(atoms)) for totals, atoms in rollouts)
