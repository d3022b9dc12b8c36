"""Objectives that look at the tail: CVaR of the episode's return by capping, alone, mixed with the mean, or as a constraint.

Rockafellar and Uryasev: CVaR_a(R) = max_C { C + E[min(R - C, 0)] / a }, reached at C = VaR_a(R). For a given cap C the policy
has to maximise E[min(R, C)], an ordinary problem once it sees what has been earned (Baeuerle and Ott 2011; return capping, Mead
et al. 2025); C follows the policy's VaR slowly.

In a state where the return so far is G, discounted by D = gamma^t from here on, the *budget* c = (C - G) / D is what the return
from here, Z, may still count. Then min(Z, c) obeys Bellman's equation with the plain rewards, and, written so that nothing is
left to pay after the end,

    reward  min(r, c) - min(0, c)        value  E[min(Z, c)] - min(0, c).

The critics learn the law of Z itself, whatever the objective. So they stay honest about the tail, one set of critics serves
every cap and every mixture, and moving the cap costs them nothing. R is the discounted sum of rewards with the agent's own
gamma: with gamma = 1 the plain sum. An episode that is cut off counts with its whole predicted law.

Small tails see few episodes, and an agent that starts out careful never finds what it could win. So the tail is annealed: it
begins as half of the law, or all of it (`anneal_from`), and shrinks to alpha.

The best policy for a cap has no reason to earn more than that. So a cap that follows the VaR can fall but hardly rise, and
stays at the first local maximum of the expression above. Therefore the tail goes on shrinking for a while, what every cap has
brought is noted, and then the cap goes back to the best of them. From there it rises with the VaR, but does not fall.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor, nn

from tailguard.ppo.calibration import ENOUGH_EPISODES
from tailguard.ppo.compiled.budget import budget_rows
from tailguard.validation import require

# The budget as the policy sees it: in standard deviations of the return, and not beyond this many.
BUDGET_REACH = 4.0
# The best policy changes its mind where the budget is nearly used up. So it is shown a second time, linear only up to this
# share of a standard deviation and like a logarithm beyond: asinh(c / (FINE std)), which BUDGET_REACH brings to about 3.
FINE = 0.02
FINE_UNIT = 2.0
# Budgets beyond this are as good as infinite.
FARTHEST = 1e30
# A tail that has travelled as float32 is still the level that it was.
AT_LEVEL = 1e-6
# The tail shrinks this many times as far as to alpha, in logarithms, before the best cap is taken.
PAST = 1.5
# A constraint that outweighs the mean this many times and still is not met cannot be met.
HOPELESS_MULTIPLIER = 100.0

Floats = NDArray[np.float64]
Level = Annotated[float, Field(gt=0.0, le=1.0)]


class RiskConfig(BaseModel):
    """What the policy is trained for.

    :param objective: ``neutral``: the mean return; ``cvar``: the mean of its worst share `alpha`; ``mean_cvar``: (1 - weight)
        times the first plus weight times the second; ``constrained``: the mean, as long as the CVaR is at least `limit`.
    :param alpha: the share, in (0, 1]; or a pair (low, high) for one policy that serves every tail between them, see
        :meth:`tailguard.DistributionalPPO.set_risk`.
    :param weight: of the CVaR in ``mean_cvar``.
    :param limit: least CVaR, in units of the return; ``constrained`` needs it.
    :param anneal: share of the training during which the tail shrinks from `anneal_from` to `alpha`. For half as long again it
        shrinks on, in search of the best cap. 0 starts with `alpha`, and does not search.
    :param anneal_from: the tail that training starts with; `alpha` if that is larger. 0.5 avoids what is dangerous from the
        start and still sees success. 1 starts with the mean; where its way and that of the tail have nothing in common, the
        second is forgotten before it matters.
    :param cap_step: share of the way to the present VaR, or to the best cap, that the cap goes after each rollout.
    :param window: episodes (per tail) that the VaR is estimated from. Too few make the cap restless, too many make it lag.
    :param levels: tails that a range of `alpha` is learnt at, evenly spaced in log alpha.
    :param multiplier_rate: how fast the multiplier of a violated constraint grows: by this share of one plus itself per
        rollout, for each standard deviation of the return that is missing.
    :param observe_return: show the policy what the episode has earned so far. Without it the best policy for a tail cannot be
        expressed in general; leave it out only where the observation tells it anyway.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    objective: Literal["neutral", "cvar", "mean_cvar", "constrained"] = "neutral"
    alpha: Level | tuple[Level, Level] = 0.05
    weight: Annotated[float, Field(ge=0.0, le=1.0)] = 0.5
    limit: float | None = None
    anneal: Annotated[float, Field(ge=0.0, le=1.0)] = 0.3
    anneal_from: Level = 0.5
    cap_step: Annotated[float, Field(gt=0.0, le=1.0)] = 0.2
    window: Annotated[int, Field(ge=ENOUGH_EPISODES)] = 1000
    levels: Annotated[int, Field(ge=2)] = 6
    multiplier_rate: Annotated[float, Field(gt=0.0)] = 0.15
    observe_return: bool = True

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if isinstance(self.alpha, tuple):
            require(self.alpha[0] < self.alpha[1], "alpha", self.alpha, "(low, high) with low below high")
            require(self.objective != "constrained", "alpha", self.alpha, "one number for a constraint")
        if self.objective == "constrained":
            require(self.limit is not None, "limit", self.limit, "the least CVaR, a number in units of the return")
        return self

    @property
    def return_augmented(self) -> bool:
        """Whether training needs the running return."""
        return self.objective != "neutral"

    @property
    def searches(self) -> bool:
        """Whether the tail is annealed and the best cap searched."""
        return self.objective in ("cvar", "mean_cvar") and self.anneal > 0.0

    def alphas(self) -> Floats:
        """The tails that are learnt, rising."""
        if isinstance(self.alpha, tuple):
            return np.geomspace(*self.alpha, self.levels)
        return np.array([self.alpha])

    @property
    def dial(self) -> bool:
        """Whether one policy serves many tails."""
        return isinstance(self.alpha, tuple) and self.return_augmented


class Budget(nn.Module):
    """The caps, and what the policy is shown of them.

    Observations carry, after the environment's own columns, the return so far, its discount, and the tail where there are many
    (see envs/return_observer.py).

    :param config: the objective.
    """

    caps: Tensor
    log_alphas: Tensor
    alpha: Tensor  # the tail that is looked at where the observation does not say

    def __init__(self, config: RiskConfig) -> None:
        super().__init__()
        self.dial, self.observed = config.dial, config.observe_return
        self.columns = (3 if config.dial else 2) if config.return_augmented else 0
        self.features = (2 * int(config.observe_return) + int(config.dial)) if config.return_augmented else 0
        alphas = torch.from_numpy(config.alphas())
        self.register_buffer("log_alphas", alphas.log(), persistent=False)
        self.register_buffer("alpha", alphas[0].clone())
        self.register_buffer("caps", torch.full((len(alphas),), float("inf"), dtype=torch.float64))

    def of(self, columns: Tensor) -> Tensor:
        """The budget where the appended columns ``[..., 2 or 3]`` are these, ``[...]`` in float64."""
        # Rows of a strip that stand for nothing are 0 in every column, and must not become NaN.
        earned, discount = columns[..., 0].double(), columns[..., 1].double().clamp(min=1e-30)
        cap = self.cap_at(columns[..., 2].double()) if self.dial else self.caps[0]
        return (cap - earned) / discount

    def cap_at(self, alpha: Tensor) -> Tensor:
        """The cap of any tail in the range, interpolated in log alpha."""
        place = alpha.log().clamp(self.log_alphas[0], self.log_alphas[-1])
        above = (place[..., None] > self.log_alphas).sum(-1).clamp(1, len(self.caps) - 1)  # a search that every exporter knows
        low, high = self.log_alphas[above - 1], self.log_alphas[above]
        share = (place - low) / (high - low)
        # Caps may be infinite still, and infinity times a weight of 0 is not a number: at a level its own cap counts alone.
        between = self.caps[above] * share + self.caps[above - 1] * (1.0 - share)
        at_lower, at_upper = share < AT_LEVEL, share > 1.0 - AT_LEVEL
        return torch.where(at_lower, self.caps[above - 1], torch.where(at_upper, self.caps[above], between))

    def forward(self, columns: Tensor, mean: Tensor, std: Tensor) -> Tensor:
        """What the policy sees instead of the appended columns: the budget in units of the return (coarse, fine), the tail.

        :param mean: of the return.
        :param std: of the return.
        """
        shown = []
        if self.observed:
            budget = self.of(columns)
            shown.append(((budget - mean) / std).clamp(-BUDGET_REACH, BUDGET_REACH).float())
            shown.append(torch.asinh((budget / std).clamp(-BUDGET_REACH, BUDGET_REACH).float() / FINE) / FINE_UNIT)
        if self.dial:
            low, high = self.log_alphas[0], self.log_alphas[-1]
            shown.append((2.0 * (columns[..., 2].double().log().clamp(low, high) - low) / (high - low) - 1.0).float())
        return torch.stack(shown, dim=-1)

    def rows(self, columns: NDArray[np.float32], mean: Tensor, std: Tensor, shown: NDArray[np.float32]) -> None:
        """Fill `shown` with what :meth:`forward` makes of ``[B, 2 or 3]``, compiled: for acting, without a gradient."""
        limits = (BUDGET_REACH, FINE, FINE_UNIT, AT_LEVEL)
        tables = (self.caps.numpy(), self.log_alphas.numpy())
        budget_rows(columns, *tables, mean.item(), std.item(), limits, self.observed, shown)


class Finished(NamedTuple):
    """Returns of the episodes that ended in a rollout.

    :param totals: ``[E]`` of those that came to their end.
    :param laws: ``[C, M]`` the atoms of those that were cut off.
    :param totals_for: ``[E]`` the tail that each was played for.
    :param laws_for: ``[C]`` the same.
    """

    totals: Floats
    laws: Floats
    totals_for: Floats
    laws_for: Floats


class Returns:
    """Returns of finished episodes: one number for an ended episode, a whole law for one that was cut off.

    :param window: episodes to remember.
    """

    def __init__(self, window: int) -> None:
        self.window = window
        self.rollouts: deque[tuple[Floats, Floats]] = deque()  # totals ``[E]``, laws ``[C, M]``

    def __len__(self) -> int:
        """Episodes remembered."""
        return sum(len(totals) + len(laws) for totals, laws in self.rollouts)

    def add(self, totals: Floats, laws: Floats) -> None:
        """Remember the episodes that ended in a rollout, and forget the oldest that are too many."""
        if len(totals) + len(laws):
            self.rollouts.append((totals, laws))
        surplus = len(self) - self.window
        while surplus > 0:
            totals, laws = self.rollouts.popleft()
            if len(totals) + len(laws) > surplus:
                self.rollouts.appendleft((totals[surplus:], laws[max(surplus - len(totals), 0) :]))
            surplus -= len(totals) + len(laws)

    def tails(self, alphas: Sequence[float], masses: Floats) -> list[tuple[float, float]]:
        """VaR and CVaR at each of `alphas` of all remembered episodes together, each of the same weight."""
        ended, cut = (sum(len(rollout[kind]) for rollout in self.rollouts) for kind in range(2))
        values = np.concatenate([rollout[kind].ravel() for kind in range(2) for rollout in self.rollouts])
        weights = np.concatenate((np.ones(ended), np.tile(masses, cut))) / (ended + cut)
        order = np.argsort(values)
        values, weights = values[order], weights[order]
        upto = np.cumsum(weights)
        found = []
        for alpha in alphas:
            var = values[min(int(np.searchsorted(upto, alpha - 1e-12)), len(values) - 1)]
            in_tail = np.clip(alpha - (upto - weights), 0.0, weights)
            found.append((float(var), float(in_tail @ values / in_tail.sum())))
        return found

    def tail(self, alpha: float, masses: Floats) -> tuple[float, float]:
        """VaR and CVaR at one level."""
        return self.tails((alpha,), masses)[0]


class RiskObjective:
    """Rewards and values as the objective sees them, and the cap and multiplier behind them.

    :param config: the objective.
    :param budget: the caps, which are part of the policy.
    """

    def __init__(self, config: RiskConfig, budget: Budget) -> None:
        self.config, self.budget = config, budget
        self.alphas = config.alphas()
        self.returns = [Returns(config.window) for _ in self.alphas]
        self.multiplier = 0.0
        self.share = self._share(0.0)  # of the way to the tail, in logarithms; PAST when that is over
        self.recent = np.full((len(self.alphas), 2), -np.inf)  # of each level, smoothed: what its cap is worth, and the cap
        self.best = np.full((len(self.alphas), 2), -np.inf)  # the same where it was worth most

    def _share(self, progress: float) -> float:
        return min(progress / self.config.anneal, PAST) if self.config.searches else PAST

    @property
    def _searched(self) -> bool:
        """Whether the search for the cap is over."""
        return self.share == PAST

    def _annealed(self, alpha: Any) -> Any:
        """The tail that training is at, for a tail or a tensor of them: evenly in the logarithm, past it, and then the tail."""
        if self._searched:
            return alpha
        start = alpha.clamp(min=self.config.anneal_from) if isinstance(alpha, Tensor) else max(self.config.anneal_from, alpha)
        return start ** max(1.0 - self.share, 0.0) * alpha**self.share

    @property
    def neutral(self) -> bool:
        """Whether the mean return is all there is."""
        return self.config.objective == "neutral"

    def weights(self, columns: Tensor) -> tuple[float, Tensor | float]:
        """The weights of the mean and of the capped return."""
        config = self.config
        alpha = columns[..., 2].double() if self.budget.dial else float(self.alphas[0])
        if config.objective == "cvar":
            return 0.0, 1.0
        if config.objective == "mean_cvar":
            annealed = self._annealed(alpha)
            shown = torch.maximum(annealed, alpha) if isinstance(alpha, Tensor) else max(annealed, alpha)
            return 1.0 - config.weight, config.weight / shown
        return 1.0, self.multiplier / alpha

    def rewards(self, rewards: Tensor, columns: Tensor) -> Tensor:
        """What the policy is paid, ``[T, B]``, for plain `rewards` and the appended columns ``[T, B, 2 or 3]`` before them."""
        mean, tail = self.weights(columns)
        budget, plain = self.budget.of(columns), rewards.double()
        capped = torch.minimum(plain, budget) - budget.clamp(max=0.0)
        return (mean * plain + tail * capped).to(rewards)

    def values(self, atoms: Tensor, masses: Tensor, columns: Tensor) -> Tensor:
        """The value of states ``[K, ...]`` whose return has the atoms ``[K, ..., M]``.

        :param columns: ``[..., 2 or 3]``, what is appended to the observations of these states.
        """
        mean, tail = self.weights(columns)
        # E[min(X, b) - min(b, 0)], subtracted inside: a budget of -10^30 must not swallow X in single precision.
        limit = self.budget.of(columns).clamp(-FARTHEST, FARTHEST).to(atoms).unsqueeze(-1)
        shift = limit.clamp(max=0.0)
        capped = torch.minimum(atoms - shift, limit - shift) @ masses
        return (mean * (atoms @ masses) + tail * capped).to(atoms) if mean else (tail * capped).to(atoms)

    def remember(self, finished: Finished) -> None:
        """Note the returns of the episodes that ended in a rollout, each at the level that is nearest to its tail."""
        nearest = [np.abs(np.log(tails)[:, None] - np.log(self.alphas)).argmin(1) for tails in finished[2:]]
        for level, returns in enumerate(self.returns):
            returns.add(finished.totals[nearest[0] == level], finished.laws[nearest[1] == level])

    def adapt(self, progress: float, masses: Floats, std: float) -> dict[str, float]:
        """Move caps and multiplier after a rollout.

        :param progress: share of the training that is done.
        :param masses: of the atoms of a law.
        :param std: of the return.
        :returns: what to log.
        """
        config = self.config
        metrics: dict[str, float] = {}
        self.share = self._share(progress)
        for level, (alpha, returns) in enumerate(zip(self.alphas, self.returns, strict=True)):
            if len(returns) < ENOUGH_EPISODES:
                continue
            (var, _), (_, cvar), (_, mean) = returns.tails((self._annealed(alpha), alpha, 1.0), masses)
            cap = self.budget.caps[level]
            if cap.isfinite() and config.searches:
                self._compare(level, cap.item(), mean, cvar)
                var = max(var, self.best[level, 1]) if self._searched else var
            cap.copy_(cap + config.cap_step * (var - cap) if cap.isfinite() else torch.tensor(var, dtype=cap.dtype))
            name = f"_{alpha:.3g}" if config.dial else ""
            metrics |= {f"risk/cap{name}": cap.item(), f"risk/cvar{name}": cvar}
        if config.objective == "constrained" and len(self.returns[0]) >= ENOUGH_EPISODES:
            assert config.limit is not None
            missing = config.limit - metrics["risk/cvar"]
            # In proportion to what it is already: one that has to be large gets there, and one that is too large comes back.
            self.multiplier = max(0.0, self.multiplier + config.multiplier_rate * (1.0 + self.multiplier) * missing / std)
            metrics |= {"risk/multiplier": self.multiplier, "risk/missing": missing}
            if missing > 0.0 and self.multiplier > HOPELESS_MULTIPLIER:
                metrics["warn/cvar_limit_infeasible"] = 1.0
        metrics["risk/alpha_annealed"] = float(self._annealed(self.alphas[0]))
        return metrics

    def _compare(self, level: int, cap: float, mean: float, cvar: float) -> None:
        """Note what the cap of a level has brought, and whether it is the best so far."""
        weight, step = self.config.weight if self.config.objective == "mean_cvar" else 1.0, self.config.cap_step
        now, recent, best = np.array([(1.0 - weight) * mean + weight * cvar, cap]), self.recent[level], self.best[level]
        recent[:] = now if np.isinf(recent[0]) else recent + step * (now - recent)
        if recent[0] > best[0]:
            best[:] = recent
        if self._searched:  # the cap is at the best one or on its way: what that brings is seen anew, and luck fades
            best[0] += step * (recent[0] - best[0])

    def state_dict(self) -> dict[str, Any]:
        """Everything but the settings and the caps, in plain numbers."""
        return {
            "multiplier": self.multiplier,
            "share": self.share,
            "recent": self.recent.tolist(),
            "best": self.best.tolist(),
            "returns": [[[totals.tolist(), laws.tolist()] for totals, laws in one.rollouts] for one in self.returns],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where :meth:`state_dict` was taken."""
        self.multiplier, self.share = state["multiplier"], state["share"]
        self.recent, self.best = np.array(state["recent"]), np.array(state["best"])
        for one, rollouts in zip(self.returns, state["returns"], strict=True):
            one.rollouts = deque((np.array(totals), np.array(laws)) for totals, laws in rollouts)
