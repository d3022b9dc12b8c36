"""One step of acting in compiled passes: memory, head, and what describes the action distribution.

Weights stand still while a rollout is played, so they are laid out for the kernel once, at its start.
"""

import numpy as np
import torch
from torch import Tensor

from tailguard.ppo import fused_kernels as kernels
from tailguard.ppo.actions import Categorical
from tailguard.ppo.fused_networks import FusedMlp, Memory, has_kernel, lstm_weights
from tailguard.ppo.lstm_kernel import padded
from tailguard.ppo.networks import FlatParameters
from tailguard.ppo.policy import DistributionalPolicy, RecurrentDistributionalPolicy
from tailguard.ppo.trunk import State


def fused_acting(policy: DistributionalPolicy, flat: FlatParameters, n_envs: int) -> "FusedActing | None":
    """Compiled acting for this policy, or None where torch has to do it: see :func:`fused_update.fused_gradient`."""
    covered = (
        policy.compiled
        and type(policy) in (DistributionalPolicy, RecurrentDistributionalPolicy)
        and flat.tensor.dtype == torch.float32
        and flat.tensor.is_cpu
        and (policy.actor_trunk is None or policy.actor_trunk.n_layers == 1)
        and has_kernel(policy.actor)
        and (isinstance(policy.distribution, Categorical) or policy.free_std)
    )
    return FusedActing(policy, flat, n_envs) if covered else None


class FusedActing:
    """What ``policy.act`` does, for the same number of environments again and again; made by :func:`fused_acting`.

    :param policy: that it covers.
    :param flat: its parameters.
    :param n_envs: B.
    """

    def __init__(self, policy: DistributionalPolicy, flat: FlatParameters, n_envs: int) -> None:
        self._head = FusedMlp(flat, "actor", policy.actor, Memory())
        self._log_std = None if policy.log_std is None else policy.log_std.detach().numpy()
        self._trunk = None
        if policy.actor_trunk is not None:
            size = policy.actor_trunk.hidden_size
            self._trunk = lstm_weights(flat.tensor.detach(), flat, "actor_trunk", size)
            width = padded(size + self._trunk[0].shape[1])
            shapes = (4, width, size), (4, n_envs, size), (1, n_envs, width), (4, 1, n_envs, size)
            self._weights, self._bias, self._z, self._gates = (torch.empty(one).numpy() for one in shapes)
            self._blanks = np.zeros((1, n_envs), np.float32)

    def begin(self) -> "FusedActing":
        """Take over the weights as they are now."""
        if self._trunk is not None:
            kernels.pack_lstm(*self._trunk, self._weights, self._bias)
        return self

    def __call__(self, inputs: Tensor, state: State) -> tuple[Tensor, State]:
        """As :meth:`DistributionalPolicy.act`, with the weights of the last :meth:`begin`."""
        features = inputs.contiguous().numpy()  # columns that a policy is not shown leave gaps between the rows
        if self._trunk is not None:
            before = state[0].numpy()[0], state[1].numpy()[0]
            after = torch.empty(state[0].shape), torch.empty(state[0].shape)
            hidden, cell = after[0].numpy(), after[1].numpy()
            packed = self._weights, self._bias, self._z, self._gates
            kernels.lstm_forward(features[None], self._blanks, *before, *packed, cell, hidden)
            features, state = hidden[0], after
        raw = self._head.forward(features)
        if self._log_std is None:
            return torch.from_numpy(raw.copy()), state
        outputs = np.empty((len(raw), 2 * len(self._log_std)), np.float32)
        kernels.beside_constant(raw, self._log_std, outputs)
        return torch.from_numpy(outputs), state
