"""A strong peer for the speed benchmark: PPO with a shared LSTM in JAX, compiled end to end.

The pattern is purejaxrl's: environment, rollout, advantages, epochs and minibatches are one jit-compiled function made of
`lax.scan`s. The work is that of work.py, the settings are those of speed.py: the same market, network, samples and gradient
steps. Truncation bootstraps from the true final observation with the memory of that moment (purejaxrl takes it for an end).

What makes it fast on a CPU: one GEMM per time step for all gates; a gradient of the LSTM written by hand, with one GEMM for
its weights after the backward scan, where autodiff adds a small product to their gradient at every step; activations kept as
one array per gate, since XLA does not vectorise over slices of a packed one; the critic off the acting path. Unrolling the
scans, hoisting the input's product out of them and packing both heads into one GEMM made it slower.

One thread: XLA sizes its pool by the environment variable NPROC, else by the cores that the process may use, when JAX is used
for the first time; `--xla_cpu_multi_thread_eigen=false` does not limit it. :func:`on_one_thread` sets NPROC for that moment
only, so that nothing else in the process sees it, and must come before any other use of JAX in the process.

jax_check.py compares it with torch and with work.py, and shows that it learns, and on one thread.
"""

import os
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from work import COST, EPISODE, N_BARS, N_FEATURES, WorkEnv

from tailguard.validation import require

OBS, LSTM, HEAD, SEQUENCES, EPOCHS = N_FEATURES + 1, 64, 64, 8, 4
GAMMA, LAMBDA, CLIP, VF_COEF, MAX_NORM = 0.99, 0.95, 0.2, 0.5, 0.5
LEARNING_RATE, BETA1, BETA2, EPSILON = 3e-4, 0.9, 0.999, 1e-5
LOG_SQRT_2PI = 0.9189385332046727
# XLA prefers vectors of 256 bits; torch's kernels use what the processor has, and so may these.
COMPILER_OPTIONS = {"xla_cpu_prefer_vector_width": 512}


def on_one_thread() -> None:
    """Start XLA's CPU client with a pool of one thread."""
    before = os.environ.get("NPROC")
    os.environ["NPROC"] = "1"
    try:
        jax.config.update("jax_platforms", "cpu")
        jnp.zeros(1).block_until_ready()
    finally:
        os.environ.pop("NPROC")
        if before is not None:
            os.environ["NPROC"] = before


# ------------------------------------------------------------------------------------------------------------- network


class Layer(NamedTuple):
    """Weights ``[inputs, outputs]`` and biases."""

    weight: Array
    bias: Array

    def __call__(self, inputs: Array) -> Array:
        return inputs @ self.weight + self.bias


class Weights(NamedTuple):
    """The parameters; `gates` act on observation and hidden state side by side and stand in torch's order i, f, g, o."""

    gates: Layer
    actor: tuple[Layer, Layer]
    critic: tuple[Layer, Layer]
    log_std: Array


def initial_weights(key: Array) -> Weights:
    """LSTM as torch's, heads orthogonal as SB3's."""
    keys = jax.random.split(key, 6)
    bound = LSTM**-0.5
    gates = Layer(
        jax.random.uniform(keys[0], (OBS + LSTM, 4 * LSTM), minval=-bound, maxval=bound),
        jax.random.uniform(keys[1], (4 * LSTM,), minval=-bound, maxval=bound),
    )

    def orthogonal(key, inputs, outputs, gain):
        return Layer(jax.nn.initializers.orthogonal(gain)(key, (inputs, outputs)), jnp.zeros(outputs))

    actor = (orthogonal(keys[2], LSTM, HEAD, 2**0.5), orthogonal(keys[3], HEAD, 1, 0.01))
    critic = (orthogonal(keys[4], LSTM, HEAD, 2**0.5), orthogonal(keys[5], HEAD, 1, 1.0))
    return Weights(gates, actor, critic, jnp.zeros(1))


class Memory(NamedTuple):
    """State of the LSTM, ``[B, H]`` each."""

    hidden: Array
    cell: Array

    def masked(self, keep: Array) -> "Memory":
        """The state with 0 where `keep` ``[B, 1]`` is 0."""
        return Memory(self.hidden * keep, self.cell * keep)


def sigmoid(x: Array) -> Array:
    """One tanh instead of an exponential and a division."""
    return 0.5 * jnp.tanh(0.5 * x) + 0.5


def lstm_step(gates: Layer, obs: Array, memory: Memory) -> tuple[Memory, tuple[Array, ...]]:
    """One time step, and what its gates were."""
    i, f, g, o = jnp.split(gates(jnp.concatenate((obs, memory.hidden), -1)), 4, -1)
    i, f, g, o = sigmoid(i), sigmoid(f), jnp.tanh(g), sigmoid(o)
    cell = f * memory.cell + i * g
    return Memory(o * jnp.tanh(cell), cell), (i, f, g, o)


def lstm_forward(gates: Layer, obs: Array, keep: Array, start: Memory):
    """Hidden states ``[T, B, H]`` of whole sequences with resets, and what the backward pass needs.

    :param obs: ``[T, B, D]``.
    :param keep: 0 where an episode begins, else 1, ``[T, B, 1]``.
    :param start: memory before the first step.
    """

    def step(memory, inputs):
        obs_now, keep_now = inputs
        memory, activations = lstm_step(gates, obs_now, memory.masked(keep_now))
        return memory, (memory, activations)

    _, (memories, activations) = lax.scan(step, start, (obs, keep))
    return memories.hidden, (gates, obs, keep, start, memories, activations)


def lstm_backward(residuals, d_hidden):
    """The gradient of the weights; observations and the start are data and need none."""
    gates, obs, keep, start, memories, activations = residuals
    before = Memory(*(jnp.concatenate((first[None], rest[:-1])) * keep for first, rest in zip(start, memories, strict=True)))
    back = gates.weight[OBS:].T

    def step(later, now):
        dh, keep_now, cell_before, squashed, i, f, g, o = now
        dh = dh + later.hidden
        dc = later.cell + dh * o * (1.0 - squashed * squashed)
        parts = dc * g * i * (1.0 - i), dc * cell_before * f * (1.0 - f), dc * i * (1.0 - g * g), dh * squashed * o * (1.0 - o)
        dz = jnp.concatenate(parts, -1)
        return Memory(dz @ back, dc * f).masked(keep_now), dz

    nothing = Memory(jnp.zeros_like(d_hidden[0]), jnp.zeros_like(d_hidden[0]))
    steps = (d_hidden, keep, before.cell, jnp.tanh(memories.cell), *activations)
    _, dz = lax.scan(step, nothing, steps, reverse=True)
    dz = dz.reshape(-1, dz.shape[-1])
    inputs = jnp.concatenate((obs, before.hidden), -1).reshape(len(dz), -1)
    return Layer(inputs.T @ dz, dz.sum(0)), None, None, None


def lstm_by_autodiff(gates: Layer, obs: Array, keep: Array, start: Memory) -> Array:
    """The hidden states alone, differentiated through the scan: how it is usually written."""
    return lstm_forward(gates, obs, keep, start)[0]


lstm_by_hand = jax.custom_vjp(lstm_by_autodiff)
lstm_by_hand.defvjp(lstm_forward, lstm_backward)


def head(layers: tuple[Layer, Layer], features: Array) -> Array:
    """From features ``[..., H]`` to one number each ``[...]``."""
    return layers[1](jnp.tanh(layers[0](features)))[..., 0]


def log_prob(mean: Array, log_std: Array, actions: Array) -> Array:
    """Log-density of a Gaussian."""
    return -0.5 * jnp.square((actions - mean) * jnp.exp(-log_std)) - log_std - LOG_SQRT_2PI


# -------------------------------------------------------------------------------------------------------------- market


class Market(NamedTuple):
    """The series that all environments share: features ``[N_BARS, N_FEATURES]`` and the return of the bar after."""

    features: Array
    next_return: Array


class Place(NamedTuple):
    """State of the environments, ``[B]`` each."""

    bar: Array
    age: Array
    position: Array


def work_market() -> Market:
    env = WorkEnv(1)
    return Market(jnp.asarray(env.features), jnp.asarray(env.next_return, jnp.float32))


def random_bars(key: Array, shape: tuple[int, ...]) -> Array:
    return jax.random.randint(key, shape, 0, N_BARS - EPISODE - 2)


def observe(market: Market, place: Place) -> Array:
    return jnp.concatenate((market.features[place.bar], place.position[:, None]), 1)


def env_step(market: Market, place: Place, actions: Array, fresh_bars: Array) -> tuple[Place, Place, Array, Array]:
    """The places after the step, the same before the reset of those that end, rewards and ends (all truncations)."""
    target = jnp.clip(actions, -1.0, 1.0)
    rewards = 100.0 * (target * market.next_return[place.bar] - COST * jnp.abs(target - place.position))
    final = Place(place.bar + 1, place.age + 1, target)
    ended = final.age >= EPISODE
    place = Place(jnp.where(ended, fresh_bars, final.bar), jnp.where(ended, 0, final.age), jnp.where(ended, 0.0, target))
    return place, final, rewards, ended


# ----------------------------------------------------------------------------------------------------------------- PPO


class Acting(NamedTuple):
    """State that one rollout hands to the next."""

    place: Place
    obs: Array
    memory: Memory
    keep: Array  # [B, 1], 0 where the observation begins an episode


class Steps(NamedTuple):
    """Data of an update, ``[T, B, ...]``."""

    obs: Array
    keep: Array
    actions: Array
    log_probs: Array
    values: Array
    advantages: Array


class Adam(NamedTuple):
    """Moments of the gradients, and the number of steps."""

    first: Weights
    second: Weights
    count: Array


def rollout(weights: Weights, market: Market, acting: Acting, key: Array, n_steps: int) -> tuple[Acting, Steps, Array]:
    """Play, then evaluate the critic on everything at once; also returns the rewards."""
    n_envs = len(acting.obs)
    noise_key, bars_key = jax.random.split(key)
    noise, bars = jax.random.normal(noise_key, (n_steps, n_envs)), random_bars(bars_key, (n_steps, n_envs))

    def step(now, chance):
        noise_now, fresh_bars = chance
        memory, _ = lstm_step(weights.gates, now.obs, now.memory.masked(now.keep))
        mean = head(weights.actor, memory.hidden)
        actions = mean + jnp.exp(weights.log_std) * noise_now
        place, final, rewards, ended = env_step(market, now.place, actions, fresh_bars)
        after = Acting(place, observe(market, place), memory, 1.0 - ended[:, None].astype(jnp.float32))
        return after, (now.obs, now.keep, actions, log_prob(mean, weights.log_std, actions), memory, final, rewards, ended)

    end, (obs, keep, actions, log_probs, memories, finals, rewards, ended) = lax.scan(step, acting, (noise, bars))
    values = head(weights.critic, memories.hidden)

    # An episode is no shorter than a rollout, so an environment has at most one final observation in it.
    row, env = jnp.argmax(ended, 0), jnp.arange(n_envs)
    final, final_memory = jax.tree.map(lambda array: array[row, env], (finals, memories))
    ends_obs = jnp.concatenate((observe(market, final), end.obs))
    ends_memory = jax.tree.map(lambda *parts: jnp.concatenate(parts), final_memory, end.memory.masked(end.keep))
    ends, _ = lstm_step(weights.gates, ends_obs, ends_memory)
    final_values, last_values = jnp.split(head(weights.critic, ends.hidden), 2)
    next_values = jnp.where(ended, final_values, jnp.concatenate((values[1:], last_values[None])))
    advantages = gae(rewards, values, next_values, ended)
    return end, Steps(obs, keep, actions, log_probs, values, advantages), rewards


def gae(rewards: Array, values: Array, next_values: Array, ended: Array) -> Array:
    """Advantages ``[T, B]``; `next_values` are those of the true next observations."""

    def step(carry, row):
        error, goes_on = row
        carry = error + GAMMA * LAMBDA * goes_on * carry
        return carry, carry

    errors = rewards + GAMMA * next_values - values
    return lax.scan(step, jnp.zeros_like(errors[0]), (errors, 1.0 - ended), reverse=True)[1]


def minibatch(steps: Steps, memory: Memory, envs: Array) -> tuple[Steps, Memory]:
    """Whole sequences of some environments, and their LSTM state before the first step."""
    return jax.tree.map(lambda array: array[:, envs], steps), jax.tree.map(lambda array: array[envs], memory)


def loss(weights: Weights, batch: Steps, start: Memory, lstm: Callable[..., Array]) -> Array:
    """PPO's clipped loss of whole sequences, with advantages standardised per minibatch, as in SB3.

    :param lstm: :func:`lstm_by_hand` or :func:`lstm_by_autodiff`.
    """
    features = lstm(weights.gates, batch.obs, batch.keep, start)
    mean, values = head(weights.actor, features), head(weights.critic, features)
    advantages = (batch.advantages - batch.advantages.mean()) / (batch.advantages.std() + 1e-8)
    ratio = jnp.exp(log_prob(mean, weights.log_std, batch.actions) - batch.log_probs)
    surrogate = jnp.minimum(ratio * advantages, jnp.clip(ratio, 1.0 - CLIP, 1.0 + CLIP) * advantages)
    returns = batch.values + batch.advantages
    return -surrogate.mean() + VF_COEF * jnp.square(values - returns).mean()


def adam_step(weights: Weights, adam: Adam, gradient: Weights) -> tuple[Weights, Adam]:
    norm = jnp.sqrt(sum(jnp.square(g).sum() for g in jax.tree.leaves(gradient)))
    scale = jnp.minimum(1.0, MAX_NORM / (norm + 1e-6))
    count = adam.count + 1
    first = jax.tree.map(lambda m, g: BETA1 * m + (1.0 - BETA1) * scale * g, adam.first, gradient)
    second = jax.tree.map(lambda v, g: BETA2 * v + (1.0 - BETA2) * jnp.square(scale * g), adam.second, gradient)
    rate, root = LEARNING_RATE / (1.0 - BETA1**count), jnp.sqrt(1.0 - BETA2**count)
    weights = jax.tree.map(lambda w, m, v: w - rate * m / (jnp.sqrt(v) / root + EPSILON), weights, first, second)
    return weights, Adam(first, second, count)


@partial(jax.jit, static_argnames=("n_steps", "lstm"), compiler_options=COMPILER_OPTIONS)
def iterate(weights, adam, market, acting, key, n_steps, lstm):
    """One rollout and one update."""
    key, rollout_key, shuffle_key = jax.random.split(key, 3)
    end, steps, rewards = rollout(weights, market, acting, rollout_key, n_steps)

    def update(carry, envs):
        weights, adam = carry
        value, gradient = jax.value_and_grad(loss)(weights, *minibatch(steps, acting.memory, envs), lstm)
        return adam_step(weights, adam, gradient), value

    orders = jax.vmap(lambda k: jax.random.permutation(k, len(acting.obs)))(jax.random.split(shuffle_key, EPOCHS))
    (weights, adam), losses = lax.scan(update, (weights, adam), orders.reshape(-1, SEQUENCES))
    return weights, adam, end, key, (rewards.mean(), losses.mean())


class JaxPPO:
    """The peer, driven like SB3's algorithms.

    :param n_envs: environments; a multiple of 8, the sequences of a minibatch.
    :param n_steps: steps of a rollout, at most the 512 of an episode.
    :param seed: of weights, market places, actions and shuffling.
    :param autodiff: let JAX differentiate the LSTM: slower, the same numbers.
    """

    def __init__(self, n_envs: int = 64, n_steps: int = 128, seed: int = 0, autodiff: bool = False) -> None:
        require(n_envs >= 1 and n_envs % SEQUENCES == 0, "n_envs", n_envs, f"a multiple of {SEQUENCES}")
        require(1 <= n_steps <= EPISODE, "n_steps", n_steps, f"in [1, {EPISODE}]")
        on_one_thread()
        self.n_envs, self.n_steps, self.num_timesteps = n_envs, n_steps, 0
        self.lstm = lstm_by_autodiff if autodiff else lstm_by_hand
        self.market = work_market()
        weights_key, self.key = jax.random.split(jax.random.key(seed))
        self.weights = initial_weights(weights_key)
        zeros = jax.tree.map(jnp.zeros_like, self.weights)
        self.adam = Adam(zeros, zeros, jnp.zeros((), jnp.int32))
        self.metrics = (jnp.nan, jnp.nan)  # mean reward and mean loss of the last rollout
        self._reset()

    def _reset(self) -> None:
        self.key, bars, ages = jax.random.split(self.key, 3)
        age = jax.random.randint(ages, (self.n_envs,), 0, EPISODE)
        place = Place(random_bars(bars, (self.n_envs,)), age, jnp.zeros(self.n_envs))
        zeros = jnp.zeros((self.n_envs, LSTM))
        self.acting = Acting(place, observe(self.market, place), Memory(zeros, zeros), jnp.zeros((self.n_envs, 1)))

    def learn(self, total_timesteps: int, reset_num_timesteps: bool = True) -> "JaxPPO":
        """Run whole rollouts, each with its update, until `total_timesteps` more steps are done."""
        if reset_num_timesteps:
            self.num_timesteps = 0
            self._reset()
        goal = self.num_timesteps + total_timesteps
        while self.num_timesteps < goal:
            self.weights, self.adam, self.acting, self.key, self.metrics = iterate(
                self.weights, self.adam, self.market, self.acting, self.key, self.n_steps, self.lstm
            )
            self.num_timesteps += self.n_envs * self.n_steps
        jax.block_until_ready(self.weights)
        return self
