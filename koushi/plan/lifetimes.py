"""When each tensor of a run of operations is made and let go, forward and backward. No torch.

Autograd's rules: a tensor lives until Python and every saved variable have let it go; an operation's backward
frees what it has saved and the gradient that came in once it has made its own; a second gradient of the same
tensor is added to the first, in place where nobody else holds that and it is no view, which holds what it is a view
of (torch/csrc/autograd/input_buffer.cpp, where no dispatch mode watches). Non-reentrant checkpointing (arXiv
1604.06174) keeps a block's input and stops going forward again at the last tensor that backward needs; selective
recompute also keeps the outputs of operations that are dear (arXiv 2205.05198).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cache
from typing import Literal

from koushi.plan.operations import Op
from koushi.plan.spans import ACTIVATIONS, Account, Bytes, Span
from koushi.plan.workload import Recompute

Ops = tuple[Op, ...]
Half = Literal["inputs", "weights"]
"""Parts of a backward that is split in two."""


@dataclass(frozen=True)
class Weights:
    """What happens to the gradients of weights as backward makes them."""

    kind: int
    """Where they count."""
    width: int
    """Bytes of an element when made."""
    cast: int = 0
    """Bytes of an element of the cast of a weight that its operation keeps; 0 where there is none."""
    stay: bool = True
    """Whether they stay; else they are added at once to those of an earlier microbatch."""


@dataclass(frozen=True)
class Stretch:
    """Operations that autograd goes through, and how."""

    ops: Ops
    weights: Weights
    input_bytes: int = 0
    """Of ``x``; 0 where that lies in a buffer which stays."""
    input_kind: int = ACTIVATIONS
    recompute: Recompute = "none"
    kept: frozenset[str] = frozenset()
    """Outputs that selective recompute keeps."""
    skipped: frozenset[str] = frozenset()
    """Those that it neither keeps nor makes again."""
    held: frozenset[str] = frozenset()
    """What somebody else holds from the end of forward to the end of backward."""
    handed: bool = False
    """Whether the gradient of the output lies in a buffer which stays."""
    stops_early: bool = True
    """Whether a checkpoint stops at the last tensor that backward needs; else it goes forward to the end."""

    @property
    def last(self) -> str:
        return self.ops[-1].makes


def keeps_input(stretch: Stretch) -> bool:
    """Whether ``x`` is there until backward."""
    return stretch.recompute != "none" or any("x" in op.saves for op in stretch.ops)


@cache
def forward_span(stretch: Stretch) -> Span:
    """Begins with the input ``x`` there, ends with the output and what is kept for backward."""
    run = _forward(stretch, Account())
    return run.account.close()


@cache
def backward_span(stretch: Stretch, half: Half | None = None) -> Span:
    """Begins with the gradient of the output and what forward has kept; ends with the gradient of ``x`` and those
    of weights where they stay. The output itself, what is ``held`` and what is ``handed`` are not its own to free.

    The first half of a split backward keeps everything for the second, and each weight's incoming gradient besides.
    The second goes through the weights alone; ``left_over`` is what stays after it.
    """
    if half == "weights":
        return _second_half(stretch)
    run = _forward(stretch, Account())
    run.alive.pop(stretch.last, None)
    run.account = Account()
    if stretch.recompute != "none":
        run.again()
    run.backward(half)
    return run.account.close()


def _second_half(stretch: Stretch) -> Span:
    """One weight's gradient after the other, in the order in which a block has its weights. Each lets go what its
    operation had kept for it. What operations without a weight have kept hangs on operations further on, and these on
    the next block; only in a stage's last block, whose output's gradient is ``handed``, nothing is further on. A
    gradient that has been added to those that are there lives until the next is made, in a variable of torch's loop
    over the weights (torch/distributed/pipelining/_backward.py, ``stage_backward_weight``)."""
    account, weights = Account(), stretch.weights
    graph = _Graph(stretch, account)
    last = stretch.ops[-1]
    handed = {last.makes, *(name for name, size in last.gives if not size)} if stretch.handed else ()
    added = 0
    # `w3`, which makes `up`, stands behind `w2`, which reads the product.
    for op in sorted((op for op in stretch.ops if op.weight), key=lambda op: op.makes == "up"):
        made = op.weight * (weights.cast or weights.width)
        account.touch(op.kind, op.half_frees)  # the gradient of every row, before their sum
        account.hold(weights.kind, made)
        account.drop(ACTIVATIONS, op.used * weights.cast)
        graph.backward(op)
        if weights.cast:
            account.hold(weights.kind, op.weight * weights.width)
            account.drop(weights.kind, made)
        # Torch's loop has the gradient that came in until autograd is through.
        account.drop(op.kind, op.half_keeps or (0 if op.makes in handed else op.size))
        if not weights.stay:
            account.drop(weights.kind, added)
            added = op.weight * weights.width
        graph.done(op)
    account.drop(weights.kind, added)
    return account.close()


class _Graph:
    """Which operations of the graph still hold what they have saved, in the second half of a backward."""

    def __init__(self, stretch: Stretch, account: Account):
        self._stretch, self._account = stretch, account
        self._kinds = {op.makes: op.kind for op in stretch.ops} | {"x": stretch.input_kind}
        self._sizes = {op.makes: op.size for op in stretch.ops} | {"x": stretch.input_bytes}
        self._savers = Counter(name for op in stretch.ops for name in op.saves)
        self._held = stretch.held | ({"x"} if stretch.recompute != "none" else set())
        self._full = {op.makes for op in stretch.ops}
        """What has been made by an operation that holds what it has saved, or a part of it."""
        self._waiting = {op.makes for op in stretch.ops if op.weight}
        """By one whose weight has no gradient yet."""

    def backward(self, op: Op) -> None:
        """Through ``op``, for its weight: frees what it has saved, or the part that the weight's gradient needs."""
        if op.half_frees:
            self._account.drop(op.kind, op.half_frees)
        else:
            self._free(op)

    def _free(self, op: Op) -> None:
        if op.makes not in self._full:
            return
        self._full.remove(op.makes)
        self._account.drop(op.kind, op.hidden - op.half_frees)
        for name in op.saves:
            self._savers[name] -= 1
            if not self._savers[name] and name not in self._held:
                self._account.drop(self._kinds[name], self._sizes[name])

    def done(self, op: Op) -> None:
        """The gradient of the weight of ``op`` is there; go all that nobody further on holds now."""
        self._waiting.remove(op.makes)
        if not self._stretch.handed:
            return
        held = set(self._waiting)
        for one in reversed(self._stretch.ops):
            if one.makes in held:
                held |= {name for name, _ in one.gives}
            else:
                self._free(one)


@cache
def left_over(stretch: Stretch) -> Bytes:
    """What is let go only once the second half of a backward is through with everything."""
    halves = backward_span(stretch, "inputs").after, backward_span(stretch, "weights").after
    whole = backward_span(stretch).after
    return tuple(
        0 if kind == stretch.weights.kind else first + second - end
        for kind, (first, second, end) in enumerate(zip(*halves, whole, strict=True))
    )


def _forward(stretch: Stretch, account: Account) -> _Run:
    run = _Run(stretch, account)
    if stretch.recompute != "none":
        run.keep = stretch.kept | {"x"} if stretch.recompute == "selective" else frozenset({"x"})
    run.forward(len(stretch.ops), saving=stretch.recompute == "none")
    return run


class _Run:
    """Tensors by name, as they come and go."""

    def __init__(self, stretch: Stretch, account: Account):
        self.stretch, self.account = stretch, account
        ops = stretch.ops
        self.last_read = {name: index for index, op in enumerate(ops) for name in op.reads}
        self.kinds = {op.makes: op.kind for op in ops} | {"x": stretch.input_kind}
        self.alive: dict[str, int] = {"x": stretch.input_bytes}
        self.saved: Counter[str] = Counter()
        self.keep: frozenset[str] = frozenset()
        """What a checkpoint keeps, whatever Python does."""
        self.views: set[str] = set()
        """What has gradients that are views."""

    def forward(self, stop: int, saving: bool, cached: frozenset[str] = frozenset()) -> None:
        """Through the operations before ``stop``; outputs named in ``cached`` are not made."""
        for index, op in enumerate(self.stretch.ops[:stop]):
            cast = op.used * self.stretch.weights.cast
            if op.makes not in cached:
                self.account.hold(op.kind, op.size + op.hidden)
                self.alive[op.makes] = op.size
            self.account.hold(ACTIVATIONS, cast)
            self.account.touch(op.kind, op.work)
            if saving:
                self.saved.update(op.saves)
            else:
                self.account.drop(ACTIVATIONS, cast)
                if op.makes not in self.keep:
                    self.account.drop(op.kind, op.hidden)
            for name in op.reads:
                if self.last_read[name] == index:
                    self.release(name)

    def release(self, name: str) -> None:
        """Python has let go."""
        if name in self.alive and not self.saved[name] and name not in self.keep and name not in self.stretch.held:
            self.account.drop(self.kinds[name], self.alive.pop(name))

    def again(self) -> None:
        """What a checkpoint does before backward: forward, up to the last operation that saves anything."""
        ops = self.stretch.ops
        stop = max(index for index, op in enumerate(ops) if op.saves or op.hidden)
        if not self.stretch.stops_early:
            stop = len(ops) - 1
        cached = self.keep - {"x"}
        late = frozenset(op.makes for op in ops[stop:])
        self.keep = (cached & late) | {"x"}
        self.forward(stop, saving=True, cached=cached | self.stretch.skipped)
        self.saved.update(ops[stop].saves)
        self.account.hold(ACTIVATIONS, ops[stop].hidden + ops[stop].used * self.stretch.weights.cast)
        for name in list(self.alive):
            self.release(name)

    def backward(self, half: Half | None) -> None:
        weights = self.stretch.weights
        last = self.stretch.ops[-1]
        gradients: dict[str, list[int]] = {last.makes: [last.size, 2 if self.stretch.handed else 1]}
        for op in reversed(self.stretch.ops):
            gradient = gradients.pop(op.makes, [0, 1])  # none for token ids
            for name, size in op.gives:
                self.account.hold(self.kinds[name], size)
            if half is None:
                self.account.hold(weights.kind, op.weight * (weights.cast or weights.width))
            if half == "inputs":
                self.account.hold(op.kind, op.half_keeps)
            work = op.half_work or op.back_work if half == "inputs" else op.back_work
            if op.early and gradients.get(op.gives[0][0], (0, 0))[1] == 1:
                work -= op.early
            self.account.touch(op.kind, work)
            gradient[1] += sum(not size for _, size in op.gives)
            if half is None or not op.weight or op.half_keeps:
                self._let_go(op.kind, gradient)
            if half is None:
                self._free_saved(op)
            self._add(op, gradient, gradients)
            if half is None:
                self._weight_gradient(op.weight)
        if half is None:
            self.keep = frozenset()
            for name in self.alive.keys() - self.stretch.held:
                self.account.drop(self.kinds[name], self.alive.pop(name))

    def _free_saved(self, op: Op) -> None:
        for name in op.saves:
            self.saved[name] -= 1
            self.release(name)
        self.account.drop(op.kind, op.hidden)
        self.account.drop(ACTIVATIONS, op.used * self.stretch.weights.cast)

    def _weight_gradient(self, count: int) -> None:
        """Into the weight's own dtype, and to those that are there already."""
        weights = self.stretch.weights
        if weights.cast:
            self.account.hold(weights.kind, count * weights.width)
            self.account.drop(weights.kind, count * weights.cast)
        if not weights.stay:
            self.account.drop(weights.kind, count * weights.width)

    def _add(self, op: Op, gradient: list[int], gradients: dict[str, list[int]]) -> None:
        """What an operation gives to what others have given the same tensor, when the operation is through."""
        for name, size in op.gives:
            there = gradients.get(name)
            if there is None:
                gradients[name] = [size, 1] if size else gradient
                if op.weight and op.kept:  # a matmul's of matrices, seen as samples
                    self.views.add(name)
                continue
            if there[1] > 1 or name in self.views:
                self.account.hold(self.kinds[name], there[0])  # the sum is a tensor of its own
                self._let_go(self.kinds[name], there)
                gradients[name] = [there[0], 1]
                self.views.discard(name)
            if size:
                self.account.drop(self.kinds[name], size)
            else:
                self._let_go(op.kind, gradient)

    def _let_go(self, kind: int, gradient: list[int]) -> None:
        """Of a gradient, by one of those that hold it."""
        gradient[1] -= 1
        if not gradient[1]:
            self.account.drop(kind, gradient[0])
