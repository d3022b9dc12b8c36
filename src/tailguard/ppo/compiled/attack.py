"""An actor under attack in compiled passes: the adversarial objective and SA-PPO's penalty, with their gradients.

The adversary maximises, over perturbed inputs, the distance between an actor's outputs and a goal g, or its negative::

    means:    s sum_a (m_a - g_a)^2 / (2 sigma_a^2)              the KL from g for s = 1, log p(g) but for a constant for s = -1
    choices:  s sum_c -log q(g_c)                                the surprise at g for s = 1, log q(g) for s = -1

In the second, -log q_g = softplus(t) with t = logsumexp of the other logits - z_g, which keeps its digits and those of its
gradient where the actor is all but certain. Training then minimises the robust KL of SA-PPO (Zhang et al. 2020), between the
distributions of clean (c, p) and perturbed (m, q) inputs::

    means:    sum_a (c_a - m_a)^2 / (2 sigma_a^2)                each mean clipped to the box first
    choices:  sum p (log p - log q)                              with the gradients p (log p - log q - KL) and q - p

A search needs the gradient of the inputs only; that of the weights, half of a backward pass, is left out. The penalty's
gradient is written beside the flat gradient and not into it, so that it can be added to that of PPO's loss.
"""

import copy
import math
from typing import NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tailguard.jit import SHARE_DIVISIONS, decorators
from tailguard.optim.layout import FlatParameters
from tailguard.ppo.actions import Categorical, CensoredGaussian
from tailguard.ppo.compiled.applies import acting_applies
from tailguard.ppo.compiled.networks import CompiledLstm, CompiledMlp, Workspace
from tailguard.ppo.networks import State
from tailguard.ppo.policy import DistributionalPolicy
from tailguard.robust.attacks import DifferentiableObjective

Array = NDArray[np.float32]
ZERO, ONE, HALF = np.float32(0.0), np.float32(1.0), np.float32(0.5)

compiled, inlined = decorators(SHARE_DIVISIONS)


@compiled
def means_objective(
    means: Array, goal: Array, precision: Array, sign: np.float32, weights: Array, values: Array, grad_outputs: Array
) -> None:
    """Fill ``values[M]`` and ``grad_outputs[M, A]`` from ``means[M, A]``, the goal ``[M, A]`` and 1 / sigma^2 ``[A]``."""
    for m in range(len(means)):
        weight, total = sign * weights[m], ZERO
        for a in range(means.shape[1]):
            apart = means[m, a] - goal[m, a]
            pulled = precision[a] * apart
            total += HALF * pulled * apart
            grad_outputs[m, a] = weight * pulled if weight != ZERO else ZERO
        values[m] = weight * total if weight != ZERO else ZERO


@compiled
def choices_objective(
    logits: Array, counts: NDArray[np.int64], goal: Array, sign: np.float32, weights: Array, values: Array, grad_outputs: Array
) -> None:
    """Fill ``values[M]`` and ``grad_outputs[M, n]`` from ``logits[M, n]`` of choices among `counts` and the goal ``[M, C]``."""
    for m in range(len(logits)):
        weight, total, first = sign * weights[m], ZERO, 0
        for c in range(len(counts)):
            z, grad, g = logits[m, first : first + counts[c]], grad_outputs[m, first : first + counts[c]], int(goal[m, c])
            first += counts[c]
            top = np.float32(-np.inf)
            for j in range(len(z)):
                top = z[j] if j != g and z[j] > top else top
            mass = ZERO
            for j in range(len(z)):
                grad[j] = np.exp(z[j] - top) if j != g else ZERO
                mass += grad[j]
            if len(z) < 2 or weight == ZERO:  # nothing to choose, or no weight
                grad[:] = ZERO
                continue
            t = top + np.log(mass) - z[g]
            away = np.exp(-abs(t))
            total += (t if t > ZERO else ZERO) + np.float32(math.log1p(away))
            rate = weight * (ONE / (ONE + away) if t > ZERO else away / (ONE + away))  # sigmoid(t)
            for j in range(len(z)):
                grad[j] *= rate / mass
            grad[g] = -rate
        values[m] = weight * total


@compiled
def means_kl(
    clean: Array,
    perturbed: Array,
    low: Array,
    high: Array,
    precision: Array,
    weights: Array,
    scale: float,
    grad_clean: Array,
    grad_perturbed: Array,
) -> float:
    """Return the weighted sum of the KL of means ``[M, A]`` clipped to a box ``[A]``; fill `scale` times its gradient."""
    total = 0.0
    for m in range(len(clean)):
        for a in range(clean.shape[1]):
            before, after = min(max(clean[m, a], low[a]), high[a]), min(max(perturbed[m, a], low[a]), high[a])
            pulled = weights[m] * precision[a] * (before - after) if weights[m] != ZERO else ZERO
            grad_clean[m, a] = np.float32(scale) * pulled if before == clean[m, a] else ZERO
            grad_perturbed[m, a] = -np.float32(scale) * pulled if after == perturbed[m, a] else ZERO
            total += 0.5 * pulled * (before - after) if weights[m] != ZERO else 0.0
    return total


@inlined
def _log_softmax(logits: Array, out: Array) -> None:
    top = logits.max()
    mass = ZERO
    for j in range(len(logits)):
        mass += np.exp(logits[j] - top)
    shift = top + np.log(mass)
    for j in range(len(logits)):
        out[j] = logits[j] - shift


@compiled
def choices_kl(
    clean: Array,
    perturbed: Array,
    counts: NDArray[np.int64],
    weights: Array,
    scale: float,
    grad_clean: Array,
    grad_perturbed: Array,
) -> float:
    """Return the weighted sum of the KL of choices among `counts` with logits ``[M, n]``; fill `scale` times its gradient."""
    total = 0.0
    for m in range(len(clean)):
        first = 0
        for c in range(len(counts)):
            last = first + counts[c]
            log_p, log_q = grad_clean[m, first:last], grad_perturbed[m, first:last]  # replaced by gradients below
            if weights[m] == ZERO:
                log_p[:], log_q[:], first = ZERO, ZERO, last
                continue
            _log_softmax(clean[m, first:last], log_p)
            _log_softmax(perturbed[m, first:last], log_q)
            kl = ZERO
            for j in range(len(log_p)):
                kl += np.exp(log_p[j]) * (log_p[j] - log_q[j])
            share = np.float32(scale) * weights[m]
            for j in range(len(log_p)):
                p, q, apart = np.exp(log_p[j]), np.exp(log_q[j]), log_p[j] - log_q[j]
                log_p[j], log_q[j] = share * p * (apart - kl), share * (q - p)
            total += weights[m] * kl
            first = last
    return total


def compiled_actor(policy: DistributionalPolicy, flat: FlatParameters) -> "AttackedActor | None":
    """Return the compiled actor of this policy, or None where torch has to do it.

    What can act compiled can be attacked compiled, but for censored actions, whose KL has no compiled gradient of its own.
    """
    if isinstance(policy.action_dist, CensoredGaussian) or not acting_applies(policy):
        return None
    return AttackedActor(policy, flat)


class View(NamedTuple):
    """The context in which an actor sees inputs ``[..., D]``.

    :param state: recurrent state before the first step of each sequence, ``[1, B, H]`` twice; empty without LSTM.
    :param resets: ``[L, B, 1]``, 1 at reset steps of sequences ``[L, B, D]``; None: every input is a sequence of its own.
    :param weights: ``[L, B]``, of the steps of sequences that are scored as a whole; None scores each input by itself.
    """

    state: State
    resets: Tensor | None = None
    weights: Tensor | None = None


class AttackedActor:
    """Trunk and head of a policy's actor; made by :func:`compiled_actor`.

    A forward pass keeps what its backward pass needs until the next one.

    :param policy: under attack.
    :param flat: its parameters.
    """

    def __init__(self, policy: DistributionalPolicy, flat: FlatParameters) -> None:
        self.policy = policy
        workspace, beside = Workspace(), copy.copy(flat)
        beside.gradient = torch.zeros_like(flat.gradient)
        self.gradient = beside.gradient
        self.head = CompiledMlp(beside, "actor", policy.actor, workspace)
        trunk = policy.actor_trunk
        self.trunk = None if trunk is None else CompiledLstm(beside, "actor_trunk", trunk.hidden_size, workspace)

    def forward(self, inputs: Tensor, view: View) -> Array:
        """Return the outputs ``[M, n]`` of the last layer for inputs ``[..., D]``; the next pass overwrites them."""
        self._inputs = inputs.detach().contiguous()
        rows = self._inputs.view(-1, inputs.shape[-1])
        if self.trunk is None:
            return self.head.forward(rows.numpy())
        resets = torch.zeros(1, len(rows)) if view.resets is None else view.resets[..., 0].contiguous()
        sequences = rows.view(*resets.shape, -1)
        arrays = (tensor.detach().numpy() for tensor in (sequences, resets, view.state[0][0], view.state[1][0]))
        return self.head.forward(self.trunk.forward(*arrays))

    def input_gradient(self) -> Tensor:
        """Return the gradient of the inputs, in their shape, given that of the outputs in ``head.grad_outputs``."""
        grad_inputs = torch.empty(self._inputs.shape)
        rows = grad_inputs.view(-1, grad_inputs.shape[-1])
        if self.trunk is None:
            self.head.input_gradient(rows.numpy())
        else:
            self.head.input_gradient(self.trunk.grad_features)
            self.trunk.input_gradient(rows.numpy())
        return grad_inputs

    def backward(self) -> None:
        """Fill :attr:`gradient`, laid out as the flat parameters, given that of the outputs; it is 0 outside of the actor."""
        if self.trunk is None:
            self.head.backward(np.empty((0, 0), np.float32))
        else:
            self.head.backward(self.trunk.grad_features)
            self.trunk.backward()

    def dist_params(self, outputs: Tensor) -> Tensor:
        """Return the distribution parameters from the last layer's outputs, without a gradient in the deviation."""
        log_std = self.policy.log_std
        return outputs if log_std is None else torch.cat((outputs, log_std.detach().expand_as(outputs)), dim=-1)


class RobustKL:
    """SA-PPO's penalty: the KL between an actor's distributions for clean and for perturbed inputs.

    It takes two actors of one policy, since what one keeps for its backward pass must outlast the passes of the other.

    :param clean: for the clean inputs.
    :param perturbed: for the perturbed ones, and the searches for them.
    :param box: lower and upper end where means are clipped, ``[A]`` each; None where they are not.
    """

    def __init__(self, clean: AttackedActor, perturbed: AttackedActor, box: tuple[Tensor, Tensor] | None) -> None:
        self.clean, self.perturbed = clean, perturbed
        action_dist, self._log_std = clean.policy.action_dist, clean.policy.log_std
        self._counts = np.array(action_dist.counts) if isinstance(action_dist, Categorical) else None
        low, high = (torch.full((action_dist.n_params,), end) for end in (-torch.inf, torch.inf)) if box is None else box
        self._low: Array = low.float().contiguous().numpy()
        self._high: Array = high.float().contiguous().numpy()

    def add_gradient(self, weights: Tensor, scale: float, gradient: Tensor) -> float:
        """Return the weighted sum of the KL of the last passes of both; add `scale` times its gradient to the flat `gradient`.

        :param weights: of the samples; those of weight 0 may hold anything.
        """
        heads, weight = (self.clean.head, self.perturbed.head), weights.reshape(-1).contiguous().numpy()
        outputs, grad_outputs = (heads[0].outputs, heads[1].outputs), (heads[0].grad_outputs, heads[1].grad_outputs)
        if self._counts is not None:
            total = choices_kl(*outputs, self._counts, weight, scale, *grad_outputs)
        else:
            precision: Array = torch.exp(-2.0 * cast(Tensor, self._log_std).detach()).numpy()
            total = means_kl(*outputs, self._low, self._high, precision, weight, scale, *grad_outputs)
        for actor in (self.clean, self.perturbed):
            actor.backward()
            gradient += actor.gradient
        return total


class CompiledObjective(DifferentiableObjective):
    """The adversarial objective: the distance of an actor's outputs from a goal, or its negative, with its gradient.

    :param actor: under attack.
    :param goal: ``[..., k]``, means, or one alternative for each choice.
    :param away: maximise the distance from the goal (True), or minimise it.
    :param view: the context of the inputs.
    """

    def __init__(self, actor: AttackedActor, goal: Tensor, away: bool, view: View) -> None:
        self.actor, self.view = actor, view
        self._goal = goal.detach().reshape(-1, goal.shape[-1]).contiguous().numpy()
        self._sign = np.float32(1.0 if away else -1.0)
        even = np.ones(len(self._goal), np.float32)
        self._weights = even if view.weights is None else view.weights.reshape(-1).contiguous().numpy()
        action_dist = actor.policy.action_dist
        self._counts = np.array(action_dist.counts) if isinstance(action_dist, Categorical) else None
        log_std = actor.policy.log_std
        self._precision = None if log_std is None else torch.exp(-2.0 * log_std.detach()).numpy()

    def __call__(self, inputs: Tensor) -> Tensor:
        """Return the objective for each input, or for each sequence."""
        actor = self.actor
        raw = actor.forward(inputs, self.view)
        values, grad_outputs = np.empty(len(raw), np.float32), actor.head.grad_outputs
        if self._counts is None:
            means_objective(raw, self._goal, cast(Array, self._precision), self._sign, self._weights, values, grad_outputs)
        else:
            choices_objective(raw, self._counts, self._goal, self._sign, self._weights, values, grad_outputs)
        each = torch.from_numpy(values).reshape(inputs.shape[:-1])
        return each if self.view.weights is None else each.sum(0)

    def gradient(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradient of the summed objective in the inputs, and the objective."""
        value = self(inputs)
        return self.actor.input_gradient(), value
