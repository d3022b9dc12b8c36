"""Build an agent for a market, and train it: the one loop behind runs, walk-forwards and populations."""

import warnings
from collections.abc import Sequence
from contextlib import suppress

import pandas as pd
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import VecEnv

from tailguard.config import AdversaryConfig, SAPPOConfig, TrainingConfig
from tailguard.experiments.callbacks import StopAfter, StopAt, StopTraining
from tailguard.experiments.prepared_market import Market
from tailguard.market.features import market_columns
from tailguard.ppo.algorithm import DistributionalPPO
from tailguard.validation import require

# A discount of less than this at the end of an episode: most of its return has been decided long before.
VANISHED = 0.05


def train_model(
    model: DistributionalPPO,
    steps: int,
    callbacks: Sequence[BaseCallback] = (),
    *,
    horizon: int | None = None,
    log_name: str = "",
    minutes: float | None = None,
) -> None:
    """Train a model until it has done a number of environment steps, those of earlier calls included.

    :param model: untrained, or trained before: it continues where it stands.
    :param steps: in all; training ends after the update that reaches them.
    :param callbacks: of Stable-Baselines3, called in this order.
    :param horizon: steps at which schedules end, if the training will be continued later; None is `steps`.
    :param minutes: training ends after the update in which this much wall time has passed; None has no limit.
    :param log_name: folder of the curves inside that of TensorBoard.
    """
    horizon = steps if horizon is None else max(horizon, steps)
    stop: list[BaseCallback] = [StopAt(steps)] if steps < horizon else []
    stop += [] if minutes is None else [StopAfter(minutes)]
    with suppress(StopTraining):
        model.learn(
            horizon - model.num_timesteps, callback=[*callbacks, *stop], reset_num_timesteps=False, tb_log_name=log_name
        )


def build_model(market: Market, training: TrainingConfig, env: VecEnv | None = None) -> DistributionalPPO:
    """Return an untrained agent in the training environments of a market.

    :param env: these environments, if they exist already.
    """
    _warn_of_discounted_tail(market, training)
    _require_whole_periods(market, training)
    return DistributionalPPO(
        "MlpPolicy" if training.policy == "auto" else training.policy,
        market.training_env(training.n_envs, training.seed) if env is None else env,
        learning_rate=training.learning_rate,
        n_steps=training.n_steps,
        batch_size=training.batch_size,
        n_epochs=training.n_epochs,
        gamma=training.gamma,
        gae_lambda=training.gae_lambda,
        clip_range=training.clip_range,
        max_grad_norm=training.max_grad_norm,
        vf_coef=training.vf_coef,
        normalize_advantage_per_mini_batch=training.normalize_advantage_per_mini_batch,
        microbatch_size=training.microbatch_size,
        optimizer=training.optimizer,
        critic=training.critic,
        risk=training.risk,
        entropy=training.entropy,
        kl=training.kl,
        vgs=training.vgs,
        adversary=resolve_adversary(training.adversary, market.features.names),
        normalize_obs=training.normalize_obs or False,
        policy_kwargs=training.network,
        stats_window_size=training.stats_window_size,
        seed=training.seed,
        tensorboard_log=training.tensorboard,
    )


def _require_whole_periods(market: Market, training: TrainingConfig) -> None:
    """Raise where no period of the risk objective would end in an episode, so that nothing could be learnt about its tail."""
    period, length = training.risk.counted_over, market.trading.episode_length
    if period is None or length is None:
        return
    bars = period.usual_bars(pd.DatetimeIndex(market.bars.index[slice(*market.split.train)]))
    longest = length // 2 if period.unit else length  # the first month of an episode is a part of one
    legal = (
        f"at most {longest} bars, for episodes of {length}: take a shorter one, more bars or a longer trading.episode_length"
    )
    require(bars <= longest, "training.risk.period", training.risk.period, legal)


def _warn_of_discounted_tail(market: Market, training: TrainingConfig) -> None:
    """Warn where the discount leaves nothing of the end of an episode whose tail is to be averse to."""
    length = market.trading.episode_length
    if not training.risk.return_augmented or training.risk.counted_over is not None or length is None:
        return
    if training.gamma**length < VANISHED:
        warnings.warn(
            f"training.gamma {training.gamma} leaves {training.gamma**length:.1g} of a reward at the end of an episode of "
            f"{length} bars, so the tail of its return is that of its first bars: set training.risk.period, such as 21 or 1M",
            stacklevel=3,
        )


def resolve_adversary(config: AdversaryConfig | None, names: tuple[str, ...]) -> SAPPOConfig | None:
    """Return the adversary with the columns that it may perturb; the calendar and the account are known for certain.

    :param names: of the features.
    :raises ValueError: for a name that no feature has.
    """
    if config is None:
        return None
    perturbable = config.perturbable
    columns = tuple(column for column in perturbable or () if isinstance(column, int))
    if not columns:
        try:
            columns = market_columns(names, None if perturbable is None else [str(name) for name in perturbable])
        except ValueError as error:
            raise ValueError(f"training.adversary.perturbable: {error}") from None
    return SAPPOConfig(**config.model_dump(exclude={"perturbable"}), perturbable=columns)
