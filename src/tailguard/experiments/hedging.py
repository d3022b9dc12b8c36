"""Train an agent that hedges options, and play it on the paths of its rivals."""

import numpy as np

from tailguard.envs.hedging_rivals import HedgingResult
from tailguard.envs.option_hedging import BandHedging
from tailguard.envs.return_observer import ReturnObserver
from tailguard.envs.vec_env import GymVectorAdapter
from tailguard.ppo.algorithm import DistributionalPPO
from tailguard.ppo.schedules import LinearSchedule
from tailguard.validation import require

ENVS = 512
ROLLOUT = 20  # dates per copy and rollout, at least; episodes are whole
MINIBATCHES = 8


def train_hedger(
    env: BandHedging, *, alpha: float | tuple[float, float] = 0.05, steps: int = 2_000_000, seed: int = 0
) -> DistributionalPPO:
    """Return an agent that minimises the CVaR of the hedge error.

    :param env: with some 512 copies.
    :param alpha: the share of worst paths that counts, or a range for an alpha-conditioned agent.
    :param steps: hedging decisions to learn from; 2,000,000 take about 15 seconds of one core.
    :param seed: of the agent and its paths.
    """
    n_steps = env.dates * max(ROLLOUT // env.dates, 1)
    model = DistributionalPPO(
        "MlpPolicy",
        env,
        learning_rate=LinearSchedule(2e-3, 1e-4),
        n_steps=n_steps,
        batch_size=max(n_steps * env.num_envs // MINIBATCHES, 1),
        n_epochs=4,
        gamma=1.0,
        ent_coef=0.0,
        policy_kwargs={"log_std_init": -2.5, "net_arch": [32, 32]},
        risk={"objective": "cvar", "alpha": alpha, "window": 4000},
        critic={"twin": False},
        normalize_obs=True,
        seed=seed,
    )
    return model.learn(steps)


def play_hedger(model: DistributionalPPO, env: BandHedging, seed: int, alpha: float | None = None) -> HedgingResult:
    """Play one episode in every copy with the most likely actions of an agent.

    :param model: from :func:`train_hedger`.
    :param env: with as many copies as paths.
    :param seed: of the paths; with the same seed rivals meet the same paths.
    :param alpha: the tail that an alpha-conditioned agent serves.
    """
    conditioned = model.risk_config.alpha_conditioned
    require((alpha is not None) == conditioned, "alpha", alpha, "a number for an alpha-conditioned agent, None for others")
    observed = ReturnObserver(GymVectorAdapter(env, seed), 1.0, [alpha] if alpha is not None else None)
    obs, pnl = observed.reset(), np.zeros(env.num_envs)
    for _ in range(env.dates):
        assert isinstance(obs, np.ndarray), "a box of observations"
        obs, rewards, _, _ = observed.step(model.predict(obs, deterministic=True)[0])
        pnl += rewards
    return HedgingResult(pnl, env.finished_costs, env.finished_turnover)
