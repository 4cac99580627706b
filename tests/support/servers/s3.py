"""An S3-compatible server that keeps objects as plain files, which a test can damage in place."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from support.servers.process import ServerProcess, accepts, find_program, free_port

BUCKET, REGION = "kvkeep-test", "us-east-1"
ACCESS_KEY, SECRET_KEY = "kvkeep-access", "kvkeep-secret-0123456789"


@dataclass
class S3Server:
    """A running server with one bucket."""

    port: int
    process: ServerProcess

    @property
    def endpoint(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def folder(self) -> Path:
        """The files of the bucket."""
        return self.process.home / "data" / BUCKET

    def url(self, port: int | None = None) -> str:
        """As kvkeep is told of it, all in one; ``port`` is that of a proxy in front of it."""
        endpoint = quote(f"http://127.0.0.1:{port or self.port}", safe="")
        return (
            f"s3://{BUCKET}?endpoint={endpoint}&region={REGION}"
            f"&access_key_id={ACCESS_KEY}&secret_access_key={SECRET_KEY}"
        )

    def objects(self) -> list[Path]:
        """The files of all objects."""
        found = (path for path in self.folder.rglob("*") if path.is_file())
        return sorted(
            path for path in found if ".nanio" not in path.relative_to(self.folder).parts[0]
        )


@contextmanager
def s3_server(*, max_object_bytes: int = 0, data: Path | None = None) -> Iterator[S3Server]:
    """A server, ended with the block.

    Args:
        max_object_bytes: no file can be larger, as on a disk that is full; 0 is no limit.
        data: an existing folder for the objects, such as one in memory; by default its own.
    """
    port = free_port()
    limit = [] if not max_object_bytes else ["prlimit", f"--fsize={max_object_bytes}"]
    command = [find_program("nanio"), "serve", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--data-dir", "data", "--region", REGION, "--no-access-log"]
    secrets = {"NANIO_ACCESS_KEY": ACCESS_KEY, "NANIO_SECRET_KEY": SECRET_KEY}
    process = ServerProcess("s3", [*limit, *command], lambda: accepts(port), env=secrets)
    if data is not None:
        (process.home / "data").symlink_to(data)
    (process.home / "data" / BUCKET).mkdir(parents=True, exist_ok=True)
    try:
        with process:
            yield S3Server(port, process)
    finally:
        if data is not None:
            shutil.rmtree(data / BUCKET, ignore_errors=True)
