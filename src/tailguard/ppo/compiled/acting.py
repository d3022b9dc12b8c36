"""One step of acting in compiled passes: memory, head, and the action.

Weights stand still while a rollout is played, so they are laid out for the kernel once, at its start.
"""

import torch
from torch import Tensor
from typing_extensions import override

from tailguard.ppo.acting import Acting, TorchActing
from tailguard.ppo.actions import Categorical
from tailguard.ppo.compiled import kernels as kernels
from tailguard.ppo.compiled import losses as losses
from tailguard.ppo.compiled.lstm import PackedWeights
from tailguard.ppo.compiled.networks import CompiledMlp, Memory, has_kernel, lstm_weights
from tailguard.ppo.networks import FlatParameters
from tailguard.ppo.policy import DistributionalPolicy, RecurrentDistributionalPolicy
from tailguard.ppo.rollout import Rollout
from tailguard.ppo.trunk import State


def acting_of(policy: DistributionalPolicy, flat: FlatParameters, n_envs: int) -> Acting:
    """Compiled acting for this policy, or torch's where it has to do it: see :func:`fused_update.compiled_gradient`."""
    covered = (
        policy.compiled
        and type(policy) in (DistributionalPolicy, RecurrentDistributionalPolicy)
        and flat.tensor.dtype == torch.float32
        and flat.tensor.is_cpu
        and (policy.actor_trunk is None or policy.actor_trunk.n_layers == 1)
        and has_kernel(policy.actor)
        and (isinstance(policy.distribution, Categorical) or policy.free_std)
    )
    return CompiledActing(policy, flat, n_envs) if covered else TorchActing(policy)


class CompiledActing(Acting):
    """For the same number of environments again and again; made by :func:`acting_of`.

    :param policy: that it covers.
    :param flat: its parameters.
    :param n_envs: B.
    """

    def __init__(self, policy: DistributionalPolicy, flat: FlatParameters, n_envs: int) -> None:
        super().__init__(policy)
        self._head = CompiledMlp(flat, "actor", policy.actor, Memory())
        self._log_std = None if policy.log_std is None else policy.log_std.detach().numpy()
        self._trunk = None
        if policy.actor_trunk is not None:
            size = policy.actor_trunk.hidden_size
            self._trunk = [one.numpy() for one in lstm_weights(flat.tensor.detach(), flat, "actor_trunk", size)]
            shapes = PackedWeights.shapes(n_envs, self._trunk[0].shape[1], size)
            self._packed = PackedWeights(*(torch.empty(one).numpy() for one in shapes))
            self._gates = torch.empty(n_envs, 4 * size).numpy()

    @override
    def begin(self, rollout: Rollout) -> None:
        super().begin(rollout)
        self._actions, self._outputs, self._noise_rows = rollout.actions.numpy(), rollout.outputs.numpy(), self._noise.numpy()
        if self._trunk is not None:
            self._packed.fill(*self._trunk)

    @override
    def step(self, rollout: Rollout, obs: Tensor, state: State) -> State:
        t = rollout.filled
        # Columns that a policy is not shown leave gaps between the rows.
        features = self._policy.acting_inputs(obs).contiguous().numpy()
        if self._trunk is not None:
            before, after = (state[0].numpy()[0], state[1].numpy()[0]), torch.empty(2, *state[0].shape)
            hidden, cell = after.numpy()[:, 0]
            kernels.lstm_step(features, *before, *self._packed, self._gates, cell, hidden)
            features, (one, other) = hidden, after.unbind()
            state = one, other
        raw, outputs = self._head.forward(features), self._outputs[t]
        if self._log_std is not None:
            losses.draw_gaussian(raw, self._log_std, self._noise_rows[t], outputs, self._actions[t])
        else:
            outputs[:] = raw
            self._actions[t] = self._distribution.draw(torch.from_numpy(outputs), self._noise[t]).numpy()
        return state
