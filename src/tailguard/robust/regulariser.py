"""State-adversarial training: how much a policy moves under its worst perturbation, as a loss with a gradient."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tailguard.robust.attacks import Divergence, Objective, Perturbed, StatePerturbation
from tailguard.robust.config import SAPPOConfig
from tailguard.robust.schedule import epsilon_at

# What is summed up over an update, by its place.
_KL, _SHARE, _NORM, _SAMPLES, _PERTURBED, _ATTACKS = range(6)


class RobustRegulariser:
    """Finds perturbations for the batches of an update and makes a loss of them.

    :param config: the settings.
    :param size: columns of the environment's own.
    :param extra: columns after them that nobody may perturb.
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
        """Whether the present update is any different from one without an adversary, on the same rollout."""
        return self.epsilon > 0.0 and self.config.in_updates

    def epsilon_of_rollout(self, horizon: int) -> float:
        """The radius in the rollout that the next update learns from, which is also that of the update."""
        return epsilon_at(self.config, self.updates, horizon)

    def begin(self, horizon: int) -> None:
        """Start an update.

        :param horizon: updates of the whole training.
        """
        self.epsilon = self.epsilon_of_rollout(horizon)
        self.updates += 1
        self._sums.zero_()

    def perturb(self, inputs: Tensor, objective: Objective) -> Perturbed:
        """The worst inputs within the present radius."""
        return self.perturbation.attack(inputs, objective, self.epsilon)

    def choose(self, n: int) -> Tensor:
        """Which of n samples or sequences are perturbed: `adversarial_ratio` of them, at least one, in random order."""
        count = max(round(self.config.adversarial_ratio * n), 1)
        return torch.randperm(n, generator=self.generator)[:count]

    def penalty(
        self, found: Perturbed, clean: Tensor, perturbed: Tensor, kl: Divergence, share: Tensor, chosen_share: Tensor
    ) -> Tensor:
        """The coefficient times the mean KL(clean || perturbed), sample by sample; the chosen stand for all.

        :param found: the perturbation of the chosen samples.
        :param clean: ``[..., n]``, what the policy says of their clean inputs; the gradient goes here
        :param perturbed: and here.
        :param share: of all samples in the minibatch's loss.
        :param chosen_share: ``[...]``, of the chosen ones.
        """
        counts = chosen_share > 0.0
        each = torch.where(counts, kl(clean, perturbed), 0.0)  # where nothing is learnt there may be anything
        mean = (chosen_share * each).sum() / chosen_share.sum().clamp(min=torch.finfo(share.dtype).tiny)
        mean = mean * share.sum()
        self.record(found, mean.detach(), share, counts)
        return self.config.coefficient * mean

    def record(self, found: Perturbed, mean: Tensor, share: Tensor, counts: Tensor) -> None:
        """Remember a minibatch for :meth:`metrics`.

        :param found: the perturbation of the chosen samples.
        :param mean: their KL, as the minibatch's share of the loss has it.
        :param share: of all samples in the minibatch's loss.
        :param counts: which of the chosen ones count.
        """
        norm = torch.where(counts, self.perturbation.lengths(found.move), 0.0).sum()
        sums = (mean, share.sum(), norm, (share > 0.0).sum(), counts.sum(), torch.ones(()))
        self._sums += torch.stack([one.double() for one in sums])

    def metrics(self) -> dict[str, float]:
        """What the present update has met so far."""
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
        """Where the schedule and the random numbers stand."""
        return {"updates": self.updates, "generator": self.generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self.updates = int(state["updates"])
        self.generator.set_state(torch.as_tensor(state["generator"], dtype=torch.uint8))
