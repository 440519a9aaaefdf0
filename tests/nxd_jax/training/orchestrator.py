"""What users have beside their YAML files: a Hydra program that sets variables and trains, with the imports and the choices of the original's two files."""

import os

import hydra


@hydra.main(config_path="conf", config_name="megatron_gpt_config", version_base="1.2")
def main(cfg):
    if cfg.precision.type == "fp32":
        os.environ.setdefault("XLA_DOWNCAST_BF16", "0")
    os.environ.setdefault("NEURON_CC_FLAGS", cfg.compiler_flags)
    train(cfg)


def train(cfg):
    import torch  # noqa: F401
    from lightning_lite.plugins.environments import TorchElasticEnvironment
    from nemo.utils import logging
    from nemo.utils.exp_manager import StatelessTimer
    from neuronx_distributed_training.lightning_modules.nlp_overrides import NLPCheckpointIO, NLPDDPStrategy, NLPTrainer
    from neuronx_distributed_training.utils.exp_manager import exp_manager
    from omegaconf.omegaconf import OmegaConf, open_dict
    from pytorch_lightning.callbacks.timer import Timer

    logging.info(OmegaConf.to_yaml(cfg))
    with open_dict(cfg):
        version = cfg.exp_manager.get("ckpt_ptl_version", None) or "2.5.0"
    elastic = TorchElasticEnvironment() if os.environ.get("TORCHELASTIC_RUN_ID") is not None else None
    strategy = NLPDDPStrategy(
        find_unused_parameters=False,
        cluster_environment=elastic,
        checkpoint_io=NLPCheckpointIO(cfg.exp_manager.get("async_checkpointing", False), cfg.model.get("weight_init_only", False), version),
        restore_path=cfg.exp_manager.resume_from_checkpoint,
    )
    trainer = NLPTrainer(plugins=[], strategy=strategy, **cfg.trainer)
    exp_manager(trainer, cfg.exp_manager)
    trainer.callbacks = [StatelessTimer(cfg.trainer.max_time) if isinstance(c, Timer) else c for c in trainer.callbacks]
    data, model = classes(cfg)
    data_module = data(cfg, trainer)
    trainer.fit(model(cfg, trainer), datamodule=data_module, ckpt_path=cfg.exp_manager.resume_from_checkpoint)
    return trainer


def classes(cfg):
    """The data module and the model."""
    from neuronx_distributed_training.lightning_modules.data.hf_data_module import HFDataModule
    from neuronx_distributed_training.lightning_modules.data.megatron import MegatronDataModule
    from neuronx_distributed_training.lightning_modules.data.model_alignment_data_module import ModelAlignmentDataModule
    from neuronx_distributed_training.lightning_modules.data.sft_data_module import SFTDataModule
    from neuronx_distributed_training.lightning_modules.model.hf_models.llama_model import HFLLamaModule
    from neuronx_distributed_training.lightning_modules.model.megatron import MegatronGPTModel
    from neuronx_distributed_training.utils import get_attribute_from_cfg

    aligned = get_attribute_from_cfg(cfg, "model_alignment_strategy", False)
    if getattr(cfg.data, "use_sft_style_data_module", False):
        data = SFTDataModule
    elif aligned:
        data = ModelAlignmentDataModule
    elif cfg.model_source == "megatron":
        data = MegatronDataModule
    else:
        data = HFDataModule
    if cfg.model_source == "megatron":
        return data, MegatronGPTModel
    if cfg.model_source != "hf":
        raise NotImplementedError
    if "mixtral" in cfg.name:
        from neuronx_distributed_training.lightning_modules.model.hf_models.mixtral_model import HFMixtralModule

        return data, HFMixtralModule
    return data, HFLLamaModule


if __name__ == "__main__":
    main()
