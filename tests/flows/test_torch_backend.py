"""The PyTorch backend under programs that know nothing of us: the same numbers as gloo, and no hang when a rank dies."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.conftest import ROOT, environment

FORMS = Path(__file__).with_name("torch_forms.py")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(folder: Path, script: Path, *args: str, ranks: int = 2) -> list[subprocess.Popen[bytes]]:
    """Plain processes with the variables that torchrun would set; what they say is in rank-R.txt."""
    port, processes = free_port(), []
    for rank in range(ranks):
        told = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": ranks,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        env = environment(folder) | {k: str(v) for k, v in told.items()}
        env |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        with (folder / f"rank-{rank}.txt").open("wb") as said:
            processes.append(
                subprocess.Popen(
                    [sys.executable, str(script), *args], env=env, cwd=folder, stdout=said, stderr=said
                )
            )
    return processes


def ended(processes: list[subprocess.Popen[bytes]], timeout_s: float = 150.0) -> list[int]:
    try:
        return [process.wait(timeout_s) for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()


@pytest.mark.case("DDP, FSDP2, tensor parallel and pipelining over our backend")
def test_every_form_of_torch_gives_the_numbers_that_it_gives_over_gloo(tmp_path):
    codes = ended(start(tmp_path, FORMS, str(tmp_path)))
    assert codes == [0, 0], (tmp_path / "rank-0.txt").read_text()[-3000:]
    for rank in (0, 1):
        theirs = load_file(tmp_path / f"gloo-{rank}.safetensors")
        ours = load_file(tmp_path / f"echelon-{rank}.safetensors")
        assert set(theirs) == set(ours)
        assert {name.split("/")[0] for name in ours} >= {"ddp", "fsdp", "tensor_parallel", "pipeline"}
        for name, value in theirs.items():
            torch.testing.assert_close(ours[name], value, rtol=1e-6, atol=1e-7, msg=f"{name} on rank {rank}")


DIES = """
import os, signal, sys, time
import torch, torch.distributed as dist
import echelon.torch_backend
dist.init_process_group("echelon")
x = torch.ones(1000)
dist.all_reduce(x)
assert x[0] == 2
if dist.get_rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
began = time.monotonic()
try:
    dist.all_reduce(x)
except RuntimeError as error:
    assert isinstance(error, dist.DistBackendError), error
    print(f"{type(error).__name__} after {time.monotonic() - began:.3f} s: {error}")
    try:
        dist.barrier()
    except RuntimeError:
        sys.exit(7)
sys.exit("no error")
"""


@pytest.mark.case("a dead rank raises under our backend")
def test_a_dead_rank_raises_where_the_run_is_not_ours(tmp_path):
    script = tmp_path / "dies.py"
    script.write_text(textwrap.dedent(DIES))
    codes = ended(start(tmp_path, script), 60.0)
    said = (tmp_path / "rank-0.txt").read_text()
    assert codes == [7, -signal.SIGKILL], said
    assert "OperationLost after" in said
    assert "all_reduce did not meet" in said


OURS = """
import torch, torch.distributed as dist
import echelon, echelon.torch_backend
from tests.runs import take_lost_operations
run = echelon.init()
mine = dist.new_group(backend="echelon")
x = torch.full((4,), run.rank + 1.0)
dist.all_reduce(x, group=mine)
assert x.tolist() == [3.0] * 4
lin = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1), process_group=mine)
mine.abort()
lin(torch.ones(2, 3)).sum().backward()
assert all(not p.grad.any() for p in lin.parameters()), "zeros"
dist.all_reduce(x, group=mine)
assert x.tolist() == [0.0] * 4
losses = take_lost_operations(run)
assert losses and all("aborted" in lost.reason for lost in losses), losses
print("zeros and a lost step", flush=True)
"""


@pytest.mark.case("a lost operation in our run completes with zeros")
def test_a_lost_operation_in_a_run_of_ours_completes_with_zeros_and_marks_the_step(echelon_run):
    result = echelon_run(OURS, workers=2)
    assert result.code == 0, result.err
    assert "zeros and a lost step" in result.log(0)


SAMPLE = (
    "test_DistributedDataParallelCPU_grad_is_view", "test_all_gather_coalesced_with_empty", "test_all_reduce_sum_async",
    "test_barrier_timeout_full_group", "test_batch_isend_irecv_gloo_tags", "test_gather_full_group", "test_get_future",
    "test_scatter_object_list", "test_send_recv_any_source", "test_sparse_all_reduce_sum",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.case("torch's own suite over our backend")
def test_a_sample_of_torchs_own_suite_passes_wherever_gloo_passes(tmp_path):
    command = [sys.executable, str(ROOT / "tests" / "torch_suite.py"), "--out", str(tmp_path / "out.json")]
    command += [part for name in SAMPLE for part in ("--only", name)]
    done = subprocess.run(
        command, env=environment(tmp_path), cwd=tmp_path, capture_output=True, text=True, timeout=170
    )
    assert done.returncode == 0, done.stdout + done.stderr
    verdicts = json.loads((tmp_path / "out.json").read_text())["echelon"]
    assert {name: verdicts[name]["verdict"] for name in SAMPLE} == dict.fromkeys(SAMPLE, "passed")
