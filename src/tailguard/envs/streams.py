"""Batched environments in which every copy has a random stream of its own.

Copy i of a batch with seed s draws what a batch of one with seed s + i draws, so that a copy behaves the same alone and in a
batch, bit for bit. A stream is one 64-bit integer: SplitMix64 (Steele, Lea and Flood 2014) adds a constant to it and hashes it.
"""

import math
from typing import Any, ClassVar

import numpy as np
from gymnasium import Space
from numpy.typing import NDArray

from tailguard.envs.batched import BatchedEnv
from tailguard.jit import decorators

compiled, inlined = decorators()

SEED_SPACING = 10_000  # between seeds of batches that are to share no stream: neighbouring seeds share all but one
GAMMA = np.uint64(0x9E3779B97F4A7C15)  # the step of a stream, odd, so that it takes every value once


class StreamedEnv(BatchedEnv):
    """A batch in which each copy has a random stream; a subclass names its own state in ``state_arrays``, after the streams.

    :param num_envs: the number of copies.
    :param single_observation_space: the observation space of one copy.
    :param single_action_space: the action space of one copy.
    :param seed: seed of the first copy, the others count on from it; ``None`` takes it from the operating system.
    """

    state_arrays: ClassVar[tuple[str, ...]] = ("_streams",)

    def __init__(
        self, num_envs: int, single_observation_space: Space[Any], single_action_space: Space[Any], seed: int | None
    ) -> None:
        """Seed the streams."""
        super().__init__(num_envs, single_observation_space, single_action_space, seed)
        self._seed_streams(int(np.random.SeedSequence().generate_state(1)[0]) if seed is None else seed)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Start a new episode in every copy.

        :param seed: seed of the first copy, the others count on from it; ``None`` continues the streams.
        :param options: there are none; a non-empty dictionary is refused rather than ignored.
        """
        if seed is not None:
            self._seed_streams(seed)
        return super().reset(seed=seed, options=options)

    def _seed_streams(self, seed: int) -> None:
        seeds = np.array([(seed + copy) % 2**64 for copy in range(self.num_envs)], dtype=np.uint64)
        self._streams = np.empty_like(seeds)
        hash_seeds(seeds, self._streams)

    def _draws(self, count: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return a standard normal number of every copy ``[num_envs]``, and `count` in (0, 1) ``[num_envs, count]``."""
        normals, uniforms = np.empty(self.num_envs), np.empty((self.num_envs, count))
        fill_normals(self._streams, normals, uniforms)
        return normals, uniforms

    def _uniforms_of(self, rows: NDArray[np.bool_], count: int) -> NDArray[np.float64]:
        """Return `count` numbers in (0, 1) of the K copies in `rows`, ``[K, count]``; the other streams stand still."""
        streams, draws = self._streams[rows], np.empty((int(rows.sum()), count))
        fill_uniforms(streams, draws)
        self._streams[rows] = streams
        return draws


@inlined
def _hash(value: np.uint64) -> np.uint64:
    """Return the hash of SplitMix64, a bijection whose outputs pass tests of randomness."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


@compiled
def hash_seeds(seeds: NDArray[np.uint64], streams: NDArray[np.uint64]) -> None:
    """Fill `streams` ``[B]`` with the starts that belong to `seeds` ``[B]``: far from each other for neighbouring seeds."""
    for copy in range(len(seeds)):
        streams[copy] = _hash(_hash(seeds[copy] + GAMMA))


@inlined
def _uniform(stream: np.uint64) -> float:
    """Return the number in (0, 1), never 0 or 1, at this place of a stream."""
    return (float(_hash(stream) >> np.uint64(12)) + 0.5) * 2.0**-52


@compiled
def fill_uniforms(streams: NDArray[np.uint64], uniforms: NDArray[np.float64]) -> None:
    """Fill `uniforms` ``[B, n]`` with numbers in (0, 1), and move the streams ``[B]`` on."""
    for copy in range(len(streams)):
        for number in range(uniforms.shape[1]):
            streams[copy] += GAMMA
            uniforms[copy, number] = _uniform(streams[copy])


@compiled
def fill_normals(streams: NDArray[np.uint64], normals: NDArray[np.float64], uniforms: NDArray[np.float64]) -> None:
    """Fill `normals` ``[B]`` (Box and Muller 1958) and `uniforms` ``[B, n]``, and move the streams ``[B]`` on."""
    for copy in range(len(streams)):
        radius = math.sqrt(-2.0 * math.log(_uniform(streams[copy] + GAMMA)))
        streams[copy] += GAMMA + GAMMA
        normals[copy] = radius * math.cos(2.0 * math.pi * _uniform(streams[copy]))
        for number in range(uniforms.shape[1]):
            streams[copy] += GAMMA
            uniforms[copy, number] = _uniform(streams[copy])
