"""Other people's PPO for the speed benchmark, driven like SB3's algorithms: rsl_rl, and sbx, which is SB3's PPO in JAX.

Both come with the extra `bench`; speed.py leaves out what is not installed. PufferLib 3.0 cannot be installed beside
Tailguard: it needs numpy 1.
"""

import contextlib
import io

import torch
from work import EPISODE, WorkEnv


class RslPPO:
    """rsl_rl's runner on work.py, with the settings of speed.py.

    :param n_envs: environments; a rollout is divided into eight minibatches.
    :param n_steps: steps of a rollout.
    :param hidden: sizes of the layers of each head.
    :param lstm: size of the two LSTMs; None for feed-forward networks.
    """

    def __init__(self, n_envs: int, n_steps: int, hidden: list[int], lstm: int | None = None) -> None:
        from rsl_rl.runners import OnPolicyRunner

        torch.manual_seed(0)
        kind = {"class_name": "MLPModel"} if lstm is None else {"class_name": "RNNModel", "rnn_hidden_dim": lstm}
        network = {**kind, "hidden_dims": hidden, "activation": "tanh"}
        settings = {
            "num_steps_per_env": n_steps,
            "save_interval": 1_000_000,
            "check_for_nan": False,
            "obs_groups": {"actor": ["policy"], "critic": ["policy"]},
            "actor": {**network, "distribution_cfg": {"class_name": "GaussianDistribution", "std_type": "log"}},
            "critic": dict(network),
            "algorithm": {
                "class_name": "PPO",
                "num_learning_epochs": 4,
                "num_mini_batches": 8,
                "value_loss_coef": 0.5,
                "entropy_coef": 0.0,
                "learning_rate": 3e-4,
                "max_grad_norm": 0.5,
                "use_clipped_value_loss": False,
                "schedule": "fixed",
                "desired_kl": None,
                "normalize_advantage_per_mini_batch": True,
            },
        }
        self._samples, self._silent = n_envs * n_steps, io.StringIO()
        with contextlib.redirect_stdout(self._silent):
            self.runner = OnPolicyRunner(_TensorEnv(WorkEnv(n_envs)), settings, log_dir=None, device="cpu")

    def learn(self, total_timesteps: int, reset_num_timesteps: bool = True) -> "RslPPO":
        """Run whole rollouts, each with its update."""
        with contextlib.redirect_stdout(self._silent):
            self.runner.learn(total_timesteps // self._samples)
        return self


class _TensorEnv:
    """The work as rsl_rl's vectorised environment; time limits are told, as its PPO expects it."""

    def __init__(self, env: WorkEnv) -> None:
        self.num_envs, self.num_actions, self.max_episode_length = env.num_envs, 1, EPISODE
        self.device, self.cfg, self.unwrapped, self._env = "cpu", {}, self, env
        self.episode_length_buf = torch.zeros(env.num_envs, dtype=torch.long)
        self._obs = self._tensors(env.reset())

    def get_observations(self):
        return self._obs

    def step(self, actions):
        result = self._env.step_arrays(actions.numpy())
        self._obs, truncated = self._tensors(result.obs), torch.from_numpy(result.truncated)
        return self._obs, torch.from_numpy(result.rewards).float(), truncated.long(), {"time_outs": truncated.float()}

    def _tensors(self, obs):
        from tensordict import TensorDict

        return TensorDict({"policy": torch.from_numpy(obs)}, batch_size=[self.num_envs])


def sbx_ppo(n_envs: int, n_steps: int, hidden: list[int]):
    """Return sbx's PPO on work.py, with the settings of speed.py, on one thread."""
    import sbx
    from jax_peer import on_one_thread

    on_one_thread()
    return sbx.PPO(
        "MlpPolicy", WorkEnv(n_envs), n_steps=n_steps, batch_size=1024, n_epochs=4, seed=0, policy_kwargs={"net_arch": hidden}
    )
