"""The networks of a policy: feed-forward heads, and LSTM trunks with resets that are exact in acting and in training.

Acting, the state of a finished environment is multiplied by 0. Training runs torch's fused LSTM over a dense ``[L, B]`` block,
which knows no resets; so a *reset step* is inserted between episodes: a step whose extra input channel drives the input, forget
and output gates to sigmoid(-10^4), which is 0 in floating point. It leaves c = 0 and h = 0 exactly and passes no gradient back,
whatever came before. One reset step per episode is all that resets cost: no splitting, no padding to the longest episode, no
loop over time. The compiled kernel (compiled/kernels.py) reads the same reset steps as flags.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import dropout

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


class LstmTrunk(nn.Module):
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
        super().__init__()
        self.hidden_size, self.n_layers, self.compiled, self.dropout = hidden_size, n_layers, compiled, dropout
        # nn.LSTM holds the parameters under their usual names; the layers are run one by one, since each needs the reset steps.
        self.lstm = nn.LSTM(input_size, hidden_size, n_layers)
        parts = "weight_ih", "weight_hh", "bias_ih", "bias_hh"
        self._names = [[f"{part}_l{layer}" for part in parts] for layer in range(n_layers)]
        forget = slice(hidden_size, 2 * hidden_size)
        with torch.no_grad():
            for layer in range(n_layers):
                self._weights(layer)[2][forget] += forget_bias
        shut = torch.full((4 * hidden_size, 1), SHUT)
        shut[2 * hidden_size : 3 * hidden_size] = 0.0  # the candidate g does not matter once its gate is closed
        self.register_buffer("shut", shut, persistent=False)

    def initial_state(self, batch: int) -> State:
        """Return the state before the first step, zeros ``([n_layers, B, H], [n_layers, B, H])``."""
        zeros = self.shut.new_zeros(self.n_layers, batch, self.hidden_size)
        return zeros, zeros.clone()

    def step(self, inputs: Tensor, state: State) -> tuple[Tensor, State]:
        """Run one time step of B environments; the caller has reset the states of those that begin an episode.

        :param inputs: ``[B, D]``.
        :param state: hidden and cell states, ``[n_layers, B, H]`` each.
        """
        if self.n_layers == 1:  # the path of acting, kept short
            inputs, cell = torch.lstm_cell(inputs, (state[0][0], state[1][0]), *self._weights(0))
            return inputs, (inputs.unsqueeze(0), cell.unsqueeze(0))
        hidden, cells = [], []
        for layer, (old_hidden, old_cell) in enumerate(zip(*state, strict=True)):
            inputs, cell = torch.lstm_cell(inputs, (old_hidden, old_cell), *self._weights(layer))
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
        if self._kernel_fits(inputs):
            return self._compiled(inputs, resets, state)[0]
        return self._fused(inputs, resets, state)[0]

    def sequence_and_states(self, inputs: Tensor, resets: Tensor, state: State, rows: Tensor) -> tuple[Tensor, State]:
        """Run :meth:`sequence`, and return also the state of environment b after row ``rows[b]``.

        Torch's fused call returns the state after its last row only. It is stopped at the first row of `rows`, and the few rows
        up to the last one are run step by step.

        :param rows: ``[B]``.
        """
        if self._kernel_fits(inputs):
            outputs, hidden, cells = self._compiled(inputs, resets, state)
            envs = torch.arange(len(rows))
            at_rows = ([states[rows, envs] for states in part] for part in (hidden, cells))
            hidden_after, cells_after = (torch.stack(layers) for layers in at_rows)
            return outputs, (hidden_after, cells_after)
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
        if self._kernel_fits(inputs):
            _, hidden, cells = self._compiled(inputs, resets, state)
            parts = [
                torch.stack(
                    [torch.cat((first.unsqueeze(0), rows[:-1])).flatten(0, 1) for first, rows in zip(start, after, strict=True)]
                )
                for start, after in zip(state, (hidden, cells), strict=True)
            ]
            return parts[0], parts[1]
        before = []
        for row, reset in zip(inputs, resets, strict=True):
            before.append(state)
            state = self.step(row, state)[1]
            state = (state[0] * (1.0 - reset), state[1] * (1.0 - reset))
        hidden_rows, cell_rows = (torch.stack(part, dim=1).flatten(1, 2) for part in zip(*before, strict=True))
        return hidden_rows, cell_rows

    def _kernel_fits(self, inputs: Tensor) -> bool:
        return self.compiled and inputs.dtype == torch.float32 and inputs.device.type == "cpu"

    def _compiled(self, inputs: Tensor, resets: Tensor, state: State) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Return the outputs of the last layer, and the hidden and cell states of each layer after every row."""
        hidden, cells = [], []
        for layer in range(self.n_layers):
            inputs = self._dropped(inputs, layer)
            inputs, cell = lstm_layer(inputs, resets, state[0][layer], state[1][layer], self._weights(layer))
            hidden.append(inputs)
            cells.append(cell)
        return inputs, hidden, cells

    def _fused(self, inputs: Tensor, resets: Tensor, state: State) -> tuple[Tensor, State]:
        hidden, cells = [], []
        for layer in range(self.n_layers):
            w_input, w_hidden, b_input, b_hidden = self._weights(layer)
            weights = [torch.cat((w_input, self.shut), dim=1), w_hidden, b_input, b_hidden]
            start = (state[0][layer : layer + 1].contiguous(), state[1][layer : layer + 1].contiguous())
            augmented = torch.cat((self._dropped(inputs, layer), resets), dim=2)
            inputs, last_hidden, last_cell = torch.lstm(augmented, start, weights, True, 1, 0.0, self.training, False, False)
            hidden.append(last_hidden)
            cells.append(last_cell)
        return inputs, (torch.cat(hidden), torch.cat(cells))

    def _dropped(self, inputs: Tensor, layer: int) -> Tensor:
        """Return the inputs of a layer; in training, without some of the outputs of the layer below."""
        return dropout(inputs, self.dropout) if layer and self.dropout and self.training else inputs

    def _weights(self, layer: int) -> list[Tensor]:
        lstm = self.lstm
        return [getattr(lstm, name) for name in self._names[layer]]


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
