"""The smallest Lightning job on xla: a linear layer, trained on random rows for 20 steps.

python examples/lightning_linear.py
torchrun --nproc_per_node=2 examples/lightning_linear.py
"""

from __future__ import annotations

import neuronx_distributed as nxd
import torch
import torch_xla.core.xla_model as xm
from neuronx_distributed.lightning import NeuronLTModule, NeuronXLAStrategy
from pytorch_lightning import Trainer
from torch.utils.data import DataLoader, TensorDataset


class LinearModule(NeuronLTModule):
    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = (self.model(batch[0]) - batch[0][:, :2]).square().mean()
        loss.backward()
        xm.mark_step()
        self.optimizers().step()
        self.optimizers().zero_grad()
        xm.mark_step()
        self.loss = loss.detach()
        return loss

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [self.opt_cls(self.model.parameters(), **self.opt_kwargs)]

    def on_train_batch_end(self, *args: object) -> None:
        self.log("loss", self.loss, prog_bar=True)


def main() -> None:
    torch.manual_seed(0)
    config = nxd.neuronx_distributed_config(tensor_parallel_size=1)
    model = LinearModule(
        model_fn=torch.nn.Linear,
        model_args=(32, 2),
        nxd_config=config,
        opt_cls=torch.optim.Adam,
        opt_kwargs={"lr": 1e-2},
    )
    loader = DataLoader(TensorDataset(torch.randn(512, 32)), batch_size=8)
    trainer = Trainer(strategy=NeuronXLAStrategy(nxd_config=config), max_steps=20, log_every_n_steps=1)
    trainer.fit(model=model, train_dataloaders=loader)
    if trainer.is_global_zero:
        print(f"loss {float(trainer.logged_metrics['loss']):.4f} after {trainer.global_step} steps")


if __name__ == "__main__":
    main()
