"""Networks in compiled passes: an LSTM layer for torch's autograd, and the networks of a policy on its flat parameters.

The latter write their gradient straight into the flat gradient. They work in arrays that are used again and again, since an
array that is allocated anew costs as much as a pass over it; and several networks share them, since what does not fit the cache
costs more than the arithmetic. So a network has to be run forwards and backwards before the next of its kind.

``applies.py`` says which policies these passes cover.
"""

import math
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tailguard.optim.layout import FlatParameters
from tailguard.ppo.compiled import kernels
from tailguard.ppo.compiled.threads import Threads

Array = NDArray[np.float32]
ACTIVATION_CODES: dict[type[nn.Module], int] = {nn.Tanh: kernels.TANH, nn.ReLU: kernels.RELU}
# Rows of a head in a pass without a gradient: few enough for its layers to stay in the cache.
MANY = 512


class Workspace:
    """Named scratch arrays that grow as needed and are handed out again and again, with whatever they contain."""

    def __init__(self) -> None:
        self._held: dict[str, Tensor] = {}

    def tensor(self, name: str, *shape: int) -> Tensor:
        """Return an uninitialised contiguous tensor that begins at a multiple of a cache line."""
        size, held = math.prod(shape), self._held.get(name)
        if held is None or held.numel() < size:
            held = self._held[name] = torch.empty(size)
        return held[:size].view(shape)

    def array(self, name: str, *shape: int) -> Array:
        """Return the same as a NumPy array."""
        return self.tensor(name, *shape).numpy()


def padded(count: int) -> int:
    """Return the next multiple of a cache line of floats."""
    return -(-count // kernels.LINE) * kernels.LINE


def has_kernel(head: nn.Module) -> bool:
    """Return True if :class:`CompiledMlp` can run this head: linear layers with tanh or ReLU between them."""
    if not isinstance(head, nn.Sequential):
        return False
    kinds = {type(module) for module in list(head)[1::2]}
    return len(kinds) <= 1 and kinds <= ACTIVATION_CODES.keys()


# ---------------------------------------------------------------------------------------------- feed-forward heads


class CompiledMlp:
    """A feed-forward head.

    Whoever knows the loss fills :attr:`grad_outputs` before :meth:`backward`.

    :param flat: all parameters.
    :param name: of the head among them.
    :param head: linear layers with activations between them.
    :param workspace: shared with other heads.
    """

    def __init__(self, flat: FlatParameters, name: str, head: nn.Sequential, workspace: Workspace) -> None:
        self._workspace = workspace
        self._flat, self._gradient = flat.tensor.detach().numpy(), flat.gradient.numpy()
        rows = []
        for k, layer in enumerate(list(head)[::2]):
            weight, bias = (flat.slices[f"{name}.{2 * k}.{part}"].start for part in ("weight", "bias"))
            rows.append((weight, bias, *reversed(cast(nn.Linear, layer).weight.shape)))
        self._table = np.array(rows)
        self._activation = ACTIVATION_CODES[type(head[1])] if len(head) > 1 else kernels.TANH
        self._rows = -1

    def _allocate(self, rows: int) -> None:
        table, take = self._table.tolist(), self._workspace
        sizes, n_out = [padded(rows * layer[3]) for layer in table], table[-1][3]
        self._values, self._grad_values = (take.array(name, sum(sizes)) for name in ("values", "grad_values"))
        self._packed = take.array("packed", sum(math.prod(kernels.packed_shape(n, m)) for _, _, n, m in table))
        self._scratch = take.array("scratch", max(math.prod(kernels.packed_shape(m, n)) for _, _, n, m in table))
        last = slice(sum(sizes[:-1]), sum(sizes[:-1]) + rows * n_out)
        self.outputs: Array = self._values[last].reshape(rows, n_out)
        self.grad_outputs: Array = self._grad_values[last].reshape(rows, n_out)
        self._rows = rows

    def forward(self, inputs: Array) -> Array:
        """Return outputs ``[M, n]`` for inputs ``[M, F]``, which must not change until the backward pass."""
        self.pack(len(inputs))
        return self.forward_packed(inputs)

    def pack(self, rows: int) -> None:
        """Lay out the weights as they are now for the kernel, and provide for so many rows."""
        if rows != self._rows:
            self._allocate(rows)
        kernels.pack_mlp(self._flat, self._table, self._packed)

    def forward_packed(self, inputs: Array) -> Array:
        """Run :meth:`forward` with the weights of the last :meth:`pack`."""
        self._inputs = inputs
        parameters = self._flat, self._table, self._activation, self._packed
        kernels.mlp_forward(*parameters, inputs, self._values)
        return self.outputs

    def input_gradient(self, grad_inputs: Array, add: bool = False) -> None:
        """Compute the gradients of all layers' outputs and of the inputs, given :attr:`grad_outputs`.

        :param grad_inputs: ``[M, F]``, filled with the gradient of the inputs; of no rows where it is not needed.
        :param add: add to `grad_inputs` instead of overwriting it.
        """
        passed = self._inputs, self._values, self._grad_values
        kernels.mlp_backward(self._flat, self._table, self._activation, *passed, grad_inputs, add, self._scratch)

    def backward(self, grad_inputs: Array, add: bool = False) -> None:
        """Run :meth:`input_gradient`, and write the gradient of the parameters into the flat gradient."""
        self.input_gradient(grad_inputs, add)
        passed = self._inputs, self._values, self._grad_values
        kernels.mlp_weight_gradients(self._table, *passed, self._gradient)


def head_outputs(head: nn.Sequential, inputs: Tensor) -> Tensor:
    """Return the outputs ``[..., n]`` of a head for inputs ``[..., F]``, without a gradient.

    :param head: for which :func:`has_kernel`, in float32 on the CPU like the inputs.
    """
    layers = [cast(nn.Linear, layer) for layer in list(head)[::2]]
    parts = [part.detach().reshape(-1) for layer in layers for part in (layer.weight, layer.bias)]
    starts = np.cumsum([0, *(len(part) for part in parts)])
    table = np.array([(starts[2 * k], starts[2 * k + 1], *reversed(layer.weight.shape)) for k, layer in enumerate(layers)])
    flat, activation = torch.cat(parts).numpy(), ACTIVATION_CODES[type(head[1])] if len(head) > 1 else kernels.TANH
    packed = torch.empty(sum(math.prod(kernels.packed_shape(n, m)) for _, _, n, m in table.tolist())).numpy()
    kernels.pack_mlp(flat, table, packed)
    x = inputs.detach().reshape(-1, inputs.shape[-1]).contiguous().numpy()
    outputs = torch.empty(len(x), layers[-1].out_features)
    values = torch.empty(sum(padded(MANY * layer.out_features) for layer in layers)).numpy()
    for first in range(0, len(x), MANY):
        rows = x[first : first + MANY]
        before = sum(padded(len(rows) * layer.out_features) for layer in layers[:-1])
        kernels.mlp_forward(flat, table, activation, packed, rows, values)
        outputs[first : first + MANY].view(-1).numpy()[:] = values[before : before + len(rows) * layers[-1].out_features]
    return outputs.view(*inputs.shape[:-1], -1)


# ------------------------------------------------------------------------------------------------------------ LSTM


class LstmBuffers(NamedTuple):
    """Arrays that the kernel fills in L steps of B environments.

    :param gates: ``[L, B, 4, H]``; after the backward pass the gradient of their pre-activations. Fewer rows than L where no
        gradient is needed.
    :param cells: ``[L + 1, B, H]``, cell states before the first step and after each.
    :param hidden: ``[L + 1, B, H]``, hidden states likewise.
    """

    gates: Tensor
    cells: Tensor
    hidden: Tensor

    @staticmethod
    def shapes(rows: int, kept: int, envs: int, size: int) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of the arrays, with `kept` rows of gates."""
        return (kept, envs, 4, size), (rows + 1, envs, size), (rows + 1, envs, size)


class PackedWeights(NamedTuple):
    """Weights in the layout of the kernel.

    :param inward: those of the inputs, packed.
    :param recurrent: those of the hidden state, packed.
    :param bias: ``[4 H]``.
    """

    inward: Array
    recurrent: Array
    bias: Array

    @staticmethod
    def shapes(n_inputs: int, size: int) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of the arrays."""
        return kernels.packed_shape(n_inputs, 4 * size), kernels.packed_shape(size, 4 * size), (4 * size,)

    def fill(self, w_input: Array, w_hidden: Array, b_input: Array, b_hidden: Array) -> None:
        """Copy the weights from the layout of ``nn.LSTM``."""
        kernels.pack_lstm(w_input, w_hidden, b_input, b_hidden, self.inward, self.recurrent, self.bias)


def lstm_weights(numbers: Tensor, flat: FlatParameters, trunk: str, size: int) -> list[Tensor]:
    """Return the four parameters of a trunk's first layer as shaped views of `numbers`, which are laid out as `flat`."""
    names = [f"{trunk}.lstm.{part}_l0" for part in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
    shapes = [(4 * size, -1), (4 * size, size), (4 * size,), (4 * size,)]
    return [numbers[flat.slices[name]].view(shape) for name, shape in zip(names, shapes, strict=True)]


class CompiledLstm:
    """One LSTM layer.

    Whoever knows the loss fills :attr:`grad_features` before :meth:`backward`.

    :param flat: all parameters.
    :param name: of the trunk among them.
    :param size: of the hidden state, H.
    :param workspace: shared with other trunks.
    :param threads: to divide the work among.
    """

    def __init__(
        self, flat: FlatParameters, name: str, size: int, workspace: Workspace, threads: Threads | None = None
    ) -> None:
        self._workspace, self._threads = workspace, threads or Threads(1)
        self._weights = [weight.numpy() for weight in lstm_weights(flat.tensor.detach(), flat, name, size)]
        self._grad_weights = [gradient.numpy() for gradient in lstm_weights(flat.gradient, flat, name, size)]
        self._size, self._n_inputs = size, self._weights[0].shape[1]
        self._shape: tuple[int, ...] = (-1, -1)

    def _allocate(self, rows: int, envs: int) -> None:
        take, size = self._workspace, self._size
        named = zip(LstmBuffers._fields, LstmBuffers.shapes(rows, rows, envs, size), strict=True)
        self._gates, self._cells, self._hidden = (take.array(name, *shape) for name, shape in named)
        packed = zip(PackedWeights._fields, PackedWeights.shapes(self._n_inputs, size), strict=True)
        self._packed = PackedWeights(*(take.array(name, *shape) for name, shape in packed))
        self._packed_hidden = take.array("packed hidden", *kernels.packed_shape(4 * size, size))
        self._grad_state = take.array("grad_hidden", envs, size), take.array("grad_cell", envs, size)
        self.grad_features: Array = take.array("grad_features", rows * envs, size)
        self._grad_output = self.grad_features.reshape(rows, envs, size)
        self._grad_gates: Array = self._gates.reshape(rows * envs, 4 * size)
        self._before: Array = self._hidden[:-1].reshape(rows * envs, size)
        self._features: Array = self._hidden[1:].reshape(rows * envs, size)
        self._shape = rows, envs

    def forward(self, inputs: Array, resets: Array, hidden: Array, cell: Array) -> Array:
        """Return the features ``[L B, H]`` of L steps, as :func:`lstm_layer` does; `resets` are ``[L, B]``."""
        if resets.shape != self._shape:
            self._allocate(*resets.shape)
        self._packed.fill(*self._weights)
        self._inputs, self._resets, self._cells[0], self._hidden[0] = inputs, resets, cell, hidden
        passed, buffers = (inputs, resets, *self._packed), (self._gates, self._cells, self._hidden)
        self._threads.split(self._shape[1], lambda first, last: kernels.lstm_forward(*passed, first, last, *buffers))
        return self._features

    def _backward_to_gates(self) -> None:
        """Replace the gates by the gradient of their pre-activations, given :attr:`grad_features`."""
        kernels.pack(self._weights[1], self._packed_hidden)
        given, buffers = (self._grad_output, self._resets, self._packed_hidden), (self._gates, self._cells, *self._grad_state)
        self._threads.split(self._shape[1], lambda first, last: kernels.lstm_backward(*given, first, last, *buffers))

    def backward(self) -> None:
        """Write the gradient of the weights into the flat gradient, given :attr:`grad_features`."""
        self._backward_to_gates()
        given, grads = (self._grad_gates, self._inputs.reshape(-1, self._n_inputs), self._before), self._grad_weights
        self._threads.split(4 * self._size, lambda first, last: kernels.lstm_weight_gradients(*given, first, last, *grads))

    def input_gradient(self, grad_inputs: Array) -> None:
        """Fill the gradient of the inputs ``[L B, D]`` alone, given :attr:`grad_features`."""
        self._backward_to_gates()
        packed = self._workspace.array("packed input", *kernels.packed_shape(4 * self._size, self._n_inputs))
        kernels.product(self._grad_gates, self._weights[0], packed, grad_inputs)


def lstm_layer(inputs: Tensor, resets: Tensor, hidden: Tensor, cell: Tensor, weights: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Run L steps of one layer as a function that torch's autograd can differentiate.

    Everything but float32 on the CPU is left to ``torch.lstm`` (networks.py), against which this is tested.

    :param inputs: ``[L, B, D]``, float32 on the CPU.
    :param resets: ``[L, B, 1]``, 1 where the state is reset.
    :param hidden: ``[B, H]`` before the first step.
    :param cell: ``[B, H]`` before the first step.
    :param weights: of input and hidden state, ``[4 H, D]`` and ``[4 H, H]``, and the two biases, as ``nn.LSTM`` orders them.
    :return: hidden and cell states after each step, ``[L, B, H]``; gradients flow through the hidden ones.
    """
    return cast(tuple[Tensor, Tensor], _Layer.apply(inputs, resets, hidden, cell, *weights))  # type: ignore[no-untyped-call]


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        resets: Tensor,
        hidden: Tensor,
        cell: Tensor,
        w_input: Tensor,
        w_hidden: Tensor,
        b_input: Tensor,
        b_hidden: Tensor,
    ) -> tuple[Tensor, Tensor]:
        (rows, envs, n_inputs), size = inputs.shape, w_hidden.shape[1]
        needs_grad, x = any(ctx.needs_input_grad), inputs.contiguous()
        shapes = LstmBuffers.shapes(rows, rows if needs_grad else 1, envs, size)
        buffers = LstmBuffers(*map(torch.empty, shapes))
        packed = PackedWeights(*_arrays(*map(torch.empty, PackedWeights.shapes(n_inputs, size))))
        packed.fill(*_arrays(*(weight.contiguous() for weight in (w_input, w_hidden, b_input, b_hidden))))
        buffers.cells[0], buffers.hidden[0] = cell, hidden
        resets = resets.reshape(rows, envs).contiguous()
        sequences = _arrays(x, resets)
        kernels.lstm_forward(*sequences, *packed, 0, envs, *_arrays(*buffers))  # type: ignore[call-arg]  # mypy cannot count them
        ctx.save_for_backward(w_input, w_hidden, x, resets, *(buffers if needs_grad else ()))
        after = buffers.hidden[1:], buffers.cells[1:]
        ctx.mark_non_differentiable(after[1])
        ctx.spent = False
        return after

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_output: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        w_input, w_hidden, x, resets, *saved = ctx.saved_tensors
        if ctx.spent:
            raise RuntimeError("the gradient of this sequence has been taken already; run it forward again to take another")
        ctx.spent = True  # the gates are overwritten
        buffers, size, (rows, envs, n_inputs) = LstmBuffers(*saved), w_hidden.shape[1], x.shape
        grad_state = torch.empty(2, envs, size).unbind()
        packed = torch.empty(kernels.packed_shape(4 * size, size))
        kernels.pack(*_arrays(w_hidden.contiguous(), packed))
        outer = _arrays(grad_output.contiguous(), resets, packed)
        passed = _arrays(buffers.gates, buffers.cells, *grad_state)
        kernels.lstm_backward(*outer, 0, envs, *passed)  # type: ignore[call-arg]  # mypy cannot count them
        grad_gates, grad_inputs = buffers.gates.view(rows * envs, 4 * size), None
        if ctx.needs_input_grad[0]:
            grad_inputs, packed = torch.empty(rows * envs, n_inputs), torch.empty(kernels.packed_shape(4 * size, n_inputs))
            kernels.product(*_arrays(grad_gates, w_input.contiguous(), packed, grad_inputs))
            grad_inputs = grad_inputs.view(x.shape)
        if not any(ctx.needs_input_grad[4:]):  # an adversary perturbs inputs and needs no other gradient
            return grad_inputs, None, *grad_state, None, None, None, None
        grads = [torch.empty(shape) for shape in (w_input.shape, w_hidden.shape, 4 * size, 4 * size)]
        before = buffers.hidden[:-1].view(rows * envs, size)
        samples = _arrays(grad_gates, x.view(rows * envs, n_inputs), before)
        kernels.lstm_weight_gradients(*samples, 0, 4 * size, *_arrays(*grads))  # type: ignore[call-arg]  # mypy cannot count them
        return grad_inputs, None, *grad_state, *grads


def _arrays(*tensors: Tensor) -> Any:
    return (tensor.detach().numpy() for tensor in tensors)
