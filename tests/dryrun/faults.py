"""Faults seeded into the real step, each of which the audit must find by the right rule.

A dry run's ranks are forked, so what a test patches here is patched there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from seeded import Patch, averaged
from torch import Tensor, nn

from koushi.parallel import compose, data, gradients, tensor
from koushi.train.step import TrainStep


def _before_step(patch: Patch, work: Callable[[compose.ParallelModel], None]) -> None:
    original = TrainStep.accumulate

    def accumulate(self: TrainStep, *batch: Any) -> None:
        work(self._model)
        original(self, *batch)

    patch.setattr(TrainStep, "accumulate", accumulate)


def _after_backward(patch: Patch, work: Callable[[Any, Any], None]) -> None:
    original = gradients.finish

    def finish(parameters: Any, groups: Any, tied_ends: Any) -> None:
        original(parameters, groups, tied_ends)
        work(parameters, groups)

    patch.setattr(gradients, "finish", finish)


def _in_parts(patch: Patch, work: Callable[[compose.ParallelModel], None]) -> None:
    """Do something to the built model."""
    original = compose.build

    def build(*arguments: Any) -> compose.ParallelModel:
        model = original(*arguments)
        work(model)
        return model

    patch.setattr("koushi.dryrun.audited.build", build)


def loss_over_tp(patch: Patch) -> None:
    """The loss, the same on every tp rank, is summed over tp with the norm."""

    def sum_scalars(loss: Tensor, squared: Tensor, groups: Any) -> tuple[Tensor, Tensor]:
        both = torch.stack((loss, squared))
        for name in ("dp_shard", "tp"):
            if name in groups:
                dist.all_reduce(both, group=groups[name])
        return both[0], both[1]

    patch.setattr(gradients, "sum_scalars", sum_scalars)


def microbatch_loss_over_tp(patch: Patch) -> None:
    original = compose.GlobalLoss.__call__

    def call(self: compose.GlobalLoss, logits: Tensor, labels: Tensor) -> Tensor:
        loss = original(self, logits, labels)
        total = loss.detach().clone()
        dist.all_reduce(total, group=self._tp.get_group())  # type: ignore[union-attr]
        return loss + total - total

    patch.setattr(compose.GlobalLoss, "__call__", call)


def reduced_again(name: str) -> Callable[[Patch], None]:
    def reduced(patch: Patch) -> None:
        """Gradients that backward has reduced are reduced once more."""

        def again(parameters: Any, groups: Any) -> None:
            for one in parameters:
                dist.all_reduce(one.gradient, group=groups[name])

        _after_backward(patch, again)

    return reduced


def parameter_on_world(patch: Patch) -> None:
    """One parameter is gathered over all ranks, as a look at its norm might."""

    def gather(model: compose.ParallelModel) -> None:
        value = model.parameters[0].value.contiguous()
        dist.all_gather([torch.empty_like(value) for _ in range(dist.get_world_size())], value)

    _before_step(patch, gather)


def parameter_over_tp(patch: Patch) -> None:
    def gather(model: compose.ParallelModel) -> None:
        value = model.parameters[0].value.contiguous()
        dist.all_gather([torch.empty_like(value) for _ in range(2)], value, group=model.groups["tp"])

    _before_step(patch, gather)


def other_order(patch: Patch) -> None:
    """Ranks 1 and 2 sum scalars over the mesh dims in another order, so that each waits for the next."""

    def sum_scalars(loss: Tensor, squared: Tensor, groups: Any) -> tuple[Tensor, Tensor]:
        both = torch.stack((loss.to(squared.dtype), squared))
        names = ["dp_replicate", "dp_shard"]
        for name in reversed(names) if dist.get_rank() in (1, 2) else names:
            dist.all_reduce(both[:1] if name == "dp_replicate" else both, group=groups[name])
        return both[0], both[1]

    patch.setattr(gradients, "sum_scalars", sum_scalars)


def other_order_in_group(patch: Patch) -> None:
    """Rank 1 sums gradients in another order than rank 0."""

    def sum_over(tensors: list[Tensor], group: dist.ProcessGroup) -> None:
        for one in reversed(tensors[:2]) if dist.get_rank() == 1 else tensors[:2]:
            dist.all_reduce(one.new_zeros(one.numel() * (1 + (one is tensors[0]))), group=group)

    patch.setattr(gradients, "sum_over", sum_over)


def skipped(patch: Patch) -> None:
    """One rank leaves out what its group does."""
    original = gradients.sum_over

    def sum_over(tensors: list[Tensor], group: dist.ProcessGroup) -> None:
        if dist.get_rank() != 1:
            original(tensors, group)

    patch.setattr(gradients, "sum_over", sum_over)


def other_dtype(patch: Patch) -> None:
    """One rank reduces its gradients in another dtype."""
    original = data.apply

    def apply(module: Any, submesh: Any, options: data.DataParallel, *rest: Any) -> Any:
        if dist.get_rank() == 1:
            options = replace(options, reduce=torch.bfloat16)
        return original(module, submesh, options, *rest)

    patch.setattr(data, "apply", apply)


def norm_counts_copies(patch: Patch) -> None:
    """Every tp rank counts the parameters that all of them hold."""
    original = gradients.squared_norm
    patch.setattr(gradients, "squared_norm", lambda held: original([replace(one, counted=True) for one in held]))


def gathered_twice(patch: Patch) -> None:
    """A region's input is gathered for each of two uses."""
    original = tensor.gather
    patch.setattr(tensor, "gather", lambda *given: original(*given) * 0.5 + original(*given) * 0.5)


def unused(patch: Patch) -> None:
    """A sum that nobody reads."""

    def look(parameters: Any, groups: Any) -> None:
        total = parameters[0].gradient.norm()
        dist.all_reduce(total, group=groups["dp_shard"])

    _after_backward(patch, look)


def gather_undone(patch: Patch) -> None:
    """The whole sequence is gathered and cut again."""

    def hook(part: nn.Module, group: dist.ProcessGroup) -> None:
        def gather_and_cut(module: nn.Module, args: Any, out: Tensor) -> Tensor:
            return tensor.gather(out, 1, group).chunk(group.size(), 1)[group.rank()]

        part.layers["0"].ffn_norm.register_forward_hook(gather_and_cut)  # type: ignore[index,union-attr]

    _in_parts(patch, lambda model: [hook(part, model.groups["tp"]) for part in model.parts.values()] and None)


def gather_scattered(patch: Patch) -> None:
    """The whole sequence is gathered and scattered back at once."""
    original = tensor.scatter_sum

    def hook(part: nn.Module, group: dist.ProcessGroup) -> None:
        def there_and_back(module: nn.Module, args: Any, out: Tensor) -> Tensor:
            return original(tensor.gather(out, 1, group), 1, group) / group.size()

        part.layers["0"].ffn_norm.register_forward_hook(there_and_back)  # type: ignore[index,union-attr]

    _in_parts(patch, lambda model: [hook(part, model.groups["tp"]) for part in model.parts.values()] and None)


def group_of_one(patch: Patch) -> None:
    """Scalars are summed over every dim, also those of degree 1."""
    original = compose.build

    def build(job: Any, world_mesh: Any, device: Any) -> compose.ParallelModel:
        model = original(job, world_mesh, device)
        return replace(model, groups={name: world_mesh[name].get_group() for name in job.mesh.names})

    patch.setattr("koushi.dryrun.audited.build", build)


def activation_over_dp_shard(patch: Patch) -> None:
    """Neighbours along dp_shard pass activations on."""

    def hook(model: compose.ParallelModel) -> None:
        group = model.groups["dp_shard"]
        peer = dist.get_global_rank(group, 1 - group.rank())

        def exchange(module: nn.Module, args: Any, out: Tensor) -> None:
            theirs = torch.empty_like(out)
            pair = [dist.P2POp(dist.isend, out.detach(), peer, group), dist.P2POp(dist.irecv, theirs, peer, group)]
            for work in dist.batch_isend_irecv(pair):
                work.wait()

        (part,) = model.parts.values()
        part.layers["1"].register_forward_hook(exchange)

    _in_parts(patch, hook)


def activation_gathered_over_dp_shard(patch: Patch) -> None:
    def hook(model: compose.ParallelModel) -> None:
        group = model.groups["dp_shard"]

        def gather(module: nn.Module, args: Any, out: Tensor) -> Tensor:
            return tensor.gather(out, 0, group)[: out.shape[0]] * 0.5 + out * 0.5

        (part,) = model.parts.values()
        part.layers["1"].register_forward_hook(gather)

    _in_parts(patch, hook)


def cut_gradients_over_tp(patch: Patch) -> None:
    """Gradients of all parameters are summed over tp, also of those that tp cuts."""

    def add(parameters: Any, groups: Any) -> None:
        cut = next(one for one in parameters if not one.copied_over_tp)
        dist.all_reduce(cut.gradient, group=groups["tp"])

    _after_backward(patch, add)


def own_group(patch: Patch) -> None:
    """The loss is summed over ranks that are no group of the mesh."""

    def look(model: compose.ParallelModel) -> None:
        group = dist.new_group([0, 3])
        if dist.get_rank() in (0, 3):
            dist.all_reduce(model.parameters[0].value.norm(), group=group)

    _before_step(patch, look)


def jumps_a_stage(patch: Patch) -> None:
    """A stage sends to the one after the next."""

    def jump(model: compose.ParallelModel) -> None:
        group = model.groups["pp"]
        if group.rank() == 0:
            dist.send(torch.zeros(4, device="meta"), dist.get_global_rank(group, 2), group=group)
        if group.rank() == 2:
            dist.recv(torch.zeros(4, device="meta"), dist.get_global_rank(group, 0), group=group)

    _before_step(patch, jump)


def never_received(patch: Patch) -> None:
    def send(model: compose.ParallelModel) -> None:
        group = model.groups["pp"]
        if group.rank() == 0:
            dist.send(torch.zeros(4, device="meta"), dist.get_global_rank(group, 1), group=group)

    _before_step(patch, send)


def other_size_between_stages(patch: Patch) -> None:
    """The last stage awaits its activations in another dtype, of twice the bytes."""
    original = compose.pipeline_options

    def options(job: Any, device: Any) -> Any:
        given = original(job, device)
        return replace(given, compute=torch.float64) if dist.get_rank() == 1 else given

    patch.setattr(compose, "pipeline_options", options)


@dataclass(frozen=True)
class Fault:
    install: Callable[[Patch], None]
    overrides: tuple[str, ...]
    rule: str
    says: tuple[str, ...] = ()
    """What the finding must name besides."""
    every_rank: bool = False
    """Whether ranks are made to differ that else run alike."""

    @property
    def name(self) -> str:
        return f"{self.install.__name__} {' '.join(self.overrides)}"


TP2, SHARD2, REPLICATE2 = ("--tp", "2"), ("--dp-shard", "2"), ("--dp-replicate", "2")
PP2, PP4 = ("--pp", "2"), ("--pp", "4", "model.n_layers=6")
FAULTS = (
    Fault(loss_over_tp, (*SHARD2, *TP2), "copies counted", ("on tp",)),
    Fault(microbatch_loss_over_tp, TP2, "counts twice", ("on tp", "faults.py")),
    Fault(averaged, SHARD2, "averages", ("on dp_shard", "layers.0", "by 0.5")),
    Fault(averaged, REPLICATE2, "averages", ("on dp_replicate", "layers.0", "by 0.5")),
    Fault(reduced_again("dp_replicate"), REPLICATE2, "counts twice", ("on dp_replicate", "faults.py")),
    Fault(reduced_again("dp_shard"), SHARD2, "not allowed", ("on dp_shard", "tok_embeddings.weight")),
    Fault(parameter_on_world, (*SHARD2, *TP2), "not allowed", ("on dp_shard,tp", "tok_embeddings.weight")),
    Fault(parameter_over_tp, TP2, "wrong sub-mesh", ("on tp", "tok_embeddings.weight")),
    Fault(other_order, (*REPLICATE2, *SHARD2), "stuck", ("on dp_replicate", "on dp_shard"), every_rank=True),
    Fault(other_order_in_group, TP2, "different order", ("rank 1",), every_rank=True),
    Fault(skipped, TP2, "different order", ("gradients.py",), every_rank=True),
    Fault(other_dtype, SHARD2, "different order", ("bfloat16", "float32"), every_rank=True),
    Fault(norm_counts_copies, TP2, "copies counted", ("on tp", "gradients.py")),
    Fault(norm_counts_copies, (*PP2, *SHARD2, *TP2), "copies counted", ("on tp", "gradients.py")),
    Fault(gathered_twice, TP2, "gathered again", ("on tp", "attention")),
    Fault(unused, SHARD2, "unused", ("on dp_shard", "faults.py")),
    Fault(gather_undone, TP2, "undone", ("on tp", "layers.0.ffn_norm")),
    Fault(gather_scattered, TP2, "undone", ("on tp", "layers.0.ffn_norm")),
    Fault(group_of_one, SHARD2, "group of one", ("gradients.py",)),
    Fault(activation_over_dp_shard, SHARD2, "not allowed", ("on dp_shard", "layers.1")),
    Fault(activation_gathered_over_dp_shard, SHARD2, "wrong sub-mesh", ("on dp_shard", "layers.1")),
    Fault(cut_gradients_over_tp, TP2, "wrong sub-mesh", ("on tp", "tok_embeddings.weight")),
    Fault(own_group, (*REPLICATE2, *SHARD2), "no sub-mesh", ("ranks 0,3",), every_rank=True),
    Fault(jumps_a_stage, PP4, "no neighbour", ("to rank 2",)),
    Fault(never_received, PP2, "unmatched message", ("faults.py", "pipeline.py")),
    Fault(other_size_between_stages, PP2, "unmatched message", ("float64", "float32")),
)
