"""All-reduce among hosts: the core's TCP beside gloo and iperf3, on links of a known rate and delay.

    python benchmarks/comm_hosts.py [--hosts 4] [--ranks 1] [--rate 1gbit] [--delay-us 0] [--rounds 10] [--sizes 1024,…]

Makes the hosts as network namespaces, each behind a link that is shaped on both ends (needs root, ip, tc, iperf3; cc for a
delay). Both sides run in the same processes and alternate, round by round. A time is that of the slowest rank; a
bandwidth is what each host's link must carry in one direction, 2 (hosts-1)/hosts of the data. Leaves a file in benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
SIZES = [8, 1024, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 25 << 20]


def worker(rank: int, size: int, folder: Path, address: str, rounds: int, sizes: list[int]) -> None:
    import torch
    import torch.distributed as dist

    from echelon import native
    from echelon.clock import Deadline
    from echelon.comm import hosts
    from echelon.comm.handover import Seat, StoreMeeting
    from echelon.comm.over_native import NativeGroup

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    store = dist.FileStore(str(folder / "store"), size)
    seat = Seat(rank, size, "token", "benchmark")
    core = hosts.enter(
        native.core(), StoreMeeting(dist.PrefixStore("mesh", store)), seat, "g", address, Deadline.after(60)
    )
    ours = NativeGroup(core, rank, size, torch.device("cpu"))
    dist.init_process_group("gloo", store=dist.PrefixStore("gloo", store), rank=rank, world_size=size)

    def echelon(x: torch.Tensor) -> None:
        ours.all_reduce(x).wait(Deadline.after(60))

    def gloo(x: torch.Tensor) -> None:
        dist.all_reduce(x)

    found: dict[str, dict[int, list[float]]] = {"echelon": {}, "gloo": {}}
    sides = {"echelon": echelon, "gloo": gloo}
    for num_bytes in sizes:
        x = torch.zeros(num_bytes // 4)
        for turn in range(rounds + 1):
            for name in sides if turn % 2 else reversed(sides):
                repeat = max(1, min(20, (1 << 20) // num_bytes))
                took = torch.zeros(1, dtype=torch.float64)
                ours.barrier().wait(Deadline.after(60))
                began = time.perf_counter()
                for _ in range(repeat):
                    sides[name](x)
                took[0] = (time.perf_counter() - began) / repeat
                ours.all_reduce(took, "max").wait(Deadline.after(60))
                if turn > 0:  # the first warms up
                    found[name].setdefault(num_bytes, []).append(took.item())
    if rank == 0:
        (folder / "times.json").write_text(json.dumps(found))
    dist.barrier()
    ours.close()
    dist.destroy_process_group()


def shape(network: Any, rate: str) -> None:
    from tests.flows.netns import sh

    for number, host in enumerate(network.hosts):
        for space, interface in ((host.space, "eth0"), (network.switch, f"p{number}")):
            sh("tc", "-n", space, "qdisc", "add", "dev", interface, "root", "tbf", "rate", rate, "burst", "256kb", "latency", "50ms")  # fmt: skip


def slow_down(network: Any, delay_us: int, folder: Path) -> list[subprocess.Popen[str]]:
    """Every host's cable becomes one with a delay in each direction."""
    from tests.flows.netns import sh

    sh("cc", "-O2", "-o", str(folder / "delaytap"), str(ROOT / "benchmarks" / "delaytap.c"))
    cables = []
    for number, host in enumerate(network.hosts):
        sh("ip", "-n", network.switch, "link", "del", f"p{number}")
        cable = subprocess.Popen(
            ["ip", "netns", "exec", network.switch, str(folder / "delaytap"), host.space, "eth0", f"p{number}", str(delay_us // 2)],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        cables.append(cable)
        assert cable.stdout is not None
        assert cable.stdout.readline() == "ready\n"
        sh("ip", "-n", network.switch, "link", "set", f"p{number}", "master", "br0", "up")
        sh("ip", "-n", host.space, "link", "set", "eth0", "up")
        sh("ip", "-n", host.space, "addr", "add", f"{host.ipv4}/24", "dev", "eth0")
    return cables


def iperf3(network: Any, seconds: int = 4) -> float:
    """Bytes a second that one stream moves between the first two hosts."""
    client, server = network.hosts[:2]
    listening = subprocess.Popen(
        ["ip", "netns", "exec", server.space, "iperf3", "-s", "-1", "--forceflush", "-B", server.ipv4],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert listening.stdout is not None
    while "listening" not in listening.stdout.readline():
        pass
    done = subprocess.run(
        ["ip", "netns", "exec", client.space, "iperf3", "-J", "-t", str(seconds), "-c", server.ipv4],
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    listening.wait(30)
    return float(json.loads(done.stdout)["end"]["sum_received"]["bits_per_second"]) / 8


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--ranks", type=int, default=1, help="of each host")
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--delay-us", type=int, default=0, help="one way, between two hosts")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)))
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    sizes = [int(size) for size in asked.sizes.split(",")]
    from tests.flows.netns import Network

    cables: list[subprocess.Popen[str]] = []
    network = Network(asked.hosts)
    try:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            if asked.delay_us:
                cables = slow_down(network, asked.delay_us, folder)
            shape(network, asked.rate)
            limit = [iperf3(network)]
            processes = [
                subprocess.Popen(
                    host.command(sys.executable, __file__, "worker", str(rank), str(asked.hosts * asked.ranks), name, host.ipv4, str(asked.rounds), asked.sizes),
                    env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
                )
                for rank, host in enumerate(host for host in network.hosts for _ in range(asked.ranks))
            ]  # fmt: skip
            codes = [process.wait(1800) for process in processes]
            assert not any(codes), codes
            limit.append(iperf3(network))
            times = json.loads((folder / "times.json").read_text())
    finally:
        for cable in cables:
            cable.kill()
            cable.wait()
        network.close()
    report(asked, sizes, times, limit)


def report(asked: argparse.Namespace, sizes: list[int], times: Any, limit: list[float]) -> None:
    link, share, rows = statistics.mean(limit), 2 * (asked.hosts - 1) / asked.hosts, []
    print(f"{asked.hosts} hosts of {asked.ranks}, {asked.rate}, {asked.delay_us} µs each way; iperf3 {link * 8 / 1e6:.0f} Mbit/s before and after: "
          + ", ".join(f"{one * 8 / 1e6:.0f}" for one in limit))  # fmt: skip
    print(f"{'bytes':>10} {'echelon ms':>11} {'gloo ms':>9} {'gloo / ours':>12} {'of iperf3':>10}")
    for size in sizes:
        ours, theirs = (statistics.median(times[side][str(size)]) for side in ("echelon", "gloo"))
        rows.append(
            {"bytes": size, "echelon_s": ours, "gloo_s": theirs, "of_iperf3": share * size / ours / link}
        )
        print(
            f"{size:>10} {ours * 1e3:>11.3f} {theirs * 1e3:>9.3f} {theirs / ours:>12.2f} {rows[-1]['of_iperf3']:>10.1%}"
        )
    if asked.out is None:
        return
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=ROOT, check=False
    ).stdout.strip()
    asked.out.write_text(
        json.dumps(
            {
                "what": "all_reduce among hosts",
                "when": datetime.now().isoformat(timespec="seconds"),
                "commit": commit,
                "machine": platform.processor() or platform.machine(),
                "cores": os.cpu_count(),
                "kernel": platform.release(),
                "hosts": asked.hosts,
                "rate": asked.rate,
                "delay_us": asked.delay_us,
                "rounds": asked.rounds,
                "iperf3_bytes_per_s": limit,
                "rows": rows,
                "times_s": times,
            },
            indent=1,
        )
        + "\n"
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        _, _, rank, size, folder, address, rounds, sizes = sys.argv
        worker(int(rank), int(size), Path(folder), address, int(rounds), [int(s) for s in sizes.split(",")])
    else:
        main()
