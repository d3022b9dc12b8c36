"""One step of acting in compiled passes: LSTM, head, and the draw of the action.

Weights do not change during a rollout, so they are laid out for the kernel once, at its start.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from tailguard.optim.layout import FlatParameters
from tailguard.ppo.actions import masked
from tailguard.ppo.compiled import kernels
from tailguard.ppo.compiled.applies import acting_applies
from tailguard.ppo.compiled.networks import CompiledMlp, PackedWeights, Workspace, lstm_weights
from tailguard.ppo.networks import State
from tailguard.ppo.policy import DistributionalPolicy
from tailguard.ppo.rollout import Acting, Rollout, SdeActing


def acting_of(policy: DistributionalPolicy, flat: FlatParameters, n_envs: int, sde_sample_freq: int = -1) -> Acting:
    """Return compiled acting for this policy, or torch's where it does not apply.

    :param sde_sample_freq: steps after which a policy with gSDE draws new noise; -1 for once in a rollout.
    """
    if policy.use_sde:
        return SdeActing(policy, sde_sample_freq)
    return CompiledActing(policy, flat, n_envs) if acting_applies(policy) else Acting(policy)


class CompiledActing(Acting):
    """Acting in compiled passes, for a fixed number of environments; made by :func:`acting_of`.

    :param policy: to act with.
    :param flat: its parameters.
    :param n_envs: number of environments, B.
    """

    def __init__(self, policy: DistributionalPolicy, flat: FlatParameters, n_envs: int) -> None:
        super().__init__(policy)
        self._head = CompiledMlp(flat, "actor", policy.actor, Workspace())
        self._log_std = None if policy.log_std is None else policy.log_std.detach().numpy()
        self._trunk = None
        if policy.actor_trunk is not None:
            size = policy.actor_trunk.hidden_size
            self._trunk = [weight.numpy() for weight in lstm_weights(flat.tensor.detach(), flat, "actor_trunk", size)]
            shapes = PackedWeights.shapes(self._trunk[0].shape[1], size)
            self._packed = PackedWeights(*(torch.empty(shape).numpy() for shape in shapes))
            self._gates = torch.empty(n_envs, 4, size).numpy()

    @override
    def begin(self, rollout: Rollout) -> None:
        super().begin(rollout)
        self._noise_rows = self._noise.numpy()
        self._head.pack(rollout.n_envs)
        if self._trunk is not None:
            self._packed.fill(*self._trunk)

    @override
    def step(self, rollout: Rollout, obs: Tensor, state: State, masks: NDArray[np.bool_] | None = None) -> State:
        t = rollout.filled
        # Contiguous: columns that are no inputs leave gaps between the rows.
        features = self._policy.acting_inputs(obs).contiguous().numpy()
        if self._trunk is not None:
            before, after = (state[0].numpy()[0], state[1].numpy()[0]), torch.empty(2, *state[0].shape)
            hidden, cell = after.numpy()[:, 0]
            kernels.lstm_step(features, *before, *self._packed, self._gates, cell, hidden)
            features, state = hidden, (after[0], after[1])
        raw, dist_params = self._head.forward_packed(features), self._dist_params[t]
        if self._log_std is not None:
            kernels.draw_gaussian(raw, self._log_std, self._noise_rows[t], dist_params, self._actions[t])
        else:
            logits = masked(self._action_dist, torch.from_numpy(raw), masks)
            dist_params[:] = logits.numpy()
            self._actions[t] = self._action_dist.draw(logits, self._noise[t]).numpy()
        return state
