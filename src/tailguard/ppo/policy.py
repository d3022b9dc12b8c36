"""The policy: an actor and distributional critics on LSTM or feed-forward trunks, after SB3's feature extractors if needed."""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from io import BufferedIOBase
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Self, cast

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import ArrayLike, NDArray
from stable_baselines3.common.distributions import Distribution
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor, CombinedExtractor, FlattenExtractor, NatureCNN
from stable_baselines3.common.utils import get_device
from torch import Tensor, nn

from tailguard.io.checkpoint import refusing
from tailguard.ppo.actions import LOG_STD_LIMITS, Gaussian, action_distribution, masked
from tailguard.ppo.compiled.networks import has_kernel, head_outputs
from tailguard.ppo.config import CriticConfig, ObsNormConfig, RiskConfig
from tailguard.ppo.critic import MeanReturn, QuantileReturns, ReturnDistribution, build_return_distribution
from tailguard.ppo.networks import GruTrunk, LstmTrunk, RecurrentTrunk, State, is_exported, mlp, reset_state
from tailguard.ppo.observations import Observation, ObservationRows
from tailguard.ppo.quantiles import ascending
from tailguard.ppo.risk import Budget
from tailguard.ppo.saved_form import require_sizes
from tailguard.ppo.scaling import ObservationNormalizer, ReturnScale
from tailguard.ppo.serialization import read_policy, write_policy
from tailguard.validation import require

NetArch = dict[str, list[int]] | list[int] | list[dict[str, list[int]]] | None
TensorObservation = Tensor | Mapping[str, Tensor]
PairOfStates = tuple[State, State]  # of the actor and of the critics
# Added to the variance of gSDE, as SB3 does.
SDE_EPS = 1e-6


class DistributionalPolicy(BasePolicy):
    """An actor and critics that predict the whole distribution of the return, in normalised units.

    A Box of numbers goes to the networks as it is. Images, integers, Dicts, and everything for which the user names a
    `features_extractor_class`, go through SB3's feature extractors first, which are trained with the rest.

    :param observation_space: Box, Discrete, MultiDiscrete, MultiBinary, or a Dict of these.
    :param action_space: Box, Discrete, MultiDiscrete or MultiBinary.
    :param critic: settings of the critics and of the scale of returns.
    :param obs_norm: how observations are normalised; None does not normalise them.
    :param risk: the objective; unless it is neutral, the last columns of an observation hold the running return.
    :param net_arch: hidden layers after the trunk, one list for actor and critics or ``{"pi": [...], "vf": [...]}``. None is
        ``[64, 64]``, and no layer after a NatureCNN.
    :param activation_fn: activation of the hidden layers.
    :param ortho_init: orthogonal initialisation of the feed-forward layers.
    :param log_std_init: initial log standard deviation of continuous actions.
    :param state_dependent_std: predict it by the network instead of learning one number per action.
    :param squash_output: tanh of a Gaussian instead of a clipped Gaussian.
    :param censored: treat actions beyond the box as its end, which is what the environment gets. Less variance for agents that
        go to the limits, such as a trader with costs (actions.py).
    :param use_sde: explore with generalised state-dependent exploration (gSDE, Raffin et al. 2021).
    :param full_std: learn gSDE's standard deviation per feature and action; False learns it per feature.
    :param use_expln: let gSDE's standard deviation grow linearly above 1 instead of exponentially.
    :param features_extractor_class: SB3's extractor, or a subclass of it. None takes what suits the space.
    :param features_extractor_kwargs: its arguments.
    :param share_features_extractor: one extractor for actor and critics instead of one each.
    :param normalize_images: scale images to [0, 1].
    :param optimizer_class: a torch optimizer instead of the algorithm's own; None leaves the choice to the algorithm.
    :param optimizer_kwargs: its arguments, without the learning rate; without a class they are those of torch's Adam. None is
        ``eps=1e-5`` for Adam, as in SB3, and torch's defaults for others.
    :param lstm_hidden_size: size of the hidden state, of a GRU as well.
    :param n_lstm_layers: number of recurrent layers.
    :param recurrent_cell: ``lstm``, or ``gru`` for GRU layers in the place of every LSTM.
    :param lstm_forget_bias: added to the forget gates at initialisation. With 0 one half of the cell state is lost per step,
        which learns fast from the last few observations; 1 to 3 for what lies far back.
    :param shared_lstm: one LSTM for actor and critics instead of one each.
    :param enable_critic_lstm: give the critics an LSTM of their own. False, without `shared_lstm`, gives them a linear layer in
        its place, so that they have no recurrent state. None is True unless the LSTM is shared.
    :param lstm_kwargs: ``{"dropout": p}``, between the layers of an LSTM.
    :param compiled: act and learn in compiled passes where they apply (compiled/applies.py), which is faster; False leaves
        everything to torch.
    :param threads: 1, or 2 to learn with two threads in compiled passes, with the same results to the bit.
    """

    recurrent: ClassVar[bool] = False
    default_extractor: ClassVar[type[BaseFeaturesExtractor] | None] = None  # None: what suits the space

    features_extractor: BaseFeaturesExtractor | None  # type: ignore[assignment]
    arguments: dict[str, Any]

    def __new__(cls, *_: Any, **arguments: Any) -> Self:
        """Keep the arguments, of a subclass as well, for :meth:`save`."""
        policy = super().__new__(cls)
        policy.__dict__["arguments"] = arguments
        return policy

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
        use_sde: bool = False,
        full_std: bool = True,
        use_expln: bool = False,
        features_extractor_class: type[BaseFeaturesExtractor] | None = None,
        features_extractor_kwargs: dict[str, Any] | None = None,
        share_features_extractor: bool = True,
        normalize_images: bool = True,
        optimizer_class: type[torch.optim.Optimizer] | None = None,
        optimizer_kwargs: dict[str, Any] | None = None,
        lstm_hidden_size: int = 256,
        n_lstm_layers: int = 1,
        recurrent_cell: str = "lstm",
        lstm_forget_bias: float = 0.0,
        shared_lstm: bool = False,
        enable_critic_lstm: bool | None = None,
        lstm_kwargs: dict[str, Any] | None = None,
        compiled: bool = True,
        threads: int = 1,
    ) -> None:
        extractor_class = features_extractor_class or self.default_extractor or _extractor_for(observation_space)
        super().__init__(
            observation_space,
            action_space,
            extractor_class,
            dict(features_extractor_kwargs or {}),
            normalize_images=normalize_images,
            squash_output=squash_output,
        )
        require(threads in (1, 2), "threads", threads, "1 or 2")
        self.compiled, self.threads = compiled, threads
        if optimizer_kwargs is not None:  # SB3's default: arguments alone are Adam's
            optimizer_class = optimizer_class or torch.optim.Adam
        self.optimizer_class, self.optimizer_kwargs = optimizer_class, optimizer_kwargs  # type: ignore[assignment]
        self.observations = ObservationRows(observation_space, normalize_images)
        self.obs_size = self.observations.size
        self.action_dist = action_distribution(action_space, squash_output, censored)
        self.net_arch = _net_arch(net_arch, extractor_class)
        self.budget = Budget(risk or RiskConfig())
        self.own_size = self.obs_size - self.budget.columns  # the environment's own columns

        self.share_features_extractor = share_features_extractor
        self.vf_features_extractor: BaseFeaturesExtractor | None = None  # where the critics have their own
        input_size = self.own_size + self.budget.features
        if not (self.observations.plain and extractor_class is FlattenExtractor):
            self._own_rows = self._rows_of_environment()
            self.features_extractor = self._make_extractor(ortho_init)
            if not share_features_extractor:
                self.vf_features_extractor = self._make_extractor(ortho_init)
            # SB3's extractors may count in integers of numpy, which torch's recurrent layers do not take.
            input_size = int(self.features_extractor.features_dim) + self.budget.features
        features = input_size

        self.actor_trunk: RecurrentTrunk | None = None
        self.critic_trunk: RecurrentTrunk | None = None
        self.critic_layer: nn.Linear | None = None  # in the place of the critics' LSTM
        if self.recurrent:
            require(lstm_hidden_size >= 1, "lstm_hidden_size", lstm_hidden_size, "at least 1")
            require(n_lstm_layers >= 1, "n_lstm_layers", n_lstm_layers, "at least 1")
            require(math.isfinite(lstm_forget_bias), "lstm_forget_bias", lstm_forget_bias, "a finite number")
            _require_one_critic_trunk(shared_lstm, enable_critic_lstm, share_features_extractor)
            require(recurrent_cell in ("lstm", "gru"), "recurrent_cell", recurrent_cell, "lstm or gru")
            require(recurrent_cell == "lstm" or not lstm_forget_bias, "lstm_forget_bias", lstm_forget_bias, "0 for a GRU")
            sizes, share = (input_size, lstm_hidden_size, n_lstm_layers), _dropout(lstm_kwargs)
            for_lstm = (compiled, lstm_forget_bias)
            build = (
                partial(GruTrunk, *sizes, share) if recurrent_cell == "gru" else partial(LstmTrunk, *sizes, *for_lstm, share)
            )
            self.actor_trunk = build()
            if not shared_lstm and enable_critic_lstm is not False:
                self.critic_trunk = build()
            features = lstm_hidden_size

        self.use_sde, self.use_expln = use_sde, use_expln
        gaussian = isinstance(self.action_dist, Gaussian)
        require(gaussian or not use_sde, "use_sde", use_sde, "False: gSDE is for actions in a box")
        self.free_std = gaussian and not state_dependent_std and not use_sde
        n_outputs = self.action_dist.n_params // 2 if self.free_std or use_sde else self.action_dist.n_params
        self.actor = mlp([features, *self.net_arch["pi"], n_outputs], activation_fn, 0.01, ortho_init)
        # Initialised one after the other, hence differently: identical critics would stay identical for ever.
        self.add_module("law", build_return_distribution(critic))  # the name that checkpoint files have for it
        critic_sizes = [features, *self.net_arch["vf"], self.return_dist.n_outputs]
        self.critics = nn.ModuleList(mlp(critic_sizes, activation_fn, 1.0, ortho_init) for _ in range(critic.n_critics))
        std_shape = (cast(nn.Linear, self.actor[-1]).in_features, n_outputs if full_std else 1) if use_sde else (n_outputs,)
        self.log_std = nn.Parameter(torch.full(std_shape, float(log_std_init))) if self.free_std or use_sde else None
        self.return_scale = ReturnScale(critic.scale)
        if self.recurrent and enable_critic_lstm is False and not shared_lstm:
            self.critic_layer = nn.Linear(input_size, lstm_hidden_size)
        self.normalizer: nn.Module = nn.Identity()
        if obs_norm is not None:
            require(self.observations.plain, "normalize_obs", obs_norm, f"False for {observation_space}: use VecNormalize")
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

    def initial_critic_state(self, batch: int) -> State:
        """Return the critics' recurrent state at the start of an episode; that of the actor where they have none."""
        return self.initial_state(batch) if self.critic_trunk is None else self.critic_trunk.initial_state(batch)

    @property
    def shares_trunk(self) -> bool:
        """True if the critics stand on the actor's LSTM."""
        return self.actor_trunk is not None and self.critic_trunk is None and self.critic_layer is None

    def place(self, device: torch.device) -> Self:
        """Move the networks to a device. The statistics of observations and returns stay on the CPU, where rollouts are."""
        for module in self.children():
            if module not in self.statistics():
                module.to(device)
        if self.log_std is not None and self.log_std.device != device:  # torch cannot move the data of some kinds in place
            self.log_std = nn.Parameter(self.log_std.detach().to(device), self.log_std.requires_grad)
        return self

    def statistics(self) -> tuple[nn.Module, ...]:
        """Return the modules that compute on the CPU: statistics of returns and observations, and caps that depend on them."""
        return self.return_scale, self.normalizer, self.budget

    def inputs(self, obs: Tensor) -> Tensor:
        """Return the networks' inputs for raw observations ``[..., obs_size]``: normalised, with the budget (risk.py)."""
        if not self._changes_inputs:
            return obs
        own: Tensor = self.normalizer(obs[..., : self.own_size])
        if self.budget.features == 0:
            return own
        return torch.cat((own, self.budget(obs[..., self.own_size :])), dim=-1)

    @property
    def _changes_inputs(self) -> bool:
        return self.own_size != self.obs_size or not isinstance(self.normalizer, nn.Identity)

    def acting_inputs(self, obs: Tensor) -> Tensor:
        """Return :meth:`inputs` for ``[B, obs_size]``, faster and without a gradient."""
        if not self._changes_inputs:
            return obs
        own = self.own_size
        inputs = torch.empty(len(obs), own + self.budget.features)
        raw, filled = obs.numpy(), inputs.numpy()
        if isinstance(self.normalizer, ObservationNormalizer):
            self.normalizer.rows(raw[:, :own], filled[:, :own])
        else:
            filled[:, :own] = raw[:, :own]
        if self.budget.features:
            self.budget.rows(raw[:, own:], filled[:, own:])
        return inputs

    def act(self, inputs: Tensor, state: State) -> tuple[Tensor, State]:
        """Run one step of the actor: return the parameters of the action distribution, and the recurrent state after it.

        :param inputs: ``[B, D]``, from :meth:`inputs`.
        :param state: recurrent state before them, already reset where an episode begins.
        """
        features, state = self.actor_features(inputs, state)
        return self.dist_params(features), state

    def actor_features(self, inputs: Tensor, state: State) -> tuple[Tensor, State]:
        """Run one step of the actor's encoder and trunk: return the features, and the recurrent state after it."""
        features = self.encode_for_actor(inputs)
        return (features, state) if self.actor_trunk is None else self.actor_trunk.step(features, state)

    def encode(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return what the trunks of actor and critics take, ``[..., F]``, for ``[..., D]`` from :meth:`inputs`."""
        actor = self.encode_for_actor(inputs)
        return actor, actor if self.vf_features_extractor is None else self.encode_for_critics(inputs)

    def encode_for_actor(self, inputs: Tensor) -> Tensor:
        """Return the first part of :meth:`encode`."""
        return self._extracted(self.features_extractor, inputs)

    def encode_for_critics(self, inputs: Tensor) -> Tensor:
        """Return the second part of :meth:`encode`."""
        return self._extracted(self.vf_features_extractor or self.features_extractor, inputs)

    def critic_features(self, encoded: Tensor, resets: Tensor, state: State) -> Tensor:
        """Run the critics' trunk, the actor's where they share it, over sequences.

        :param encoded: ``[L, B, F]``, the second part of :meth:`encode`; ``[M, F]`` without a recurrent state.
        :param resets: ``[L, B, 1]``, 1 at reset steps.
        :param state: recurrent state before the first step.
        """
        if self.critic_layer is not None:
            layer: Tensor = self.critic_layer(encoded)
            return layer
        trunk = self.critic_trunk or self.actor_trunk
        return encoded if trunk is None else trunk.sequence(encoded, resets, state)

    def _extracted(self, extractor: BaseFeaturesExtractor | None, inputs: Tensor) -> Tensor:
        inputs = inputs.to(self.device)  # inputs are made on the CPU, where the statistics are
        if extractor is None:
            return inputs
        rows = inputs.reshape(-1, inputs.shape[-1])
        seen = self._own_rows.tensors(rows[:, : self.own_size])
        # On a CPU convolutions with a gradient are a fifth faster so. Users' own extractors may rely on the usual layout.
        if inputs.is_cpu and torch.is_grad_enabled() and type(extractor) in (NatureCNN, CombinedExtractor):
            seen = _channels_last(seen)
        features: Tensor = extractor(seen)
        if self.budget.features:
            features = torch.cat((features, rows[:, self.own_size :]), dim=-1)
        return features.reshape(*inputs.shape[:-1], -1)

    def _make_extractor(self, ortho_init: bool) -> BaseFeaturesExtractor:
        extractor = self.features_extractor_class(self._own_rows.space, **self.features_extractor_kwargs)
        return extractor.apply(partial(self.init_weights, gain=math.sqrt(2.0))) if ortho_init else extractor

    def _rows_of_environment(self) -> ObservationRows:
        """Return the rows of an observation's own columns, without the running return."""
        if not self.budget.columns:
            return self.observations
        space = cast(spaces.Box, self.observation_space)
        own = spaces.Box(space.low[: self.own_size], space.high[: self.own_size], dtype=cast(Any, space.dtype))
        return ObservationRows(own, self.normalize_images)

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
        inputs = self.inputs(torch.tensor(self._with_missing_columns(observations), dtype=self.observations.dtype))
        return self.act(inputs if perturb is None else perturb(inputs.to(self.device), state), state)

    def dist_params(self, features: Tensor) -> Tensor:
        """Return the parameters of the action distribution, ``[..., n_params]``, for trunk features ``[..., F]``."""
        if self.use_sde:
            return self.sde_params(*self.latent(features))
        raw: Tensor = self.actor(features)
        if self.log_std is not None:
            return torch.cat((raw, self.log_std.expand_as(raw)), dim=-1)
        if isinstance(self.action_dist, Gaussian):
            mean, log_std = raw.chunk(2, dim=-1)
            return torch.cat((mean, log_std.clamp(*LOG_STD_LIMITS)), dim=-1)
        return raw

    def latent(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return the features before the actor's last layer, which gSDE explores with, and the mean after it."""
        latent = features
        for layer in list(self.actor)[:-1]:
            latent = layer(latent)
        return latent, self.actor[-1](latent)

    def sde_params(self, latent: Tensor, mean: Tensor) -> Tensor:
        """Return gSDE's :meth:`dist_params` for what :meth:`latent` returned."""
        # As SB3 does: the standard deviation does not shape the features.
        variance = latent.detach().square() @ self.sde_std().square()
        return torch.cat((mean, 0.5 * torch.log(variance + SDE_EPS)), dim=-1)

    def sde_std(self) -> Tensor:
        """Return gSDE's standard deviations of a weight, ``[F, A]``."""
        assert self.log_std is not None, "gSDE learns them"
        std = self.log_std.exp()
        if self.use_expln:
            std = torch.where(self.log_std > 0.0, torch.log1p(self.log_std.clamp(min=0.0)) + 1.0, std)
        return std.expand(-1, self.action_dist.n_params // 2)

    def critic_outputs(self, features: Tensor) -> Tensor:
        """Return the outputs of the critics, ``[K, ..., n]``, for trunk features ``[..., F]``."""
        compiled = self.compiled and not torch.is_grad_enabled() and features.dtype == torch.float32 and features.is_cpu
        compiled = compiled and not is_exported()
        return torch.stack(
            [
                head_outputs(critic, features)
                if compiled and isinstance(critic, nn.Sequential) and has_kernel(critic)
                else critic(features)
                for critic in self.critics
            ]
        )

    def raw_atoms(self, features: Tensor) -> Tensor:
        """Return the atoms of the return in raw units, on the CPU, ``[K, ..., M]``, for trunk features ``[..., F]``."""
        return self.return_scale.decode(self.return_dist.atoms(self.critic_outputs(features)).cpu())

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
        obs = torch.as_tensor(self._with_missing_columns(np.asarray(observations))).to(self.observations.dtype)
        edges = [0, *(np.flatnonzero(starts[1:]) + 1).tolist(), len(obs)]
        atoms = []
        with torch.no_grad():
            for first, last in pairwise(edges):
                encoded = self.encode_for_critics(self.inputs(obs[first:last])).unsqueeze(1)  # [L, 1, F]
                features = self.critic_features(encoded, encoded.new_zeros(last - first, 1, 1), self.initial_critic_state(1))
                atoms.append(ascending(self.raw_atoms(features)).mean(0).squeeze(1))
        return cast(NDArray[np.float32], torch.cat(atoms).float().cpu().numpy())

    def critic_prefixes(self) -> list[str]:
        """Return what the names of each critic's parameters begin with."""
        return [f"critics.{k}." for k in range(len(self.critics))]

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

    def _predict(self, observation: TensorObservation, deterministic: bool = False) -> Tensor:
        """Return actions for one step from the initial state (called by SB3; :meth:`predict` carries the recurrent state)."""
        inputs = self.inputs(self.observations.tensor_rows(observation))
        dist_params, _ = self.act(inputs, self.initial_state(len(inputs)))
        return self.action_dist.mode(dist_params) if deterministic else self.action_dist.sample(dist_params)

    def predict(
        self,
        observation: Observation,
        state: tuple[NDArray[Any], ...] | None = None,
        episode_start: NDArray[Any] | None = None,
        deterministic: bool = False,
        action_masks: ArrayLike | None = None,
    ) -> tuple[NDArray[Any], tuple[NDArray[Any], ...] | None]:
        """Return actions for one or many observations, and the recurrent state to pass in with the next ones.

        :param observation: of one environment or a batch of them.
        :param state: what the previous call returned; None at the start.
        :param episode_start: true where the observation begins an episode: the state is reset there.
        :param deterministic: the mode of the distribution instead of a sample.
        :param action_masks: false for actions that are not possible, as ``MaskablePPO`` takes them; None for none.
        """
        self.set_training_mode(False)
        if self.budget.columns:
            observation = self._with_missing_columns(np.asarray(observation))
        batch, single = self.observations.batch(observation)
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
            dist_params = masked(self.action_dist, dist_params, action_masks)
            actions = self.action_dist.mode(dist_params) if deterministic else self.action_dist.sample(dist_params)
        chosen = self.action_dist.to_env(actions.cpu().numpy())
        after = (carried[0].cpu().numpy(), carried[1].cpu().numpy()) if self.recurrent else None
        return (np.asarray(chosen[0]) if single else chosen), after

    # -------------------------------------------------------------------------------------------- by SB3's names
    # For code that asks a policy and not the algorithm. Observations are tensors as ``obs_to_tensor`` gives them, actions are
    # as rollouts store them, values are mean returns in raw units.

    def forward(self, obs: TensorObservation, deterministic: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """Return actions, values ``[B, 1]`` and log-probabilities ``[B]``."""
        actor, critic, _ = self._latents(obs)
        return self._decided(actor, critic, deterministic)

    def evaluate_actions(
        self, obs: TensorObservation, actions: Tensor, action_masks: ArrayLike | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return values ``[B, 1]``, and log-probabilities and entropies ``[B]`` of actions."""
        actor, critic, _ = self._latents(obs)
        return self._evaluated(actor, critic, actions, action_masks)

    @property
    def pi_features_extractor(self) -> BaseFeaturesExtractor | None:
        """The actor's extractor; None where observations need none."""
        return self.features_extractor

    def extract_features(  # type: ignore[override]
        self, obs: TensorObservation, features_extractor: BaseFeaturesExtractor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return the features ``[B, F]`` of observations, those of actor and critics where they have an extractor each.

        :param features_extractor: the one to use; None for the policy's.
        """
        inputs = self.inputs(self.observations.tensor_rows(obs))
        if features_extractor is not None:
            return self._extracted(features_extractor, inputs)
        actor, critic = self.encode(inputs)
        return actor if self.vf_features_extractor is None else (actor, critic)

    def predict_values(self, obs: TensorObservation) -> Tensor:
        """Return mean returns ``[B, 1]``."""
        return self._values(self._latents(obs)[1])

    def get_distribution(self, obs: TensorObservation, action_masks: ArrayLike | None = None) -> Distribution:
        """Return SB3's distribution of actions."""
        return self.action_dist.to_sb3(masked(self.action_dist, self.dist_params(self._latents(obs)[0]), action_masks))

    def _decided(self, actor: Tensor, critic: Tensor, deterministic: bool) -> tuple[Tensor, Tensor, Tensor]:
        dist_params = self.dist_params(actor)
        actions = self.action_dist.mode(dist_params) if deterministic else self.action_dist.sample(dist_params)
        shaped = actions.reshape(len(actions), *cast(tuple[int, ...], self.action_space.shape))
        return shaped, self._values(critic), self.action_dist.log_prob(dist_params, actions)

    def _evaluated(
        self, actor: Tensor, critic: Tensor, actions: Tensor, action_masks: ArrayLike | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        dist_params = masked(self.action_dist, self.dist_params(actor), action_masks)
        log_prob = self.action_dist.log_prob(dist_params, actions.reshape(len(dist_params), -1).to(dist_params))
        return self._values(critic), log_prob, self.action_dist.entropy(dist_params)

    def _latents(
        self, obs: TensorObservation, states: PairOfStates | None = None, starts: Tensor | None = None
    ) -> tuple[Tensor, Tensor, PairOfStates]:
        """Return the features of actor and critics ``[B, F]``, and the recurrent states after the last step.

        :param states: recurrent states before the first step; None for the initial ones of B sequences of one step.
        """
        actor, critic = self.encode(self.inputs(self.observations.tensor_rows(obs)))
        if states is None or starts is None:
            states, starts = (self.initial_state(len(actor)), self.initial_critic_state(len(actor))), torch.zeros(len(actor))
        if self.actor_trunk is None:
            return actor, critic, states
        actor, actor_after = _unrolled(self.actor_trunk, actor, states[0], starts)
        if self.critic_trunk is None:
            features = actor if self.critic_layer is None else self.critic_layer(critic)
            return actor, features, (actor_after, actor_after)
        critic, critic_after = _unrolled(self.critic_trunk, critic, states[1], starts)
        return actor, critic, (actor_after, critic_after)

    def _values(self, features: Tensor) -> Tensor:
        atoms = self.raw_atoms(features)
        return (atoms @ self.return_dist.masses.cpu()).mean(0).unsqueeze(-1)

    def save(self, path: str | Path | BufferedIOBase) -> None:
        """Write the policy alone, as data without code; :meth:`load` reads it.

        :param path: a file to write to, or its name.
        """
        write_policy(path, self, self.arguments)

    @classmethod
    def load(cls, path: str | Path | BufferedIOBase, device: torch.device | str = "cpu", **arguments: Any) -> Self:
        """Return the policy that :meth:`save` wrote.

        :param path: the file or its name.
        :param device: where the networks compute.
        :param arguments: arguments of the constructor that shall differ, such as classes of the user's own.
        """
        with refusing("the policy" if isinstance(path, BufferedIOBase) else str(path)):
            saved = read_policy(path, arguments)
            spaces_of_env = saved.observation_space, saved.action_space
            if cls in OWN_POLICIES:  # a subclass may need real tensors, and is known to the user
                require_sizes(lambda: cls(*spaces_of_env, **saved.arguments), saved.weights, saved.arguments)
            policy = cls(*spaces_of_env, **saved.arguments)
            policy.load_state_dict(saved.weights)
        return policy.place(get_device(device))

    def _with_missing_columns(self, observation: NDArray[Any]) -> NDArray[Any]:
        """Return observations with the columns that callers may leave out: alpha, and a running return that is not used."""
        missing = self.obs_size - observation.shape[-1] if self.budget.columns and observation.ndim else 0
        lead = observation.shape[:-1]
        if missing == self.budget.columns and not self.budget.observed:
            observation = np.concatenate((observation, np.zeros((*lead, 1)), np.ones((*lead, 1))), axis=-1)
        elif missing == self.budget.columns > 0:
            raise ValueError(
                "this agent is risk-averse and must observe its running return: wrap the environment in "
                "tailguard.ReturnObserver(env, gamma) (a VecEnv) or tailguard.ReturnAugmentedEnv(env, gamma) (a single one), "
                "with period=... as in its settings"
            )
        if self.budget.alpha_conditioned and observation.shape[-1] == self.obs_size - 1:
            observation = np.concatenate((observation, np.full((*lead, 1), self.budget.alpha.item())), axis=-1)
        return observation


class RecurrentDistributionalPolicy(DistributionalPolicy):
    """A :class:`DistributionalPolicy` with LSTM trunks.

    What SB3 asks a policy takes sb3-contrib's arguments besides: recurrent states of `n` sequences, and whether each step
    starts an episode. The steps of the sequences stand one after the other, ``[n * L, ...]``.
    """

    recurrent: ClassVar[bool] = True

    @property
    def lstm_hidden_state_shape(self) -> tuple[int, int, int]:
        """Shape of a hidden state of the actor for one sequence, ``(n_layers, 1, H)``."""
        layers, _, size = self.initial_state(1)[0].shape
        return layers, 1, size

    def forward(  # type: ignore[override]
        self, obs: TensorObservation, lstm_states: PairOfStates, episode_starts: Tensor, deterministic: bool = False
    ) -> tuple[Tensor, Tensor, Tensor, PairOfStates]:
        """Return actions, values, log-probabilities, and the states of actor and critics after the last step."""
        actor, critic, after = self._latents(obs, lstm_states, episode_starts)
        return *self._decided(actor, critic, deterministic), after

    def evaluate_actions(  # type: ignore[override]
        self,
        obs: TensorObservation,
        actions: Tensor,
        lstm_states: PairOfStates,
        episode_starts: Tensor,
        action_masks: ArrayLike | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return values, log-probabilities and entropies of actions."""
        actor, critic, _ = self._latents(obs, lstm_states, episode_starts)
        return self._evaluated(actor, critic, actions, action_masks)

    def predict_values(  # type: ignore[override]
        self, obs: TensorObservation, lstm_states: State, episode_starts: Tensor
    ) -> Tensor:
        """Return mean returns for the critics' states."""
        return self._values(self._latents(obs, (lstm_states, lstm_states), episode_starts)[1])

    def get_distribution(  # type: ignore[override]
        self, obs: TensorObservation, lstm_states: State, episode_starts: Tensor, action_masks: ArrayLike | None = None
    ) -> tuple[Distribution, State]:
        """Return SB3's distribution of actions for the actor's states, and the states after the last step."""
        actor, _, after = self._latents(obs, (lstm_states, lstm_states), episode_starts)
        return self.action_dist.to_sb3(masked(self.action_dist, self.dist_params(actor), action_masks)), after[0]


class CnnDistributionalPolicy(DistributionalPolicy):
    """A :class:`DistributionalPolicy` that sees images through SB3's ``NatureCNN``."""

    default_extractor: ClassVar[type[BaseFeaturesExtractor] | None] = NatureCNN


class RecurrentCnnDistributionalPolicy(RecurrentDistributionalPolicy):
    """A :class:`RecurrentDistributionalPolicy` that sees images through SB3's ``NatureCNN``."""

    default_extractor: ClassVar[type[BaseFeaturesExtractor] | None] = NatureCNN


OWN_POLICIES = (
    DistributionalPolicy,
    RecurrentDistributionalPolicy,
    CnnDistributionalPolicy,
    RecurrentCnnDistributionalPolicy,
)


def _unrolled(trunk: RecurrentTrunk, inputs: Tensor, state: State, starts: Tensor) -> tuple[Tensor, State]:
    """Run sequences that stand one after the other, ``[n * L, F]``, step by step; return the outputs so, and the last state."""
    n = state[0].shape[1]
    outputs, carried = [], (state[0], state[1])
    keep = (1.0 - starts.to(inputs)).reshape(n, -1, 1)
    for step, row in enumerate(inputs.reshape(n, -1, inputs.shape[-1]).unbind(1)):
        output, carried = trunk.step(row, (carried[0] * keep[:, step], carried[1] * keep[:, step]))
        outputs.append(output)
    return torch.stack(outputs, dim=1).flatten(0, 1), carried


def _channels_last(tensors: Tensor | dict[str, Tensor]) -> Tensor | dict[str, Tensor]:
    """Return images ``[M, C, H, W]`` with the channels of a pixel side by side in memory, other tensors as they are."""
    if isinstance(tensors, dict):
        return {key: cast(Tensor, _channels_last(tensor)) for key, tensor in tensors.items()}
    return tensors.contiguous(memory_format=torch.channels_last) if tensors.dim() == 4 else tensors


def _extractor_for(space: spaces.Space[Any]) -> type[BaseFeaturesExtractor]:
    return CombinedExtractor if isinstance(space, spaces.Dict) else FlattenExtractor


def _net_arch(net_arch: NetArch, extractor_class: type[BaseFeaturesExtractor]) -> dict[str, list[int]]:
    """Return the hidden layers of actor (``pi``) and critics (``vf``)."""
    if isinstance(net_arch, list) and net_arch and isinstance(net_arch[0], dict):
        warnings.warn("net_arch=[dict(...)] is the form of SB3 before 1.8: give net_arch=dict(pi=..., vf=...)", stacklevel=3)
        net_arch = net_arch[0]
    if net_arch is None:
        net_arch = [] if extractor_class is NatureCNN else [64, 64]
    if isinstance(net_arch, Mapping):
        unknown = set(net_arch) - {"pi", "vf"}
        require(not unknown, "net_arch", net_arch, 'a list, or a dict with the keys "pi" and "vf"')
        return {part: list(net_arch.get(part, [])) for part in ("pi", "vf")}
    return {part: list(cast(Sequence[int], net_arch)) for part in ("pi", "vf")}


def _require_one_critic_trunk(shared_lstm: bool, enable_critic_lstm: bool | None, share_features_extractor: bool) -> None:
    """Raise AssertionError, as sb3-contrib does, for settings that contradict each other."""
    if shared_lstm and enable_critic_lstm:
        raise AssertionError("shared_lstm and enable_critic_lstm exclude each other: choose one LSTM for both, or one each")
    if shared_lstm and not share_features_extractor:
        raise AssertionError("shared_lstm needs share_features_extractor=True: one LSTM has one input")


def _dropout(lstm_kwargs: Mapping[str, Any] | None) -> float:
    unknown = set(lstm_kwargs or {}) - {"dropout"}
    require(not unknown, "lstm_kwargs", lstm_kwargs, "{'dropout': p} or empty")
    share = float((lstm_kwargs or {}).get("dropout", 0.0))
    require(0.0 <= share < 1.0, "dropout", share, "in [0, 1)")
    return share
