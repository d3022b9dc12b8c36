"""A model's state as data: taken from a model, put into one, written to a file and read from it.

Two parts. The *agent* is what a copy in another place needs to act and learn as this one does. The *run* is where its training
stands: with both, a training goes on as if it had never been interrupted, bit for bit on a CPU.
"""

import copy
import warnings
from collections import deque
from collections.abc import Iterable, Mapping
from io import BufferedIOBase
from pathlib import Path
from typing import Any, ClassVar, Self, cast

import torch
from gymnasium import spaces
from stable_baselines3.common.vec_env import VecNormalize

from tailguard.io import checkpoint
from tailguard.io.env_state import env_state, load_env_state, load_normalization_state, normalization_state
from tailguard.io.random_state import load_random_state, random_state
from tailguard.optim.config import OptimizerConfig
from tailguard.optim.vgs import VarianceGradientScaler
from tailguard.ppo.adversary import Adversary
from tailguard.ppo.calibration import Calibration
from tailguard.ppo.critic import CriticConfig
from tailguard.ppo.diagnostics import EpisodeReturns
from tailguard.ppo.migrations import MIGRATIONS
from tailguard.ppo.networks import require_same_shapes
from tailguard.ppo.policy import DistributionalPolicy
from tailguard.ppo.risk import RiskConfig, RiskObjective
from tailguard.ppo.scaling import ObsNormConfig
from tailguard.ppo.schedules import EntropySchedule, KLControl, LearningRate
from tailguard.ppo.serialization import network_tree, policy_kwargs_of, space_of, space_tree
from tailguard.ppo.trunk import State
from tailguard.validation import require

KIND, SUFFIX = "model", ".safetensors"
COUNTERS = (
    "num_timesteps",
    "_total_timesteps",
    "_current_progress_remaining",
    "_n_updates",
    "_episode_num",
)
# The seeds' and SB3's names of parts of the agent's state.
PARAMETER_NAMES = {
    "kl_penalty_state": "kl",
    "vgs_state": "vgs",
    "optimizer_state": "optimizer",
    "policy.optimizer": "optimizer",
}


class Persistent:
    """What :class:`DistributionalPPO` can do with its state. The names below are the model's."""

    policy_aliases: ClassVar[dict[str, Any]]
    policy_class: Any
    policy: DistributionalPolicy
    policy_kwargs: dict[str, Any]
    observation_space: spaces.Space[Any]
    action_space: spaces.Space[Any]
    env: Any
    n_envs: int
    vgs: VarianceGradientScaler
    kl: KLControl
    entropy: EntropySchedule
    lr: LearningRate
    objective: RiskObjective
    shuffler: torch.Generator
    adversary: Adversary | None
    episode_returns: EpisodeReturns
    calibration: Calibration
    optimizer: OptimizerConfig
    critic: CriticConfig
    risk: RiskConfig
    obs_norm: ObsNormConfig | None
    learning_rate: Any
    n_steps: int
    batch_size: int | None
    microbatch_size: int | None
    n_epochs: int
    gamma: float
    gae_lambda: float
    clip_range: float
    max_grad_norm: float
    vf_coef: float
    seed: int | None
    verbose: int
    tensorboard_log: str | None
    num_timesteps: int
    ep_info_buffer: Any
    ep_success_buffer: Any
    _vec_normalize_env: VecNormalize | None
    _stats_window_size: int
    _current_progress_remaining: float
    _last_obs: Any
    _last_episode_starts: Any
    _actor_state: State
    _critic_state: State

    def _setup_model(self) -> None:
        raise NotImplementedError

    def _learnt(self) -> dict[str, Any]:
        """What the agent is, part by part; each has ``state_dict`` and ``load_state_dict``."""
        return {
            "policy": self.policy,
            "optimizer": self.policy.optimizer,
            "vgs": self.vgs,
            "kl": self.kl,
            "entropy": self.entropy,
            "learning_rate": self.lr,
            "objective": self.objective,
        }

    def agent_state(self) -> dict[str, Any]:
        """All that the agent has learnt and that a copy of it needs, detached from it: weights with the statistics of
        observations and returns, optimizer, and the states of all that steers it."""
        return {name: copy.deepcopy(part.state_dict()) for name, part in self._learnt().items()}

    def load_agent_state(self, state: Mapping[str, Any]) -> None:
        """Become the agent that gave :meth:`agent_state`; parts that `state` does not name stay.

        :raises ValueError: when it was built differently; then nothing has changed.
        """
        parts = self._learnt()
        require(set(state) <= set(parts), "the agent's state", sorted(state), f"made of {sorted(parts)}")
        if "policy" in state:
            require_same_shapes(state["policy"], self.policy.state_dict())
        for name, values in state.items():
            # Copied: an optimizer keeps the very tensors that it is given, and then changes them.
            parts[name].load_state_dict(copy.deepcopy(values))

    def run_state(self) -> dict[str, Any]:
        """Where the training stands between two updates: counters, random numbers, memory, environments, running statistics."""
        return {
            "counters": {name: getattr(self, name) for name in COUNTERS},
            "n_envs": self.n_envs,
            "shuffler": self.shuffler.get_state(),
            "adversary": None if self.adversary is None else self.adversary.state_dict(),
            "memory": [*self._actor_state, *self._critic_state],
            "last_obs": self._last_obs,
            "last_episode_starts": self._last_episode_starts,
            "episode_returns": self.episode_returns.state_dict(),
            "calibration": self.calibration.state_dict(),
            # Return and length; the clock time at which an episode ended belongs to the process.
            "episodes": [[{"r": e["r"], "l": e["l"]} for e in self.ep_info_buffer or []], list(self.ep_success_buffer or [])],
            "environments": None if self.env is None else env_state(self.env),
            "random": random_state(),
        }

    def load_run_state(self, state: Mapping[str, Any]) -> None:
        """Go on where :meth:`run_state` was taken, as if nothing had happened in between.

        Environments that cannot say where they stand, or another number of them, begin new episodes instead.
        """
        self._load_progress(state)
        load_random_state(state["random"])
        if state["environments"] is None or self.env is None or state["n_envs"] != self.n_envs:
            return
        load_env_state(self.env, state["environments"])
        actor, critic = state["memory"][:2], state["memory"][2:]
        self._actor_state, self._critic_state = (actor[0], actor[1]), (critic[0], critic[1])
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

    def _settings(self) -> dict[str, Any]:
        """The arguments that build this model again, as data."""
        aliases = {policy: name for name, policy in self.policy_aliases.items()}
        policy_class = cast(type[DistributionalPolicy], self.policy_class)
        return {
            "policy": aliases.get(policy_class, policy_class.__qualname__),
            "learning_rate": self.lr.base_at(max(self._current_progress_remaining, 0.0)),
            "n_steps": self.n_steps,
            "batch_size": self.batch_size,
            "n_epochs": self.n_epochs,
            "gamma": self.gamma,
            "gae_lambda": self.gae_lambda,
            "clip_range": self.clip_range,
            "max_grad_norm": self.max_grad_norm,
            "vf_coef": self.vf_coef,
            "microbatch_size": self.microbatch_size,
            "optimizer": self.optimizer.model_dump(),
            "critic": self.critic.model_dump(),
            "risk": self.risk.model_dump(),
            "entropy": self.entropy.config.model_dump(),
            "kl": self.kl.config.model_dump(),
            "vgs": self.vgs.config.model_dump(),
            "adversary": None if self.adversary is None else self.adversary.config.model_dump(mode="json"),
            "normalize_obs": False if self.obs_norm is None else self.obs_norm.model_dump(),
            "policy_kwargs": network_tree(self.policy_kwargs),
            "seed": self.seed,
            "tensorboard_log": self.tensorboard_log,
            "verbose": self.verbose,
            "stats_window_size": self._stats_window_size,
        }

    def state_tree(self) -> dict[str, Any]:
        """Everything, for :func:`tailguard.io.checkpoint.save`."""
        return {
            "settings": self._settings(),
            "spaces": {"observation": space_tree(self.observation_space), "action": space_tree(self.action_space)},
            "agent": self.agent_state(),
            "run": self.run_state(),
            "vec_normalize": self._normalization(),
        }

    def _normalization(self) -> dict[str, Any] | None:
        """The statistics of a ``VecNormalize`` that the user brought; part of the agent, since it acts on what they make."""
        return None if self._vec_normalize_env is None else normalization_state(self._vec_normalize_env)

    def save(
        self, path: str | Path | BufferedIOBase, exclude: Iterable[str] | None = None, include: Iterable[str] | None = None
    ) -> None:
        """Write everything into one file that holds data and no code; see ``io/checkpoint.py``.

        :param path: a file to write to, or its name; ``.safetensors`` is added to a name without an ending.
        :param exclude: not supported: a part of a model could not be loaded again.
        :param include: not supported.
        """
        require(not exclude and not include, "exclude and include", (exclude, include), "None: a model is saved whole")
        if isinstance(path, BufferedIOBase):
            path.write(checkpoint.to_bytes(self.state_tree(), kind=KIND))
            return
        path = Path(path)
        checkpoint.save(path if path.suffix else path.with_suffix(SUFFIX), self.state_tree(), kind=KIND)

    @classmethod
    def load(
        cls,
        path: str | Path | BufferedIOBase,
        env: Any = None,
        device: torch.device | str = "auto",
        custom_objects: dict[str, Any] | None = None,
        print_system_info: bool = False,
        force_reset: bool = True,
        **settings: Any,
    ) -> Self:
        """The model that :meth:`save` wrote. Nothing in the file is executed.

        :param path: the file or its name.
        :param env: to train on. Without it the random numbers of the process are left alone.
        :param device: where to compute.
        :param custom_objects: as `settings`; SB3's name for them.
        :param print_system_info: print the versions of this system first.
        :param force_reset: begin new episodes. False goes on in the middle of the saved ones with the saved random numbers, as
            if nothing had happened, where the environments can: Tailguard's own, also in ``VecNormalize`` and ``VecMonitor``.
        :param settings: arguments of the constructor that shall differ. Functions (a learning rate) and classes (a policy, an
            activation) of the user's own are not in the file and have to be given here.
        """
        if print_system_info:
            print(checkpoint.libraries())
        return cls.from_tree(cls._read(path), env, device, force_reset, {**(custom_objects or {}), **settings})

    @classmethod
    def _read(cls, path: str | Path | BufferedIOBase) -> dict[str, Any]:
        if isinstance(path, BufferedIOBase):
            return checkpoint.from_bytes(path.read(), kind=KIND, name="the model", migrations=MIGRATIONS)
        path = Path(path)
        # Who is used to SB3 asks for model.zip, or leaves the ending out.
        named = path if path.exists() or path.suffix not in ("", ".zip") else path.with_suffix(SUFFIX)
        return checkpoint.load(named, kind=KIND, migrations=MIGRATIONS)

    @classmethod
    def from_tree(
        cls,
        tree: Mapping[str, Any],
        env: Any = None,
        device: torch.device | str = "auto",
        force_reset: bool = True,
        changes: Mapping[str, Any] | None = None,
    ) -> Self:
        """The model of a :meth:`state_tree`; the arguments are those of :meth:`load`."""
        changes = dict(changes or {})
        if "policy_class" in changes:  # SB3's name for it
            changes["policy"] = changes.pop("policy_class")
        if "policy_kwargs" not in changes:
            changes["policy_kwargs"] = policy_kwargs_of(tree["settings"]["policy_kwargs"])
        unknown = set(changes) - set(tree["settings"])
        require(not unknown, "settings", sorted(unknown), f"among {sorted(tree['settings'])}")
        before = random_state()
        model = cast(Any, cls)(**{**tree["settings"], **changes}, env=env, device=device, _init_setup_model=False)
        observation, action = (space_of(tree["spaces"][name]) for name in ("observation", "action"))
        if model.env is None:
            model.observation_space, model.action_space = observation, action
            model.n_envs = tree["run"]["n_envs"]
        else:
            _require_same_space("observation", model.observation_space, observation)
            _require_same_space("action", model.action_space, action)
        model._setup_model()
        model._restore(tree, force_reset, changes)
        if env is None:
            load_random_state(before)
        return cast(Self, model)

    def _restore(self, tree: Mapping[str, Any], force_reset: bool, changes: Mapping[str, Any]) -> None:
        # What the user has changed must not come back with the state.
        agent = {name: state for name, state in tree["agent"].items() if name not in changes}
        rate = agent.get("learning_rate")
        if rate is not None and rate["initial"] is None:
            warnings.warn(
                f"learning_rate was a function, which a file does not hold: it stays at its last value {self.learning_rate}; "
                "give the function to load(learning_rate=...) to train on with it",
                stacklevel=4,
            )
            del agent["learning_rate"]
        self.load_agent_state(agent)
        if self._vec_normalize_env is not None and tree["vec_normalize"] is not None:
            load_normalization_state(self._vec_normalize_env, tree["vec_normalize"])
        if force_reset:
            self._load_progress(tree["run"])
            if self.env is not None and self.seed is not None and "seed" not in changes:
                self.env.seed((self.seed + self.num_timesteps) % 2**31)  # new episodes, not the first ones again
        else:
            self.load_run_state(tree["run"])

    def get_parameters(self, include_optimizer: bool = False) -> dict[str, Any]:
        """What a copy of the agent needs: weights with their statistics, and the states of the KL control and of VGS.

        :param include_optimizer: add that of the optimizer.
        """
        state = self.agent_state()
        parts = {"policy": state["policy"], "kl_penalty_state": state["kl"], "vgs_state": state["vgs"]}
        return parts | ({"optimizer_state": state["optimizer"]} if include_optimizer else {})

    def set_parameters(self, load_path_or_dict: Any, exact_match: bool = True, device: torch.device | str = "auto") -> None:
        """Take over what :meth:`get_parameters` gave, or the same parts of a saved model.

        :param load_path_or_dict: the parts, or a file that :meth:`save` wrote.
        :param exact_match: require everything but the optimizer's state; False takes over what is there.
        :param device: ignored: tensors go to where the model is.
        """
        if isinstance(load_path_or_dict, Mapping):
            given = {PARAMETER_NAMES.get(str(name), str(name)): state for name, state in load_path_or_dict.items()}
        else:
            agent = self._read(load_path_or_dict)["agent"]
            given = {name: agent[name] for name in set(PARAMETER_NAMES.values()) | {"policy"}}
        missing = {"policy", "kl", "vgs"} - set(given) if exact_match else set()
        require(not missing, "parameters", sorted(given), f"complete: {sorted(missing)} missing (exact_match=False allows it)")
        self.load_agent_state(given)


def _require_same_space(name: str, given: spaces.Space[Any], saved: spaces.Space[Any]) -> None:
    require(given == saved, f"the {name} space of env", given, f"that of the saved model, {saved}")
