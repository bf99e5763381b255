"""What a run of the race may take: the steps that fit into its minutes, at a pace that was taken undisturbed."""

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from transformers import TrainerCallback

PACE_STEPS = 21  # that a pace is taken from; the run that regroups does so once in them
# Moments at which a run is measured on its way, as shares of its time.
ON_THE_WAY = (0.25, 0.5)


class Clock(TrainerCallback):
    """
    Ends training after `steps`, lets learning rates fall, and takes measures on the way.

    The steps are a `share` of the run behind the share `begin`; rates fall to zero over the run, not over each stage:
    a first stage of Revela whose rate falls twice as fast may stay where it begins (0.014 at step 40, not 0.552).
    """

    def __init__(self, steps: int, measure: Callable[[], float], begin: float = 0.0, share: float = 1.0):
        self.steps, self._measure, self._begin, self._share = steps, measure, begin, share
        self._due = {max(1, round(share * steps)) for share in ON_THE_WAY} - {steps}
        self._last = 0.0
        self.seconds: list[float] = []  # on the processor, of each step
        self.curve: list[tuple[int, float]] = []

    def on_train_begin(self, args, state, control, **kwargs):
        self._last = time.process_time()

    def on_pre_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
        # The scheduler sets the rates anew after each step, so the factors do not pile up.
        for group in optimizer.param_groups:
            group["lr"] *= 1 - self._begin - self._share * state.global_step / self.steps

    def on_step_end(self, args, state, control, **kwargs):
        self.seconds.append(time.process_time() - self._last)
        if state.global_step in self._due:
            self.curve.append((state.global_step, self._measure()))
        control.should_training_stop |= state.global_step >= self.steps
        self._last = time.process_time()

    def pace(self, log: list[dict]) -> float:
        """Seconds a step where nothing else disturbed it: those of the fastest third, and regrouping's share."""
        fastest = sorted(self.seconds[2:])[: max(1, (len(self.seconds) - 2) // 3)]
        regrouping = sum(entry.get("regroup_seconds", 0) for entry in log)
        return statistics.mean(fastest) + regrouping / len(self.seconds)


def read_paces(out: Path) -> dict[str, list[float]]:
    """Seconds a step of the stages of each run, undisturbed."""
    path = out / "paces.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
