"""``koushi convert``: a Hugging Face folder to a checkpoint, and back."""

from __future__ import annotations

from pathlib import Path

import torch

from koushi import __version__
from koushi.checkpoint.hf import HfWeights, export, refuse_taken
from koushi.checkpoint.manifest import PARAMETER, Head
from koushi.checkpoint.tensors import TORCH_DTYPES, Described, write_checkpoint
from koushi.checkpoint.tokenizer_files import about
from koushi.checkpoint.trained import CheckpointWeights
from koushi.config.schema import Data, JobConfig, Model, Training
from koushi.errors import WeightsError
from koushi.mesh import MeshSpec
from koushi.models.hf_folder import CONFIG, read_object
from koushi.models.llama.layout import parameters
from koushi.units import bytes_text

GIGABYTE = 1_000_000_000
TOKENIZER = "tokenizer.json"


def from_hf(folder: Path, checkpoint: Path, dtype: str) -> None:
    """Write the weights of ``folder`` as a checkpoint of step 0 at ``checkpoint``. Raises KoushiError."""
    refuse_taken(checkpoint)
    with HfWeights(folder) as weights:
        size = weights.size
        mesh = MeshSpec.of()
        head = Head(
            step=0,
            samples=0,
            optimizer_steps=0,
            seed=0,
            data="",
            config=_config(folder, weights).model_dump(mode="json"),
            mesh=dict(zip(mesh.names, mesh.shape, strict=True)),
            torch=torch.__version__,
            koushi=__version__,
        )
        described = [
            Described(PARAMETER, one.name, TORCH_DTYPES[dtype], one.shape) for one in parameters(size).values()
        ]
        try:
            write_checkpoint(checkpoint, head, described, (value for _, value in weights.whole()))
        except OSError as error:
            raise WeightsError([f"{checkpoint}: cannot be written: {error.strerror or error}"]) from error
    print(f"wrote {checkpoint}: {len(described)} tensors, {bytes_text(sum(one.content.nbytes for one in described))}")


def to_hf(checkpoint: Path, folder: Path, dtype: str, max_shard_gigabytes: float) -> None:
    """Write the model of ``checkpoint`` as the Hugging Face folder ``folder``. Raises KoushiError."""
    refuse_taken(folder)
    with CheckpointWeights(checkpoint) as weights:
        described, note = about(weights.config)
        export(weights, folder, TORCH_DTYPES[dtype], described, int(max_shard_gigabytes * GIGABYTE))
    print(f"wrote {folder} in {dtype}{'; ' + note if note else ''}")


def _config(folder: Path, weights: HfWeights) -> JobConfig:
    """The run file of weights that no run of Koushi has made."""
    size = weights.size
    sizes = {name: getattr(size, name) for name in type(size).__dataclass_fields__}
    tokenizer = (folder / TOKENIZER).absolute()
    seq_len = read_object(folder / CONFIG).get("max_position_embeddings")
    return JobConfig(
        model=Model(hf=str(folder.absolute()), **sizes),
        training=Training(seq_len=seq_len) if isinstance(seq_len, int) else Training(),
        data=Data(tokenizer=str(tokenizer)) if tokenizer.is_file() else Data(source="synthetic"),
    )
