"""What the loopback hub answers: the few routes of the Hub that reading, listing and pushing need."""

from __future__ import annotations

import base64
import contextlib
import gzip
import json
import re
import socket
import time
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

if TYPE_CHECKING:
    from tests.hub.loopback import Blob, LoopbackHub, Repo

REPO = r"(?P<repo>[^/]+/[^/]+)"
COMMIT = r"(?P<commit>[0-9a-f]{40})"
PIECE = 1 << 16


class Handler(BaseHTTPRequestHandler):
    """One connection; `hub` and `origin` are set by the server."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    hub: LoopbackHub
    origin: str

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing on stderr."""

    def do_GET(self) -> None:
        from tests.hub.loopback import Request

        parts = urlsplit(self.path)
        self.query = {key: values[0] for key, values in parse_qs(parts.query).items()}
        self.body = self._read_body()
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None
        where = self.origin, self.command, unquote(parts.path)
        self.request_log = Request(*where, self.headers.get("Range"), token, len(self.body))
        self.hub.requests.append(self.request_log)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            if not self._fail():
                (self._cdn if self.origin == "cdn" else self._hub)(unquote(parts.path))

    do_HEAD = do_POST = do_PUT = do_GET

    def _read_body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = b""
        while size := int(self.rfile.readline().split(b";")[0], 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _fail(self) -> bool:
        """Whether the request was answered, or left without an answer, by a fault."""
        fault = self.hub.fault_of(self.request_log, {"status", "reset", "slow"})
        if fault is None:
            return False
        if fault.what == "slow":
            time.sleep(fault.options["seconds"])
            return False
        if fault.what == "reset":
            self._hang_up()
        else:
            self._refuse(fault.options["status"], fault.options.get("code"), **fault.options.get("headers", {}))
        return True

    def _hang_up(self) -> None:
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def _answer(self, status: int, body: bytes | dict[str, Any] | list[Any] = b"", **headers: str) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self._head(status, len(content), {"Content-Type": "application/json", **_named(headers)})
        if self.command != "HEAD":
            self._write(content)

    def _refuse(self, status: int, code: str | None = None, **headers: str) -> None:
        self._answer(status, {"error": code or "refused"}, **({"X_Error_Code": code} if code else {}), **headers)

    def _head(self, status: int, length: int, headers: dict[str, str]) -> None:
        self.request_log.status = status
        self.send_response(status)
        for name, value in {"Content-Length": str(length), **headers}.items():
            self.send_header(name, value)
        self.end_headers()

    def _write(self, content: bytes) -> None:
        for start in range(0, len(content), PIECE):
            piece = content[start : start + PIECE]
            self.wfile.write(piece)
            self.request_log.sent += len(piece)

    def _hub(self, path: str) -> None:
        routes = {
            rf"/api/models/{REPO}(?:/revision/(?P<revision>.+))?": self._info,
            rf"/api/models/{REPO}/tree/(?P<revision>[^/]+)": self._tree,
            rf"/api/models/{REPO}/preupload/(?P<revision>[^/]+)": self._preupload,
            rf"/api/models/{REPO}/commit/(?P<revision>[^/]+)": self._commit,
            rf"/{REPO}\.git/info/lfs/objects/batch": self._lfs_batch,
            rf"/{REPO}/resolve/(?P<revision>refs/pr/\d+|[^/]+)/(?P<file>.+)": self._resolve,
            rf"/api/resolve-cache/models/{REPO}/{COMMIT}/(?P<file>.+)": self._cached,
        }
        if path == "/api/repos/create":
            return self._create(**json.loads(self.body))
        if path == "/api/validate-yaml":
            return self._answer(200, {"errors": [], "warnings": []})
        for pattern, route in routes.items():
            if found := re.fullmatch(pattern, path):
                groups = found.groupdict()
                repo = self._repo(groups.pop("repo"))
                return None if repo is None else route(repo, **groups)
        return self._refuse(404)

    def _repo(self, repo_id: str) -> Repo | None:
        repo, token = self.hub.repos.get(repo_id), self.request_log.token
        if repo is not None and (repo.readers is None or token in repo.readers):
            self.repo_id = repo_id
            return repo
        code = "GatedRepo" if repo is not None and repo.gated else "RepoNotFound"
        self._refuse(401 if token is None else 403 if code == "GatedRepo" else 404, code)
        return None

    def _info(self, repo: Repo, revision: str | None) -> None:
        commit = repo.resolve(revision or "main")
        if commit is None:
            return self._refuse(404, "RevisionNotFound")
        siblings: list[dict[str, Any]] = []
        for path, blob in sorted(repo.commits[commit].items()):
            row: dict[str, Any] = {"rfilename": path, "size": len(blob.data), "blobId": blob.git_id}
            if blob.lfs:
                row["lfs"] = {"sha256": blob.sha256, "size": len(blob.data), "pointerSize": len(blob.pointer)}
            siblings.append(row if self.query.get("blobs") else {"rfilename": path})
        about = {"id": self.repo_id, "modelId": self.repo_id, "private": repo.readers is not None, "tags": []}
        return self._answer(200, {**about, "sha": commit, "siblings": siblings})

    def _tree(self, repo: Repo, revision: str) -> None:
        commit = repo.resolve(revision)
        if commit is None:
            return self._refuse(404, "RevisionNotFound")
        rows: list[dict[str, Any]] = []
        for path, blob in sorted(repo.commits[commit].items()):
            row: dict[str, Any] = {"type": "file", "path": path, "size": len(blob.data), "oid": blob.git_id}
            if blob.lfs:
                row["lfs"] = {"oid": blob.sha256, "size": len(blob.data), "pointerSize": len(blob.pointer)}
            rows.append(row)
        return self._answer(200, rows)

    def _resolve(self, repo: Repo, revision: str, file: str) -> None:
        commit = repo.resolve(revision)
        if commit is None:
            return self._refuse(404, "RevisionNotFound")
        blob = repo.commits[commit].get(file)
        if blob is None:
            return self._refuse(404, "EntryNotFound", X_Repo_Commit=commit)
        headers = self._identity(blob, commit)
        if self.hub.fault_of(self.request_log, {"pointer"}):
            return self._content(blob.pointer, headers)
        if blob.lfs:
            linked = {"X_Linked_Etag": headers.pop("ETag"), "X_Linked_Size": str(len(blob.data))}
            location = f"{self.hub.cdn_url}/{blob.sha256}?signature={self.hub.sign()}"
            return self._answer(302, b"", Location=location, **linked, **headers)
        location = f"/api/resolve-cache/models/{self.repo_id}/{commit}/{quote(file)}"
        return self._answer(307, b"", Location=location, X_Linked_Size=str(len(blob.data)), **headers)

    def _cached(self, repo: Repo, commit: str, file: str) -> None:
        blob = repo.commits[commit][file]
        self._content(blob.data, self._identity(blob, commit))

    def _identity(self, blob: Blob, commit: str) -> dict[str, str]:
        fault = self.hub.fault_of(self.request_log, {"etag", "commit"})
        etag = "e" * len(blob.etag) if fault and fault.what == "etag" else blob.etag
        return {"X_Repo_Commit": "c" * 40 if fault and fault.what == "commit" else commit, "ETag": f'"{etag}"'}

    def _cdn(self, path: str) -> None:
        key = path.removeprefix("/")
        if self.command == "PUT":
            from tests.hub.loopback import Blob

            self.hub.blobs[key] = Blob(self.body, lfs=True)
            return self._answer(200, ETag='"stored"')
        if self.request_log.token is not None:
            return self._refuse(400)
        if not self.hub.use(int(self.query["signature"])):
            return self._refuse(403)
        return self._content(self.hub.blobs[key].data, {"ETag": '"storage"'})

    def _content(self, data: bytes, headers: dict[str, str]) -> None:
        """The bytes of a file, those asked for, unless a fault says otherwise."""
        kinds = {"drop", "ignore_range", "wrong_range", "gzip", "flip"}
        fault = None if self.command == "HEAD" else self.hub.fault_of(self.request_log, kinds)
        what = fault.what if fault else ""
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if what == "gzip":
            return self._answer(200, gzip.compress(data), Content_Encoding="gzip", **headers)
        start, end, status = 0, len(data), 200
        if wanted and what != "ignore_range":
            start, end, status = int(wanted[1]), min(int(wanted[2] or len(data)) + 1, len(data)), 206
            if start >= end:
                return self._answer(416, Content_Range=f"bytes */{len(data)}")
        if what == "wrong_range":
            start, end = start + 1, min(end + 1, len(data))
        if status == 206:
            headers = {**headers, "Content_Range": f"bytes {start}-{end - 1}/{len(data)}"}
        self._head(status, end - start, {"Content-Type": "application/octet-stream", **_named(headers)})
        if self.command == "HEAD":
            return None
        piece = data[start:end]
        if what == "flip":
            piece = bytes([piece[0] ^ 1]) + piece[1:]
        self._write(piece[: fault.options["after"]] if fault and what == "drop" else piece)
        return self._hang_up() if what == "drop" else None

    def _create(self, name: str, organization: str | None = None, private: bool | None = None, **more: object) -> None:
        from tests.hub.loopback import Repo

        repo_id = f"{organization or 'me'}/{name}"
        if repo_id in self.hub.repos:
            return self._answer(
                409, {"error": "You already created this model repo", "url": f"{self.hub.url}/{repo_id}"}
            )
        repo = self.hub.repos[repo_id] = Repo(
            readers={self.request_log.token or ""} if private or more.get("visibility") == "private" else None
        )
        repo.commit({})
        return self._answer(200, {"url": f"{self.hub.url}/{repo_id}", "id": repo_id})

    def _preupload(self, repo: Repo, revision: str) -> None:
        from tests.hub.loopback import LFS_SUFFIXES

        files = [
            {
                "path": row["path"],
                "uploadMode": "lfs" if row["path"].endswith(LFS_SUFFIXES) else "regular",
                "shouldIgnore": False,
            }
            for row in json.loads(self.body)["files"]
        ]
        self._answer(200, {"files": files})

    def _lfs_batch(self, repo: Repo) -> None:
        objects: list[dict[str, Any]] = []
        for row in json.loads(self.body)["objects"]:
            upload = {"actions": {"upload": {"href": f"{self.hub.cdn_url}/{row['oid']}"}}}
            objects.append({**row, **({} if row["oid"] in self.hub.blobs else upload)})
        self._answer(200, {"transfer": "basic", "objects": objects})

    def _commit(self, repo: Repo, revision: str) -> None:
        from tests.hub.loopback import Blob

        self.hub.before_commit()
        parent = repo.resolve(revision)
        if parent is None:
            return self._refuse(404, "RevisionNotFound")
        files = dict(repo.commits[parent])
        for line in self.body.splitlines():
            kind, value = (json.loads(line)[name] for name in ("key", "value"))
            if kind == "header" and value.get("parentCommit", parent) != parent:
                return self._refuse(412)
            if kind == "file":
                files[value["path"]] = Blob(base64.b64decode(value["content"]), lfs=False)
            elif kind == "lfsFile":
                files[value["path"]] = self.hub.blobs[value["oid"]]
            elif kind == "deletedFile":
                del files[value["path"]]
        branch = "refs/pr/1" if self.query.get("create_pr") else revision
        commit = repo.commit(files, branch)
        about = {"success": True, "commitOid": commit, "commitUrl": f"{self.hub.url}/{self.repo_id}/commit/{commit}"}
        pull = {"pullRequestUrl": f"{self.hub.url}/{self.repo_id}/discussions/1"} if branch != revision else {}
        return self._answer(200, {**about, **pull})


def _named(headers: dict[str, str]) -> dict[str, str]:
    """Header names, written as keywords in the code."""
    return {name.replace("_", "-"): value for name, value in headers.items()}
