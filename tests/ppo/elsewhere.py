"""A device that this machine need not have: it computes, and refuses tensors of another device as a GPU does.

Its tensors are torch's meta tensors, which know their shape, device and storage and hold no numbers. Under :class:`Elsewhere`
every operation on them runs on the CPU, on storages that belong to theirs one by one. So views, operations in place and
``.data`` behave as on a device, and results can be held against those of the CPU.
"""

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

ELSEWHERE = torch.device("meta")
aten = torch.ops.aten
# What takes tensors of two devices, as on a GPU: copies, and looking up positions that are on the CPU.
COPIES, LOOKUPS = {aten.copy_, aten._to_copy}, {aten.index, aten.index_put_, aten._index_put_impl_}


def is_elsewhere(value):
    return isinstance(value, torch.Tensor) and value.device == ELSEWHERE


class Elsewhere(TorchDispatchMode):
    """While it is active, the device ``meta`` computes; nothing of it is freed before the end."""

    def __init__(self):
        super().__init__()
        self._real, self._meta = {}, {}  # storages by the address of their counterpart
        self.computed = set()  # operations that have run

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs, kind = kwargs or {}, function.overloadpacket
        given = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
        wanted = kwargs.get("device")
        if wanted is not None:
            wanted, kwargs = torch.device(wanted), kwargs | {"device": torch.device("cpu")}
        if not any(map(is_elsewhere, given)) and wanted != ELSEWHERE:
            return function(*args, **kwargs)
        mixed = not all(is_elsewhere(value) for value in given if value.dim())
        if mixed and kind not in COPIES and not (kind in LOOKUPS and is_elsewhere(args[0])):
            raise RuntimeError(f"{function}: expected all tensors to be on the same device, found {ELSEWHERE} and cpu")
        self.computed.add(kind)
        real_args, real_kwargs = tree_map(self.real, (args, kwargs))
        results = function(*real_args, **real_kwargs)
        onto = args[0].device if kind is aten.copy_ else wanted or ELSEWHERE
        if onto != ELSEWHERE:
            return results
        changed = [value for value in tree_leaves((real_args, real_kwargs)) if isinstance(value, torch.Tensor)]
        in_place = {id(real): value for real, value in zip(changed, given, strict=True)}
        return tree_map(lambda result: in_place.get(id(result)) if id(result) in in_place else self._placed(result), results)

    def real(self, value):
        """Return a tensor on the CPU with the numbers of one that is elsewhere; anything else as it is."""
        if not is_elsewhere(value):
            return value
        storage = self._real[value.untyped_storage()._cdata]
        return torch.empty(0, dtype=value.dtype).set_(storage, value.storage_offset(), value.shape, value.stride())

    def _placed(self, result):
        """Return a tensor that is elsewhere for one on the CPU: a view of the same storage if that is one."""
        if not isinstance(result, torch.Tensor):
            return result
        real = result.untyped_storage()
        if real._cdata not in self._meta:
            meta = torch.UntypedStorage(real.nbytes(), device="meta")
            self._real[meta._cdata], self._meta[real._cdata] = real, meta
        meta, where = self._meta[real._cdata], (result.storage_offset(), result.shape, result.stride())
        return torch.empty(0, dtype=result.dtype, device=ELSEWHERE).set_(meta, *where)


class Numbers(TorchFunctionMode):
    """Puts new numbers on the device ``meta`` in two steps; in one, torch makes them there, out of sight of the other mode."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is torch.Tensor.new_tensor and is_elsewhere(args[0]):
            return torch.tensor(args[1], dtype=args[0].dtype).to(ELSEWHERE)
        if function in (torch.tensor, torch.as_tensor) and kwargs.get("device") == ELSEWHERE:
            return function(*args, **kwargs | {"device": None}).to(ELSEWHERE)
        return function(*args, **kwargs)
