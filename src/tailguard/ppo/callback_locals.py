"""Values and log-probabilities that callbacks find in ``locals``, as in SB3.

The critics do not act: they see a rollout once, after its last step. A callback that reads ``self.locals["values"]`` at a step
makes them look at the steps since the last time it asked; nothing is computed for callbacks that do not ask.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from stable_baselines3.common.callbacks import BaseCallback, CallbackList, ConvertCallback
from torch import Tensor
from typing_extensions import override

from tailguard.ppo.config import CriticConfig
from tailguard.ppo.critic import aggregate_values
from tailguard.ppo.networks import State, reset_state
from tailguard.ppo.policy import DistributionalPolicy
from tailguard.ppo.rollout import Rollout


class StepValues:
    """The predictions of the critics for the steps of a rollout while it is being filled.

    :param policy: its weights stand still during the rollout.
    :param rollout: the steps.
    :param critic: settings of the critics.
    :param state: recurrent state of the critics before the first step.
    """

    def __init__(self, policy: DistributionalPolicy, rollout: Rollout, critic: CriticConfig, state: State) -> None:
        self._policy, self._rollout, self._critic, self._state = policy, rollout, critic, state
        self._seen = 0  # steps that the critics have looked at
        self._values: Tensor | None = None  # of the last of them

    def values(self) -> Tensor:
        """Return mean returns ``[B, 1]`` from the last observation that was acted on; after a whole rollout, the next."""
        rollout, policy = self._rollout, self._policy
        with torch.no_grad():
            while self._seen <= rollout.observed:
                t = self._seen
                features = policy.encode_for_critics(policy.inputs(rollout.obs[t]))
                trunk = policy.critic_trunk or policy.actor_trunk
                if policy.critic_layer is not None:
                    features = policy.critic_layer(features)
                elif trunk is not None:
                    if t:
                        ended = (rollout.terminated[t - 1] | rollout.truncated[t - 1]).numpy()
                        self._state = reset_state(self._state, ended)
                    features, self._state = trunk.step(features, self._state)
                self._seen += 1
                if self._seen > rollout.observed:
                    means = policy.raw_atoms(features) @ policy.return_dist.masses.cpu()
                    self._values = aggregate_values(self._critic, means).unsqueeze(-1)
        if self._values is None:
            raise KeyError("values are known from the first step of a rollout on")
        return self._values

    def log_probs(self) -> Tensor:
        """Return the log-probabilities ``[B]`` of the actions that were taken last."""
        t = self._rollout.filled - 1
        if t < 0:
            raise KeyError("log_probs are known from the first step of a rollout on")
        return self._rollout.action_dist.log_prob(self._rollout.dist_params[t], self._rollout.actions[t])


class StepLocals(dict[str, Any]):
    """Variables of a step, and what is computed when a callback asks for it.

    :param variables: those of the training.
    :param on_demand: from names to functions that return their values.
    """

    def __init__(self, variables: Mapping[str, Any], on_demand: Mapping[str, Callable[[], Any]]) -> None:
        super().__init__(variables)
        self._on_demand = on_demand

    def __missing__(self, name: str) -> Any:
        """Compute what is asked for."""
        return self._on_demand[name]()

    @override
    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or name in self._on_demand

    @override
    def get(self, name: str, default: Any = None) -> Any:
        try:
            return self[name]
        except KeyError:
            return default


class WithStepLocals(CallbackList):
    """The user's callbacks, which share one :class:`StepLocals`.

    :param callbacks: the user's, functions among them.
    :param on_demand: see :class:`StepLocals`.
    """

    def __init__(self, callbacks: Sequence[Any], on_demand: Mapping[str, Callable[[], Any]]) -> None:
        super().__init__([each if isinstance(each, BaseCallback) else ConvertCallback(each) for each in callbacks])
        self._on_demand = on_demand

    @override
    def on_training_start(self, locals_: dict[str, Any], globals_: dict[str, Any]) -> None:
        super().on_training_start(StepLocals(locals_, self._on_demand), globals_)
