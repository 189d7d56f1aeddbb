"""One worker (or the server, or all of a peer's cluster) of benchmarks/push_pull.py: told over its standard input what to do, answers with seconds.

push_pull_worker.py echelon|rpc|ray|tensorflow|tensorflow-server RANK JSON
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

LR = 1e-3


def rounds() -> Iterator[tuple[str, int]]:
    """(what, how many) for every line that comes."""
    for line in sys.stdin:
        what, _, count = line.partition(" ")
        yield what.strip(), int(count or 1)


def tell(value: object) -> None:
    print(json.dumps(value), flush=True)


def timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def serve_rounds(kinds: dict[str, Callable[[int], object]]) -> None:
    tell("ready")
    for what, count in rounds():
        tell(timed(lambda w=what, c=count: kinds[w](c)))


def echelon(rank: int, told: dict[str, Any]) -> None:
    import ctypes

    import torch

    import echelon

    torch.set_num_threads(1)
    numel, keys, small = told["numel"], told["keys"], told["small"]
    with echelon.ps.connect(told["address"], token=told["token"]) as ps:
        ps.create("large", torch.zeros(numel), lr=LR)
        for key in range(keys):
            ps.create(f"small {key}", torch.zeros(small), lr=LR)
        grad, out = torch.randn(numel), torch.empty(numel)
        shared_grad, shared_out = ps.buffer("large").copy_(grad), ps.buffer("large")
        values: dict[str, torch.Tensor] = {}
        names = [f"small {key}" for key in range(keys)]
        grads, outs = [torch.randn(small) for _ in names], [torch.empty(small) for _ in names]

        def large(count: int) -> None:
            for _ in range(count):
                ps.push_pull("large", grad, out).wait()

        def fresh(count: int) -> None:
            for _ in range(count):
                values["large"] = ps.push_pull("large", grad).wait()

        def buffers(count: int) -> None:
            for _ in range(count):
                ps.push_pull("large", shared_grad, shared_out).wait()

        def one_small(count: int) -> None:
            for key in range(count):
                ps.push_pull(names[key % keys], grads[key % keys], outs[key % keys])
            ps.wait()

        def copies(count: int) -> None:
            """What memory gives: a copy of the same bytes, by both workers at a time."""
            for _ in range(count):
                ctypes.memmove(out.data_ptr(), grad.data_ptr(), grad.nbytes)

        serve_rounds(
            {"large": large, "fresh": fresh, "buffers": buffers, "small": one_small, "copies": copies}
        )


class Table:
    """A parameter server as one writes it with torch.distributed.rpc: a lock, a tensor, an update."""

    def __init__(self, numel: int, keys: int, small: int) -> None:
        import threading

        import torch

        self.lock = threading.Lock()
        self.large = torch.zeros(numel)
        self.small = [torch.zeros(small) for _ in range(keys)]


TABLE: Table | None = None


def rpc_push_pull(key: int, grad: Any) -> Any:
    assert TABLE is not None
    with TABLE.lock:
        param = TABLE.large if key < 0 else TABLE.small[key]
        param.add_(grad, alpha=-LR)
        return param


def rpc(rank: int, told: dict[str, Any]) -> None:
    global TABLE
    import torch
    from torch.distributed import rpc

    sys.modules["push_pull_worker"] = sys.modules["__main__"]  # RPC names functions by their module
    rpc_push_pull.__module__ = "push_pull_worker"
    torch.set_num_threads(1)
    numel, keys, small = told["numel"], told["keys"], told["small"]
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{told['port']}", rpc_timeout=120)
    if rank == 2:
        TABLE = Table(numel, keys, small)
    rpc.init_rpc(
        "server" if rank == 2 else f"worker{rank}", rank=rank, world_size=3, rpc_backend_options=options
    )
    if rank == 2:
        tell("ready")
        sys.stdin.read()
    else:
        grad, grads = torch.randn(numel), [torch.randn(small) for _ in range(keys)]

        def large(count: int) -> None:
            for _ in range(count):
                rpc.rpc_sync("server", rpc_push_pull, args=(-1, grad))

        def one_small(count: int) -> None:
            for begin in range(0, count, 500):
                keys_now = [key % keys for key in range(begin, min(begin + 500, count))]
                torch.futures.wait_all(
                    [rpc.rpc_async("server", rpc_push_pull, args=(k, grads[k])) for k in keys_now]
                )

        serve_rounds({"large": large, "small": one_small})
    rpc.shutdown()


def ray(rank: int, told: dict[str, Any]) -> None:
    """A driver with two worker actors and a server actor."""
    import numpy
    import ray

    numel = told["numel"]
    ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False, _node_ip_address="127.0.0.1")

    @ray.remote(num_cpus=1)
    class Server:
        def __init__(self) -> None:
            self.large = numpy.zeros(numel, numpy.float32)

        def push_pull(self, grad: Any) -> Any:
            self.large -= LR * grad
            return self.large

    @ray.remote(num_cpus=1)
    class Worker:
        def __init__(self, server: Any) -> None:
            self.server, self.grad = server, numpy.random.randn(numel).astype(numpy.float32)
            self.values = numpy.zeros(numel, numpy.float32)

        def round(self, what: str) -> float:
            return timed(lambda: self.push_pull(what == "large"))

        def push_pull(self, own: bool) -> None:
            got = ray.get(self.server.push_pull.remote(self.grad))
            if own:  # what Ray gives lies in its store and may not be written to
                numpy.copyto(self.values, got)

    server = Server.remote()
    workers = [Worker.remote(server) for _ in range(2)]
    ray.get([worker.round.remote("large") for worker in workers])
    tell("ready")
    for what, _ in rounds():
        tell(max(ray.get([worker.round.remote(what) for worker in workers])))
    ray.shutdown()


def tensorflow_server(rank: int, told: dict[str, Any]) -> None:
    """A process of TensorFlow's cluster: worker 0, worker 1, or the parameter server (2)."""
    import tensorflow as tf

    job, task = ("ps", 0) if rank == 2 else ("worker", rank)
    tf.distribute.Server(
        tf.train.ClusterSpec(told["cluster"]), job_name=job, task_index=task, protocol="grpc", start=True
    )
    tell("ready")
    sys.stdin.read()


def tensorflow(rank: int, told: dict[str, Any]) -> None:
    """The coordinator of ParameterServerStrategy: two steps at a time, one on each worker; the values arrive at the worker."""
    import tensorflow as tf

    cluster = tf.train.ClusterSpec(told["cluster"])
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        cluster, rpc_layer="grpc", task_type="chief", task_id=0
    )
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        large = tf.Variable(tf.zeros(told["numel"]))

    @tf.function
    def push_pull() -> Any:
        large.assign_sub(LR * tf.ones(told["numel"]))
        return tf.reduce_max(tf.identity(large.read_value())[:1])

    def both(count: int) -> None:
        for _ in range(2 * count):
            coordinator.schedule(push_pull)
        coordinator.join()

    both(1)
    serve_rounds({"large": both})


if __name__ == "__main__":
    side, rank, told = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
    {
        "echelon": echelon,
        "rpc": rpc,
        "ray": ray,
        "tensorflow": tensorflow,
        "tensorflow-server": tensorflow_server,
    }[side](rank, told)
