"""The networks of a policy: feed-forward heads, and LSTM or GRU trunks with resets that are exact in acting and in training.

Acting, the state of a finished environment is multiplied by 0. Training runs torch's fused LSTM over a dense ``[L, B]`` block,
which knows no resets; so a *reset step* is inserted between episodes: a step whose extra input channel drives the input, forget
and output gates to sigmoid(-10^4), which is 0 in floating point. It leaves c = 0 and h = 0 exactly and passes no gradient back,
whatever came before. One reset step per episode is all that resets cost: no splitting, no padding to the longest episode, no
loop over time. The compiled kernel (compiled/kernels.py) reads the same reset steps as flags.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import dropout
from typing_extensions import override

from tailguard.ppo.compiled.networks import lstm_layer
from tailguard.ppo.config import LayersConfig, NetworkConfig

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "leaky_relu": nn.LeakyReLU,
    "elu": nn.ELU,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "sigmoid": nn.Sigmoid,
}
# Added to the three gates at a reset step; no finite activation of a trained network comes near it.
SHUT = -1e4

State = tuple[Tensor, Tensor]


def network_kwargs(config: NetworkConfig) -> dict[str, Any]:
    """Return the settings as the ``policy_kwargs`` of :class:`DistributionalPolicy`."""
    kwargs = config.model_dump(exclude={"net_arch", "activation_fn"})
    layers = config.net_arch
    if isinstance(layers, LayersConfig):
        kwargs["net_arch"] = {"pi": list(layers.pi), "vf": list(layers.vf)}
    else:
        kwargs["net_arch"] = None if layers is None else list(layers)
    return kwargs | {"activation_fn": ACTIVATIONS[config.activation_fn]}


def mlp(sizes: Sequence[int], activation: type[nn.Module], output_gain: float, orthogonal: bool = True) -> nn.Sequential:
    """Return a feed-forward network.

    :param sizes: input, hidden and output sizes.
    :param activation: the activation between layers.
    :param output_gain: gain of the orthogonal initialisation of the last layer.
    :param orthogonal: initialise orthogonally (the usual choice for PPO) and not as PyTorch does.
    """
    layers: list[nn.Module] = []
    for layer, (fan_in, fan_out) in enumerate(pairwise(sizes)):
        last = layer == len(sizes) - 2
        linear = nn.Linear(fan_in, fan_out)
        if orthogonal:
            nn.init.orthogonal_(linear.weight, output_gain if last else math.sqrt(2.0))
            nn.init.zeros_(linear.bias)
        layers += [linear] if last else [linear, activation()]
    return nn.Sequential(*layers)


class RecurrentTrunk(nn.Module, ABC):
    """A stack of recurrent layers, run by torch; a subclass has the cell.

    The state of a layer is a hidden and a cell state. Cells that have no cell state of their own carry zeros.

    :param layers: the parameters, under torch's usual names; the layers are run one by one, since each needs the reset steps.
    :param dropout: share of a layer's outputs that the next layer does not see in training.
    """

    def __init__(self, layers: nn.RNNBase, dropout: float) -> None:
        super().__init__()
        self.hidden_size, self.n_layers, self.dropout = layers.hidden_size, layers.num_layers, dropout
        self.add_module(layers.mode.lower(), layers)
        parts = "weight_ih", "weight_hh", "bias_ih", "bias_hh"
        self._names = [[f"{part}_l{layer}" for part in parts] for layer in range(self.n_layers)]

    @abstractmethod
    def _cell(self, inputs: Tensor, state: State, weights: list[Tensor]) -> State:
        """Return the state of one layer after one step, ``[B, H]`` twice; its output is the hidden state."""

    @abstractmethod
    def _layer(self, inputs: Tensor, resets: Tensor, state: State, weights: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return the outputs of one layer over L steps, ``[L, B, H]``, and its state after them, ``[1, B, H]`` twice."""

    def initial_state(self, batch: int) -> State:
        """Return the state before the first step, zeros ``([n_layers, B, H], [n_layers, B, H])``."""
        zeros = self._weights(0)[0].new_zeros(self.n_layers, batch, self.hidden_size)
        return zeros, zeros.clone()

    def step(self, inputs: Tensor, state: State) -> tuple[Tensor, State]:
        """Run one time step of B environments; the caller has reset the states of those that begin an episode.

        :param inputs: ``[B, D]``.
        :param state: hidden and cell states, ``[n_layers, B, H]`` each.
        """
        if self.n_layers == 1:  # the path of acting, kept short
            inputs, cell = self._cell(inputs, (state[0][0], state[1][0]), self._weights(0))
            return inputs, (inputs.unsqueeze(0), cell.unsqueeze(0))
        hidden, cells = [], []
        for layer, before in enumerate(zip(*state, strict=True)):
            inputs, cell = self._cell(inputs, before, self._weights(layer))
            hidden.append(inputs)
            cells.append(cell)
        return inputs, (torch.stack(hidden), torch.stack(cells))

    def sequence(self, inputs: Tensor, resets: Tensor, state: State) -> Tensor:
        """Run L time steps of B environments at once.

        :param inputs: ``[L, B, D]``; those of reset steps are ignored.
        :param resets: ``[L, B, 1]``, 1 at reset steps, 0 elsewhere.
        :param state: the state before the first step.
        :returns: outputs of the last layer, ``[L, B, H]``; 0 at reset steps.
        """
        return self._fused(inputs, resets, state)[0]

    def sequence_and_states(self, inputs: Tensor, resets: Tensor, state: State, rows: Tensor) -> tuple[Tensor, State]:
        """Run :meth:`sequence`, and return also the state of environment b after row ``rows[b]``.

        Torch's fused call returns the state after its last row only. It is stopped at the first row of `rows`, and the few rows
        up to the last one are run step by step.

        :param rows: ``[B]``.
        """
        first, last = int(rows.min()), int(rows.max())
        outputs, state = self._fused(inputs[: first + 1], resets[: first + 1], state)
        parts = [outputs]
        after = tuple(part.clone() for part in state)
        for row in range(first + 1, last + 1):
            keep = 1.0 - resets[row]
            output, state = self.step(inputs[row], state)
            state = (state[0] * keep, state[1] * keep)
            parts.append((output * keep).unsqueeze(0))
            here = (rows == row).reshape(1, -1, 1).to(inputs.device)
            after = tuple(torch.where(here, new, old) for new, old in zip(state, after, strict=True))
        if last + 1 < len(inputs):
            parts.append(self._fused(inputs[last + 1 :], resets[last + 1 :], state)[0])
        return torch.cat(parts), (after[0], after[1])

    def states_before(self, inputs: Tensor, resets: Tensor, state: State) -> State:
        """Return the state before every row, ``[n_layers, L * B, H]`` twice: each row as the start of its own sequence."""
        before = []
        for row, reset in zip(inputs, resets, strict=True):
            before.append(state)
            state = self.step(row, state)[1]
            state = (state[0] * (1.0 - reset), state[1] * (1.0 - reset))
        hidden_rows, cell_rows = (torch.stack(part, dim=1).flatten(1, 2) for part in zip(*before, strict=True))
        return hidden_rows, cell_rows

    def _fused(self, inputs: Tensor, resets: Tensor, state: State) -> tuple[Tensor, State]:
        hidden, cells = [], []
        for layer in range(self.n_layers):
            start = (state[0][layer : layer + 1].contiguous(), state[1][layer : layer + 1].contiguous())
            inputs, last_hidden, last_cell = self._layer(self._dropped(inputs, layer), resets, start, self._weights(layer))
            hidden.append(last_hidden)
            cells.append(last_cell)
        return inputs, (torch.cat(hidden), torch.cat(cells))

    def _dropped(self, inputs: Tensor, layer: int) -> Tensor:
        """Return the inputs of a layer; in training, without some of the outputs of the layer below."""
        return dropout(inputs, self.dropout) if layer and self.dropout and self.training else inputs

    def _weights(self, layer: int) -> list[Tensor]:
        (layers,) = self.children()
        return [getattr(layers, name) for name in self._names[layer]]


class LstmTrunk(RecurrentTrunk):
    """A stack of LSTM layers.

    :param input_size: number of inputs, D.
    :param hidden_size: size of the hidden state of a layer, H.
    :param n_layers: number of layers.
    :param compiled: use the compiled kernel for float32 on the CPU instead of torch's LSTM.
    :param forget_bias: added to the forget gates at initialisation: about sigmoid(forget_bias) of a cell state survives a step.
    :param dropout: share of a layer's outputs that the next layer does not see in training.
    """

    shut: Tensor

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        n_layers: int = 1,
        compiled: bool = True,
        forget_bias: float = 0.0,
        dropout: float = 0.0,
    ) -> None:
        super().__init__(nn.LSTM(input_size, hidden_size, n_layers), dropout)
        self.compiled = compiled
        forget = slice(hidden_size, 2 * hidden_size)
        with torch.no_grad():
            for layer in range(n_layers):
                self._weights(layer)[2][forget] += forget_bias
        shut = torch.full((4 * hidden_size, 1), SHUT)
        shut[2 * hidden_size : 3 * hidden_size] = 0.0  # the candidate g does not matter once its gate is closed
        self.register_buffer("shut", shut, persistent=False)

    @override
    def sequence(self, inputs: Tensor, resets: Tensor, state: State) -> Tensor:
        if self._kernel_fits(inputs):
            return self._compiled(inputs, resets, state)[0]
        return super().sequence(inputs, resets, state)

    @override
    def sequence_and_states(self, inputs: Tensor, resets: Tensor, state: State, rows: Tensor) -> tuple[Tensor, State]:
        if not self._kernel_fits(inputs):
            return super().sequence_and_states(inputs, resets, state, rows)
        outputs, hidden, cells = self._compiled(inputs, resets, state)
        envs = torch.arange(len(rows))
        at_rows = ([states[rows, envs] for states in part] for part in (hidden, cells))
        hidden_after, cells_after = (torch.stack(layers) for layers in at_rows)
        return outputs, (hidden_after, cells_after)

    @override
    def states_before(self, inputs: Tensor, resets: Tensor, state: State) -> State:
        if not self._kernel_fits(inputs):
            return super().states_before(inputs, resets, state)
        _, hidden, cells = self._compiled(inputs, resets, state)
        parts = [
            torch.stack(
                [torch.cat((first.unsqueeze(0), rows[:-1])).flatten(0, 1) for first, rows in zip(start, after, strict=True)]
            )
            for start, after in zip(state, (hidden, cells), strict=True)
        ]
        return parts[0], parts[1]

    def _kernel_fits(self, inputs: Tensor) -> bool:
        return self.compiled and inputs.dtype == torch.float32 and inputs.device.type == "cpu" and not is_exported()

    def _compiled(self, inputs: Tensor, resets: Tensor, state: State) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Return the outputs of the last layer, and the hidden and cell states of each layer after every row."""
        hidden, cells = [], []
        for layer in range(self.n_layers):
            inputs = self._dropped(inputs, layer)
            inputs, cell = lstm_layer(inputs, resets, state[0][layer], state[1][layer], self._weights(layer))
            hidden.append(inputs)
            cells.append(cell)
        return inputs, hidden, cells

    @override
    def _cell(self, inputs: Tensor, state: State, weights: list[Tensor]) -> State:
        hidden, cell = torch.lstm_cell(inputs, state, *weights)
        return hidden, cell

    @override
    def _layer(self, inputs: Tensor, resets: Tensor, state: State, weights: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        w_input, *others = weights
        augmented = torch.cat((inputs, resets), dim=2)
        widened = [torch.cat((w_input, self.shut), dim=1), *others]
        return torch.lstm(augmented, state, widened, True, 1, 0.0, self.training, False, False)


class GruTrunk(RecurrentTrunk):
    """A stack of GRU layers: three gates instead of an LSTM's four, and no cell state.

    At a reset step the inputs are 0 and the extra channel closes both gates and takes the candidate's bias back:
    n = tanh(b - b) = 0 and h = (1 - z) n + z h = 0 exactly, without a gradient to what came before nor to the bias.

    :param input_size: number of inputs, D.
    :param hidden_size: size of the hidden state of a layer, H.
    :param n_layers: number of layers.
    :param dropout: share of a layer's outputs that the next layer does not see in training.
    """

    def __init__(self, input_size: int, hidden_size: int, n_layers: int = 1, dropout: float = 0.0) -> None:
        super().__init__(nn.GRU(input_size, hidden_size, n_layers), dropout)

    @override
    def _cell(self, inputs: Tensor, state: State, weights: list[Tensor]) -> State:
        hidden = torch.gru_cell(inputs, state[0], *weights)
        return hidden, torch.zeros_like(hidden)

    @override
    def _layer(self, inputs: Tensor, resets: Tensor, state: State, weights: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        w_input, w_hidden, b_input, b_hidden = weights
        gates = b_input.new_full((2 * self.hidden_size,), SHUT)
        shut = torch.cat((gates, -b_input[2 * self.hidden_size :])).unsqueeze(1)
        augmented = torch.cat((inputs * (1.0 - resets), resets), dim=2)
        widened = [torch.cat((w_input, shut), dim=1), w_hidden, b_input, b_hidden]
        outputs, hidden = torch.gru(augmented, state[0], widened, True, 1, 0.0, self.training, False, False)
        return outputs, hidden, torch.zeros_like(hidden)


def is_exported() -> bool:
    """Return True while torch records a graph, which must not go through compiled passes: it would hold their results."""
    return torch.jit.is_tracing() or torch.compiler.is_compiling()  # type: ignore[attr-defined, no-untyped-call]


def reset_state(state: State, starts: NDArray[np.bool_]) -> State:
    """Return the state with 0 in the environments where `starts` is true."""
    if not len(state[0]) or not starts.any():
        return state
    keep = torch.from_numpy(~starts.astype(bool)).to(state[0]).reshape(1, -1, 1)
    return state[0] * keep, state[1] * keep


def require_same_shapes(weights: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
    """Raise ValueError if weights belong to a network that was built differently, before any is copied."""
    for name in sorted(set(weights) ^ set(own)):
        raise ValueError(f"the weights do not fit this network: {name} is {'unknown' if name in weights else 'missing'}")
    for name, tensor in own.items():
        if weights[name].shape != tensor.shape:
            raise ValueError(
                f"the weights do not fit this network: {name} is {list(weights[name].shape)}, not {list(tensor.shape)}"
            )
