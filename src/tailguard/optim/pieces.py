"""Steps of different lengths within one parameter, for optimizers that can take them.

Several heads may share one flat parameter, which has one learning rate. An optimizer of this project is told the ranges and the
factor of each, and makes each range's step that much shorter as it goes: no pass over the weights is added. For any other
optimizer see ``anchor.py``.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from tailguard.optim.layout import Heads, Owner


class Piece(NamedTuple):
    """A range of a parameter's elements in a row, and the factor of its step."""

    span: slice
    factor: float


WHOLE = (Piece(slice(None), 1.0),)


class Piecewise(Optimizer):
    """An optimizer whose next step can be shortened, range by range. Decoupled weight decay stays whole."""

    _shortened: Mapping[Tensor, Sequence[Piece]] = {}

    def shorten(self, pieces: Mapping[Tensor, Sequence[Piece]]) -> None:
        """Take the steps of these parameters in these pieces until told otherwise.

        :param pieces: must cover their parameter, once. A parameter that is missing moves as a whole.
        """
        self._shortened = pieces

    def pieces(self, parameter: Tensor) -> Sequence[Piece]:
        """How a parameter is to move."""
        return self._shortened.get(parameter, WHOLE)


class Range(NamedTuple):
    """Neighbouring elements of a parameter with the same head; None is nobody's."""

    start: int
    end: int
    head: int | None


class PiecewiseSteps:
    """Tells a :class:`Piecewise` optimizer the factors of its next step.

    :param heads: the weights. The optimizer must own their memory: the same tensors, or a flat tensor that they are views of.
    :param optimizer: moves them.
    """

    def __init__(self, heads: Heads, optimizer: Piecewise) -> None:
        self._optimizer = optimizer
        owned: dict[Tensor, list[Range]] = {}
        for weight, head in zip(heads.parameters, heads.head_of.tolist(), strict=True):
            owner = Owner.of(weight, optimizer)
            owned.setdefault(owner.param, []).append(Range(owner.start, owner.start + weight.numel(), head))
        self._ranges = {param: _covering(ranges, param.numel()) for param, ranges in owned.items()}

    def put(self, factors: list[float] | None) -> None:
        """Let the next step have these lengths; None leaves it whole.

        :param factors: one per head, in [0, 1].
        """
        if factors is None:
            self._optimizer.shorten({})
            return
        every = (*factors, 1.0)  # the last for what no head has
        self._optimizer.shorten(
            {
                param: [Piece(slice(start, end), every[-1 if head is None else head]) for start, end, head in ranges]
                for param, ranges in self._ranges.items()
            }
        )

    def before(self) -> None:
        """The optimizer does everything by itself."""

    def after(self) -> None:
        """The optimizer has done everything by itself."""


def _covering(ranges: list[Range], numel: int) -> list[Range]:
    """The ranges in their order, neighbours of one head as one, with what lies between them."""
    covering: list[Range] = []
    end = 0
    for one in (*sorted(ranges), Range(numel, numel, None)):
        if one.start > end:
            covering.append(Range(end, one.start, None))
        if covering and covering[-1].head == one.head and one.head is not None:
            covering[-1] = covering[-1]._replace(end=one.end)
        elif one.end > one.start:
            covering.append(one)
        end = one.end
    return covering
