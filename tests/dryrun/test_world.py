"""What the dry run uses of torch that torch does not promise. When one fails after an upgrade, see dryrun/world.py."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining.stage import InferenceMode
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import TorchDispatchMode

from koushi.dryrun.forks import in_forks
from koushi.dryrun.world import BACKEND, DeviceKind, batch_p2p, fused_rms_norm, patched, shapes_are_known, world
from koushi.errors import RankFailure
from koushi.mesh import MeshSpec
from koushi.parallel.calls import tensors_in
from koushi.parallel.device_mesh import build_mesh
from koushi.parallel.ledger import Recorder
from koushi.parallel.recompute import Giving, Keeping


def test_what_is_replaced_is_called_as_before() -> None:
    for owner, name, expected in (
        (FSDPParamGroup, "_validate_no_meta_params", ["self"]),
        (FSDPParam, "reset_sharded_param", ["self"]),
        (schedules._PipelineSchedule, "_warmup_p2p", list(inspect.signature(shapes_are_known).parameters)),
        (schedules, "_batch_p2p", list(inspect.signature(batch_p2p).parameters)),
        (_foreach_utils, "_get_foreach_kernels_supported_devices", []),
    ):
        found = list(inspect.signature(getattr(owner, name)).parameters)
        assert found == expected, f"dryrun/world.py replaces {name}, which now takes {found}"
    source = inspect.getsource(FSDPParam.reset_sharded_param)
    for used in ("_sharded_param_data", "padded_sharded_param_size", "_sharding_spec", "sharded_param", "is_meta"):
        assert used in source, f"dryrun/world.py pads shards as torch did with {used}"
    assert InferenceMode.STATIC is not InferenceMode.DYNAMIC


def test_blocks_to_be_compiled_run_operation_by_operation() -> None:
    compiling = []

    @torch.compile(backend="eager")
    def double(x: torch.Tensor) -> torch.Tensor:
        compiling.append(torch.compiler.is_compiling())
        return 2 * x

    with patched("cpu"):
        assert torch.equal(double(torch.ones(2)), torch.full((2,), 2.0))
    assert compiling == [False]


@pytest.mark.parametrize("kind", ("cpu", "cuda"))
def test_everything_is_put_back(kind: DeviceKind) -> None:
    before = F.scaled_dot_product_attention, F.rms_norm, torch.random.fork_rng, FSDPParam.reset_sharded_param
    guarded = [mode.__torch_dispatch__ for mode in (Recorder, Keeping, Giving)]
    with patched(kind):
        for mode, guard in zip((Recorder, Keeping, Giving), guarded, strict=True):
            assert mode.__torch_dispatch__ is not guard, f"torch no longer wraps {mode.__name__}'s"
        assert F.scaled_dot_product_attention is not before[0]
        assert (F.rms_norm is fused_rms_norm) == (kind == "cuda")
    assert before == (
        F.scaled_dot_product_attention,
        F.rms_norm,
        torch.random.fork_rng,
        FSDPParam.reset_sharded_param,
    )
    assert guarded == [mode.__torch_dispatch__ for mode in (Recorder, Keeping, Giving)]
    assert "meta" not in vars(torch)


class Largest(TorchDispatchMode):
    """The most elements that an operator gave out."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        self.numel = max([self.numel, *(one.numel() for one in tensors_in(out))])
        return out


@pytest.mark.parametrize(
    ("kind", "dtype", "grouped", "keeps_scores"),
    (
        ("cpu", torch.float32, True, False),
        ("cuda", torch.bfloat16, True, False),
        ("cuda", torch.float32, False, False),
        ("cuda", torch.float32, True, True),
        ("cuda", torch.float64, False, True),
    ),
)
def test_attention_runs_the_kernel_of_the_device(
    kind: DeviceKind, dtype: torch.dtype, grouped: bool, keeps_scores: bool
) -> None:
    q = torch.empty(2, 8, 64, 4, device="meta", dtype=dtype, requires_grad=True)
    k = torch.empty(2, 2 if grouped else 8, 64, 4, device="meta", dtype=dtype, requires_grad=True)
    with patched(kind), Largest() as largest:
        out = F.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=grouped)
        assert out.shape == q.shape
        out.sum().backward()
    assert (largest.numel >= 2 * 8 * 64 * 64) is keeps_scores
    assert q.grad is not None and q.grad.shape == q.shape
    assert k.grad is not None and k.grad.shape == k.shape


def test_the_norm_of_cuda_keeps_its_input_and_a_number_per_token() -> None:
    x = torch.empty(2, 3, 8, device="meta", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.empty(8, device="meta", dtype=torch.bfloat16, requires_grad=True)
    kept = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append((tuple(tensor.shape), tensor.dtype))
        return tensor

    with patched("cuda"), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = F.rms_norm(x, (8,), weight, 1e-5)
        out.sum().backward()
    assert ((2, 3, 8), torch.bfloat16) in kept and ((2, 3, 1), torch.float32) in kept
    assert x.grad is not None and weight.grad is not None and weight.grad.shape == (8,)


def groups_of(item: tuple[MeshSpec, int]) -> dict[str, list[int]]:
    spec, rank = item
    with world(spec, rank, "cuda") as device:
        mesh = build_mesh(spec, device.type)
        return {name: torch.distributed.get_process_group_ranks(mesh[name].get_group()) for name in spec.names}


def test_groups_are_those_of_the_true_world() -> None:
    spec = MeshSpec.of(pp=16, dp_shard=128, tp=8)
    rank = 9_999
    (found,) = in_forks(groups_of, [(spec, rank)])
    assert found == {name: list(spec.group(rank, name)) for name in spec.names}


def twice(item: MeshSpec) -> None:
    with world(item, 0, "cpu"):
        pass
    with world(item, 0, "cpu"):
        pass


def test_a_process_is_one_rank_once() -> None:
    with pytest.raises(RankFailure, match="one rank of one world"):
        in_forks(twice, [MeshSpec.of()])


def test_the_fake_backend_is_named_for_meta() -> None:
    """Without it point-to-point batches find no backend for meta tensors."""
    assert dict(pair.split(":") for pair in BACKEND.split(",")) == {"cpu": "fake", "meta": "fake"}


def submeshes(spec: MeshSpec) -> list[bool]:
    with world(spec, 5, "cuda") as device:
        mesh = build_mesh(spec, device.type)
        joined = [DeviceMesh._concatenate([mesh["dp_shard"], mesh["tp"]]) for _ in range(2)]
        found = [mesh["tp"] is mesh["tp"], joined[0] is joined[1], joined[0] == mesh["dp_shard", "tp"]]
    return [*found, DeviceMesh._concatenate([mesh["dp_shard"], mesh["tp"]]) is not joined[0]]


def test_a_submesh_is_made_once() -> None:
    (found,) = in_forks(submeshes, [MeshSpec.of(pp=2, dp_shard=2, tp=2)])
    assert all(found)
