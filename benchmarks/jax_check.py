"""Is the JAX peer of the speed benchmark right? `python benchmarks/jax_check.py`; it fails where a limit is broken.

Its environment is compared with work.py's; its values, advantages, loss, gradients and Adam with torch's in double precision on
the same network; it has to learn a market whose optimum is known and needs memory; and its threads are counted.
"""

import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax_peer import (
    CLIP,
    EPISODE,
    EPSILON,
    GAMMA,
    HEAD,
    LAMBDA,
    LEARNING_RATE,
    LSTM,
    MAX_NORM,
    OBS,
    SEQUENCES,
    VF_COEF,
    Adam,
    JaxPPO,
    Market,
    adam_step,
    loss,
    lstm_by_autodiff,
    lstm_by_hand,
    minibatch,
    random_bars,
    rollout,
)
from torch import nn
from work import COST, N_BARS, N_FEATURES, VOLATILITY, WorkEnv

from tailguard.ppo.targets import gae

# Relative to the largest number. Float32 rounds at 1e-7, and a rollout is 128 steps long.
TOLERANCE = 1e-5


class TorchTwin(nn.Module):
    """Build the same network with torch's own modules."""

    def __init__(self, weights):
        super().__init__()
        self.cell = nn.LSTMCell(OBS, LSTM)
        self.actor = nn.Sequential(nn.Linear(LSTM, HEAD), nn.Tanh(), nn.Linear(HEAD, 1))
        self.critic = nn.Sequential(nn.Linear(LSTM, HEAD), nn.Tanh(), nn.Linear(HEAD, 1))
        self.log_std = nn.Parameter(torch.zeros(1))
        self.double()
        with torch.no_grad():
            for parameter, value in zip(self.parts(), self.split(weights), strict=True):
                parameter.copy_(value)
            self.cell.bias_hh.zero_()

    def parts(self):
        """The parameters in the order of :meth:`split`."""
        yield from (self.cell.weight_ih, self.cell.weight_hh, self.cell.bias_ih)
        yield from (*self.actor.parameters(), *self.critic.parameters(), self.log_std)

    @staticmethod
    def split(weights):
        """The peer's parameters, or their gradients, as torch lays them out."""
        gates = to_torch(weights.gates.weight)
        layers = [
            part for layer in (*weights.actor, *weights.critic) for part in (to_torch(layer.weight).T, to_torch(layer.bias))
        ]
        return [gates[:OBS].T, gates[OBS:].T, to_torch(weights.gates.bias), *layers, to_torch(weights.log_std)]

    def features(self, obs, keep, start):
        """Hidden and cell states after each step, ``[T, B, H]`` each."""
        state, states = start, []
        for row in range(len(obs)):
            state = self.cell(obs[row], (state[0] * keep[row], state[1] * keep[row]))
            states.append(state)
        return [torch.stack(part) for part in zip(*states, strict=True)]

    def log_prob(self, features, actions):
        mean = self.actor(features).squeeze(-1)
        return torch.distributions.Normal(mean, self.log_std.exp()).log_prob(actions)


def to_torch(array):
    return torch.from_numpy(np.array(array, np.float64))


def at_most(name, value, limit):
    print(f"{name}: {value:.2g} (at most {limit:g})")
    if not value <= limit:
        raise SystemExit(f"{name} is {value}")


def difference(ours, theirs):
    """Largest difference of two lists of arrays, relative to the largest number of each pair."""
    pairs = zip(ours, theirs, strict=True)
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)


def replay(model, key, steps):
    """The peer's actions in work.py's environment: observations, rewards, ends and final observations of the rollout."""
    env = WorkEnv(model.n_envs)
    env.reset()
    env.bar, env.age, env.position = (np.array(part) for part in model.acting.place)
    env.position = env.position.astype(np.float64)
    bars = np.array(random_bars(jax.random.split(key)[1], steps.actions.shape))
    obs, rewards, ended, finals = [env._observe()], [], [], []
    for actions, fresh in zip(np.array(steps.actions), bars, strict=True):
        out = env.step_arrays(actions[:, None])
        env.bar[out.ended] = fresh[out.ended]  # the two draw from different generators
        finals.append(np.zeros_like(out.obs))
        finals[-1][out.ended] = out.final_obs
        obs.append(env._observe())
        rewards.append(out.rewards)
        ended.append(out.truncated)
    return tuple(torch.from_numpy(np.stack(part)) for part in (obs, rewards, ended, finals))


def check_rollout(model):
    """Environment, values and advantages of one rollout with episode ends in it; returns the rollout."""
    key = jax.random.key(123)
    play = jax.jit(rollout, static_argnames="n_steps")
    end, steps, rewards = play(model.weights, model.market, model.acting, key, n_steps=model.n_steps)
    obs, true_rewards, ended, finals = replay(model, key, steps)
    print(f"episode ends in the rollout: {int(ended.sum())}")
    at_most("observations", difference([to_torch(steps.obs), to_torch(end.obs)], [obs[:-1], obs[-1]]), TOLERANCE)
    at_most("rewards", difference([to_torch(rewards)], [true_rewards]), TOLERANCE)

    twin = TorchTwin(model.weights)
    with torch.no_grad():
        keep = torch.cat((to_torch(model.acting.keep)[None], 1.0 - ended.double().unsqueeze(-1)))
        hidden, cells = twin.features(obs.double(), keep, [to_torch(part) for part in model.acting.memory])
        values = twin.critic(hidden).squeeze(-1)
        final_hidden, _ = twin.cell(finals.double().flatten(0, 1), (hidden[:-1].flatten(0, 1), cells[:-1].flatten(0, 1)))
        final_values = twin.critic(final_hidden).reshape(ended.shape)
        next_values = torch.where(ended, final_values, values[1:])
        never = torch.zeros_like(ended)
        advantages = gae(true_rewards.double(), values[:-1], next_values, never, ended, GAMMA, LAMBDA)
        log_probs = twin.log_prob(hidden[:-1], to_torch(steps.actions))
    at_most("values", difference([to_torch(steps.values)], [values[:-1]]), TOLERANCE)
    at_most("advantages", difference([to_torch(steps.advantages)], [advantages]), TOLERANCE)
    at_most("log-probabilities", difference([to_torch(steps.log_probs)], [log_probs]), TOLERANCE)
    return steps


def torch_loss(twin, batch, start):
    hidden, _ = twin.features(batch.obs, batch.keep, start)
    ratio = (twin.log_prob(hidden, batch.actions) - batch.log_probs).exp()
    advantages = (batch.advantages - batch.advantages.mean()) / (batch.advantages.std(correction=0) + 1e-8)
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(1.0 - CLIP, 1.0 + CLIP) * advantages).mean()
    clipped = ((ratio - 1.0).abs() > CLIP).double().mean().item()
    errors = twin.critic(hidden).squeeze(-1) - batch.values - batch.advantages
    return VF_COEF * errors.square().mean() - surrogate, clipped


def check_update(model, steps):
    """Loss and gradient of one minibatch, away from the weights that acted; returns the gradient."""
    keys = iter(jax.random.split(jax.random.key(7), 100))
    weights = jax.tree.map(lambda w: w + 0.03 * jax.random.normal(next(keys), w.shape), model.weights)
    # The sequences with the most resets.
    envs = np.argsort(np.array(steps.keep.sum((0, 2))))[:SEQUENCES]
    twin = TorchTwin(weights)
    twin.cell.bias_hh.requires_grad_(False)  # the peer has one bias per gate
    batch = type(steps)(*(to_torch(array)[:, envs] for array in steps))
    start = [to_torch(array)[envs] for array in model.acting.memory]
    value, clipped = torch_loss(twin, batch, start)
    value.backward()
    print(f"resets in the minibatch: {int((batch.keep == 0).sum())}, ratios outside the clip range: {clipped:.0%}")
    part = minibatch(steps, model.acting.memory, jnp.asarray(envs))
    for name, lstm in (("by hand", lstm_by_hand), ("by autodiff", lstm_by_autodiff)):
        ours, gradient = jax.jit(jax.value_and_grad(loss), static_argnames="lstm")(weights, *part, lstm=lstm)
        gradients = difference(TorchTwin.split(gradient), [parameter.grad for parameter in twin.parts()])
        at_most(f"loss, {name}", difference([to_torch(ours)], [value]), TOLERANCE)
        at_most(f"gradients, {name}", gradients, TOLERANCE)
    return gradient


def check_adam(gradient):
    """Three steps from 0, where rounding the weights does not hide the steps, above and below the largest norm."""
    zeros = jax.tree.map(jnp.zeros_like, gradient)
    weights, adam, twin = zeros, Adam(zeros, zeros, jnp.zeros((), jnp.int32)), TorchTwin(zeros)
    optimizer = torch.optim.Adam(twin.parts(), LEARNING_RATE, eps=EPSILON)
    norm = float(jnp.sqrt(sum(jnp.square(g).sum() for g in jax.tree.leaves(gradient))))
    for factor in (2.0 * MAX_NORM / norm, -4.0 * MAX_NORM / norm, 0.1 * MAX_NORM / norm):
        scaled = jax.tree.map(lambda g, factor=factor: factor * g, gradient)
        for parameter, part in zip(twin.parts(), TorchTwin.split(scaled), strict=True):
            parameter.grad = part.contiguous()
        nn.utils.clip_grad_norm_(list(twin.parts()), MAX_NORM)
        optimizer.step()
        weights, adam = adam_step(weights, adam, scaled)
    # 1 - 0.999 in float32 is off by 5e-5.
    at_most("three steps of Adam", difference(TorchTwin.split(weights), twin.parts()), 1e-4)


def check_learning(n_rollouts=60):
    """A market that shows a random sign and moves by it one bar later: 0 without memory; the optimum changes sides at once."""
    model = JaxPPO(seed=1)
    signs = np.random.default_rng(5).choice([-1.0, 1.0], N_BARS + 1)
    features = np.zeros((N_BARS, N_FEATURES), np.float32)
    features[:, 0] = signs[1:]
    model.market = Market(jnp.asarray(features), jnp.asarray(VOLATILITY * signs[:-1], jnp.float32))
    model.learn(n_rollouts * model.n_envs * model.n_steps)
    sure = model.weights._replace(log_std=jnp.full(1, -20.0))
    rewards = rollout(sure, model.market, model.acting, jax.random.key(9), model.n_steps)[2]
    # In the mean one flip of 2 every other bar; the first bar of an episode has nothing to remember.
    optimum = 100.0 * (VOLATILITY - COST) * (1.0 - 1.0 / EPISODE)
    at_most(f"part of the optimum missed after {n_rollouts} rollouts", 1.0 - float(rewards.mean()) / optimum, 0.05)


def thread_ticks():
    """CPU ticks that each thread of this process has used (Linux)."""
    ticks = {}
    for task in Path("/proc/self/task").iterdir():
        user, system = (task / "stat").read_text().rpartition(")")[2].split()[11:13]
        ticks[task.name] = int(user) + int(system)
    return ticks


def busy_threads(work, seconds=2.0):
    """Return how many threads `work` keeps busy; unlike CPU seconds per second it shows them on a full machine too."""
    work()  # compiling has threads of its own
    before, end = thread_ticks(), time.perf_counter() + seconds
    while time.perf_counter() < end:
        work()
    used = [now - before.get(name, 0) for name, now in thread_ticks().items()]
    return sum(ticks > 0.05 * sum(used) for ticks in used)


def check_threads(model):
    """XLA runs independent products side by side on as many threads as it has; an idle pool must not spin."""
    steps = model.n_envs * model.n_steps
    at_most("busy threads while learning", busy_threads(lambda: model.learn(steps, reset_num_timesteps=False)), 1)
    products = jax.jit(lambda x: (x @ x, jnp.tanh(x) @ x, jnp.sin(x) @ x, jnp.cos(x) @ x))
    square = jnp.ones((1000, 1000))
    at_most("busy threads in independent products", busy_threads(lambda: jax.block_until_ready(products(square))), 1)
    cpu = time.process_time()
    time.sleep(1.0)
    at_most("CPU seconds in an idle second", time.process_time() - cpu, 0.05)


def main() -> None:
    model = JaxPPO()
    model.learn(20 * model.n_envs * model.n_steps)
    print(f"JAX {jax.__version__}, torch {torch.__version__}; differences are relative to the largest number")
    steps = check_rollout(model)
    check_adam(check_update(model, steps))
    check_learning()
    check_threads(model)


if __name__ == "__main__":
    main()
