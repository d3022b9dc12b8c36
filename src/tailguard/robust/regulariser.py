"""State-adversarial training (SA-PPO, Zhang et al. 2020): the robust KL as a loss, and the schedule of epsilon."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tailguard.robust.attacks import Divergence, Objective, Perturbed, StatePerturbation
from tailguard.robust.config import SAPPOConfig
from tailguard.validation import require

# Sums over an update, by their place.
_KL, _SHARE, _NORM, _SAMPLES, _PERTURBED, _ATTACKS = range(6)


def horizon(total_timesteps: int, n_steps: int, n_envs: int) -> int:
    """Return the number of updates in a training, at least 1: each consumes `n_steps` of every environment."""
    return max(total_timesteps // (n_steps * n_envs), 1)


def epsilon_at(config: SAPPOConfig, update: int, updates: int) -> float:
    """Return the radius in update number `update`, counted from 0; 0 during the warm-up.

    It is `epsilon` in the first update and exactly `epsilon_final` in the last of `updates`, and after it. A pure function of
    the update: calling it twice changes nothing.

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


class RobustRegulariser:
    """The penalty on the KL between a policy's actions on clean and on adversarially perturbed observations.

    :param config: the settings.
    :param size: number of the environment's own columns.
    :param extra: number of columns after them that no adversary can reach.
    :param seed: of the searches; they draw from no other generator.
    """

    def __init__(self, config: SAPPOConfig, size: int, extra: int, seed: int) -> None:
        self.config = config
        self.generator = torch.Generator().manual_seed(seed)
        self.perturbation = StatePerturbation(config, size, extra, self.generator)
        self.updates = 0
        self.epsilon = 0.0
        self._sums = torch.zeros(6, dtype=torch.float64)

    @property
    def active(self) -> bool:
        """True if the present update differs from one without an adversary on the same rollout."""
        return self.epsilon > 0.0 and self.config.in_updates

    def epsilon_of_rollout(self, horizon: int) -> float:
        """Return the radius in the rollout that the next update learns from, which is also that of the update."""
        return epsilon_at(self.config, self.updates, horizon)

    def begin(self, horizon: int) -> None:
        """Start an update.

        :param horizon: updates of the whole training.
        """
        self.epsilon = self.epsilon_of_rollout(horizon)
        self.updates += 1
        self._sums.zero_()

    def perturb(self, inputs: Tensor, objective: Objective) -> Perturbed:
        """Return the worst inputs that the search finds within the present radius."""
        return self.perturbation.attack(inputs, objective, self.epsilon)

    def choose(self, n: int) -> Tensor:
        """Draw the samples or sequences to perturb: `adversarial_ratio` of `n`, at least one, in random order."""
        count = max(round(self.config.adversarial_ratio * n), 1)
        return torch.randperm(n, generator=self.generator)[:count]

    def penalty(
        self, worst: Perturbed, clean: Tensor, perturbed: Tensor, kl: Divergence, share: Tensor, chosen_share: Tensor
    ) -> Tensor:
        """Return SA-PPO's penalty, coefficient times mean KL(policy(clean) || policy(perturbed)); the chosen stand for all.

        :param worst: the perturbation of the chosen samples.
        :param clean: ``[..., n]``, distribution parameters for their clean inputs, with a gradient.
        :param perturbed: ``[..., n]``, distribution parameters for their perturbed inputs, with a gradient.
        :param kl: from two sets of distribution parameters ``[..., n]`` to the KL ``[...]``.
        :param share: weight of every sample in the minibatch's loss.
        :param chosen_share: ``[...]``, weight of the chosen ones.
        """
        counts = chosen_share > 0.0
        each = torch.where(counts, kl(clean, perturbed), 0.0)  # samples of weight 0 may hold anything
        mean = (chosen_share * each).sum() / chosen_share.sum().clamp(min=torch.finfo(share.dtype).tiny)
        mean = mean * share.sum()
        self.record(worst, mean.detach(), share, counts)
        return self.config.coefficient * mean

    def record(self, worst: Perturbed, mean: Tensor, share: Tensor, counts: Tensor) -> None:
        """Add a minibatch to the sums of :meth:`metrics`.

        :param worst: the perturbation of the chosen samples.
        :param mean: their mean KL times the minibatch's total share.
        :param share: weight of every sample in the minibatch's loss.
        :param counts: True for the chosen samples of positive weight.
        """
        norm = torch.where(counts, self.perturbation.lengths(worst.move), 0.0).sum()
        sums = (mean, share.sum(), norm, (share > 0.0).sum(), counts.sum(), share.new_ones(()))
        self._sums += torch.stack([value.to(share) for value in sums]).cpu()

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the present update so far."""
        sums = self._sums.tolist()
        samples, perturbed = max(sums[_SAMPLES], 1.0), max(sums[_PERTURBED], 1.0)
        kl = sums[_KL] / max(sums[_SHARE], 1e-8)
        return {
            "sa_ppo/enabled": float(self.epsilon > 0.0),
            "sa_ppo/update_count": float(self.updates),
            "sa_ppo/current_epsilon": self.epsilon,
            "sa_ppo/robust_kl": kl,
            "sa_ppo/robust_kl_penalty": self.config.coefficient * kl,
            "sa_ppo/attack_count": sums[_ATTACKS],
            "sa_ppo/avg_perturbation_norm": sums[_NORM] / perturbed,
            "sa_ppo/adversarial_samples": sums[_PERTURBED],
            "sa_ppo/clean_samples": sums[_SAMPLES] - sums[_PERTURBED],
            "sa_ppo/adversarial_ratio": sums[_PERTURBED] / samples,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the schedule and of the random numbers."""
        return {"updates": self.updates, "generator": self.generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self.updates = int(state["updates"])
        self.generator.set_state(torch.as_tensor(state["generator"], dtype=torch.uint8))
