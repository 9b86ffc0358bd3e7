"""Tensor parallel's own parts on two ranks: the loss, the embedding, how parameters are cut."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny import Check
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard
from torch.utils._python_dispatch import TorchDispatchMode
from watch import Watch

from koushi.data.samples import IGNORE_INDEX
from koushi.layout import Replicate, Shard
from koushi.loss import token_loss_sum as plain_loss
from koushi.mesh import MeshSpec
from koushi.models.layers import Embedding, Linear, RMSNorm
from koushi.models.llama.layout import Region
from koushi.models.llama.model import Block, Rotary
from koushi.models.llama.sizes import LlamaSize
from koushi.parallel import recompute, tensor
from koushi.parallel.collectives import ALL_GATHER, REDUCE_SCATTER
from koushi.parallel.compose import tensor_parallel_options
from koushi.parallel.device_mesh import build_mesh
from koushi.plan.lifetimes import forward_span
from koushi.plan.stages import stage_of
from koushi.plan.workload import Transformer, Workload

VOCABULARY = 10
SIZE = LlamaSize(vocab_size=VOCABULARY, dim=16, n_layers=1, n_heads=4, n_kv_heads=2, ffn_dim=24)


def tp_mesh() -> DeviceMesh:
    return build_mesh(MeshSpec.of(tp=2), "cpu")["tp"]


def mine(x: Tensor, dim: int, submesh: DeviceMesh) -> Tensor:
    return x.chunk(2, dim)[submesh.get_local_rank()].contiguous()


def loss_and_gradient(logits: Tensor, labels: Tensor, submesh: DeviceMesh) -> tuple[Tensor, Tensor]:
    """Of this rank's share of ``logits``, with an upstream gradient that is not 1."""
    share = mine(logits, -1, submesh).requires_grad_()
    loss = tensor.token_loss_sum(share, labels, submesh)
    (loss / 3).backward()
    assert share.grad is not None
    return loss.detach(), share.grad


def expected_loss_and_gradient(logits: Tensor, labels: Tensor, submesh: DeviceMesh) -> tuple[Tensor, Tensor]:
    whole = logits.clone().requires_grad_()
    wide = whole if whole.dtype == torch.float64 else whole.float()
    loss = F.cross_entropy(wide.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")
    (loss / 3).backward()
    assert whole.grad is not None
    return loss.detach(), mine(whole.grad, -1, submesh)


def drawn(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = (4 * torch.randn(2, 6, VOCABULARY, generator=generator, dtype=torch.float64)).to(dtype)
    labels = torch.randint(0, VOCABULARY, (2, 6), generator=generator)
    labels[0, 0], labels[0, 1] = 0, VOCABULARY - 1
    return logits, labels


def loss_is_cross_entropy() -> None:
    submesh = tp_mesh()
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        logits, labels = drawn(dtype)
        found = loss_and_gradient(logits, labels, submesh)
        for one, other in zip(found, expected_loss_and_gradient(logits, labels, submesh), strict=True):
            torch.testing.assert_close(one, other)
        assert found[1].dtype == dtype
        torch.testing.assert_close(found[0], plain_loss(logits, labels))


def ignored_labels_count_for_nothing() -> None:
    submesh = tp_mesh()
    logits, labels = drawn(torch.float64)
    labels[0, ::2] = IGNORE_INDEX
    loss, gradient = loss_and_gradient(logits, labels, submesh)
    expected, slope = expected_loss_and_gradient(logits, labels, submesh)
    nothing, flat = loss_and_gradient(logits, torch.full_like(labels, IGNORE_INDEX), submesh)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient, slope)
    assert not gradient[0, ::2].any()
    assert nothing.item() == 0
    assert not flat.any()


def extreme_logits_stay_finite() -> None:
    """The label, or the highest logit, lies 1e4 away, in either rank's share."""
    submesh = tp_mesh()
    for dtype in (torch.float64, torch.float32):
        logits = torch.zeros(1, 8, VOCABULARY, dtype=dtype)
        logits[0, 0, 0], logits[0, 1, 9] = 1e4, 1e4
        logits[0, 2, 0], logits[0, 3, 9] = -1e4, -1e4
        logits[0, 4] = 1e4
        logits[0, 5] = -1e4
        logits[0, 6, :5], logits[0, 6, 5:] = 1e4, -1e4
        logits[0, 7, :5], logits[0, 7, 5:] = -1e4, 1e4
        for label in (0, 4, 5, 9):
            labels = torch.full((1, 8), label)
            loss, gradient = loss_and_gradient(logits, labels, submesh)
            expected, slope = expected_loss_and_gradient(logits, labels, submesh)
            assert loss.isfinite() and gradient.isfinite().all()
            torch.testing.assert_close(loss, expected)
            torch.testing.assert_close(gradient, slope)


def losses_are_the_same_on_every_rank() -> None:
    submesh = tp_mesh()
    logits, labels = drawn(torch.float32)
    loss = tensor.token_loss_sum(mine(logits, -1, submesh), labels, submesh)
    both = tensor.gather(loss.reshape(1), 0, submesh.get_group())
    assert torch.equal(both[0], both[1])


class Table(nn.Module):
    """Just an embedding, under a name."""

    def __init__(self) -> None:
        super().__init__()
        self.table = Embedding(VOCABULARY, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.table(tokens)
        return out


def embedding_is_looked_up_across_the_vocabulary() -> None:
    submesh = tp_mesh()
    tokens = torch.tensor([[0, 4, 5, 9, 5, 5], [1, 2, 3, 6, 7, 8]])
    torch.manual_seed(0)
    plain = Table().double()
    cut = Table().double()
    cut.load_state_dict(plain.state_dict())
    tensor.apply(cut, submesh, tensor.TensorParallel({"table.weight": Shard(0)}, (), {}))
    weights = torch.randn(2, 6, 4, dtype=torch.float64)
    found = cut(tokens)
    (found * mine(weights, 1, submesh)).sum().backward()
    expected = plain(tokens)
    (expected * weights).sum().backward()
    torch.testing.assert_close(found, mine(expected, 1, submesh))
    gradient = cut.table.weight.grad
    assert isinstance(gradient, DTensor)
    torch.testing.assert_close(gradient.to_local(), mine(plain.table.weight.grad, 0, submesh))
    cut.table.compute_dtype = torch.bfloat16
    assert cut(tokens).dtype == torch.bfloat16


def parameters_are_cut_as_they_lie() -> None:
    submesh = tp_mesh()
    full = torch.arange(24.0).view(6, 4)
    for placement, torchs in ((Shard(0), TorchShard(0)), (Shard(1), TorchShard(1)), (Replicate(), TorchReplicate())):
        parameter = tensor.distribute(full, placement, submesh)
        assert isinstance(parameter, nn.Parameter)
        assert isinstance(parameter.data, DTensor)
        assert parameter.placements == (torchs,)
        assert parameter.shape == full.shape
        local = parameter.to_local()
        expected = mine(full, placement.dim, submesh) if isinstance(placement, Shard) else full
        assert torch.equal(local, expected)
        assert torch.equal(parameter.full_tensor(), full)
        assert local.is_contiguous()
    uneven = tensor.distribute(torch.arange(5.0), Shard(0), submesh)
    assert uneven.to_local().tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0]][submesh.get_local_rank()]
    assert torch.equal(uneven.full_tensor(), torch.arange(5.0))


def block_pair(size: LlamaSize, submesh: DeviceMesh) -> tuple[nn.Module, nn.Module]:
    """A block as it is, and one cut over ``submesh``, with equal weights."""
    torch.manual_seed(1)
    plain, cut = Block(size).double(), Block(size).double()
    cut.load_state_dict(plain.state_dict())
    options = tensor_parallel_options(size, 2, submesh.get_local_rank())
    prefix = "layers.0."
    tensor.apply(
        cut,
        submesh,
        tensor.TensorParallel(
            {name.removeprefix(prefix): one for name, one in options.placements.items()},
            [Region(one.module.removeprefix("layers.*."), one.scatters) for one in options.regions],
            {name.removeprefix(prefix): one for name, one in options.copied_rows.items()},
        ),
    )
    return plain, cut


def blocks_compute_their_share() -> None:
    """With KV heads cut, and with one that both ranks hold; copied parameters have partial gradients."""
    submesh = tp_mesh()
    for size in (SIZE, replace(SIZE, n_kv_heads=1)):
        plain, cut = block_pair(size, submesh)
        x = torch.randn(2, 6, size.dim, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
        cos, sin = Rotary(size).tables(6, x.device, x.dtype)
        whole, part = x.clone().requires_grad_(), mine(x, 1, submesh).requires_grad_()
        expected, found = plain(whole, cos, sin), cut(part, cos, sin)
        expected.pow(2).sum().backward()
        found.pow(2).sum().backward()
        torch.testing.assert_close(found, mine(expected, 1, submesh))
        torch.testing.assert_close(part.grad, mine(whole.grad, 1, submesh))
        references = dict(plain.named_parameters())
        for name, parameter in cut.named_parameters():
            gradient, reference = parameter.grad.to_local(), references[name].grad
            placement = parameter.placements[0]
            if isinstance(placement, TorchShard):
                torch.testing.assert_close(gradient, mine(reference, placement.dim, submesh))
            else:
                summed = tensor.gather(gradient.unsqueeze(0), 0, submesh.get_group()).sum(0)
                torch.testing.assert_close(summed, reference)
        copied = [name for name, one in cut.named_parameters() if one.placements == (TorchReplicate(),)]
        assert len(copied) == (2 if size.n_kv_heads == 2 else 4)


class Counting(TorchDispatchMode):
    """How often each operation was called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[object] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func] += 1
        return func(*args, **(kwargs or {}))


def selective_recompute_gathers_again_and_sums_once() -> None:
    """Backward of two gathers and two sums is two of each; what is gathered again comes on top."""
    submesh = tp_mesh()
    found, gradients = {}, {}
    for mode in ("none", "selective", "full"):
        _, cut = block_pair(SIZE, submesh)
        recompute.apply(cut, mode)
        x = mine(torch.randn(2, 6, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(2)), 1, submesh)
        cos, sin = Rotary(SIZE).tables(6, x.device, x.dtype)
        out = cut(x.requires_grad_(), cos, sin)
        with Counting() as backward:
            out.pow(2).sum().backward()
        found[mode] = (backward.calls[ALL_GATHER], backward.calls[REDUCE_SCATTER])
        gradients[mode] = [parameter.grad.to_local() for parameter in cut.parameters()]
    # The last sum of a block is needed by nobody, so that full recompute stops before it.
    assert found == {"none": (2, 2), "selective": (4, 2), "full": (4, 3)}
    for mode in ("selective", "full"):
        assert all(torch.equal(*pair) for pair in zip(gradients[mode], gradients["none"], strict=True))


def selective_recompute_keeps_what_is_planned() -> None:
    """Pieces of x, q, k, v, attention with its sums, the first scatter's sum, w1 and w3: nothing whole. And no product
    is made again."""
    submesh = tp_mesh()
    kept, products = {}, {}
    for mode in ("none", "selective"):
        _, cut = block_pair(SIZE, submesh)
        recompute.apply(cut.float(), mode)
        x = torch.randn(2, 3, SIZE.dim, requires_grad=True)
        cos, sin = Rotary(SIZE).tables(6, x.device, x.dtype)
        with Watch() as forward:
            out = cut(x, cos, sin)
        besides = [parameter.to_local() for parameter in cut.parameters()]
        kept[mode] = forward.bytes_alive((*besides, x, cos, sin)) - out.nbytes
        with Watch() as backward:
            out.pow(2).sum().backward()
        products[mode] = backward.calls["mm"]
    key = SIZE.n_kv_heads * SIZE.head_dim
    values = 12 * (3 * SIZE.dim + 2 * key + 2 * SIZE.ffn_dim) // 2
    assert kept["selective"] == 4 * values + 4 * 12 * SIZE.n_heads // 2, kept
    assert products["selective"] == products["none"], products
    for mode in ("none", "selective"):
        workload = Workload(
            Transformer.of(SIZE), MeshSpec.of(tp=2), (1,), "1F1B", 6, 2, 1, recompute=mode, compute="float32"
        )
        ((block, _),) = stage_of(workload, 0, "cpu").blocks(True)
        assert forward_span(block).growth - out.nbytes == kept[mode], (mode, kept)


def a_sum_after_the_last_product_is_made_again_with_its_terms() -> None:
    submesh = tp_mesh()
    group = submesh.get_group()
    found = []
    for mode in ("none", "selective"):
        torch.manual_seed(3)
        module = recompute.apply(Late(lambda one: tensor.scatter_sum(one, 0, group)), mode)
        x = torch.randn(4, 2, requires_grad=True)
        module(x).sum().backward()
        found.append(x.grad)
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


class Late(nn.Module):
    """Two products, of which the first is added up after the second, and then kept by a sine for backward."""

    def __init__(self, add_up: Callable[[Tensor], Tensor]):
        super().__init__()
        self.first, self.second = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
        self.add_up = add_up

    def forward(self, x: Tensor) -> Tensor:
        one, two = self.first(x), self.second(x)
        return self.add_up(one).sin() * two[:2]


class Sums(nn.Module):
    """A product that is added up over ranks, and is used besides as an instance is told to."""

    def __init__(self, submesh: DeviceMesh, besides: Callable[[Tensor], Tensor]):
        super().__init__()
        self.first, self.second = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
        self.group, self.besides = submesh.get_group(), besides

    def forward(self, x: Tensor) -> Tensor:
        terms = self.first(x)
        added = tensor.scatter_sum(terms, 0, self.group)
        return self.second(added.sin() + self.besides(terms))


def terms_of_a_sum_that_are_read_again_are_missed() -> None:
    """Selective recompute has not kept them: better an error than another number."""
    submesh = tp_mesh()
    for besides, missed in ((lambda terms: 0, False), (lambda terms: terms[:2], True)):
        module = recompute.apply(Sums(submesh, besides), "selective")
        out = module(torch.randn(4, 2, requires_grad=True))
        if not missed:
            out.sum().backward()
            continue
        with pytest.raises(RuntimeError, match="meta"):
            out.sum().backward()


def tied_weights_stay_tied() -> None:
    submesh = tp_mesh()
    model = nn.ModuleDict({"table": Embedding(VOCABULARY, 4), "output": Linear(4, VOCABULARY)})
    model["output"].weight = model["table"].weight
    tensor.apply(model, submesh, tensor.TensorParallel({"table.weight": Shard(0), "output.weight": Shard(0)}, (), {}))
    assert model["output"].weight is model["table"].weight
    assert isinstance(model["table"].weight.data, DTensor)
    assert [name for name, _ in model.named_parameters()] == ["table.weight"]


def modules_it_cannot_localise_are_our_own_fault() -> None:
    submesh = tp_mesh()
    model = nn.ModuleDict({"norm": RMSNorm(4, 1e-5), "conv": nn.Conv1d(2, 2, 1)})
    placements = {name: Replicate() for name, _ in model.named_parameters()}
    with pytest.raises(AssertionError, match=r"conv \(Conv1d\) owns \['weight', 'bias'\]"):
        tensor.apply(model, submesh, tensor.TensorParallel(placements, (), {}))


CHECKS: tuple[Check, ...] = (
    loss_is_cross_entropy,
    ignored_labels_count_for_nothing,
    extreme_logits_stay_finite,
    losses_are_the_same_on_every_rank,
    embedding_is_looked_up_across_the_vocabulary,
    parameters_are_cut_as_they_lie,
    blocks_compute_their_share,
    selective_recompute_gathers_again_and_sums_once,
    selective_recompute_keeps_what_is_planned,
    terms_of_a_sum_that_are_read_again_are_missed,
    a_sum_after_the_last_product_is_made_again_with_its_terms,
    tied_weights_stay_tied,
    modules_it_cannot_localise_are_our_own_fault,
)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_on_two_ranks(check: Check, said: dict[str, list[str]]) -> None:
    assert said[check.__name__] == [], "\n".join(said[check.__name__])
