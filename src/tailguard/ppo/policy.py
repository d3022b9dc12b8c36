"""Actor and quantile critics on recurrent or feed-forward trunks."""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, ClassVar, cast

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from stable_baselines3.common.policies import BasePolicy
from torch import Tensor, nn

from tailguard.ppo.actions import LOG_STD_LIMITS, Gaussian, action_distribution
from tailguard.ppo.critic import CriticConfig
from tailguard.ppo.networks import mlp
from tailguard.ppo.return_distribution import MeanReturn, QuantileReturns
from tailguard.ppo.risk import Budget, RiskConfig
from tailguard.ppo.scaling import ObservationNormalizer, ObsNormConfig, ReturnScale
from tailguard.ppo.trunk import LstmTrunk, State, reset_state
from tailguard.validation import require

NetArch = dict[str, list[int]] | list[int] | None


class DistributionalPolicy(BasePolicy):
    """A policy whose critics predict the whole distribution of the return, in normalised units.

    :param observation_space: a Box; it is flattened.
    :param action_space: Box, Discrete or MultiDiscrete.
    :param critic: number and outputs of the critics, scale of returns.
    :param obs_norm: how observations are normalised; None leaves them as they are.
    :param risk: the objective; unless it is neutral, the last columns of an observation are the running return.
    :param net_arch: hidden layers after the trunk, one list for both or ``{"pi": [...], "vf": [...]}``.
    :param activation_fn: activation between them.
    :param ortho_init: orthogonal initialisation of the feed-forward layers.
    :param log_std_init: initial log standard deviation of continuous actions.
    :param state_dependent_std: let the network choose it instead of learning one number per action.
    :param squash_output: tanh of a Gaussian instead of a clipped Gaussian.
    :param censored: let actions beyond the box count as its end, which is what the environment gets. Less noise for agents that
        go to the limits, such as a trader with costs (actions.py).
    :param lstm_hidden_size: size of the memory.
    :param n_lstm_layers: depth of the memory.
    :param lstm_forget_bias: added to the forget gates of a fresh memory; with 0 it
        loses one half of its content per step, which learns fast what to do with the last few; 1 to 3 for what lies far back.
    :param shared_lstm: one memory for actor and critics instead of one each.
    :param compiled: act and learn in compiled passes where they cover the networks (fused_update.py), which is faster; False
        leaves everything to torch.
    """

    recurrent: ClassVar[bool] = False

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        *,
        critic: CriticConfig,
        obs_norm: ObsNormConfig | None = None,
        risk: RiskConfig | None = None,
        net_arch: NetArch = None,
        activation_fn: type[nn.Module] = nn.Tanh,
        ortho_init: bool = True,
        log_std_init: float = 0.0,
        state_dependent_std: bool = False,
        squash_output: bool = False,
        censored: bool = False,
        lstm_hidden_size: int = 256,
        n_lstm_layers: int = 1,
        lstm_forget_bias: float = 0.0,
        shared_lstm: bool = False,
        compiled: bool = True,
    ) -> None:
        super().__init__(observation_space, action_space, squash_output=squash_output)
        if not isinstance(observation_space, spaces.Box):
            raise ValueError(f"observations must be a Box space, got {observation_space}")
        self.compiled = compiled
        self.obs_size = int(np.prod(observation_space.shape))
        self.distribution = action_distribution(action_space, squash_output, censored)
        actor_layers, critic_layers = _layers(net_arch)
        self.budget = Budget(risk or RiskConfig())
        self.own_size = self.obs_size - self.budget.columns  # columns of the environment's own

        features = input_size = self.own_size + self.budget.features
        self.actor_trunk: LstmTrunk | None = None
        self.critic_trunk: LstmTrunk | None = None
        if self.recurrent:
            require(lstm_hidden_size >= 1, "lstm_hidden_size", lstm_hidden_size, "at least 1")
            require(n_lstm_layers >= 1, "n_lstm_layers", n_lstm_layers, "at least 1")
            require(math.isfinite(lstm_forget_bias), "lstm_forget_bias", lstm_forget_bias, "a finite number")
            sizes = (input_size, lstm_hidden_size, n_lstm_layers, compiled, lstm_forget_bias)
            self.actor_trunk = LstmTrunk(*sizes)
            if not shared_lstm:
                self.critic_trunk = LstmTrunk(*sizes)
            features = lstm_hidden_size

        self.free_std = isinstance(self.distribution, Gaussian) and not state_dependent_std
        outputs = self.distribution.n_outputs // 2 if self.free_std else self.distribution.n_outputs
        self.actor = mlp([features, *actor_layers, outputs], activation_fn, 0.01, ortho_init)
        # Initialised one after the other, hence differently: identical twins would stay identical for ever.
        self.law = critic.build_return_distribution()
        critic_sizes = [features, *critic_layers, self.law.n_outputs]
        self.critics = nn.ModuleList(mlp(critic_sizes, activation_fn, 1.0, ortho_init) for _ in range(critic.n_critics))
        self.log_std = nn.Parameter(torch.full((outputs,), log_std_init)) if self.free_std else None
        self.return_scale = ReturnScale(critic.scale)
        self.normalizer: nn.Module = nn.Identity()
        if obs_norm is not None:
            self.normalizer = ObservationNormalizer(self.own_size, obs_norm)

    def initial_state(self, batch: int) -> State:
        """The memory of the actor at the start of an episode, ``[n_layers, B, H]`` twice; empty without memory."""
        if self.actor_trunk is None:
            return torch.empty(0), torch.empty(0)
        return self.actor_trunk.initial_state(batch)

    def inputs(self, obs: Tensor) -> Tensor:
        """From raw observations ``[..., obs_size]`` to what the networks see: normalised, and with the budget of the tail."""
        if self.own_size == self.obs_size and isinstance(self.normalizer, nn.Identity):
            return obs
        own: Tensor = self.normalizer(obs[..., : self.own_size])
        if self.budget.features == 0:
            return own
        scale = self.return_scale
        shown = self.budget(obs[..., self.own_size :], scale.mean_snapshot, scale.std_snapshot)
        return torch.cat((own, shown), dim=-1)

    def acting_inputs(self, obs: Tensor) -> Tensor:
        """The same as :meth:`inputs` for ``[B, obs_size]``, faster where it can be."""
        nothing_to_do = self.own_size == self.obs_size and isinstance(self.normalizer, nn.Identity)
        if nothing_to_do or obs.device.type != "cpu":
            return self.inputs(obs)
        scale, own = self.return_scale, self.own_size
        inputs = torch.empty(len(obs), own + self.budget.features)
        given, seen = obs.numpy(), inputs.numpy()
        if isinstance(self.normalizer, ObservationNormalizer):
            self.normalizer.rows(given[:, :own], seen[:, :own])
        else:
            seen[:, :own] = given[:, :own]
        if self.budget.features:
            self.budget.rows(given[:, own:], scale.mean_snapshot, scale.std_snapshot, seen[:, own:])
        return inputs

    def act(self, obs: Tensor, state: State) -> tuple[Tensor, State]:
        """One step: the outputs that describe the action distribution, and the memory after it.

        :param obs: what :meth:`inputs` made of the observations, ``[B, D]``.
        :param state: memory before them, already reset where an episode begins.
        """
        features = obs
        if self.actor_trunk is not None:
            features, state = self.actor_trunk.step(obs, state)
        return self.action_outputs(features), state

    def respond(
        self,
        observations: NDArray[Any],
        state: State,
        starts: NDArray[np.bool_],
        perturb: Callable[[Tensor, State], Tensor] | None = None,
    ) -> tuple[Tensor, State]:
        """Take raw observations to the parameters of the action distribution and the state after them.

        This is the one way from an observation to a decision outside of training. The observations are copied into memory of
        torch's own, since the last bit of a matrix product may depend on how its operands are aligned.

        :param observations: ``[B, obs_size]``, raw.
        :param state: recurrent state before them; set to 0 where an episode starts.
        :param starts: ``[B]``, true where an episode starts.
        :param perturb: what an adversary makes of the networks' inputs, given the state; None leaves them alone.
        """
        state = reset_state(state, starts)
        inputs = self.inputs(torch.tensor(observations, dtype=torch.float32, device=self.device))
        return self.act(inputs if perturb is None else perturb(inputs, state), state)

    def action_outputs(self, features: Tensor) -> Tensor:
        """From trunk features ``[..., F]`` to what the action distribution needs."""
        raw: Tensor = self.actor(features)
        if self.log_std is not None:
            return torch.cat((raw, self.log_std.expand_as(raw)), dim=-1)
        if isinstance(self.distribution, Gaussian):
            mean, log_std = raw.chunk(2, dim=-1)
            return torch.cat((mean, log_std.clamp(*LOG_STD_LIMITS)), dim=-1)
        return raw

    def critic_outputs(self, features: Tensor) -> Tensor:
        """From trunk features ``[..., F]`` to what the critics say, ``[K, ..., n]``."""
        return torch.stack([critic(features) for critic in self.critics])

    def raw_atoms(self, features: Tensor) -> Tensor:
        """From trunk features ``[..., F]`` to the atoms of the return, in its own units, ``[K, ..., M]``."""
        return self.return_scale.decode(self.law.atoms(self.critic_outputs(features)))

    def return_levels(self) -> Tensor | None:
        """The levels ``[M]`` of the atoms of a law; None for a critic that knows the mean only."""
        if isinstance(self.law, MeanReturn):
            return None
        if isinstance(self.law, QuantileReturns):
            return self.law.levels
        return self.law.masses.cumsum(0) - 0.5 * self.law.masses

    def predict_return_atoms(self, observations: NDArray[Any], starts: NDArray[np.bool_]) -> NDArray[np.float32]:
        """What the critics expected of the return to come, all of them pooled: sorted atoms ``[L, M]`` in its own units.

        :param observations: ``[L, obs_size]`` of one environment, one after another; the tail may be left out as in
            :meth:`predict`.
        :param starts: ``[L]`` true where an episode begins: memory is wiped there, and before the first.
        """
        self.set_training_mode(False)
        trunk = self.critic_trunk or self.actor_trunk
        obs = torch.as_tensor(self._with_missing_columns(np.asarray(observations)).astype(np.float32)).to(self.device)
        edges = [0, *(np.flatnonzero(starts[1:]) + 1).tolist(), len(obs)]
        laws = []
        with torch.no_grad():
            for first, last in pairwise(edges):
                features = self.inputs(obs[first:last]).unsqueeze(1)  # [L, 1, D]
                if trunk is not None:
                    features = trunk.sequence(features, features.new_zeros(last - first, 1, 1), trunk.initial_state(1))
                laws.append(self.raw_atoms(features).sort(-1).values.mean(0).squeeze(1))
        return cast(NDArray[np.float32], torch.cat(laws).float().cpu().numpy())

    def heads(self) -> dict[str, list[nn.Parameter]]:
        """The parameters by what they serve: the actor, each critic, and each memory."""
        heads: dict[str, list[nn.Parameter]] = {}
        for name, parameter in self.named_parameters():
            head, *rest = name.split(".")
            if head == "critics":
                head = f"critic{int(rest[0]) + 1}"
            elif head == "log_std":
                head = "actor"
            heads.setdefault(head, []).append(parameter)
        return heads

    def activate_return_scale(self) -> None:
        """Put the statistics of returns in force and carry the critics over, so that no raw prediction moves."""
        heads = [cast(nn.Linear, cast(nn.Sequential, critic)[-1]) for critic in self.critics]
        self.law.rescale(heads, *self.return_scale.activate())

    def _predict(  # type: ignore[override]
        self, observation: Tensor, deterministic: bool = False
    ) -> Tensor:
        """Actions for one step without memory of earlier ones (SB3's entrance; :meth:`predict` carries memory)."""
        obs = self.inputs(observation.float().reshape(-1, self.obs_size))
        outputs, _ = self.act(obs, self.initial_state(len(obs)))
        return self.distribution.mode(outputs) if deterministic else self.distribution.sample(outputs)

    def predict(  # type: ignore[override]
        self,
        observation: NDArray[Any],
        state: tuple[NDArray[Any], ...] | None = None,
        episode_start: NDArray[Any] | None = None,
        deterministic: bool = False,
    ) -> tuple[NDArray[Any], tuple[NDArray[Any], ...] | None]:
        """Actions for one or many observations, and the memory to pass in with the next ones.

        :param observation: of one environment or a batch of them.
        :param state: what the previous call returned; None at the start.
        :param episode_start: true where the observation begins an episode: memory is reset there.
        :param deterministic: the mode of the distribution instead of a sample.
        """
        self.set_training_mode(False)
        assert isinstance(self.observation_space, spaces.Box)
        observation = self._with_missing_columns(np.asarray(observation))
        shape = self.observation_space.shape
        single = observation.shape == shape
        if not single and observation.shape[1:] != shape:
            raise ValueError(f"observation must have the shape {shape} or (n, *{shape}), got {observation.shape}")
        batch = observation.reshape(-1, self.obs_size)
        n = len(batch)
        with torch.no_grad():
            memory = self.initial_state(n)
            if self.recurrent and state is not None:
                memory = (torch.as_tensor(state[0]).to(self.device), torch.as_tensor(state[1]).to(self.device))
                if memory[0].shape != self.initial_state(n)[0].shape:
                    expected = tuple(self.initial_state(n)[0].shape)
                    raise ValueError(f"state must have the shape {expected}, got {tuple(memory[0].shape)}")
            starts = np.zeros(n, np.bool_) if episode_start is None else np.asarray(episode_start, np.bool_).reshape(n)
            outputs, memory = self.respond(batch, memory, starts)
            actions = self.distribution.mode(outputs) if deterministic else self.distribution.sample(outputs)
        chosen = self.distribution.to_env(actions.cpu().numpy())
        after = (memory[0].cpu().numpy(), memory[1].cpu().numpy()) if self.recurrent else None
        return (chosen[0] if single else chosen), after

    def _with_missing_columns(self, observation: NDArray[Any]) -> NDArray[Any]:
        """An observation of a deployed agent may lack what the policy knows itself (the tail) or does not look at."""
        missing = self.obs_size - observation.shape[-1] if self.budget.columns and observation.ndim else 0
        lead = observation.shape[:-1]
        if missing == self.budget.columns and not self.budget.observed:
            observation = np.concatenate((observation, np.zeros((*lead, 1)), np.ones((*lead, 1))), axis=-1)
        elif missing == self.budget.columns > 0:
            raise ValueError(
                "this agent was trained on a tail and must see what the episode has earned: wrap the environment in "
                "tailguard.ReturnObserver(env, gamma) (a VecEnv) or tailguard.ReturnAugmentedEnv(env, gamma) (a single one)"
            )
        if self.budget.dial and observation.shape[-1] == self.obs_size - 1:
            observation = np.concatenate((observation, np.full((*lead, 1), self.budget.alpha.item())), axis=-1)
        return observation


class RecurrentDistributionalPolicy(DistributionalPolicy):
    """The same with LSTM trunks."""

    recurrent: ClassVar[bool] = True


def _layers(net_arch: NetArch) -> tuple[Sequence[int], Sequence[int]]:
    if net_arch is None:
        return [64, 64], [64, 64]
    if isinstance(net_arch, dict):
        unknown = set(net_arch) - {"pi", "vf"}
        require(not unknown, "net_arch", net_arch, 'a list, or a dict with the keys "pi" and "vf"')
        return net_arch.get("pi", []), net_arch.get("vf", [])
    return net_arch, net_arch
