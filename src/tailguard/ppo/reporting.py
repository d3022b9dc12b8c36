"""What an update leaves in the log, and what the controls make of it. ``docs/metrics.md`` explains every key."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from tailguard.optim.vgs import VarianceGradientScaler
from tailguard.ppo.calibration import Calibration
from tailguard.ppo.critic import CriticConfig
from tailguard.ppo.diagnostics import (
    EpisodeReturns,
    Moments,
    StageProfile,
    memory_metrics,
    reserve_metrics,
    tail_metrics,
    twin_metrics,
    value_metrics,
)
from tailguard.ppo.experience import Experience
from tailguard.ppo.policy import DistributionalPolicy
from tailguard.ppo.return_units import ReturnUnits
from tailguard.ppo.schedules import EntropySchedule, KLControl, LearningRate
from tailguard.ppo.trunk import State
from tailguard.ppo.update import KL, LOSSES

# The tail whose predicted and realised mean are logged.
TAIL = 0.05


class Reporting(ReturnUnits):
    """What :class:`DistributionalPPO` says about its updates. The names below are the model's."""

    policy: DistributionalPolicy
    critic: CriticConfig
    vgs: VarianceGradientScaler
    kl: KLControl
    entropy: EntropySchedule
    lr: LearningRate
    profile: StageProfile
    episode_returns: EpisodeReturns
    calibration: Calibration
    logger: Any  # of Stable-Baselines3
    ep_info_buffer: Any
    _n_updates: int
    _current_progress_remaining: float
    _last_memory: State
    _critic_state: State
    _vec_normalize_env: Any

    def _log_update(self, log: list[Tensor], experience: Experience, lr: float) -> None:
        if self.critic.ev_reserve:
            for name, value in reserve_metrics(self.policy, self.critic, experience).items():
                self.logger.record(name, value)
        if not log:  # no step was taken: there is nothing more to report, and nothing for the controls to react to
            return
        means = torch.stack(log).mean(0).tolist()
        metrics = dict(zip((f"train/{name}" for name in LOSSES), means, strict=False))
        metrics |= {"train/grad_norm": means[-1], "train/learning_rate": lr, "train/entropy_coefficient": self.entropy.value}
        metrics |= {"train/return_mean": self._ret_mean_snapshot, "train/return_std": self._ret_std_snapshot}
        metrics |= twin_metrics(means[len(LOSSES) : -1])
        metrics |= value_metrics(experience)
        metrics |= tail_metrics(experience.start_atoms, self.policy.law.masses, self.episode_returns, TAIL)
        metrics |= self.calibration.metrics()
        if self.policy.log_std is not None:
            metrics["train/std"] = self.policy.log_std.exp().mean().item()
        if self.policy.recurrent:
            metrics |= memory_metrics(self._last_memory, self._critic_state)
        if self.vgs.config.enabled:
            metrics |= self.vgs.metrics()
        for name, value in (metrics | self.profile.take()).items():
            self.logger.record(name, value)
        self.logger.record("train/n_updates", self._n_updates, exclude="tensorboard")
        self.kl.update(means[KL], self.lr.base_at(self._current_progress_remaining))
        finished = [episode["r"] for episode in self.ep_info_buffer or []]
        self.entropy.step(float(np.mean(finished)) if finished else None, metrics["train/explained_variance"])

    def _observation_moments(self) -> Moments | None:
        """Mean and standard deviation by which a user's VecNormalize scales observations; None without one."""
        env = self._vec_normalize_env
        if env is None or not env.norm_obs or isinstance(env.obs_rms, dict):
            return None
        return np.array(env.obs_rms.mean), np.sqrt(np.array(env.obs_rms.var) + env.epsilon)

    def _log_drift(self, mean: float, std: float) -> None:
        self.logger.record("debug/vecnormalize_mean_drift", mean)
        self.logger.record("debug/vecnormalize_std_drift", std)
