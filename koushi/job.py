"""A Job: a run file with nothing left open, as every later part reads it. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from koushi.config.schema import JobConfig, Run
from koushi.hardware.hardware import ASSUMED
from koushi.mesh import MeshSpec
from koushi.models.llama.sizes import PRESETS, LlamaSize


@dataclass(frozen=True)
class Job:
    """Made by ``koushi.check.check``, which has proved that the parts fit together."""

    config: JobConfig
    """Every -1 and empty value resolved."""
    size: LlamaSize
    mesh: MeshSpec
    stages: tuple[range, ...]
    """Layers of every pipeline stage, first stage to last; one stage when pp is 1."""
    name: str
    """The run file's name without its suffix."""
    base: Path
    """The folder that relative paths in the run file start from."""

    @property
    def model_name(self) -> str:
        """For people: the preset's, that of the Hugging Face folder, or what tells sizes of the run file's own."""
        model = self.config.model
        if model.hf is not None:
            return Path(model.hf).name
        return model.name if self.size.is_shaped_like(PRESETS[model.name]) else f"own sizes (from {model.name})"

    @property
    def hardware(self) -> str:
        """The name or path of what every command plans for."""
        return hardware_name(self.config.run)

    @property
    def data_parallel_degree(self) -> int:
        """Ranks that read different samples."""
        return self.mesh.degree("dp_replicate", "dp_shard")

    @property
    def local_batch_size(self) -> int:
        """Samples of one step on one data-parallel rank."""
        return self.config.training.global_batch_size // self.data_parallel_degree

    @property
    def microbatches(self) -> int:
        """Forward passes of one step on one rank."""
        return self.local_batch_size // self.config.training.microbatch_size

    @property
    def stages_per_rank(self) -> int:
        return len(self.stages) // self.mesh.degree("pp")


def hardware_name(run: Run) -> str:
    """What is named, or else stands for the device: a path as the section ``run`` has it."""
    return run.hardware or ("cpu" if run.device == "cpu" else ASSUMED)
