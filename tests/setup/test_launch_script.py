"""Scripts that start a run on several nodes: run by bash, with commands of a cluster that write down their calls."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from koushi.errors import ConfigError
from koushi.hardware.hardware import DATA
from koushi.report.nodes import devices_per_node
from koushi.setup.launch_script import BACKENDS, Launch, launch, notes

ROOT = Path(__file__).parents[2]
RUN = """
model: {name: llama3-debug, vocab_size: 32, dim: 16, n_layers: 3, n_heads: 4, n_kv_heads: 2, ffn_dim: 24}
parallelism: {data_parallel_shard_degree: 2}
training: {seq_len: 8, global_batch_size: 4, steps: 2}
data: {source: synthetic}
run: {device: cpu, timeout: 60, grace: 45.5}
checkpoint: {every: 1}
"""
TOKEN = "00c0ffee"


class Cluster:
    """A folder of commands that a script finds first: koushi is the real one, the others write down their calls."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.commands = folder / "bin"
        self.commands.mkdir()
        self.run_file = folder / "a 'run' $HOME.yaml"
        self.run_file.write_text(RUN)
        self.command("koushi", f'exec {shlex.quote(sys.executable)} -m koushi "$@"')
        self.command("torchrun", 'printf "%s\\n" torchrun "$@" >>calls')
        self.command("srun", 'printf "%s\\n" srun "$1" >>calls; shift; "$@"')
        self.command(
            "scontrol", 'if [ "$1" = show ]; then printf "node7\\nnode8\\n"; else echo "scontrol $*" >>calls; fi'
        )

    def command(self, name: str, body: str) -> None:
        path = self.commands / name
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)

    def launch(self, *overrides: str, nodes: int = 2, devices: int = 1) -> Launch:
        return launch(self.run_file, overrides, nodes, devices, TOKEN)

    def start(self, script: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Runs a script under bash and checks its grammar first."""
        assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0
        return subprocess.run(
            ["bash", "-c", script], cwd=self.folder, env=self.environment(**variables),
            capture_output=True, text=True, check=False,
        )  # fmt: skip

    def environment(self, **variables: str) -> dict[str, str]:
        path = f"{self.commands}:{os.environ['PATH']}"
        return os.environ | {"PATH": path, "PYTHONPATH": str(ROOT)} | variables

    @property
    def calls(self) -> list[str]:
        path = self.folder / "calls"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


def slurm(cluster: Cluster, script: str, **variables: str) -> subprocess.CompletedProcess[str]:
    job = {"SLURM_NNODES": "2", "SLURM_JOB_ID": "1234567", "SLURM_JOB_NODELIST": "node[7-8]"}
    return cluster.start(script, **(job | variables))


def test_slurm_starts_torchrun_on_every_node(cluster: Cluster) -> None:
    script = BACKENDS["slurm"](cluster.launch("optimizer.lr=1e-3", "--training.seed", "3"))
    done = slurm(cluster, script)
    assert done.returncode == 0, done.stderr
    assert cluster.calls == [
        "srun", "--cpu-bind=none", "torchrun", "--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "3",
        "--rdzv-backend", "c10d", "--rdzv-endpoint", "node7:24567", "--rdzv-id", "1234567", "-m", "koushi", "train",
        str(cluster.run_file), "optimizer.lr=1e-3", "--training.seed", "3",
    ]  # fmt: skip
    settings = [line for line in script.splitlines() if line.startswith("#SBATCH")]
    assert "#SBATCH --nodes=2" in settings
    assert "#SBATCH --signal=TERM@76" in settings, "run.grace, rounded up, and 30 s"
    assert "#SBATCH --requeue" in settings
    assert "#SBATCH --exclusive" in settings, "else a task may have one CPU, and all ranks share it"
    assert not any("gpus" in line for line in settings), "device: cpu"
    on_gpus = BACKENDS["slurm"](cluster.launch("run.device=auto", nodes=1, devices=2))
    assert "#SBATCH --gpus-per-node=2\n" in on_gpus
    assert on_gpus.startswith("#!/bin/bash\n")


@pytest.mark.parametrize("left", [10, 3600])
@pytest.mark.parametrize("every", [0, 1])
def test_slurm_queues_again_what_its_time_limit_ended(left: int, every: int, cluster: Cluster) -> None:
    cluster.command("srun", "exit 1")
    script = BACKENDS["slurm"](cluster.launch(f"checkpoint.every={every}"))
    done = slurm(cluster, script, SLURM_JOB_END_TIME=str(int(time.time()) + left))
    assert done.returncode == 1
    assert cluster.calls == (["scontrol requeue 1234567"] if left == 10 and every else [])


def test_a_run_that_is_done_is_not_queued_again(cluster: Cluster) -> None:
    script = BACKENDS["slurm"](cluster.launch())
    done = slurm(cluster, script, SLURM_JOB_END_TIME=str(int(time.time())))
    assert done.returncode == 0
    assert "scontrol requeue 1234567" not in cluster.calls


def test_slurm_refuses_another_world_at_start(cluster: Cluster) -> None:
    done = slurm(cluster, BACKENDS["slurm"](cluster.launch()), SLURM_NNODES="3")
    assert done.returncode == 2
    assert done.stderr == "started on 3 nodes of 1 devices, 3 in all, but the mesh has 2 ranks\n"
    assert cluster.calls == []


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_run_file_that_has_changed_since_is_refused_at_start(backend: str, cluster: Cluster) -> None:
    script = script_of(backend, cluster.launch())
    cluster.run_file.write_text(RUN.replace("shard_degree: 2", "shard_degree: 4"))
    done = slurm(cluster, script, HEAD="here", JOB_COMPLETION_INDEX="0", POD_IP="10.0.0.1")
    assert done.returncode == 2
    assert "the degrees multiply to 4" in done.stderr
    assert cluster.calls == []


def script_of(backend: str, described: Launch) -> str:
    """The shell of a backend's script or manifest."""
    text = BACKENDS[backend](described)
    return text if backend != "kubernetes" else str(container(text)["args"][0])


def documents(manifest: str) -> list[Any]:
    return list(YAML(typ="safe", pure=True).load_all(manifest))


def container(manifest: str) -> Any:
    (found,) = documents(manifest)[1]["spec"]["template"]["spec"]["containers"]
    return found


def test_torchrun_on_every_node(cluster: Cluster) -> None:
    done = cluster.start(BACKENDS["torchrun"](cluster.launch()), HEAD="node0")
    assert done.returncode == 0, done.stderr
    port = 20_000 + int(TOKEN, 16) % 10_000
    assert cluster.calls == [
        "torchrun", "--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "3", "--rdzv-backend", "c10d",
        "--rdzv-endpoint", f"node0:{port}", "--rdzv-id", f"a-run-HOME-{TOKEN}", "-m", "koushi", "train",
        str(cluster.run_file),
    ]  # fmt: skip


def test_torchrun_needs_a_head_and_the_right_number_of_nodes(cluster: Cluster) -> None:
    script = BACKENDS["torchrun"](cluster.launch())
    done = cluster.start(script)
    assert done.returncode != 0
    assert "HEAD: set it to the name or address of one of the nodes" in done.stderr
    assert cluster.start(script, HEAD="x", NODES="4").returncode == 2
    assert cluster.calls == []


def test_a_node_with_too_few_gpus_is_told(cluster: Cluster) -> None:
    cluster.command("nvidia-smi", 'echo "GPU 0: a"; echo "GPU 1: b"')
    script = BACKENDS["torchrun"](cluster.launch("run.device=cuda", "--dp-shard=4", nodes=1, devices=4))
    done = cluster.start(script, HEAD="x")
    assert (done.returncode, done.stderr) == (1, "this node has 2 GPUs, and 4 are needed\n")
    cluster.command("nvidia-smi", "exit 9")
    assert "this node has 0 GPUs" in cluster.start(script, HEAD="x").stderr
    assert "nvidia-smi" not in BACKENDS["torchrun"](cluster.launch())


@pytest.mark.parametrize(("index", "hosts"), [("0", "true"), ("1", "false")])
def test_kubernetes(index: str, hosts: str, cluster: Cluster) -> None:
    manifest = BACKENDS["kubernetes"](cluster.launch("run.device=auto"))
    service, job = documents(manifest)
    name = f"a-run-home-{TOKEN}"
    assert (service["kind"], service["metadata"]["name"], service["spec"]["clusterIP"]) == ("Service", name, "None")
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert service["spec"]["selector"] == {"job-name": name}
    assert (job["kind"], job["metadata"]["name"], job["spec"]["completionMode"]) == ("Job", name, "Indexed")
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == 2
    pod = job["spec"]["template"]["spec"]
    assert (pod["subdomain"], pod["terminationGracePeriodSeconds"], pod["restartPolicy"]) == (name, 76, "Never")
    described = container(manifest)
    assert described["resources"] == {"requests": {"cpu": 1}, "limits": {"nvidia.com/gpu": 1}}
    assert described["command"] == ["bash", "-c"]
    mounted = {mount["name"] for mount in described["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
    done = cluster.start(described["args"][0], JOB_COMPLETION_INDEX=index, POD_IP="10.0.0.9")
    assert done.returncode == 0, done.stderr
    assert cluster.calls[cluster.calls.index("--rdzv-endpoint") + 1 : cluster.calls.index("-m")] == [
        f"{name}-0.{name}:{service['spec']['ports'][0]['port']}", "--rdzv-conf", f"is_host={hosts}", "--rdzv-id", name,
        "--local-addr", "10.0.0.9",
    ]  # fmt: skip
    assert cluster.calls[-2:] == [str(cluster.run_file), "run.device=auto"]


def test_kubernetes_without_gpus_and_with_long_names(cluster: Cluster) -> None:
    path = cluster.folder / f"{'Long_' * 30}.yaml"
    path.write_text(RUN)
    manifest = BACKENDS["kubernetes"](launch(path, [], 2, 1, TOKEN))
    assert "resources" not in container(manifest)
    name = documents(manifest)[0]["metadata"]["name"]
    assert len(f"{name}-16383") <= 63
    assert name == name.lower() and "_" not in name


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_script_gives_ranks_the_grace_time(backend: str, cluster: Cluster) -> None:
    assert "export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=56\n" in BACKENDS[backend](cluster.launch())


@pytest.mark.parametrize(
    ("options", "nodes", "devices", "legal"),
    [
        (["--dp-shard=2"], 1, 1, "a world of 2"),
        (["--dp-shard=2"], 3, 1, "a world of 2"),
        (["--dp-shard=2"], 2, 2, "data_parallel_shard_degree 4, or data_parallel_replicate_degree 2, or a world of 2"),
        (["--tp=2"], 3, 1, "a world of 2 or 4, for which dp_shard follows"),
    ],
)
def test_degrees_that_do_not_multiply_to_the_devices_are_refused(
    options: list[str], nodes: int, devices: int, legal: str, cluster: Cluster
) -> None:
    with pytest.raises(ConfigError) as raised:
        cluster.launch(*options, nodes=nodes, devices=devices)
    nodes_of = f"{nodes} node{'s' * (nodes > 1)} of {devices}"
    assert f"the world has {nodes * devices} ({nodes_of})" in str(raised.value)
    assert str(raised.value).endswith(legal)


@pytest.mark.parametrize("world", ["", ", world_size: 2", ", world_size: 64"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_nodes_are_the_world(backend: str, world: str, cluster: Cluster) -> None:
    cluster.run_file.write_text(RUN.replace("shard_degree: 2", f"shard_degree: 2{world}"))
    described = cluster.launch(nodes=2, devices=2)
    assert described.job.mesh.degree("dp_shard") == described.job.mesh.world_size == 4
    asked = world.removeprefix(", world_size: ") or "2"
    assert notes(described) == [
        f"the run file is for {asked} devices; the script adds --gpus 4, which makes dp_shard 4"
    ]
    done = slurm(cluster, script_of(backend, described), HEAD="here", JOB_COMPLETION_INDEX="0", POD_IP="10.0.0.1")
    assert done.returncode == 0, done.stderr
    assert cluster.calls[-3:] == [str(cluster.run_file), "--gpus", "4"]


def test_a_world_on_the_command_line_is_not_changed(cluster: Cluster) -> None:
    assert "--gpus" not in cluster.launch("--dp-shard=-1", nodes=2, devices=2).arguments
    for said in ("--gpus=2", "parallelism.world_size=2"):
        with pytest.raises(ConfigError) as raised:
            cluster.launch(said, nodes=2, devices=2)
        (problem,) = raised.value.problems
        assert (problem.what, problem.legal) == (
            "is 2, but the world has 4 processes (2 nodes of 2)", "4, or leave it out",
        )  # fmt: skip


def test_what_is_left_of_the_world_is_the_nodes(cluster: Cluster) -> None:
    described = cluster.launch("--dp-shard=-1", "training.global_batch_size=4096", nodes=512, devices=8)
    assert described.job.mesh.world_size == 4096
    assert "world=4096 " in BACKENDS["slurm"](described)


def test_notes(cluster: Cluster) -> None:
    assert notes(cluster.launch()) == []
    assert [note.split(":")[0] for note in notes(cluster.launch("checkpoint.every=0"))] == ["checkpoint.every is 0"]
    assert [note.split(":")[0] for note in notes(cluster.launch("run.resume=never"))] == ["run.resume is never"]
    assert notes(cluster.launch("--tp=2", "--dp-shard=1")) == [
        "tp reaches across nodes, and runs in every layer; inside a node it is faster"
    ]


def test_a_step_longer_than_the_grace_time_is_a_note_where_the_run_fits(cluster: Cluster) -> None:
    short, none = ["run.grace=1e-9"], ["checkpoint.every=0", "run.grace=1e-9"]
    (note,) = notes(cluster.launch(*short))
    assert re.fullmatch(
        r"a step takes \S+ [mu]?s, and SIGTERM leaves a run 1e-09 s to finish its step and save \(run.grace\): set it "
        r"above the time of a step and a save",
        note,
    )
    assert [one.split(":")[0] for one in notes(cluster.launch(*none))] == ["checkpoint.every is 0"]
    large = ["model.dim=65536", "model.n_layers=64", "model.ffn_dim=262144", "--hardware=v100-sxm2-32gb"]
    assert notes(cluster.launch(*short, *large)) == [], "it does not fit, so no step is ever done"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("hardware", "devices"),
    [("gb200", 4), ("h200", 8), ("own4.yaml", 4), ("own2.yaml", 2), (None, 8), ("cpu", 8)],
)
def test_a_node_is_that_of_the_hardware(backend: str, hardware: str | None, devices: int, cluster: Cluster) -> None:
    shipped = (DATA / "h100-pcie-80gb.yaml").read_text(encoding="utf-8")
    for own in (2, 4):
        text = shipped.replace("\ndevices_per_node: 8", f"\ndevices_per_node: {own}").replace("name: h100", "name: own")
        (cluster.folder / f"own{own}.yaml").write_text(text, encoding="utf-8")
    named = f"device: auto{f', hardware: {hardware}' if hardware else ''}"
    batch = RUN.replace("batch_size: 4", "batch_size: 64")
    cluster.run_file.write_text(batch.replace("device: cpu", named))
    described = launch(cluster.run_file, [], 2, None, TOKEN)
    assert (described.devices, described.job.mesh.world_size) == (devices, 2 * devices)
    assert f"devices={devices}  # of one node" in script_of(backend, described)
    if hardware != "cpu":
        assert launch(cluster.run_file, [], 2).devices == devices_per_node(described.job), "as mesh draws it"
    assert launch(cluster.run_file, [], 2, 16).devices == 16, "what is said counts"


def test_without_hardware_of_that_name_only_that_is_told(cluster: Cluster) -> None:
    with pytest.raises(ConfigError) as raised:
        launch(cluster.run_file, ["--hardware", "none", "training.global_batch_size=64"], 2)
    (problem,) = raised.value.problems
    assert problem.what == "is 'none', and no hardware is called that"


def test_tp_over_nodes_of_a_rack_is_no_note(cluster: Cluster) -> None:
    def told(hardware: str) -> list[str]:
        overrides = ["--tp=4", "model.n_kv_heads=4", "run.device=auto", f"--hardware={hardware}"]
        return notes(cluster.launch(*overrides, "--dp-shard=1", nodes=2, devices=2))

    assert told("gb200") == [], "the link inside joins 72 devices"
    assert [note.split(",")[0] for note in told("h200")] == ["tp reaches across nodes"]


def test_every_script_has_a_rendezvous_of_its_own(cluster: Cluster) -> None:
    first, second = (launch(cluster.run_file, [], 2, 1) for _ in range(2))
    assert first.token != second.token
    assert 20_000 <= first.port < 30_000


def test_names_with_line_breaks_are_refused(cluster: Cluster) -> None:
    with pytest.raises(ConfigError, match="holds characters that cannot be printed"):
        cluster.launch("data.text_key=a\nrm -rf x")


@pytest.mark.long
def test_two_nodes_on_this_machine_train(cluster: Cluster) -> None:
    cluster.command("torchrun", f'exec {shlex.quote(sys.executable)} -m torch.distributed.run "$@"')
    script = BACKENDS["torchrun"](launch(cluster.run_file, [], 2, 1))
    agents = [
        subprocess.Popen(
            ["bash", "-c", script], cwd=cluster.folder, env=cluster.environment(HEAD="localhost"),
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for _ in range(2)
    ]  # fmt: skip
    output = "".join(agent.communicate(timeout=300)[0] for agent in agents)
    assert [agent.returncode for agent in agents] == [0, 0], output
    assert "on 2 processes [pp=1, dp_replicate=1, dp_shard=2, cp=1, tp=1]" in output
    assert "step 2/2" in output
    assert (cluster.folder / "runs" / cluster.run_file.stem / "checkpoints" / "step-00000002").is_dir()
