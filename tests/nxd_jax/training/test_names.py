"""The names that users' files take from NxD Training and NeMo: they are there, and do what they say."""

from __future__ import annotations

import importlib
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

N = "neuronx_distributed_training"
NAMES = """
.:__version__
._version:__version__
.lightning_modules.data.base:BaseDataModule
.lightning_modules.data.datasets.ConcatDataset:ConcatDataset
.lightning_modules.data.datasets.PaddedDataset:PaddedDataset
.lightning_modules.data.datasets.PaddedDataset:PaddedDPODataset
.lightning_modules.data.hf_data_module:HFDataModule
.lightning_modules.data.megatron:MegatronDataModule
.lightning_modules.data.megatron.data_module:MegatronDataModule
.lightning_modules.data.model_alignment_data_module:ModelAlignmentDataModule
.lightning_modules.data.sft_data_module:SFTDataModule
.lightning_modules.data.utils:convert_dict_to_list
.lightning_modules.data.utils:pad_token_list
.lightning_modules.data.utils:pad_token_tensor
.lightning_modules.data.utils:pad_tokens
.lightning_modules.model.base:BaseModelModule
.lightning_modules.model.base_dpo:DPOBaseModel
.lightning_modules.model.base_orpo:ORPOBaseModel
.lightning_modules.model.hf_models.base_model:BaseHfModel
.lightning_modules.model.hf_models.llama_model:HFLLamaModule
.lightning_modules.model.hf_models.mixtral_model:HFMixtralModule
.lightning_modules.model.megatron:MegatronGPTModel
.lightning_modules.model.megatron.megatron_base_model:MegatronBaseModel
.lightning_modules.model.megatron.megatron_gpt_model:MegatronGPTModel
.lightning_modules.model.megatron_init:initialize_model_parallel_for_nemo
.lightning_modules.nlp_overrides:NLPCheckpointIO
.lightning_modules.nlp_overrides:NLPDDPStrategy
.lightning_modules.nlp_overrides:NLPTrainer
.models.hf_models.modeling_llama:LlamaForCausalLM
.models.hf_models.modeling_mixtral:MixtralForCausalLM
.models.megatron.fused_layer_norm:get_layer_norm
.models.megatron.gpt_model:GPTModel
.models.megatron.module:MegatronModule
.models.megatron.module:param_is_not_shared
.optim.lr_schedulers:LinearAnnealingWithWarmUp
.optim.lr_schedulers:LinearAnnealingWithWarmupParams
.utils:Throughput
.utils:_distributed_available
.utils:get_attribute_from_cfg
.utils:get_dtype
.utils:get_lnc_size
.utils.exp_manager:exp_manager
.utils.llama_perf_estimate:calculate_mfu
.utils.model_utils:get_param_groups_by_weight_decay
.utils.utils:Throughput
.utils.utils:_distributed_available
.utils.utils:get_attribute_from_cfg
.utils.utils:get_dtype
.utils.utils:get_lnc_size
.utils.utils:get_platform_target
nemo.core.config:AdamWParams
nemo.core.config:hydra_runner
nemo.core.config.optimizers:AdamWParams
nemo.core.config.optimizers:OptimizerParams
nemo.core.config.schedulers:SchedulerParams
nemo.core.optim:get_optimizer
nemo.core.optim:prepare_lr_scheduler
nemo.core.optim.lr_scheduler:register_scheduler
nemo.utils:logging
nemo.utils.exp_manager:StatelessTimer
"""


@pytest.mark.parametrize("name", NAMES.split())
def test_a_name_is_there(name: str) -> None:
    module, _, attribute = name.partition(":")
    place = (N + module).rstrip(".") if module.startswith(".") else module
    assert getattr(importlib.import_module(place), attribute) is not None


@pytest.mark.parametrize("package", ["lightning_modules.data.megatron", "lightning_modules.model.megatron"])
def test_others_are_not(package: str) -> None:
    module = importlib.import_module(f"nxd_jax.training.{package}")
    with pytest.raises(AttributeError, match=rf"module 'nxd_jax.training.{package}' has no attribute 'Something'"):
        module.Something  # noqa: B018


# -- utils ---------------------------------------------------------------------------------------------


def test_dtypes_by_name(caplog: pytest.LogCaptureFixture) -> None:
    from nxd_jax.training.utils import get_dtype

    assert [get_dtype(name) for name in ("fp32", "FP16", "bf16")] == [torch.float32, torch.float16, torch.bfloat16]
    assert not caplog.records and get_dtype() == torch.bfloat16
    with caplog.at_level(logging.WARNING, "nxd_jax"):
        assert get_dtype("unknown") == torch.bfloat16
    assert "dtype 'unknown' is none of bf16, fp16, fp32: bf16 is taken" in caplog.text


@pytest.mark.parametrize(("chip", "lnc", "size"), [("trn2", None, 2), ("trn2", 1, 1), ("trn2", 2, 2), ("trn1", None, 1), ("trn1", 2, 1)])
def test_cores_of_a_logical_one(chip: str, lnc: int | None, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from nxd_jax.training.utils import get_lnc_size

    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", chip)
    assert get_lnc_size(lnc) == size


def test_other_numbers_of_cores_are_refused() -> None:
    from nxd_jax.training.utils import get_lnc_size

    with pytest.raises(ValueError, match=r"trainer.lnc=3: a logical NeuronCore is one or two physical cores"):
        get_lnc_size(3)


def test_whether_ranks_can_talk() -> None:
    from nxd_jax.training.utils import _distributed_available

    assert _distributed_available() is torch.distributed.is_initialized()


def test_parameters_that_are_marked_as_copies() -> None:
    from nxd_jax.training.models.megatron.module import param_is_not_shared

    one = torch.nn.Parameter(torch.ones(1))
    assert param_is_not_shared(one)
    one.shared = True  # type: ignore[attr-defined]
    assert not param_is_not_shared(one)


def test_options_are_dataclasses_that_omegaconf_takes() -> None:
    from nemo.core.config.optimizers import AdamWParams

    from nxd_jax.training.optim.lr_schedulers import LinearAnnealingWithWarmupParams

    assert OmegaConf.is_missing(OmegaConf.structured(AdamWParams), "lr")
    assert OmegaConf.structured(AdamWParams(lr=0.1)).betas == [0.9, 0.999]
    assert LinearAnnealingWithWarmupParams(warmup_steps=3) == LinearAnnealingWithWarmupParams(-1, 3, 0)


def test_perf_estimate_counts_as_the_original_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from nxd_jax.training.utils import llama_perf_estimate

    sizes = {
        "hidden_size": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 16,
        "vocab_size": 32,
        "num_hidden_layers": 3,
    }
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    s, h, kv = 10, 8, 4
    layer = 2 * s * h * h * 2 + 2 * 2 * s * h * kv + 2 * 2 * s * s * h + 6 * 4 * s * s + 3 * 2 * h * 16 * s
    whole = 3 * (3 * layer + 2 * 2 * 32 * h * s)
    mfu, sequences, flops, each, seconds = llama_perf_estimate.calculate_mfu(str(tmp_path / "config.json"), 64, 16.0, 2, s, "trn1")
    assert (each, sequences, seconds) == (pytest.approx(whole / 1e12), 8.0, 4.0)
    assert flops == pytest.approx(8 * whole / 1e12) and mfu == pytest.approx(100 * flops / 3040)
    words = ("--config", str(tmp_path / "config.json"), "--batch_size", "64", "--throughput", "16", "--num_nodes", "2", "--seq_len", "10")
    llama_perf_estimate.main([*words, "--hw_backend", "p5"])
    assert "Seconds per batch: 4.00" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"hw_backend must be one of trn1, trn2, p5, got 'v100'"):
        llama_perf_estimate.calculate_mfu(str(tmp_path / "config.json"), 64, 16.0, 2, s, "v100")


@pytest.mark.usefixtures("ranks")
def test_seeds_need_ranks_that_are_laid_out_as_said() -> None:
    from nxd_jax.parallel_layers import parallel_state
    from nxd_jax.training.lightning_modules.model.megatron_init import initialize_model_parallel_for_nemo
    from torch_bridge.mesh import world

    with pytest.raises(ValueError, match="ranks are not laid out yet"):
        initialize_model_parallel_for_nemo(1, 0, 0)
    world.configure(world.World(1))
    torch.distributed.init_process_group("xla")
    parallel_state.initialize_model_parallel()
    with pytest.raises(ValueError, match=r"the sizes \{'tp': 2, .* differ from those that ranks are laid out with"):
        initialize_model_parallel_for_nemo(1, 0, 0, tensor_model_parallel_size=2)
    drawn = []
    for _ in range(2):
        initialize_model_parallel_for_nemo(1, 0, 0, seed=5)
        drawn.append(float(torch.rand(())))
    assert drawn[0] == drawn[1]
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()
    world.configure(None)


# -- rows ----------------------------------------------------------------------------------------------

COLUMNS = {
    "input_ids": [[1, 2, 3], [4, 5, 6, 7], [8], [9] * 9],
    "attention_mask": [[1] * 3, [1] * 4, [1], [1] * 9],
    "labels": [[-100, 2, 3], [-100, -100, 6, 7], [8], [9] * 9],
}
FILL = {"input_ids": 0, "attention_mask": 0, "labels": -100}


def test_packed_rows_keep_labels_and_masks(caplog: pytest.LogCaptureFixture) -> None:
    """(q) The original has token ids in both."""
    from nxd_jax.training.lightning_modules.data.datasets.ConcatDataset import ConcatDataset

    with caplog.at_level(logging.WARNING, "nxd_jax"):
        found = ConcatDataset(COLUMNS, 99, FILL, 9)
    assert "1 of 4 rows have 9 tokens or more and are left out" in caplog.text
    assert list(found) == [
        {
            "input_ids": [1, 2, 3, 99, 4, 5, 6, 7, 99],
            "attention_mask": [1] * 9,
            "labels": [-100, 2, 3, -100, -100, -100, 6, 7, -100],
        },
        {"input_ids": [8, 99, *[0] * 7], "attention_mask": [1, 1, *[0] * 7], "labels": [8, *[-100] * 8]},
    ]
    assert len(found) == 2 and FILL["input_ids"] == 0


def test_padded_rows() -> None:
    """(q) The original makes two rows' length of one that fits exactly."""
    from nxd_jax.training.lightning_modules.data.datasets.PaddedDataset import PaddedDataset

    found = PaddedDataset({name: values[:3] for name, values in COLUMNS.items()}, FILL, 4)
    assert [row["labels"] for row in found] == [[-100, 2, 3, -100], [-100, -100, 6, 7], [8, -100, -100, -100]]
    assert [row["attention_mask"] for row in found] == [[1, 1, 1, 0], [1] * 4, [1, 0, 0, 0]]
    with pytest.raises(ValueError, match=r"row 3 has 9 tokens, and pad_size is 4"):
        PaddedDataset(COLUMNS, FILL, 4)


def test_padded_rows_of_preferences() -> None:
    from nxd_jax.training.lightning_modules.data.datasets.PaddedDataset import PaddedDPODataset

    row: dict[str, Any] = {"prompt_input_ids": [1, 2], "chosen_input_ids": [1, 2, 3], "chosen_labels": [-100, 2, 3], "prompt": "a text"}
    found = PaddedDPODataset([row], 4)[0]
    assert found["prompt_input_ids"].tolist() == [0, 0, 1, 2] and found["chosen_input_ids"].tolist() == [1, 2, 3, 0]
    assert found["chosen_labels"].tolist() == [-100, 2, 3, -100] and found["prompt"] == "a text"
    with pytest.raises(ValueError, match=r"row 0 has 2 tokens, and padding_size is 1"):
        PaddedDPODataset([row], 1)


def test_lists_filled_to_a_multiple() -> None:
    from nxd_jax.training.lightning_modules.data import utils

    assert utils.pad_token_list([[], [1, 2], [1, 2, 3]], 2, 7) == [[7, 7], [1, 2], [1, 2, 3, 7]]
    with pytest.raises(ValueError, match=r"padding_side must be 'left' or 'right', got 'top'"):
        utils.pad_token_tensor([torch.ones(1)], 2, padding_side="top")
