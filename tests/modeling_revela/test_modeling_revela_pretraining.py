"""RevelaForPreTraining: retriever and LM in one module, similarities between them."""

import copy
import math

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForPreTraining, BertForMaskedLM, BertModel

from modeling_revela import RevelaForCausalLM, RevelaForPreTraining
from tests.modeling_revela.tiny import (
    checkpoint_activations,
    make_chunks,
    make_lm,
    pad_chunks,
    random_weights,
    relative_error,
)

LORA = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}


@pytest.fixture
def make_model(tiny_lm_folder, tiny_bert_folder):
    """A model on the tiny folders, `retriever` and `lm` by path: "llama" or "bert" names the retriever."""

    def make(retriever: str = "llama", **options) -> RevelaForPreTraining:
        torch.manual_seed(0)
        folder = {"llama": tiny_lm_folder, "bert": tiny_bert_folder}[retriever]
        options = {"similarity_temperature": 0.1, **options}
        model = RevelaForPreTraining.from_backbones(folder, tiny_lm_folder, **options)
        if retriever == "llama":
            # Both halves come from one folder: part them, as training would.
            with torch.no_grad():
                for parameter in model.retriever.parameters():
                    parameter += 0.05 * torch.randn_like(parameter)
        return model.eval()

    return make


def make_inputs(side: str = "right", extra: int = 0, rows: int = 4) -> dict[str, torch.Tensor]:
    lengths = (9, 6, 8, 7)[:rows]
    inputs = pad_chunks(make_chunks(lengths, seed=1), side, extra)
    for name, seed, shortened in (("query", 2, 3), ("document", 3, 0)):
        encoded = pad_chunks(make_chunks([length - shortened for length in lengths], seed), side, extra)
        inputs[f"{name}_input_ids"] = encoded["input_ids"]
        inputs[f"{name}_attention_mask"] = encoded["attention_mask"]
    return inputs


def unit_vectors(cosines: list[float]) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and passages in the plane: query i has the given cosine with passage j, whatever i is."""
    queries = torch.tensor([[1.0, 0.0]]).repeat(len(cosines), 1)
    passages = torch.tensor([[cosine, math.sqrt(1 - cosine**2)] for cosine in cosines])
    return queries, passages


def gradients(model) -> dict[str, torch.Tensor]:
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("retriever", ["llama", "bert"])
def test_the_loss_trains_both_halves(make_model, retriever):
    model = make_model(retriever, in_batch_gate=True, trainable_temperature=True)
    output = model(**make_inputs())
    output.loss.backward()
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    moved = {name for name, gradient in gradients(model).items() if gradient.abs().sum() > 0}
    # Softmax does not see what a bias adds to every key (BERT's).
    unmoved = trainable - moved
    assert all(name.endswith("key.bias") for name in unmoved), unmoved
    assert {name.split(".")[0] for name in moved} == {"retriever", "lm", "log_temperature"}
    assert output.in_batch_weights.shape == output.similarities.shape == (4, 4)
    assert output.num_pairs == 12
    for embeddings in (output.query_embeddings, output.document_embeddings):
        assert torch.allclose(embeddings.norm(dim=-1), torch.ones(4))
    assert torch.allclose(output.similarities, output.query_embeddings @ output.document_embeddings.T)


def test_berts_own_pooler_stays_frozen(make_model):
    model = make_model("bert")
    names = [name for name, parameter in model.retriever.named_parameters() if not parameter.requires_grad]
    assert sorted(names) == ["pooler.dense.bias", "pooler.dense.weight"]


@pytest.mark.parametrize("pooling", ["eos", "cls", "mean"])
@pytest.mark.parametrize("retriever", ["llama", "bert"])
def test_embeddings_whatever_the_padding(make_model, retriever, pooling):
    model = make_model(retriever, pooling=pooling)
    chunks = make_chunks((9, 6, 8))
    with torch.no_grad():
        alone = torch.cat([model.embed(chunk[None], torch.ones(1, len(chunk), dtype=torch.long)) for chunk in chunks])
        # BERT's positions are absolute: its tokenizers pad on the right.
        for side in ("right",) if retriever == "bert" else ("right", "left"):
            batch = pad_chunks(chunks, side, extra=4)
            padded = model.embed(batch["input_ids"], batch["attention_mask"])
            assert (padded - alone).abs().max() < 1e-5


def test_loss_whatever_the_padding(make_model):
    model = make_model(similarity_temperature=1e-2)
    results = []
    for side, extra in (("right", 0), ("right", 4), ("left", 3)):
        model.zero_grad()
        output = model(**make_inputs(side, extra))
        output.loss.backward()
        results.append(torch.cat([gradient.flatten() for gradient in gradients(model).values()]))
        results.append(output.loss.detach())
    for index in (2, 4):
        assert relative_error(results[index], results[0]) < 1e-4
        assert results[index + 1].item() == pytest.approx(results[1].item(), rel=1e-6)


def test_one_encoding_for_both_sides(make_model):
    model = make_model()
    inputs = make_inputs()
    twice = {name.replace("document", "query"): value for name, value in inputs.items() if "document" in name}
    both = model(**{**inputs, **twice})
    one = model(**{name: value for name, value in inputs.items() if "query" not in name})
    assert one.query_embeddings is one.document_embeddings
    assert torch.allclose(one.in_batch_weights, both.in_batch_weights, atol=1e-6)
    assert one.loss.item() == pytest.approx(both.loss.item(), rel=1e-6)
    assert model(**inputs).loss.item() != pytest.approx(both.loss.item(), rel=1e-6)


def test_without_a_mask_every_token_is_real(make_model):
    model, inputs = make_model(), make_inputs()
    given = model(**inputs | {"document_attention_mask": torch.ones_like(inputs["document_attention_mask"])})
    inputs.pop("document_attention_mask")
    assert torch.equal(model(**inputs).document_embeddings, given.document_embeddings)


class TestAttentionImplementation:
    """The retriever's can be chosen; the LM's is in-batch attention whatever is asked."""

    @staticmethod
    def implementations(model) -> tuple[str, str]:
        return model.retriever.config._attn_implementation, model.lm.backbone.config._attn_implementation

    def test_set_on_the_whole_it_is_the_retrievers(self, make_model):
        model = make_model()
        expected = model(**make_inputs()).loss
        model.set_attn_implementation("eager")
        assert self.implementations(model) == ("eager", "revela_in_batch")
        assert model(**make_inputs()).loss.item() == pytest.approx(expected.item(), rel=1e-5)

    @pytest.mark.parametrize("auto_class", [RevelaForPreTraining, AutoModelForPreTraining])
    def test_asked_for_at_loading_it_is_the_retrievers(self, make_model, tmp_path, auto_class):
        model = make_model()
        model.save_pretrained(tmp_path)
        assert self.implementations(auto_class.from_pretrained(tmp_path)) == ("sdpa", "revela_in_batch")
        loaded = auto_class.from_pretrained(tmp_path, attn_implementation="eager")
        assert self.implementations(loaded) == ("eager", "revela_in_batch")
        assert loaded(**make_inputs()).loss.item() == pytest.approx(model(**make_inputs()).loss.item(), rel=1e-5)

    def test_an_lm_alone_refuses_another(self, tmp_path):
        model = RevelaForCausalLM.from_backbone(make_lm(dtype=torch.float32))
        model.save_pretrained(tmp_path)
        for change in (
            lambda: model.set_attn_implementation("eager"),
            lambda: RevelaForCausalLM.from_pretrained(tmp_path, attn_implementation="eager"),
        ):
            with pytest.raises(ValueError, match="cannot take the attention implementation 'eager'"):
                change()
        RevelaForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa")

    def test_a_backbone_that_was_switched_is_told_of(self):
        model = RevelaForCausalLM.from_backbone(make_lm())
        model.backbone.set_attn_implementation("eager")
        with pytest.raises(ValueError, match="attention was switched to 'eager'"):
            model(**pad_chunks(make_chunks((5, 6))), in_batch_weights=random_weights(2))


def test_given_weights_leave_the_retriever_out(make_model):
    model = make_model()
    inputs = {name: make_inputs()[name] for name in ("input_ids", "attention_mask", "labels")}
    output = model(**inputs, in_batch_weights=random_weights(4, torch.float32))
    output.loss.backward()
    assert all(parameter.grad is None for parameter in model.retriever.parameters())
    assert output.query_embeddings is None and output.similarities is None


class TestSimilarityWeights:
    def test_formula(self, make_model):
        model = make_model(similarity_temperature=0.1)
        queries, passages = torch.randn(2, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        weights, similarities = model.similarity_weights(queries, passages)
        for i in range(5):
            cosines = torch.cosine_similarity(queries[i], passages)
            assert torch.allclose(similarities[i], cosines)
            others = [j for j in range(5) if j != i]
            assert torch.allclose(weights[i, others], torch.softmax(cosines[others] / 0.1, dim=-1))
            assert weights[i, i] == 0

    def test_matryoshka_averages_the_weights_of_each_size(self, make_model):
        options = {"similarity_temperature": 0.1}
        model, plain = make_model(matryoshka_dims=[2, 5], **options), make_model(**options)
        queries, passages = torch.randn(2, 6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        groups = torch.tensor([0, 1, 0, 1, 1, 0])
        queries.requires_grad_(True)
        weights, similarities = model.similarity_weights(queries, passages, groups)
        expected = torch.zeros(6, 6, dtype=torch.float64)
        for i in range(6):
            others = [j for j in range(6) if j != i and groups[j] == groups[i]]
            for size in (2, 5, 8):
                cosines = torch.cosine_similarity(queries[i, :size], passages[others, :size])
                expected[i, others] = expected[i, others] + torch.softmax(cosines / 0.1, dim=-1) / 3
        assert torch.allclose(weights, expected, rtol=1e-12, atol=1e-15)
        assert torch.equal(similarities, plain.similarity_weights(queries, passages, groups)[1])
        target = torch.randn(6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        ours, dense = (torch.autograd.grad((value * target).sum(), queries)[0] for value in (weights, expected))
        assert torch.allclose(ours, dense, rtol=1e-10, atol=1e-14)

    def test_matryoshka_trains_both_halves_on_one_forward_pass_of_the_lm(self, make_model):
        model, plain = make_model(matryoshka_dims=[4, 16]), make_model()
        calls = []
        model.lm.register_forward_hook(lambda *_: calls.append(1))
        output = model(**make_inputs())
        output.loss.backward()
        assert len(calls) == 1
        assert output.loss.item() != plain(**make_inputs()).loss.item()
        assert torch.allclose(output.in_batch_weights.sum(-1), torch.ones(4))
        assert model.retriever.layers[0].mlp.up_proj.weight.grad.abs().sum() > 0

    def test_groups_do_not_see_each_other(self, make_model):
        model = make_model(similarity_temperature=0.1)
        queries, passages = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
        groups = torch.tensor([3, 1, 3, 1, 3])
        weights, _ = model.similarity_weights(queries, passages, groups)
        for group in (1, 3):
            members = (groups == group).nonzero().flatten()
            alone, _ = model.similarity_weights(queries[members], passages[members])
            assert torch.allclose(weights[members][:, members], alone, atol=1e-6)
        assert torch.equal(weights > 0, (groups[:, None] == groups) & ~torch.eye(5, dtype=torch.bool))

    def test_a_group_of_one_is_an_error(self, make_model):
        model = make_model()
        vectors = torch.randn(3, 8)
        for queries, groups in ((vectors, torch.tensor([0, 1, 0])), (vectors[:1], None)):
            with pytest.raises(ValueError, match="group of one chunk"):
                model.similarity_weights(queries, queries, groups)

    def test_include_diagonal(self, make_model):
        model = make_model(include_diagonal=True, similarity_temperature=0.1)
        queries, passages = unit_vectors([0.8, 0.6])
        weights, _ = model.similarity_weights(queries, passages)
        assert torch.allclose(weights[0], torch.softmax(torch.tensor([8.0, 6.0]), dim=-1))

    def test_float32_tells_a_thousandth_apart(self, make_model):
        model = make_model(similarity_temperature=1e-4)
        queries, passages = unit_vectors([0.8, 0.801, 0.5])
        for autocast in (False, True):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                weights, similarities = model.similarity_weights(queries, passages)
            assert weights.dtype == similarities.dtype == torch.float32
            # Row 2 sees both: ten temperatures lie between them, e^-10 is the loser's share.
            assert weights[2, 0].item() == pytest.approx(math.exp(-10), rel=0.02)

    def test_bfloat16_makes_ties(self, make_model):
        model = make_model(similarity_temperature=1e-4, similarity_dtype="bfloat16")
        # Between 0.5 and 1 bfloat16 has steps of 1/256: 0.800 and 0.801 both become 0.80078, 0.806 becomes 0.80469.
        queries, passages = unit_vectors([0.8, 0.801, 0.5, 0.806])
        weights, similarities = model.similarity_weights(queries, passages)
        assert similarities.dtype == torch.bfloat16 and weights.dtype == torch.float32
        assert similarities[2, :2].tolist() == [0.80078125, 0.80078125]
        assert weights[3].tolist() == [0.5, 0.5, 0.0, 0.0]
        assert weights[2, 3] == 1.0

    def test_bfloat16_ties_share_the_gradient(self, make_model):
        gradient = {}
        for dtype in ("float32", "bfloat16"):
            model = make_model(similarity_temperature=1e-4, similarity_dtype=dtype)
            queries, passages = unit_vectors([0.8, 0.802, 0.5])
            passages.requires_grad_()
            weights, _ = model.similarity_weights(queries, passages)
            weights[2, 0].backward()
            gradient[dtype] = passages.grad[0].norm().item()
        assert gradient["bfloat16"] > 1e3 > 1 > gradient["float32"]

    def test_trainable_temperature(self, make_model):
        model = make_model(trainable_temperature=True, similarity_temperature=0.05)
        assert model.temperature.item() == pytest.approx(0.05)
        queries, passages = unit_vectors([0.8, 0.7, 0.5])
        weights, _ = model.similarity_weights(queries, passages)
        fixed, _ = make_model(similarity_temperature=0.05).similarity_weights(queries, passages)
        assert torch.allclose(weights, fixed, atol=1e-6)
        weights[2, 0].backward()
        # dw/d log T = w (1 - w) (c_1 - c_0) / T
        share = 1 / (1 + math.exp(-2))
        assert model.log_temperature.grad.item() == pytest.approx(share * (1 - share) * -0.1 / 0.05, rel=1e-4)
        assert make_model().log_temperature is None

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    def test_trainable_temperature_in_half_precision(self, make_model, dtype):
        model = make_model(trainable_temperature=True, similarity_dtype=dtype, similarity_temperature=1e-4)
        weights, _ = model.similarity_weights(*unit_vectors([0.8, 0.801, 0.5]))
        assert weights.isfinite().all() and weights.dtype == torch.float32


@pytest.mark.parametrize("halves", [("retriever",), ("lm",), ("retriever", "lm")], ids="+".join)
def test_lora_on_either_half(make_model, halves):
    plain = make_model()
    plain_output = plain(**make_inputs())
    torch.manual_seed(0)
    retriever, lm = copy.deepcopy(plain.retriever), copy.deepcopy(plain.lm.backbone)
    options = {f"{half}_lora": LORA for half in halves}
    model = RevelaForPreTraining.from_backbones(retriever, lm, similarity_temperature=0.1, **options).eval()
    output = model(**make_inputs())
    assert output.loss.item() == pytest.approx(plain_output.loss.item(), rel=1e-6)
    output.loss.backward()
    moved = gradients(model)
    for half, prefix in (("retriever", "retriever."), ("lm", "lm.backbone.")):
        own = {name for name in moved if name.startswith(prefix)}
        if half in halves:
            assert own == {name for name, _ in model.named_parameters() if name.startswith(prefix) and "lora_" in name}
            assert all(moved[name].abs().sum() > 0 for name in own if "lora_B" in name)
        else:
            assert own == {name for name, _ in model.named_parameters() if name.startswith(prefix)}


def test_freeze_lm_trains_the_retriever_only(make_model):
    model = make_model(freeze_lm=True)
    model(**make_inputs()).loss.backward()
    assert set(gradients(model)) == {f"retriever.{name}" for name, _ in model.retriever.named_parameters()}


def test_activation_checkpointing(make_model):
    model = make_model("bert", in_batch_gate=True, lm_lora=LORA).train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    results = []
    for checkpointing in (False, True):
        if checkpointing:
            checkpoint_activations(model, use_reentrant=False)
        model.zero_grad()
        output = model(**make_inputs())
        output.loss.backward()
        results.append({"loss": output.loss.detach(), **gradients(model)})
    assert set(results[0]) == set(results[1])
    for name, value in results[0].items():
        assert torch.allclose(results[1][name], value, rtol=1e-4, atol=1e-6), name
    checkpoint_activations(model, use_reentrant=True)
    with pytest.raises(ValueError, match="Reentrant"):
        model(**make_inputs())


class TestFromBackbones:
    def test_reads_paths_and_changes_no_weight(self, tiny_lm_folder, tiny_bert_folder):
        model = RevelaForPreTraining.from_backbones(
            tiny_bert_folder, tiny_lm_folder, retriever_lora=LORA, in_batch_gate=True
        )
        for module, auto_class, folder in (
            (model.retriever, AutoModel, tiny_bert_folder),
            (model.lm.backbone, AutoModelForCausalLM, tiny_lm_folder),
        ):
            own = {name.replace(".base_layer.", "."): value for name, value in module.state_dict().items()}
            for name, value in auto_class.from_pretrained(folder).state_dict().items():
                assert torch.equal(own[name], value), name
        assert model.config.retriever_name_or_path == str(tiny_bert_folder)
        assert model.config.lm_name_or_path == str(tiny_lm_folder)

    def test_weights_are_float32_unless_asked(self, tiny_lm_folder, tmp_path):
        AutoModelForCausalLM.from_pretrained(tiny_lm_folder).to(torch.bfloat16).save_pretrained(tmp_path)
        model = RevelaForPreTraining.from_backbones(tmp_path, tmp_path)
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
        model = RevelaForPreTraining.from_backbones(tmp_path, tmp_path, dtype=torch.bfloat16, lm_lora=LORA)
        dtypes = {"lora_" in name: parameter.dtype for name, parameter in model.lm.named_parameters()}
        assert dtypes == {False: torch.bfloat16, True: torch.float32}
        assert {parameter.dtype for parameter in model.retriever.parameters()} == {torch.bfloat16}

    def test_causal_lm_as_retriever_gives_its_decoder(self):
        retriever = make_lm(seed=1)
        model = RevelaForPreTraining.from_backbones(retriever, make_lm())
        assert model.retriever is retriever.model

    def test_masked_lm_as_retriever_gives_its_encoder(self, tiny_bert_folder):
        retriever = BertForMaskedLM.from_pretrained(tiny_bert_folder)
        model = RevelaForPreTraining.from_backbones(retriever, make_lm(dtype=torch.float32), pooling="cls")
        assert isinstance(model.retriever, BertModel)

    @pytest.mark.parametrize("part", ["lm", "decoder"])
    def test_one_object_for_both_is_an_error(self, part):
        lm = make_lm()
        with pytest.raises(ValueError, match="same object"):
            RevelaForPreTraining.from_backbones(lm if part == "lm" else lm.model, lm)

    def test_mistyped_options_are_errors(self, tiny_lm_folder):
        with pytest.raises(ValueError, match="no field 'temperature'"):
            RevelaForPreTraining.from_backbones(tiny_lm_folder, tiny_lm_folder, temperature=0.1)
