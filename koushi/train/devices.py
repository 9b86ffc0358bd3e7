"""What torch says of the devices here."""

from __future__ import annotations

import torch
import torch.distributed as dist

from koushi.units import bytes_text


def devices_text() -> list[str]:
    """A line for torch itself, and one for every GPU that it can use."""
    backends = [
        name for name, there in (("nccl", dist.is_nccl_available()), ("gloo", dist.is_gloo_available())) if there
    ]
    lines = [
        f"{torch.__version__}, built for {f'CUDA {torch.version.cuda}' if torch.version.cuda else 'CPU'}, "
        f"{torch.get_num_threads()} threads, backends {', '.join(backends)}"
    ]
    if not torch.cuda.is_available():
        return [*lines, "no CUDA device that torch can use"]
    if dist.is_nccl_available():
        lines.append(f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}")
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        capability = f"compute capability {about.major}.{about.minor}"
        lines.append(f"device {index}: {about.name}, {bytes_text(about.total_memory)}, {capability}")
    return lines
