"""The Hugging Face Hub as our users meet it: which names can be its ids, and what its errors ask them to do."""

import os
import re
import traceback
from collections.abc import Iterator
from pathlib import Path

# Errors that our packages raise say what to do as they are.
_OURS = ("__main__", "trainers", "hub_cards", "modeling_revela", "modeling_retromae", "revela_hub")
_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
# Endings of files that we read or write; a dot alone says nothing, as in bge-small-en-v1.5.
_FILE_ENDINGS = (
    ".jsonl", ".json", ".csv", ".tsv", ".txt", ".md", ".parquet", ".gz", ".zst", ".zip", ".tar", ".yaml", ".yml",
    ".safetensors", ".bin", ".pt", ".npy", ".py",
)  # fmt: skip
_REPO_IN_PATH = re.compile(
    r"/(?:api/)?(?:models/|datasets/)?(?!repos/)([^/]+(?:/[^/]+?)??)"
    r"(?:/(?:resolve|revision|tree|refs|preupload|commit|tag|branch|paths-info)(?:/.*)?|\.git/.*)?"
)


def may_be_hub_id(name: str) -> bool:
    """Whether a name that is neither file nor folder here can be the id of a model or dataset: `name`, `org/name`."""
    return bool(_ID.fullmatch(name)) and not name.startswith(".") and not name.lower().endswith(_FILE_ENDINGS)


def require_here_or_hub(name: str | Path) -> None:
    """
    Refuse at once a name that is neither here nor can be on the Hub.

    Raises:
        FileNotFoundError: naming it.
    """
    if not Path(name).exists() and not may_be_hub_id(str(name)):
        raise FileNotFoundError(
            f"There is no file or folder {name}, and it cannot be the id of a model on the Hub (org/name): check the "
            "path."
        )


def one_line(error: BaseException) -> str:
    """An error's text; of an error of the Hub that other packages raise, one line that says what to do."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    raised_by = frame.f_globals.get("__name__", "").partition(".")[0]
    return str(error) if raised_by in _OURS else explain(error) or str(error)


def explain(error: BaseException) -> str | None:
    """What the Hub refused, or what kept it from being asked, in one line with the mend; `None` for other errors."""
    from huggingface_hub import constants, errors

    for found in _chain(error):
        is_missing = isinstance(found, errors.LocalEntryNotFoundError) and constants.HF_HUB_OFFLINE
        if is_missing or isinstance(found, errors.OfflineModeIsEnabled):
            return "HF_HUB_OFFLINE is set, so the Hub is not asked: unset it, or name what is on this machine."
        if isinstance(found, errors.LocalTokenNotFoundError):
            return f"There is no token for the Hub: {_get_token()}"
        if isinstance(found, errors.EntryNotFoundError):
            continue
        if isinstance(found, errors.HfHubHTTPError):
            return _explain_answer(found)
        # huggingface_hub raises what its HTTP library does, httpx or, from 2 on, httpx2.
        if isinstance(found, errors.HTTPError):
            return (
                f"There is no connection to {_endpoint()} ({str(found) or type(found).__name__}): check the network, "
                "and run the same again, which goes on where this stopped."
            )
    return None


def reason(error: BaseException) -> str:
    """What to say of an error within a line of our own: `explain`, or the first line of its text."""
    return explain(error) or next(iter(str(error).strip().splitlines()), type(error).__name__)


def _explain_answer(error) -> str:
    from huggingface_hub import errors

    status, repo_id = error.response.status_code, _repo_of(error)
    said = error.response.headers.get("X-Error-Message") or error.server_message or ""
    said = f" ({said.strip().splitlines()[0]})" if said.strip() else ""
    if isinstance(error, errors.GatedRepoError):
        return (
            f"{repo_id} is gated: ask for access at {_endpoint()}/{repo_id}, and give a token of the account that has "
            "it, by `hf auth login` or in HF_TOKEN."
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{repo_id} has no such branch, tag or commit{said}: check the revision."
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"{repo_id} is not on the Hub, or is private and the token does not open it: check the name, or give a "
            "token that does, by `hf auth login` or in HF_TOKEN."
        )
    if status == 401:
        where = "in HF_TOKEN" if os.environ.get("HF_TOKEN") else "of `hf auth login`"
        return f"The Hub does not know the token {where}: {_get_token()}"
    if status == 403:
        return (
            f"The Hub does not allow this{said}: use a token that may write there ({_endpoint()}/settings/tokens), or "
            "a name of your own."
        )
    if status == 429:
        seconds = re.search(r"Retry after (\d+) seconds", str(error))
        wait = error.response.headers.get("Retry-After") or (seconds[1] if seconds else None)
        wait = f"{wait} seconds" if wait else "a few minutes"
        return f"The Hub was asked too often: wait {wait}, and run the same again, which goes on where this stopped."
    if status in (409, 412):
        return f"{repo_id} was changed at the same time{said}: run the same again."
    if status >= 500:
        return f"The Hub answers with an error of its own, {status}{said}: run the same again later."
    return f"The Hub refuses the request with status {status}{said}."


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error, what it was raised from or while handling, and so on."""
    seen = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _repo_of(error) -> str:
    found = _REPO_IN_PATH.fullmatch(error.response.url.path)
    return found[1] if found else "The repository"


def _endpoint() -> str:
    from huggingface_hub import constants

    return constants.ENDPOINT


def _get_token() -> str:
    return f"make one at {_endpoint()}/settings/tokens, and run `hf auth login` or put it into HF_TOKEN."


__all__ = ["explain", "may_be_hub_id", "one_line", "require_here_or_hub"]
