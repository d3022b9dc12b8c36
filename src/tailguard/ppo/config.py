"""Settings of the algorithm, without PyTorch: sections of the YAML file and, as they are, arguments of DistributionalPPO."""

from typing import Annotated, Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import (
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from tailguard.periods import Period
from tailguard.validation import require

Level = Annotated[float, Field(gt=0.0, le=1.0)]

# Fewer finished episodes than this say nothing about the distribution of their returns.
ENOUGH_EPISODES = 20
# Quantiles that are placed in the tail where nothing else is said, and how many there must be in all: the others still have to
# tell the mean.
TAIL_QUANTILES, ENOUGH_FOR_A_TAIL = 5, 20


class LayersConfig(BaseModel):
    """Hidden layers of the actor and of the critics, where they differ.

    :param pi: sizes of the actor's hidden layers, such as ``[64, 64]``; empty is a linear actor.
    :param vf: sizes of each critic's hidden layers; empty is a linear critic.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    pi: tuple[PositiveInt, ...] = ()
    vf: tuple[PositiveInt, ...] = ()


class NetworkConfig(BaseModel):
    """The networks, by the names of SB3's and sb3-contrib's ``policy_kwargs``.

    :param net_arch: sizes of the hidden layers after the LSTM, or of the whole network without one: a list for actor and
        critics, or ``{pi: [...], vf: [...]}``. None is ``[64, 64]``. Larger layers fit more, noise included, and cost time.
    :param activation_fn: activation between the layers. ``tanh`` is usual for PPO; ``relu`` and the like can be faster to train
        and less steady.
    :param ortho_init: initialise the feed-forward layers orthogonally, the actor's last one close to 0. False leaves PyTorch's
        initialisation, with which the first policy is farther from uniform.
    :param log_std_init: initial log standard deviation of continuous actions. 0 is a standard deviation of 1; -1 explores about
        a third as far.
    :param state_dependent_std: let the network choose the standard deviation in each state instead of learning one number per
        action. More flexible, less steady.
    :param squash_output: continuous actions are the tanh of a Gaussian instead of a clipped Gaussian; the limits of the box are
        then never quite reached.
    :param censored: let actions beyond the box count as its end, which is what the environment gets. Less noise for agents that
        go to the limits, such as a trader with costs. Not together with `squash_output`.
    :param lstm_hidden_size: size of the LSTM's hidden state, at least 1, for ``MlpLstmPolicy``. 32 to 256 are usual; time grows
        with its square.
    :param n_lstm_layers: recurrent layers on top of each other, at least 1. More than one is rarely worth its time.
    :param recurrent_cell: ``lstm``, or ``gru`` for GRU layers of the same size: three gates instead of four. Only the LSTM is
        compiled, so a GRU is the slower one on a CPU.
    :param lstm_forget_bias: added to the forget gates of a fresh LSTM; with 0 it loses one half of its state per step, which
        learns fast what to do with the last few; 1 to 3 for what lies far back.
    :param shared_lstm: one LSTM for actor and critics instead of one each. Nearly halves the time, but the critics' loss then
        shapes what the actor remembers.
    :param compiled: act and learn in compiled passes where they cover the networks, which is faster; False leaves everything to
        PyTorch, with the same results up to rounding.
    :param threads: 1, or 2 to learn with two threads where the passes are compiled: actor and critics side by side, a shared
        LSTM in two halves. The results are the same to the bit. Leave it at 1 where several runs fill the cores.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    net_arch: tuple[PositiveInt, ...] | LayersConfig | None = None
    activation_fn: Literal["tanh", "relu", "leaky_relu", "elu", "gelu", "silu", "sigmoid"] = "tanh"
    ortho_init: bool = True
    log_std_init: float = 0.0
    state_dependent_std: bool = False
    squash_output: bool = False
    censored: bool = False
    lstm_hidden_size: PositiveInt = 256
    n_lstm_layers: PositiveInt = 1
    recurrent_cell: Literal["lstm", "gru"] = "lstm"
    lstm_forget_bias: float = 0.0
    shared_lstm: bool = False
    compiled: bool = True
    threads: Literal[1, 2] = 1

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        both = self.squash_output and self.censored
        require(not both, "censored", True, "False with squash_output: squashed actions never leave the box")
        return self


def resolve_batch_sizes(
    n_steps: int, n_envs: int, *, recurrent: bool, batch_size: int | None, microbatch_size: int | None
) -> tuple[int, int]:
    """Return the sizes of minibatch and microbatch, in samples.

    A minibatch of a recurrent policy is made of whole sequences of `n_steps`.

    :param batch_size: None takes a quarter of the rollout if it can be cut so, or else all of it.
    :param microbatch_size: None takes the whole minibatch.
    :raises ValueError: if the rollout, or the minibatch, cannot be cut so; with the nearest legal size.
    """
    samples, unit = n_steps * n_envs, n_steps if recurrent else 1
    if batch_size is None:
        quarter = max(n_envs // 4, 1) * n_steps if recurrent else max(samples // 4, 1)
        batch_size = quarter if samples % quarter == 0 else samples
    require_divisor("batch_size", batch_size, samples, unit)
    microbatch_size = batch_size if microbatch_size is None else microbatch_size
    require_divisor("microbatch_size", microbatch_size, batch_size, unit)
    return batch_size, microbatch_size


def require_divisor(name: str, size: int, total: int, unit: int) -> None:
    """Raise an error with the nearest legal size unless `size` is a multiple of `unit` that divides `total`."""
    fits = size >= 1 and size % unit == 0 and total % size == 0
    legal = [n for n in range(unit, total + 1, unit) if total % n == 0]
    nearest = min(legal, key=lambda n: abs(n - size), default=total)
    what = "samples" if unit == 1 else "whole sequences"
    require(fits, name, size, f"a divisor of {total} made of {what} of {unit}; the nearest is {nearest}")


def resolve_minibatches(n_steps: int, n_envs: int, *, recurrent: bool, batch_size: int | None) -> tuple[int, int]:
    """Return the samples of a minibatch, and the steps of the sequences that it is made of; 1 where nothing is recurrent.

    Any size is taken as SB3 takes it. A sequence is all `n_steps` of an environment where they fit in, and otherwise the
    largest part of equal length that does; a size between two multiples of it is rounded down.

    :param batch_size: None takes a quarter of the rollout if it can be cut so, or else all of it.
    """
    if batch_size is None:
        batch_size, _ = resolve_batch_sizes(n_steps, n_envs, recurrent=recurrent, batch_size=None, microbatch_size=None)
    require(batch_size >= 1, "batch_size", batch_size, "at least 1")
    batch_size = min(batch_size, n_steps * n_envs)
    if not recurrent:
        return batch_size, 1
    length = max(steps for steps in range(1, min(batch_size, n_steps) + 1) if n_steps % steps == 0)
    return batch_size - batch_size % length, length


class ReturnScaleConfig(BaseModel):
    """The scale of returns (PopArt), which follows the data.

    :param beta: weight of a rollout against everything before it, in (0, 1]; the first rollouts weigh more until the average is
        filled. 0.2 remembers about five rollouts; 1 knows only the last one and makes the critic chase noise.
    :param max_relative_step: the most that one rollout may change the standard deviation, as a factor 1 + step up or down, and
        the mean, in standard deviations. 0.5 follows a tenfold growth of the returns in six rollouts; None removes the limit.
    :param min_std: smallest standard deviation, in units of the return; keeps constant returns from being blown up. The default
        is well below the returns of minute bars.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    beta: Annotated[float, Field(gt=0.0, le=1.0)] = 0.2
    max_relative_step: PositiveFloat | None = 0.5
    min_std: PositiveFloat = 1e-4


class CriticConfig(BaseModel):
    """The critics: the return distribution that they predict, and how they learn it.

    :param num_quantiles: quantiles that each critic predicts; 32 is plenty for the mean, and for tails with `tail_quantiles`
        among them. 1 is an ordinary critic: it learns the mean return by squared loss, and knows nothing of tails.
    :param distribution: how the return is described. ``quantile``: free quantiles, sorted where order matters; ``monotone``:
        quantiles that cannot cross; ``categorical``: probabilities of `num_quantiles` fixed atoms (C51).
    :param twin: train two independent critics instead of one; costs one more head per update and steadies the value.
    :param aggregate: the value of a state from both critics: ``mean`` or ``min`` of their means. ``min`` is pessimistic.
    :param huber_kappa: half-width of the quadratic zone of the loss, in normalised units. 0 learns true quantiles; 1, the usual
        choice elsewhere, pulls the tails inward by a fifth.
    :param mean_coef: weight of the squared error of the quantiles' mean beside their own loss, in normalised units. The pace of
        quantile regression does not depend on how far away a return is: with 0 a large reward that is rare is learnt slowly.
        1 learns it as an ordinary critic does and still knows the distribution; 0.1 is a compromise. Its noise
        reaches all quantiles, so look at the calibration where the tail matters. Not for categorical critics, nor for one
        quantile.
    :param target: ``distribution``: SR(lambda), which keeps the spread of the return; ``lambda_return``: the lambda-return of
        the advantages' `gae_lambda`, a single number per sample, which does not. Left out for one quantile, which is
        a mean and has no spread, it is ``lambda_return``, as in ordinary PPO.
    :param value_lambda: lambda of targets that are distributions. 0.95 is usual; lower trusts the critic more, 1 trusts only
        observed returns. It does not follow `gae_lambda`: a tail needs long traces where a policy learns best from short ones.
    :param tail_quantiles: how many of the quantiles are placed in the lower tail; 0 spreads all evenly. None: 5 of 20 or more
        quantiles, which more than halves the error of the CVaR there, and none of fewer.
    :param tail_alpha: the tail that they share; set it to the tail that you look at.
    :param reach: where the atoms of a categorical critic end, in standard deviations of the return. 5 is typical; returns
        beyond it are counted at the edge.
    :param clip_range: how far a prediction may move in one update, in standard deviations of the return; beyond it, moving on
        towards the target pays nothing. None does not clip, which is right more often than not.
    :param ev_reserve: measure the explained variance once more after the update, with the final weights. It costs one pass over
        the rollout and changes nothing else.
    :param scale: how the scale of returns follows the data.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_quantiles: Annotated[int, Field(ge=1, le=1000)] = 32
    distribution: Literal["quantile", "monotone", "categorical"] = Field(
        default="quantile", validation_alias=AliasChoices("distribution", "law")
    )
    twin: bool = True
    aggregate: Literal["mean", "min"] = "mean"
    huber_kappa: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = 0.0
    mean_coef: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = 0.0
    target: Literal["distribution", "lambda_return"] = "distribution"
    value_lambda: Annotated[float, Field(ge=0.0, le=1.0)] = 0.95
    tail_quantiles: Annotated[int, Field(ge=0)] | None = None
    tail_alpha: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.05
    reach: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] = 5.0
    clip_range: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] | None = None
    ev_reserve: bool = False
    scale: ReturnScaleConfig = Field(default_factory=ReturnScaleConfig)

    @model_validator(mode="before")
    @classmethod
    def _without_removed_settings(cls, settings: Any) -> Any:
        """Drop the settings of the other ways to clip, which files of earlier versions hold."""
        if not isinstance(settings, dict):
            return settings
        mode = settings.get("clip_mode", "per_quantile")
        require(mode == "per_quantile", "clip_mode", mode, "per_quantile: every quantile is clipped by itself; leave it out")
        return {name: value for name, value in settings.items() if name not in ("clip_mode", "clip_variance_factor")}

    @model_validator(mode="before")
    @classmethod
    def _target_of_a_mean(cls, settings: Any) -> Any:
        """Let a single number learn lambda-returns unless another target is asked for: a draw of them has only more noise."""
        is_mean = isinstance(settings, dict) and settings.get("num_quantiles") == 1
        return {"target": "lambda_return", **settings} if is_mean else settings

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        n, tail = self.num_quantiles, self.n_tail
        require(tail < n, "tail_quantiles", tail, f"below num_quantiles {n}")
        of_quantiles = n > 1 and self.distribution != "categorical"
        require(of_quantiles or self.mean_coef == 0.0, "mean_coef", self.mean_coef, "0 for a critic without quantiles")
        if self.distribution == "categorical":
            require(n >= 2, "num_quantiles", n, "at least 2 atoms for a categorical critic")
            require(tail == 0, "tail_quantiles", tail, "0 for a categorical critic: it has atoms, not levels")
            require(self.clip_range is None, "clip_range", self.clip_range, "None: a categorical critic has no quantiles")
        return self

    @property
    def n_critics(self) -> int:
        """Number of critics, 1 or 2."""
        return 2 if self.twin else 1

    @property
    def n_tail(self) -> int:
        """Number of quantiles in the lower tail."""
        if self.tail_quantiles is not None:
            return self.tail_quantiles
        return TAIL_QUANTILES if self.distribution != "categorical" and self.num_quantiles >= ENOUGH_FOR_A_TAIL else 0


def require_clippable(critic: CriticConfig) -> None:
    """Raise ValueError for critics whose predictions cannot be clipped, or that have a clip range of their own."""
    require(critic.distribution != "categorical", "clip_range_vf", "set", "None: a categorical critic has no quantiles")
    require(critic.clip_range is None, "clip_range_vf", "set", "None where critic.clip_range is set: it says the same")


class ObsNormConfig(BaseModel):
    """A running normalisation of observations.

    :param half_life: samples (steps of all environments together) after which data count half. None never forgets: right for
        a stationary task. Markets drift: some 10 to 100 rollouts keep up with them, fewer make the policy's input restless.
    :param clip: largest absolute normalised value; 10 keeps all but glitches, below 3 loses signal.
    :param eps: added to the variance; a column that never moves gives 0 instead of a division by 0.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    half_life: PositiveFloat | None = None
    clip: PositiveFloat = 10.0
    eps: PositiveFloat = 1e-8


class RiskConfig(BaseModel):
    """The objective of the policy.

    :param objective: ``neutral``: the mean return; ``cvar``: the average of its worst share `alpha` (CVaR); ``mean_cvar``:
        (1 - weight) times the first plus weight times the second; ``constrained``: the mean, as long as the CVaR is at least
        `limit`.
    :param alpha: the worst share of the periods that counts: 0.05 is the worst 5 %, 1 is the mean. Smaller is more careful,
        and harder to learn, since fewer periods say something about it. A pair ``[low, high]`` trains one policy for every
        tail between them, see :meth:`tailguard.DistributionalPPO.set_risk`.
    :param period: what a return is counted over: a number of steps, or on a market a time of the calendar such as ``1W`` or
        ``1M``. The return is the plain sum of the rewards of a period and restarts with it, whatever `gamma` is; positions and
        recurrent states carry over. 21 are a month of daily bars. None counts over the episode, discounted by `gamma`.
    :param weight: weight of the CVaR in ``mean_cvar``. 0 is the mean alone, 1 the CVaR alone.
    :param limit: least CVaR, in units of the return; ``constrained`` needs it. One that cannot be met is reported in the log.
    :param anneal: share of the training during which the tail shrinks from `anneal_from` to `alpha`, where it stays. For half
        as long again, or half of what is left, the cap keeps falling, in search of the best one. 0.3 is typical; 0 starts
        with `alpha`, and does not search.
    :param anneal_from: the tail that training starts with; `alpha` if that is larger. 0.5 avoids what is dangerous from the
        start and still sees success. 1 starts with the mean; where the best policies for mean and tail have nothing in common,
        the second is forgotten before it matters.
    :param cap_step: share of the way to the present VaR, or to the best cap, that the cap goes after each rollout. 0.2 is
        typical; more follows faster and is less steady.
    :param window: finished periods (per tail) that the VaR is estimated from. Too few make the cap restless, too many make it
        lag.
    :param levels: tails that a range of `alpha` is learnt at, evenly spaced in log alpha. 6 are typical; more cut the episodes
        into smaller groups.
    :param multiplier_rate: how fast the multiplier of a violated constraint grows: by this share of one plus itself per
        rollout, for each standard deviation of the return that is missing. 0.15 is typical; more overshoots.
    :param observe_return: show the policy its running return. Without it the best policy for a tail cannot be
        expressed in general; leave it out only where the observation tells it anyway.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    objective: Literal["neutral", "cvar", "mean_cvar", "constrained"] = "neutral"
    alpha: Level | tuple[Level, Level] = 0.05
    period: int | str | None = None
    weight: Annotated[float, Field(ge=0.0, le=1.0)] = 0.5
    limit: float | None = None
    anneal: Annotated[float, Field(ge=0.0, le=1.0)] = 0.3
    anneal_from: Level = 0.5
    cap_step: Annotated[float, Field(gt=0.0, le=1.0)] = 0.2
    window: Annotated[int, Field(ge=ENOUGH_EPISODES)] = 1000
    levels: Annotated[int, Field(ge=2, le=1000)] = 6
    multiplier_rate: Annotated[float, Field(gt=0.0)] = 0.15
    observe_return: bool = True

    @field_validator("period")
    @classmethod
    def _one_form(cls, value: int | str | None) -> int | str | None:
        """Write every period in one way: a number of steps as a number."""
        period = None if value is None else Period.parse(value)
        return period if period is None else (str(period) if period.unit else period.count)

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
        """True if the objective needs the running return of the episode in the observation."""
        return self.objective != "neutral"

    @property
    def counted_over(self) -> Period | None:
        """The period that returns are counted over; None is the episode."""
        return None if self.period is None or not self.return_augmented else Period.parse(self.period)

    def discount(self, gamma: float) -> float:
        """Return the discount of the returns that the critics predict: 1 for those of a period, else PPO's own.

        :param gamma: PPO's discount.
        """
        return gamma if self.counted_over is None else 1.0

    @property
    def searches(self) -> bool:
        """True if the tail is annealed and the best cap searched."""
        return self.objective in ("cvar", "mean_cvar") and self.anneal > 0.0

    def alphas(self) -> NDArray[np.float64]:
        """Return the tails that are learnt, rising."""
        if isinstance(self.alpha, tuple):
            return np.geomspace(*self.alpha, self.levels)
        return np.array([self.alpha])

    @property
    def alpha_conditioned(self) -> bool:
        """True if one policy serves a range of tails and is told which."""
        return isinstance(self.alpha, tuple) and self.return_augmented


class EntropyConfig(BaseModel):
    """The entropy bonus: how much the policy is paid for randomness. An update is one call of ``train()``.

    :param initial: coefficient at the start, at least ``min_coefficient``. 0.001 suits normalised advantages; 0.01 explores
        more (discrete actions), 0.1 drowns the advantages.
    :param final: coefficient after the decay; None stays at ``initial``.
    :param decay_steps: updates that the linear decay takes; a value is needed as soon as ``final`` differs from ``initial``.
        Faster explores less later.
    :param min_coefficient: the coefficient never falls below this, decayed or boosted. Above 0 keeps some exploration for ever.
    :param plateau_window: measurements of performance that must lie on a plateau before the decay starts; 24 is typical. 0
        starts the decay at once.
    :param plateau_tolerance: largest absolute slope of a plateau, in units of performance per update. More finds a plateau
        earlier.
    :param plateau_min_updates: no plateau counts before this many updates; keeps a slow start from being taken for one.
    :param boost_factor: the coefficient is multiplied by this in every update of bad explained variance after the patience is
        used up. 1 is off; 1.5 explores more, below 1 less.
    :param max_boost: largest product of boosts. It bounds what a critic that never becomes good can do.
    :param bad_explained_threshold: an explained variance below this is bad; 0 is a critic worse than a constant.
    :param bad_explained_patience: bad updates in a row that change nothing yet. 0 reacts at once, to noise as well.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    initial: NonNegativeFloat = 0.001
    final: NonNegativeFloat | None = None
    decay_steps: NonNegativeInt = 0
    min_coefficient: NonNegativeFloat = 0.0
    plateau_window: NonNegativeInt = 0
    plateau_tolerance: NonNegativeFloat = 0.002
    plateau_min_updates: NonNegativeInt = 0
    boost_factor: PositiveFloat = 1.0
    max_boost: Annotated[float, Field(ge=1.0)] = 5.0
    bad_explained_threshold: Annotated[float, Field(le=1.0)] = 0.0
    bad_explained_patience: NonNegativeInt = 2

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        floor = self.min_coefficient
        require(self.initial >= floor, "initial", self.initial, f"at least min_coefficient {floor}")
        still = self.final is None or self.final == self.initial
        require(still or self.decay_steps > 0, "decay_steps", self.decay_steps, f"at least 1 to reach final {self.final}")
        require(self.plateau_window != 1, "plateau_window", 1, "0 (no plateau) or at least 2: one point has no slope")
        return self


class KLConfig(BaseModel):
    """The KL control: how far one update may move the policy, measured by KL(old, new).

    :param mode: ``none``; ``early_stop``: end the update; ``penalty``: add coefficient times KL to the loss; ``adaptive_lr``:
        change the learning rate.
    :param target: the KL aimed at, in nats per action; 0.01 is usual, 0.003 cautious, above 0.05 hardly a trust region.
    :param stop_factor: ``early_stop`` ends the update at a KL above this many targets. 1.5 is usual; less stops more often.
    :param penalty_initial: coefficient at the start, within the bounds; it finds its level within a few updates, since it is
        doubled above 1.5 targets and halved below target / 1.5 (Schulman et al. 2017).
    :param penalty_min: smallest coefficient, above 0: a coefficient of 0 could never grow again.
    :param penalty_max: largest coefficient; a bound for updates that stay too large.
    :param lr_min: ``adaptive_lr`` does not lower the learning rate below this; too high a value cannot calm the updates.
    :param lr_max: ``adaptive_lr`` does not raise the learning rate above this; too high a value can break a policy at once.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    mode: Literal["none", "early_stop", "penalty", "adaptive_lr"] = "none"
    target: PositiveFloat = 0.01
    stop_factor: PositiveFloat = 1.5
    penalty_initial: PositiveFloat = 0.2
    penalty_min: PositiveFloat = 1e-4
    penalty_max: PositiveFloat = 100.0
    lr_min: PositiveFloat = 1e-5
    lr_max: PositiveFloat = 1e-2

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        bounds = f"within penalty_min {self.penalty_min} and penalty_max {self.penalty_max}"
        require(self.penalty_min <= self.penalty_initial <= self.penalty_max, "penalty_initial", self.penalty_initial, bounds)
        require(self.lr_min <= self.lr_max, "lr_min", self.lr_min, f"at most lr_max {self.lr_max}")
        return self
