"""
A Hugging Face Hub on this machine: what huggingface_hub speaks of its HTTP API when models are pushed and read.

    with HubServer() as hub:
        hub.add_user("hf_alice", "alice", organisations=["lab"])
        subprocess.run([...], env={**os.environ, **hub.environment("hf_alice", home)})

Two ports, as in the world: the Hub itself, and the storage that large files go to and come from, which must never see
a token. `fail`, `cut` and `hold` make requests go wrong.
"""

import base64
import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from fnmatch import fnmatch
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

# What a new repository holds, shortened: everything else over 10 MB or binary goes to large file storage as well.
ATTRIBUTES = b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n"
LARGE = 10 * 2**20


@dataclass
class User:
    """Whose token it is, what it may do (`read` or `write`), and the organisations of its owner."""

    name: str
    role: str = "write"
    organisations: list[str] = field(default_factory=list)


@dataclass
class File:
    """The content of a file in a commit; `is_large` where git has a pointer to the storage only."""

    data: bytes
    is_large: bool

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()

    @property
    def git_oid(self) -> str:
        pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{self.sha256}\nsize {len(self.data)}\n"
        data = pointer.encode() if self.is_large else self.data
        return hashlib.sha1(b"blob %d\0%s" % (len(data), data)).hexdigest()


class Repository:
    """Commits by their id (each path -> `File`), and the names that lead to them, `refs/pr/1` among those."""

    def __init__(self, private: bool):
        self.private, self.gated = private, False
        self.commits: dict[str, dict[str, File]] = {}
        self.messages: list[str] = []
        self.branches: dict[str, str] = {}
        self.tags: dict[str, str] = {}
        self.commit("main", {".gitattributes": File(ATTRIBUTES, False)}, "initial commit")

    def commit(self, branch: str, files: dict[str, File], message: str) -> str:
        tree = sorted((path, file.git_oid) for path, file in files.items())
        oid = hashlib.sha1(f"{len(self.commits)} {message} {tree}".encode()).hexdigest()
        self.commits[oid], self.branches[branch] = files, oid
        self.messages.append(message)
        return oid

    def find(self, revision: str) -> str | None:
        found = self.branches.get(revision) or self.tags.get(revision)
        return found or (revision if revision in self.commits else None)

    def files(self, revision: str = "main") -> dict[str, bytes]:
        return {path: file.data for path, file in self.commits[self.find(revision)].items()}


@dataclass
class Fault:
    """What is to go wrong with the next `times` requests of a method whose path matches a pattern."""

    method: str
    pattern: str
    times: int
    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    error: str = ""
    after: int | None = None
    reached: threading.Event = field(default_factory=threading.Event)


class HubServer:
    """Starts with the `with` statement, on free ports of this machine."""

    def __init__(self, part_size: int | None = None):
        self.part_size = part_size
        self.users: dict[str, User] = {}
        self.repositories: dict[str, Repository] = {}
        self.storage: dict[str, bytes] = {}
        self.parts: dict[tuple[str, int], bytes] = {}
        self.requests: list[tuple[str, str, int]] = []
        """Method, path and status of all requests so far."""
        self.storage_saw_token = False
        self.faults: list[Fault] = []
        self.lock = threading.RLock()

    def __enter__(self) -> "HubServer":
        self._servers = [ThreadingHTTPServer(("127.0.0.1", 0), _handler(self, kind)) for kind in (_Hub, _Storage)]
        for server in self._servers:
            server.daemon_threads = True
            threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        self.url, self.storage_url = (f"http://127.0.0.1:{server.server_port}" for server in self._servers)
        return self

    def __exit__(self, *_) -> None:
        for fault in self.faults:
            fault.reached.set()
        for server in self._servers:
            server.shutdown()
            server.server_close()

    def environment(self, token: str | None, home: Path) -> dict[str, str]:
        """The variables with which huggingface_hub talks to this server; `home` holds its cache."""
        variables = {"HF_ENDPOINT": self.url, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
        # Since huggingface_hub 2 it is for the client to choose Xet, whose storage is no part of this server.
        return {**variables, "HF_TOKEN": token or "", "HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "127.0.0.1"}

    def add_user(self, token: str, name: str, role: str = "write", organisations: list[str] | None = None) -> None:
        self.users[token] = User(name, role, organisations or [])

    def add_repository(self, repo_id: str, folder: Path | None = None, private: bool = False) -> Repository:
        repository = self.repositories[repo_id] = Repository(private)
        if folder is not None:
            files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
            added = {name: File(data := path.read_bytes(), _is_large(name, data)) for name, path in files.items()}
            repository.commit("main", repository.commits[repository.branches["main"]] | added, "add folder")
        return repository

    def fail(self, method: str, pattern: str, status: int, times: int = 1, error: str = "", **headers: str) -> None:
        """Answer with a status; headers as keywords, `X_Error_Code="GatedRepo"`."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        self.faults.append(Fault(method, pattern, times, status, named, error or f"status {status}"))

    def cut(self, method: str, pattern: str, after: int = 0, times: int = 1) -> None:
        """Close the connection when so many bytes of the request's body have come."""
        self.faults.append(Fault(method, pattern, times, after=after))

    def hold(self, method: str, pattern: str) -> threading.Event:
        """Never answer the next such request; the event is set when it has come."""
        self.faults.append(fault := Fault(method, pattern, 1))
        return fault.reached

    def take_fault(self, method: str, path: str) -> Fault | None:
        with self.lock:
            for fault in self.faults:
                if fault.times and method == fault.method and fnmatch(path, fault.pattern):
                    fault.times -= 1
                    return fault
        return None

    def count(self, method: str, pattern: str) -> int:
        """How many such requests have been answered with success."""
        return sum(done == method and status < 400 and fnmatch(path, pattern) for done, path, status in self.requests)


class Refusal(Exception):
    """An answer that is an error, in the Hub's own form."""

    def __init__(self, status: int, message: str, code: str | None = None, **headers: str):
        self.status, self.message = status, message
        self.headers = {"X-Error-Message": message, **({"X-Error-Code": code} if code else {}), **headers}


def _handler(hub: HubServer, kind: type) -> type:
    return type(kind.__name__, (kind,), {"hub": hub})


def _is_large(path: str, sample: bytes, size: int | None = None) -> bool:
    return path.endswith(".safetensors") or (len(sample) if size is None else size) > LARGE or b"\0" in sample[:512]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: HubServer

    def log_message(self, *_) -> None:
        pass

    def do(self) -> None:
        url = urlsplit(self.path)
        self.path, self.query = url.path, parse_qs(url.query)
        fault = self.hub.take_fault(self.command, self.path)
        try:
            if fault is not None and fault.status is None:
                self.body(fault.after)
                fault.reached.set()
                if fault.after is None:
                    threading.Event().wait(60)
                self.close_connection = True
                self.connection.close()
                return
            self.data = self.body()
            if fault is not None:
                raise Refusal(fault.status, fault.error, **fault.headers)
            with self.hub.lock:
                self.answer()
        except Refusal as refusal:
            self.reply({"error": refusal.message}, refusal.status, refusal.headers)
        except OSError:
            self.close_connection = True  # the client went away

    do_GET = do_HEAD = do_POST = do_PUT = do

    def body(self, limit: int | None = None) -> bytes:
        """The request's body, or as much of it as has come when `limit` bytes have."""
        length = int(self.headers.get("Content-Length") or 0)
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(length if limit is None else min(limit, length))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
            if limit is not None and sum(map(len, parts)) >= limit:
                return b"".join(parts)
        self.rfile.readline()
        return b"".join(parts)

    def reply(self, content=b"", status: int = 200, headers: dict[str, str] | None = None) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        # Noted first: who has the answer may look at once.
        self.hub.requests.append((self.command, self.path, status))
        self.send_response(status)
        kind = "application/octet-stream" if isinstance(content, bytes) else "application/json"
        headers = {"Content-Type": kind, "Content-Length": str(len(data)), **(headers or {})}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


class _Storage(_Handler):
    """Where large files go to and come from, by addresses that the Hub signs."""

    def answer(self) -> None:
        self.hub.storage_saw_token |= "Authorization" in self.headers
        if self.command == "PUT":
            oid, _, part = self.path.strip("/").partition("/")
            if part:
                self.hub.parts[oid, int(part)] = self.data
            elif hashlib.sha256(self.data).hexdigest() == oid:
                self.hub.storage[oid] = self.data
            else:
                raise Refusal(400, "BadDigest")
            self.reply(headers={"ETag": f'"{part or oid}"'})
        elif (data := self.hub.storage.get(self.path.strip("/"))) is None:
            raise Refusal(404, "NoSuchKey")
        elif match := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", "")):
            start = int(match[1])
            self.reply(data[start:], 206, {"Content-Range": f"bytes {start}-{len(data) - 1}/{len(data)}"})
        else:
            self.reply(data)


class _Hub(_Handler):
    """The Hub itself."""

    def answer(self) -> None:
        self.user = None
        if token := self.headers.get("Authorization", "").removeprefix("Bearer "):
            self.user = self.hub.users.get(token)
            if self.user is None:
                raise Refusal(401, "Invalid credentials in Authorization header")
        method = "GET" if self.command == "HEAD" else self.command
        for expected, pattern, name in _ROUTES:
            if expected == method and (match := re.fullmatch(pattern, self.path)):
                values = {key: unquote(value) for key, value in match.groupdict("").items()}
                if "repo" in values:
                    values["repo_id"] = values.pop("repo")
                    self.repository = self.readable(values["repo_id"])
                getattr(self, name)(**values)
                return
        # The name of a model without an organisation, as those of the first days have.
        is_model = re.match(r"/api/models/|/[^/]+/resolve/", self.path)
        raise Refusal(404, "Not Found", "RepoNotFound" if is_model else None)

    # Who may what

    def readable(self, repo_id: str) -> Repository:
        repository = self.hub.repositories.get(repo_id)
        if repository is None or (repository.private and not self.owns(repo_id.split("/")[0])):
            status = 401 if self.user is None else 404
            raise Refusal(status, "Repository not found", "RepoNotFound")
        return repository

    def owns(self, namespace: str) -> bool:
        return self.user is not None and namespace in (self.user.name, *self.user.organisations)

    def require_writer(self, namespace: str) -> None:
        if self.user is None:
            raise Refusal(401, "Invalid username or password.")
        if self.user.role != "write" or not self.owns(namespace):
            message = f"You don't have the rights to create a model under the namespace {namespace!r}"
            raise Refusal(403, message)

    def commit_of(self, revision: str) -> str:
        found = self.repository.find(revision)
        if found is None:
            raise Refusal(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return found

    # Accounts and repositories

    def whoami(self) -> None:
        if self.user is None:
            raise Refusal(401, "Invalid username or password.")
        organisations = [{"type": "org", "name": name} for name in self.user.organisations]
        access = {"type": "access_token", "accessToken": {"displayName": "test", "role": self.user.role}}
        self.reply({"type": "user", "name": self.user.name, "orgs": organisations, "auth": access})

    def validate(self) -> None:
        content = json.loads(self.data)["content"]
        found = re.match(r"---\s*\n(.*?)\n---", content, re.DOTALL)
        try:
            metadata = yaml.safe_load(found[1]) if found else {}
        except yaml.YAMLError as error:
            self.reply({"errors": [{"message": str(error)}], "warnings": []}, 400)
            return
        warnings = [] if metadata else [{"message": "empty or missing yaml metadata in repo card"}]
        self.reply({"errors": [], "warnings": warnings})

    def create(self) -> None:
        asked = json.loads(self.data)
        namespace = asked["organization"] or (self.user.name if self.user else "")
        self.require_writer(namespace)
        repo_id = f"{namespace}/{asked['name']}"
        answer = {"url": f"{self.hub.url}/{repo_id}", "name": repo_id}
        if repo_id in self.hub.repositories:
            self.reply({"error": "You already created this model repo", **answer}, 409)
            return
        self.hub.repositories[repo_id] = Repository(asked.get("visibility") == "private")
        self.reply(answer)

    def info(self, repo_id: str, revision: str = "") -> None:
        commit = self.commit_of(revision or "main")
        self.reply(
            {
                "_id": "0", "id": repo_id, "modelId": repo_id, "author": repo_id.split("/")[0], "sha": commit,
                "private": self.repository.private, "gated": "manual" if self.repository.gated else False,
                "disabled": False, "downloads": 0, "likes": 0, "tags": [],
                "siblings": [{"rfilename": path} for path in self.repository.commits[commit]],
            }
        )  # fmt: skip

    def refs(self, repo_id: str) -> None:
        def listed(names: dict[str, str], prefix: str) -> list[dict]:
            return [{"name": name, "ref": prefix + name, "targetCommit": oid} for name, oid in names.items()]

        requests = {name: oid for name, oid in self.repository.branches.items() if name.startswith("refs/pr/")}
        branches = {name: oid for name, oid in self.repository.branches.items() if name not in requests}
        parts = {"branches": listed(branches, "refs/heads/"), "tags": listed(self.repository.tags, "refs/tags/")}
        self.reply({**parts, "converts": [], "pullRequests": listed(requests, "")})

    def tag(self, repo_id: str, revision: str) -> None:
        self.require_writer(repo_id.split("/")[0])
        commit, name = self.commit_of(revision), json.loads(self.data)["tag"]
        if name in self.repository.tags:
            raise Refusal(409, "Tag reference exists already")
        self.repository.tags[name] = commit
        self.reply({})

    def branch(self, repo_id: str, name: str) -> None:
        self.require_writer(repo_id.split("/")[0])
        if name in self.repository.branches:
            raise Refusal(409, "Reference already exists")
        start = json.loads(self.data or b"{}").get("startingPoint", "main")
        self.repository.branches[name] = self.commit_of(start)
        self.reply({})

    # Files

    def tree(self, repo_id: str, revision: str, path: str = "") -> None:
        files = self.repository.commits[self.commit_of(revision)]
        recursive = self.query.get("recursive", ["false"])[0].lower() == "true"
        inside = {name: file for name, file in files.items() if not path or name.startswith(f"{path}/")}
        if path and not inside:
            raise Refusal(404, f"{path} does not exist on {revision!r}", "EntryNotFound")
        start = len(path) + 1 if path else 0
        folders = sorted({name[: name.index("/", start)] for name in inside if "/" in name[start:]})
        entries = [{"type": "directory", "path": name, "oid": "0" * 40, "size": 0} for name in folders]
        entries += [_entry(name, file) for name, file in inside.items() if recursive or "/" not in name[start:]]
        self.reply(entries)

    def paths_info(self, repo_id: str, revision: str) -> None:
        files = self.repository.commits[self.commit_of(revision)]
        paths = parse_qs(self.data.decode()).get("paths", [])
        self.reply([_entry(path, files[path]) for path in paths if path in files])

    def resolve(self, repo_id: str, revision: str, path: str) -> None:
        if self.repository.gated and not self.owns(repo_id.split("/")[0]):
            status = 401 if self.user is None else 403
            raise Refusal(status, f"Access to model {repo_id} is restricted.", "GatedRepo")
        commit = self.commit_of(revision)
        file = self.repository.commits[commit].get(path)
        headers = {"X-Repo-Commit": commit}
        if file is None:
            raise Refusal(404, "Entry not found", "EntryNotFound", **headers)
        if file.is_large:
            self.hub.storage[file.sha256] = file.data
            headers |= {"X-Linked-Etag": f'"{file.sha256}"', "X-Linked-Size": str(len(file.data))}
            self.reply(b"", 302, headers | {"Location": f"{self.hub.storage_url}/{file.sha256}"})
        else:
            self.reply(file.data, headers=headers | {"ETag": f'"{file.git_oid}"'})

    # Writing

    def preupload(self, repo_id: str, revision: str) -> None:
        if "create_pr" not in self.query:
            self.require_writer(repo_id.split("/")[0])
        there = self.repository.commits[self.commit_of(revision)]
        answers = []
        for asked in json.loads(self.data)["files"]:
            large = _is_large(asked["path"], base64.b64decode(asked["sample"]), asked["size"])
            answer = {"path": asked["path"], "uploadMode": "lfs" if large else "regular", "shouldIgnore": False}
            if file := there.get(asked["path"]):
                answer["oid"] = file.sha256 if file.is_large else file.git_oid
            answers.append(answer)
        self.reply({"files": answers})

    def lfs_batch(self, repo_id: str) -> None:
        objects = []
        for asked in json.loads(self.data)["objects"]:
            oid, answer = asked["oid"], dict(asked)
            if oid not in self.hub.storage:
                upload = {"href": f"{self.hub.storage_url}/{oid}"}
                if self.hub.part_size and asked["size"] > self.hub.part_size:
                    count = -(-asked["size"] // self.hub.part_size)
                    urls = {str(part): f"{self.hub.storage_url}/{oid}/{part}" for part in range(1, count + 1)}
                    upload = {"href": f"{self.hub.url}/_complete", "header": {"chunk_size": str(self.hub.part_size)}}
                    upload["header"] |= urls
                answer["actions"] = {"upload": upload, "verify": {"href": f"{self.hub.url}/_verify"}}
            objects.append(answer)
        transfer = "multipart" if self.hub.part_size else "basic"
        self.reply({"transfer": transfer, "objects": objects})

    def complete(self) -> None:
        asked = json.loads(self.data)
        data = b"".join(self.hub.parts[asked["oid"], part["partNumber"]] for part in asked["parts"])
        if hashlib.sha256(data).hexdigest() != asked["oid"]:
            raise Refusal(400, "The parts are not those of the file")
        self.hub.storage[asked["oid"]] = data
        self.reply({})

    def verify(self) -> None:
        asked = json.loads(self.data)
        if len(self.hub.storage.get(asked["oid"], b"")) != asked["size"]:
            raise Refusal(404, "Object not found")
        self.reply({})

    def commit(self, repo_id: str, revision: str) -> None:
        is_request = "create_pr" in self.query
        if self.user is None or not is_request:
            self.require_writer(repo_id.split("/")[0])
        files, message = dict(self.repository.commits[self.commit_of(revision)]), ""
        for line in self.data.splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "header":
                message = value["summary"]
                if value.get("parentCommit", self.commit_of(revision)) != self.commit_of(revision):
                    raise Refusal(412, "A commit has happened since. Please refresh and try again.")
            elif item["key"] == "file":
                files[value["path"]] = File(base64.b64decode(value["content"]), False)
            elif item["key"] == "lfsFile":
                if value["oid"] not in self.hub.storage:
                    raise Refusal(400, f"LFS pointer pointed to a file that does not exist: {value['path']}")
                files[value["path"]] = File(self.hub.storage[value["oid"]], True)
            elif item["key"] == "deletedFile":
                if files.pop(value["path"], None) is None:
                    raise Refusal(404, "A file with this name doesn't exist", "EntryNotFound")
        number = 1 + sum(name.startswith("refs/pr/") for name in self.repository.branches)
        oid = self.repository.commit(f"refs/pr/{number}" if is_request else revision, files, message)
        answer = {"success": True, "commitOid": oid, "commitUrl": f"{self.hub.url}/{repo_id}/commit/{oid}"}
        if is_request:
            answer["pullRequestUrl"] = f"{self.hub.url}/{repo_id}/discussions/{number}"
        self.reply(answer)


def _entry(path: str, file: File) -> dict:
    entry = {"type": "file", "path": path, "oid": file.git_oid, "size": len(file.data)}
    if file.is_large:
        entry["lfs"] = {"oid": file.sha256, "size": len(file.data), "pointerSize": 130}
    return entry


_REPO = r"(?P<repo>[^/]+/[^/]+)"
_ROUTES = [
    ("GET", r"/api/whoami-v2", "whoami"),
    ("POST", r"/api/validate-yaml", "validate"),
    ("POST", r"/api/repos/create", "create"),
    ("GET", rf"/api/models/{_REPO}", "info"),
    ("GET", rf"/api/models/{_REPO}/revision/(?P<revision>[^/]+)", "info"),
    ("GET", rf"/api/models/{_REPO}/refs", "refs"),
    ("GET", rf"/api/models/{_REPO}/tree/(?P<revision>[^/]+)(?:/(?P<path>.+))?", "tree"),
    ("POST", rf"/api/models/{_REPO}/paths-info/(?P<revision>[^/]+)", "paths_info"),
    ("POST", rf"/api/models/{_REPO}/tag/(?P<revision>[^/]+)", "tag"),
    ("POST", rf"/api/models/{_REPO}/branch/(?P<name>[^/]+)", "branch"),
    ("POST", rf"/api/models/{_REPO}/preupload/(?P<revision>[^/]+)", "preupload"),
    ("POST", rf"/api/models/{_REPO}/commit/(?P<revision>[^/]+)", "commit"),
    ("POST", rf"/{_REPO}\.git/info/lfs/objects/batch", "lfs_batch"),
    ("POST", r"/_complete", "complete"),
    ("POST", r"/_verify", "verify"),
    ("GET", rf"/{_REPO}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", "resolve"),
]

__all__ = ["File", "HubServer", "Repository"]
