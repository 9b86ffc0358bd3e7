"""One process trains as a plain PyTorch loop does, with torch's own loss, clipping and optimizer."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from parity_cases import case, tied
from parity_run import STEPS, References, precision, twin
from torch import Tensor

from koushi.data.batches import open_samples
from koushi.job import Job
from koushi.models.llama.model import Llama
from koushi.optim.schedule import learning_rate
from koushi.verify.compare import assemble, relative


def _model(job: Job, initial: dict[str, Tensor]) -> Llama:
    model = Llama(job.size, job.config.training.seq_len).double()
    model.set_compute_dtype(torch.float64)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(initial[name])
    return model


@pytest.mark.parametrize("masked", ("0.0", "0.4", "0.8"))
@pytest.mark.parametrize("ties", (False, True), ids=("untied", "tied"))
def test_one_process_is_a_plain_loop(ties: bool, masked: str, references: References) -> None:
    steps = STEPS["float64"]
    one = case("", (1, 1, 1, 1), tied(ties), f"data.masked_fraction={masked}")
    job = twin(one.job(references.folder, *precision("float64")))
    records = references.of(job, steps)
    together = assemble(records)
    recorded = together.tensors
    assert not together.wrong
    model = _model(job, {name: value for (kind, name, _), value in recorded.items() if kind == "initial"})
    parameters = dict(model.named_parameters())
    options, training = job.config.optimizer, job.config.training
    optimizer = torch.optim.AdamW(
        [
            {"params": [one for one in parameters.values() if one.ndim > 1], "weight_decay": options.weight_decay},
            {"params": [one for one in parameters.values() if one.ndim == 1], "weight_decay": 0.0},
        ],
        betas=(options.beta1, options.beta2),
        eps=options.eps,
    )
    samples = open_samples(job)
    for step in range(steps):
        first = step * training.global_batch_size
        pairs = [samples.train(index) for index in range(first, first + training.global_batch_size)]
        tokens, labels = (torch.stack([torch.from_numpy(pair[side]) for pair in pairs]) for side in (0, 1))
        loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
        loss.backward()
        for name, parameter in parameters.items():
            assert parameter.grad is not None
            assert relative(parameter.grad, recorded["gradient", name, step]) < 1e-12, f"{name} at step {step}"
        assert training.max_grad_norm is not None
        norm = torch.nn.utils.clip_grad_norm_(parameters.values(), training.max_grad_norm)
        assert norm.item() > training.max_grad_norm, "nothing was clipped"
        assert records[0].losses[step] == pytest.approx(loss.item(), rel=1e-12, abs=0)
        assert records[0].grad_norms[step] == pytest.approx(norm.item(), rel=1e-12, abs=0)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, training.steps, options.lr, job.config.lr_schedule)
        optimizer.step()
        optimizer.zero_grad()
    for name, parameter in parameters.items():
        assert relative(parameter.detach(), recorded["parameter", name, steps]) < 1e-10, name
