"""Recurrent PPO with quantile critics, as a Stable-Baselines3 algorithm."""

from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar, cast

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import VectorEnv
from numpy.typing import NDArray
from pydantic import BaseModel
from stable_baselines3.common.base_class import maybe_make_env
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.type_aliases import GymEnv, Schedule
from stable_baselines3.common.vec_env import VecEnv, unwrap_vec_normalize

from tailguard.envs.return_observer import watched
from tailguard.envs.vec_env import GymVectorAdapter, step_with_arrays
from tailguard.optim.config import OptimizerConfig, VGSConfig, build_optimizer
from tailguard.optim.vgs import VarianceGradientScaler
from tailguard.ppo.adversary import Adversary
from tailguard.ppo.attacked_rollout import AttackedRollout, attacked_rollout
from tailguard.ppo.batches import Batches
from tailguard.ppo.calibration import Calibration
from tailguard.ppo.compiled.acting import acting_of
from tailguard.ppo.critic import CriticConfig
from tailguard.ppo.diagnostics import EpisodeReturns, Moments, StageProfile, moments_drift
from tailguard.ppo.experience import prepare
from tailguard.ppo.loss import Coefficients
from tailguard.ppo.networks import FlatParameters
from tailguard.ppo.persistence import Persistent
from tailguard.ppo.policy import DistributionalPolicy, RecurrentDistributionalPolicy
from tailguard.ppo.reporting import TAIL, Reporting
from tailguard.ppo.risk import Finished, RiskConfig, RiskObjective
from tailguard.ppo.rollout import Rollout, finite
from tailguard.ppo.scaling import ObservationNormalizer, ObsNormConfig
from tailguard.ppo.schedules import EntropyConfig, EntropySchedule, KLConfig, KLControl, LearningRate
from tailguard.ppo.trunk import State, reset_state
from tailguard.ppo.update import Update, UpdateSettings
from tailguard.robust.config import SAPPOConfig
from tailguard.robust.schedule import horizon
from tailguard.validation import build, require

Settings = TypeVar("Settings", bound=BaseModel)


class DistributionalPPO(Persistent, Reporting, Batches, OnPolicyAlgorithm):
    """PPO whose critics predict the distribution of the return; a drop-in for SB3's ``PPO`` and sb3-contrib's ``RecurrentPPO``.

    :param policy: ``"MlpPolicy"``, ``"MlpLstmPolicy"``, or a subclass of their classes.
    :param env: a Gymnasium env or its id, an SB3 ``VecEnv``, or a Gymnasium ``VectorEnv`` that resets in the same step.
    :param learning_rate: a number or a function of the progress remaining (1 to 0).
    :param n_steps: steps per environment and rollout.
    :param batch_size: samples per gradient step; with memory a multiple of `n_steps`, since a minibatch is whole sequences.
        None takes a quarter of the rollout.
    :param n_epochs: passes over a rollout.
    :param gamma: discount.
    :param gae_lambda: lambda of the advantages.
    :param clip_range: how far the ratio of new to old probability may count.
    :param max_grad_norm: gradients are scaled down to this norm.
    :param vf_coef: weight of the critics' loss.
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
    :param policy_kwargs: ``net_arch``, ``activation_fn``, ``lstm_hidden_size`` and so on, see :class:`DistributionalPolicy`.
    :param seed: of the policy, the environments and the shuffling.
    :param device: where to compute.
    :param tensorboard_log: folder for TensorBoard.
    :param verbose: 0 silent, 1 progress, 2 more.
    :param stats_window_size: episodes that averages in the log span.
    """

    policy_aliases: ClassVar[dict[str, type[BasePolicy]]] = {
        "MlpPolicy": DistributionalPolicy,
        "MlpLstmPolicy": RecurrentDistributionalPolicy,
    }
    policy: DistributionalPolicy  # type: ignore[assignment]
    vgs: VarianceGradientScaler

    def __init__(
        self,
        policy: str | type[DistributionalPolicy],
        env: GymEnv | VectorEnv[Any, Any, Any] | str | None,
        *,
        learning_rate: float | Schedule = 3e-4,
        n_steps: int = 128,
        batch_size: int | None = None,
        n_epochs: int = 4,
        gamma: float = 0.99,
        gae_lambda: float = 0.95,
        clip_range: float = 0.2,
        max_grad_norm: float = 0.5,
        vf_coef: float = 0.5,
        microbatch_size: int | None = None,
        optimizer: OptimizerConfig | Mapping[str, Any] | None = None,
        critic: CriticConfig | Mapping[str, Any] | None = None,
        risk: RiskConfig | Mapping[str, Any] | None = None,
        entropy: EntropyConfig | Mapping[str, Any] | None = None,
        kl: KLConfig | Mapping[str, Any] | None = None,
        vgs: VGSConfig | Mapping[str, Any] | None = None,
        adversary: SAPPOConfig | Mapping[str, Any] | None = None,
        normalize_obs: bool | ObsNormConfig | Mapping[str, Any] = False,
        policy_kwargs: dict[str, Any] | None = None,
        seed: int | None = None,
        device: torch.device | str = "cpu",
        tensorboard_log: str | None = None,
        verbose: int = 0,
        stats_window_size: int = 100,
        _init_setup_model: bool = True,
    ) -> None:
        if not callable(learning_rate):
            require(0.0 <= learning_rate < float("inf"), "learning_rate", learning_rate, "finite and not negative")
        require(n_steps >= 2, "n_steps", n_steps, "at least 2")
        require(n_epochs >= 1, "n_epochs", n_epochs, "at least 1")
        require(0.0 <= gamma <= 1.0, "gamma", gamma, "in [0, 1]")
        require(0.0 <= gae_lambda <= 1.0, "gae_lambda", gae_lambda, "in [0, 1]")
        require(0.0 < clip_range < float("inf"), "clip_range", clip_range, "positive and finite")
        require(max_grad_norm > 0.0, "max_grad_norm", max_grad_norm, "positive")
        require(0.0 <= vf_coef < float("inf"), "vf_coef", vf_coef, "finite and not negative")
        self.batch_size, self.microbatch_size, self.n_epochs = batch_size, microbatch_size, n_epochs
        self.clip_range = clip_range
        self.critic = _settings(CriticConfig, critic)
        self.optimizer = _settings(OptimizerConfig, optimizer)
        self.vgs_config = VGSConfig(enabled=False) if vgs is None else _settings(VGSConfig, vgs)
        self.adversary_config = None if adversary is None else _settings(SAPPOConfig, adversary)
        self.risk = _settings(RiskConfig, risk)
        if self.risk.return_augmented:
            require(gamma > 0.0, "gamma", gamma, "above 0 for an objective that looks at the return of an episode")
            env = None if env is None else self._watched(env, self.risk, gamma, seed)  # type: ignore[arg-type]
        self.entropy = EntropySchedule(_settings(EntropyConfig, entropy))
        self.kl = KLControl(_settings(KLConfig, kl))
        self.obs_norm = (
            None if normalize_obs is False else _settings(ObsNormConfig, {} if normalize_obs is True else normalize_obs)
        )
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
            use_sde=False,
            sde_sample_freq=-1,
            stats_window_size=stats_window_size,
            tensorboard_log=tensorboard_log,
            policy_kwargs=policy_kwargs,
            verbose=verbose,
            seed=seed,
            device=device,
            supported_action_spaces=(spaces.Box, spaces.Discrete, spaces.MultiDiscrete),
            _init_setup_model=_init_setup_model,
        )

    def _setup_model(self) -> None:
        self._setup_lr_schedule()
        self.set_random_seed(self.seed)
        self.lr = LearningRate(self.learning_rate)
        shuffling_seed = int(torch.randint(2**62, ())) if self.seed is None else self.seed
        self.shuffler = torch.Generator().manual_seed(shuffling_seed)
        policy_class = cast(type[DistributionalPolicy], self.policy_class)
        settings = {"critic": self.critic, "obs_norm": self.obs_norm, "risk": self.risk, **self.policy_kwargs}
        self.policy = policy_class(self.observation_space, self.action_space, **settings).to(self.device)
        self.objective = RiskObjective(self.risk, self.policy.budget)
        self.flat = FlatParameters(self.policy)
        self._setup_optimizer()
        # Built even where it will stay idle: impossible settings are refused, and nothing else is different.
        threat = self.adversary_config
        self.adversary = None if threat is None else Adversary(self.policy, threat, self.shuffler.initial_seed(), self.flat)
        self.update = Update(self.policy, self.flat, self.critic, self.vgs, self.kl, self.adversary)
        self.acting = acting_of(self.policy, self.flat, self.n_envs)
        self._check_batches()
        distribution = self.policy.distribution
        action_size = int(np.prod(distribution.action_shape))
        self.rollout_buffer = Rollout(  # type: ignore[assignment]
            self.n_steps, self.n_envs, self.policy.obs_size, action_size, distribution.n_outputs
        )
        self._attack: AttackedRollout | None = None
        self.profile = StageProfile()
        self.episode_returns = EpisodeReturns(self.n_envs, self.gamma, self._stats_window_size)
        self.calibration = Calibration(self.n_envs, CALIBRATION_WINDOW, TAIL)
        self.reset_lstm_states_to_initial()

    def _setup_optimizer(self) -> None:
        """One flat tensor to move; and the scaler of steps, which looks at the parts that it is made of."""
        generator = torch.Generator().manual_seed(self.shuffler.initial_seed())
        enabled = self.vgs_config.enabled
        self.policy.optimizer = build_optimizer(self.optimizer, [self.flat.tensor], 0.0, vgs=enabled, generator=generator)
        heads = self.policy.heads()
        self.vgs = VarianceGradientScaler.from_config(heads, self.vgs_config)
        self.vgs.attach(self.policy.optimizer)

    @staticmethod
    def _wrap_env(env: GymEnv, verbose: int = 0, monitor_wrapper: bool = True) -> VecEnv:
        """Everything that comes in as an environment passes here: constructor, ``set_env`` and ``load``."""
        if isinstance(env, VectorEnv):
            env = GymVectorAdapter(env)
        wrapped = OnPolicyAlgorithm._wrap_env(env, verbose, monitor_wrapper)
        vec_normalize = unwrap_vec_normalize(wrapped)
        if vec_normalize is not None and vec_normalize.norm_reward:
            raise ValueError("VecNormalize(norm_reward=True) would scale returns twice: set norm_reward=False, PPO scales them")
        return wrapped

    @classmethod
    def _watched(cls, env: GymEnv, risk: RiskConfig, gamma: float, seed: int | None) -> VecEnv:
        """The environment with the running return in its observations."""
        return watched(cls._wrap_env(maybe_make_env(env, 0)), gamma, risk.alphas().tolist() if risk.dial else None, seed)

    def set_env(self, env: GymEnv, force_reset: bool = True) -> None:
        """As SB3's, with the running return where the objective needs it."""
        super().set_env(
            self._watched(env, self.risk, self.gamma, self.seed) if self.risk.return_augmented else env, force_reset
        )

    def set_risk(self, alpha: float) -> None:
        """Choose the tail that :meth:`predict` looks at from now on, where the observation does not say.

        :param alpha: within the range that the agent was trained for.
        """
        if not isinstance(self.risk.alpha, tuple) or not self.risk.dial:
            raise ValueError('this agent serves one objective; train with risk={"objective": "cvar", "alpha": (low, high)}')
        low, high = self.risk.alpha
        require(low <= alpha <= high, "alpha", alpha, f"between {low} and {high}, the range of the training")
        self.policy.budget.alpha.fill_(alpha)

    def reset_lstm_states_to_initial(self) -> None:
        """Forget everything that actor and critics remember, in every environment."""
        self._actor_state: State = self.policy.initial_state(self.n_envs)
        trunk = self.policy.critic_trunk
        self._critic_state: State = self._actor_state if trunk is None else trunk.initial_state(self.n_envs)

    # ------------------------------------------------------------------------------------------------ collecting

    def collect_rollouts(  # type: ignore[override]
        self, env: VecEnv, callback: BaseCallback, rollout_buffer: Rollout, n_rollout_steps: int
    ) -> bool:
        """Play `n_rollout_steps` steps in every environment with the present policy; False when a callback stops it."""
        assert self._last_obs is not None, "learn() resets the environment first"
        self.policy.set_training_mode(False)
        rollout, distribution = rollout_buffer, self.policy.distribution
        shared_memory = self.policy.recurrent and self.policy.critic_trunk is None
        # train() has done this with its own returns already. Statistics that came from elsewhere since then, from a checkpoint
        # or another member of a population, come into force here and then stay the same for the whole rollout.
        self._activate_return_scale_snapshot()
        starts = cast(NDArray[np.bool_], self._last_episode_starts)
        rollout.reset(starts.astype(bool))
        self._begin_episodes(starts.astype(bool))
        self._rollout_start = (self._actor_state, self._critic_state)
        before = self._observation_moments()
        callback.on_rollout_start()
        self.acting.begin(rollout)
        attack = self._attack = attacked_rollout(self.adversary, self._horizon(), rollout)
        for n_steps in range(n_rollout_steps):
            with self.profile.stage("act"):
                obs_tensor = rollout.observe(finite("observation", self._last_obs, n_steps))
                if attack is not None:
                    attack.show(obs_tensor, self._actor_state)
                self._actor_state = self.acting.step(rollout, obs_tensor, self._actor_state)
                actions = rollout.actions_now()
                clipped_actions = distribution.to_env(actions)
            with self.profile.stage("env"):
                step, infos = step_with_arrays(env, clipped_actions)
            new_obs, rewards, dones = step.obs, step.rewards, step.terminated | step.truncated
            finite("reward", rewards, n_steps)
            if len(step.ended):
                cut = step.truncated[step.ended]  # after a termination nobody looks at the final observation
                finite("final observation", step.final_obs[cut], n_steps, step.ended[cut])
                if attack is not None:
                    step = attack.show_finals(step, self._actor_state)
            rollout.add(step, self._actor_state if shared_memory else None)
            self.episode_returns.add(n_steps, step)
            self._last_memory = self._actor_state
            if len(step.ended):
                self._actor_state = reset_state(self._actor_state, dones)
            self.num_timesteps += env.num_envs
            self._last_obs, self._last_episode_starts = new_obs, dones
            callback.update_locals(locals())
            if not callback.on_step():
                # The critics have not seen these steps; where an episode ended they must at least forget it.
                ended = rollout.ended_since_reset()
                self._critic_state = reset_state(self._critic_state, ended)
                self.calibration.forget(ended)
                return False
            if len(step.ended):  # episodes are reported where they end; looking at all others takes longer than stepping
                self._update_info_buffer([infos[i] for i in step.ended], dones[step.ended])
        last = rollout.observe(finite("observation", self._last_obs, n_rollout_steps))
        if attack is not None:
            attack.show(last, self._actor_state)
        if before is not None:
            self._log_drift(*moments_drift(before, cast(Moments, self._observation_moments())))
        callback.update_locals(locals())
        callback.on_rollout_end()
        return True

    def _begin_episodes(self, starts: NDArray[np.bool_]) -> None:
        """Forget what was remembered of other episodes, in the environments that begin one, and in no other."""
        self._actor_state, self._critic_state = reset_state(self._actor_state, starts), reset_state(self._critic_state, starts)
        self.episode_returns.begin(starts)

    # -------------------------------------------------------------------------------------------------- training

    def train(self) -> None:
        """Improve policy and critics with the rollout just collected."""
        self.policy.set_training_mode(True)
        lr = self.lr.apply(self.policy.optimizer, self._current_progress_remaining, self.kl.lr_factor)
        rollout = cast(Rollout, self.rollout_buffer)
        with self.profile.stage("prepare"):
            if self.policy.return_scale.mass == 0.0 and rollout.weights.any():
                self._first_return_scale(rollout)
            experience = prepare(
                self.policy,
                rollout,
                *self._rollout_start,
                critic=self.critic,
                objective=self.objective,
                gamma=self.gamma,
                gae_lambda=self.gae_lambda,
                generator=self.shuffler,
            )
            self._critic_state = experience.critic_state_after or self._last_memory
            pooled = experience.start_atoms.sort(-1).values.mean(0)
            self.calibration.follow(rollout.starts(), self.episode_returns.ends, pooled, self.policy.law.masses)
            if rollout.weights.any():
                self._finalize_return_stats(experience)
            self._activate_return_scale_snapshot()
            batch = experience.normalised(self.policy)
        with self.profile.stage("update"):
            if self.adversary is not None:
                self.adversary.begin(self._horizon())
            log = self.update.run(batch, self._update_settings(), self.shuffler)
        self._n_updates += log.epochs
        for warning in log.warnings:
            self.logger.record(warning, 1.0)
        self._log_update(log.minibatches, experience, lr)
        if self.adversary is not None:
            played = {} if self._attack is None else self._attack.metrics()
            for name, value in (self.adversary.metrics() | self.adversary.certificate(batch) | played).items():
                self.logger.record(name, value)
        if experience.finished is not None and self.policy.return_scale.mass > 0.0:  # a budget is shown in units of the return
            self._adapt_risk(experience.finished)
        if isinstance(self.policy.normalizer, ObservationNormalizer):
            own = rollout.obs[:-1, :, : self.policy.own_size]
            self.policy.normalizer.update(own if self._attack is None else self._attack.true_observations())
            self._log_drift(*self.policy.normalizer.drift())
        self._critic_state = reset_state(self._critic_state, cast(NDArray[np.bool_], self._last_episode_starts))

    def _horizon(self) -> int:
        """Updates of the whole training."""
        return horizon(self._total_timesteps, self.n_steps, self.n_envs)

    def _update_settings(self) -> UpdateSettings:
        return UpdateSettings(
            n_epochs=self.n_epochs,
            minibatch=cast(int, self.batch_size) // self._unit,
            microbatch=self._microbatch_size() // self._unit,
            max_grad_norm=self.max_grad_norm,
            vf_coef=self.vf_coef,
            policy=Coefficients(self.clip_range, self.entropy.value, self.kl.coefficient),
        )

    def _adapt_risk(self, finished: Finished) -> None:
        self.objective.remember(finished)
        masses = self.policy.law.masses.double().numpy()
        metrics = self.objective.adapt(1.0 - self._current_progress_remaining, masses, self._ret_std_snapshot)
        for name, value in metrics.items():
            self.logger.record(name, value)


# Episodes whose predicted and realised returns are compared.
CALIBRATION_WINDOW = 500


def _settings(model: type[Settings], given: Settings | Mapping[str, Any] | None) -> Settings:
    if isinstance(given, model):
        return given
    return build(model, cast(Mapping[str, Any], given or {}))
