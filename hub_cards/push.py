"""A published folder -> a repository on the Hub, checked before it is sent; and what is there, checked against it."""

import filecmp
import json
import re
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, snapshot_download
from huggingface_hub.errors import HFValidationError, HTTPError
from huggingface_hub.utils import validate_repo_id

import modeling_revela.modeling_revela as remote_code
from hub_cards.card import check_card, is_as_written, write_card
from hub_cards.checkpoints import EXPORT_RECORD, check_folder, check_graphs
from hub_cards.hub import explain
from hub_cards.recorded import open_doors, read_record

# What belongs into a published folder beside the files that the export wrote.
ADDED = ("README.md", "LICENSE*", "NOTICE*", "CITATION.cff", ".eval_results/*.yaml", "*.png", "*.svg")
_GRAPHS = ("onnx/", "openvino/")
# Files of either kind go to large file storage on the Hub, and are not part of git's history there.
LARGE = 10 * 2**20
LARGEST = 50 * 10**9
# What the Hub itself puts into a new repository.
_HUBS_OWN = {".gitattributes"}
_TAG = re.compile(r"v(\d+)")


@dataclass
class Sent:
    """A file to send: its path in the folder, bytes, and whether it goes to large file storage."""

    path: str
    size: int
    is_large: bool


def push(
    folder: str | Path,
    repo_id: str,
    *,
    private: bool = False,
    revision: str | None = None,
    create_pr: bool = False,
    dry_run: bool = False,
) -> str | None:
    """
    Check a folder that `export` wrote, and make a repository of the Hub equal to it, in one commit with a tag.

    Files that the Hub has are not sent again, so the same call goes on where an earlier one was stopped. Files of an
    earlier push that the folder no longer has are deleted there; what no push wrote is never touched.

    Args:
        folder: a retriever, adapter or LM, with its card and results beside it.
        repo_id: `org/name`; made where it is not there.
        private: make it private.
        revision: the branch to commit to, made where it is not there; main, if left out.
        create_pr: open a pull request instead, which anyone may on a repository that others own.
        dry_run: check and show, and ask the Hub nothing.

    Returns:
        The address of the commit or pull request; `None` for a dry run.

    Raises:
        ValueError: for a folder that is not whole, holds more than it should, or loads otherwise than it was written.
        FileExistsError: if the repository holds files that no push wrote.
        OSError: for what the Hub refuses, in one line with the mend.
    """
    folder = Path(folder)
    _check_name(repo_id)
    if create_pr and revision:
        raise ValueError("A pull request is made on main: leave `revision` out, or `create_pr`.")
    try:
        api = HfApi(library_name="revela-hub")
        user = None if dry_run else api.whoami()
        if not dry_run and is_as_written(folder):
            # So that its snippets load the model by its name there. A card that someone edited is left alone.
            write_card(folder, repo_id=repo_id)
        files = check(folder)
        _show(files, folder, repo_id)
        if dry_run:
            return None
        if not create_pr:
            _make_repository(api, repo_id, user, private, revision)
        return _commit(api, folder, files, repo_id, revision, create_pr)
    except (HTTPError, OSError, RuntimeError) as error:
        # The client wraps what went wrong with a file in a RuntimeError of its own.
        told = explain(error)
        if told is None:
            raise
        raise OSError(f"{folder} was not pushed to {repo_id}. {told}") from error


def check(folder: Path) -> list[Sent]:
    """
    What `push` does before it sends anything: the folder's files, if they may be published.

    Raises:
        ValueError: see `push`.
    """
    files = _files(folder)
    check_folder(folder)
    check_graphs(folder)
    _require_our_code(folder)
    for file in files:
        if file.size > LARGEST:
            raise ValueError(
                f"{folder / file.path} has {_size(file.size)}, and the Hub takes {_size(LARGEST)} a file."
            )
    check_card(folder)
    open_doors(folder, read_record(folder))
    return files


def pull_check(repo_id: str, revision: str | None = None) -> dict[str, float]:
    """
    Load a repository that `push` made from the Hub, in each of its ways, and compare it with its own record.

    Returns:
        As `hub_cards.recorded.open_doors`.

    Raises:
        ValueError: naming the door that gives something else, or code there that is not ours, before it is run;
        OSError: for what the Hub refuses.
    """
    _check_name(repo_id)
    try:
        snapshot = Path(snapshot_download(repo_id, revision=revision))
    except (HTTPError, OSError) as error:
        raise OSError(f"{repo_id} cannot be read. {explain(error) or error}") from error
    check_folder(snapshot)
    _require_our_code(snapshot)
    # By name, as others load it, and by the commit that was looked at.
    return open_doors(repo_id, read_record(snapshot), snapshot.name)


# The folder


def _files(folder: Path) -> list[Sent]:
    """The files to send, if they are those that the export wrote and what is added to such."""
    if not folder.is_dir():
        raise FileNotFoundError(f"There is no folder {folder} to push.")
    try:
        record = json.loads((folder / EXPORT_RECORD).read_text(encoding="utf-8"))
        written = set(record["files"])
        graphs = {kind: {kind, *graph["files"]} for kind, graph in record.get("graphs", {}).items()}
    except FileNotFoundError:
        raise ValueError(
            f"{folder} has no {EXPORT_RECORD}, so no export wrote it: push what `revela-hub export` writes."
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder / EXPORT_RECORD} is broken ({error}): write the folder again.") from error
    there = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*"))}
    # A graph may be taken away as a whole.
    gone = set().union(*(files for kind, files in graphs.items() if kind not in there))
    if missing := sorted(written - gone - there.keys()):
        raise ValueError(f"{folder} lacks {missing[0]}, which the export wrote: write the folder again.")
    files = []
    for name, path in there.items():
        if path.is_dir():
            continue
        if name not in written and not any(fnmatch(name, pattern) for pattern in ADDED):
            again = "write it again by `revela-hub export-onnx --overwrite`, or " if name.startswith(_GRAPHS) else ""
            raise ValueError(
                f"{folder} holds {name}, which no export wrote and which is no card, result or figure: {again}move it "
                "elsewhere."
            )
        if not path.resolve().is_relative_to(folder.resolve()):
            raise ValueError(f"{path} leads to {path.resolve()}: put the file itself into the folder.")
        size = path.stat().st_size
        with path.open("rb") as file:
            files.append(Sent(name, size, size > LARGE or b"\0" in file.read(512)))
    return files


def _require_our_code(folder: Path) -> None:
    """Refuse code that is not what this version ships, before any is run."""
    ours = Path(remote_code.__file__).parent
    for path in sorted(folder.rglob("*.py")):
        if path.parent != folder or not (ours / path.name).is_file():
            raise ValueError(f"{path} is no code of revela-hub, so it is neither run nor sent: delete it.")
        if not filecmp.cmp(path, ours / path.name, shallow=False):
            raise ValueError(
                f"{path} is not the {path.name} of this version of revela-hub, so it is neither run nor sent: export "
                "again, or take the version that wrote it."
            )


def _show(files: list[Sent], folder: Path, repo_id: str) -> None:
    width = max(len(file.path) for file in files)
    print(f"{folder} -> {repo_id}")
    for file in files:
        print(f"  {file.path:<{width}}  {_size(file.size):>9}  {'LFS' if file.is_large else ''}".rstrip())
    print(f"  {f'{len(files)} files':<{width}}  {_size(sum(file.size for file in files)):>9}")


def _size(count: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError


# The repository


def _check_name(repo_id: str) -> None:
    try:
        validate_repo_id(repo_id)
    except HFValidationError:
        repo_id = ""
    if repo_id.count("/") != 1:
        raise ValueError(
            "A repository's name is org/name, of letters, digits, '-', '_' and '.', such as me/my-retriever."
        )


def _make_repository(api: HfApi, repo_id: str, user: dict, private: bool, revision: str | None) -> None:
    owner, name = repo_id.split("/")
    owners = [user["name"], *(organisation["name"] for organisation in user.get("orgs", []))]
    role = (user.get("auth", {}).get("accessToken") or {}).get("role")
    if role == "read":
        raise PermissionError(
            f"The token of {user['name']} may only read: make one that writes at {api.endpoint}/settings/tokens."
        )
    if owner not in owners:
        raise PermissionError(
            f"{repo_id} would belong to {owner}, and the token is {user['name']}'s: push to "
            f"{' or '.join(f'{own}/{name}' for own in owners)}, or pass --create-pr where the repository is there."
        )
    api.create_repo(repo_id, private=private or None, exist_ok=True)
    if private and not api.model_info(repo_id).private:
        raise FileExistsError(
            f"{repo_id} is there already and public: make it private at {api.endpoint}/{repo_id}/settings, or choose "
            "another name."
        )
    if revision is not None:
        api.create_branch(repo_id, branch=revision, exist_ok=True)


def _commit(api: HfApi, folder: Path, files: list[Sent], repo_id: str, revision: str | None, create_pr: bool) -> str:
    head = api.model_info(repo_id, revision=revision)
    there = {sibling.rfilename for sibling in head.siblings}
    ours = {file.path for file in files}
    earlier = _files_of_earlier_push(api, repo_id, head.sha, there)
    foreign = sorted(
        name for name in there - earlier - _HUBS_OWN if not any(fnmatch(name, pattern) for pattern in ADDED)
    )
    if foreign and not create_pr:
        raise FileExistsError(
            f"{repo_id} is there already and holds {foreign[0]}, which no push wrote: choose another name, or delete "
            "that file there."
        )
    deleted = sorted((there & earlier) - ours)
    for name in deleted:
        print(f"  {name} is deleted there")
    commit = api.create_commit(
        repo_id,
        [
            *(CommitOperationDelete(name) for name in deleted),
            *(CommitOperationAdd(file.path, folder / file.path) for file in files),
        ],
        commit_message="Push by revela-hub",
        revision=revision,
        create_pr=create_pr,
        parent_commit=head.sha,
    )
    if create_pr:
        return commit.pr_url or commit.commit_url
    tags = {tag.name: tag.target_commit for tag in api.list_repo_refs(repo_id).tags}
    if commit.oid not in tags.values():
        numbers = [int(match[1]) for name in tags if (match := _TAG.fullmatch(name))]
        tag = f"v{max(numbers, default=0) + 1}"
        api.create_tag(repo_id, tag=tag, revision=commit.oid)
        print(f"  tagged {tag}")
    return commit.commit_url


def _files_of_earlier_push(api: HfApi, repo_id: str, commit: str, there: set[str]) -> set[str]:
    if EXPORT_RECORD not in there:
        return set()
    record = Path(api.hf_hub_download(repo_id, EXPORT_RECORD, revision=commit))
    try:
        return set(json.loads(record.read_text(encoding="utf-8"))["files"])
    except (ValueError, KeyError, TypeError):
        return set()


__all__ = ["check", "pull_check", "push"]
