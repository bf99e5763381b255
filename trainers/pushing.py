"""A run's model on the Hub while it trains: Trainer's own `push_to_hub`, of whole checkpoints and nothing local."""

import json
import os
import shutil
import sys
from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path

from huggingface_hub import CommitInfo, CommitOperationAdd, HfApi
from transformers import Trainer
from transformers.trainer import OPTIMIZER_NAME, SCALER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import HubStrategy
from transformers.utils.hub import PushInProgress

from hub_cards.hub import explain
from trainers.checkpoints import MANIFEST, seal

# Where what is sent lies until it is: a checkpoint may be rotated away before.
PUSHING = ".pushing"
# One for all, as it runs what is sent in the background one after the other.
_API = HfApi(library_name="revela-hub")
# What a run goes on from, and nobody loads: sent only where `hub_strategy` asks for checkpoints.
_STATE = {OPTIMIZER_NAME, SCHEDULER_NAME, SCALER_NAME, TRAINER_STATE_NAME, MANIFEST}


class PushingTrainer(Trainer):
    """
    transformers' Trainer whose `push_to_hub`, with each `hub_strategy`, sends what was saved whole, in one commit.

    transformers sends the output folder as it is, which we rename in, with the arguments as a pickle. Here a copy is
    made of the files of the model (hard links, so that it costs nothing), its settings without paths of this machine.
    """

    _saved: Iterable[str] = ()
    """Names of the files and folders that `save_model` last put into the output folder."""

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Sends a checkpoint in the background; one is passed over while another is on its way, as in transformers."""
        args, folder = self.args, Path(checkpoint_folder)
        if args.hub_strategy == HubStrategy.END or not self.is_world_process_zero():
            return
        if self.push_in_progress is not None and not self.push_in_progress.is_done() and not args.hub_always_push:
            return
        staged = self._stage(folder, (path.name for path in folder.iterdir() if not _is_state(path.name)))
        if args.hub_strategy in (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS):
            whole = staged / ("last-checkpoint" if args.hub_strategy == HubStrategy.CHECKPOINT else folder.name)
            _lay_down(folder, (path.name for path in folder.iterdir()), whole, Path(args.output_dir))
            seal(whole)
        jobs = [] if self.push_in_progress is None or self.push_in_progress.is_done() else self.push_in_progress.jobs
        message = f"Training in progress, step {self.state.global_step}"
        self.push_in_progress = PushInProgress([*jobs, self._send(staged, message, args.hub_token, args.hub_revision)])

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **kwargs,
    ):
        """
        As in transformers: save the model, draft its card, and send both when what is on its way has arrived.

        Raises:
            OSError: for what the Hub refuses, if `blocking`; the model is saved all the same.
        """
        token = token or self.args.hub_token
        if self.hub_model_id is None:
            self.init_hf_repo(token=token, private=private)
        self.save_model(_internal_call=True)
        if not self.is_world_process_zero():
            return None
        self.create_model_card(model_name=self.hub_model_id.split("/")[-1], **kwargs)
        self._finish_current_push()
        staged = self._stage(Path(self.args.output_dir), [*self._saved, "README.md"])
        return self.push_staged(staged, commit_message, blocking, token, revision)

    def push_staged(
        self,
        staged: Path,
        commit_message: str = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
    ):
        """Send a folder's files, and delete it; raises as `push_to_hub`."""
        folder = Path(self.args.output_dir)
        token, revision = token or self.args.hub_token, revision or self.args.hub_revision
        job = self._send(staged, commit_message, token, revision, is_told=not blocking)
        if not blocking:
            return job
        try:
            commit = job.result()
            shutil.rmtree(folder / PUSHING, ignore_errors=True)
            return commit
        except Exception as error:
            raise OSError(f"{folder} is saved, but was not pushed to {self.hub_model_id}. {_told(error)}") from error

    def _stage(self, folder: Path, names: Iterable[str]) -> Path:
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        staged = Path(self.args.output_dir) / PUSHING / f"{folder.name}-{self.state.global_step}"
        shutil.rmtree(staged, ignore_errors=True)
        _lay_down(folder, names, staged, Path(self.args.output_dir))
        return staged

    def _send(
        self, staged: Path, message: str, token: str | None, revision: str | None, is_told: bool = True
    ) -> Future:
        """One commit of a folder's files, which is deleted afterwards; a failure is told, and training goes on."""
        files = sorted(path for path in staged.rglob("*") if path.is_file())
        operations = [CommitOperationAdd(path.relative_to(staged).as_posix(), path) for path in files]

        def commit() -> CommitInfo:
            try:
                return _API.create_commit(
                    self.hub_model_id, operations, commit_message=message, token=token, revision=revision
                )
            except Exception as error:
                if is_told:
                    print(f"{message}: was not pushed to {self.hub_model_id}. {_told(error)}", file=sys.stderr)
                raise
            finally:
                shutil.rmtree(staged, ignore_errors=True)

        return _API.run_as_future(commit)


def _told(error: BaseException) -> str:
    return explain(error) or str(error)


def _is_state(name: str) -> bool:
    return name in _STATE or name.startswith(("rng_state", "global_step", "."))


def _lay_down(folder: Path, names: Iterable[str], target: Path, output_dir: Path) -> None:
    """Links files and folders of `folder` into `target`, but writes their settings anew, without local paths."""
    for name in names:
        for path in [folder / name, *(folder / name).rglob("*")]:
            if path.is_dir():
                continue
            copy = target / path.relative_to(folder)
            copy.parent.mkdir(parents=True, exist_ok=True)
            if path.suffix == ".json" and path.name not in ("tokenizer.json", "vocab.json"):
                settings = _without_paths(json.loads(path.read_text(encoding="utf-8")), str(output_dir))
                copy.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
                continue
            try:
                os.link(path, copy)
            except OSError:  # a file system without links
                shutil.copy(path, copy)


def _without_paths(value, output_dir: str):
    """Settings in which a path of this machine is its last part only."""
    if isinstance(value, dict):
        return {name: _without_paths(inner, output_dir) for name, inner in value.items()}
    if isinstance(value, list):
        return [_without_paths(inner, output_dir) for inner in value]
    if isinstance(value, str) and os.sep in value:
        path = Path(value)
        if path.is_absolute() or value.startswith((output_dir, "~")) or _is_there(path):
            return path.name
    return value


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a text, too long for a name
        return False


__all__ = ["PUSHING", "PushingTrainer"]
