"""The whole algorithm in one file of plain PyTorch, to be read from top to bottom beside the papers.

Recurrent PPO with twin quantile critics and a CVaR objective, in the order in which a rollout passes through it:

1. networks       an LSTM for the actor and one for the critics     Hochreiter and Schmidhuber 1997
2. advantages     GAE, with a bootstrap at time limits              Schulman et al. 2016; Pardo et al. 2018
3. targets        SR(lambda): distributions, not lambda-returns     Nam et al. 2021
4. critic loss    quantile Huber regression                         Dabney et al. 2018
5. return scale   PopArt: no prediction moves                       van Hasselt et al. 2016
6. CVaR           return capping: the cap follows the VaR           Rockafellar and Uryasev 2000; Mead et al. 2025
7. PPO            rollout, clipped surrogate, entropy bonus, Adam   Schulman et al. 2017

The engine computes the same in compiled passes, and can do more; tests/ppo/test_reference.py holds the two equal over three
updates. Nothing is imported from it. Shapes: T steps, B environments, K critics, N quantiles.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution, Independent, Normal

State = tuple[Tensor, Tensor]  # hidden and cell state of an LSTM


@dataclass(frozen=True)
class ReferenceSettings:
    """Settings of :class:`ReferencePPO`, named as those of :class:`tailguard.DistributionalPPO`, its `critic` and its `risk`.

    :param minibatches: gradient steps per epoch; a minibatch is the whole sequences of some environments.
    :param learning_rate: at the start; it falls linearly to 0.
    :param normalize_advantage_per_mini_batch: standardise the advantages of each minibatch, not those of the rollout.
    :param head_size: width of the hidden layer between an LSTM and the outputs of actor or critic.
    :param alpha: maximise the mean of the worst share alpha of the returns (CVaR); None maximises the mean of all.
    :param period: steps that these returns are counted over, undiscounted; None is the episode, discounted by gamma.
    """

    n_steps: int = 128
    n_epochs: int = 4
    minibatches: int = 4
    gamma: float = 0.99
    gae_lambda: float = 0.95
    value_lambda: float = 0.95
    clip_range: float = 0.2
    ent_coef: float = 0.001
    vf_coef: float = 0.5
    learning_rate: float = 3e-4
    max_grad_norm: float = 0.5
    normalize_advantage_per_mini_batch: bool = False
    lstm_hidden_size: int = 64
    head_size: int = 64
    num_quantiles: int = 16
    huber_kappa: float = 0.0
    alpha: float | None = None
    period: int | None = None
    anneal: float = 0.3
    anneal_from: float = 0.5
    cap_step: float = 0.2
    window: int = 1000
    seed: int = 0


# ------------------------------------------------------------------------------------------------------------ 1. networks
def unroll(cell: nn.LSTMCell, inputs: Tensor, starts: Tensor, state: State) -> State:
    """Return the states after every step, ``[T, B, H]`` twice; the hidden ones are the features of the heads.

    Hochreiter and Schmidhuber 1997:   (h, c)_t = LSTM(x_t, (1 - start_t) (h, c)_{t-1})

    :param starts: ``[T, B]``, true where a step begins an episode: nothing is remembered of the one before.
    """
    states = []
    for x, start in zip(inputs, starts, strict=True):
        keep = (~start).unsqueeze(-1)
        state = cell(x, (keep * state[0], keep * state[1]))
        states.append(state)
    return torch.stack([hidden for hidden, _ in states]), torch.stack([cells for _, cells in states])


def head(n_inputs: int, n_hidden: int, n_outputs: int, gain: float) -> nn.Sequential:
    """Return a tanh network with orthogonal weights."""
    layers = nn.Linear(n_inputs, n_hidden), nn.Linear(n_hidden, n_outputs)
    for layer, its_gain in zip(layers, (math.sqrt(2.0), gain), strict=True):
        nn.init.orthogonal_(layer.weight, its_gain)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(layers[0], nn.Tanh(), layers[1])


class ReferenceAgent(nn.Module):
    """An actor, and two quantile critics on an LSTM of their own."""

    def __init__(self, input_size: int, n_actions: int, discrete: bool, settings: ReferenceSettings) -> None:
        super().__init__()
        hidden, width = settings.lstm_hidden_size, settings.head_size
        self.actor_lstm, self.critic_lstm = nn.LSTMCell(input_size, hidden), nn.LSTMCell(input_size, hidden)
        self.actor = head(hidden, width, n_actions, 0.01)
        self.log_std = None if discrete else nn.Parameter(torch.zeros(n_actions))
        # Two draws of the weights: identical twins would stay identical for ever.
        self.critics = nn.ModuleList(head(hidden, width, settings.num_quantiles, 1.0) for _ in range(2))

    def action_distribution(self, features: Tensor) -> Distribution:
        """Return pi(. | s)."""
        if self.log_std is None:
            return Categorical(logits=self.actor(features), validate_args=False)
        return Independent(Normal(self.actor(features), self.log_std.exp(), validate_args=False), 1, validate_args=False)


# ---------------------------------------------------------------------------------------------------------- 2. advantages
class Steps(NamedTuple):
    """A rollout, ``[T, B, ...]``, and the state of the actor's LSTM before it.

    :param next_obs: what each step led to: the true final observation where an episode ended, never the first of the next.
    :param starts: true where a step begins an episode.
    :param running: running return: the discounted rewards of the episode, or period, before the step, G_t.
    :param discount: of the step's reward, D_t = gamma^t.
    :param left: share of the period that is left.
    :param over: true where the return ends with the step: the episode terminates, or a period is over.
    """

    obs: Tensor
    next_obs: Tensor
    starts: Tensor
    running: Tensor
    discount: Tensor
    left: Tensor
    actions: Tensor
    log_probs: Tensor
    rewards: Tensor
    over: Tensor
    truncated: Tensor
    actor_state: State


def gae_advantages(rewards: Tensor, values: Tensor, next_values: Tensor, steps: Steps, gamma: float, lam: float) -> Tensor:
    """Return advantages ``[T, B]``.

    Schulman et al. 2016, eq. 16:   A_t = delta_t + gamma lambda A_{t+1},   delta_t = r_t + gamma V(s_{t+1}) - V(s_t)
    Pardo et al. 2018:              V(s_{t+1}) = 0 after a termination, but not after a time limit; A_{t+1} = 0 after both
    """
    alive, running = (~steps.over).double(), (~(steps.over | steps.truncated)).double()
    delta = rewards.double() + gamma * alive * next_values - values
    advantages, later = torch.zeros_like(delta), torch.zeros_like(delta[0])
    for t in reversed(range(len(delta))):
        advantages[t] = later = delta[t] + gamma * lam * running[t] * later
    return advantages.to(rewards)


def standardise(advantages: Tensor) -> Tensor:
    """Return advantages of mean 0 and standard deviation 1."""
    return (advantages - advantages.mean()) / (advantages.std(correction=0) + 1e-8)


# ------------------------------------------------------------------------------------------------------------- 3. targets
def sample_replacement(theta: Tensor, steps: Steps, gamma: float, lam: float, generator: torch.Generator) -> Tensor:
    """Return target atoms ``[T, B, N]``, given the quantiles theta of the true next observations, ``[T, B, N]``.

    Nam et al. 2021, SR(lambda):   Y_t[j] = r_t + gamma Z_{t+1}[j],   Z_t[j] = Y_t[j] with probability lambda, else theta_j(s_t)

    The scalar lambda-return has the same mean, but, at gamma 0.99 and lambda 0.95, less than half of the spread.
    """
    draws, theta = torch.rand(theta.shape, generator=generator), theta.sort(-1).values.double()
    alive, ended = (~steps.over).double(), steps.over | steps.truncated
    targets, later = torch.zeros_like(theta), theta[-1]
    for t in reversed(range(len(theta))):
        replaced = (draws[t] < lam) & ~ended[t].unsqueeze(-1)
        z = torch.where(replaced, later, theta[t])
        targets[t] = later = steps.rewards[t].double().unsqueeze(-1) + gamma * alive[t].unsqueeze(-1) * z
    return targets.float()


# --------------------------------------------------------------------------------------------------------- 4. critic loss
def quantile_regression_loss(theta: Tensor, targets: Tensor, kappa: float) -> Tensor:
    """Return the loss of predictions ``[..., N]`` against target atoms ``[..., N]``, as ``[...]``.

    Dabney et al. 2018, eq. 10:   mean_ij |tau_i - 1{u_ij < 0}| L_kappa(u_ij) / kappa,   u_ij = Y_j - theta_i
    Dabney et al. 2018, lemma 2:  tau_i = (i + 1/2) / N

    kappa = 0 is the limit L / kappa = |u|, the only kappa with the quantiles as its minimum.
    """
    n = theta.shape[-1]
    tau = ((torch.arange(n) + 0.5) / n).unsqueeze(-1)
    u = targets.unsqueeze(-2) - theta.unsqueeze(-1)  # [..., i, j]
    inner = u.clamp(-kappa, kappa)
    huber = inner * (u - 0.5 * inner) / kappa if kappa > 0.0 else u.abs()
    return ((tau - (u < 0.0).float()).abs() * huber).mean((-2, -1))


# -------------------------------------------------------------------------------------------------------- 5. return scale

BETA, LARGEST_STEP, SMALLEST_STD = 0.2, 0.5, 1e-4  # weight of a rollout; the most it may change, in deviations; a floor


class PopArt:
    """The mean mu and standard deviation s of the returns: critics predict (Z - mu) / s."""

    mean, std, mass = 0.0, 1.0, 0.0

    def update(self, returns: Tensor, layers: Sequence[nn.Linear]) -> None:
        """Merge the moments of new returns (Chan et al. 1979), and change the `layers` so that no prediction moves.

        van Hasselt et al. 2016, proposition 1:   W' = (s / s') W,   b' = (s b + mu - mu') / s'
        """
        new, mass = returns.double(), (1.0 - BETA) * self.mass + returns.numel()
        share, gap = new.numel() / mass, new.mean().item() - self.mean
        mean = self.mean + share * gap
        std = math.sqrt((1.0 - share) * self.std**2 + share * new.var(correction=0).item() + share * (1.0 - share) * gap**2)
        if self.mass > 0.0 and self.std > SMALLEST_STD:  # one strange rollout must not throw the scale
            mean = float(np.clip(mean, self.mean - LARGEST_STEP * self.std, self.mean + LARGEST_STEP * self.std))
            std = float(np.clip(std, self.std / (1.0 + LARGEST_STEP), self.std * (1.0 + LARGEST_STEP)))
        std = max(std, SMALLEST_STD)
        with torch.no_grad():
            for layer in layers:
                layer.weight.copy_(layer.weight.double() * (self.std / std))
                layer.bias.copy_((layer.bias.double() * self.std + self.mean - mean) / std)
        self.mean, self.std, self.mass = mean, std, mass


# ---------------------------------------------------------------------------------------------------------------- 6. CVaR

REACH, FINE, FINE_UNIT = 4.0, 0.02, 2.0  # of the budget's features, in standard deviations of the return
PAST, ENOUGH = 1.5, 20  # the tail shrinks this many times as far as to alpha, in logarithms; episodes for a first cap


class ReturnCap:
    """The cap C on the return R of an episode; infinite for a neutral objective, where all of this is plain PPO.

    Rockafellar and Uryasev 2000, theorem 1:   CVaR_a(R) = max_C { C + E[min(R - C, 0)] / a },   attained at C = VaR_a(R)
    Baeuerle and Ott 2011:                     for a fixed C maximise E[min(R, C)], which needs the return so far in the state
    Mead et al. 2025, return capping:          C <- C + cap_step (VaR_a - C) after every rollout
    Greenberg et al. 2022:                     a begins large and shrinks, or a policy never sees success
    """

    def __init__(self, settings: ReferenceSettings) -> None:
        self.settings, self.cap = settings, math.inf
        self.episodes: deque[tuple[Tensor, Tensor]] = deque(maxlen=settings.window)  # atoms and masses of their returns
        self.mean, self.std = 0.0, 1.0  # of these returns: between episodes and within the distributions of those that were cut
        self.recent, self.best = np.full(2, -np.inf), np.full(2, -np.inf)  # the CVaR that a cap brought, and that cap

    def budget(self, running: Tensor, discount: Tensor) -> Tensor:
        """Return c_t = (C - G_t) / D_t, what the rest of the return may still count."""
        return (self.cap - running) / discount

    def capped(self, x: Tensor, budget: Tensor) -> Tensor:
        """Return min(x, c) - min(0, c): of rewards r, which discounted add up to min(R, C) - min(0, C), or of returns Z."""
        return (torch.minimum(x.double(), budget) - budget.clamp(max=0.0)).to(x)

    def features(self, budget: Tensor) -> Tensor:
        """Return the budget as the networks see it, ``[..., 2]``: coarse, and fine where it is nearly used up."""
        coarse = ((budget - self.mean) / self.std).clamp(-REACH, REACH)
        fine = torch.asinh((budget / self.std).clamp(-REACH, REACH) / FINE) / FINE_UNIT
        return torch.stack((coarse, fine), -1).float()

    def adapt(self, progress: float) -> None:
        """Move the cap towards the VaR of the last episodes, at a tail that shrinks as the training progresses.

        The best policy for a cap has no reason to earn more than the cap: C can fall but hardly rise. So it follows the VaR of
        tails below alpha for a while, the best cap on the way is noted, and after that C never falls below it.
        """
        s = self.settings
        if s.alpha is None or len(self.episodes) < ENOUGH:
            return
        values, weights = self.returns()
        self.mean = (weights @ values).item()
        self.std = (weights @ (values - self.mean) ** 2).sqrt().item()
        searched = s.anneal == 0.0 or progress >= min(PAST * s.anneal, 0.5 * (1.0 + s.anneal))
        share = PAST if searched else progress / s.anneal
        annealed = s.alpha if share == PAST else max(s.anneal_from, s.alpha) ** max(1.0 - share, 0.0) * s.alpha**share
        target = self.tail(annealed)[0]
        if math.isfinite(self.cap) and s.anneal > 0.0:
            now = np.array([self.tail(s.alpha)[1], self.cap])
            self.recent = now if np.isinf(self.recent[0]) else self.recent + s.cap_step * (now - self.recent)
            self.best = self.recent.copy() if self.recent[0] > self.best[0] else self.best
            if share == PAST:
                self.best[0] += s.cap_step * (self.recent[0] - self.best[0])  # luck fades
                target = max(target, float(self.best[1]))
        self.cap = self.cap + s.cap_step * (target - self.cap) if math.isfinite(self.cap) else target

    def returns(self) -> tuple[Tensor, Tensor]:
        """Return the values of the last episodes' returns and their weights: every episode weighs the same."""
        values, order = torch.cat([atoms for atoms, _ in self.episodes]).sort()
        return values, torch.cat([masses for _, masses in self.episodes])[order] / len(self.episodes)

    def tail(self, alpha: float) -> tuple[float, float]:
        """Return VaR and CVaR at `alpha` of the last episodes."""
        values, weights = self.returns()
        upto = weights.cumsum(0)
        in_tail = (alpha - (upto - weights)).clamp(min=0.0).minimum(weights)
        below = int((upto < alpha - 1e-12).sum())
        return values[min(below, len(values) - 1)].item(), (in_tail @ values / in_tail.sum()).item()


# ----------------------------------------------------------------------------------------------------------------- 7. PPO
class ReferencePPO:
    """Recurrent distributional PPO, with a CVaR objective where `settings.alpha` is given.

    :param env: a Gymnasium vector environment that resets in the same step, with a one-dimensional Box of observations.
    """

    def __init__(self, env: VectorEnv[Any, Any, Any], settings: ReferenceSettings) -> None:
        if env.metadata.get("autoreset_mode") != AutoresetMode.SAME_STEP:
            raise ValueError("the vector environment must reset in the same step (AutoresetMode.SAME_STEP)")
        self.env, self.settings, self.scale, self.cap = env, settings, PopArt(), ReturnCap(settings)
        torch.manual_seed(settings.seed)
        self.generator = torch.Generator().manual_seed(settings.seed)
        space, obs_size = env.single_action_space, math.prod(env.single_observation_space.shape or ())
        self.n_actions = int(space.n) if isinstance(space, spaces.Discrete) else math.prod(space.shape or ())
        input_size = obs_size if settings.alpha is None else obs_size + (2 if settings.period is None else 3)
        self.gamma = settings.gamma if settings.period is None else 1.0  # of the returns that the critics predict
        self.agent = ReferenceAgent(input_size, self.n_actions, isinstance(space, spaces.Discrete), settings)
        self.optimizer = torch.optim.Adam(self.agent.parameters(), settings.learning_rate, eps=1e-5)
        self.actor_state = self.critic_state = (torch.zeros(env.num_envs, settings.lstm_hidden_size),) * 2
        self.obs, self.starts = env.reset(seed=settings.seed)[0], torch.ones(env.num_envs, dtype=torch.bool)
        self.running, self.discount = torch.zeros(env.num_envs).double(), torch.ones(env.num_envs).double()
        self.age = torch.zeros(env.num_envs).double()  # steps of the period so far

    def learn(self, total_steps: int) -> "ReferencePPO":
        """Alternate rollouts and updates until the environments together have made `total_steps` steps."""
        per_rollout = self.settings.n_steps * self.env.num_envs
        for done in range(per_rollout, total_steps + 1, per_rollout):
            self.update(self.collect(), done / total_steps)
        return self

    def inputs(self, obs: Tensor, running: Tensor, discount: Tensor, left: Tensor) -> Tensor:
        """Return what the networks see: the observation, and where the objective is a tail the budget and the time left."""
        shown = [self.cap.features(self.cap.budget(running, discount)), left.float().unsqueeze(-1)]
        shown = shown[:1] if self.settings.period is None else shown
        return obs if self.settings.alpha is None else torch.cat((obs, *shown), -1)

    @torch.no_grad()
    def collect(self) -> Steps:
        """Act for `n_steps` steps in every environment."""
        rows, actor_state, space = [], self.actor_state, self.env.single_action_space
        shape = (self.settings.n_steps, self.env.num_envs, self.n_actions)
        for noise in torch.randn(shape) if self.agent.log_std is not None else -torch.empty(shape).exponential_().log():
            obs, starts, running, discount = torch.as_tensor(self.obs).float(), self.starts, self.running, self.discount
            left = 1.0 - self.age / (self.settings.period or math.inf)
            seen = self.inputs(obs, running, discount, left)
            hidden, cells = unroll(self.agent.actor_lstm, seen[None], starts[None], self.actor_state)
            self.actor_state = hidden[0], cells[0]
            pi = self.agent.action_distribution(hidden[0])
            # Gumbel 1954: the argmax of logits plus Gumbel noise is a draw from their softmax.
            actions = (pi.logits + noise).argmax(-1) if isinstance(pi, Categorical) else pi.mean + pi.stddev * noise
            clipped = np.clip(actions.numpy(), space.low, space.high) if isinstance(space, spaces.Box) else actions.numpy()
            self.obs, rewards, terminated, truncated, info = self.env.step(clipped)
            next_obs = torch.as_tensor(self.obs).float().clone()
            for env in np.flatnonzero(terminated | truncated):
                next_obs[env] = torch.as_tensor(info["final_obs"][env])
            rewards, terminated, truncated = torch.as_tensor(rewards).float(), *map(torch.as_tensor, (terminated, truncated))
            log_probs = pi.log_prob(actions)
            over = terminated | (self.age + 1.0 == (self.settings.period or 0))
            rows.append((obs, next_obs, starts, running, discount, left, actions, log_probs, rewards, over, truncated))
            self.starts, begins = terminated | truncated, over | truncated
            self.running = torch.where(begins, 0.0, running + discount * rewards)
            self.discount = torch.where(begins, 1.0, (discount * self.gamma).clamp(min=1e-30))
            self.age = torch.where(begins, 0.0, self.age + 1.0)
        return Steps(*(torch.stack(column) for column in zip(*rows, strict=True)), actor_state)  # type: ignore[call-arg, arg-type]

    @torch.no_grad()
    def prepare(self, steps: Steps) -> tuple[Tensor, Tensor, Tensor]:
        """Return inputs, advantages ``[T, B]``, standardised unless minibatches are, normalised targets ``[K, T, B, N]``."""
        s, agent, scale, cap, gamma = self.settings, self.agent, self.scale, self.cap, self.gamma
        if scale.mass == 0.0:  # a first guess from rewards alone: what untrained critics say would drown small returns
            nothing = torch.zeros_like(steps.rewards)
            scale.update(gae_advantages(steps.rewards, nothing, nothing, steps, gamma, 1.0), [])
            scale.mass = 0.0
        after = steps.running + steps.discount * steps.rewards, gamma * steps.discount
        seen = self.inputs(steps.obs, steps.running, steps.discount, steps.left)
        seen_next = self.inputs(steps.next_obs, *after, steps.left - 1.0 / (s.period or math.inf))

        # The value of every true next observation, final ones included, with the LSTM's state after the step that led to it.
        hidden, cells = unroll(agent.critic_lstm, seen, steps.starts, self.critic_state)
        hidden_next = agent.critic_lstm(seen_next.flatten(0, 1), (hidden.flatten(0, 1), cells.flatten(0, 1)))[0].view_as(hidden)
        self.critic_state = hidden[-1], cells[-1]
        features = torch.stack((hidden, hidden_next))
        atoms, next_atoms = torch.stack([critic(features) for critic in agent.critics], 1) * scale.std + scale.mean
        # The mean of the twins: without a maximum over actions there is no bias that their minimum would have to undo.
        values, next_values = atoms.mean((0, -1)), next_atoms.mean((0, -1))
        returns = gae_advantages(steps.rewards, values, next_values, steps, gamma, s.gae_lambda) + values
        budget, next_budget = cap.budget(steps.running, steps.discount), cap.budget(*after)
        values = cap.capped(atoms, budget.unsqueeze(-1)).mean((0, -1))
        next_values = cap.capped(next_atoms, next_budget.unsqueeze(-1)).mean((0, -1))
        advantages = gae_advantages(cap.capped(steps.rewards, budget), values, next_values, steps, gamma, s.gae_lambda)
        targets = [sample_replacement(theta, steps, gamma, s.value_lambda, self.generator) for theta in next_atoms]
        for t, b in (steps.over | steps.truncated).nonzero():  # a time limit leaves a distribution of the return
            rest = torch.zeros(1) if steps.over[t, b] else next_atoms[:, t, b].sort(-1).values.mean(0)
            cap.episodes.append((after[0][t, b] + after[1][t, b] * rest.double(), torch.ones_like(rest).double() / len(rest)))
        scale.update(returns, [cast(nn.Linear, cast(nn.Sequential, critic)[-1]) for critic in agent.critics])
        advantages = advantages if s.normalize_advantage_per_mini_batch else standardise(advantages)
        return seen, advantages, (torch.stack(targets) - scale.mean) / scale.std

    def update(self, steps: Steps, progress: float) -> tuple[Tensor, Tensor, Tensor]:
        """Improve actor and critics; return advantages, targets, and of every gradient step the losses and the norm.

        Schulman et al. 2017, eq. 7:   L_clip = E[min(rho A, clip(rho, 1 - e, 1 + e) A)],   rho = pi(a | s) / pi_old(a | s)
        Schulman et al. 2017, eq. 9:   maximise L_clip - c_v L_value + c_e H(pi)

        :param progress: share of the training that is done with this rollout, in (0, 1].
        """
        s, agent, states = self.settings, self.agent, (*steps.actor_state, *self.critic_state)
        inputs, advantages, targets = self.prepare(steps)
        self.optimizer.param_groups[0]["lr"] = (1.0 - progress) * s.learning_rate
        losses = []
        for _ in range(s.n_epochs):
            for envs in torch.randperm(self.env.num_envs, generator=self.generator).chunk(s.minibatches):
                x, starts, advantage = inputs[:, envs], steps.starts[:, envs], advantages[:, envs]
                advantage = standardise(advantage) if s.normalize_advantage_per_mini_batch else advantage
                actor_hidden, actor_cells, critic_hidden, critic_cells = (state[envs] for state in states)
                pi = agent.action_distribution(unroll(agent.actor_lstm, x, starts, (actor_hidden, actor_cells))[0])
                rho = (pi.log_prob(steps.actions[:, envs]) - steps.log_probs[:, envs]).exp()
                clipped = rho.clamp(1.0 - s.clip_range, 1.0 + s.clip_range)
                policy_loss = -torch.minimum(rho * advantage, clipped * advantage).mean()
                features = unroll(agent.critic_lstm, x, starts, (critic_hidden, critic_cells))[0]
                theta = torch.stack([critic(features) for critic in agent.critics])
                value_loss = quantile_regression_loss(theta, targets[:, :, envs], s.huber_kappa).mean()
                entropy = pi.entropy().mean()
                self.optimizer.zero_grad()
                (policy_loss + s.vf_coef * value_loss - s.ent_coef * entropy).backward()
                norm = nn.utils.clip_grad_norm_(agent.parameters(), s.max_grad_norm)
                self.optimizer.step()
                losses.append(torch.stack((policy_loss, entropy, value_loss, norm)).detach())
        self.cap.adapt(progress)
        return advantages, targets, torch.stack(losses)
