"""Low-rank adapters in a pipeline: what trains, what one rank gives, checkpoints from one layout to another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import neuronx_distributed as nxd_api
import pytest
import torch
import torch_xla
from neuronx_distributed.modules.lora import LoraConfig, LoraModel, get_lora_model
from neuronx_distributed.pipeline import NxDPPModel
from torch import nn

from nxd_jax.modules.lora.making import ADAPTERS
from nxd_jax.pipeline import model as pipeline_model
from tests.nxd_jax.conftest import Nxd
from tests.nxd_jax.pipeline.models import Block, Layout, Model
from tests.nxd_jax.trainer.test_model_pad import Padded
from torch_bridge.recorder import placed

ALL = ["embedding", "up", "down", "head"]


def config_of(layout: Layout, targets: Any = None, meta: bool = False, **options: Any) -> dict[str, Any]:
    """A layout's configuration, with adapters."""
    lora = LoraConfig(lora_rank=2, lora_alpha=4, target_modules=targets or ALL, **options)
    found = {**layout.config(), "lora_config": lora}
    if meta:
        found["model_init_config"] = {"sequential_move_factor": 2, "meta_device_init": True, "param_init_fn": fill}
    return found


def fill(module: nn.Module, device: Any) -> None:
    """Values for a module that was made on "meta"."""
    for p in module.parameters(recurse=False):
        with torch.no_grad():
            p.fill_(0.1)


def make(layout: Layout, config: dict[str, Any], begin: Path | None = None) -> tuple[Any, Any]:
    """Model and optimizer. begin: where the tag "start" is, which the model loads first: ZeRO-1 cuts the weights that it finds."""
    torch.manual_seed(0)
    model = nxd_api.initialize_parallel_model(config, lambda: Model(layout.layers, layout.tied, layout.skip))
    if begin is not None:
        nxd_api.load_checkpoint(str(begin), "start", model, strict=False)
    return model, nxd_api.initialize_parallel_optimizer(config, torch.optim.AdamW, model.parameters(), lr=0.01)


def train(layout: Layout, model: Any, optimizer: Any, steps: int = 3) -> list[float]:
    """Losses of some steps."""
    found = []
    for _ in range(steps):
        given = layout.local(layout.batch())
        loss = model.run_train(**({name: t.to("xla") for name, t in given.items()} if layout.pp == 1 else given))
        optimizer.step()
        optimizer.zero_grad()
        torch_xla.sync()
        found.append(float(loss.detach()))
    return found


def adapters(model: Any) -> dict[str, torch.Tensor]:
    """The adapters, as full tensors."""
    return {name: t.cpu() for name, t in model.state_dict().items()}


def start(path: Path, model: Any) -> None:
    """Write adapters that do something, for others to begin with."""
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_" in name:
                p.copy_(torch.empty(p.shape).normal_(std=0.3, generator=draw))
    nxd_api.save_checkpoint(str(path), "start", model)


@pytest.mark.thorough(keep=1)
@pytest.mark.core(keep=2)
@pytest.mark.parametrize(
    "layout",
    [
        Layout(4, 2, 4, tp=2, layers=2),
        Layout(2, 2, 4, "zbv", stages=2, layers=4),
        Layout(8, 2, 4, tp=2, zero1=True, checkpoint=True, layers=4),
        Layout(4, 4, 8, "zb_h1", skip=True, checkpoint=True, layers=4),
    ],
    ids=str,
)
def test_training(nxd: Nxd, tmp_path: Path, layout: Layout) -> None:
    """Losses and adapters are those of one rank; the base stays; adapters lie on their stage's cores and load on one rank."""
    options = {"lora_save_dir": str(tmp_path / "lora")}
    alone = Layout(1, 1, layout.microbatches, skip=layout.skip, layers=layout.layers)
    nxd(1)
    model, optimizer = make(alone, config_of(alone, **options))
    start(tmp_path, model)
    one = Layout(layout.dp, 1, layout.microbatches, skip=layout.skip)
    one_batch = {name: t.to("xla") for name, t in one.batch().items()}
    wanted = []
    for _ in range(3):
        loss = model.run_train(**one_batch)
        optimizer.step()
        optimizer.zero_grad()
        wanted.append(float(loss.detach()))
    expected = adapters(model)

    nxd(layout.ranks, tp=layout.tp, pp=layout.pp)
    model, optimizer = make(layout, config_of(layout, **options), tmp_path)
    base = {name: p.detach().clone() for name, p in model.named_parameters() if "lora_" not in name}
    torch.testing.assert_close(train(layout, model, optimizer), wanted, rtol=1e-4, atol=1e-6)
    for name, p in model.named_parameters():
        assert p.requires_grad == ("lora_" in name), name
        if "lora_" not in name:
            assert torch.equal(p.detach(), base[name]), name
    found = adapters(model)
    assert set(found) == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")
    first, last = (dict(model.named_parameters())[n] for n in names_of(model, "layers.0.", "head"))
    assert placed.place_of(first) is not None
    if layout.schedule != "zbv":
        assert placed.place_of(first) != placed.place_of(last)
    nxd_api.save_checkpoint(str(tmp_path), "end", model)

    nxd(1)
    model, _ = make(alone, config_of(alone, **options))
    nxd_api.load_checkpoint(str(tmp_path), "end", model, strict=False)
    for name, value in adapters(model).items():
        assert torch.equal(value, found[name]), name


def names_of(model: Any, *parts: str) -> list[str]:
    """The first adapter's name with each of these in it."""
    return [next(name for name, _ in model.named_parameters() if part in name and "lora_A" in name) for part in parts]


def test_a_stage_without_adapters(nxd: Nxd) -> None:
    """Stages before the first adapter have nothing to train; the loss falls all the same."""
    layout = Layout(2, 2, 4)
    nxd(2, pp=2)
    model, optimizer = make(layout, config_of(layout, ["layers.7.up", "head"]))
    losses = train(layout, model, optimizer, 4)
    assert losses[-1] < losses[0]


def test_meta_device_init(nxd: Nxd) -> None:
    """A model made on "meta" gets its values, and adapters beside them."""
    layout = Layout(2, 2, 4)
    nxd(2, pp=2)
    model, optimizer = make(layout, config_of(layout, meta=True))
    assert all(not p.is_meta for p in model.parameters())
    assert model.get_parameter(names_of(model, "head")[0]).requires_grad
    train(layout, model, optimizer, 1)


def test_a_lora_model_given_to_the_pipeline(nxd: Nxd) -> None:
    """A script that puts adapters in itself, before NxDPPModel."""
    layout = Layout(2, 2, 2)
    nxd(2, pp=2)
    torch.manual_seed(0)
    lora = get_lora_model(Model(), LoraConfig(lora_rank=2, target_modules=ALL))
    model = NxDPPModel(
        lora,
        transformer_layer_cls=Block,
        num_microbatches=2,
        output_loss_value_spec=(True, False),
        input_names=["ids", "labels"],
        pipeline_cuts=["layers.3"],
    )
    model.run_train(**layout.batch())
    trained = {name for name, p in model.local_named_parameters() if p.grad is not None}
    assert trained
    assert all("lora_" in name for name in trained)
    assert all("lora_" in name for name in model.local_state_dict())


def test_adapted_layers_are_kept_whole() -> None:
    """The pipeline knows them by name: it is below LoRA."""
    assert set(pipeline_model._ADAPTED_LAYERS) == {cls.__name__ for cls in ADAPTERS.values()}


def test_adapters_after_the_cut(nxd: Nxd) -> None:
    """Stages are made of modules: adapters come before."""
    layout = Layout(2, 2, 2)
    nxd(2, pp=2)
    model = nxd_api.initialize_parallel_model(layout.config(), Model)
    config = LoraConfig(lora_rank=2, target_modules=ALL)
    for given in (model, model.pipeline):
        with pytest.raises(ValueError, match="give NxDPPModel the LoraModel, or neuronx_distributed_config a lora_config"):
            get_lora_model(given, config)
    assert not isinstance(model.module, LoraModel)


@pytest.mark.parametrize(
    ("option", "value"),
    [("lora_config", LoraConfig(target_modules=ALL)), ("activation_checkpoint_config", Block), ("pad_model", True)],
)
def test_a_pipeline_from_model_fn(nxd: Nxd, option: str, value: Any) -> None:
    """What changes the model cannot be done to a pipeline."""
    nxd(2, pp=2)
    layout = Layout(2, 2, 2)

    def model_fn() -> NxDPPModel:
        return NxDPPModel(Model(), **{**layout.config()["pipeline_config"], "use_model_wrapper": True})

    nxd_api.initialize_parallel_model(layout.config(), model_fn)
    with pytest.raises(ValueError, match=f"{option} changes the model before it is cut into stages, but model_fn returns an NxDPPModel"):
        nxd_api.initialize_parallel_model({**layout.config(), option: value}, model_fn)


def test_adapters_in_manual_mode(nxd: Nxd) -> None:
    """A list of layers gets none."""
    nxd(2, pp=2)
    config = config_of(Layout(2, 2, 2))
    config["pipeline_config"] = {"manual_pp_partition": True, "num_microbatches": 2}
    with pytest.raises(NotImplementedError, match="lora_config with manual_pp_partition=True is not supported"):
        nxd_api.initialize_parallel_model(config, lambda: [Block() for _ in range(4)])


TP_PP = Layout(4, 2, 4, tp=2, layers=4)


def loss_of(layout: Layout, model: Any) -> float:
    """The loss without training, of the same batch in every layout."""
    batch = layout.batch()
    if layout.pp > 1:
        return float(model.run_eval(**batch))
    model.eval()
    return float(model.run_eval(**{name: t.to("xla") for name, t in batch.items()})[0])


def trained(config: dict[str, Any]) -> tuple[Any, float]:
    """A pipeline with adapters that do something, and its loss."""
    model, optimizer = make(TP_PP, config)
    train(TP_PP, model, optimizer, 2)
    return model, loss_of(TP_PP, model)


def test_adapters_in_files(nxd: Nxd, tmp_path: Path) -> None:
    """What save_lora writes of a pipeline loads on one rank, and in a pipeline, by lora_config and by load_lora."""
    nxd(4, tp=2, pp=2)
    options = {"lora_save_dir": str(tmp_path / "lora"), "lora_load_tag": "a"}
    model, wanted = trained(config_of(TP_PP, **options))
    model.save_lora(adapter_tag="a")
    expected = adapters(model)
    for layout in (Layout(1, 1, 4, layers=4), Layout(4, 4, 4, layers=4)):
        nxd(layout.ranks, pp=layout.pp)
        model, _ = make(layout, config_of(layout, load_lora_from_ckpt=True, **options))
        assert loss_of(layout, model) == pytest.approx(wanted, rel=1e-5)
        for name, value in adapters(model).items():
            assert torch.equal(value, expected[name].cpu()), name
        fresh, _ = make(layout, config_of(layout, **options))
        assert loss_of(layout, fresh) != pytest.approx(wanted, rel=1e-3)
        fresh.load_lora()
        assert loss_of(layout, fresh) == pytest.approx(wanted, rel=1e-5)


def test_merging(nxd: Nxd, tmp_path: Path) -> None:
    """Merged stages compute the same; training goes on with adapters; after merge_and_unload there are none."""
    nxd(4, tp=2, pp=2)
    model, wanted = trained(config_of(TP_PP, lora_save_dir=str(tmp_path)))
    weight = model.get_parameter(next(name for name, _ in model.named_parameters() if "layers.0.up" in name and "lora_" not in name))
    base = weight.detach().clone()
    model.merge_lora()
    assert model.is_lora_merged
    assert not torch.equal(weight.detach(), base)
    assert loss_of(TP_PP, model) == pytest.approx(wanted, rel=1e-5)
    model.unmerge_lora()
    assert torch.equal(weight.detach(), base)
    assert loss_of(TP_PP, model) == pytest.approx(wanted, rel=1e-5)
    model.merge_and_unload()
    assert not any("lora_" in name for name, _ in model.named_parameters())
    assert loss_of(TP_PP, model) == pytest.approx(wanted, rel=1e-5)


@pytest.mark.core(keep=0)
@pytest.mark.parametrize("kind", ["merge_lora", "save_lora_base"])
def test_checkpoints_with_the_base(nxd: Nxd, tmp_path: Path, kind: str) -> None:
    """save_checkpoint of a pipeline: merged weights are a plain model's; the base with adapters loads in another layout."""
    nxd(4, tp=2, pp=2)
    options = {"lora_save_dir": str(tmp_path), kind: True} | ({"save_lora_base": True} if kind == "merge_lora" else {})
    model, wanted = trained(config_of(TP_PP, **options))
    nxd_api.save_checkpoint(str(tmp_path), "a", model)
    alone = Layout(1, 1, 4, layers=4)
    nxd(1)
    torch.manual_seed(7)
    config = alone.config() if kind == "merge_lora" else config_of(alone, **options)
    model = nxd_api.initialize_parallel_model(config, lambda: Model(4))
    nxd_api.load_checkpoint(str(tmp_path), "a", model)
    assert loss_of(alone, model) == pytest.approx(wanted, rel=1e-5)


def test_a_resumed_run_lies_on_its_stage(nxd: Nxd, tmp_path: Path) -> None:
    """Adapters and their optimizer's state, ZeRO-1's too, are read to the cores of their stage."""
    layout = Layout(4, 2, 4, zero1=True, layers=4)
    nxd(4, pp=2)
    config = config_of(layout, lora_save_dir=str(tmp_path))
    model, optimizer = make(layout, config)
    train(layout, model, optimizer, 1)
    nxd_api.save_checkpoint(str(tmp_path), "a", model, optimizer)
    wanted = train(layout, model, optimizer, 2)

    model, optimizer = make(layout, config)
    nxd_api.load_checkpoint(str(tmp_path), "a", model, optimizer)
    zero = optimizer.optimizer
    for name, p in model.named_parameters():
        if "lora_" not in name:
            continue
        home = placed.place_of(p)
        assert home is not None, name
        assert placed.place_of(zero.shard_of[p]) == home, name
        state = zero.base_optimizer.state[zero.shard_of[p]]
        assert {placed.place_of(state[key]) for key in ("exp_avg", "exp_avg_sq")} == {home}, name
    assert train(layout, model, optimizer, 2) == wanted


def test_what_model_fn_returns(nxd: Nxd) -> None:
    """Something else than a model; a model to pad that has no weights yet."""
    nxd(4, tp=2, pp=2)
    config = TP_PP.config()
    with pytest.raises(
        TypeError, match=r"model_fn must return a torch.nn.Module, or a list of them with manual_pp_partition=True, got int"
    ):
        nxd_api.initialize_parallel_model(config, lambda: 3)

    options = {"meta_device_init": True, "param_init_fn": fill, "sequential_move_factor": 2}
    nxd(8, tp=4, pp=2)
    config = {**TP_PP.config(), "tensor_parallel_size": 4, "pad_model": True, "model_init_config": options}
    with pytest.raises(
        NotImplementedError, match="pad_model=True with meta_device_init=True and pipeline_parallel_size > 1 is not supported"
    ):
        nxd_api.initialize_parallel_model(config, Padded)
