"""An actor under attack in compiled passes: what it says of moved inputs, and the gradient of an adversary's wish in them.

A search wants the gradient of the inputs and nothing else; that of the weights, half of a backward pass, is left out. Whoever
wants it afterwards gets it beside the flat gradient and not in it, so that it can be added to what stands there.
"""

import copy
from typing import NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tailguard.ppo.actions import Categorical, CensoredGaussian
from tailguard.ppo.compiled import kernels as kernels
from tailguard.ppo.compiled import objectives as wishes
from tailguard.ppo.compiled.acting import CompiledActing, acting_of
from tailguard.ppo.compiled.lstm import padded
from tailguard.ppo.compiled.networks import CompiledLstm, CompiledMlp, Memory
from tailguard.ppo.networks import FlatParameters
from tailguard.ppo.policy import DistributionalPolicy
from tailguard.ppo.trunk import State
from tailguard.robust.attacks import DifferentiableObjective

Array = NDArray[np.float32]


def compiled_actor(policy: DistributionalPolicy, flat: FlatParameters) -> "FusedActor | None":
    """The compiled actor of this policy, or None where torch has to do it.

    What can act compiled can be attacked compiled, but for censored actions, whose KL has no compiled slope of its own.
    """
    if isinstance(policy.distribution, CensoredGaussian) or not isinstance(acting_of(policy, flat, 1), CompiledActing):
        return None
    return FusedActor(policy, flat)


class InputMlp(CompiledMlp):
    """A head whose gradient in the inputs can be had alone."""

    def _make_room(self, rows: int) -> None:
        super()._make_room(rows)
        self._layers, start = [], 0
        for at, _, n_in, n_out in self._table.tolist():
            weights = self._flat[at : at + n_in * n_out].reshape(n_out, n_in)
            here = slice(start, start + rows * n_out)
            self._layers.append((weights, self._values[here].reshape(rows, n_out), self._slopes[here].reshape(rows, n_out)))
            start += padded(rows * n_out)

    def input_gradient(self, into_inputs: Array) -> None:
        """From :attr:`into_outputs` to the gradient of the inputs ``[M, F]``."""
        for layer in range(len(self._layers) - 1, 0, -1):
            weights, _, slopes = self._layers[layer]
            _, values, below = self._layers[layer - 1]
            np.dot(slopes, weights, out=below)
            wishes.through_activation(values, self._activation, below)
        weights, _, slopes = self._layers[0]
        np.dot(slopes, weights, out=into_inputs)


class InputLstm(CompiledLstm):
    """A memory whose gradient in the inputs can be had alone."""

    def input_gradient(self, into_inputs: Tensor) -> None:
        """From :attr:`into_features` to the gradient of the inputs ``[L B, D]``."""
        self._aligned[:] = self._weights[1]
        kernels.lstm_backward(self._slopes, self._aligned, self._gates, self._cells, *self._state_slopes, self._into_bias)
        gates = torch.from_numpy(self._gates).view(-1, 4 * self._size)  # their gradients by now
        torch.mm(gates, torch.from_numpy(self._weights[0]), out=into_inputs)


class View(NamedTuple):
    """How an actor looks at inputs ``[..., D]``.

    :param state: memory before the first step of each sequence, ``[1, B, H]`` twice; empty for an actor without.
    :param blanks: ``[L, B, 1]``, where memory is wiped in sequences ``[L, B, D]``; None: every input is a sequence of its own.
    :param weights: ``[L, B]``, of the steps of sequences that are judged as a whole; None judges each input by itself.
    """

    state: State
    resets: Tensor | None = None
    weights: Tensor | None = None


class FusedActor:
    """Memory, where there is one, and head of a policy; made by :func:`compiled_actor`.

    A pass forwards keeps what the pass backwards needs until the next one.

    :param policy: that it covers.
    :param flat: its parameters.
    """

    def __init__(self, policy: DistributionalPolicy, flat: FlatParameters) -> None:
        self.policy = policy
        self._memory, beside = Memory(), copy.copy(flat)
        beside.gradient = torch.zeros_like(flat.gradient)
        self.gradient = beside.gradient
        self.head = InputMlp(beside, "actor", policy.actor, self._memory)
        trunk = policy.actor_trunk
        self.trunk = None if trunk is None else InputLstm(beside, "actor_trunk", trunk.hidden_size, self._memory)

    def forward(self, inputs: Tensor, view: View) -> Array:
        """What the last layer says of inputs ``[..., D]``: ``[M, n]``, until the next pass."""
        self._inputs = inputs.detach().contiguous()
        rows = self._inputs.view(-1, inputs.shape[-1])
        if self.trunk is None:
            return self.head.forward(rows.numpy())
        resets = torch.zeros(1, len(rows)) if view.resets is None else view.resets[..., 0].contiguous()
        sequences = rows.view(*resets.shape, -1)
        arrays = (one.detach().numpy() for one in (sequences, resets, view.state[0][0], view.state[1][0]))
        return self.head.forward(self.trunk.forward(*arrays))

    def input_gradient(self) -> Tensor:
        """The gradient of the inputs, in their shape, given that of the outputs in ``head.into_outputs``."""
        into = torch.empty(self._inputs.shape)
        rows = into.view(-1, into.shape[-1])
        if self.trunk is None:
            self.head.input_gradient(rows.numpy())
        else:
            self.head.input_gradient(self.trunk.into_features)
            self.trunk.input_gradient(rows)
        return into

    def backward(self) -> None:
        """Fill :attr:`gradient`, laid out as the flat parameters, given that of the outputs; 0 where the actor is not."""
        if self.trunk is None:
            self.head.backward(np.empty((0, 0), np.float32))
        else:
            self.head.backward(self.trunk.into_features)
            self.trunk.backward()

    def described(self, raw: Tensor) -> Tensor:
        """What the action distribution needs, from the last layer's outputs; no gradient goes into its deviation."""
        log_std = self.policy.log_std
        return raw if log_std is None else torch.cat((raw, log_std.detach().expand_as(raw)), dim=-1)


class SteadyPair:
    """The penalty on what moves an actor: the KL between what it says of clean and of moved inputs.

    Two actors of one policy, since what the one keeps for its way back must outlast the passes of the other.

    :param clean: for the clean inputs.
    :param moved: for the moved ones, and the searches for them.
    :param box: where means are clipped, ``[A]`` each; None where they are not.
    """

    def __init__(self, clean: FusedActor, moved: FusedActor, box: tuple[Tensor, Tensor] | None) -> None:
        self.clean, self.moved = clean, moved
        law, self._log_std = clean.policy.distribution, clean.policy.log_std
        self._counts = np.array(law.counts) if isinstance(law, Categorical) else None
        low, high = (torch.full((law.n_outputs,), end) for end in (-torch.inf, torch.inf)) if box is None else box
        self._low: Array = low.float().contiguous().numpy()
        self._high: Array = high.float().contiguous().numpy()

    def gradient(self, weights: Tensor, scale: float, into: Tensor) -> float:
        """The weighted sum of the KL of the last passes of both; adds `scale` times its gradient to `into`, laid out flat.

        :param weights: of the samples; where they are 0 there may be anything.
        """
        one, other, each = self.clean.head, self.moved.head, weights.reshape(-1).contiguous().numpy()
        outputs, slopes = (one.outputs, other.outputs), (one.into_outputs, other.into_outputs)
        if self._counts is not None:
            total = wishes.steady_choices(*outputs, self._counts, each, scale, *slopes)
        else:
            precision: Array = torch.exp(-2.0 * cast(Tensor, self._log_std).detach()).numpy()
            total = wishes.steady_means(*outputs, self._low, self._high, precision, each, scale, *slopes)
        for actor in (self.clean, self.moved):
            actor.backward()
            into += actor.gradient
        return total


class CompiledObjective(DifferentiableObjective):
    """How far an actor's outputs are from a goal, or how near, with its gradient.

    :param actor: under attack.
    :param goal: ``[..., k]``, what the adversary wants to be far from or near to: means, or one choice for each.
    :param away: far from it (True) or near to it.
    :param view: how the inputs are looked at.
    """

    def __init__(self, actor: FusedActor, goal: Tensor, away: bool, view: View) -> None:
        self.actor, self.view = actor, view
        self._goal = goal.detach().reshape(-1, goal.shape[-1]).contiguous().numpy()
        self._sign = np.float32(1.0 if away else -1.0)
        even = np.ones(len(self._goal), np.float32)
        self._shares = even if view.weights is None else view.weights.reshape(-1).contiguous().numpy()
        law = actor.policy.distribution
        self._counts = np.array(law.counts) if isinstance(law, Categorical) else None
        log_std = actor.policy.log_std
        self._precision = None if log_std is None else torch.exp(-2.0 * log_std.detach()).numpy()

    def __call__(self, inputs: Tensor) -> Tensor:
        """The wish, for each input, or for each sequence."""
        actor = self.actor
        raw = actor.forward(inputs, self.view)
        values, slopes = np.empty(len(raw), np.float32), actor.head.into_outputs
        if self._counts is None:
            wishes.from_means(raw, self._goal, cast(Array, self._precision), self._sign, self._shares, values, slopes)
        else:
            wishes.from_choices(raw, self._counts, self._goal, self._sign, self._shares, values, slopes)
        each = torch.from_numpy(values).reshape(inputs.shape[:-1])
        return each if self.view.weights is None else each.sum(0)

    def slope(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """The gradient of the sum of all wishes in the inputs, and the wishes."""
        value = self(inputs)
        return self.actor.input_gradient(), value
