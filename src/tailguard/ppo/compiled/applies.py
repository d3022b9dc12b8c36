"""The predicates that decide between the compiled passes and torch. Nothing else decides it."""

import torch
from torch import nn

from tailguard.ppo.actions import Categorical
from tailguard.ppo.compiled.networks import has_kernel
from tailguard.ppo.critic import MeanReturn, QuantileReturns
from tailguard.ppo.networks import LstmTrunk, RecurrentTrunk
from tailguard.ppo.policy import DistributionalPolicy, RecurrentDistributionalPolicy


def acting_applies(policy: DistributionalPolicy) -> bool:
    """Return True if the actor can be run compiled.

    Covered: observations that need no feature extractor; float32 on the CPU; an LSTM of one layer, or none; a head with tanh or
    ReLU; any actions but those with a state-dependent standard deviation. A subclass may compute something else and is not
    covered.
    """
    parameter = next(policy.parameters())
    return (
        policy.compiled
        and type(policy) in (DistributionalPolicy, RecurrentDistributionalPolicy)
        and policy.features_extractor is None
        and parameter.dtype == torch.float32
        and parameter.is_cpu
        and (policy.actor_trunk is None or _has_lstm_kernel(policy.actor_trunk))
        and has_kernel(policy.actor)
        and (isinstance(policy.action_dist, Categorical) or policy.free_std)
    )


def update_applies(policy: DistributionalPolicy, *, whole_minibatches: bool = True, clips_values: bool = False) -> bool:
    """Return True if the gradient of the loss can be computed compiled now.

    Covered beyond :func:`acting_applies`: critics of one number, or of quantiles with kappa = 0, without clipping. Only
    autograd leaves out frozen parameters, calls hooks on parameters and accumulates over parts of a minibatch.

    :param whole_minibatches: False if minibatches are split into microbatches, or mixed with perturbed samples.
    :param clips_values: True if the critics' predictions are clipped.
    """
    return_dist, trunk = policy.return_dist, policy.critic_trunk
    return (
        whole_minibatches
        and not clips_values
        and acting_applies(policy)
        and (trunk is None or _has_lstm_kernel(trunk))
        and policy.critic_layer is None
        and all(isinstance(head, nn.Sequential) and has_kernel(head) for head in policy.critics)
        and (type(return_dist) is MeanReturn or (type(return_dist) is QuantileReturns and return_dist.kappa == 0.0))
        and all(parameter.requires_grad and not parameter._backward_hooks for parameter in policy.parameters())
    )


def _has_lstm_kernel(trunk: RecurrentTrunk) -> bool:
    return isinstance(trunk, LstmTrunk) and trunk.n_layers == 1
