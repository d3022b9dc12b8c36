"""The decorators of all code that numba compiles.

numba keeps machine code on disk, and looks only at the file of the function that was compiled: not at the functions that it
calls, nor at the constants that it uses. So functions that call each other stand in one file. Where sums may be reordered, a
caller of a compiled function is also not the same machine code fresh and out of the cache, and a run would differ from its
resumption in the last bits. So a function that only compiled ones call is `inlined`, and only what Python calls is `compiled`.
"""

from collections.abc import Callable
from typing import Any, Protocol, TypeVar, cast

import numba

Function = TypeVar("Function", bound=Callable[..., Any])

# Sums may be reordered, which vector code needs; NaN and infinities keep their meaning.
REORDER_SUMS = frozenset({"reassoc", "nsz", "contract"})
# Besides, a division may become a product with the reciprocal.
SHARE_DIVISIONS = REORDER_SUMS | {"arcp"}


class Decorator(Protocol):
    """A decorator that keeps the signature of a function."""

    def __call__(self, function: Function, /) -> Function:
        """Return the compiled function."""


def kept(function: Function, **options: Any) -> Function:
    """Return a function compiled at its first call, and kept on disk; in every process anew where no folder can be written to.

    :param options: of ``numba.njit``.
    """
    try:
        return cast(Function, numba.njit(cache=True, **options)(function))
    except RuntimeError:  # numba found no folder
        return cast(Function, numba.njit(**options)(function))


def decorators(fastmath: frozenset[str] = frozenset()) -> tuple[Decorator, Decorator]:
    """Return the decorators `compiled`, for functions that Python calls, and `inlined`, for those that only they call.

    :param fastmath: what the compiler may do to floating-point arithmetic, in LLVM's words; nothing by default.
    """

    def compiled(function: Function) -> Function:
        return kept(function, nogil=True, error_model="numpy", fastmath=set(fastmath))

    def inlined(function: Function) -> Function:
        return cast(Function, numba.njit(inline="always", error_model="numpy", fastmath=set(fastmath))(function))

    return compiled, inlined


def separate(fastmath: frozenset[str] = frozenset()) -> Decorator:
    """Return the decorator of functions that only compiled ones call, and that are too long to be part of each of them.

    They are not kept on disk by themselves: so each caller there has been compiled together with them.

    :param fastmath: as in :func:`decorators`.
    """

    def called(function: Function) -> Function:
        return cast(Function, numba.njit(error_model="numpy", fastmath=set(fastmath))(function))

    return called
