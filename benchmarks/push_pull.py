"""Push-pull on one host, 2 workers and 1 server: Echelon beside a parameter server written with torch.distributed.rpc.

    python benchmarks/push_pull.py [--mib 100] [--rounds 20] [--keys 10000] [--ray PYTHON] [--tensorflow PYTHON] [--file]

All sides take turns, round by round; in a round both workers push and pull at a time, and its time is that of the slower one. Who has not
its turn is stopped (RPC's idle processes look for work without a pause and take both of two cores), all but Ray, which is idle when it is.
Each worker ends with the new values in a tensor of its own that it may write to: "large" starts and ends in ordinary memory that was there
before; "fresh" starts in ordinary memory and ends in the tensor that push_pull gives; "buffers" starts and ends in Client.buffer, which the
server shares. The limit of memory is the bytes that must be read or written, at the rate that both workers reach together in a plain copy
in the same round: with buffers 4 times the table for each worker (gradient read, values read and written, `out` written), fresh 6 times (the
gradient copied), from ordinary memory to ordinary memory 8 times (each end copied once). "small": a table for each of --keys parameters of 64 numbers, push-pulls a second of both workers together. --ray
names the Python of a virtual environment that has Ray and NumPy, for a side made of actors ("ray in place": answers stay in Ray's own
shared memory, as those of "buffers" do); --tensorflow one with TensorFlow, for its ParameterServerStrategy.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import secrets
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
import record

WORKER = Path(__file__).parent / "push_pull_worker.py"
SMALL = 64
OURS = {"large": 8, "fresh": 6, "buffers": 4}
"""Our ways, with the passes over a table's bytes that each needs for a worker."""
GOAL, LIMIT_GOAL, SMALL_GOAL = 3.0, 2.0, 3000


STARTED: list[subprocess.Popen[str]] = []


class Process:
    def __init__(self, side: str, rank: int, told: dict[str, Any], python: str = sys.executable) -> None:
        env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [python, str(WORKER), side, str(rank), json.dumps(told)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env,
        )  # fmt: skip
        STARTED.append(self.process)

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def hear(self) -> Any:
        assert self.process.stdout is not None
        while True:
            line = self.process.stdout.readline()
            if not line:
                raise SystemExit("a worker of the benchmark ended")
            if line.startswith(('"', "{")) or line[0].isdigit():
                return json.loads(line)


class Side:
    """Processes that act in a round together, and others that they need."""

    def __init__(self, workers: list[Process], others: list[Process] | None = None) -> None:
        self.workers, self.others = workers, others or []

    def signal(self, number: signal.Signals) -> None:
        for process in (*self.others, *self.workers):
            process.process.send_signal(number)

    def seconds(self, what: str, count: int = 1) -> float:
        for worker in self.workers:
            worker.say(f"{what} {count}")
        return float(max(worker.hear() for worker in self.workers))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def echelon_side(told: dict[str, Any], token_file: Path) -> Side:
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    server = subprocess.Popen(
        [sys.executable, "-m", "echelon", "serve", "--token-file", str(token_file)], stdout=subprocess.PIPE, text=True, env=env
    )  # fmt: skip
    STARTED.append(server)
    assert server.stdout is not None
    address = next(found for line in server.stdout if (found := re.search(r'connect\("(.*)"\)', line)))
    told = {**told, "address": address[1], "token": token_file.read_text().strip()}
    workers = [Process("echelon", rank, told) for rank in range(2)]
    for worker in workers:
        worker.hear()
    return Side(workers)


def rpc_side(told: dict[str, Any]) -> Side:
    told = {**told, "port": free_port()}
    processes = [Process("rpc", rank, told) for rank in (2, 0, 1)]
    for process in processes:
        process.hear()
    return Side(processes[1:], processes[:1])


def tensorflow_side(told: dict[str, Any], python: str) -> Side:
    ports = [f"127.0.0.1:{free_port()}" for _ in range(4)]
    told = {**told, "cluster": {"worker": ports[:2], "ps": ports[2:3], "chief": ports[3:]}}
    servers = [Process("tensorflow-server", rank, told, python) for rank in range(3)]
    for server in servers:
        server.hear()
    chief = Process("tensorflow", 0, told, python)
    chief.hear()
    return Side([chief], servers)


@contextlib.contextmanager
def running(side: Side, name: str) -> Iterator[None]:
    """Its turn: it goes on, and stops again. What a turn left to do (memory to give back, threads that look a last time) is part of no
    other's."""
    if name == "ray":  # its daemons watch each other's lives
        yield
        return
    side.signal(signal.SIGCONT)
    yield
    side.signal(signal.SIGSTOP)


def large(ours: Side, peers: dict[str, Side], rounds: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in (*OURS, "copies", *peers)}
    if "ray" in peers:
        times["ray in place"] = []
    for at in range(rounds + 2):
        row = {name: ours.seconds(name) for name in (*OURS, "copies")}
        for name, side in peers.items():
            with running(side, name):
                row[name] = side.seconds("large")
        if "ray" in peers:
            row["ray in place"] = peers["ray"].seconds("buffers")
        if at >= 2:  # pages are touched, states made
            for name, seconds in row.items():
                times[name].append(seconds)
    return times


def small(ours: Side, peer: Side, keys: int, rounds: int) -> dict[str, list[float]]:
    """Push-pulls a second, of both workers together."""
    few = min(keys, 200)
    rates: dict[str, list[float]] = {"echelon": [], "rpc": []}
    ours.seconds("small", keys)
    with running(peer, "rpc"):
        peer.seconds("small", few)
    for _ in range(rounds):
        rates["echelon"].append(2 * keys / ours.seconds("small", keys))
        with running(peer, "rpc"):
            rates["rpc"].append(2 * few / peer.seconds("small", few))
    return rates


def told_of(times: dict[str, list[float]], rates: dict[str, list[float]]) -> dict[str, Any]:
    """Medians, ratios within a round, and the share of the limit."""
    results: dict[str, Any] = {
        f"{name} ms": 1e3 * statistics.median(seconds) for name, seconds in times.items()
    }
    for name in sorted(times.keys() - {*OURS, "copies"}):
        for way in OURS:
            ratios = [theirs / mine for theirs, mine in zip(times[name], times[way], strict=True)]
            results[f"{name} / {way}"] = record.verdict(ratios, GOAL)
    for way, passes in OURS.items():  # a copy reads and writes: 2 passes
        over = [mine / (copy * passes / 2) for mine, copy in zip(times[way], times["copies"], strict=True)]
        results[f"{way} / limit"] = {
            "median": statistics.median(over),
            "goal": LIMIT_GOAL,
            "met": statistics.median(over) <= LIMIT_GOAL,
        }
    rate = statistics.median(rates["echelon"])
    results["small push-pulls a second"] = {
        "median": rate,
        "lower": min(rates["echelon"]),
        "goal": SMALL_GOAL,
        "met": rate >= SMALL_GOAL,
    }
    results["small push-pulls a second, rpc"] = {"median": statistics.median(rates["rpc"])}
    return results


def measure(
    args: argparse.Namespace, told: dict[str, Any], token_file: Path
) -> tuple[dict[str, Any], dict[str, Any]]:
    ours, rpc = echelon_side(told, token_file), rpc_side(told)
    peers = {"rpc": rpc}
    if args.ray:
        peers["ray"] = Side([Process("ray", 0, told, args.ray)])
        peers["ray"].workers[0].hear()
    if args.tensorflow:
        peers["tensorflow"] = tensorflow_side(told, args.tensorflow)
    for name, side in peers.items():
        if name != "ray":
            side.signal(signal.SIGSTOP)
    return large(ours, peers, args.rounds), small(ours, rpc, args.keys, max(3, args.rounds // 4))


def end_all() -> None:
    """Hangs up on all before any is waited for: RPC ends together. What does not end is killed."""
    for process in STARTED:
        process.send_signal(signal.SIGCONT)
        if process.stdin is not None:
            process.stdin.close()
        else:
            process.terminate()
    for process in STARTED:
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--keys", type=int, default=10_000)
    parser.add_argument("--ray", metavar="PYTHON")
    parser.add_argument("--tensorflow", metavar="PYTHON")
    parser.add_argument("--file", action="store_true", help="leave a file in benchmarks/results")
    args = parser.parse_args()
    told = {"numel": args.mib * 2**20 // 4, "keys": args.keys, "small": SMALL}
    with tempfile.TemporaryDirectory() as folder:
        token_file = Path(folder) / "token"
        token_file.touch(0o600)
        token_file.write_text(secrets.token_hex(32))
        try:
            times, rates = measure(args, told, token_file)
        finally:
            end_all()
    results = told_of(times, rates)
    for name, value in results.items():
        print(f"{name:36} {value if not isinstance(value, float) else round(value, 2)}")
    if args.file:
        print(
            record.write(
                "push-pull",
                {"summary": results, "seconds": times, "rates": rates},
                mib=args.mib,
                keys=args.keys,
            )
        )


if __name__ == "__main__":
    main()
