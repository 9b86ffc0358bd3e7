"""The sum of token losses, one token at a time."""

from __future__ import annotations

import math

import pytest
import torch

from koushi.data.samples import IGNORE_INDEX
from koushi.loss import at_least_float32, token_loss_sum, valid_tokens


def by_hand(logits: torch.Tensor, labels: torch.Tensor) -> float:
    total = 0.0
    for row, label in zip(logits.double().flatten(0, 1).tolist(), labels.flatten().tolist(), strict=True):
        if label != IGNORE_INDEX:
            highest = max(row)
            total += highest + math.log(sum(math.exp(value - highest) for value in row)) - row[label]
    return total


def drawn(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(2, 5, 7, generator=generator)).to(dtype)
    labels = torch.randint(0, 7, (2, 5), generator=generator)
    labels[0, 1] = labels[1, 4] = IGNORE_INDEX
    return logits, labels


@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, torch.bfloat16), ids=str)
def test_sum_of_token_losses(dtype: torch.dtype) -> None:
    logits, labels = drawn(dtype)
    loss = token_loss_sum(logits, labels)
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert loss.item() == pytest.approx(by_hand(logits, labels), rel=1e-12 if dtype == torch.float64 else 1e-6)
    assert valid_tokens(labels).item() == 8
    assert valid_tokens(labels).dtype == torch.int64


def test_ignored_tokens_have_no_gradient() -> None:
    logits, labels = drawn(torch.float64)
    logits.requires_grad_()
    token_loss_sum(logits, labels).backward()
    assert logits.grad is not None
    ignored = labels == IGNORE_INDEX
    assert (logits.grad[ignored] == 0).all()
    assert (logits.grad[~ignored] != 0).all()
    expected = logits.detach().softmax(-1)
    expected.scatter_add_(-1, labels.clamp(min=0).unsqueeze(-1), torch.full((2, 5, 1), -1.0, dtype=torch.float64))
    torch.testing.assert_close(logits.grad[~ignored], expected[~ignored])


def test_a_batch_without_labels_has_a_loss_of_0() -> None:
    logits = torch.randn(2, 3, 4, requires_grad=True)
    labels = torch.full((2, 3), IGNORE_INDEX)
    loss = token_loss_sum(logits, labels)
    loss.backward()
    assert loss.item() == 0
    assert logits.grad is not None and (logits.grad == 0).all()
    assert valid_tokens(labels).item() == 0


def test_dtypes_are_widened_to_float32_and_no_further() -> None:
    widened = [at_least_float32(torch.ones(1, dtype=dtype)).dtype for dtype in (torch.bfloat16, torch.float16)]
    assert widened == [torch.float32] * 2
    assert at_least_float32(torch.ones(1, dtype=torch.float64)).dtype == torch.float64
