"""The same model and batches in the plainest PyTorch loop there is: what Koushi is measured against.

    python benchmarks/plain_loop.py RUN.yaml [key=value ...]

Prints a progress line a step, as ``koushi train`` does. One process, all cores.
"""

from __future__ import annotations

import sys
import time

import torch
import torch.nn.functional as F

from koushi.check.check import check
from koushi.config.load import load
from koushi.data.batches import open_samples, train_batch
from koushi.data.samples import IGNORE_INDEX
from koushi.models.llama.model import Llama


def main() -> None:
    job = check(load(sys.argv[1], sys.argv[2:]))
    training, optimizer_options = job.config.training, job.config.optimizer
    samples = open_samples(job)
    torch.manual_seed(training.seed)
    model = Llama(job.size, training.seq_len)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.02)
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=optimizer_options.lr,
        betas=(optimizer_options.beta1, optimizer_options.beta2),
        weight_decay=optimizer_options.weight_decay,
        fused=True,
    )
    began = time.perf_counter()
    for step in range(training.steps):
        tokens, labels = train_batch(samples, step * training.global_batch_size, training.global_batch_size, 0)
        valid = (labels != IGNORE_INDEX).sum()
        total = torch.zeros(())
        for batch, target in zip(
            tokens.split(training.microbatch_size), labels.split(training.microbatch_size), strict=True
        ):
            logits = model(batch)
            loss = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum", ignore_index=IGNORE_INDEX)
            (loss / valid).backward()
            total += loss.detach() / valid
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), training.max_grad_norm or float("inf"))
        optimizer.step()
        optimizer.zero_grad()
        seconds, began = time.perf_counter() - began, time.perf_counter()
        rate = training.global_batch_size * training.seq_len / seconds
        print(
            f"step {step + 1}/{training.steps}  loss {total:.4f}  grad norm {norm:.3f}  {rate:,.0f} tokens/s",
            flush=True,
        )


if __name__ == "__main__":
    main()
