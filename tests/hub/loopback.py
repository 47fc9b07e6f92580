"""A Hugging Face Hub on this machine, for tests: it counts what it sends and fails on demand. Standard library alone.

Two origins, as the real one has: the hub on `127.0.0.1` answers questions and serves small files; large files (LFS) are a
redirect to a signed address of the "CDN" on `localhost`, another port, which refuses the user's token as storage services do.

    def test_something(hub):                      # the fixture below; huggingface_hub then talks to it and to an empty cache
        hub.publish("acme/tiny", hub.files_of(directory))
        hub.fail("GET cdn", "drop", after=1000)   # the next such request ends early
        mz.load_head("acme/tiny")
        assert hub.sent("cdn") < 2000
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.hub.loopback_handler import Handler

LFS_SUFFIXES = (".safetensors", ".bin")


@dataclass(frozen=True)
class Blob:
    """One version of one file."""

    data: bytes
    lfs: bool

    @cached_property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()

    @cached_property
    def pointer(self) -> bytes:
        """What git keeps of an LFS file."""
        text = f"version https://git-lfs.github.com/spec/v1\noid sha256:{self.sha256}\nsize {len(self.data)}\n"
        return text.encode()

    @cached_property
    def git_id(self) -> str:
        content = self.pointer if self.lfs else self.data
        return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()

    @property
    def etag(self) -> str:
        return self.sha256 if self.lfs else self.git_id


@dataclass
class Repo:
    """Commits and branches of one repository; `readers` are the tokens that may read it, None for everybody."""

    commits: dict[str, dict[str, Blob]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    readers: set[str] | None = None
    gated: bool = False

    def commit(self, files: Mapping[str, Blob], branch: str = "main") -> str:
        content = repr((sorted((path, blob.sha256) for path, blob in files.items()), len(self.commits)))
        commit = hashlib.sha1(content.encode()).hexdigest()
        self.commits[commit] = dict(files)
        self.branches[branch] = commit
        return commit

    def resolve(self, revision: str) -> str | None:
        return self.branches.get(revision) or (revision if revision in self.commits else None)


@dataclass
class Fault:
    """What goes wrong with the next `times` requests that match `where`; see `LoopbackHub.fail`."""

    where: str
    what: str
    times: int
    skip: int
    options: dict[str, Any]


@dataclass
class Request:
    """One request, and how many bytes of body it was answered with."""

    origin: str
    method: str
    path: str
    range: str | None
    token: str | None
    received: int
    status: int = 0
    sent: int = 0


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that broke is part of a test."""


class LoopbackHub:
    """The server. Use it as a context manager.

    Attributes:
        repos: by id.
        requests: all so far, `forget` empties it.
        before_commit: called when a commit is about to be made.
        uses_per_signature: how many requests a signed address of the CDN is good for; None for any number.
    """

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.blobs: dict[str, Blob] = {}
        self.requests: list[Request] = []
        self.before_commit: Callable[[], object] = lambda: None
        self.uses_per_signature: int | None = None
        self.signatures: list[int] = []
        self.lock = threading.Lock()
        self._faults: list[Fault] = []
        self._servers: list[_Server] = []

    def __enter__(self) -> LoopbackHub:
        for origin in ("hub", "cdn"):
            server = _Server(("127.0.0.1", 0), type(origin, (Handler,), {"hub": self, "origin": origin}))
            threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
            self._servers.append(server)
        return self

    def __exit__(self, *_: object) -> None:
        for server in self._servers:
            server.shutdown()
            server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._servers[0].server_port}"

    @property
    def cdn_url(self) -> str:
        return f"http://localhost:{self._servers[1].server_port}"

    def environment(self, folder: Path) -> dict[str, str]:
        """Variables with which another process talks to this hub, with its caches below `folder`."""
        paths = {"HF_HOME": str(folder), "HF_TOKEN_PATH": str(folder / "token")}
        return {"HF_ENDPOINT": self.url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", **paths}

    @staticmethod
    def files_of(directory: Path) -> dict[str, bytes]:
        """Path -> content of every file below a directory."""
        found = [path for path in directory.rglob("*") if path.is_file()]
        return {path.relative_to(directory).as_posix(): path.read_bytes() for path in found}

    def publish(self, repo_id: str, files: Mapping[str, bytes], branch: str = "main") -> str:
        """Make a commit of exactly these files; returns its hash. Weights are LFS files, others are not."""
        blobs = {path: Blob(data, path.endswith(LFS_SUFFIXES)) for path, data in files.items()}
        self.blobs |= {blob.sha256: blob for blob in blobs.values() if blob.lfs}
        return self.repos.setdefault(repo_id, Repo()).commit(blobs, branch)

    def fail(self, where: str, what: str, *, times: int = 1, skip: int = 0, **options: Any) -> None:
        """Let requests fail.

        Args:
            where: regular expression, searched in "METHOD origin path", for example `GET cdn` or `config.json`.
            what: `status` (status=, headers=, code=), `reset` (no answer), `slow` (seconds= before it), `drop` (after= that
                many bytes of body), `ignore_range`, `wrong_range` (one byte on), `gzip`, `flip` (the first byte), `pointer`
                (the LFS pointer), `etag` and `commit` (another than the listing's).
            times: how many requests; `skip`: how many pass before.
        """
        self._faults.append(Fault(where, what, times, skip, options))

    @property
    def pending(self) -> int:
        """How many requests are still to fail."""
        return sum(fault.times for fault in self._faults)

    def heal(self) -> None:
        """Let nothing fail any more."""
        self._faults.clear()

    def fault_of(self, request: Request, kinds: set[str]) -> Fault | None:
        """The fault of one of these kinds that hits this request; it is used up by that."""
        with self.lock:
            for fault in self._faults:
                place = f"{request.method} {request.origin} {request.path}"
                if fault.what in kinds and fault.times and re.search(fault.where, place):
                    if fault.skip:
                        fault.skip -= 1
                        continue
                    fault.times -= 1
                    return fault
        return None

    def sign(self) -> int:
        """A new signature for the CDN."""
        with self.lock:
            self.signatures.append(0)
            return len(self.signatures) - 1

    def use(self, signature: int) -> bool:
        """Whether the signature is still good; counts the use."""
        with self.lock:
            self.signatures[signature] += 1
            return self.uses_per_signature is None or self.signatures[signature] <= self.uses_per_signature

    def sent(self, origin: str | None = None) -> int:
        """Bytes of bodies sent, by one origin or both."""
        return sum(request.sent for request in self.requests if origin in (None, request.origin))

    def forget(self) -> None:
        """Start counting anew."""
        self.requests.clear()


def talk_to(url: str, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Have huggingface_hub talk to the hub at `url` in this process, with its caches below `folder`."""
    from huggingface_hub import constants
    from huggingface_hub.utils import _cache_assets, close_session

    close_session()
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(folder / "token"))
    monkeypatch.setattr(_cache_assets, "HF_ASSETS_CACHE", str(folder / "assets"))
    monkeypatch.delenv("HF_TOKEN", raising=False)


@contextlib.contextmanager
def served(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Iterator[LoopbackHub]:
    """A hub that huggingface_hub talks to in this process, with empty caches below `folder`."""
    from huggingface_hub.utils import close_session

    with LoopbackHub() as hub:
        talk_to(hub.url, monkeypatch, folder)
        try:
            yield hub
        finally:
            close_session()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[LoopbackHub]:
    """See `served`; tests elsewhere import it: `from tests.hub.loopback import hub  # noqa: F401`."""
    with served(monkeypatch, tmp_path / "home") as hub:
        yield hub
