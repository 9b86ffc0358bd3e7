"""The plain model against formulas written out one number at a time."""

from __future__ import annotations

import cmath
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from koushi.config.schema import RopeScaling
from koushi.models.layers import Embedding, Linear, RMSNorm
from koushi.models.llama.layout import EMBEDDING, OUTPUT, block_parameters, canonical, parameters
from koushi.models.llama.model import Attention, FeedForward, Llama, rotary_frequencies, rotate
from koushi.models.llama.sizes import PRESETS, LlamaSize

SIZE = LlamaSize(vocab_size=24, dim=16, n_layers=4, n_heads=4, n_kv_heads=2, ffn_dim=20)
SCALED = LlamaSize(
    vocab_size=24,
    dim=128,
    n_layers=1,
    n_heads=2,
    n_kv_heads=1,
    ffn_dim=20,
    rope_scaling=RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=8192),
)
PUBLISHED = {
    "llama3-1b": 1_235_814_400,
    "llama3-3b": 3_212_749_824,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
}


def make(size: LlamaSize = SIZE, seq_len: int = 6) -> Llama:
    """A model in float64, with weights large enough to matter."""
    torch.manual_seed(3)
    model = Llama(size, seq_len).double()
    model.set_compute_dtype(torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(mean=float(parameter.ndim == 1), std=0.3)
    return model


def frequency(pair: int, size: LlamaSize) -> tuple[float, str]:
    """Angle per token of a channel pair, and which part of the spectrum it lies in."""
    plain = 1.0 / size.rope_theta ** (2 * pair / size.head_dim)
    scaling = size.rope_scaling
    if scaling is None:
        return plain, "unscaled"
    wavelength = 2 * math.pi / plain
    if wavelength > scaling.original_max_seq_len / scaling.low_freq_factor:
        return plain / scaling.factor, "low"
    if wavelength < scaling.original_max_seq_len / scaling.high_freq_factor:
        return plain, "high"
    share = scaling.original_max_seq_len / wavelength - scaling.low_freq_factor
    share /= scaling.high_freq_factor - scaling.low_freq_factor
    return (1 - share) * plain / scaling.factor + share * plain, "middle"


@pytest.mark.parametrize(
    ("size", "bands"), [(SIZE, {"unscaled"}), (SCALED, {"low", "middle", "high"})], ids=("plain", "scaled")
)
def test_rotary_frequencies(size: LlamaSize, bands: set[str]) -> None:
    expected = [frequency(pair, size) for pair in range(size.head_dim // 2)]
    assert {band for _, band in expected} == bands
    found = rotary_frequencies(size)
    assert found.dtype == torch.float64
    assert found.tolist() == pytest.approx([value for value, _ in expected], rel=1e-13, abs=0)


@pytest.mark.parametrize("size", (SIZE, SCALED), ids=("plain", "scaled"))
def test_rotation_turns_channel_pairs_as_complex_numbers(size: LlamaSize) -> None:
    torch.manual_seed(0)
    seq_len = 5
    x = torch.randn(2, 3, seq_len, size.head_dim, dtype=torch.float64)
    cos, sin = Llama(size, seq_len).rotary.tables(seq_len, x.device, x.dtype)
    expected = x.clone()
    for position in range(seq_len):
        for pair in range(size.head_dim // 2):
            turn = cmath.exp(1j * position * frequency(pair, size)[0])
            for sample in range(2):
                for head in range(3):
                    real, imaginary = x[sample, head, position, 2 * pair : 2 * pair + 2].tolist()
                    turned = complex(real, imaginary) * turn
                    expected[sample, head, position, 2 * pair] = turned.real
                    expected[sample, head, position, 2 * pair + 1] = turned.imag
    torch.testing.assert_close(rotate(x, cos, sin), expected, rtol=1e-12, atol=1e-12)


def test_products_of_rotated_vectors_depend_on_distance_alone() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(2, SIZE.head_dim, dtype=torch.float64)
    cos, sin = Llama(SIZE, 20).rotary.tables(20, q.device, q.dtype)
    turned_q, turned_k = (rotate(x.expand(1, 1, 20, -1), cos, sin)[0, 0] for x in (q, k))
    products = turned_q @ turned_k.T
    for distance in range(8):
        diagonal = products.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-10, atol=1e-12)


def explicit_attention(attention: Attention, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """One head at a time, with its group's KV head, a mask of its own and a softmax."""
    tokens, width = x.shape[1], attention.head_dim
    mask = torch.full((tokens, tokens), -math.inf, dtype=x.dtype).triu(1)
    heads = attention.wq.weight.shape[0] // width
    repeats = attention.wq.weight.shape[0] // attention.wk.weight.shape[0]
    mixed = []
    for head in range(heads):
        rows, shared = (slice(one * width, (one + 1) * width) for one in (head, head // repeats))
        q = rotate((x @ attention.wq.weight[rows].T).unsqueeze(1), cos, sin).squeeze(1)
        k = rotate((x @ attention.wk.weight[shared].T).unsqueeze(1), cos, sin).squeeze(1)
        v = x @ attention.wv.weight[shared].T
        mixed.append((q @ k.mT / math.sqrt(width) + mask).softmax(-1) @ v)
    return torch.cat(mixed, -1) @ attention.wo.weight.T


@pytest.mark.parametrize("kv_heads", (1, 2, 4))
def test_attention_is_causal_grouped_query_attention(kv_heads: int) -> None:
    model = make(replace(SIZE, n_kv_heads=kv_heads))
    attention = model.layers["0"].attention
    x = torch.randn(2, 6, SIZE.dim, dtype=torch.float64)
    cos, sin = model.rotary.tables(6, x.device, x.dtype)
    torch.testing.assert_close(
        attention(x, cos, sin), explicit_attention(attention, x, cos, sin), rtol=1e-10, atol=1e-12
    )


def test_norm_feed_forward_and_leaves_are_their_formulas() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 16, dtype=torch.float64)
    norm = RMSNorm(16, 1e-2).double()
    with torch.no_grad():
        norm.weight.normal_()
    torch.testing.assert_close(norm(x), x / (x.pow(2).mean(-1, keepdim=True) + 1e-2).sqrt() * norm.weight)
    ffn = FeedForward(SIZE).double()
    gate, up = x @ ffn.w1.weight.T, x @ ffn.w3.weight.T
    torch.testing.assert_close(ffn(x), (gate * torch.sigmoid(gate) * up) @ ffn.w2.weight.T)
    linear = Linear(16, 5)
    assert linear.bias is None
    assert linear(x.bfloat16()).dtype == torch.bfloat16
    assert linear.weight.dtype == torch.float32
    table = Embedding(7, 16)
    assert torch.equal(table(torch.tensor([3])), table.weight[3:4])
    table.compute_dtype = torch.bfloat16
    assert table(torch.tensor([3])).dtype == torch.bfloat16


def test_a_block_adds_to_the_residual_stream() -> None:
    model = make()
    block = model.layers["1"]
    x = torch.randn(1, 6, SIZE.dim, dtype=torch.float64)
    cos, sin = model.rotary.tables(6, x.device, x.dtype)
    between = x + block.attention(block.attention_norm(x), cos, sin)
    torch.testing.assert_close(block(x, cos, sin), between + block.feed_forward(block.ffn_norm(between)))


def test_a_token_does_not_change_what_comes_before_it() -> None:
    model = make()
    torch.manual_seed(1)
    tokens = torch.randint(0, SIZE.vocab_size, (2, 6))
    logits = model(tokens)
    for changed in range(6):
        other = tokens.clone()
        other[:, changed] = (other[:, changed] + 1) % SIZE.vocab_size
        difference = (model(other) - logits).abs().amax((0, 2))
        assert (difference[:changed] < 1e-12).all()
        assert (difference[changed:] > 1e-6).all(), "every later token sees it"


@pytest.mark.parametrize("tied", (False, True), ids=("untied", "tied"))
def test_the_output_projects_onto_its_own_rows_or_the_embedding(tied: bool) -> None:
    model = make(replace(SIZE, tie_embeddings=tied))
    tokens = torch.randint(0, SIZE.vocab_size, (1, 6))
    assert (model.output.weight is model.tok_embeddings.weight) is tied
    hidden = []
    model.norm.register_forward_hook(lambda module, args, out: hidden.append(out))
    logits = model(tokens)
    rows = model.tok_embeddings.weight if tied else model.output.weight
    torch.testing.assert_close(logits, hidden[0] @ rows.T)
    logits.pow(2).sum().backward()
    unseen = torch.ones(SIZE.vocab_size, dtype=torch.bool).index_fill(0, tokens.flatten(), False)
    reached = bool(model.tok_embeddings.weight.grad[unseen].any())
    assert reached is tied, "the output reaches tokens that were not looked up"


CUTS = ((0, 4), (0, 2, 4), (0, 1, 2, 4), (0, 0, 3, 4), (0, 4, 4), (0, 2, 2, 4))


@pytest.mark.parametrize("tied", (False, True), ids=("untied", "tied"))
@pytest.mark.parametrize("stops", CUTS, ids=str)
def test_parts_chained_are_the_whole_model(stops: tuple[int, ...], tied: bool) -> None:
    model = make(replace(SIZE, tie_embeddings=tied))
    expected_names = set(dict(model.named_parameters()))
    tokens = torch.randint(0, SIZE.vocab_size, (2, 6))
    logits = model(tokens)
    stages = len(stops) - 1
    parts = [
        model.part(range(stops[stage], stops[stage + 1]), first=stage == 0, last=stage == stages - 1)
        for stage in range(stages)
    ]
    x = tokens
    for index, part in enumerate(parts):
        x = part(x)
        assert x.shape[-1] == (SIZE.vocab_size if index == stages - 1 else SIZE.dim)
        assert (part.tok_embeddings is None) == (index > 0)
        assert (part.output is None) == (part.norm is None) == (index < stages - 1)
    assert torch.equal(x, logits)
    held = [name for part in parts for name, _ in part.named_parameters()]
    assert len(held) == len(set(held))
    assert set(held) == expected_names | ({OUTPUT} if tied and stages > 1 else set())


def test_a_tied_output_apart_from_its_embedding_is_a_parameter_of_its_own() -> None:
    model = make(replace(SIZE, tie_embeddings=True))
    first, last = model.part(range(2), first=True, last=False), model.part(range(2, 4), first=False, last=True)
    assert last.output.weight is not first.tok_embeddings.weight
    assert torch.equal(last.output.weight, first.tok_embeddings.weight)
    assert last.output.weight.data_ptr() != first.tok_embeddings.weight.data_ptr()
    assert last.output.weight.requires_grad


def test_activations_may_be_computed_in_another_dtype_than_parameters() -> None:
    model = Llama(SIZE, 6)
    tokens = torch.randint(0, SIZE.vocab_size, (1, 6))
    assert model(tokens).dtype == torch.float32
    model.set_compute_dtype(torch.bfloat16)
    seen = []
    model.layers["3"].register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    logits = model(tokens)
    assert (logits.dtype, seen) == (torch.bfloat16, [torch.bfloat16])
    F.cross_entropy(logits.float().flatten(0, 1), tokens.flatten()).backward()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.float32}
    last = model.part(range(3, 4), first=False, last=True)
    assert last.compute_dtype == torch.bfloat16


def test_rotary_tables_are_made_once_for_each_use() -> None:
    rotary = Llama(SIZE, 6).rotary
    cpu = torch.device("cpu")
    assert rotary.tables(6, cpu, torch.float32)[0] is rotary.tables(6, cpu, torch.float32)[0]
    assert rotary.tables(6, cpu, torch.bfloat16)[0].dtype == torch.bfloat16
    assert rotary.tables(7, cpu, torch.float32)[0].shape == (7, SIZE.head_dim // 2)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("tied", (False, True), ids=("untied", "tied"))
def test_the_layout_names_what_the_model_has(name: str, tied: bool) -> None:
    size = replace(PRESETS[name], tie_embeddings=tied)
    with torch.device("meta"):
        model = Llama(size, 16)
    described = [(one.name, one.shape) for one in parameters(size).values()]
    assert described == [(found, tuple(parameter.shape)) for found, parameter in model.named_parameters()]
    assert (OUTPUT in parameters(size)) is not tied
    assert canonical(OUTPUT, size) == (EMBEDDING if tied else OUTPUT)
    assert canonical(EMBEDDING, size) == EMBEDDING
    assert {one.name: one for one in block_parameters(size, 1, 1)}.items() <= parameters(size).items()


@pytest.mark.parametrize("name", PUBLISHED)
def test_sizes_have_the_published_number_of_parameters(name: str) -> None:
    assert set(PUBLISHED) | {"llama3-debug"} == set(PRESETS)
    assert sum(math.prod(one.shape) for one in parameters(PRESETS[name]).values()) == PUBLISHED[name]


def test_initial_values_and_decay_by_kind() -> None:
    described = parameters(SIZE)
    for name, about in described.items():
        assert (about.std is None) == name.endswith("norm.weight")
        assert about.decayed == (not name.endswith("norm.weight"))
    assert described["layers.0.attention.wo.weight"].std == pytest.approx(0.02 / math.sqrt(2))
    assert described["layers.3.feed_forward.w2.weight"].std == pytest.approx(0.02 / math.sqrt(8))
    assert described[OUTPUT].std == 1 / 4
