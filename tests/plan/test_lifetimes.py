"""What a block keeps for backward, by hand and by published counts; what recompute and split backwards change."""

from __future__ import annotations

from dataclasses import replace

import pytest

from koushi.mesh import MeshSpec
from koushi.plan.lifetimes import Stretch, Weights, backward_span, forward_span, keeps_input, left_over
from koushi.plan.spans import ACTIVATIONS, UNSHARDED_GRADIENTS
from koushi.plan.stages import stage_of
from koushi.plan.workload import Recompute, System, Transformer, Workload

TOKENS, DIM, HEADS, FFN = 64, 48, 6, 128
LLAMA = Transformer(1, DIM, HEADS, 2, DIM // HEADS, FFN, 100)
GPT = replace(
    LLAMA, n_kv_heads=HEADS, ffn_dim=4 * DIM, gated=False, biases=True, layer_norm=True, learned_positions=TOKENS
)
WEIGHTS = Weights(UNSHARDED_GRADIENTS, 2)


def workload(model: Transformer = LLAMA, tp: int = 1, **system: bool) -> Workload:
    return Workload(model, MeshSpec.of(tp=tp), (1,), "1F1B", TOKENS, 1, 1, system=System(**system))


def stretch(one: Workload, recompute: Recompute = "none") -> Stretch:
    ((part, _),) = stage_of(replace(one, recompute=recompute), 0, "gpu").blocks(True)
    return replace(part, weights=WEIGHTS)


def kept(one: Workload, recompute: Recompute = "none") -> int:
    """Bytes from the end of forward to backward, the block's output left out and its input counted."""
    part = stretch(one, recompute)
    out = part.ops[-1].size
    return forward_span(part).growth - out + (part.input_bytes if keeps_input(part) else 0)


def test_a_llama_block_by_hand() -> None:
    key = 2 * (DIM // HEADS)
    streams = 6 * DIM  # both norms' inputs and outputs, query, attention's output
    elements = TOKENS * (streams + 2 * key + 4 * FFN)
    floats = TOKENS * (HEADS + 2)  # attention's log-sum-exp of every head, both norms' root mean square
    assert kept(workload()) == 2 * elements + 4 * floats


def test_float32_with_grouped_heads_has_no_fused_kernel() -> None:
    """Of attention: query, key and value, each as wide as the query, the softmax and the result in place of what
    flash keeps."""
    single = replace(workload(), compute="float32")
    flash = replace(single, model=replace(LLAMA, n_kv_heads=HEADS))
    scores = HEADS * TOKENS * TOKENS
    assert kept(single) - kept(flash) == 4 * (scores - TOKENS * HEADS)


def test_selective_keeps_of_matmuls_and_attention_what_backward_needs() -> None:
    key = 2 * (DIM // HEADS)
    elements = TOKENS * (DIM + DIM + 2 * key + DIM + DIM + 2 * FFN)  # x, q, k, v, mixed, projected, gate, up
    assert kept(workload(), "selective") == 2 * elements + 4 * TOKENS * HEADS
    # The scatter's output stands in for what it adds up: everything is divided.
    assert kept(workload(tp=2), "selective") == elements + 4 * TOKENS * HEADS // 2


def test_torchs_own_selective_keeps_them_all() -> None:
    wide = TOKENS * DIM
    assert kept(workload(keeps_every_output=True), "selective") - kept(workload(), "selective") == 2 * wide
    # projected, down and what the last scatter gives
    more = kept(workload(tp=2, keeps_every_output=True), "selective") - kept(workload(tp=2), "selective")
    assert more == 2 * (wide + wide + wide // 2)


def test_what_a_scatter_adds_up_is_neither_kept_nor_made_again() -> None:
    part = stretch(workload(tp=2), "selective")
    assert part.skipped == {"projected", "down"}
    assert part.kept == {"q", "k", "v", "mixed", "attended", "gate", "up"}
    assert stretch(workload(), "selective").skipped == frozenset()


def test_full_keeps_the_input() -> None:
    assert kept(workload(), "full") == 2 * TOKENS * DIM


def test_a_gpt_block_as_published() -> None:
    """34 sbh + 5 as²b (arXiv 2205.05198, section 4.1), of which 2 sbh are dropout's masks on the residual stream,
    which nobody here has; two floats a row of each norm are not counted there."""
    unfused = kept(workload(GPT, flash_attention=False))
    assert unfused == TOKENS * (32 * DIM + 5 * HEADS * TOKENS) + 2 * 8 * TOKENS
    fused = kept(workload(GPT))
    assert fused == TOKENS * 32 * DIM + 4 * TOKENS * HEADS + 2 * 8 * TOKENS


def test_tensor_parallel_divides_what_published_counts_say() -> None:
    """sbh (10 + 24 / t) without sequence parallel, sbh 34 / t with (section 4.2), masks left out; kept gathered, the
    regions' inputs stay whole."""
    rows = 16 * TOKENS + 4 * TOKENS * HEADS // 2
    without = kept(workload(GPT, tp=2, sequence_parallel=False))
    assert without == TOKENS * DIM * (8 + 24 // 2) + rows
    again = kept(workload(GPT, tp=2, keeps_gathered=False))
    assert again == TOKENS * DIM * 32 // 2 + rows // 2 + 4 * TOKENS * HEADS // 4
    assert kept(workload(GPT, tp=2)) - again == TOKENS * DIM * 2


def test_what_the_loss_holds() -> None:
    """Of bfloat16 logits: their cast, and the softmax that is kept; in pieces, all log-softmax and a piece's cast."""
    one = workload(softmax_loss=True)
    logits, wide, ids = 2 * TOKENS * 100, 4 * TOKENS * 100, 9 * TOKENS
    loss = stage_of(one, 0, "gpu").loss()
    # The logits are there before, and go once they are cast.
    assert forward_span(loss).highest == 2 * wide + ids - logits
    assert forward_span(loss).growth == wide + ids - logits
    assert backward_span(loss).growth == -(wide + ids) + logits
    pieces = stage_of(replace(one, system=System(loss_chunks=4, whole_logits=True)), 0, "gpu")
    assert pieces.logits == logits
    assert forward_span(pieces.loss()).highest == wide + wide // 4
    assert stage_of(replace(one, system=System(loss_chunks=4)), 0, "gpu").logits == logits // 4


@pytest.mark.parametrize("recompute", ("none", "selective", "full"))
def test_backward_frees_all_that_forward_kept(recompute: Recompute) -> None:
    part = stretch(workload(tp=2), recompute)
    whole = backward_span(part)
    assert forward_span(part).after[ACTIVATIONS] + whole.after[ACTIVATIONS] == part.ops[-1].size - part.input_bytes + (
        0 if keeps_input(part) else part.input_bytes
    )
    weights = sum(op.weight for op in part.ops)
    assert whole.after[UNSHARDED_GRADIENTS] == 2 * weights
    added = replace(part, weights=replace(WEIGHTS, stay=False))
    assert backward_span(added).after[UNSHARDED_GRADIENTS] == 0


def test_the_halves_of_a_backward_end_where_the_whole_does() -> None:
    part = stretch(workload())
    first, second, whole = (backward_span(part, half) for half in ("inputs", "weights", None))
    left = left_over(part)
    ends = [one + other - late for one, other, late in zip(first.after, second.after, left, strict=True)]
    assert ends == list(whole.after)
    assert first.growth > 0 > whole.growth - 2 * sum(op.weight for op in part.ops)
    # What attention has kept hangs on the projection behind it, and stays until all weights are done.
    assert left[ACTIVATIONS] > next(op.hidden for op in part.ops if op.makes == "mixed") > 0
    assert all(size >= 0 for size in left)


def test_the_last_block_of_a_stage_lets_go_between_its_weights() -> None:
    """With the gradient of the weight that reads the product goes what silu and the product had kept, before the last
    weight's is made; with that, all the rest."""
    tokens = 4  # so that most is held as the last weight's gradient is made
    part = stretch(replace(workload(), compute="float32", seq_len=tokens))
    last = replace(part, handed=True)
    block, end = backward_span(part, "weights"), backward_span(last, "weights")
    weights = 2 * sum(op.weight for op in part.ops)
    assert block.peak[UNSHARDED_GRADIENTS] == end.peak[UNSHARDED_GRADIENTS] == weights
    inner, stream = 4 * tokens * FFN, 4 * tokens * DIM
    # Gate, what silu makes of it, and up; the gradient that came into the block is not its own to free.
    assert block.highest - end.highest == 3 * inner - stream
    assert left_over(part)[ACTIVATIONS] > 3 * inner
    assert left_over(last)[ACTIVATIONS] == 0


def test_what_was_made_again_holds_its_input_through_both_halves() -> None:
    once, again = stretch(workload()), stretch(workload(), "selective")
    assert left_over(again)[ACTIVATIONS] - left_over(once)[ACTIVATIONS] == once.input_bytes
    assert left_over(replace(again, handed=True))[ACTIVATIONS] == once.input_bytes


def test_a_share_of_layers_and_of_matmuls() -> None:
    one = replace(workload(), stage_layers=(8,), recompute="full", system=System(recompute_share=0.5))
    assert [(part.recompute, count) for part, count in stage_of(one, 0, "gpu").blocks(True)] == [
        ("full", 4),
        ("none", 4),
    ]
    other = replace(workload(), recompute="selective", system=System(kept_matmuls=0.5))
    ((part, _),) = stage_of(other, 0, "gpu").blocks(True)
    assert part.kept == {"q", "v", "mixed", "gate"}
    every = replace(other, system=System(kept_matmuls=0.5, keeps_every_output=True))
    ((part, _),) = stage_of(every, 0, "gpu").blocks(True)
    assert part.kept == {"q", "v", "mixed", "gate", "down"}
