"""A published retriever folder made by hand: what `revela-hub export` writes, less sentence-transformers' files."""

import json
import shutil
from pathlib import Path

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import AutoModel, AutoTokenizer

import modeling_revela

MAX_LENGTH = 24


@pytest.fixture(scope="session")
def published_folder(tiny_lm_folder, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("published")
    tokenizer = AutoTokenizer.from_pretrained(tiny_lm_folder)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    tokenizer.pad_token = "</s>"
    tokenizer.save_pretrained(folder)
    AutoModel.from_pretrained(tiny_lm_folder).save_pretrained(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["auto_map"] = {"AutoModel": "modeling_revela.RevelaModel"}
    config["revela"] = {
        "pooling": "eos",
        "query_prompt": "query: ",
        "document_prompt": "passage: ",
        "max_length": MAX_LENGTH,
    }
    path.write_text(json.dumps(config))
    shutil.copy(Path(modeling_revela.__file__).with_name("modeling_revela.py"), folder)
    return folder
