"""A policy that acts on perturbed observations: attacked by an adversary, late, missing or noisy."""

from typing import Any, Literal, cast, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tailguard.ppo.adversary import least_likely_actions, values
from tailguard.ppo.networks import State, reset_state
from tailguard.ppo.policy import DistributionalPolicy
from tailguard.robust.attacks import Objective, StatePerturbation, divergence, frozen, low_value, toward
from tailguard.robust.config import PerturbationConfig
from tailguard.validation import require

Deliberate = Literal["random", "fgsm", "pgd_kl", "critic", "action"]
Natural = Literal["stale", "dropped", "noisy"]
Kind = Literal["clean", "random", "fgsm", "pgd_kl", "critic", "action", "stale", "dropped", "noisy"]
DELIBERATE: tuple[Deliberate, ...] = get_args(Deliberate)
NATURAL: tuple[Natural, ...] = get_args(Natural)


class AttackedPolicy:
    """B episodes of a policy, each under its own strength of one kind of perturbation.

    Only what the policy sees is perturbed, never the environment. The recurrent state follows from what it saw: the adversary
    moves the present observation and finds the state that its earlier moves have left. Moves are made in the units that the
    networks see.

    Deliberate kinds, whose strength is the radius epsilon: ``random``, uniform in the ball; ``fgsm``, one gradient of the KL
    between clean and perturbed policy; ``pgd_kl``, many; ``critic``, towards where the critics expect the least; ``action``,
    towards the action that the policy likes least (Discrete) or the far end of the box. Natural kinds: ``stale``, columns
    arrive that many steps late; ``dropped``, with that probability columns do not arrive and their last values stay;
    ``noisy``, Gaussian noise of that standard deviation.

    :param policy: under attack; its modes, gradients and random numbers stay as they are.
    :param kind: of the perturbation.
    :param strength: ``[B]``, one for each episode, at least 0.
    :param config: steps, restarts, norm and columns of the search; its epsilon is not looked at.
    :param seed: of everything random.
    :param deterministic: act by the mode of the distribution. False samples, as in training: what a small KL promises, it
        promises of the distribution, and the most likely of two choices can change with the smallest of moves.
    """

    def __init__(
        self,
        policy: DistributionalPolicy,
        kind: Kind,
        strength: NDArray[np.float64],
        config: PerturbationConfig,
        seed: int,
        deterministic: bool = True,
    ) -> None:
        require(kind in get_args(Kind), "kind", kind, f"one of {', '.join(get_args(Kind))}")
        require(bool((np.asarray(strength) >= 0.0).all()), "strength", strength, "at least 0")
        whole = kind != "stale" or bool((strength == np.round(strength)).all())
        require(whole, "strength", strength, "whole steps for stale observations")
        self.policy, self.kind = policy, kind
        self.strength = torch.as_tensor(strength, dtype=torch.float32).unsqueeze(-1)  # [B, 1]
        self.generator = torch.Generator().manual_seed(seed)
        self.deterministic, self.samples = deterministic, torch.Generator().manual_seed(seed).get_state()
        self.restarts = config.restarts
        settings = config.model_copy(update={"method": "fgsm" if kind == "fgsm" else "pgd", "keep_best": True, "restarts": 1})
        self.perturbation = StatePerturbation(settings, policy.own_size, policy.budget.features, self.generator)
        self.columns = self.perturbation.scale > 0.0
        self.reset()

    def reset(self) -> None:
        """Begin all episodes."""
        n = len(self.strength)
        self.state: State = self.policy.initial_state(n)
        trunk = self.policy.critic_trunk
        self.critic_state: State | None = None if trunk is None else trunk.initial_state(n)
        self.past: list[Tensor] = []
        self.arrived: Tensor | None = None

    def act(self, obs: NDArray[np.float32], starts: NDArray[np.bool_]) -> NDArray[np.generic]:
        """Return actions for raw observations ``[B, obs_size]``, as the environment expects them.

        :param starts: ``[B]``, true where an episode begins.
        """
        policy = self.policy

        def perturb(inputs: Tensor, state: State) -> Tensor:
            if self.kind in NATURAL:
                return self._natural(inputs, starts)
            return self._deliberate(inputs, state, starts)

        with torch.no_grad():
            dist_params, self.state = policy.respond(obs, self.state, starts, perturb)
            actions = policy.action_dist.mode(dist_params) if self.deterministic else self._sampled(dist_params)
            return policy.action_dist.to_env(actions.numpy())

    def predict(
        self,
        observation: NDArray[Any],
        state: tuple[NDArray[Any], ...] | None,
        episode_start: NDArray[Any] | None,
        deterministic: bool,
    ) -> tuple[NDArray[Any], None]:
        """Act as an agent of :func:`tailguard.evaluate.play.play`; the recurrent state is carried inside.

        :param observation: ``[B, obs_size]``.
        :param state: None.
        :param episode_start: ``[B]``, true where an episode begins.
        :param deterministic: must be what the constructor was given.
        """
        require(deterministic == self.deterministic, "deterministic", deterministic, "that of the constructor")
        starts = np.zeros(len(observation), np.bool_) if episode_start is None else np.asarray(episode_start, np.bool_)
        return self.act(observation, starts), None

    def _sampled(self, dist_params: Tensor) -> Tensor:
        """Draw actions from random numbers of its own, though the distribution uses only those of the process."""
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self.samples)
            actions = self.policy.action_dist.sample(dist_params)
            self.samples = torch.get_rng_state()
        return actions

    def _deliberate(self, inputs: Tensor, state: State, starts: NDArray[np.bool_]) -> Tensor:
        if self.kind == "clean":
            return inputs
        if self.kind == "random":
            return self.perturbation.random(inputs, self.strength).inputs
        with frozen(self.policy.parameters()):
            n = self.restarts
            objective = self._objective(inputs, state, starts)
            perturbed = self.perturbation.attack(inputs.repeat(n, 1), objective, self.strength.repeat(n, 1))
        gain = cast(Tensor, perturbed.gain).reshape(n, -1)  # [restarts, B]
        return perturbed.inputs.reshape(n, *inputs.shape)[gain.argmax(0), torch.arange(len(inputs))]

    def _objective(self, inputs: Tensor, state: State, starts: NDArray[np.bool_]) -> Objective:
        policy, n = self.policy, self.restarts
        if self.kind == "critic":
            return low_value(self._values(inputs, state, starts))
        repeated = _repeated(state, n)

        def dist_params_of(moved: Tensor) -> Tensor:
            return policy.act(moved, repeated)[0]

        clean = dist_params_of(inputs.repeat(n, 1))
        if self.kind == "action":
            return toward(dist_params_of, policy.action_dist.log_prob, least_likely_actions(policy, clean))
        return divergence(dist_params_of, clean, policy.action_dist.sharp_kl)

    def _values(self, inputs: Tensor, state: State, starts: NDArray[np.bool_]) -> Objective:
        """Return what the critics expect of moved inputs; a state of their own follows from the true observations."""
        policy, n, encode = self.policy, self.restarts, self.policy.encode_for_critics
        if policy.critic_layer is not None:
            layer = policy.critic_layer
            return lambda moved: values(policy, layer(encode(moved)))
        if policy.critic_trunk is None:
            trunk, before = policy.actor_trunk, state
        else:
            assert self.critic_state is not None
            trunk, before = policy.critic_trunk, reset_state(self.critic_state, starts)
            self.critic_state = trunk.step(encode(inputs), before)[1]
        if trunk is None:
            return lambda moved: values(policy, encode(moved))
        repeated = _repeated(before, n)
        return lambda moved: values(policy, trunk.step(encode(moved), repeated)[0])

    def _natural(self, inputs: Tensor, starts: NDArray[np.bool_]) -> Tensor:
        if self.kind == "noisy":
            noise = torch.randn(inputs.shape, generator=self.generator)
            return inputs + self.perturbation.radius(self.strength).to(inputs) * noise
        begun = torch.as_tensor(starts).unsqueeze(-1)
        if self.kind == "dropped":
            late = torch.rand((len(inputs), 1), generator=self.generator) < self.strength
            fresh = begun | ~late | ~self.columns
            self.arrived = inputs if self.arrived is None else torch.where(fresh, inputs, self.arrived)
            return self.arrived
        # An episode's first observation stands in for those before it.
        self.past = [torch.where(begun, inputs, old) for old in self.past] + [inputs]
        self.past = self.past[-1 - int(self.strength.max()) :]
        steps = (len(self.past) - 1 - self.strength.long()).clamp(min=0)  # [B, 1]
        old = torch.stack(self.past)[steps.squeeze(-1), torch.arange(len(inputs))]
        return torch.where(self.columns, old, inputs)


def _repeated(state: State, n: int) -> State:
    if not state[0].numel():
        return state
    return state[0].repeat(1, n, 1), state[1].repeat(1, n, 1)
