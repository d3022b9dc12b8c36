"""The networks of a policy on its flat parameters: compiled passes whose gradient is written straight into the flat gradient.

Each keeps the memory that it works in, since memory that is allocated anew costs as much as a pass over it.
"""

from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tailguard.ppo import fused_kernels as kernels
from tailguard.ppo.lstm_kernel import LstmBuffers, padded, weight_gradients
from tailguard.ppo.networks import FlatParameters

Array = NDArray[np.float32]
ACTIVATIONS: dict[type[nn.Module], int] = {nn.Tanh: kernels.TANH, nn.ReLU: kernels.RELU}


def has_kernel(head: nn.Sequential) -> bool:
    """Whether :class:`FusedMlp` can run this head: one activation of those it knows, between linear layers."""
    return len({type(module) for module in head[1::2]}) <= 1 and all(type(module) in ACTIVATIONS for module in head[1::2])


class FusedMlp:
    """A feed-forward head.

    ``slopes`` of :meth:`backward` come from outside: whoever knows the loss fills :attr:`into_outputs`.

    :param flat: all parameters.
    :param name: of the head among them.
    :param head: linear layers with activations between them.
    """

    def __init__(self, flat: FlatParameters, name: str, head: nn.Sequential) -> None:
        self._flat, self._gradient = flat.tensor.detach().numpy(), flat.gradient.numpy()
        layers = [cast(nn.Linear, module) for module in head[::2]]
        self._table = np.array(
            [
                (flat.slices[f"{name}.{2 * k}.weight"].start, flat.slices[f"{name}.{2 * k}.bias"].start, *one.weight.shape[::-1])
                for k, one in enumerate(layers)
            ]
        )
        self._activation = ACTIVATIONS[type(head[1])] if len(head) > 1 else kernels.TANH
        self._rows = -1

    def _make_room(self, rows: int) -> None:
        sizes, n_in, n_out = [padded(rows * n) for n in self._table[:, 3]], self._table[0, 2], self._table[-1, 3]
        weights = padded(int((self._table[:, 2] * self._table[:, 3]).max()))
        self._values, self._slopes = torch.empty(sum(sizes)).numpy(), torch.empty(sum(sizes)).numpy()
        self._scratch = torch.empty(weights + rows * int(n_in)).numpy()
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


class FusedLstm:
    """One layer of memory.

    :param flat: all parameters.
    :param name: of the trunk among them.
    :param size: H.
    """

    def __init__(self, flat: FlatParameters, name: str, size: int) -> None:
        self._weights = [one.numpy() for one in lstm_weights(flat.tensor.detach(), flat, name, size)]
        self._into = lstm_weights(flat.gradient, flat, name, size)
        self._size, self._n_inputs = size, self._weights[0].shape[1]
        self._aligned = torch.empty(4, size, size)
        self._shape = (-1, -1)

    def _make_room(self, rows: int, envs: int) -> None:
        self._buffers = LstmBuffers.empty(rows, rows, envs, self._n_inputs, self._size)
        packed = torch.empty(4, self._buffers.z.shape[-1], self._size), torch.empty(4, envs, self._size)
        self._packed = [one.numpy() for one in packed]
        self._arrays = [one.numpy() for one in self._buffers]
        self._state_slopes = [torch.empty(4, envs, self._size).numpy(), torch.empty(envs, self._size).numpy()]
        self._both = torch.empty(4, self._size, self._buffers.z.shape[-1])
        self.into_features: Array = torch.empty(rows * envs, self._size).numpy()
        self._shape = (rows, envs)

    def forward(self, inputs: Tensor, blanks: Tensor, hidden: Tensor, cell: Tensor) -> Array:
        """Features ``[L B, H]`` of L steps, see :func:`tailguard.ppo.lstm_kernel.lstm_layer`."""
        rows, envs = inputs.shape[:2]
        if (rows, envs) != self._shape:
            self._make_room(rows, envs)
        kernels.pack_lstm(*self._weights, *self._packed)
        self._start: NDArray[Any] = cell.contiguous().numpy()
        given = inputs.numpy(), blanks.reshape(rows, envs).numpy(), hidden.contiguous().numpy(), self._start
        kernels.lstm_forward(*given, *self._packed, *self._arrays)
        return self._arrays[-1].reshape(rows * envs, self._size)

    def backward(self) -> None:
        """From the gradient of the features, :attr:`into_features`, to that of the weights."""
        _, gates, cells, squashed, hidden = self._arrays
        self._aligned.numpy()[:] = self._weights[1].reshape(self._aligned.shape)
        slopes = self.into_features.reshape(hidden.shape)
        kernels.lstm_backward(slopes, self._start, self._aligned.numpy(), gates, cells, squashed, *self._state_slopes)
        weight_gradients(self._buffers.gates, self._buffers.z, self._both, self._into)
