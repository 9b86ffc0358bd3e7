"""Writing a resolved run file."""

from __future__ import annotations

from pathlib import Path

from ruamel.yaml import YAML

from koushi.config.schema import JobConfig


def write_resolved(config: JobConfig, path: Path) -> None:
    """Write every key of ``config``, defaults included, as a run file that ``koushi`` reads again."""
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    with path.open("w", encoding="utf-8") as file:
        yaml.dump(config.model_dump(mode="json"), file)
