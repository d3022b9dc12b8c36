"""The units in which the critics predict: what the returns say, and what is in force. Under the names of the seeds."""

import torch

from tailguard.ppo.experience import Experience
from tailguard.ppo.policy import DistributionalPolicy
from tailguard.ppo.rollout import Rollout
from tailguard.ppo.targets import gae


class ReturnUnits:
    """What :class:`DistributionalPPO` does with the scale of returns. The names below are the model's."""

    policy: DistributionalPolicy
    gamma: float

    @property
    def _ret_mean_value(self) -> float:
        """The mean of returns as the data say."""
        return self.policy.return_scale.mean.item()

    @property
    def _ret_std_value(self) -> float:
        """Their standard deviation."""
        return self.policy.return_scale.std.item()

    @property
    def _ret_mean_snapshot(self) -> float:
        """The mean of returns in force."""
        return self.policy.return_scale.mean_snapshot.item()

    @property
    def _ret_std_snapshot(self) -> float:
        """The standard deviation of returns in force."""
        return self.policy.return_scale.std_snapshot.item()

    def _first_return_scale(self, rollout: Rollout) -> None:
        """While the critics know nothing the scale comes from rewards alone: their guesses would drown small returns."""
        nothing = torch.zeros_like(rollout.rewards)
        returns = gae(rollout.rewards, nothing, nothing, rollout.terminated, rollout.truncated, self.gamma, 1.0)
        scale = self.policy.return_scale
        scale.update(returns, rollout.weights)
        scale.activate()  # the critics start in these units: they have predicted nothing yet that would have to be kept
        scale.mass.zero_()  # a first guess; the returns proper take its place

    def _finalize_return_stats(self, experience: Experience) -> None:
        """Fold the returns of this rollout into the statistics."""
        self.policy.return_scale.update(experience.returns, experience.weights)

    def _activate_return_scale_snapshot(self) -> None:
        """Put the statistics in force and rescale the critics' last layer, so that no raw prediction moves."""
        self.policy.activate_return_scale()
