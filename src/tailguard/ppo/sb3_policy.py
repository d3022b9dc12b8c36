"""Policies of Stable-Baselines3 as they are: a user's own subclass of ``ActorCriticPolicy``, trained without a change."""

import inspect
from typing import Any

import torch
from gymnasium import spaces
from stable_baselines3.common import distributions
from stable_baselines3.common.policies import ActorCriticPolicy, BasePolicy
from torch import Tensor, nn
from typing_extensions import override

from tailguard.optim.factory import PPO_EPS
from tailguard.ppo.actions import action_distribution
from tailguard.ppo.config import CriticConfig, ReturnScaleConfig, RiskConfig
from tailguard.ppo.critic import build_return_distribution
from tailguard.ppo.observations import ObservationRows
from tailguard.ppo.policy import DistributionalPolicy
from tailguard.ppo.risk import Budget
from tailguard.ppo.scaling import ReturnScale

# What such a policy predicts: the mean return, one number, which it learns from lambda-returns.
SCALAR_CRITIC = CriticConfig(num_quantiles=1, twin=False, target="lambda_return")


class RawReturns(ReturnScale):
    """Returns in their own units: a value of SB3's is not normalised, and nobody may rescale a network that is not ours."""

    @override
    def update(self, returns: Tensor, weights: Tensor | None = None) -> None:
        """Do nothing: the units stay."""


class Sb3PolicyAdapter(DistributionalPolicy):
    """SB3's ``ActorCriticPolicy`` as the algorithm sees a policy: distribution parameters and values of rows of observations.

    Distributions come from ``get_distribution`` and values from ``forward``, in training as well.

    :param policy: the user's; the algorithm's ``policy`` stays this object.
    """

    def __init__(self, policy: ActorCriticPolicy) -> None:
        BasePolicy.__init__(self, policy.observation_space, policy.action_space)
        self.inner = policy
        self.compiled = self.free_std = self.use_sde = False
        given = policy.optimizer_class is not torch.optim.Adam or policy.optimizer_kwargs != {"eps": PPO_EPS}  # SB3's default
        self.optimizer_class = policy.optimizer_class if given else None  # type: ignore[assignment]
        self.optimizer_kwargs = policy.optimizer_kwargs
        self.observations = ObservationRows(policy.observation_space)
        self.obs_size = self.own_size = self.observations.size
        self.action_dist = action_distribution(policy.action_space)
        self.actor_trunk = self.critic_trunk = self.critic_layer = self.vf_features_extractor = self.log_std = None
        self.budget, self.return_scale, self.normalizer = Budget(RiskConfig()), RawReturns(ReturnScaleConfig()), nn.Identity()
        self.add_module("law", build_return_distribution(SCALAR_CRITIC))
        self.critics = nn.ModuleList()

    @override
    def critic_prefixes(self) -> list[str]:
        return ["inner.value_net."]

    @override
    def dist_params(self, features: Tensor) -> Tensor:
        distribution = self.inner.get_distribution(self._observations(features))
        return _dist_params(distribution).unflatten(0, features.shape[:-1])  # type: ignore[no-any-return]

    @override
    def critic_outputs(self, features: Tensor) -> Tensor:
        values: Tensor = self.inner(self._observations(features), deterministic=True)[1]
        return values.reshape(1, *features.shape[:-1], 1)

    def _observations(self, rows: Tensor) -> Any:
        return self.observations.shaped(rows.reshape(-1, self.obs_size))


def is_sb3_policy(policy: object) -> bool:
    """Return True for a subclass of SB3's ``ActorCriticPolicy``.

    :raises ValueError: for a recurrent one of sb3-contrib.
    """
    if not (isinstance(policy, type) and issubclass(policy, ActorCriticPolicy)):
        return False
    if "lstm_states" in inspect.signature(policy.forward).parameters:
        raise ValueError(
            f"{policy.__name__} is a recurrent policy of sb3-contrib: subclass RecurrentDistributionalPolicy instead"
        )
    return True


def adapted(
    policy_class: type[ActorCriticPolicy],
    observation_space: spaces.Space[Any],
    action_space: spaces.Space[Any],
    policy_kwargs: dict[str, Any],
) -> Sb3PolicyAdapter:
    """Build a policy of SB3's and adapt it; the learning rate of its own optimizer, which nobody uses, is 0."""
    return Sb3PolicyAdapter(policy_class(observation_space, action_space, lambda _: 0.0, **policy_kwargs))


def _dist_params(distribution: distributions.Distribution) -> Tensor:
    """Return the parameters ``[B, n_params]`` of a distribution of SB3's, as actions.py has them."""
    inner: Any = distribution.distribution
    if isinstance(distribution, distributions.DiagGaussianDistribution):
        return torch.cat((inner.mean, inner.stddev.log()), dim=-1)
    if isinstance(distribution, distributions.CategoricalDistribution):
        logits: Tensor = inner.logits
        return logits
    if isinstance(distribution, distributions.MultiCategoricalDistribution):
        return torch.cat([choice.logits for choice in inner], dim=-1)
    if isinstance(distribution, distributions.BernoulliDistribution):
        return torch.stack((torch.zeros_like(inner.logits), inner.logits), dim=-1).flatten(1)
    raise ValueError(f"{type(distribution).__name__} is not supported: use DistributionalPPO's own policies")
