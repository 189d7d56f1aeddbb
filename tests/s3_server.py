"""A real S3 server (seaweedfs) on loopback, for tests: started once, on free ports."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import needs

KEY, SECRET = "checkpoint-key", "checkpoint-secret"
PORTS = ("master.port", "master.port.grpc", "volume.port", "volume.port.grpc", "filer.port", "filer.port.grpc", "s3.port",
         "s3.port.grpc")  # fmt: skip


class S3Server:
    """Holds one bucket, `bucket`. May be killed and started again; what was stored stays."""

    bucket = "checkpoints"

    def __init__(self, program: str, folder: Path) -> None:
        self._folder = folder
        (folder / "data").mkdir()
        rights = {"name": "tests", "credentials": [{"accessKey": KEY, "secretKey": SECRET}],
                  "actions": ["Admin", "Read", "Write", "List"]}  # fmt: skip
        (folder / "s3.json").write_text(json.dumps({"identities": [rights]}))
        self.ports = dict(zip(PORTS, free_ports(len(PORTS)), strict=True))
        self._command = [
            program, "server", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-dir={folder}/data", "-s3", f"-s3.config={folder}/s3.json",
            "-s3.iam=false", "-s3.port.iceberg=0", "-s3.port.lance=0", "-volume.max=20", "-master.volumeSizeLimitMB=64",
            "-master.telemetry=false", *(f"-{name}={port}" for name, port in self.ports.items()),
        ]  # fmt: skip
        self.start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.ports['s3.port']}"

    @property
    def options(self) -> dict[str, object]:
        """What fsspec must know about it."""
        return {"endpoint_url": self.endpoint, "key": KEY, "secret": SECRET}

    @property
    def environment(self) -> dict[str, str]:
        """The same for another process, as a user would set it."""
        return {
            "FSSPEC_S3_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
        }

    def start(self) -> None:
        with (self._folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self._folder
            )

    def wait(self, timeout_s: float = 90.0) -> None:
        """Until it takes writes; then the bucket is there."""
        import fsspec

        deadline = time.monotonic() + timeout_s
        while True:
            try:
                with contextlib.suppress(urllib.error.HTTPError):  # it answers: the rest may need a key
                    urllib.request.urlopen(self.endpoint, timeout=2)
                files = fsspec.filesystem("s3", skip_instance_cache=True, **self.options)
                with contextlib.suppress(FileExistsError):
                    files.mkdir(self.bucket)
                files.pipe_file(f"{self.bucket}/probe", b"x" * 100)
                return
            except Exception as error:
                if time.monotonic() > deadline or self.process.poll() is not None:
                    log = (self._folder / "log").read_text("utf-8", "replace")[-2000:]
                    raise AssertionError(f"the S3 server did not start: {error!r}\n{log}") from error
                time.sleep(0.2)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(20)


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A running S3 server of this session; fsspec of this process knows it."""
    needs.use("s3")
    from fsspec.config import conf

    found = needs.s3_program()
    assert found, "no S3 server"

    server = S3Server(found, tmp_path_factory.mktemp("s3"))
    before = conf.get("s3")
    try:
        server.wait()
        conf["s3"] = dict(server.options)
        yield server
    finally:
        server.kill()
        if before is None:
            conf.pop("s3", None)
        else:
            conf["s3"] = before
