"""Which operators are collectives, and what each call says: operation, group, tensors, peer.

What carries a collective out is not seen: an operator's own calls are its own business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import ReduceOp, _resolve_process_group

from koushi.parallel.collectives import ALL_GATHER, REDUCE_SCATTER
from koushi.traffic import Operation

Arguments = Mapping[str, Any]
Operator = Any
"""torch's OpOverload."""


@dataclass(frozen=True)
class Call:
    """One call of a collective by this rank."""

    operation: Operation
    group: dist.ProcessGroup
    reads: tuple[Tensor, ...]
    writes: tuple[Tensor, ...]
    """In place or new."""
    reduction: str = ""
    """sum, avg, max, ... of an operation that reduces."""
    peer: int | None = None
    """The other global rank of a send or recv."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The larger side: what ``Collective.bytes`` counts."""
        # A rank without rows of a table sends and awaits nothing, but of a dtype.
        return max(self.reads, self.writes, key=lambda side: (sum(map(tensor_bytes, side)), len(side)))


def tensor_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


# What torch calls each of them; of c10d's own, (operation, outputs, inputs) by argument.
_IN_PLACE: Mapping[str, tuple[Operation, str, str]] = {
    "allreduce_": ("all_reduce", "tensors", "tensors"),
    "allreduce_coalesced_": ("all_reduce", "tensors", "tensors"),
    "_allgather_base_": ("all_gather", "output_tensor", "input_tensor"),
    "allgather_": ("all_gather", "output_tensors", "input_tensors"),
    "allgather_coalesced_": ("all_gather", "output_lists", "input_list"),
    "allgather_into_tensor_coalesced_": ("all_gather", "outputs", "inputs"),
    "_reduce_scatter_base_": ("reduce_scatter", "output_tensor", "input_tensor"),
    "reduce_scatter_": ("reduce_scatter", "output_tensors", "input_tensors"),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", "outputs", "inputs"),
    "alltoall_": ("all_to_all", "output_tensors", "input_tensors"),
    "alltoall_base_": ("all_to_all", "output", "input"),
    "send": ("send", "", "tensors"),
    "recv_": ("recv", "tensors", ""),
    "recv_any_source_": ("recv", "tensors", ""),
    "broadcast_": ("broadcast", "tensors", "tensors"),
    "reduce_": ("reduce", "tensors", "tensors"),
    "gather_": ("gather", "output_tensors", "input_tensors"),
    "scatter_": ("scatter", "output_tensors", "input_tensors"),
    "barrier": ("barrier", "", ""),
    "monitored_barrier_": ("barrier", "", ""),
}
_FUNCTIONAL: Mapping[str, Operation] = {
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "all_reduce_coalesced_": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_out": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
    "broadcast_": "broadcast",
    "isend": "send",
    "irecv": "recv",
}
_NO_COLLECTIVE = {"wait_tensor", "check_for_nan", "_wrap_tensor_autograd"}
_REDUCTIONS = {int(getattr(ReduceOp, name)): name.lower() for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX")}

Reader = Callable[[Operator, tuple[Any, ...], Mapping[str, Any], Any], Call]


def reader(operator: Operator) -> Reader | None:
    """What reads calls of ``operator``; None where it is no collective.

    Raises NotImplementedError for a collective of torch that is not known here, rather than missing it.
    """
    if operator in (ALL_GATHER, REDUCE_SCATTER):
        return _read_own
    namespace, name = operator._schema.name.split("::")
    if namespace not in ("c10d", "_c10d_functional", "_c10d_functional_autograd") or name in _NO_COLLECTIVE:
        return None
    if namespace == "c10d" and name in _IN_PLACE:
        return _read_in_place
    if namespace != "c10d" and name in _FUNCTIONAL:
        return _read_functional
    raise NotImplementedError(f"{operator} is a collective that parallel/calls.py cannot read yet")


def tensors_in(value: Any) -> tuple[Tensor, ...]:
    """Every tensor of a nest of lists and tuples."""
    if isinstance(value, Tensor):
        return (value,)
    if not isinstance(value, (list, tuple)):
        return ()
    found: list[Tensor] = []
    for each in value:
        if isinstance(each, Tensor):
            found.append(each)
        elif isinstance(each, (list, tuple)):
            found += tensors_in(each)
    return tuple(found)


def _arguments(operator: Operator, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Arguments:
    names = [argument.name for argument in operator._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _read_own(operator: Operator, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> Call:
    given = _arguments(operator, args, kwargs)
    group = _resolve_process_group(given["group"])
    gathers = operator is ALL_GATHER
    return Call("all_gather" if gathers else "reduce_scatter", group, (given["x"],), (out,), "" if gathers else "sum")


def _read_in_place(operator: Operator, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> Call:
    given = _arguments(operator, args, kwargs)
    operation, outputs, inputs = _IN_PLACE[operator._schema.name.split("::")[1]]
    group = dist.ProcessGroup.unbox(given["process_group"])
    index = given.get("dst", given.get("src"))
    return Call(
        operation,
        group,
        tensors_in(given.get(inputs)),
        tensors_in(given.get(outputs)),
        _REDUCTIONS.get(given["reduce_op"].op(), "other") if "reduce_op" in given else "",
        None if index is None else dist.get_global_rank(group, index),
    )


def _read_functional(operator: Operator, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> Call:
    given = _arguments(operator, args, kwargs)
    group = given["group_name"]
    if isinstance(group, str):
        group = _resolve_process_group(cast("Any", group))
    operation = _FUNCTIONAL[operator._schema.name.split("::")[1]]
    index = given.get("dst", given.get("src")) if operation in ("send", "recv") else None
    first = next(iter(given.values()))
    return Call(
        operation,
        group,
        () if operation == "recv" else tensors_in(first),
        () if operation == "send" else tensors_in(out),
        given.get("reduce_op", ""),
        None if index is None else dist.get_global_rank(group, index),
    )


def dtype_name(tensors: Iterable[Tensor]) -> str:
    """The dtypes' names without torch's prefix, joined where there are several."""
    return "+".join(dict.fromkeys(str(tensor.dtype).removeprefix("torch.") for tensor in tensors)) or "none"
