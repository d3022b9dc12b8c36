"""The networks of a policy on its flat parameters: compiled passes whose gradient is written straight into the flat gradient.

They work in memory that is used again and again, since memory that is allocated anew costs as much as a pass over it; and
several networks share it, since what does not fit the cache costs more than the arithmetic. So a network has to be run
forwards and backwards before the next of its kind.
"""

import math
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tailguard.ppo.compiled import kernels as kernels
from tailguard.ppo.compiled.lstm import LstmBuffers, PackedWeights, WeightGradients, padded
from tailguard.ppo.networks import FlatParameters

Array = NDArray[np.float32]
ACTIVATIONS: dict[type[nn.Module], int] = {nn.Tanh: kernels.TANH, nn.ReLU: kernels.RELU}


class Memory:
    """Arrays by name, which grow as needed and are handed out again and again, whatever stands in them."""

    def __init__(self) -> None:
        self._held: dict[str, Tensor] = {}

    def tensor(self, name: str, *shape: int) -> Tensor:
        """Uninitialised, contiguous, and at a multiple of a cache line."""
        size, held = math.prod(shape), self._held.get(name)
        if held is None or held.numel() < size:
            held = self._held[name] = torch.empty(size)
        return held[:size].view(shape)

    def array(self, name: str, *shape: int) -> Array:
        """The same as an array."""
        return self.tensor(name, *shape).numpy()


def has_kernel(head: nn.Sequential) -> bool:
    """Whether :class:`CompiledMlp` can run this head: one activation of those it knows, between linear layers."""
    kinds = {type(module) for module in list(head)[1::2]}
    return len(kinds) <= 1 and kinds <= ACTIVATIONS.keys()


class CompiledMlp:
    """A feed-forward head.

    ``slopes`` of :meth:`backward` come from outside: whoever knows the loss fills :attr:`into_outputs`.

    :param flat: all parameters.
    :param name: of the head among them.
    :param head: linear layers with activations between them.
    :param memory: to work in, shared with other heads.
    """

    def __init__(self, flat: FlatParameters, name: str, head: nn.Sequential, memory: Memory) -> None:
        self._memory = memory
        self._flat, self._gradient = flat.tensor.detach().numpy(), flat.gradient.numpy()
        rows = []
        for k, layer in enumerate(list(head)[::2]):
            weight, bias = (flat.slices[f"{name}.{2 * k}.{part}"].start for part in ("weight", "bias"))
            rows.append((weight, bias, *reversed(cast(nn.Linear, layer).weight.shape)))
        self._table = np.array(rows)
        self._activation = ACTIVATIONS[type(head[1])] if len(head) > 1 else kernels.TANH
        self._rows = -1

    def _make_room(self, rows: int) -> None:
        sizes, n_in, n_out = [padded(rows * n) for n in self._table[:, 3]], self._table[0, 2], self._table[-1, 3]
        weights = padded(int((self._table[:, 2] * self._table[:, 3]).max()))
        self._values, self._slopes = (self._memory.array(name, sum(sizes)) for name in ("values", "slopes"))
        self._scratch = self._memory.array("scratch", weights + rows * int(n_in))
        last = slice(sum(sizes[:-1]), sum(sizes[:-1]) + rows * int(n_out))
        self.outputs: Array = self._values[last].reshape(rows, n_out)
        self.into_outputs: Array = self._slopes[last].reshape(rows, n_out)
        self._rows = rows

    def forward(self, inputs: Array) -> Array:
        """Outputs ``[M, n]`` for inputs ``[M, F]``, which must stay as they are until the backward pass."""
        if len(inputs) != self._rows:
            self._make_room(len(inputs))
        self._inputs = inputs
        kernels.mlp_forward(self._flat, self._table, self._activation, inputs, self._values, self._scratch)
        return self.outputs

    def backward(self, into_inputs: Array, add: bool = False) -> None:
        """From the gradient of the outputs, :attr:`into_outputs`, to that of the parameters.

        :param into_inputs: ``[M, F]``, where the gradient of the inputs goes; of no rows if nobody wants it.
        :param add: add it to what stands there.
        """
        given = self._flat, self._gradient, self._table, self._activation, self._inputs, self._values, self._slopes
        kernels.mlp_backward(*given, into_inputs, add, self._scratch)


def lstm_weights(numbers: Tensor, flat: FlatParameters, trunk: str, size: int) -> list[Tensor]:
    """Where the four parameters of a trunk's first layer stand in `numbers`, which are laid out as `flat`: views, in shape."""
    names = [f"{trunk}.lstm.{part}_l0" for part in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
    shapes = [(4 * size, -1), (4 * size, size), (4 * size,), (4 * size,)]
    return [numbers[flat.slices[name]].view(shape) for name, shape in zip(names, shapes, strict=True)]


class CompiledLstm:
    """One layer of memory.

    :param flat: all parameters.
    :param name: of the trunk among them.
    :param size: H.
    :param memory: to work in, shared with other trunks.
    """

    def __init__(self, flat: FlatParameters, name: str, size: int, memory: Memory) -> None:
        self._memory = memory
        self._weights = [one.numpy() for one in lstm_weights(flat.tensor.detach(), flat, name, size)]
        *self._into_weights, into_bias, into_other = lstm_weights(flat.gradient, flat, name, size)
        self._into_bias, self._into_other = into_bias.numpy(), into_other.numpy()
        self._size, self._n_inputs = size, self._weights[0].shape[1]
        self._shape: tuple[int, ...] = (-1, -1)

    def _make_room(self, rows: int, envs: int) -> None:
        take, size = self._memory, self._size
        named = zip(LstmBuffers._fields, LstmBuffers.shapes(rows, rows, envs, size), strict=True)
        buffers = LstmBuffers(*(take.tensor(name, *shape) for name, shape in named))
        self._gates, self._cells, self._hidden = (one.numpy() for one in buffers)
        packed = zip(PackedWeights._fields, PackedWeights.shapes(envs, self._n_inputs, size), strict=True)
        self._packed = PackedWeights(*(take.array(name, *shape) for name, shape in packed))
        scratch = take.tensor("both", *WeightGradients.scratch_shape(rows, envs, self._n_inputs, size))
        self._weight_gradients = WeightGradients(buffers, scratch)
        self._aligned = take.array("aligned", 4 * size, size)
        self._state_slopes = take.array("into_hidden", envs, size), take.array("into_cell", envs, size)
        self.into_features: Array = take.array("into_features", rows * envs, size)
        self._slopes = self.into_features.reshape(rows, envs, size)
        self._features: Array = self._hidden[1:].reshape(rows * envs, size)
        self._shape = rows, envs

    def forward(self, inputs: Array, resets: Array, hidden: Array, cell: Array) -> Array:
        """Features ``[L B, H]`` of L steps, see :func:`tailguard.ppo.compiled.lstm.lstm_layer`; `blanks` are ``[L, B]``."""
        if resets.shape != self._shape:
            self._make_room(*resets.shape)
        self._packed.fill(*self._weights)
        self._inputs, self._cells[0], self._hidden[0] = inputs, cell, hidden
        kernels.lstm_forward(inputs, resets, *self._packed, self._gates, self._cells, self._hidden)
        return self._features

    def backward(self) -> None:
        """From the gradient of the features, :attr:`into_features`, to that of the weights."""
        self._aligned[:] = self._weights[1]
        kernels.lstm_backward(self._slopes, self._aligned, self._gates, self._cells, *self._state_slopes, self._into_bias)
        self._into_other[:] = self._into_bias
        inputs = torch.from_numpy(self._inputs.reshape(-1, self._n_inputs))
        self._weight_gradients.fill(inputs, *self._into_weights)
