"""Acting, step by step: from the observation in a rollout to the action that is written beside it."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor
from typing_extensions import override

from tailguard.ppo.policy import DistributionalPolicy
from tailguard.ppo.rollout import Rollout
from tailguard.ppo.trunk import State


class Acting(ABC):
    """Plays rollouts with a policy.

    :param policy: whose weights stand still during a rollout.
    """

    def __init__(self, policy: DistributionalPolicy) -> None:
        self._policy, self._distribution = policy, policy.distribution

    def begin(self, rollout: Rollout) -> None:
        """Get ready for the first step of a rollout.

        The randomness of all its actions is drawn here, since that of a single step takes a good part as long.
        """
        self._noise = self._distribution.noise(rollout.outputs)

    @abstractmethod
    def step(self, rollout: Rollout, obs: Tensor, state: State) -> State:
        """Write the next row of actions, and of what describes their distribution; returns the memory after it.

        :param obs: ``[B, obs_size]`` as the rollout has stored them.
        :param state: memory before them, already reset where an episode begins.
        """


class TorchActing(Acting):
    """With torch's networks: any policy."""

    @override
    def begin(self, rollout: Rollout) -> None:
        super().begin(rollout)
        self._noise_rows = self._noise.unbind()
        self._actions, self._outputs = rollout.actions.numpy(), rollout.outputs.numpy()

    @override
    def step(self, rollout: Rollout, obs: Tensor, state: State) -> State:
        t = rollout.filled
        with torch.inference_mode():
            outputs, state = self._policy.act(self._policy.acting_inputs(obs), state)
            self._actions[t] = self._distribution.draw(outputs, self._noise_rows[t]).numpy()
            self._outputs[t] = outputs.numpy()
        return state
