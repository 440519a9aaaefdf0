"""What users have beside their YAML files: a Hydra program that sets variables and trains, with the imports of the original's two files."""

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
    from neuronx_distributed_training.lightning_modules.data.hf_data_module import HFDataModule
    from neuronx_distributed_training.lightning_modules.model.hf_models.llama_model import HFLLamaModule
    from neuronx_distributed_training.lightning_modules.nlp_overrides import NLPCheckpointIO, NLPDDPStrategy, NLPTrainer
    from neuronx_distributed_training.utils.exp_manager import exp_manager
    from omegaconf.omegaconf import OmegaConf
    from pytorch_lightning.callbacks.timer import Timer

    logging.info(OmegaConf.to_yaml(cfg))
    elastic = TorchElasticEnvironment() if os.environ.get("TORCHELASTIC_RUN_ID") is not None else None
    strategy = NLPDDPStrategy(
        find_unused_parameters=False,
        cluster_environment=elastic,
        checkpoint_io=NLPCheckpointIO(cfg.exp_manager.get("async_checkpointing", False), cfg.model.get("weight_init_only", False)),
        restore_path=cfg.exp_manager.resume_from_checkpoint,
    )
    trainer = NLPTrainer(plugins=[], strategy=strategy, **cfg.trainer)
    exp_manager(trainer, cfg.exp_manager)
    trainer.callbacks = [StatelessTimer(cfg.trainer.max_time) if isinstance(c, Timer) else c for c in trainer.callbacks]
    data_module = HFDataModule(cfg, trainer)
    model = HFLLamaModule(cfg, trainer)
    trainer.fit(model, datamodule=data_module, ckpt_path=cfg.exp_manager.resume_from_checkpoint)


if __name__ == "__main__":
    main()
