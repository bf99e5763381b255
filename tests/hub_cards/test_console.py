import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoConfig, BertForPreTraining

ROOT = Path(__file__).parents[2]
# A file with more weights than the model takes, and one with fewer.
NOISE = """
import sys, warnings
from hub_cards.console import quiet
quiet()
from deepspeed.accelerator import get_accelerator
from transformers import BertForMaskedLM
warnings.warn("renamed in v6", FutureWarning)
warnings.warn("look at this", UserWarning)
get_accelerator()
BertForMaskedLM.from_pretrained(sys.argv[1])
print("half", flush=True)
BertForMaskedLM.from_pretrained(sys.argv[2])
"""


@pytest.mark.parametrize("debug", ["", pytest.param("1", marks=pytest.mark.slow)])
def test_what_a_user_cannot_act_on_is_left_out_and_all_else_told(tiny_bert_folder, tmp_path, monkeypatch, debug):
    pytest.importorskip("deepspeed")
    for name, value in {"REVELA_DEBUG": debug, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}.items():
        monkeypatch.setenv(name, value)
    BertForPreTraining(AutoConfig.from_pretrained(tiny_bert_folder)).save_pretrained(tmp_path)
    command = [sys.executable, "-c", NOISE, str(tmp_path), str(tiny_bert_folder)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True)
    more, fewer = done.stdout.split("half")
    assert "look at this" in more and "LOAD REPORT" in fewer and "MISSING" in fewer
    for noise in ("LOAD REPORT", "renamed in v6", "Setting accelerator to CPU"):
        assert (noise in more) == bool(debug), noise
