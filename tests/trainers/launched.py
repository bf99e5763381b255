"""
Several trainings in one group of processes, which saves starting them anew: `accelerate launch launched.py JOBS.json`.

JOBS.json is a list of [method, arguments]. With KILLED=RANK:STEP that process dies within that step. With
FSDP_ON_CPU=1 accelerate, which knows FSDP on GPUs only, is made to take the processes of the CPU for such.
"""

import importlib
import json
import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
if os.environ.get("FSDP_ON_CPU"):
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    PartialState._prepare_backend = lambda self, *args, **kwargs: ("gloo", DistributedType.MULTI_GPU)

if os.environ.get("KILLED"):
    from trainers.base_trainer import PretrainingTrainer

    rank, step = map(int, os.environ["KILLED"].split(":"))
    training_step = PretrainingTrainer.training_step

    def step_or_die(self, *args, **kwargs):
        if self.args.process_index == rank and self.state.global_step == step - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return training_step(self, *args, **kwargs)

    PretrainingTrainer.training_step = step_or_die

for method, arguments in json.loads(Path(sys.argv[1]).read_text()):
    importlib.import_module(f"trainers.{method}").main(arguments)
