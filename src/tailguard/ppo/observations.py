"""Observations of any space as rows of numbers: how they are stored, and how SB3's feature extractors read them.

A row is one vector. A Box is flattened, integers count from 0, and the entries of a Dict stand side by side. So storage,
sequences and minibatches know one kind of observation, and only the encoder of a policy knows its space.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from stable_baselines3.common.preprocessing import is_image_space, maybe_transpose, preprocess_obs
from torch import Tensor

Observation = NDArray[Any] | Mapping[str, NDArray[Any]]
SUPPORTED = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)


class Part(NamedTuple):
    """A part of a row.

    :param key: the entry of a Dict; empty for a space that is no Dict.
    :param space: its space, with integers that count from 0.
    :param start: the smallest value of each integer in the environment; 0 for other numbers.
    :param columns: its place in a row.
    """

    key: str
    space: spaces.Space[Any]
    start: NDArray[Any] | int
    columns: slice


class ObservationRows:
    """The rows of a space.

    :param space: Box, Discrete, MultiDiscrete, MultiBinary, or a Dict of these.
    :param normalize_images: scale images to [0, 1] in :meth:`tensors`.
    :raises ValueError: for any other space.
    """

    def __init__(self, space: spaces.Space[Any], normalize_images: bool = True) -> None:
        self.space, self.normalize_images = space, normalize_images
        entries = dict(space.spaces) if isinstance(space, spaces.Dict) else {"": space}
        self.parts: list[Part] = []
        self.size = 0
        for key, entry in entries.items():
            if not isinstance(entry, SUPPORTED):
                raise ValueError(
                    f"observations must be Box, Discrete, MultiDiscrete, MultiBinary or a Dict of these, got {space}"
                )
            counted, start = _from_zero(entry)
            width = math.prod(entry.shape or ())
            self.parts.append(Part(key, counted, start, slice(self.size, self.size + width)))
            self.size += width
        # A quarter of the space for images. A plain row is what a network takes, which are no bytes.
        bytes_only = not self.plain and all(part.space.dtype == np.uint8 for part in self.parts)
        self.dtype = torch.uint8 if bytes_only else torch.float32

    @property
    def plain(self) -> bool:
        """True if a row is what a network can take as it is: the numbers of a Box that is no image."""
        return isinstance(self.space, spaces.Box) and not is_image_space(self.space)

    def rows(self, observations: Observation) -> NDArray[Any]:
        """Return ``[B, size]`` from the observations of B environments."""
        if isinstance(self.space, spaces.Box):
            array = np.asarray(observations)
            return array.reshape(len(array), self.size)
        parts = []
        for part in self.parts:
            values = np.asarray(observations[part.key] if isinstance(observations, Mapping) else observations)
            parts.append((values - part.start).reshape(len(values), -1))
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1).astype(np.float32)

    def batch(self, observation: Observation) -> tuple[NDArray[Any], bool]:
        """Return the rows of one observation or of a batch, and True if it was one.

        :raises ValueError: for an observation that does not fit the space.
        """
        if isinstance(observation, tuple) and len(observation) == 2 and isinstance(observation[1], dict):
            raise ValueError(
                "observation is a tuple of an observation and an info, as Gymnasium's reset returns them: pass in the first "
                "(obs, info = env.reset())"
            )
        if not isinstance(self.space, spaces.Dict):
            array, single = _batched(np.asarray(observation), self.space)
            return self.rows(array), single
        if not isinstance(observation, Mapping) or set(observation) != set(self.space.spaces):
            given = sorted(observation) if isinstance(observation, Mapping) else type(observation).__name__
            raise ValueError(f"observation must be a dict of {sorted(self.space.spaces)}, got {given}")
        entries = {key: _batched(np.asarray(observation[key]), space, key) for key, space in self.space.spaces.items()}
        return self.rows({key: array for key, (array, _) in entries.items()}), any(single for _, single in entries.values())

    def tensor_rows(self, observations: Tensor | Mapping[str, Tensor]) -> Tensor:
        """Return ``[B, size]`` from the tensors of B observations, as SB3's ``obs_to_tensor`` gives them, on the CPU."""
        parts = []
        for part in self.parts:
            values = observations[part.key] if isinstance(observations, Mapping) else observations
            values = values.cpu() - torch.as_tensor(part.start) if np.any(part.start) else values.cpu()
            parts.append(values.reshape(len(values), -1))
        return (parts[0] if len(parts) == 1 else torch.cat([part.float() for part in parts], dim=1)).to(self.dtype)

    def shaped(self, rows: Tensor) -> Tensor | dict[str, Tensor]:
        """Return rows ``[M, size]`` in the shapes of the space."""
        parts = {part.key: rows[:, part.columns].reshape(len(rows), *(part.space.shape or ())) for part in self.parts}
        return parts if isinstance(self.space, spaces.Dict) else parts[""]

    def tensors(self, rows: Tensor) -> Tensor | dict[str, Tensor]:
        """Return what SB3's feature extractors take, for rows ``[M, size]``: shaped, images scaled, integers one-hot."""
        shaped = self.shaped(rows)
        entries = {
            part.key: cast(
                Tensor,
                preprocess_obs(shaped[part.key] if isinstance(shaped, dict) else shaped, part.space, self.normalize_images),
            )
            for part in self.parts
        }
        return entries if isinstance(self.space, spaces.Dict) else entries[""]


def _from_zero(space: spaces.Space[Any]) -> tuple[spaces.Space[Any], NDArray[Any] | int]:
    """Return the space with integers that count from 0, and where they start in the environment."""
    if isinstance(space, spaces.Discrete):
        return spaces.Discrete(int(space.n)), int(space.start)
    if isinstance(space, spaces.MultiDiscrete):
        if space.nvec.ndim != 1:
            raise ValueError(f"observations of MultiDiscrete must have one dimension, got {space}")
        return spaces.MultiDiscrete(space.nvec), np.asarray(space.start)
    return space, 0


def _batched(array: NDArray[Any], space: spaces.Space[Any], key: str = "") -> tuple[NDArray[Any], bool]:
    """Return observations with a batch dimension, images with their channels first, and True if there was one only."""
    if is_image_space(space):
        array = maybe_transpose(array, space)
    shape = space.shape or ()
    single = array.shape == shape
    if not single and array.shape[1:] != shape:
        name = f"observation[{key!r}]" if key else "observation"
        raise ValueError(f"{name} must have the shape {shape} or (n, *{shape}), got {array.shape}")
    return (array[np.newaxis] if single else array), single
