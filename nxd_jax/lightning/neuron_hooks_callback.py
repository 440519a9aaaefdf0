"""`neuronx_distributed.lightning.NeuronHooksCallback`: files and curves of what goes through chosen layers, forward and backward."""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from pytorch_lightning.callbacks import Callback
from torch import nn
from torch.utils.hooks import RemovableHandle

from nxd_jax.lightning import _hook_settings
from nxd_jax.tensor_parallel import parallel_groups, rank_states
from torch_bridge import nested
from torch_bridge.mesh import places, rank_numbers, world
from torch_bridge.recorder import placed
from torch_bridge.recorder.tensor import XLATensor
from torch_bridge.runtime import steps
from torch_bridge.torch_xla.core import xla_model as xm

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule, Trainer

logger = logging.getLogger("nxd_jax")


class NeuronHooksCallback(Callback):
    """`neuronx_distributed.lightning.NeuronHooksCallback`: writes inputs and outputs of layers, and the gradients of both, during training.

    cfg: an object with attributes, or a mapping, with these settings. Without `hooks` nothing happens; the others are off where they are left out.

    - hooks: whether to do anything.
    - target_layers: names of modules of `pl_module.model`, in a list or separated by commas.
    - hooks_interval: write at every so many steps (`global_step`), by default at all.
    - enable_activation_dumps, enable_grad_dumps: what is written.
    - dump_only_norms: L2 norms (floats, computed on the device in float32 or better) in place of tensors.
    - dump_only_master_rank: rank 0's only, in place of every rank's; of layers of later pipeline stages, the first rank's that has them.
    - enable_tb_logging_master_rank_activation_norms, enable_tb_logging_master_rank_grad_norms: log the norms as well, as `activation_input_norm`,
      `activation_output_norm`, `grad_input_norm` and `grad_output_norm`; with several layers, as `activation_input_norm/<layer>` and so on. Only
      together with both dump_only_ settings. (At the steps between, Lightning logs the last value again.)
    - master_print_model_layers: print the names of all modules when training starts.

    Files are written by `torch.save` when the step has run, as `<hooks_dump_base_directory>/<layer>/global_step_<n>/<rank>_<what>_<raw or norm>.pt`.
    `<what>` is layer_input, layer_output, grad_input or grad_output, `<rank>` as in `parallel_state.get_rank_info_str`. Of several tensors the first
    is meant, of several batches in a step the last. A process that hosts several ranks writes each one's own. `hooks_dump_base_directory` is
    `./hooks_outputs/<SLURM_JOB_ID, or local>/hooks_dumps` and can be set.

    Steps that are written are programs of their own, compiled next to those of other steps. Validation writes nothing. Raises ValueError for
    settings without meaning and, when training starts, for layers that the model does not have.
    """

    def __init__(self, cfg: Any):
        super().__init__()
        self.settings = _hook_settings.read(cfg)
        self.hooks_dump_base_directory = f"./hooks_outputs/{os.environ.get('SLURM_JOB_ID') or 'local'}/hooks_dumps"
        self._logged = _logged(self.settings)
        self._handles: list[RemovableHandle] = []
        self._norms: dict[str, float] = {}
        self._unseen: set[tuple[str, str]] = set()

    # -- what the Trainer calls -----------------------------------------------------------------------

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Put hooks on the layers."""
        model = pl_module.model if isinstance(getattr(pl_module, "model", None), nn.Module) else pl_module
        modules = dict(model.named_modules())
        if self.settings.master_print_model_layers:
            xm.master_print("\n".join(["Layers of the model:", *filter(None, modules)]))
        _check_names(self.settings.target_layers, modules)
        for name in self.settings.target_layers:
            if self.settings.enable_activation_dumps:
                self._handles.append(modules[name].register_forward_hook(self._forward_hook(name, trainer), with_kwargs=True))
                self._unseen.add((name, "activations"))
            if self.settings.enable_grad_dumps:
                self._handles.append(modules[name].register_full_backward_hook(self._backward_hook(name, trainer)))
                self._unseen.add((name, "gradients"))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log the norms that have become known."""
        known, self._norms = self._norms, {}
        for name, value in known.items():
            pl_module.log(name, value, on_step=True, on_epoch=False, logger=True)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take the hooks off; warn about those that saw nothing."""
        for layer, what in sorted(self._unseen):
            logger.warning("NeuronHooksCallback saw no %s of the layer %r: training does not call it, or not with tensors", what, layer)
        self._take_off()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Take the hooks off."""
        self._take_off()

    def _take_off(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._unseen.clear()

    # -- hooks ----------------------------------------------------------------------------------------

    def _forward_hook(self, layer: str, trainer: Trainer) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if self._is_due(trainer):
                self._keep(trainer.global_step, layer, "activations", {"layer_input": (args, kwargs), "layer_output": output})

        return hook

    def _backward_hook(self, layer: str, trainer: Trainer) -> Callable[..., None]:
        def hook(module: nn.Module, grad_input: Any, grad_output: Any) -> None:
            if self._is_due(trainer):
                self._keep(trainer.global_step, layer, "gradients", {"grad_input": grad_input, "grad_output": grad_output})

        return hook

    def _is_due(self, trainer: Trainer) -> bool:
        return bool(trainer.training) and trainer.global_step % self.settings.hooks_interval == 0

    def _keep(self, step: int, layer: str, what: str, found: Mapping[str, Any]) -> None:
        """Have the first tensor of each written: now, or if it is on xla at the end of the step, when it has a value."""
        kept = {name: self._reduced(t) for name, data in found.items() if (t := _first_tensor(data)) is not None}
        if not kept:
            return
        self._unseen.discard((layer, what))
        if any(t.device.type == "xla" for t in kept.values()):
            steps.add_closure(self._write, (step, layer, kept))
        else:
            self._write(step, layer, kept)

    @torch.no_grad()
    def _reduced(self, t: torch.Tensor) -> torch.Tensor:
        """A tensor as it is now, or its norm."""
        if not self.settings.dump_only_norms:
            return t.detach().clone()
        return torch.linalg.vector_norm(t.detach().to(torch.promote_types(t.dtype, torch.float32)))

    # -- files and curves -----------------------------------------------------------------------------

    def _write(self, step: int, layer: str, kept: Mapping[str, torch.Tensor]) -> None:
        having = _ranks_with(next(iter(kept.values())))
        wanted = [r for r in having.hosted if r == min(having.order) or not self.settings.dump_only_master_rank]
        if not wanted:
            return
        folder = Path(self.hooks_dump_base_directory) / layer / f"global_step_{step}"
        folder.mkdir(parents=True, exist_ok=True)
        for name, t in kept.items():
            for rank, own in zip(wanted, rank_states.values(t, wanted), strict=True):
                if self.settings.dump_only_norms:
                    torch.save(own.item(), folder / f"{_rank_info(rank)}_{name}_norm.pt")
                    self._note(name, layer, own.item())
                else:
                    torch.save(own, folder / f"{_rank_info(rank)}_{name}_raw.pt")

    def _note(self, name: str, layer: str, norm: float) -> None:
        """Keep a norm for the next `on_train_batch_end`, if it is to be logged."""
        if name in self._logged:
            alone = len(self.settings.target_layers) == 1
            self._norms[self._logged[name] if alone else f"{self._logged[name]}/{layer}"] = norm


def _logged(settings: _hook_settings.HookSettings) -> dict[str, str]:
    """What is logged, and as what."""
    found: dict[str, str] = {}
    if settings.enable_tb_logging_master_rank_activation_norms:
        found.update(layer_input="activation_input_norm", layer_output="activation_output_norm")
    if settings.enable_tb_logging_master_rank_grad_norms:
        found.update(grad_input="grad_input_norm", grad_output="grad_output_norm")
    if found and not (settings.dump_only_master_rank and settings.dump_only_norms):
        logger.warning(
            "NeuronHooksCallback logs norms only with dump_only_master_rank=True and dump_only_norms=True, as in NxD: it will log none"
        )
        return {}
    return found


def _check_names(layers: Sequence[str], modules: Mapping[str, nn.Module]) -> None:
    unknown = [name for name in layers if name not in modules]
    if unknown:
        close = sorted({c for name in unknown for c in difflib.get_close_matches(name, modules, n=3)})
        some = close or [*filter(None, modules)][:5]
        raise ValueError(
            f"NeuronHooksCallback: the model has no layer {', '.join(map(repr, unknown))} (target_layers). It has {', '.join(map(repr, some))}, ...; "
            "master_print_model_layers=True prints all"
        )


def _first_tensor(data: Any) -> torch.Tensor | None:
    """The first tensor in what a module takes or returns."""
    return next(iter(nested.collect(data, lambda x: isinstance(x, torch.Tensor))), None)


def _ranks_with(t: torch.Tensor) -> world.World:
    """The ranks that have a tensor: those of its pipeline stage, or all."""
    home = placed.place_of(t) if isinstance(t, XLATensor) else None
    return (None if home is None else places.ranks(home.mesh)) or world.current()


def _rank_info(rank: int) -> str:
    """`parallel_state.get_rank_info_str` of one hosted rank."""
    if not parallel_groups.initialized():
        return f"rank_{rank}"
    place = world.current().hosted.index(rank)
    numbers = (
        parallel_groups.rank("pp"),
        parallel_groups.rank("tp"),
        parallel_groups.rank("dp"),
    )
    return "rank_{}_pp{}_tp{}_dp{}".format(rank, *(rank_numbers.own(n, place) for n in numbers))
