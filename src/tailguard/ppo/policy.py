"""The policy: an actor and distributional critics on LSTM or feed-forward trunks."""

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
from tailguard.ppo.config import CriticConfig, ObsNormConfig, RiskConfig
from tailguard.ppo.critic import MeanReturn, QuantileReturns, ReturnDistribution, build_return_distribution
from tailguard.ppo.networks import LstmTrunk, State, mlp, reset_state
from tailguard.ppo.risk import Budget
from tailguard.ppo.scaling import ObservationNormalizer, ReturnScale
from tailguard.validation import require

NetArch = dict[str, list[int]] | list[int] | None


class DistributionalPolicy(BasePolicy):
    """An actor and critics that predict the whole distribution of the return, in normalised units.

    :param observation_space: a Box; it is flattened.
    :param action_space: Box, Discrete or MultiDiscrete.
    :param critic: settings of the critics and of the scale of returns.
    :param obs_norm: how observations are normalised; None does not normalise them.
    :param risk: the objective; unless it is neutral, the last columns of an observation hold the running return.
    :param net_arch: hidden layers after the trunk, one list for actor and critics or ``{"pi": [...], "vf": [...]}``.
    :param activation_fn: activation of the hidden layers.
    :param ortho_init: orthogonal initialisation of the feed-forward layers.
    :param log_std_init: initial log standard deviation of continuous actions.
    :param state_dependent_std: predict it by the network instead of learning one number per action.
    :param squash_output: tanh of a Gaussian instead of a clipped Gaussian.
    :param censored: treat actions beyond the box as its end, which is what the environment gets. Less variance for agents that
        go to the limits, such as a trader with costs (actions.py).
    :param lstm_hidden_size: size of the LSTM's hidden state.
    :param n_lstm_layers: number of LSTM layers.
    :param lstm_forget_bias: added to the forget gates at initialisation. With 0 one half of the cell state is lost per step,
        which learns fast from the last few observations; 1 to 3 for what lies far back.
    :param shared_lstm: one LSTM for actor and critics instead of one each.
    :param compiled: act and learn in compiled passes where they apply (compiled/applies.py), which is faster; False leaves
        everything to torch.
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
        self.action_dist = action_distribution(action_space, squash_output, censored)
        actor_layers, critic_layers = _layers(net_arch)
        self.budget = Budget(risk or RiskConfig())
        self.own_size = self.obs_size - self.budget.columns  # the environment's own columns

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

        self.free_std = isinstance(self.action_dist, Gaussian) and not state_dependent_std
        n_outputs = self.action_dist.n_params // 2 if self.free_std else self.action_dist.n_params
        self.actor = mlp([features, *actor_layers, n_outputs], activation_fn, 0.01, ortho_init)
        # Initialised one after the other, hence differently: identical critics would stay identical for ever.
        self.add_module("law", build_return_distribution(critic))  # the name that checkpoint files have for it
        critic_sizes = [features, *critic_layers, self.return_dist.n_outputs]
        self.critics = nn.ModuleList(mlp(critic_sizes, activation_fn, 1.0, ortho_init) for _ in range(critic.n_critics))
        self.log_std = nn.Parameter(torch.full((n_outputs,), log_std_init)) if self.free_std else None
        self.return_scale = ReturnScale(critic.scale)
        self.normalizer: nn.Module = nn.Identity()
        if obs_norm is not None:
            self.normalizer = ObservationNormalizer(self.own_size, obs_norm)

    @property
    def return_dist(self) -> ReturnDistribution:
        """The family of distributions that the critics predict."""
        return cast(ReturnDistribution, self._modules["law"])

    def initial_state(self, batch: int) -> State:
        """Return the actor's recurrent state at the start of an episode, ``[n_layers, B, H]`` twice; empty without LSTM."""
        if self.actor_trunk is None:
            return torch.empty(0), torch.empty(0)
        return self.actor_trunk.initial_state(batch)

    def inputs(self, obs: Tensor) -> Tensor:
        """Return the networks' inputs for raw observations ``[..., obs_size]``: normalised, with the budget (risk.py)."""
        if self.own_size == self.obs_size and isinstance(self.normalizer, nn.Identity):
            return obs
        own: Tensor = self.normalizer(obs[..., : self.own_size])
        if self.budget.features == 0:
            return own
        scale = self.return_scale
        budget = self.budget(obs[..., self.own_size :], scale.mean_snapshot, scale.std_snapshot)
        return torch.cat((own, budget), dim=-1)

    def acting_inputs(self, obs: Tensor) -> Tensor:
        """Return :meth:`inputs` for ``[B, obs_size]``, faster on the CPU and without a gradient."""
        unchanged = self.own_size == self.obs_size and isinstance(self.normalizer, nn.Identity)
        if unchanged or obs.device.type != "cpu":
            return self.inputs(obs)
        scale, own = self.return_scale, self.own_size
        inputs = torch.empty(len(obs), own + self.budget.features)
        raw, filled = obs.numpy(), inputs.numpy()
        if isinstance(self.normalizer, ObservationNormalizer):
            self.normalizer.rows(raw[:, :own], filled[:, :own])
        else:
            filled[:, :own] = raw[:, :own]
        if self.budget.features:
            self.budget.rows(raw[:, own:], scale.mean_snapshot, scale.std_snapshot, filled[:, own:])
        return inputs

    def act(self, inputs: Tensor, state: State) -> tuple[Tensor, State]:
        """Run one step of the actor: return the parameters of the action distribution, and the recurrent state after it.

        :param inputs: ``[B, D]``, from :meth:`inputs`.
        :param state: recurrent state before them, already reset where an episode begins.
        """
        features = inputs
        if self.actor_trunk is not None:
            features, state = self.actor_trunk.step(inputs, state)
        return self.dist_params(features), state

    def respond(
        self,
        observations: NDArray[Any],
        state: State,
        starts: NDArray[np.bool_],
        perturb: Callable[[Tensor, State], Tensor] | None = None,
    ) -> tuple[Tensor, State]:
        """Return the parameters of the action distribution for raw observations, and the recurrent state after them.

        This is the one way from an observation to a decision outside of training. The observations are copied into tensors of
        torch's own, since the last bit of a matrix product may depend on how its operands are aligned.

        :param observations: ``[B, obs_size]``, raw.
        :param state: recurrent state before them; set to 0 where an episode starts.
        :param starts: ``[B]``, true where an episode starts.
        :param perturb: an adversary: from the networks' inputs and the state to perturbed inputs; None for no adversary.
        """
        state = reset_state(state, starts)
        inputs = self.inputs(torch.tensor(self._with_missing_columns(observations), dtype=torch.float32, device=self.device))
        return self.act(inputs if perturb is None else perturb(inputs, state), state)

    def dist_params(self, features: Tensor) -> Tensor:
        """Return the parameters of the action distribution, ``[..., n_params]``, for trunk features ``[..., F]``."""
        raw: Tensor = self.actor(features)
        if self.log_std is not None:
            return torch.cat((raw, self.log_std.expand_as(raw)), dim=-1)
        if isinstance(self.action_dist, Gaussian):
            mean, log_std = raw.chunk(2, dim=-1)
            return torch.cat((mean, log_std.clamp(*LOG_STD_LIMITS)), dim=-1)
        return raw

    def critic_outputs(self, features: Tensor) -> Tensor:
        """Return the outputs of the critics, ``[K, ..., n]``, for trunk features ``[..., F]``."""
        return torch.stack([critic(features) for critic in self.critics])

    def raw_atoms(self, features: Tensor) -> Tensor:
        """Return the atoms of the return in raw units, ``[K, ..., M]``, for trunk features ``[..., F]``."""
        return self.return_scale.decode(self.return_dist.atoms(self.critic_outputs(features)))

    def return_levels(self) -> Tensor | None:
        """Return the levels ``[M]`` of the atoms; None for critics that predict the mean only."""
        if isinstance(self.return_dist, MeanReturn):
            return None
        if isinstance(self.return_dist, QuantileReturns):
            return self.return_dist.levels
        return self.return_dist.masses.cumsum(0) - 0.5 * self.return_dist.masses

    def predict_return_atoms(self, observations: NDArray[Any], starts: NDArray[np.bool_]) -> NDArray[np.float32]:
        """Return the predicted distribution of the return, averaged over critics: sorted atoms ``[L, M]`` in raw units.

        :param observations: ``[L, obs_size]`` of one environment, in order; alpha may be left out as in :meth:`predict`.
        :param starts: ``[L]``, true where an episode begins: the recurrent state is reset there, and before the first.
        """
        self.set_training_mode(False)
        trunk = self.critic_trunk or self.actor_trunk
        obs = torch.as_tensor(self._with_missing_columns(np.asarray(observations)).astype(np.float32)).to(self.device)
        edges = [0, *(np.flatnonzero(starts[1:]) + 1).tolist(), len(obs)]
        atoms = []
        with torch.no_grad():
            for first, last in pairwise(edges):
                features = self.inputs(obs[first:last]).unsqueeze(1)  # [L, 1, D]
                if trunk is not None:
                    features = trunk.sequence(features, features.new_zeros(last - first, 1, 1), trunk.initial_state(1))
                atoms.append(self.raw_atoms(features).sort(-1).values.mean(0).squeeze(1))
        return cast(NDArray[np.float32], torch.cat(atoms).float().cpu().numpy())

    def heads(self) -> dict[str, list[nn.Parameter]]:
        """Return the parameters by part: the actor, each critic, and each trunk."""
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
        """Activate the running statistics of returns and rescale the critics, so that no raw prediction changes (PopArt)."""
        heads = [cast(nn.Linear, cast(nn.Sequential, critic)[-1]) for critic in self.critics]
        self.return_dist.rescale(heads, *self.return_scale.activate())

    def _predict(  # type: ignore[override]
        self, observation: Tensor, deterministic: bool = False
    ) -> Tensor:
        """Return actions for one step from the initial state (called by SB3; :meth:`predict` carries the recurrent state)."""
        inputs = self.inputs(observation.float().reshape(-1, self.obs_size))
        dist_params, _ = self.act(inputs, self.initial_state(len(inputs)))
        return self.action_dist.mode(dist_params) if deterministic else self.action_dist.sample(dist_params)

    def predict(  # type: ignore[override]
        self,
        observation: NDArray[Any],
        state: tuple[NDArray[Any], ...] | None = None,
        episode_start: NDArray[Any] | None = None,
        deterministic: bool = False,
    ) -> tuple[NDArray[Any], tuple[NDArray[Any], ...] | None]:
        """Return actions for one or many observations, and the recurrent state to pass in with the next ones.

        :param observation: of one environment or a batch of them.
        :param state: what the previous call returned; None at the start.
        :param episode_start: true where the observation begins an episode: the state is reset there.
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
            carried = self.initial_state(n)
            if self.recurrent and state is not None:
                carried = (torch.as_tensor(state[0]).to(self.device), torch.as_tensor(state[1]).to(self.device))
                if carried[0].shape != self.initial_state(n)[0].shape:
                    expected = tuple(self.initial_state(n)[0].shape)
                    raise ValueError(f"state must have the shape {expected}, got {tuple(carried[0].shape)}")
            starts = np.zeros(n, np.bool_) if episode_start is None else np.asarray(episode_start, np.bool_).reshape(n)
            dist_params, carried = self.respond(batch, carried, starts)
            actions = self.action_dist.mode(dist_params) if deterministic else self.action_dist.sample(dist_params)
        chosen = self.action_dist.to_env(actions.cpu().numpy())
        after = (carried[0].cpu().numpy(), carried[1].cpu().numpy()) if self.recurrent else None
        return (chosen[0] if single else chosen), after

    def _with_missing_columns(self, observation: NDArray[Any]) -> NDArray[Any]:
        """Return observations with the columns that callers may leave out: alpha, and a running return that is not used."""
        missing = self.obs_size - observation.shape[-1] if self.budget.columns and observation.ndim else 0
        lead = observation.shape[:-1]
        if missing == self.budget.columns and not self.budget.observed:
            observation = np.concatenate((observation, np.zeros((*lead, 1)), np.ones((*lead, 1))), axis=-1)
        elif missing == self.budget.columns > 0:
            raise ValueError(
                "this agent is risk-averse and must observe its running return: wrap the environment in "
                "tailguard.ReturnObserver(env, gamma) (a VecEnv) or tailguard.ReturnAugmentedEnv(env, gamma) (a single one)"
            )
        if self.budget.alpha_conditioned and observation.shape[-1] == self.obs_size - 1:
            observation = np.concatenate((observation, np.full((*lead, 1), self.budget.alpha.item())), axis=-1)
        return observation


class RecurrentDistributionalPolicy(DistributionalPolicy):
    """A :class:`DistributionalPolicy` with LSTM trunks."""

    recurrent: ClassVar[bool] = True


def _layers(net_arch: NetArch) -> tuple[Sequence[int], Sequence[int]]:
    if net_arch is None:
        return [64, 64], [64, 64]
    if isinstance(net_arch, dict):
        unknown = set(net_arch) - {"pi", "vf"}
        require(not unknown, "net_arch", net_arch, 'a list, or a dict with the keys "pi" and "vf"')
        return net_arch.get("pi", []), net_arch.get("vf", [])
    return net_arch, net_arch
