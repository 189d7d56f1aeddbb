"""A parameter server without a trainer: workers in plain NumPy share a linear model and push gradients whenever they have them.

    python parameter_server.py                      starts a server and two workers, and ends them

or each by hand, on any machines:

    echelon serve --token-file token                prints the address
    ECHELON_TOKEN_FILE=token python parameter_server.py --address 127.0.0.1:4711 --seed 0
    ECHELON_TOKEN_FILE=token python parameter_server.py --address 127.0.0.1:4711 --seed 1
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile

import numpy as np

import echelon

TRUE = np.linspace(-2, 2, 50)  # the weights to be found


def work(address: str, seed: int, steps: int) -> None:
    """One worker: its own samples, its own pace. Nobody waits for anybody."""
    random = np.random.default_rng(seed)
    with echelon.ps.connect(address) as ps:
        ps.create("weights", np.zeros(50), "adam", lr=0.05)  # the first to come makes it, the others find it
        ps.create("bias", np.zeros(1), "sgd", lr=0.05)
        weights, bias = ps.pull("weights").wait(), ps.pull("bias").wait()
        for step in range(steps):
            x = random.normal(size=(32, 50))
            y = x @ TRUE + 3 + 0.1 * random.normal(size=32)
            off = x @ weights + bias - y
            new_weights = ps.push_pull("weights", 2 * x.T @ off / 32)  # both travel at a time,
            new_bias = ps.push_pull("bias", np.array([2 * off.mean()]))
            weights, bias = new_weights.wait(), new_bias.wait()  # and hold what the others pushed as well
            if step % 100 == 99:
                loss = np.mean(off**2)
                print(
                    f"worker {seed}, step {step + 1}: loss {loss:.3f}, update {new_weights.version}",
                    flush=True,
                )


def everything(steps: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        token_file = os.environ["ECHELON_TOKEN_FILE"] = os.path.join(folder, "token")
        command = [sys.executable, "-m", "echelon", "serve", "--token-file", token_file]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            for line in server.stdout:
                if address := re.search(r'connect\("(.*)"\)', line):
                    break
            command = [sys.executable, __file__, "--address", address[1], "--steps", str(steps), "--seed"]
            workers = [subprocess.Popen([*command, str(seed)]) for seed in range(2)]
            codes = [worker.wait() for worker in workers]
            with echelon.ps.connect(address[1]) as ps:
                error = np.abs(ps.pull("weights").wait().numpy() - TRUE).max()
                updates = ps.tables()["weights"]["version"]
            print(f"weights within {error:.3f} of the true ones after {updates} updates")
        finally:
            server.terminate()
            server.communicate()
    sys.exit(max(codes))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--address", help="of a server that runs already")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    work(args.address, args.seed, args.steps) if args.address else everything(args.steps)
