"""A world of the true size in one process, without a device and without a network.

torch's fake process group gives every rank its groups and carries nothing. Tensors lie on the meta
device, which has shapes and storages but no bytes. What torch must be told to run its sharding and
its pipelines there is all in this file, each with its reason; ``tests/dryrun/test_world.py`` fails where
torch has changed.

One world per process: torch keeps process groups in caches that outlive them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache, partial
from itertools import compress
from typing import Any, Literal, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining import stage as stage_of_torch
from torch.distributed.pipelining.stage import InferenceMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import TorchDispatchMode

from koushi.mesh import MeshSpec
from koushi.parallel import frames
from koushi.parallel.ledger import Recorder
from koushi.parallel.recompute import Giving, Keeping

DeviceKind = Literal["cpu", "cuda"]
META = torch.device("meta")

BACKEND = "cpu:fake,meta:fake"
"""Naming meta here gives its tensors a backend, which point-to-point batches look up."""


class _Event:
    def record(self, stream: object = None) -> None:
        pass

    def wait(self, stream: object = None) -> None:
        pass


class _Stream:
    """Everything happens at once, in program order; a stream only says whose pool of memory is drawn on."""

    def __init__(self, priority: int = 0) -> None:
        pass

    def record_event(self, event: object = None) -> _Event:
        return _Event()

    def wait_event(self, event: object) -> None:
        pass

    def wait_stream(self, stream: object) -> None:
        pass


_current = [_Stream()]
"""The stream that the program is on, after those that it was on before."""


def current_stream() -> object:
    """The stream that the program is on, as sharding opens them."""
    return _current[-1]


@contextmanager
def _on(stream: _Stream) -> Iterator[None]:
    _current.append(stream)
    try:
        yield
    finally:
        _current.pop()


class _MetaDevice:
    """What ``torch.cuda`` is for CUDA, as far as sharding asks: torch looks for the module ``torch.<device type>``."""

    Stream = _Stream
    Event = _Event

    @staticmethod
    def current_stream() -> _Stream:
        return _current[-1]

    @staticmethod
    def stream(stream: _Stream) -> AbstractContextManager[None]:
        return _on(stream)

    @staticmethod
    def current_device() -> None:
        """Meta has no index."""
        return None

    @staticmethod
    def device_count() -> int:
        return 1

    @staticmethod
    def is_initialized() -> bool:
        return True


@contextmanager
def world(spec: MeshSpec, rank: int, kind: DeviceKind) -> Iterator[torch.device]:
    """Be ``rank`` of the world that ``spec`` describes, on devices of ``kind``; gives the device to build on."""
    assert not dist.is_initialized(), "a process can be one rank of one world, once"
    dist.init_process_group(BACKEND, rank=rank, world_size=spec.world_size, store=FakeStore())
    with patched(kind), _one_mesh_each(), patch.object(device_mesh, "new_group", partial(_own_group, rank)):
        yield META


_new_group = device_mesh.new_group


def _own_group(rank: int, ranks: Sequence[int], **options: Any) -> Any:
    """A mesh makes the groups of all its ranks; 16,384 ranks have 36,000 of them."""
    return _new_group(ranks, **options) if rank in ranks else dist.GroupMember.NON_GROUP_MEMBER


@contextmanager
def _one_mesh_each() -> Iterator[None]:
    """Make every submesh once: torch makes one for each parameter and each time it is asked, of a list of all ranks,
    and goes through two such lists whenever it compares the meshes of two tensors."""
    joined = cache(lambda *meshes: _concatenate(list(meshes)))
    with (
        patch.object(DeviceMesh, "__getitem__", cache(DeviceMesh.__getitem__)),
        patch.object(DeviceMesh, "_concatenate", staticmethod(lambda meshes: joined(*meshes))),
    ):
        yield


_concatenate = DeviceMesh._concatenate


@contextmanager
def patched(kind: DeviceKind) -> Iterator[None]:
    """Let torch's sharding, pipelines, optimizer and attention run on meta as they do on ``kind``."""
    foreach = [*_foreach_utils._get_foreach_kernels_supported_devices(), "meta"]
    fused = [*_foreach_utils._get_fused_kernels_supported_devices(), "meta"]
    with (
        patch.object(torch, "meta", _MetaDevice, create=True),
        # Refuses parameters without values.
        patch.object(FSDPParamGroup, "_validate_no_meta_params", lambda self: None),
        patch.object(FSDPParam, "reset_sharded_param", _pad_again),
        # Ranks vote on whether shapes are known beforehand, by a number that would have to arrive.
        patch.object(schedules._PipelineSchedule, "_warmup_p2p", shapes_are_known),
        as_gloo_does() if kind == "cpu" else nullcontext(),
        # Their caches of random state have no meta.
        patch.object(torch.random, "fork_rng", lambda **_: nullcontext()),
        # CPU and CUDA have one kernel for many tensors; the lists are asked by name of the device.
        patch.object(_foreach_utils, "_get_foreach_kernels_supported_devices", lambda: foreach),
        patch("torch.optim.optimizer._get_fused_kernels_supported_devices", lambda: fused),
        patch("torch.optim.adam._get_fused_kernels_supported_devices", lambda: fused, create=True),
        patch.object(F, "scaled_dot_product_attention", _ATTENTION[kind]),
        patch.object(F, "rms_norm", fused_rms_norm) if kind == "cuda" else nullcontext(),
        _halves_told(),
        # Draws numbers for weights that on meta hold none.
        patch.object(nn.Linear, "reset_parameters", lambda self: None),
        # Blocks to be compiled run operation by operation.
        torch.compiler.set_stance("force_eager"),
        _unguarded(Recorder, Keeping, Giving),
    ):
        yield


@contextmanager
def _unguarded(*modes: type[TorchDispatchMode]) -> Iterator[None]:
    """Hand operators straight to ``modes``. Torch keeps torch.compile out of a mode by a guard around it, which takes
    longer than most modes do; where nothing is compiled, there is nothing to keep out."""
    with ExitStack() as stack:
        for mode in modes:
            stack.enter_context(patch.object(mode, "__torch_dispatch__", inspect.unwrap(mode.__torch_dispatch__)))
        yield


def _pad_again(self: FSDPParam) -> None:
    """What torch does before the first forward with parameters that have been materialised; it skips those on meta."""
    parameter = getattr(self._module_info.module, self._module_info.param_name)
    self.sharded_param = parameter
    local = padded = parameter._local_tensor
    if local.size() != self.padded_sharded_param_size:
        padded = local.new_zeros(self.padded_sharded_param_size)
        held = padded.narrow(0, 0, local.size(0) if local.numel() else 0)
        held.copy_(local)
        parameter._local_tensor = held
    self._sharded_param_data = padded.view(-1)
    self._sharding_spec = parameter._spec


def shapes_are_known(self: object, stages: Sequence[Any], has_backward: bool, p2p_done: bool) -> None:
    for stage in stages:
        stage._inference_mode = InferenceMode.STATIC


class _Work:
    """Messages on their way, which hold their tensors as long as somebody holds the messages."""

    def __init__(self, works: Sequence[dist.Work], tensors: Sequence[Tensor]):
        self._works, self._tensors = works, tensors

    def wait(self) -> None:
        for work in self._works:
            work.wait()


@contextmanager
def as_gloo_does() -> Iterator[None]:
    """Let what pipeline stages exchange stay as long as the works do, where NCCL's let go of it; and let sums that
    are then scattered be made in a copy."""
    with (
        patch.object(schedules, "_batch_p2p", batch_p2p),
        patch.object(DefaultReduceScatter, "__call__", in_a_copy),
        patch.object(frames, "PASSED_OVER", frames.PASSED_OVER | {__file__}),
    ):
        yield


_by_torchs_works = schedules._batch_p2p


def batch_p2p(p2p_ops: list[dist.P2POp], desc: str | None = None) -> list[_Work]:
    works = _by_torchs_works(p2p_ops, desc)
    return [_Work(works, [one.tensor for one in p2p_ops])] if works else []


_scatter = DefaultReduceScatter.__call__


def in_a_copy(self: DefaultReduceScatter, *, input_tensor: Tensor, **options: Any) -> Any:
    held = torch.empty_like(input_tensor)
    work = _scatter(self, input_tensor=input_tensor, **options)
    del held
    return work


_by_torch = F.scaled_dot_product_attention


def _cuda_attention(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, enable_gqa: bool) -> Tensor:
    """What CUDA runs: flash has half precision alone, the memory-efficient kernel no grouped heads.

    What neither can do keeps every score, which is also what torch does on meta.
    """
    if q.dtype in (torch.bfloat16, torch.float16):
        return cast(Tensor, torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal, False)[0])
    if q.dtype == torch.float32 and not enable_gqa:
        efficient = torch.ops.aten._scaled_dot_product_efficient_attention
        return cast(Tensor, efficient(q, k, v, None, q.requires_grad, 0.0, is_causal)[0])
    return _by_torch(q, k, v, is_causal=is_causal, enable_gqa=enable_gqa)


def _flash_cpu(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, enable_gqa: bool) -> Tensor:
    return cast(Tensor, torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal)[0])


_ATTENTION = {"cuda": _cuda_attention, "cpu": _flash_cpu}


# The CUDA kernel of RMSNorm, as one operator with its shapes: on meta torch takes the norm apart, as it does on CPU.
_library = torch.library.Library("koushi_dryrun", "DEF")
_library.define("rms_norm(Tensor x, Tensor weight) -> (Tensor, Tensor)")
_library.define("rms_norm_backward(Tensor gradient, Tensor x, Tensor weight, Tensor scale, bool[2] mask) -> Tensor[]")
_library.impl(
    "rms_norm", lambda x, _: (torch.empty_like(x), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)), "Meta"
)
_library.impl(
    "rms_norm_backward",
    lambda gradient, x, weight, scale, mask: [torch.empty_like(one) for one in compress((x, weight), mask)],
    "Meta",
)

_asked = [(True, True)]
"""Whether the backward that is going on asks for gradients of inputs, and of weights: a kernel is told, a function in
Python is not."""


class _FusedRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        out, scale = torch.ops.koushi_dryrun.rms_norm(x, weight)
        ctx.save_for_backward(x, weight, scale)
        return cast(Tensor, out)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        made = iter(torch.ops.koushi_dryrun.rms_norm_backward(gradients[0], *ctx.saved_tensors, _asked[-1]))
        return tuple(next(made) if asked else None for asked in _asked[-1])


def fused_rms_norm(x: Tensor, shape: Sequence[int], weight: Tensor, eps: float) -> Tensor:
    assert list(shape) == list(x.shape[-1:]) and weight.dtype == x.dtype, "only what koushi.models.layers asks for"
    return cast(Tensor, _FusedRMSNorm.apply(x, weight))  # type: ignore[no-untyped-call]


@contextmanager
def _halves_told() -> Iterator[None]:
    """Private: the functions with which torch's stages go through the halves of a split backward."""

    def telling(run: Callable[..., Any], asked: tuple[bool, bool]) -> Callable[..., Any]:
        def told(*arguments: Any, **named: Any) -> Any:
            _asked.append(asked)
            try:
                return run(*arguments, **named)
            finally:
                _asked.pop()

        return told

    inputs, weights = stage_of_torch.stage_backward_input, stage_of_torch.stage_backward_weight
    with (
        patch.object(stage_of_torch, "stage_backward_input", telling(inputs, (True, False))),
        patch.object(stage_of_torch, "stage_backward_weight", telling(weights, (False, True))),
    ):
        yield


def gathered(part: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The buffers that ``part``'s parameters are gathered into, with the name of their unit; resizing empties them."""
    for name, module in part.named_modules():
        if isinstance(module, FSDPModule):
            for group in module._get_fsdp_state()._fsdp_param_groups:
                for parameter in group.fsdp_params:
                    yield from ((name, buffer) for buffer in parameter.all_gather_outputs)
