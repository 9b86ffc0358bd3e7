"""``koushi launch``: scripts that start a run on several nodes. No torch.

Every script checks at start that the world it was given is the mesh's, names a rendezvous that no other run
uses, restarts failed ranks from the newest checkpoint, and has SIGTERM reach them ``run.grace`` seconds before
they are killed.
"""

from __future__ import annotations

import re
import secrets
import shlex
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, prod
from pathlib import Path

from koushi.check.check import check_afar
from koushi.check.rule import WORLD
from koushi.check.training_rules import hardware_place
from koushi.config.load import RunFile, load
from koushi.errors import ConfigError, Problem
from koushi.hardware.hardware import ASSUMED
from koushi.hardware.hardware import load as load_hardware
from koushi.job import Job, hardware_name
from koushi.plan.command import hardware_of
from koushi.plan.plan import plan
from koushi.plan.text import late_saves
from koushi.plan.workload import of_job
from koushi.report.nodes import Nodes
from koushi.units import counted

FIRST_PORT, PORTS = 20_000, 10_000
"""Below the ports that Linux gives to outgoing connections."""
MARGIN = 30
"""Seconds between the end of the grace time and the kill, for torchrun to end as well."""
EARLY = 60
"""Seconds by which Slurm may send its signal too early."""
RESTARTS = 3
CPU_RANKS = 8
"""Of one node that is a CPU, of which hardware files say only that it has room for very many."""


@dataclass(frozen=True)
class Launch:
    """A job on nodes, with what a script says about it."""

    job: Job
    arguments: tuple[str, ...]
    """Of ``koushi train``: the run file and its overrides."""
    nodes: int
    devices: int
    """Of one node."""
    token: str
    """Eight hexadecimal digits that no other script has."""
    instead_of: int | None = None
    """The devices that the run file is for, where the arguments say others."""
    missing: tuple[str, ...] = ()
    """What this machine lacks of what the run reads."""

    @property
    def name(self) -> str:
        """The run's, in characters that every backend takes."""
        return re.sub(r"[^A-Za-z0-9.-]+", "-", self.job.name).strip("-.") or "run"

    @property
    def what(self) -> str:
        nodes = f"{counted(self.nodes, 'node')} of {counted(self.devices, 'device')}"
        return f"{self.name}: {counted(self.job.mesh.world_size, 'rank')} {self.job.mesh} on {nodes}"

    @property
    def saves(self) -> bool:
        return self.job.config.checkpoint.every > 0

    @property
    def on_cpu(self) -> bool:
        return self.job.config.run.device == "cpu"

    @property
    def grace(self) -> int:
        return ceil(self.job.config.run.grace)

    @property
    def lead(self) -> int:
        """Seconds before the kill at which SIGTERM is sent."""
        return self.grace + MARGIN

    @property
    def port(self) -> int:
        return FIRST_PORT + int(self.token, 16) % PORTS


def launch(
    path: Path, overrides: Sequence[str], nodes: int, devices: int | None = None, token: str | None = None
) -> Launch:
    """The run file at ``path`` on ``nodes`` of ``devices`` each (None: those of its hardware): where it is for another
    world, under --gpus.

    Raises ConfigError where it is not legal on so many devices, and for characters that no script should hold.
    """
    run_file = load(path, overrides)
    devices = devices or _devices_per_node(run_file)
    world = nodes * devices
    other = _other_world(run_file, world)
    if other is not None:
        overrides = [*overrides, "--gpus", str(world)]
        run_file = load(path, overrides)
    job, missing = check_afar(run_file, world, f"{counted(nodes, 'node')} of {devices}")
    arguments = (str(path), *overrides)
    odd = [one for one in arguments if not one.isprintable()]
    if odd:
        what = "holds characters that cannot be printed"
        raise ConfigError([Problem(repr(one), "", what, "a name without them") for one in odd])
    return Launch(job, arguments, nodes, devices, token or secrets.token_hex(4), other, missing)


def _devices_per_node(run_file: RunFile) -> int:
    """Of the run's hardware; where there is none of that name, of what is assumed: the check refuses it in a moment."""
    name = hardware_name(run_file.config.run)
    try:
        found = load_hardware(hardware_place(name, run_file.path.parent))
    except ConfigError:
        found = load_hardware(ASSUMED)
    return CPU_RANKS if found.device == "cpu" else found.devices_per_node


def _other_world(run_file: RunFile, world: int) -> int | None:
    """The devices that the run file is for, where those are not ``world``; what the command line says of them stays."""
    if run_file.is_set(WORLD) and run_file.places[WORLD].on_command_line:
        return None
    parallelism = run_file.config.parallelism
    degrees = (
        parallelism.pipeline_parallel_degree,
        parallelism.data_parallel_replicate_degree,
        parallelism.data_parallel_shard_degree,
        parallelism.tensor_parallel_degree,
    )
    product = prod(degrees) if min(degrees) > 0 else world
    asked = parallelism.world_size or product
    return asked if asked != world else None


def notes(launch: Launch) -> list[str]:
    """What the reader should know before starting."""
    found = list(launch.missing)
    if launch.instead_of is not None:
        before, mesh = counted(launch.instead_of, "device"), launch.job.mesh
        now = f"--gpus {mesh.world_size}, which makes dp_shard {mesh.degree('dp_shard')}"
        found.append(f"the run file is for {before}; the script adds {now}")
    resume = launch.job.config.run.resume
    if not launch.saves:
        found.append("checkpoint.every is 0: a run that is ended or restarted begins anew; set it above 0")
    elif resume != "auto":
        found.append(f"run.resume is {resume}: started again, the run does not go on where it ended, as with auto")
    hardware = hardware_of(launch.job)
    if launch.saves:
        found += late_saves(launch.job, plan(of_job(launch.job), hardware))
    # A fast link that leaves the node joins what several nodes hold.
    joined = hardware.inside.devices if hardware.inside.devices > hardware.devices_per_node else launch.devices
    if max(Nodes(launch.job.mesh, joined).reach("tp")) > 1:
        found.append("tp reaches across nodes, and runs in every layer; inside a node it is faster")
    return found


def _checks(launch: Launch) -> str:
    """Shell that ends with an error where the world that was started is not the mesh's; ``nodes`` is set before."""
    return f"""\
arguments=({shlex.join(launch.arguments)})
world={launch.job.mesh.world_size}  # of the mesh {launch.job.mesh}
devices={launch.devices}  # of one node
started=$((nodes * devices))
if [ "$started" -ne "$world" ]; then
    echo "started on $nodes nodes of $devices devices, $started in all, but the mesh has $world ranks" >&2
    exit 2
fi
# The run file may have changed since this was written.
koushi check "${{arguments[@]}}" --world "$started" >/dev/null
# torchrun gives its ranks so many seconds to save and end after SIGTERM.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT={launch.grace + MARGIN // 3}
"""


def _torchrun(rendezvous: Mapping[str, str]) -> str:
    lines = [
        'torchrun --nnodes "$nodes"',
        '--nproc-per-node "$devices"',
        f"--max-restarts {RESTARTS}",
        "--rdzv-backend c10d",
        *(f"--{name} {value}" for name, value in rendezvous.items()),
        '-m koushi train "${arguments[@]}"',
    ]
    return " \\\n    ".join(lines)


def torchrun_script(launch: Launch) -> str:
    """A bash script to be started by hand on every node."""
    started = _torchrun({"rdzv-endpoint": '"$HEAD:$port"', "rdzv-id": '"$id"'})
    gpus = (
        ""
        if launch.on_cpu
        else """\
if command -v nvidia-smi >/dev/null; then
    found=$(nvidia-smi -L | grep -c '^GPU' || true)
    if [ "$found" -lt "$devices" ]; then
        echo "this node has $found GPUs, and $devices are needed" >&2
        exit 1
    fi
fi
"""
    )
    return f"""\
#!/usr/bin/env bash
# {launch.what}; written by koushi launch.
#
# Start it on each of the nodes, with the name of one of them, which the others can reach:
#
#   HEAD=node0 bash this.sh
#
# A run that keeps checkpoints goes on when it is started again. Its folder must be on a file system that all
# nodes share.
set -euo pipefail

: "${{HEAD:?set it to the name or address of one of the nodes}}"
nodes=${{NODES:-{launch.nodes}}}
id=${{ID:-{launch.name}-{launch.token}}}
port=${{PORT:-{launch.port}}}
{_checks(launch)}{gpus}
exec {started}
"""


def slurm_script(launch: Launch) -> str:
    """A script for ``sbatch``."""
    started = _torchrun({"rdzv-endpoint": '"$head:$port"', "rdzv-id": '"$SLURM_JOB_ID"'})
    gpus = "" if launch.on_cpu else f"#SBATCH --gpus-per-node={launch.devices}\n"
    again = ""
    if launch.saves:
        again = f"""\
# The time limit ended the run, not a fault: queue it again, and it goes on from its newest checkpoint.
if [ "$code" -ne 0 ] && [ -n "${{SLURM_JOB_END_TIME:-}}" ] &&
    [ "$(date +%s)" -ge "$((SLURM_JOB_END_TIME - {launch.lead + EARLY}))" ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
"""
    return f"""\
#!/bin/bash
# {launch.what}; written by koushi launch.
# Set the time limit, and what else your cluster asks for, such as partition and account; then: sbatch this.sh
#SBATCH --job-name={launch.name}
#SBATCH --nodes={launch.nodes}
#SBATCH --ntasks-per-node=1
{gpus}# Whole nodes: many clusters give a task one CPU, which the ranks would share. On part of a node: --cpus-per-task.
#SBATCH --exclusive
#SBATCH --time=24:00:00
# SIGTERM reaches the ranks {launch.lead} s before the limit: run.grace and what torchrun needs to end.
#SBATCH --signal=TERM@{launch.lead}
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out

# Activate the environment that has koushi here.

set -euo pipefail
nodes=$SLURM_NNODES
{_checks(launch)}
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${{hosts[0]}}
port=$(({FIRST_PORT} + SLURM_JOB_ID % {PORTS}))

code=0
# Nor is torchrun, which is the task, bound to one core, and its ranks with it.
srun --cpu-bind=none {started} || code=$?
{again}exit "$code"
"""


def kubernetes_manifest(launch: Launch) -> str:
    """A headless Service and an Indexed Job, for ``kubectl apply``."""
    name = f"{launch.name.lower()[:40].strip('-.').replace('.', '-')}-{launch.token}"
    rendezvous = {
        "rdzv-endpoint": f"{name}-0.{name}:{launch.port}",
        "rdzv-conf": '"is_host=$is_host"',
        "rdzv-id": name,
        "local-addr": '"$POD_IP"',
    }
    script = f"""\
set -euo pipefail
nodes={launch.nodes}  # completions of the Job
{_checks(launch)}
is_host=$([ "$JOB_COMPLETION_INDEX" -eq 0 ] && echo true || echo false)
exec {_torchrun(rendezvous)}
"""
    limits = (
        ""
        if launch.on_cpu
        else f"""
          resources:
            # A core for every rank at the least: without a request a busy node leaves the pod next to nothing.
            requests:
              cpu: {launch.devices}
            limits:
              nvidia.com/gpu: {launch.devices}"""
    )
    return f"""\
# {launch.what}; written by koushi launch.
# Set image and claimName; then: kubectl apply -f this.yaml
# The claim is the working folder of every pod: the run file lies in it under the name below, and so do the data
# and the run's folder. A Job's name is used once: after a change make a new manifest.
apiVersion: v1
kind: Service
metadata:
  name: {name}
spec:
  clusterIP: None
  publishNotReadyAddresses: true
  selector:
    job-name: {name}
  ports:
    - name: rendezvous
      port: {launch.port}
---
apiVersion: batch/v1
kind: Job
metadata:
  name: {name}
spec:
  completionMode: Indexed
  completions: {launch.nodes}
  parallelism: {launch.nodes}
  # When the pod of the rendezvous ends, all others end with it and count as well.
  backoffLimit: {launch.nodes * RESTARTS}
  podFailurePolicy:
    rules:
      # A pod that its node gave up, after SIGTERM, is not a fault.
      - action: Ignore
        onPodConditions:
          - type: DisruptionTarget
      # Wrong input stays wrong.
      - action: FailJob
        onExitCodes:
          operator: In
          values: [2]
  template:
    spec:
      subdomain: {name}
      restartPolicy: Never
      # From SIGTERM to the kill: run.grace and what torchrun needs to end.
      terminationGracePeriodSeconds: {launch.lead}
      containers:
        - name: koushi
          image: koushi:latest
          workingDir: /workspace
          env:
            - name: POD_IP
              valueFrom:
                fieldRef:
                  fieldPath: status.podIP
          command: [bash, -c]
          args:
            - |
{textwrap.indent(script, " " * 14)}{limits.lstrip(chr(10)) + chr(10) if limits else ""}\
          volumeMounts:
            - name: shared-memory
              mountPath: /dev/shm
            - name: workspace
              mountPath: /workspace
      volumes:
        - name: shared-memory
          emptyDir:
            medium: Memory
        - name: workspace
          persistentVolumeClaim:
            claimName: workspace
"""


BACKENDS: Mapping[str, Callable[[Launch], str]] = {
    "slurm": slurm_script,
    "kubernetes": kubernetes_manifest,
    "torchrun": torchrun_script,
}
