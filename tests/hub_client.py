"""A process whose huggingface_hub talks to a `HubServer`: the address is read once, when it is imported."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOOP = """
import contextlib, io, json, os, sys, traceback
answers, sys.stdout = sys.stdout, sys.stderr
for line in sys.stdin:
    asked = json.loads(line)
    os.environ["HF_TOKEN"] = asked["token"]
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            if "code" in asked:
                exec(asked["code"], {"print": print})
            else:
                from revela_hub import app
                app(asked["argv"], standalone_mode=True)
        except SystemExit as error:
            code = error.code or 0
        except BaseException:
            traceback.print_exc()
            code = 1
    answers.write(json.dumps([code, out.getvalue(), err.getvalue()]) + "\\n")
    answers.flush()
"""


@dataclass
class Answer:
    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """What the command line says went wrong: its one line."""
        (line,) = [line for line in self.err.splitlines() if line.startswith("error: ")]
        assert self.code == 2 and self.err.rstrip().endswith(line), self.err
        return line


class HubClient:
    """Runs commands of `revela-hub`, or code, one after the other in one process, with a token each."""

    def __init__(self, hub, home: Path, token: str = ""):
        self.hub, self.home, self.token = hub, home, token

    def __enter__(self) -> "HubClient":
        environment = {**os.environ, **self.hub.environment(None, self.home), "PYTHONPATH": str(ROOT)}
        environment |= {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        self._log = (self.home / "log.txt").open("w")
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._log, "text": True}
        self._process = subprocess.Popen([sys.executable, "-c", LOOP], cwd=self.home, env=environment, **pipes)
        return self

    def __exit__(self, *_) -> None:
        self._process.stdin.close()
        self._process.wait(60)
        self._log.close()

    def _ask(self, asked: dict, token: str | None) -> Answer:
        asked["token"] = self.token if token is None else token
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, (self.home / "log.txt").read_text()[-4000:]
        return Answer(*json.loads(line))

    def run(self, *argv, token: str | None = None) -> Answer:
        """A command of `revela-hub`."""
        return self._ask({"argv": list(map(str, argv))}, token)

    def execute(self, code: str, token: str | None = None) -> Answer:
        """Python code; what it raises comes back as a traceback in `err`."""
        return self._ask({"code": code}, token)


__all__ = ["Answer", "HubClient"]
