"""Train an agent that quotes both sides of a market."""

from tailguard.envs.market_making import MarketMaking, Quotes
from tailguard.ppo.algorithm import DistributionalPPO
from tailguard.ppo.schedules import LinearSchedule

ENVS = 128
MINIBATCHES = 4
# Moves of the price while an inventory is held are most of the variance of the returns: the critic knows better what follows.
GAE_LAMBDA = 0.8


def train_maker(
    env: MarketMaking, *, alpha: float | tuple[float, float] | None = None, steps: int = 3_000_000, seed: int = 0
) -> DistributionalPPO:
    """Return an agent that quotes for the most wealth, by one set of settings for every market and every objective.

    :param env: with some 128 copies.
    :param alpha: the share of the worst episodes that counts, or a range for an alpha-conditioned agent; None is the mean.
    :param steps: quotes to learn from; 3,000,000 take about 25 seconds of one core.
    :param seed: of the agent.
    """
    model = DistributionalPPO(
        "MlpPolicy",
        env,
        learning_rate=LinearSchedule(3e-3, 0.0),
        n_steps=env.steps,
        batch_size=env.steps * env.num_envs // MINIBATCHES,
        n_epochs=4,
        gamma=1.0,
        gae_lambda=GAE_LAMBDA,
        ent_coef=0.0,
        policy_kwargs={"log_std_init": -1.0, "net_arch": [32, 32]},
        risk={"objective": "neutral"} if alpha is None else {"objective": "cvar", "alpha": alpha},
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
