"""Recurrent PPO with quantile critics, as a Stable-Baselines3 algorithm.

Read it from top to bottom: settings, networks, collecting a rollout, training on it, and the state that is saved and loaded.
"""

import copy
import inspect
import math
import warnings
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from io import BufferedIOBase
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar, cast

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import VectorEnv
from numpy.typing import ArrayLike, NDArray
from pydantic import BaseModel
from stable_baselines3.common.base_class import maybe_make_env
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.policies import ActorCriticPolicy, BasePolicy
from stable_baselines3.common.type_aliases import GymEnv, MaybeCallback, Schedule
from stable_baselines3.common.utils import ConstantSchedule, FloatSchedule
from stable_baselines3.common.vec_env import VecEnv, unwrap_vec_normalize
from torch import Tensor, nn

from tailguard.envs.return_observer import ReturnRule, with_running_return
from tailguard.envs.vec_env import GymVectorAdapter, action_masks, has_action_masks, step_with_arrays
from tailguard.io import checkpoint
from tailguard.io.form import form_of, require_form
from tailguard.io.state import (
    env_state,
    load_env_state,
    load_normalization_state,
    load_random_state,
    normalization_state,
    random_state,
)
from tailguard.optim.config import OptimizerConfig, VGSConfig
from tailguard.optim.factory import build_custom_optimizer, build_optimizer
from tailguard.optim.layout import FlatParameters
from tailguard.optim.vgs import VarianceGradientScaler
from tailguard.parallel.threads import one_thread
from tailguard.ppo.actions import Categorical
from tailguard.ppo.adversary import Adversary
from tailguard.ppo.attacked_rollout import AttackedRollout, attacked_rollout
from tailguard.ppo.callback_locals import StepValues, WithStepLocals
from tailguard.ppo.compiled.acting import acting_of
from tailguard.ppo.compiled.applies import acting_applies, update_applies
from tailguard.ppo.config import (
    CriticConfig,
    EntropyConfig,
    KLConfig,
    NetworkConfig,
    ObsNormConfig,
    RiskConfig,
    require_clippable,
    require_divisor,
    resolve_minibatches,
)
from tailguard.ppo.diagnostics import (
    CALIBRATION_WINDOW,
    TAIL,
    Calibration,
    EpisodeReturns,
    Moments,
    StageProfile,
    drift_metrics,
    explained_variance,
    moments_drift,
    recurrent_state_metrics,
    reserve_metrics,
    tail_metrics,
    twin_metrics,
)
from tailguard.ppo.loss import Coefficients
from tailguard.ppo.networks import State, network_kwargs, require_same_shapes, reset_state
from tailguard.ppo.observations import ObservationRows
from tailguard.ppo.policy import (
    CnnDistributionalPolicy,
    DistributionalPolicy,
    RecurrentCnnDistributionalPolicy,
    RecurrentDistributionalPolicy,
)
from tailguard.ppo.quantiles import ascending
from tailguard.ppo.risk import RiskObjective
from tailguard.ppo.rollout import Batch, Experience, NotFinite, Rollout, finite, prepare
from tailguard.ppo.saved_form import (
    require_optimizer_form,
    require_rollout_size,
    require_run_form,
    require_same_settings,
    require_saved_form,
    require_sizes,
)
from tailguard.ppo.sb3_import import read_sb3, weights_from_sb3
from tailguard.ppo.sb3_policy import SCALAR_CRITIC, adapted, is_sb3_policy
from tailguard.ppo.scaling import ObservationNormalizer
from tailguard.ppo.schedules import EntropySchedule, KLControl, LearningRate
from tailguard.ppo.serialization import (
    PARAMETER_NAMES,
    network_tree,
    policy_kwargs_of,
    read_model,
    space_of,
    space_tree,
    write_model,
)
from tailguard.ppo.targets import gae
from tailguard.ppo.update import KL, LOSS_TERMS, LOSSES, Update, UpdateSettings
from tailguard.robust.config import SAPPOConfig
from tailguard.robust.regulariser import horizon
from tailguard.validation import build, require

Settings = TypeVar("Settings", bound=BaseModel)
Spaces = tuple[spaces.Space[Any], spaces.Space[Any]]  # of observations and actions
# Settings that may be functions of the progress remaining, besides the learning rate.
SCHEDULES = ("clip_range", "clip_range_vf")
# SB3's arguments that stand for one setting of a group.
SHORT_NAMES = {"ent_coef": "entropy", "target_kl": "kl"}
COUNTERS = ("num_timesteps", "_total_timesteps", "_current_progress_remaining", "_n_updates", "_episode_num")


class DistributionalPPO(OnPolicyAlgorithm):
    """PPO whose critics predict the distribution of the return; a drop-in for SB3's ``PPO`` and sb3-contrib's ``RecurrentPPO``.

    The arguments up to `device` are SB3's and sb3-contrib's, in their order and with their meaning; docs/guide/from-sb3.md
    lists what differs.

    :param policy: ``"MlpPolicy"``, ``"CnnPolicy"``, ``"MultiInputPolicy"``, their recurrent forms ``"MlpLstmPolicy"``,
        ``"CnnLstmPolicy"``, ``"MultiInputLstmPolicy"``, or a subclass of their classes. A subclass of SB3's
        ``ActorCriticPolicy`` is trained as it is, with the one value that it predicts.
    :param env: a Gymnasium env or its id, an SB3 ``VecEnv``, or a Gymnasium ``VectorEnv`` that resets in the same step.
    :param learning_rate: a number or a function of the progress remaining (1 to 0).
    :param n_steps: steps per environment and rollout.
    :param batch_size: samples per gradient step. With an LSTM a minibatch is made of sequences: of all steps of an environment,
        or, below `n_steps`, of parts of them. None takes a quarter of the rollout.
    :param n_epochs: passes over a rollout.
    :param gamma: discount.
    :param gae_lambda: lambda of the advantages.
    :param clip_range: how far the ratio of new to old probability may count; a number or a function of the progress remaining.
    :param clip_range_vf: how far a prediction of the critics may move in an update, in units of the return; a number or a
        function of the progress remaining. None does not clip.
    :param normalize_advantage: standardise the advantages.
    :param ent_coef: weight of the entropy bonus, constant. None leaves it to `entropy`.
    :param vf_coef: weight of the critics' loss.
    :param max_grad_norm: gradients are scaled down to this norm.
    :param use_sde: explore with generalised state-dependent exploration (gSDE).
    :param sde_sample_freq: steps after which gSDE draws new noise; -1 draws it at the start of a rollout only.
    :param target_kl: end an update at a KL above 1.5 times this. None leaves it to `kl`.
    :param stats_window_size: episodes that averages in the log span.
    :param tensorboard_log: folder for TensorBoard.
    :param policy_kwargs: a :class:`NetworkConfig`, or a dict of ``net_arch``, ``activation_fn``, ``lstm_hidden_size`` and so
        on, see :class:`DistributionalPolicy`.
    :param verbose: 0 silent, 1 progress, 2 more.
    :param seed: seed of the policy, the environments and the shuffling.
    :param device: where the networks compute. ``cpu`` is right for all but large networks.
    :param microbatch_size: samples per backward pass; the gradients of a minibatch are accumulated. None: the whole minibatch.
    :param optimizer: an :class:`OptimizerConfig` or a dict of its fields; Adam by default.
    :param critic: a :class:`CriticConfig` or a dict of its fields.
    :param risk: what to maximise, the mean return or its tail: a :class:`RiskConfig` or a dict of its fields. Unless it is
        neutral, the environment is wrapped in a :class:`ReturnObserver`, and so must be the one that the agent is deployed in.
    :param entropy: an :class:`EntropyConfig` or a dict of its fields.
    :param kl: a :class:`KLConfig` or a dict of its fields.
    :param vgs: shorter steps where gradients are noisy: a :class:`VGSConfig` or a dict of its fields. None scales nothing.
    :param adversary: training against perturbed observations: a :class:`SAPPOConfig` or a dict of its fields. None has none.
    :param normalize_obs: False, True, an :class:`ObsNormConfig` or a dict of its fields.
    :param normalize_advantage_per_mini_batch: standardise the advantages of each minibatch by themselves, as SB3 and CleanRL
        do, not those of the rollout at once. Minibatches then count alike, however large their advantages are; small ones add
        the noise of their own mean and deviation.
    :param rollout_buffer_class: not supported: a rollout has one form here.
    :param rollout_buffer_kwargs: not supported.
    """

    policy_aliases: ClassVar[dict[str, type[BasePolicy]]] = {
        "MlpPolicy": DistributionalPolicy,
        "CnnPolicy": CnnDistributionalPolicy,
        "MultiInputPolicy": DistributionalPolicy,
        "MlpLstmPolicy": RecurrentDistributionalPolicy,
        "CnnLstmPolicy": RecurrentCnnDistributionalPolicy,
        "MultiInputLstmPolicy": RecurrentDistributionalPolicy,
    }
    policy: DistributionalPolicy  # type: ignore[assignment]

    def __init__(
        self,
        policy: str | type[DistributionalPolicy],
        env: GymEnv | VectorEnv[Any, Any, Any] | str | None,
        learning_rate: float | Schedule = 3e-4,
        n_steps: int = 128,
        batch_size: int | None = None,
        n_epochs: int = 4,
        gamma: float = 0.99,
        gae_lambda: float = 0.95,
        clip_range: float | Schedule = 0.2,
        clip_range_vf: float | Schedule | None = None,
        normalize_advantage: bool = True,
        ent_coef: float | None = None,
        vf_coef: float = 0.5,
        max_grad_norm: float = 0.5,
        use_sde: bool = False,
        sde_sample_freq: int = -1,
        target_kl: float | None = None,
        stats_window_size: int = 100,
        tensorboard_log: str | None = None,
        policy_kwargs: NetworkConfig | dict[str, Any] | None = None,
        verbose: int = 0,
        seed: int | None = None,
        device: torch.device | str = "cpu",
        *,
        microbatch_size: int | None = None,
        optimizer: OptimizerConfig | Mapping[str, Any] | None = None,
        critic: CriticConfig | Mapping[str, Any] | None = None,
        risk: RiskConfig | Mapping[str, Any] | None = None,
        entropy: EntropyConfig | Mapping[str, Any] | None = None,
        kl: KLConfig | Mapping[str, Any] | None = None,
        vgs: VGSConfig | Mapping[str, Any] | None = None,
        adversary: SAPPOConfig | Mapping[str, Any] | None = None,
        normalize_obs: bool | ObsNormConfig | Mapping[str, Any] = False,
        normalize_advantage_per_mini_batch: bool = False,
        rollout_buffer_class: None = None,
        rollout_buffer_kwargs: None = None,
        _init_setup_model: bool = True,
    ) -> None:
        if not callable(learning_rate):
            require(0.0 <= learning_rate < float("inf"), "learning_rate", learning_rate, "finite and not negative")
        require(n_steps >= 1, "n_steps", n_steps, "at least 1")
        require(n_epochs >= 1, "n_epochs", n_epochs, "at least 1")
        require(0.0 <= gamma <= 1.0, "gamma", gamma, "in [0, 1]")
        require(0.0 <= gae_lambda <= 1.0, "gae_lambda", gae_lambda, "in [0, 1]")
        if not callable(clip_range):
            require(0.0 < clip_range < float("inf"), "clip_range", clip_range, "positive and finite")
        if clip_range_vf is not None and not callable(clip_range_vf) and clip_range_vf <= 0.0:
            raise AssertionError(f"clip_range_vf is {clip_range_vf}, but it must be positive, or None for no clipping")
        require(max_grad_norm > 0.0, "max_grad_norm", max_grad_norm, "positive")
        require(0.0 <= vf_coef < float("inf"), "vf_coef", vf_coef, "finite and not negative")
        require(ent_coef is None or entropy is None, "ent_coef", ent_coef, "None where entropy says it all")
        require(target_kl is None or kl is None, "target_kl", target_kl, "None where kl says it all")
        if rollout_buffer_class is not None or rollout_buffer_kwargs is not None:
            raise ValueError(
                "rollout_buffer_class is not supported: rollouts are stored as sequences, see tailguard.ppo.rollout"
            )
        self.batch_size, self.microbatch_size, self.n_epochs = batch_size, microbatch_size, n_epochs
        self.clip_range, self.clip_range_vf, self.normalize_advantage = clip_range, clip_range_vf, normalize_advantage
        self.normalize_advantage_per_mini_batch = normalize_advantage_per_mini_batch
        sb3_policy = is_sb3_policy(policy)
        critic = SCALAR_CRITIC if critic is None and sb3_policy else critic
        self.critic_config = _config("critic", CriticConfig, critic)
        if clip_range_vf is not None:
            require_clippable(self.critic_config)
        self.optimizer_config = _config("optimizer", OptimizerConfig, optimizer)
        self.vgs_config = VGSConfig(enabled=False) if vgs is None else _config("vgs", VGSConfig, vgs)
        self.adversary_config = None if adversary is None else _config("adversary", SAPPOConfig, adversary)
        self.risk_config = _config("risk", RiskConfig, risk)
        if self.risk_config.return_augmented:
            require(gamma > 0.0, "gamma", gamma, "above 0 for an objective that looks at the return of an episode")
            env = None if env is None else self._return_augmented(env, self.risk_config, gamma, seed)  # type: ignore[arg-type]
        self.entropy = EntropySchedule(
            _config("entropy", EntropyConfig, entropy if ent_coef is None else {"initial": ent_coef})
        )
        early_stop = {"mode": "early_stop", "target": target_kl}
        self.kl = KLControl(_config("kl", KLConfig, kl if target_kl is None else early_stop))
        self.obs_norm_config: ObsNormConfig | None = None
        if normalize_obs is not False:
            self.obs_norm_config = _config("normalize_obs", ObsNormConfig, {} if normalize_obs is True else normalize_obs)
        if sb3_policy:
            plain = {
                "critic": self.critic_config == SCALAR_CRITIC,
                "risk": not self.risk_config.return_augmented,
                "adversary": self.adversary_config is None,
                "normalize_obs": self.obs_norm_config is None,
                "use_sde": not use_sde,
            }
            asked = [name for name, fits in plain.items() if not fits]
            require(not asked, "policy", policy, f"one of DistributionalPPO's own for {', '.join(asked)}")
        super().__init__(
            policy,  # type: ignore[arg-type]
            env,  # type: ignore[arg-type]
            learning_rate=learning_rate,
            n_steps=n_steps,
            gamma=gamma,
            gae_lambda=gae_lambda,
            ent_coef=self.entropy.value,
            vf_coef=vf_coef,
            max_grad_norm=max_grad_norm,
            use_sde=use_sde,
            sde_sample_freq=sde_sample_freq,
            stats_window_size=stats_window_size,
            tensorboard_log=tensorboard_log,
            policy_kwargs=network_kwargs(policy_kwargs) if isinstance(policy_kwargs, NetworkConfig) else policy_kwargs,
            verbose=verbose,
            seed=seed,
            device=device,
            supported_action_spaces=(spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary),
            _init_setup_model=_init_setup_model,
        )

    def _setup_model(self) -> None:
        dtype = torch.get_default_dtype()
        require(dtype == torch.float32, "torch's default dtype", dtype, "float32, in which observations and networks are")
        self._leave_rewards_alone()
        self._setup_lr_schedule()
        self.set_random_seed(self.seed)
        self.clip_range = FloatSchedule(self.clip_range)
        self.clip_range_vf = None if self.clip_range_vf is None else FloatSchedule(self.clip_range_vf)
        shuffling_seed = int(torch.randint(2**62, ())) if self.seed is None else self.seed
        self.shuffler = torch.Generator().manual_seed(shuffling_seed)
        with one_thread():  # orthogonal weights come from a QR decomposition, which LAPACK shares out
            self.actor_critic = self._build_policy().place(self.device)
        self.objective = RiskObjective(self.risk_config, self.actor_critic.budget)
        self.flat = FlatParameters(self.actor_critic)
        self._setup_optimizer()
        self.adversary = None
        if self.adversary_config is not None:  # built even where it will stay idle, so that impossible settings are refused
            self.adversary = Adversary(self.actor_critic, self.adversary_config, self.shuffler.initial_seed(), self.flat)
        self.update = Update(self.actor_critic, self.flat, self.critic_config, self.vgs, self.adversary)
        self.acting = acting_of(self.actor_critic, self.flat, self.n_envs, self.sde_sample_freq)
        self._masks_actions = False
        self._plan_minibatches()
        self.rollout_buffer: Rollout = Rollout(  # type: ignore[assignment]
            self.n_steps,
            self.n_envs,
            self.actor_critic.obs_size,
            self.actor_critic.action_dist,
            torch.float32 if self.actor_critic.features_extractor is None else self.actor_critic.observations.dtype,
        )
        self.rollout_buffer.evaluate = self._experience
        self.rollout_buffer.shaped = self.actor_critic.observations.shaped
        self._attack: AttackedRollout | None = None
        self._sound_normalization: tuple[dict[str, Any], NDArray[Any]] | None = None
        self.profile = StageProfile()
        self.episode_returns = EpisodeReturns(self.n_envs, self.return_gamma, self._stats_window_size)
        self.calibration = Calibration(self.n_envs, CALIBRATION_WINDOW, TAIL)
        self.reset_lstm_states_to_initial()

    def _build_policy(self) -> DistributionalPolicy:
        """Set the policy, and return it as the algorithm sees it: the same object, unless it is one of SB3's own classes."""
        spaces_of_env = self.observation_space, self.action_space
        if is_sb3_policy(self.policy_class):
            adapter = adapted(cast(type[ActorCriticPolicy], self.policy_class), *spaces_of_env, self.policy_kwargs)
            self.policy = cast(Any, adapter.inner)
            return adapter
        options: dict[str, Any] = {"critic": self.critic_config, "obs_norm": self.obs_norm_config, "risk": self.risk_config}
        options |= self.policy_kwargs | ({"use_sde": True} if self.use_sde else {})
        self.policy = cast(type[DistributionalPolicy], self.policy_class)(*spaces_of_env, **options)
        return self.policy

    def _setup_optimizer(self) -> None:
        """Build the optimizer over one flat tensor, and VGS over the heads that the tensor is made of."""
        policy, generator = self.actor_critic, torch.Generator().manual_seed(self.shuffler.initial_seed())
        if policy.optimizer_class is not None and self.optimizer_config != OptimizerConfig():
            warnings.warn(
                f"optimizer {self.optimizer_config.name} is not used: policy_kwargs name optimizer_class or optimizer_kwargs",
                stacklevel=3,
            )
        if policy.optimizer_class is None:
            policy.optimizer = build_optimizer(
                self.optimizer_config, [self.flat.tensor], 0.0, vgs=self.vgs_config.enabled, generator=generator
            )
        else:  # over the parameters one by one: the user's class may treat them as matrices
            policy.optimizer = build_custom_optimizer(policy.optimizer_class, policy.parameters(), policy.optimizer_kwargs)
        if policy.optimizer_class is None:
            self.flat.serve(policy.optimizer)
        self.lr.apply(policy.optimizer, 1.0, 1.0)  # users take steps of their own before the training
        self.policy.optimizer = policy.optimizer
        self.vgs = VarianceGradientScaler.from_config(self.actor_critic.heads(), self.vgs_config)
        if self.vgs_config.enabled:
            self.vgs.attach(self.actor_critic.optimizer)

    @staticmethod
    def _wrap_env(env: GymEnv, verbose: int = 0, monitor_wrapper: bool = True) -> VecEnv:
        """Wrap an environment; the constructor, ``set_env`` and ``load`` pass theirs through here."""
        if isinstance(env, VectorEnv):
            env = GymVectorAdapter(env)
        return OnPolicyAlgorithm._wrap_env(env, verbose, monitor_wrapper)

    def _leave_rewards_alone(self) -> None:
        """Switch off the reward scale of a user's ``VecNormalize``; not for SB3's policies, whose values are in raw units."""
        env = None if self.env is None else unwrap_vec_normalize(self.env)
        if env is not None and env.norm_reward and not is_sb3_policy(self.policy_class):
            env.norm_reward = False
            warnings.warn(
                "VecNormalize(norm_reward=True) would scale returns a second time: its norm_reward is now False, since "
                "DistributionalPPO follows the scale of returns by itself (PopArt)",
                stacklevel=3,
            )

    @classmethod
    def _return_augmented(cls, env: GymEnv, risk: RiskConfig, gamma: float, seed: int | None) -> VecEnv:
        """Return the environment with the running return in its observations."""
        alphas = risk.alphas().tolist() if risk.alpha_conditioned else None
        rule = ReturnRule(gamma, risk.counted_over)
        return with_running_return(cls._wrap_env(maybe_make_env(env, 0)), rule, alphas, seed)

    def set_env(self, env: GymEnv, force_reset: bool = True) -> None:
        """Set the environment as SB3 does, with the running return in its observations where the objective needs it."""
        if self.risk_config.return_augmented:
            env = self._return_augmented(env, self.risk_config, self.gamma, self.seed)
        super().set_env(env, force_reset)
        self._leave_rewards_alone()

    @property
    def learning_rate(self) -> float | Schedule:
        """The learning rate, or its schedule, as it was given; setting it takes effect with the next update."""
        return self._learning_rate

    @learning_rate.setter
    def learning_rate(self, value: float | Schedule) -> None:
        self._learning_rate, self.lr = value, LearningRate(value)

    @property
    def lr_schedule(self) -> Schedule:
        """The learning rate as a function of the progress remaining, without the factor of the KL control."""
        return self.lr.base_at

    @lr_schedule.setter
    def lr_schedule(self, schedule: Schedule) -> None:
        self.lr = LearningRate(schedule)

    @property
    def ent_coef(self) -> float:
        """The weight of the entropy bonus in the next update; setting it makes it constant."""
        return self.entropy.value

    @ent_coef.setter
    def ent_coef(self, value: float) -> None:
        if value != self.entropy.value:
            self.entropy = EntropySchedule(EntropyConfig(initial=value))

    @property
    def return_gamma(self) -> float:
        """The discount of the returns that the critics predict: `gamma`, or 1 where they are those of a period."""
        return self.risk_config.discount(self.gamma)

    @property
    def target_kl(self) -> float | None:
        """The KL at 1.5 times which an update ends; None without such an end."""
        return self.kl.config.target if self.kl.config.mode == "early_stop" else None

    @target_kl.setter
    def target_kl(self, value: float | None) -> None:
        if value != self.target_kl:
            self.kl = KLControl(KLConfig() if value is None else KLConfig(mode="early_stop", target=value))

    def set_risk(self, alpha: float) -> None:
        """Choose the tail that :meth:`predict` is averse to from now on, where the observation does not say.

        :param alpha: level of the tail, within the range that the agent was trained for.
        """
        if not isinstance(self.risk_config.alpha, tuple) or not self.risk_config.alpha_conditioned:
            raise ValueError('this agent serves one objective; train with risk={"objective": "cvar", "alpha": (low, high)}')
        low, high = self.risk_config.alpha
        require(low <= alpha <= high, "alpha", alpha, f"between {low} and {high}, the range of the training")
        self.actor_critic.budget.alpha.fill_(alpha)

    def reset_lstm_states_to_initial(self) -> None:
        """Reset the recurrent states of actor and critics in every environment."""
        self._actor_state: State = self.actor_critic.initial_state(self.n_envs)
        self._critic_state: State = self.actor_critic.initial_critic_state(self.n_envs)

    def _maybe_recommend_cpu(self, mlp_class_name: str = "DistributionalPolicy") -> None:
        """Warn of a GPU for a policy without a CNN."""
        if self.device.type != "cpu" and cast(Any, self.policy_class).__name__ == mlp_class_name:
            warnings.warn(
                f"You are trying to run PPO on the GPU ({self.device}), where a small network is slower than in the compiled "
                "passes on the CPU: leave device='cpu' unless the policy has a CNN",
                stacklevel=2,
            )

    def learn(
        self,
        total_timesteps: int,
        callback: MaybeCallback = None,
        log_interval: int = 1,
        tb_log_name: str = "PPO",
        reset_num_timesteps: bool = True,
        progress_bar: bool = False,
        use_masking: bool = True,
    ) -> Self:
        """Train as SB3 does; TensorBoard gets the name of SB3's PPO unless another is given.

        The compiled passes compute in one thread, so that the result does not depend on ``OMP_NUM_THREADS``. Where they do not
        apply, PyTorch uses the threads that it was given, and the last bits depend on how many these are.

        :param use_masking: ask environments with a method ``action_masks`` which actions are possible, as sb3-contrib's
            ``MaskablePPO`` does; others are not asked.
        """
        self._use_masking(use_masking)
        self._keep_normalization()
        try:
            with one_thread() if acting_applies(self.actor_critic) else nullcontext():
                return super().learn(total_timesteps, callback, log_interval, tb_log_name, reset_num_timesteps, progress_bar)
        except NotFinite:
            # The user's VecNormalize has seen the NaN before we have, and would return nothing else from now on.
            if self._vec_normalize_env is not None and self._sound_normalization is not None:
                statistics, returns = self._sound_normalization
                load_normalization_state(self._vec_normalize_env, statistics)
                self._vec_normalize_env.returns = returns
            raise

    def _init_callback(self, callback: MaybeCallback, progress_bar: bool = False) -> BaseCallback:
        """Prepare the user's callbacks as SB3 does; they find values and log-probabilities in their locals when they ask."""
        if callback is not None:
            asked = {"values": lambda: self._step_values.values(), "log_probs": lambda: self._step_values.log_probs()}
            callback = WithStepLocals(callback if isinstance(callback, list) else [callback], asked)
        return super()._init_callback(callback, progress_bar)

    def _use_masking(self, use_masking: bool) -> None:
        """Decide whether the environments are asked which actions are possible."""
        discrete = isinstance(self.actor_critic.action_dist, Categorical)
        self._masks_actions = use_masking and discrete and self.env is not None and has_action_masks(self.env)
        if self._masks_actions and self.adversary is not None:
            raise ValueError("an adversary does not know of action masks: train without adversary, or with use_masking=False")

    def predict(
        self,
        observation: Any,
        state: tuple[NDArray[Any], ...] | None = None,
        episode_start: NDArray[Any] | None = None,
        deterministic: bool = False,
        action_masks: ArrayLike | None = None,
    ) -> tuple[NDArray[Any], tuple[NDArray[Any], ...] | None]:
        """Return actions and the recurrent state after them, as SB3 does; masks as sb3-contrib's ``MaskablePPO`` takes them."""
        if action_masks is None:
            return super().predict(observation, state, episode_start, deterministic)
        return self.actor_critic.predict(observation, state, episode_start, deterministic, action_masks)

    def _keep_normalization(self) -> None:
        """Keep the statistics of a user's ``VecNormalize`` as they are, unless they are not finite."""
        env = self._vec_normalize_env
        statistics = {} if env is None else normalization_state(env)
        if env is not None and all(np.isfinite(part["mean"]).all() for part in statistics.values()):
            self._sound_normalization = statistics, env.returns.copy()

    # ------------------------------------------------------------------------------------------------ collecting

    def collect_rollouts(  # type: ignore[override]
        self, env: VecEnv, callback: BaseCallback, rollout_buffer: Rollout, n_rollout_steps: int
    ) -> bool:
        """Act for `n_rollout_steps` steps in every environment with the present policy; return False if a callback stops it."""
        assert self._last_obs is not None, "learn() resets the environment first"
        if self.batch_size != self._sequences * self._unit:  # set from outside
            self._plan_minibatches()
        self.flat.attach()
        self.actor_critic.set_training_mode(False)
        observations = self.actor_critic.observations
        keeps_states = self.actor_critic.shares_trunk  # the critics stand on what the actor has seen
        # train() has done this with its own returns already. Statistics that came from elsewhere since then, from a checkpoint
        # or another member of a population, become active here and then stay the same for the whole rollout_buffer.
        self._activate_return_scale_snapshot()
        starts = cast(NDArray[np.bool_], self._last_episode_starts).astype(bool)
        self._actor_state, self._critic_state = reset_state(self._actor_state, starts), reset_state(self._critic_state, starts)
        self._rollout_start = (self._actor_state, self._critic_state)
        self.episode_returns.begin(starts)
        rollout_buffer.reset(starts)
        self._step_values = StepValues(self.actor_critic, rollout_buffer, self.critic_config, self._critic_state)
        before = self._observation_moments()
        self._keep_normalization()
        callback.on_rollout_start()
        self.acting.begin(rollout_buffer)
        attack = self._attack = attacked_rollout(self.adversary, self._horizon(), rollout_buffer)
        for n_steps in range(n_rollout_steps):
            with self.profile.stage("act"):
                obs_tensor = rollout_buffer.observe(observations.rows(self._last_obs))
                finite("observation", obs_tensor, n_steps)
                if attack is not None:
                    attack.perturb(obs_tensor, self._actor_state)
                masks = action_masks(env) if self._masks_actions else None
                self._actor_state = self.acting.step(rollout_buffer, obs_tensor, self._actor_state, masks)
                actions = rollout_buffer.actions_now()
                clipped_actions = self.actor_critic.action_dist.to_env(actions)
            with self.profile.stage("env"):
                step, infos = step_with_arrays(env, clipped_actions)
            new_obs, rewards, dones = step.obs, step.rewards, step.terminated | step.truncated
            finite("reward", rewards, n_steps)
            if len(step.ended):
                step = step._replace(final_obs=observations.rows(step.final_obs))
                cut = step.truncated[step.ended]  # after a termination nobody looks at the final observation
                finite("final observation", step.final_obs[cut], n_steps, step.ended[cut])
                if attack is not None:
                    step = attack.perturb_finals(step, self._actor_state)
            rollout_buffer.add(step, self._actor_state if keeps_states else None)
            self.episode_returns.add(n_steps, step)
            self._last_actor_state = self._actor_state
            if len(step.ended):
                self._actor_state = reset_state(self._actor_state, dones)
            self.num_timesteps += env.num_envs
            self._last_obs, self._last_episode_starts = new_obs, dones
            callback.update_locals(locals())
            if not callback.on_step():
                # The critics have not seen these steps; where an episode ended they must at least forget it.
                ended = rollout_buffer.ended_since_reset()
                self._critic_state = reset_state(self._critic_state, ended)
                self.calibration.forget(ended)
                return False
            if len(step.ended):  # episodes are reported where they end; looking at all others takes longer than stepping
                self._update_info_buffer([infos[i] for i in step.ended], dones[step.ended])
        last = rollout_buffer.observe(observations.rows(self._last_obs))
        finite("observation", last, n_rollout_steps)
        if attack is not None:
            attack.perturb(last, self._actor_state)
        if before is not None:
            self._record(drift_metrics(*moments_drift(before, cast(Moments, self._observation_moments()))))
        callback.update_locals(locals())
        callback.on_rollout_end()
        return True

    def _observation_moments(self) -> Moments | None:
        """Return mean and standard deviation by which a user's VecNormalize scales observations; None without one."""
        env = self._vec_normalize_env
        if env is None or not env.norm_obs or isinstance(env.obs_rms, dict):
            return None
        return np.array(env.obs_rms.mean), np.sqrt(np.array(env.obs_rms.var) + env.epsilon)

    # -------------------------------------------------------------------------------------------------- training

    def train(self) -> None:
        """Improve policy and critics with the rollout just collected."""
        self.flat.attach()
        lr = self.lr.apply(self.actor_critic.optimizer, self._current_progress_remaining, self.kl.lr_factor)
        with self.profile.stage("prepare"):
            experience = self.rollout_buffer.experience()
            batch = experience.normalised(self.actor_critic)
        self.actor_critic.set_training_mode(True)
        with self.profile.stage("update"):
            if self.adversary is not None:
                self.adversary.begin(self._horizon())
            minibatches = self._gradient_steps(batch)
        if self.critic_config.ev_reserve:
            self._record(reserve_metrics(self.actor_critic, self.critic_config, experience))
        if minibatches:  # without a step there is nothing to report, and nothing for the controllers to react to
            means = torch.stack(minibatches).mean(0).tolist()
            explained = explained_variance(experience.values, experience.returns, experience.weights)
            self._report(means, explained, experience, lr)
            self.kl.update(means[KL], self.lr.base_at(self._current_progress_remaining))
            finished = [episode["r"] for episode in self.ep_info_buffer or []]
            self.entropy.step(float(np.mean(finished)) if finished else None, explained)
        if self.adversary is not None:
            of_rollout = {} if self._attack is None else self._attack.metrics()
            self._record(self.adversary.metrics() | self.adversary.certificate(batch) | of_rollout)
        if (
            experience.finished is not None and self.actor_critic.return_scale.mass > 0.0
        ):  # a budget is shown in units of the return
            self.objective.remember(experience.finished)
            masses = self.actor_critic.return_dist.masses.double().cpu().numpy()
            self._record(self.objective.adapt(1.0 - self._current_progress_remaining, masses))
        if isinstance(self.actor_critic.normalizer, ObservationNormalizer):
            own = self.rollout_buffer.obs[:-1, :, : self.actor_critic.own_size]
            self.actor_critic.normalizer.update(own if self._attack is None else self._attack.true_observations())
            self._record(drift_metrics(*self.actor_critic.normalizer.drift()))
        self._critic_state = reset_state(self._critic_state, cast(NDArray[np.bool_], self._last_episode_starts))

    def _experience(self) -> Experience:
        """Evaluate the critics on the rollout, compute advantages and targets, and bring the scale of returns up to date."""
        self.actor_critic.set_training_mode(False)  # nothing is dropped from what is predicted
        rollout, scale = self.rollout_buffer, self.actor_critic.return_scale
        learnable = bool(rollout.weights.any())
        if learnable and scale.mass == 0.0:
            # While the critics know nothing the scale comes from rewards alone: their guesses would drown small returns.
            nothing = torch.zeros_like(rollout.rewards)
            rewards_to_go = gae(rollout.rewards, nothing, nothing, *rollout.return_ends(), self.return_gamma, 1.0)
            scale.update(rewards_to_go, rollout.weights)
            scale.activate()  # the critics start in these units: they have predicted nothing yet that would have to be kept
            scale.mass.zero_()  # a first guess; the returns proper take its place
        experience = prepare(
            self.actor_critic,
            rollout,
            *self._rollout_start,
            critic=self.critic_config,
            objective=self.objective,
            gamma=self.return_gamma,
            gae_lambda=self.gae_lambda,
            generator=self.shuffler,
            normalize_advantage=self.normalize_advantage and not self.normalize_advantage_per_mini_batch,
            keep_atoms=self._value_clip() is not None,
            sequence_length=self._unit,
        )
        self._critic_state = experience.critic_state_after or self._last_actor_state
        pooled = ascending(experience.start_atoms).mean(0)
        self.calibration.update(
            rollout.return_starts(), self.episode_returns.ends, pooled, self.actor_critic.return_dist.masses.cpu()
        )
        if learnable:
            self._finalize_return_stats(experience)
        self._activate_return_scale_snapshot()
        return experience

    def _gradient_steps(self, everything: Batch) -> list[Tensor]:
        """Take the gradient steps of all epochs; fewer when the KL says stop.

        :returns: of each minibatch, its :data:`LOSSES`, the norm of each critic's gradient and that of the whole gradient.
        """
        minibatches: list[Tensor] = []
        settings = self._update_settings()
        per_mini_batch = self.normalize_advantage and self.normalize_advantage_per_mini_batch
        for _ in range(self.n_epochs):
            before = len(minibatches)
            for batch in everything.shuffled(self._sequences, self.shuffler):
                total_weight = float(batch.weights.sum())
                if not total_weight:  # nothing to learn from; a step would only follow old momentum
                    self.logger.record("warn/empty_batch", 1.0)
                    continue
                metrics = self.update.gradient(batch.standardised() if per_mini_batch else batch, total_weight, settings)
                values = metrics.tolist()
                if not all(map(math.isfinite, values)):  # a step with it would make every weight NaN
                    self.logger.record("warn/non_finite_gradient", 1.0)
                    continue
                minibatches.append(metrics)
                if self.kl.should_stop(values[KL]):
                    return minibatches
                self.update.step(values[-1], self.max_grad_norm)
            if len(minibatches) == before:
                self.logger.record("warn/empty_epoch", 1.0)
            else:
                self._n_updates += 1
        return minibatches

    def _update_settings(self) -> UpdateSettings:
        """Return the settings of the loss as they are now, so that a change from outside counts at once."""
        adversary = self.adversary
        mixes = adversary is not None and adversary.active and adversary.config.mode == "mix"
        microbatch = self._sequences if self.microbatch_size is None else self.microbatch_size // self._unit
        clip_range = FloatSchedule(self.clip_range)(max(self._current_progress_remaining, 0.0))
        value_clip = self._value_clip()
        return UpdateSettings(
            policy=Coefficients(clip_range, self.entropy.value, self.kl.coefficient),
            vf_coef=self.vf_coef,
            value_clip=value_clip,
            microbatch=microbatch,
            compiled=update_applies(
                self.actor_critic,
                whole_minibatches=microbatch == self._sequences and not mixes,
                clips_values=value_clip is not None,
            ),
        )

    def _value_clip(self) -> float | None:
        """Return how far a prediction may move in this update, in standard deviations of the return; None: any distance."""
        if self.clip_range_vf is None:
            return self.critic_config.clip_range
        return FloatSchedule(self.clip_range_vf)(max(self._current_progress_remaining, 0.0)) / self._ret_std_snapshot

    def _horizon(self) -> int:
        """Return the number of updates of the whole training."""
        return horizon(self._total_timesteps, self.n_steps, self.n_envs)

    def _report(self, means: list[float], explained: float | None, experience: Experience, lr: float) -> None:
        """Log an update.

        :param means: over the minibatches, of what :meth:`_gradient_steps` returned.
        :param explained: explained variance of the critics together, before the update.
        """
        policy = self.actor_critic
        metrics: dict[str, Any] = dict(zip((f"train/{name}" for name in LOSSES), means, strict=False))
        clip_range, entropy_coef, kl_coef = self._update_settings().policy
        surrogate, entropy, kl, value_loss = (metrics[f"train/{name}"] for name in LOSS_TERMS)
        metrics["train/loss"] = surrogate - entropy_coef * entropy + kl_coef * kl + self.vf_coef * value_loss
        metrics |= {"train/entropy_loss": -entropy, "train/clip_range": clip_range}
        metrics |= {"train/grad_norm": means[-1], "train/learning_rate": lr, "train/entropy_coefficient": self.entropy.value}
        metrics |= {"train/return_mean": self._ret_mean_snapshot, "train/return_std": self._ret_std_snapshot}
        metrics["train/explained_variance"] = explained
        for k, values in enumerate(experience.per_critic, start=1):
            alone = explained_variance(values, experience.returns, experience.weights)
            metrics[f"train/explained_variance_critic{k}"] = alone
        metrics |= twin_metrics(means[len(LOSSES) : -1])
        whole = ~self.rollout_buffer.part_period[self.rollout_buffer.return_starts()]
        metrics |= tail_metrics(experience.start_atoms[:, whole], policy.return_dist.masses.cpu(), self.episode_returns, TAIL)
        metrics |= self.calibration.metrics()
        if policy.log_std is not None:
            metrics["train/std"] = policy.log_std.exp().mean().item()
        if policy.recurrent:
            metrics |= recurrent_state_metrics(self._last_actor_state, self._critic_state)
        if self.vgs.config.enabled:
            metrics |= self.vgs.metrics()
        self._record(metrics | self.profile.take())
        self.logger.record("train/n_updates", self._n_updates, exclude="tensorboard")

    def _record(self, metrics: Mapping[str, Any]) -> None:
        for name, value in metrics.items():
            self.logger.record(name, value)

    # --------------------------------------------------------------------- scale of returns, by the audit reports' names

    @property
    def _ret_mean_value(self) -> float:
        """Mean of the returns, as the data say."""
        return self.actor_critic.return_scale.mean.item()

    @property
    def _ret_std_value(self) -> float:
        """Standard deviation of the returns, as the data say."""
        return self.actor_critic.return_scale.std.item()

    @property
    def _ret_mean_snapshot(self) -> float:
        """Mean of the returns in the units that are active."""
        return self.actor_critic.return_scale.mean_snapshot.item()

    @property
    def _ret_std_snapshot(self) -> float:
        """Standard deviation of the returns in the units that are active."""
        return self.actor_critic.return_scale.std_snapshot.item()

    def _finalize_return_stats(self, experience: Experience) -> None:
        """Fold the returns of this rollout into the statistics."""
        self.actor_critic.return_scale.update(experience.returns, experience.weights)

    def _activate_return_scale_snapshot(self) -> None:
        """Make the statistics active and rescale the critics' last layer, so that no raw prediction moves."""
        self.actor_critic.activate_return_scale()

    # --------------------------------------------------------------------------------------------------- minibatches

    def _plan_minibatches(self) -> None:
        """Cut rollouts into minibatches: set the batch size, and the number and length of the sequences in a minibatch."""
        samples = self.n_steps * self.n_envs
        if samples < 2 and self.normalize_advantage:
            raise AssertionError("n_steps * n_envs must be greater than 1 to normalise advantages, got n_steps=1 and one env")
        self.batch_size, self._unit = resolve_minibatches(
            self.n_steps, self.n_envs, recurrent=self.actor_critic.recurrent, batch_size=self.batch_size
        )
        self._sequences = self.batch_size // self._unit
        if self.microbatch_size is not None:
            require_divisor("microbatch_size", self.microbatch_size, self.batch_size, self._unit)
        left = samples % self.batch_size
        if left:
            warnings.warn(
                f"You have specified a mini-batch size of {self.batch_size}, but a rollout has n_steps * n_envs = {samples} "
                f"samples: after every {samples // self.batch_size} untruncated mini-batches, "
                f"there will be a truncated mini-batch of size {left}. A batch_size that divides {samples} has none",
                stacklevel=2,
            )

    # ------------------------------------------------------------------------------------------------- state as data
    # Two parts. The agent is what a copy in another place needs to act and learn as this one does. The run is where training
    # stands: with both, it continues as if it had never been interrupted, bit for bit on a CPU.

    def _agent_parts(self) -> dict[str, Any]:
        """Return the parts of the agent; each has ``state_dict`` and ``load_state_dict``."""
        return {
            "policy": self.actor_critic,
            "optimizer": self.actor_critic.optimizer,
            "vgs": self.vgs,
            "kl": self.kl,
            "entropy": self.entropy,
            "learning_rate": self.lr,
            "objective": self.objective,
        }

    def agent_state(self) -> dict[str, Any]:
        """Return a copy of all that the agent has learnt: weights with the statistics of observations and returns, optimizer,
        and the states of all schedules and controllers."""
        return {name: copy.deepcopy(part.state_dict()) for name, part in self._agent_parts().items()}

    def load_agent_state(self, state: Mapping[str, Any]) -> None:
        """Become the agent that gave :meth:`agent_state`; parts that `state` does not name stay.

        :raises ValueError: when it was built differently; then nothing has changed.
        """
        parts = self._agent_parts()
        require(set(state) <= set(parts), "the agent's state", sorted(state), f"made of {sorted(parts)}")
        if "policy" in state:
            require_same_shapes(state["policy"], self.actor_critic.state_dict())
        for name, values in state.items():
            # Copied: an optimizer keeps the very tensors that it is given, and then changes them.
            values = copy.deepcopy(values)
            if name == "optimizer":  # other versions of torch know other options
                fresh = parts[name].state_dict()["param_groups"]
                groups = [old | new for old, new in zip(fresh, values["param_groups"], strict=True)]
                values = {**values, "param_groups": groups}
            parts[name].load_state_dict(values)

    def run_state(self) -> dict[str, Any]:
        """Return where the training stands between two updates: counters, random numbers, recurrent states, environments."""
        return {
            "counters": {name: getattr(self, name) for name in COUNTERS},
            "n_envs": self.n_envs,
            "shuffler": self.shuffler.get_state(),
            "adversary": None if self.adversary is None else self.adversary.state_dict(),
            "memory": [part.cpu() for part in (*self._actor_state, *self._critic_state)],
            "last_obs": dict(self._last_obs) if isinstance(self._last_obs, dict) else self._last_obs,
            "last_episode_starts": self._last_episode_starts,
            "episode_returns": self.episode_returns.state_dict(),
            "calibration": self.calibration.state_dict(),
            # Return and length; the clock time at which an episode ended belongs to the process.
            "episodes": [[{"r": e["r"], "l": e["l"]} for e in self.ep_info_buffer or []], list(self.ep_success_buffer or [])],
            "environments": None if self.env is None else env_state(self.env),
            "random": random_state(),
        }

    def load_run_state(self, state: Mapping[str, Any]) -> None:
        """Continue where :meth:`run_state` was taken, as if nothing had happened in between.

        Environments that cannot say where they stand must stand there already, as SB3 expects; another number of them begins
        new episodes instead.
        """
        self._load_progress(state)
        load_random_state(state["random"])
        if self.env is None or state["n_envs"] != self.n_envs:
            return
        if state["environments"] is not None:
            load_env_state(self.env, state["environments"])
        actor_hidden, actor_cell, critic_hidden, critic_cell = (part.to(self.device) for part in state["memory"])
        self._actor_state, self._critic_state = (actor_hidden, actor_cell), (critic_hidden, critic_cell)
        self._last_obs, self._last_episode_starts = state["last_obs"], state["last_episode_starts"]
        self.episode_returns.load_state_dict(state["episode_returns"])
        self.calibration.load_state_dict(state["calibration"])

    def _load_progress(self, state: Mapping[str, Any]) -> None:
        for name, value in state["counters"].items():
            setattr(self, name, value)
        self.shuffler.set_state(state["shuffler"])
        if self.adversary is not None and state["adversary"] is not None:
            self.adversary.load_state_dict(state["adversary"])
        finished, successes = state["episodes"]
        self.ep_info_buffer = deque(finished, maxlen=self._stats_window_size)
        self.ep_success_buffer = deque(successes, maxlen=self._stats_window_size)

    def get_parameters(self, include_optimizer: bool = False) -> dict[str, Any]:
        """Return what a copy of the agent needs: weights with their statistics, and the states of the KL control and of VGS.

        :param include_optimizer: add the state of the optimizer.
        """
        state = self.agent_state()
        parts = {"policy": state["policy"], "kl_penalty_state": state["kl"], "vgs_state": state["vgs"]}
        return parts | ({"optimizer_state": state["optimizer"]} if include_optimizer else {})

    def set_parameters(self, load_path_or_dict: Any, exact_match: bool = True, device: torch.device | str = "auto") -> None:
        """Take over what :meth:`get_parameters` gave, or the same parts of a saved model.

        :param load_path_or_dict: the parts, or a file that :meth:`save` wrote.
        :param exact_match: require everything but the optimizer's state; False takes over what is there, of the weights, too.
        :param device: ignored: tensors go to where the model is.
        """
        if isinstance(load_path_or_dict, Mapping):
            parts = {PARAMETER_NAMES.get(str(name), str(name)): state for name, state in load_path_or_dict.items()}
        else:
            with checkpoint.refusing(str(load_path_or_dict)):
                agent = read_model(load_path_or_dict)["agent"]
                parts = {name: agent[name] for name in set(PARAMETER_NAMES.values()) | {"policy"}}
        missing = {"policy", "kl", "vgs"} - set(parts) if exact_match else set()
        require(not missing, "parameters", sorted(parts), f"complete: {sorted(missing)} missing (exact_match=False allows it)")
        if not exact_match and "policy" in parts:
            parts["policy"] = dict(self.actor_critic.state_dict()) | dict(parts["policy"])
        self.load_agent_state(parts)

    # ------------------------------------------------------------------------------------------------- save and load

    def _constructor_arguments(self) -> dict[str, Any]:
        """Return the arguments that build this model again, as data."""
        policy_class = cast(type[DistributionalPolicy], self.policy_class)
        progress = max(self._current_progress_remaining, 0.0)
        return {
            "policy": self._policy_name(policy_class, self.observation_space),
            "learning_rate": self.lr.base_at(progress),
            "n_steps": self.n_steps,
            "batch_size": self.batch_size,
            "n_epochs": self.n_epochs,
            "gamma": self.gamma,
            "gae_lambda": self.gae_lambda,
            "clip_range": FloatSchedule(self.clip_range)(progress),
            "clip_range_vf": None if self.clip_range_vf is None else FloatSchedule(self.clip_range_vf)(progress),
            "normalize_advantage": self.normalize_advantage,
            "normalize_advantage_per_mini_batch": self.normalize_advantage_per_mini_batch,
            "use_sde": self.use_sde,
            "sde_sample_freq": self.sde_sample_freq,
            "max_grad_norm": self.max_grad_norm,
            "vf_coef": self.vf_coef,
            "microbatch_size": self.microbatch_size,
            "optimizer": self.optimizer_config.model_dump(),
            "critic": self.critic_config.model_dump(),
            "risk": self.risk_config.model_dump(),
            "entropy": self.entropy.config.model_dump(),
            "kl": self.kl.config.model_dump(),
            "vgs": self.vgs.config.model_dump(),
            "adversary": None if self.adversary is None else self.adversary.config.model_dump(mode="json"),
            "normalize_obs": False if self.obs_norm_config is None else self.obs_norm_config.model_dump(),
            "policy_kwargs": network_tree(self.policy_kwargs),
            "seed": self.seed,
            "tensorboard_log": self.tensorboard_log,
            "verbose": self.verbose,
            "stats_window_size": self._stats_window_size,
        }

    @classmethod
    def _policy_name(cls, policy_class: type[BasePolicy], space: spaces.Space[Any]) -> str:
        """Return SB3's name of a policy in a space, or the name of the user's class."""
        names = [name for name, known in cls.policy_aliases.items() if known is policy_class]
        suitable = [name for name in names if name.startswith("MultiInput") == isinstance(space, spaces.Dict)]
        return (suitable or names or [policy_class.__qualname__])[0]

    def state_tree(self) -> dict[str, Any]:
        """Return everything that a file of this model holds."""
        # A VecNormalize of the user's is part of the agent, since the agent acts on what it makes of observations.
        vec_normalize = self._vec_normalize_env
        return {
            "settings": self._constructor_arguments(),
            "functions": [name for name in SCHEDULES if _is_function(getattr(self, name))],
            "spaces": {"observation": space_tree(self.observation_space), "action": space_tree(self.action_space)},
            "agent": self.agent_state(),
            "run": self.run_state(),
            "vec_normalize": None if vec_normalize is None else normalization_state(vec_normalize),
        }

    def save(
        self, path: str | Path | BufferedIOBase, exclude: Iterable[str] | None = None, include: Iterable[str] | None = None
    ) -> None:
        """Write everything into one file that holds data and no code; see ``io/checkpoint.py``.

        :param path: a file to write to, or its name; ``.safetensors`` is added to a name without an ending.
        :param exclude: settings, by their names in the constructor, that a loaded model shall have its default of.
        :param include: settings to keep though `exclude` names them.
        """
        tree = self.state_tree()
        left_out = set(exclude or ()) - set(include or ())
        optional = set(tree["settings"]) - {
            "policy",
            "policy_kwargs",
            "n_steps",
            "critic",
            "risk",
            "normalize_obs",
            "optimizer",
        }
        require(
            left_out <= optional, "exclude", sorted(left_out), f"among {sorted(optional)}: without others it cannot be loaded"
        )
        settings = {name: value for name, value in tree["settings"].items() if name not in left_out}
        write_model(path, tree | {"settings": settings})

    @classmethod
    def load(
        cls,
        path: str | Path | BufferedIOBase,
        env: Any = None,
        device: torch.device | str = "cpu",
        custom_objects: dict[str, Any] | None = None,
        print_system_info: bool = False,
        force_reset: bool = True,
        **settings: Any,
    ) -> Self:
        """Return the model that :meth:`save` wrote. Nothing in the file is executed.

        :param path: the file or its name.
        :param env: environment to train on. Without it the random numbers of the process are left alone.
        :param device: where to compute.
        :param custom_objects: as `settings`; SB3's name for them. As in SB3, those that are no settings are ignored.
        :param print_system_info: print the versions of this system first.
        :param force_reset: begin new episodes. False continues in the middle of the saved ones with the saved random numbers,
            as if nothing had happened: Tailguard's environments, also in ``VecNormalize`` and ``VecMonitor``, are brought to
            where they stood; others must stand there still.
        :param settings: arguments of the constructor that shall differ. Functions (a learning rate) and classes (a policy, an
            activation) of the user's own are not in the file and have to be given here.
        """
        if print_system_info:
            print(checkpoint.libraries())
        known = {name: value for name, value in (custom_objects or {}).items() if name in _arguments()}
        name = "the model" if isinstance(path, BufferedIOBase) else str(path)
        return cls.from_tree(read_model(path), env, device, force_reset, {**known, **settings}, name)

    @classmethod
    def from_sb3(cls, path: str | Path, env: Any = None, device: torch.device | str = "cpu", **settings: Any) -> Self:
        """Return a model with the weights and settings of a zip of SB3's ``PPO`` or sb3-contrib's ``RecurrentPPO``.

        No code in the file is run: weights are read as tensors, settings as plain values, schedules and spaces from the text
        beside their pickles. Schedules that are functions of the user's, and the state of the optimizer, are not taken over.
        The actor acts as the one in the file does; every quantile of the critic begins as its value, in the units in which it
        was trained.

        :param path: the zip.
        :param env: environment to train on. Without it the model can act, and has its spaces from the file.
        :param device: where to compute.
        :param settings: arguments of the constructor that shall differ; ``policy_kwargs`` change single ones, such as the class
            of a feature extractor of the user's own, which is code and not read.
        """
        changed = settings.pop("policy_kwargs", {})
        saved = read_sb3(path, own_extractor="features_extractor_class" in changed)
        critic = _config("critic", CriticConfig, settings.pop("critic", {"twin": False}))
        require(not critic.twin, "critic.twin", critic.twin, "False: two copies of one critic would stay equal")
        require(
            critic.distribution == "quantile", "critic.distribution", critic.distribution, "quantile: its outputs are returns"
        )
        kwargs = saved.policy_kwargs | changed
        model = cls(
            settings.pop("policy", saved.policy),
            env,
            device=device,
            _init_setup_model=False,
            **{**saved.settings, **settings, "critic": critic, "policy_kwargs": kwargs},
        )
        if model.env is None:
            model.observation_space, model.action_space = saved.space("observation_space"), saved.space("action_space")
            model.n_envs = saved.n_envs
        model._setup_model()
        policy = model.actor_critic
        model.load_agent_state({"policy": weights_from_sb3(saved.weights, policy.state_dict(), model.action_space)})
        # Above 0: the critic's predictions count, and are kept when the scale of returns changes.
        policy.return_scale.mass.fill_(torch.finfo(torch.float64).eps)
        return model

    @classmethod
    def from_tree(
        cls,
        tree: Mapping[str, Any],
        env: Any = None,
        device: torch.device | str = "cpu",
        force_reset: bool = True,
        changes: Mapping[str, Any] | None = None,
        name: str = "the model",
    ) -> Self:
        """Return the model of a :meth:`state_tree`; the arguments are those of :meth:`load`.

        :param name: of the file, for errors.
        :raises CheckpointError: for a tree that is not that of a model. Sizes are checked before RAM is taken for them.
        """
        changes = dict(changes or {})
        if "policy_class" in changes:  # SB3's name for it
            changes["policy"] = changes.pop("policy_class")
        unknown = set(changes) - _arguments()
        require(not unknown, "settings", sorted(unknown), f"among {sorted(_arguments())}")
        before = random_state()
        with checkpoint.refusing(name):
            require_saved_form(tree)
            if "policy_kwargs" not in changes:
                changes["policy_kwargs"] = policy_kwargs_of(tree["settings"]["policy_kwargs"])
            replaced = {SHORT_NAMES[setting] for setting in changes if setting in SHORT_NAMES}
            settings = {setting: value for setting, value in tree["settings"].items() if setting not in replaced}
            observation, action = (space_of(tree["spaces"][part]) for part in ("observation", "action"))
            if settings["policy"] in cls.policy_aliases:  # earlier files say MlpPolicy for Dict observations, too
                settings["policy"] = cls._policy_name(cls.policy_aliases[settings["policy"]], observation)
            cls._require_sizes(tree, {**settings, **changes}, (observation, action), changes)
        model = cls(**{**settings, **changes}, env=env, device=device, _init_setup_model=False)
        if model.env is None:
            model.observation_space, model.action_space = observation, action
            model.n_envs = tree["run"]["n_envs"]
        for part, space, saved in (
            ("observation", model.observation_space, observation),
            ("action", model.action_space, action),
        ):
            if space != saved:
                text = f"the {part} space of env is {space}, but it must be that of the saved model, {saved}"
                raise ValueError(" ".join(text.split()))  # long ones are printed in several lines
        model._setup_model()
        with checkpoint.refusing(name):
            model._require_state_form(tree, changes)
            model._restore(tree, force_reset, changes)
            unchanged = {setting: value for setting, value in settings.items() if setting not in changes}
            require_same_settings(unchanged, model._constructor_arguments())
        if env is None:
            load_random_state(before)
        return model

    @classmethod
    def _require_sizes(
        cls, tree: Mapping[str, Any], settings: Mapping[str, Any], saved: Spaces, changes: Mapping[str, Any]
    ) -> None:
        """Raise for settings that are impossible, or whose networks and rollouts are not those of the saved weights."""
        sketch = cls(**settings, env=None, device="cpu", _init_setup_model=False)
        sketch.observation_space, sketch.action_space = saved
        own = isinstance(settings["policy"], str)  # a class of the user's may need real tensors, and is known to the user
        if own:
            require_sizes(sketch._build_policy, tree["agent"]["policy"], sketch.policy_kwargs)
        if "n_steps" not in changes:
            require_rollout_size(sketch.n_steps, tree["run"]["n_envs"], ObservationRows(saved[0], True).size)

    def _require_state_form(self, tree: Mapping[str, Any], changes: Mapping[str, Any]) -> None:
        """Raise for states that a model that was built like this one cannot have; those of changed parts are not used."""
        agent, run = tree["agent"], tree["run"]
        if "vgs" not in changes:
            require_form(agent["vgs"], form_of(self.vgs.state_dict()), "agent.vgs")
            twice = {"vgs_version": self.vgs.state_dict()["vgs_version"]}
            twice |= self.vgs.config.model_dump() if "vgs" in tree["settings"] else {}
            for name, value in twice.items():  # the file says it twice; every version of the file has the same vgs_version
                require(agent["vgs"][name] == value, f"agent.vgs.{name}", agent["vgs"][name], f"{value!r}")
        if "optimizer" not in changes:
            require_optimizer_form(agent["optimizer"], self.actor_critic.optimizer, self._optimizer_example())
        states = (*self.actor_critic.initial_state(run["n_envs"]), *self.actor_critic.initial_critic_state(run["n_envs"]))
        space = self.observation_space
        plain = np.zeros((run["n_envs"], *space.shape), space.dtype) if isinstance(space, spaces.Box) else None
        require_run_form(run, states, plain)
        levels = {len(atoms) for atoms in run["calibration"]["pending"] if atoms is not None}
        n_atoms = len(self.actor_critic.return_dist.masses)
        require(levels <= {n_atoms}, "run.calibration.pending", sorted(levels), f"lists of {n_atoms}")

    def _optimizer_example(self) -> dict[str, Any] | None:
        """Return what the optimizer keeps for a parameter of shape [2]; None for a class of the user's."""
        if self.actor_critic.optimizer_class is not None:
            return None
        parameter = nn.Parameter(torch.zeros(2))
        parameter.grad = torch.zeros(2)
        generator = torch.Generator().manual_seed(0)
        optimizer = build_optimizer(self.optimizer_config, [parameter], 0.0, vgs=self.vgs_config.enabled, generator=generator)
        optimizer.step()
        return dict(optimizer.state[parameter])

    def _restore(self, tree: Mapping[str, Any], force_reset: bool, changes: Mapping[str, Any]) -> None:
        # What the user has changed must not come back with the state.
        changed = (set(changes) | {SHORT_NAMES[name] for name in changes if name in SHORT_NAMES}) - {"policy"}  # its class
        agent = {name: state for name, state in tree["agent"].items() if name not in changed}
        rate = agent.get("learning_rate")
        if rate is not None and rate["initial"] is None:
            warnings.warn(
                f"learning_rate was a function, which a file does not hold: it stays at its last value {self.learning_rate}; "
                "give the function to load(learning_rate=...) to train on with it",
                stacklevel=4,
            )
            del agent["learning_rate"]
        for name in tree.get("functions", []):  # files of earlier versions have none
            if name not in changes:
                warnings.warn(f"{name} was a function, which a file does not hold: give it to load({name}=...)", stacklevel=4)
        self.load_agent_state(agent)
        if self._vec_normalize_env is not None and tree["vec_normalize"] is not None:
            load_normalization_state(self._vec_normalize_env, tree["vec_normalize"])
        if force_reset:
            self._load_progress(tree["run"])
            if self.env is not None and self.seed is not None and "seed" not in changes:
                self.env.seed((self.seed + self.num_timesteps) % 2**31)  # new episodes, not the first ones again
        else:
            self.load_run_state(tree["run"])


def _arguments() -> set[str]:
    """Return the names of the constructor's arguments that a file holds."""
    return set(inspect.signature(DistributionalPPO).parameters) - {"env", "device", "_init_setup_model"}


def _is_function(schedule: float | Schedule | None) -> bool:
    """Return True for a schedule that is more than a number."""
    return schedule is not None and not isinstance(FloatSchedule(schedule).value_schedule, ConstantSchedule)


def _config(name: str, kind: type[Settings], settings: Settings | Mapping[str, Any] | None) -> Settings:
    """Return checked settings from an object of their class or a dict of its fields; errors name the argument."""
    return settings if isinstance(settings, kind) else build(kind, cast(Mapping[str, Any], settings or {}), name)
