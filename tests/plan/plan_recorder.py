"""Real steps of jobs on forked ranks: the collectives each rank takes part in, and the bytes of its tensors.

Collectives are seen as operators, whatever carries them out; bytes are those of storages, from the operator that
makes one to the moment that nobody holds it. Under a dispatch mode like this one autograd adds gradients out of place
where it else adds in place: such sums count as what they are without it (koushi/dryrun/memory.py, and
tests/plan/unwatched.py, which measures without a mode).
"""

from __future__ import annotations

import pickle
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import Node
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining.stage import PipelineStage
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from koushi.data.batches import open_samples, train_batch
from koushi.job import Job
from koushi.optim.adamw import AdamW
from koushi.parallel.compose import build
from koushi.parallel.device_mesh import build_mesh, destroy_mesh, init_process_group
from koushi.parallel.ledger import current_node
from koushi.traffic import Collective, Operation, Phase, Traffic
from koushi.train.launch import launch
from koushi.train.step import TrainStep


@dataclass(frozen=True)
class RankStep:
    """What one rank did in a step."""

    traffic: Traffic
    most_bytes: int


class Recorder(TorchDispatchMode):
    """Counts collectives, and the bytes of storages if asked to."""

    def __init__(self, mesh: DeviceMesh, counts_bytes: bool):
        super().__init__()
        self._counts_bytes = counts_bytes
        names = mesh.mesh_dim_names or ()
        self._dims = {mesh[name].get_group().group_name: name for name in names}
        self._bytes: dict[int, int] = {}
        self._now = 0
        self._nodes: dict[int, int | None] = {}
        """What autograd was going back through when a storage was made."""
        self._first_term: int | None = None
        """Of a sum of autograd's, just made: the storage that it takes the place of if that goes now."""
        self._backward_messages: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self._most = 0
        self.phase: Phase = "start"
        self.traffic: Traffic = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out) if self._counts_bytes else ():
            if isinstance(leaf, Tensor):
                self.hold(leaf, args[0] if func is torch.ops.aten.add.Tensor else None)
        self._collective(func._schema.name, args, out)
        return out

    def hold(self, tensor: Tensor, first_term: Tensor | None = None) -> None:
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        if local.device.type == "meta":
            return
        storage = local.untyped_storage()
        if storage._cdata not in self._bytes:
            self._bytes[storage._cdata] = 0
            node = current_node()
            self._nodes[storage._cdata] = None if node is None else node._sequence_nr()
            weakref.finalize(storage, self._change, storage._cdata, 0, gone=True)
            self._change(storage._cdata, storage.nbytes())
            if node is not None and not torch.is_grad_enabled() and isinstance(first_term, Tensor):
                self._begin_sum(local, first_term, node)

    def _begin_sum(self, out: Tensor, first: Tensor, node: Node) -> None:
        storage = first.untyped_storage()
        of_autograd = self._nodes.get(storage._cdata) not in (None, node._sequence_nr())
        plain = not first._is_view() and node.name() != "_ToTorchTensorBackward"
        if of_autograd and plain and first.nbytes == storage.nbytes() == out.nbytes:
            self._first_term = storage._cdata

    def _change(self, storage: int, size: int, gone: bool = False) -> None:
        if self._first_term != storage or not gone:
            self._most = max(self._most, self._now)
        self._first_term = None
        self._now += size - self._bytes[storage]
        self._bytes[storage] = size
        if gone:
            del self._bytes[storage], self._nodes[storage]

    @property
    def most(self) -> int:
        return max(self._most, self._now)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """With what torch does besides operators: ``fully_shard`` resizes storages, stages send what backward made."""
        resize, recorder = torch.UntypedStorage.resize_, self

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            out = resize(storage, size)
            if storage._cdata in recorder._bytes:
                recorder._change(storage._cdata, size)
            return out

        def noted(original: Any, stage: PipelineStage, microbatch: int) -> Any:
            messages = original(stage, microbatch)
            recorder._backward_messages.update(message.tensor.untyped_storage() for message in messages)
            return messages

        def method(original: Any) -> Any:
            return lambda stage, microbatch: noted(original, stage, microbatch)

        with ExitStack() as patches:
            patches.enter_context(patch.object(torch.UntypedStorage, "resize_", resized))
            for name in ("get_bwd_recv_ops", "get_bwd_send_ops"):
                patches.enter_context(patch.object(PipelineStage, name, method(getattr(PipelineStage, name))))
            patches.enter_context(self)
            yield

    def begin_step(self) -> None:
        self._most = self._now
        self.traffic = Counter()
        self.phase = "start"

    def _collective(self, name: str, args: Any, out: Any) -> None:
        library, _, called = name.partition("::")
        if library == "koushi":
            self._count(args[3], "all_gather" if called == "all_gather" else "reduce_scatter", args[0], out)
        elif library == "c10d":
            place, operation, tensors = _C10D[called]
            group = dist.ProcessGroup.unbox(args[place]).group_name
            self._count(group, operation, *(args[0][0] if called in _LISTS else args[which] for which in tensors))

    def _count(self, group: str, operation: Operation, *tensors: Tensor) -> None:
        tensor = max(tensors, key=lambda one: one.nbytes)
        dim = self._dims[group]
        dtype = str(tensor.dtype).removeprefix("torch.")
        self.traffic[Collective(dim, operation, self._phase_of(dim, operation, tensor), dtype, tensor.nbytes)] += 1

    def _phase_of(self, dim: str, operation: Operation, tensor: Tensor) -> Phase:
        """Stages reduce gradients, and move what backward makes, outside of autograd's backward."""
        if self.phase != "forward":
            return self.phase
        backward = torch._C._current_graph_task_id() != -1
        if dim.startswith("dp"):
            backward |= operation != "all_gather"
        elif operation in ("send", "recv"):
            backward = tensor.untyped_storage() in self._backward_messages
        return "backward" if backward else "forward"


_C10D: dict[str, tuple[int, Operation, tuple[int, ...]]] = {
    "allreduce_": (1, "all_reduce", (0,)),
    "_allgather_base_": (2, "all_gather", (0, 1)),
    "_reduce_scatter_base_": (2, "reduce_scatter", (0, 1)),
    "send": (1, "send", (0,)),
    "recv_": (1, "recv", (0,)),
}
"""Where an operator's arguments have its group, what it is to the ledger, and which arguments are its tensors."""
_LISTS = ("allreduce_", "send", "recv_")


def record_steps(jobs: Sequence[Job], folder: Path, *, counts_bytes: bool = False) -> list[list[RankStep]]:
    """A step of every job on every rank, after one or two others. The jobs' worlds are of one size."""
    launch(partial(_work, jobs=list(jobs), folder=folder, counts_bytes=counts_bytes), jobs[0])
    return [
        [pickle.loads((folder / f"{index}-{rank}").read_bytes()) for rank in range(job.mesh.world_size)]
        for index, job in enumerate(jobs)
    ]


def _work(job: Job, *, jobs: Sequence[Job], folder: Path, counts_bytes: bool) -> None:
    init_process_group(torch.device("cpu"), job.config.run.timeout)
    mesh: DeviceMesh | None = None
    for index, one in enumerate(jobs):
        if mesh is None or one.mesh != jobs[index - 1].mesh:
            if mesh is not None:
                destroy_mesh(mesh)
            mesh = build_mesh(one.mesh, "cpu")
        step = _step(one, mesh, counts_bytes)
        (folder / f"{index}-{dist.get_rank()}").write_bytes(pickle.dumps(step))
    dist.destroy_process_group()


def _step(job: Job, mesh: DeviceMesh, counts_bytes: bool) -> RankStep:
    recorder = Recorder(mesh, counts_bytes)
    with recorder.watching():
        model = build(job, mesh, torch.device("cpu"))
        step = TrainStep(job, model, AdamW(job.config.optimizer))
        samples = open_samples(job)
        data_index = job.mesh.index(dist.get_rank(), "dp_replicate", "dp_shard")
        forward_backward = step.forward_backward

        def phases(tokens: Tensor, labels: Tensor) -> Tensor:
            recorder.phase = "forward"
            loss = forward_backward(tokens, labels)
            recorder.phase = "optimizer"
            return loss

        step.forward_backward = phases  # type: ignore[method-assign]
        # Pipeline stages have settled their shapes after one step; the optimizer has its state, and stages the buffers
        # that later steps find, after two.
        for index in range(3 if counts_bytes else 2):
            first = index * job.config.training.global_batch_size
            tokens, labels = train_batch(samples, first, job.local_batch_size, data_index)
            recorder.begin_step()
            for tensor in (tokens, labels) if counts_bytes else ():
                recorder.hold(tensor)
            step.run(tokens, labels)
    return RankStep(recorder.traffic, recorder.most)
