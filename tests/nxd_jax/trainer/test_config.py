"""Every argument of `neuronx_distributed_config`: what it becomes, its default, and what is said of a wrong value."""

from __future__ import annotations

import inspect
import logging
import re
from typing import Any

import neuronx_distributed
import pytest
import torch
from neuronx_distributed.trainer import initialize_parallel_model, initialize_parallel_optimizer, neuronx_distributed_config
from torch import nn

from nxd_jax.parallel_layers import parallel_state
from nxd_jax.tensor_parallel import parallel_groups
from tests.nxd_jax.conftest import Nxd

PLAIN = {"zero_one_enabled": False, "grad_clipping": True, "max_grad_norm": 1.0}
ZERO1 = {"zero_one_enabled": True}


def fill(module: nn.Module, device: torch.device) -> None: ...


class Mixin: ...


def test_defaults() -> None:
    assert neuronx_distributed_config() == {
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "expert_parallel_size": 1,
        "context_parallel_size": 1,
        "pipeline_config": None,
        "optimizer_config": PLAIN,
        "activation_checkpoint_config": None,
        "pad_model": False,
        "sequence_parallel": False,
        "model_init_config": {"sequential_move_factor": 11, "meta_device_init": False, "param_init_fn": None},
        "lora_config": None,
        "mixed_precision_config": {"use_master_weights": False, "use_fp32_grad_acc": False, "use_master_weights_in_ckpt": False},
        "lnc_size": 1,
    }
    assert not parallel_state.model_parallel_is_initialized()


def test_signature() -> None:
    """The specification's arguments in its order, with those that the code has besides."""
    names = list(inspect.signature(neuronx_distributed_config).parameters)
    assert names == [
        *(
            "tensor_parallel_size",
            "pipeline_parallel_size",
            "expert_parallel_size",
            "context_parallel_size",
            "pipeline_config",
            "optimizer_config",
        ),
        *("activation_checkpoint_config", "pad_model", "sequence_parallel", "model_init_config", "lora_config", "mixed_precision_config"),
        *("sequential_move_factor", "lnc_size"),
    ]
    assert neuronx_distributed.neuronx_distributed_config is neuronx_distributed_config
    assert neuronx_distributed.initialize_parallel_model is initialize_parallel_model


@pytest.mark.parametrize(
    ("given", "key", "found"),
    [
        ({"optimizer_config": {}}, "optimizer_config", PLAIN),
        ({"optimizer_config": {"max_grad_norm": 2}}, "optimizer_config", {**PLAIN, "max_grad_norm": 2}),
        ({"optimizer_config": {"grad_clipping": False}}, "optimizer_config", {"zero_one_enabled": False, "grad_clipping": False}),
        (
            {"optimizer_config": ZERO1},
            "mixed_precision_config",
            {"use_master_weights": True, "use_fp32_grad_acc": True, "use_master_weights_in_ckpt": False},
        ),
        (
            {"optimizer_config": ZERO1, "mixed_precision_config": {"use_fp32_grad_acc": False, "use_master_weights_in_ckpt": True}},
            "mixed_precision_config",
            {"use_master_weights": True, "use_fp32_grad_acc": False, "use_master_weights_in_ckpt": True},
        ),
        (
            {"sequential_move_factor": 3},
            "model_init_config",
            {"sequential_move_factor": 3, "meta_device_init": False, "param_init_fn": None},
        ),
        (
            {
                "sequential_move_factor": 3,
                "model_init_config": {"sequential_move_factor": 2, "meta_device_init": True, "param_init_fn": fill},
            },
            "model_init_config",
            {"sequential_move_factor": 2, "meta_device_init": True, "param_init_fn": fill},
        ),
        ({"activation_checkpoint_config": "full"}, "activation_checkpoint_config", "full"),
        ({"activation_checkpoint_config": nn.Linear}, "activation_checkpoint_config", nn.Linear),
        ({"activation_checkpoint_config": [nn.Linear, nn.GELU]}, "activation_checkpoint_config", [nn.Linear, nn.GELU]),
        ({"activation_checkpoint_config": Mixin}, "activation_checkpoint_config", Mixin),
        ({"pipeline_parallel_size": 2, "pipeline_config": {"num_microbatches": 4}}, "pipeline_config", {"num_microbatches": 4}),
        ({"pipeline_parallel_size": 4, "pipeline_config": None}, "pipeline_config", None),
        (
            {"optimizer_config": {"zero_one_enabled": True, "grad_clipping": False, "max_grad_norm": None}},
            "optimizer_config",
            {"zero_one_enabled": True, "grad_clipping": False, "max_grad_norm": None},
        ),
        (
            {"mixed_precision_config": {"use_master_weights": True}},
            "mixed_precision_config",
            {"use_master_weights": True, "use_fp32_grad_acc": False, "use_master_weights_in_ckpt": False},
        ),
        ({"pad_model": True}, "pad_model", True),
        ({"sequence_parallel": True}, "sequence_parallel", True),
        ({"lnc_size": 2}, "lnc_size", 2),
    ],
)
def test_what_arguments_become(given: dict[str, Any], key: str, found: Any) -> None:
    before = {k: dict(v) if isinstance(v, dict) else v for k, v in given.items()}
    assert neuronx_distributed_config(**given)[key] == found
    assert given == before  # NxD writes its defaults into the caller's dicts


def test_one_and_zero_stand_for_true_and_false() -> None:
    found = neuronx_distributed_config(
        sequence_parallel=1,  # type: ignore[arg-type]
        pad_model=0,  # type: ignore[arg-type]
        optimizer_config={"zero_one_enabled": 1, "grad_clipping": 0, "max_grad_norm": None},
        mixed_precision_config={"use_master_weights": 0},
        model_init_config={"meta_device_init": 0},
    )
    assert found["sequence_parallel"] is True and found["pad_model"] is False
    assert found["optimizer_config"] == {"zero_one_enabled": True, "grad_clipping": False, "max_grad_norm": None}
    assert found["optimizer_config"]["zero_one_enabled"] is True and found["optimizer_config"]["grad_clipping"] is False
    assert found["mixed_precision_config"]["use_master_weights"] is False and found["model_init_config"]["meta_device_init"] is False


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"optimizer_config": [1]}, AssertionError, "optimizer_config must be a dict., got [1]"),
        ({"mixed_precision_config": 1}, AssertionError, "mixed_precision_config must be a dict., got 1"),
        ({"model_init_config": "meta"}, AssertionError, "model_init_config must be a dict., got 'meta'"),
        ({"pipeline_config": 4}, AssertionError, "pipeline_config must be a dict., got 4"),
        (
            {"optimizer_config": {"zero1": True}},
            ValueError,
            "optimizer_config has an unknown key 'zero1'; it takes zero_one_enabled, grad_clipping, max_grad_norm",
        ),
        (
            {"mixed_precision_config": {"bf16": True}},
            ValueError,
            "mixed_precision_config has an unknown key 'bf16'; it takes use_master_weights, use_fp32_grad_acc, use_master_weights_in_ckpt",
        ),
        (
            {"model_init_config": {"init": fill}},
            ValueError,
            "model_init_config has an unknown key 'init'; it takes sequential_move_factor, meta_device_init, param_init_fn",
        ),
        (
            {"optimizer_config": {"zero_one_enabled": 2}},
            TypeError,
            "optimizer_config['zero_one_enabled'] must be True or False (or 1 or 0), got 2",
        ),
        (
            {"optimizer_config": {"grad_clipping": None}},
            TypeError,
            "optimizer_config['grad_clipping'] must be True or False (or 1 or 0), got None",
        ),
        (
            {"optimizer_config": {"max_grad_norm": "1"}},
            TypeError,
            "optimizer_config['max_grad_norm'] must be an integer or a float, got '1'",
        ),
        (
            {"optimizer_config": {"max_grad_norm": True}},
            TypeError,
            "optimizer_config['max_grad_norm'] must be an integer or a float, got True",
        ),
        ({"optimizer_config": {"max_grad_norm": 0}}, ValueError, "must be above 0, got 0; grad_clipping=False turns clipping off"),
        ({"optimizer_config": {"max_grad_norm": float("nan")}}, ValueError, "must be above 0, got nan"),
        (
            {"optimizer_config": {"max_grad_norm": None}},
            TypeError,
            "optimizer_config['max_grad_norm'] must be an integer or a float, got None",
        ),
        ({"optimizer_config": {"grad_clipping": False, "max_grad_norm": "1"}}, TypeError, "an integer or a float or None, got '1'"),
        (
            {"mixed_precision_config": {"use_master_weights": None}},
            TypeError,
            "mixed_precision_config['use_master_weights'] must be True or False (or 1 or 0), got None",
        ),
        (
            {"model_init_config": {"meta_device_init": True}},
            ValueError,
            "param_init_fn must be provided when meta_device_init is True: a function of (module, device)",
        ),
        ({"model_init_config": {"param_init_fn": 3}}, TypeError, "model_init_config['param_init_fn'] must be a function or None, got 3"),
        (
            {"model_init_config": {"sequential_move_factor": 0}},
            ValueError,
            "model_init_config['sequential_move_factor'] must be a positive integer, got 0",
        ),
        ({"sequential_move_factor": 0}, ValueError, "sequential_move_factor must be a positive integer, got 0"),
        ({"tensor_parallel_size": 0}, ValueError, "tensor_parallel_size must be a positive integer, got 0"),
        ({"pipeline_parallel_size": "2"}, ValueError, "pipeline_parallel_size must be a positive integer, got '2'"),
        ({"expert_parallel_size": True}, ValueError, "expert_parallel_size must be a positive integer, got True"),
        ({"context_parallel_size": 1.0}, ValueError, "context_parallel_size must be a positive integer, got 1.0"),
        ({"lnc_size": -1}, ValueError, "lnc_size must be a positive integer, got -1"),
        (
            {"activation_checkpoint_config": "selective"},
            ValueError,
            "activation_checkpoint_config='selective' is unknown: give 'full', None, a module class",
        ),
        ({"activation_checkpoint_config": nn.GELU()}, TypeError, "must be 'full', None, a torch.nn.Module class or several, got GELU"),
        ({"activation_checkpoint_config": [nn.GELU, 3]}, TypeError, "a torch.nn.Module class or several, got [<class"),
        ({"activation_checkpoint_config": ()}, TypeError, "a torch.nn.Module class or several, got ()"),
        ({"pad_model": -1}, TypeError, "pad_model must be True or False (or 1 or 0), got -1"),
        ({"pad_model": 1.0}, TypeError, "pad_model must be True or False (or 1 or 0), got 1.0"),
        ({"sequence_parallel": "yes"}, TypeError, "sequence_parallel must be True or False (or 1 or 0), got 'yes'"),
        (
            {"lora_config": {"lora_rank": 4}},
            TypeError,
            "lora_config must be a LoraConfig (from neuronx_distributed.modules.lora), got dict",
        ),
        ({"data_parallel_size": 2}, TypeError, "unexpected keyword argument 'data_parallel_size'"),
    ],
)
def test_errors(given: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=re.escape(text)):
        neuronx_distributed_config(**given)


def test_groups_are_set_up_if_torch_distributed_is(nxd: Nxd) -> None:
    nxd(8)
    config = neuronx_distributed_config(tensor_parallel_size=2, context_parallel_size=2, lnc_size=2)
    assert (parallel_state.get_tensor_model_parallel_size(), parallel_state.get_context_model_parallel_size()) == (2, 2)
    assert parallel_state.get_data_parallel_size() == 2 and parallel_groups.current().lnc_size == 2
    groups = parallel_state.get_tensor_model_parallel_group()
    initialize_parallel_model(config, lambda: nn.Linear(2, 2))
    assert parallel_state.get_tensor_model_parallel_group() is groups  # they are not set up again
    neuronx_distributed_config(tensor_parallel_size=4)
    assert parallel_state.get_tensor_model_parallel_size() == 4 and parallel_groups.current().lnc_size == 1


@pytest.mark.parametrize("sizes", [{"tensor_parallel_size": 3}, {"tensor_parallel_size": 2, "expert_parallel_size": 3}])
def test_sizes_that_do_not_divide_the_world(nxd: Nxd, sizes: dict[str, int]) -> None:
    nxd(4)
    with pytest.raises(RuntimeError, match="3"):
        neuronx_distributed_config(**sizes)


def test_what_is_no_config(nxd: Nxd) -> None:
    nxd(1)
    with pytest.raises(TypeError, match=re.escape("nxd_config must be what neuronx_distributed_config(...) returns, got NoneType")):
        initialize_parallel_model(None, lambda: nn.Linear(1, 1))  # type: ignore[arg-type]
    incomplete = neuronx_distributed_config()
    del incomplete["optimizer_config"], incomplete["pad_model"]
    for call in (
        lambda: initialize_parallel_model(incomplete, lambda: nn.Linear(1, 1)),
        lambda: initialize_parallel_optimizer(incomplete, torch.optim.SGD, []),
    ):
        with pytest.raises(TypeError, match="this dict has no optimizer_config, pad_model"):
            call()


def test_sequence_parallel_that_no_layer_follows_is_said(nxd: Nxd, caplog: pytest.LogCaptureFixture) -> None:
    from nxd_jax.parallel_layers.layer_norm import LayerNorm

    nxd(1)
    config = neuronx_distributed_config(sequence_parallel=True)
    with caplog.at_level(logging.WARNING, "nxd_jax"):
        initialize_parallel_model(config, lambda: LayerNorm(2, sequence_parallel_enabled=True))
        assert not caplog.messages
        initialize_parallel_model(config, lambda: nn.Linear(1, 1))
    assert "no layer of Linear has sequence_parallel_enabled=True: model_fn is to pass it to its layers" in caplog.text


@pytest.mark.parametrize("name", ["use_master_weights", "use_fp32_grad_acc", "use_master_weights_in_ckpt"])
def test_precision_that_needs_zero1_is_refused_with_the_optimizer(nxd: Nxd, name: str) -> None:
    nxd(1)
    config = neuronx_distributed_config(mixed_precision_config={name: True})
    model = initialize_parallel_model(config, lambda: nn.Linear(1, 1))
    text = f"ZeRO-1 optimizer is not enabled, while `{name}` is True. Set optimizer_config={{'zero_one_enabled': True}}"
    with pytest.raises(RuntimeError, match=re.escape(text)):
        initialize_parallel_optimizer(config, torch.optim.SGD, model.parameters(), lr=0.1)


def test_a_class_to_checkpoint_that_the_model_does_not_have(nxd: Nxd) -> None:
    nxd(1)
    config = neuronx_distributed_config(activation_checkpoint_config=Mixin)
    with pytest.raises(ValueError, match="the model has no module of class Mixin"):
        initialize_parallel_model(config, lambda: nn.Linear(1, 1))


@pytest.mark.parametrize("zero1", [True, False])
def test_no_clipping_and_no_norm(nxd: Nxd, zero1: bool) -> None:
    nxd(2)
    options = {"zero_one_enabled": zero1, "grad_clipping": False, "max_grad_norm": None}
    config = neuronx_distributed_config(optimizer_config=options)
    model = initialize_parallel_model(config, lambda: nn.Linear(2, 1, bias=False))
    optimizer = initialize_parallel_optimizer(config, torch.optim.SGD, model.parameters(), lr=1.0)
    before = model.weight.detach().cpu()
    (1000 * model(torch.ones(1, 2, device="xla"))).sum().backward()
    optimizer.step()
    torch.testing.assert_close(model.weight.detach().cpu(), before - 1000)
