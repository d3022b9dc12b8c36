"""How the radius of the ball changes over a training. A pure function of the update: calling it twice changes nothing."""

import math

from tailguard.robust.config import SAPPOConfig
from tailguard.validation import require


def horizon(total_timesteps: int, n_steps: int, n_envs: int) -> int:
    """Updates in a training: each consumes `n_steps` of every environment. At least 1."""
    return max(total_timesteps // (n_steps * n_envs), 1)


def epsilon_at(config: SAPPOConfig, update: int, updates: int) -> float:
    """The radius in update number `update`, counted from 0; 0 during the warm-up.

    It is `epsilon` in the first update and exactly `epsilon_final` in the last of `updates`, and after it.

    :param updates: of the training, at least 1; `max_updates` of the settings takes precedence.
    """
    require(update >= 0, "update", update, "at least 0")
    require(updates >= 1, "updates", updates, "at least 1")
    if config.idle or update < config.warmup_updates:
        return 0.0
    if config.epsilon_final is None:
        return config.epsilon
    last = config.schedule_share * ((config.max_updates or updates) - 1)
    progress = min(update / last, 1.0) if last > 0.0 else 1.0
    if progress == 1.0:
        return config.epsilon_final
    left = 1.0 - progress if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.epsilon_final + (config.epsilon - config.epsilon_final) * left
