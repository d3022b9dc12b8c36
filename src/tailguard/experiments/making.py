"""Train an agent that quotes both sides of a market."""

from typing import Any

from tailguard.envs.market_making import MarketMaking, Quotes
from tailguard.experiments.minibatches import minibatch_size
from tailguard.ppo.algorithm import DistributionalPPO
from tailguard.ppo.schedules import LinearSchedule

ENVS = 128  # for a tail
MINIBATCHES = 4
LEVELS = 5  # of an alpha-conditioned agent
# What an inventory does to a tail is small beside the errors of a critic there: for tails advantages come from returns. A tail
# that shrinks before the agent controls its inventory leaves next to nothing to learn from.
MEAN_LAMBDA, TAIL_LAMBDA, ANNEAL = 0.8, 0.95, 0.7


def train_maker(
    env: MarketMaking, *, alpha: float | tuple[float, float] | None = None, steps: int = 3_000_000, seed: int = 0
) -> DistributionalPPO:
    """Return an agent that quotes for the most wealth, by one set of settings for every market.

    :param env: with some 64 copies for the mean, 128 for a tail.
    :param alpha: the share of the worst episodes that counts, or a range for an alpha-conditioned agent; None is the mean.
    :param steps: quotes to learn from; 3,000,000 take about 45 seconds of one core.
    :param seed: of the agent.
    """
    risk: dict[str, Any] = {"objective": "neutral"}
    if alpha is not None:
        risk = {"objective": "cvar", "alpha": alpha, "anneal": ANNEAL, "levels": LEVELS}
    model = DistributionalPPO(
        "MlpPolicy",
        env,
        learning_rate=LinearSchedule(3e-3, 0.0),
        n_steps=env.steps,
        batch_size=minibatch_size(env.steps * env.num_envs, env.steps * env.num_envs // MINIBATCHES),
        n_epochs=4,
        gamma=1.0,
        gae_lambda=MEAN_LAMBDA if alpha is None else TAIL_LAMBDA,
        ent_coef=0.0,
        policy_kwargs={"log_std_init": -1.0, "net_arch": [32, 32]},
        risk=risk,
        critic={"twin": False},
        seed=seed,
    )
    return model.learn(steps)


def agent_quotes(model: DistributionalPPO, env: MarketMaking) -> Quotes:
    """Return the most likely quotes of an agent for each step and inventory.

    :param model: from :func:`train_maker` with `alpha` None: one for a tail looks at its wealth, too.
    :param env: the market.
    """
    obs = env.observations()
    return env.quotes_of_actions(model.predict(obs.reshape(-1, 2), deterministic=True)[0].reshape(obs.shape))
