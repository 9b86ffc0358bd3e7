"""What operations make, and how much of it is still there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


class Watch(TorchDispatchMode):
    """Counts operations and remembers every storage they make."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.calls[func.overloadpacket.__name__] += 1
        for one in out if isinstance(out, tuple | list) else (out,):
            if isinstance(one, Tensor):
                storage = one.untyped_storage()
                self.made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return out

    def bytes_alive(self, besides: Iterable[Tensor]) -> int:
        there = {one.untyped_storage()._cdata for one in besides}
        return sum(
            count
            for storage, (reference, count) in self.made.items()
            if storage not in there and not reference.expired()
        )

    def attentions(self) -> int:
        return sum(count for name, count in self.calls.items() if "attention" in name and "backward" not in name)
