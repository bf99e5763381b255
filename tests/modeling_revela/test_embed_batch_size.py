"""`embed_batch_size`: the retriever in slices of a few chunks gives the loss and gradients of all chunks at once."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.autograd.graph import saved_tensors_hooks
from transformers import BertConfig, BertModel

from modeling_revela import RevelaForPreTraining
from tests.modeling_revela.tiny import (
    VOCABULARY,
    checkpoint_activations,
    make_chunks,
    make_lm,
    pad_chunks,
    relative_error,
)

LENGTHS = (9, 5, 12, 7, 12, 4, 8)
LORA = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}
ALL_OPTIONS = {"retriever_lora": LORA, "lm_lora": LORA, "in_batch_gate": True, "trainable_temperature": True}


def make_model(retriever: str = "llama", dtype: torch.dtype = torch.float64, dropout=0.0, **options):
    if retriever == "llama":
        half = make_lm(dtype=dtype, seed=1)
    else:
        torch.manual_seed(1)
        config = BertConfig(
            vocab_size=VOCABULARY, hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
            hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout, initializer_range=0.25,
        )  # fmt: skip
        half = BertModel(config).to(dtype)
    torch.manual_seed(2)
    options = {"similarity_temperature": 0.1, "pooling": "eos" if retriever == "llama" else "mean"} | options
    return RevelaForPreTraining.from_backbones(half, make_lm(dtype=dtype), **options).train()


def make_inputs(lengths=LENGTHS, side: str = "right") -> dict[str, torch.Tensor]:
    inputs = pad_chunks(make_chunks(lengths, seed=1), side)
    for name, seed, shortened in (("query", 2, 2), ("document", 3, 0)):
        encoded = pad_chunks(make_chunks([length - shortened for length in lengths], seed), side)
        inputs[f"{name}_input_ids"] = encoded["input_ids"]
        inputs[f"{name}_attention_mask"] = encoded["attention_mask"]
    return inputs


def gradients(model: RevelaForPreTraining, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def loss_and_gradients(model, inputs, size) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.config.embed_batch_size = size
    loss = model(**inputs).loss
    return loss.detach(), gradients(model, loss)


def uncached(model, inputs, size) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The same slices of chunks, all of equal length, in one plain graph."""
    model.config.embed_batch_size = None
    sides = []
    for side in ("document", "query"):
        ids, mask = inputs[f"{side}_input_ids"], inputs[f"{side}_attention_mask"]
        slices = torch.arange(len(ids)).tensor_split(-(-len(ids) // size))
        sides.append(torch.cat([model.embed(ids[rows], mask[rows]) for rows in slices]))
    weights, _ = model.similarity_weights(sides[1], sides[0])
    own = {name: inputs[name] for name in ("input_ids", "attention_mask", "labels")}
    loss = model(**own, in_batch_weights=weights).loss
    return loss.detach(), gradients(model, loss)


def assert_same(found, expected, tolerance: float) -> None:
    assert relative_error(found[0], expected[0]) < tolerance
    assert found[1].keys() == expected[1].keys()
    # What is zero but for rounding (a bias of BERT's keys) is measured by the others.
    scale = max(gradient.norm().item() for gradient in expected[1].values())
    for name, gradient in expected[1].items():
        assert (found[1][name] - gradient).norm() < tolerance * max(gradient.norm().item(), 1e-2 * scale), name


@pytest.mark.parametrize("size", [1, 3, 7, 20])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 1e-5)], ids=str)
@pytest.mark.parametrize("retriever", ["llama", "bert"])
def test_same_loss_and_gradients(retriever, dtype, tolerance, size):
    model, inputs = make_model(retriever, dtype), make_inputs()
    expected = loss_and_gradients(model, inputs, None)
    assert any(name.startswith("retriever.") and value.norm() > 1e-3 for name, value in expected[1].items())
    assert_same(loss_and_gradients(model, inputs, size), expected, tolerance)


@pytest.mark.parametrize("side", ["left", "right"])
def test_with_adapters_and_activation_checkpointing_whatever_the_padding(side):
    model, inputs = make_model(**ALL_OPTIONS), make_inputs(side=side)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0.0, 0.1)
    expected = loss_and_gradients(model, inputs, None)
    assert {name.split(".")[0] for name in expected[1]} == {"retriever", "lm", "log_temperature"}
    checkpoint_activations(model, use_reentrant=False)
    assert_same(loss_and_gradients(model, inputs, 3), expected, 1e-11)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_backward_pass_drops_what_the_forward_pass_dropped(checkpointing, autocast):
    lora = LORA | {"lora_dropout": 0.2}
    model = make_model("bert", torch.float32, dropout=0.2, retriever_lora=lora, similarity_temperature=1.0)
    inputs = make_inputs((8,) * 7)
    if checkpointing:
        checkpoint_activations(model, use_reentrant=False)
    results = []
    for way in (uncached, loss_and_gradients):
        torch.manual_seed(5)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            results.append(way(model, inputs, 3))
    assert_same(results[1], results[0], 1e-5)
    # Other masks give another loss.
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        assert relative_error(loss_and_gradients(model, inputs, 3)[0], results[0][0]) > 1e-5


def test_holds_no_activations_and_pads_a_slice_to_its_longest():
    model = make_model()
    inputs = make_inputs()
    ids, mask = inputs["document_input_ids"], inputs["document_attention_mask"]
    shapes, held = [], {}
    model.retriever.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def pack(tensor):
        if tensor.untyped_storage().data_ptr() not in own:
            held[size] += tensor.nbytes
        return tensor

    for size in (None, 2):
        model.config.embed_batch_size, held[size] = size, 0
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            embeddings = model.embed(ids, mask)
    assert held[2] < 0.01 * held[None]
    slices = [(2, 12), (2, 9), (2, 7), (1, 4)]
    assert shapes == [(7, 12), *slices]
    embeddings[:, 0].sum().backward()
    assert shapes == [(7, 12), *slices, *reversed(slices)]


def embed_in_process(rank: int, store: str, results: str) -> None:
    """Seven chunks in one process and two in the other."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    torch.set_num_threads(1)
    model, calls = make_model(), []
    inputs = make_inputs(LENGTHS if rank == 0 else LENGTHS[:2])
    expected = loss_and_gradients(model, inputs, None)
    model.retriever.register_forward_pre_hook(lambda module, args: calls.append(module))
    found = loss_and_gradients(model, inputs, 1)
    assert_same(found, expected, 1e-11)
    torch.save(len(calls), f"{results}-{rank}")
    dist.destroy_process_group()


def test_processes_with_fewer_chunks_make_as_many_forward_passes(tmp_path):
    """Where the weights are split over the processes, one that made fewer would leave the others waiting."""
    mp.spawn(embed_in_process, (str(tmp_path / "store"), str(tmp_path / "calls")), nprocs=2)
    # Queries and passages, forward and again in the backward pass.
    assert [torch.load(tmp_path / f"calls-{rank}") for rank in range(2)] == [4 * 7, 4 * 7]
