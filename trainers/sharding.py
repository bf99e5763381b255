"""
Weights and optimizer of a model that DeepSpeed or FSDP2 has split over the processes, as one process would hold them.

With these a checkpoint is the same files whatever wrote it, and a run goes on under another strategy or number of
processes. All functions are collective: every process calls them. What they return is whole on the first process and
empty on the others.
"""

from collections import Counter
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FSDPModule

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


@contextmanager
def vocabulary_in_root(model: nn.Module, plugin):
    """
    While accelerate wraps a model by FSDP2: keep its token tables in the root's group, which is gathered throughout.

    The losses read a head's weight in slices and outside of its forward, and a tied table would lie in two groups.
    """
    count = Counter(id(value) for _, value in model.named_parameters(remove_duplicate=False))
    blocks = set(model._no_split_modules or ())
    for module in model.modules():
        if any(count[id(value)] > 1 for value in module.parameters()):
            blocks.discard(type(module).__name__)
    plugin.transformer_cls_names_to_wrap = sorted(blocks)
    model.get_input_embeddings = model.get_output_embeddings = lambda: None
    try:
        yield
    finally:
        del model.get_input_embeddings, model.get_output_embeddings


@contextmanager
def unwrapped_class(model: nn.Module):
    """FSDP2 swaps a model's class for one of torch's own, whose code and name a checkpoint would carry."""
    wrapped = type(model)
    if isinstance(model, FSDPModule):
        model.__class__ = wrapped.__bases__[1]
    try:
        yield
    finally:
        model.__class__ = wrapped


def whole(parameter: torch.Tensor) -> torch.Tensor:
    """A parameter, detached and in full, on every process."""
    if hasattr(parameter, "full_tensor"):
        return parameter.detach().full_tensor()
    if hasattr(parameter, "ds_id"):
        import deepspeed

        with deepspeed.zero.GatheredParameters([parameter]):
            return parameter.detach().clone()
    return parameter.detach()


def whole_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """The state dict; trained weights in float32 even where the processes compute in bfloat16."""
    first = dist.get_rank() == 0
    if isinstance(model, FSDPModule):
        return get_model_state_dict(model, options=FULL)
    from deepspeed.utils import safe_get_full_fp32_param

    state = {}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, value in model.state_dict(keep_vars=True).items():
        parameter = parameters.get(name)
        if parameter is not None and parameter.requires_grad:
            value = safe_get_full_fp32_param(parameter)
        else:
            value = whole(value)
        if first:
            state[name] = value.detach().cpu().clone()
    return state


@torch.no_grad()
def load_weights(model: nn.Module, state: dict[str, torch.Tensor]) -> None:
    """Put a state dict into a model, split already or not; what the state lacks stays as it is."""
    if isinstance(model, FSDPModule):
        options = StateDictOptions(full_state_dict=True, cpu_offload=True, strict=False)
        set_model_state_dict(model, state, options=options)
        return
    for name, parameter in model.named_parameters():
        if name not in state:
            continue
        if hasattr(parameter, "ds_id"):
            import deepspeed

            with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
                parameter.copy_(state[name])
        else:
            parameter.copy_(state[name])
        if parameter.requires_grad and hasattr(parameter, "_z3_optimizer"):
            parameter._z3_optimizer.set_local_hp_param(_partition(parameter, state[name].float()), parameter)
        elif hasattr(parameter, "_hp_mapping"):
            parameter.set_full_hp_param(state[name].float())


def whole_optimizer(model: nn.Module, optimizer, names: list[list[str]]) -> dict:
    """
    The optimizer's state dict, as `torch.optim.Optimizer.state_dict` gives it on one process.

    Args:
        names: the parameters of each of the optimizer's groups, as they were before the model was split.
    """
    if isinstance(model, FSDPModule):
        split = get_optimizer_state_dict(model, optimizer, options=FULL)
    else:
        split = {
            "state": _deepspeed_states(model, optimizer, names),
            "param_groups": _base_optimizer(optimizer).param_groups,
        }
    if dist.get_rank() != 0:
        return {}
    state, groups = split["state"], split["param_groups"]
    places = {name: place for place, name in enumerate(name for group in names for name in group)}
    return {
        "state": {places[name]: value for name, value in state.items() if value},
        "param_groups": [
            {key: value for key, value in group.items() if key != "params"}
            | {"params": [places[name] for name in own]}
            for group, own in zip(groups, names, strict=True)
        ],
    }


def load_optimizer(model: nn.Module, optimizer, names: list[list[str]], saved: dict) -> None:
    """
    The other way round; `saved` is whole on every process.

    Raises:
        ValueError: if `saved` is of an optimizer with other parameters or other groups.
    """
    sizes = [len(group["params"]) for group in saved["param_groups"]]
    if sizes != [len(group) for group in names]:
        raise ValueError(
            f"The checkpoint's optimizer has groups of {sizes} parameters, this run's of "
            f"{[len(group) for group in names]}: resume with the options of the first run."
        )
    flat = [name for group in names for name in group]
    state = {flat[place]: value for place, value in saved["state"].items()}
    if isinstance(model, FSDPModule):
        groups = [{**group, "params": own} for group, own in zip(saved["param_groups"], names, strict=True)]
        set_optimizer_state_dict(model, optimizer, {"state": state, "param_groups": groups}, options=FULL)
    else:
        _set_deepspeed_states(model, optimizer, state)
        for group, own in zip(_base_optimizer(optimizer).param_groups, saved["param_groups"], strict=True):
            # Whatever else it may have belongs to the optimizer that wrote it.
            group.update({key: own[key] for key in group.keys() & own.keys() - {"params"}})


# DeepSpeed: an optimizer around the real one, whose parameters are flat pieces of many of ours. ZeRO-1 and 2 cut the
# whole of a group into pieces, so that a process may have some, all or nothing of a parameter; ZeRO-3 cuts each.


def _base_optimizer(optimizer) -> torch.optim.Optimizer:
    zero = getattr(optimizer, "optimizer", optimizer)  # accelerate's wrapper around DeepSpeed's
    return zero.optimizer


def _share(optimizer, parameter: nn.Parameter) -> tuple[torch.Tensor, int, int, int] | None:
    """
    This process's share of a parameter: the flat piece it lies in, its start and length there, and its start in the
    flattened parameter. `None` where it has none.
    """
    if hasattr(parameter, "ds_id"):
        zero = parameter._z3_optimizer
        group, start, length = zero.grad_position[zero.get_param_id(parameter)]
        whence = parameter.ds_tensor.numel() * dist.get_rank(parameter.ds_process_group)
        # The last piece is padded to the size of the others.
        return zero.fp32_partitioned_groups_flat[group], start, min(length, parameter.ds_numel - whence), whence
    mapping = parameter._hp_mapping
    if mapping is None:
        return None
    flat = _base_optimizer(optimizer).param_groups[mapping.param_group_index]["params"][0]
    to, whence = mapping.hp_fragment_address, mapping.lp_fragment_address
    return flat, to.start, to.numel, whence.start


def _deepspeed_states(model: nn.Module, optimizer, names: list[list[str]]) -> dict[str, dict]:
    first, parameters = dist.get_rank() == 0, dict(model.named_parameters())
    states = _base_optimizer(optimizer).state
    # A process may have no share of a parameter, but the first one has some of every kind of state.
    example = next(((flat, state) for flat, state in states.items() if state), None)
    kinds = [None]
    if first and example is not None:
        flat, state = example
        kinds = [{key: torch.is_tensor(value) and value.shape == flat.shape for key, value in state.items()}]
    dist.broadcast_object_list(kinds, src=0)
    whole_states: dict[str, dict] = {}
    for name in (name for group in names for name in group) if kinds[0] else ():
        parameter, state = parameters[name], {}
        shape = parameter.ds_shape if hasattr(parameter, "ds_id") else parameter.shape
        for key, of_elements in kinds[0].items():
            if not of_elements:
                value = example[1][key] if first else None
                # Saved once for all parameters, the step would be counted once for each.
                state[key] = value.cpu().clone() if torch.is_tensor(value) else value
                continue
            value = torch.zeros(shape.numel(), device=parameter.device)
            share = _share(optimizer, parameter)
            if share is not None and share[2] > 0:
                flat, start, length, whence = share
                value[whence : whence + length] = states[flat][key][start : start + length]
            dist.all_reduce(value)
            state[key] = value.view(shape).cpu()
        if first:
            whole_states[name] = state
    return whole_states


@torch.no_grad()
def _set_deepspeed_states(model: nn.Module, optimizer, states: dict[str, dict]) -> None:
    base = _base_optimizer(optimizer)
    for name, parameter in model.named_parameters():
        share = _share(optimizer, parameter) if name in states else None
        if share is None:
            continue
        flat, start, length, whence = share
        for key, value in states[name].items():
            if key == "step" or not torch.is_tensor(value):
                base.state[flat][key] = value.clone() if torch.is_tensor(value) else value
            else:
                pieces = base.state[flat].setdefault(key, torch.zeros_like(flat))
                if length > 0:
                    pieces[start : start + length] = value.flatten()[whence : whence + length]


def _partition(parameter: nn.Parameter, value: torch.Tensor) -> torch.Tensor:
    """This process's piece of a value under ZeRO-3, which pads a parameter to equal pieces."""
    size, group = parameter.ds_tensor.numel(), parameter.ds_process_group
    padded = value.new_zeros(size * dist.get_world_size(group))
    padded[: value.numel()] = value.flatten()
    return padded.narrow(0, size * dist.get_rank(group), size)
