"""`BaseModelModule`: what a step does, logs and refuses, on any layout of ranks."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from pytorch_lightning.loggers.logger import Logger
from torch import nn

from nxd_jax.training import environment
from nxd_jax.training.lightning_modules.model.micro_batches import MicroBatches
from nxd_jax.training.lightning_modules.nlp_overrides import NLPDDPStrategy, NLPTrainer
from tests.nxd_jax.training import small
from torch_bridge import metrics
from torch_bridge.runtime import session

pytestmark = pytest.mark.usefixtures("ranks", "variables")

MIXED = ("precision.type=mixed_precision",)


def in_plain_torch() -> list[dict[str, float]]:
    """The training of `small.config()` in eager torch: one device, the whole batch in one piece."""
    from nxd_jax.parallel_layers import parallel_state
    from nxd_jax.training.seeding import seed_everything
    from nxd_jax.utils.adamw_fp32_optim_params import AdamW_FP32OptimParams
    from torch_bridge.mesh import world

    world.configure(world.World(1))
    dist.init_process_group("xla")
    parallel_state.initialize_model_parallel()
    seed_everything(1)
    made = small.Net()
    weights = {name: p.detach().cpu().clone().requires_grad_() for name, p in made.named_parameters()}
    optimizer = AdamW_FP32OptimParams(weights.values(), lr=1e-2, betas=(0.9, 0.99), weight_decay=0.01)
    found = []
    for step in range(4):
        lr = [0.0, 1e-2, 1e-2 * 2 / 3, 1e-2 / 3][step]
        optimizer.param_groups[0]["lr"] = lr
        ids = small.rows()[8 * step : 8 * step + 8]
        hidden = torch.nn.functional.embedding(ids, weights["words.weight"])
        for n in range(small.LAYERS):
            hidden = hidden + torch.relu(hidden @ weights[f"layers.{n}.up.weight"].T) @ weights[f"layers.{n}.down.weight"].T
        loss = torch.nn.functional.cross_entropy((hidden @ weights["head.weight"].T).flatten(0, 1), ids.roll(1, 1).flatten())
        optimizer.zero_grad()
        loss.backward()
        grad = float(nn.utils.clip_grad_norm_(weights.values(), 1.0))
        optimizer.step()
        param = float(torch.cat([w.detach().flatten() for w in weights.values()]).norm())
        found.append({"loss": float(loss.detach()), "grad": grad, "param": param, "lr": lr})
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    world.configure(None)
    return found


@cache
def plain() -> list[dict[str, float]]:
    return in_plain_torch()


@pytest.mark.thorough(keep=2)
@pytest.mark.core(keep=1)
@pytest.mark.parametrize("layout", small.LAYOUTS)
def test_a_training_is_that_of_eager_torch_on_one_device(layout: str) -> None:
    expected = plain()
    _, module = small.train(*small.LAYOUTS[layout])
    for step, (now, eager) in enumerate(zip(module.seen, expected, strict=True)):
        assert (now["step"], now["samples"]) == (step, 8 * (step + 1))
        for name in ("loss", "grad", "param", "lr"):
            assert now[name] == pytest.approx(eager[name], rel=1e-4), (step, name)


@pytest.mark.thorough(keep=1)
@pytest.mark.core(keep=0)
@pytest.mark.parametrize("layout", small.LAYOUTS)
def test_mixed_precision_adds_losses_and_norms_up_in_float32(layout: str) -> None:
    """(q) The original's running loss is a bfloat16 number."""
    expected = plain()
    _, module = small.train(*small.LAYOUTS[layout], *MIXED, "trainer.max_steps=2")
    for now, eager in zip(module.seen, expected, strict=False):
        assert now["loss"] == pytest.approx(eager["loss"], rel=3e-3)
        assert now["loss"] != float(torch.tensor(now["loss"]).bfloat16())
        assert now["param"] == pytest.approx(eager["param"], rel=1e-3)


def test_micro_batches_of_two_rows_give_the_same() -> None:
    expected = [s["loss"] for s in plain()[:2]]
    _, module = small.train("data.micro_batch_size=4", "trainer.max_steps=2")
    assert [s["loss"] for s in module.seen] == pytest.approx(expected, rel=1e-5)


def test_a_clip_of_0_clips_nothing() -> None:
    """As Lightning has it. (q) The original makes all gradients 0."""
    found = []
    for clip in ("0.0", "null"):
        _, module = small.train(f"trainer.gradient_clip_val={clip}", "trainer.max_steps=2")
        found.append([(s["loss"], s["param"]) for s in module.seen])
    assert found[0] == found[1] and found[0][0][1] != found[0][1][1]


def test_what_is_logged_and_when(caplog: pytest.LogCaptureFixture) -> None:
    trainer, module = small.train("trainer.log_every_n_steps=2", "trainer.max_steps=3")
    assert [s["step"] for s in module.seen] == [0, 2]
    found = trainer.callback_metrics
    assert {"reduced_train_loss", "lr", "parameter_norm", "gradient_norm", "throughput", "throughput_peak", "tokens_per_second"} <= set(
        found
    )
    assert (float(found["global_step"]), float(found["consumed_samples"])) == (2.0, 24.0)
    assert float(found["tokens_per_second"]) == pytest.approx(small.LENGTH * float(found["throughput"]), rel=1e-4)


class Written(Logger):
    """Keeps what a Trainer writes, by step."""

    name, version = "written", 0

    def __init__(self) -> None:
        self.rows: dict[int, dict[str, float]] = {}

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        assert step is not None
        self.rows.setdefault(step, {}).update(metrics)

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Nothing."""


def test_what_is_written_is_of_its_step() -> None:
    """(q) With log_every_n_steps=3 the original writes the loss of step 0 as that of step 2. What the host knows is new after every step."""
    seen: list[tuple[float, float]] = []

    class Module(small.Module):
        def log_metrics(self, log_fn: Any, throughput: Any, **numbers: Any) -> None:  # type: ignore[override]
            log_fn("throughput", throughput, prog_bar=True)  # with options of its own
            super().log_metrics(log_fn=log_fn, throughput=throughput, **numbers)

        def on_train_batch_end(self, *args: Any) -> None:
            super().on_train_batch_end(*args)
            found = self.trainer._results.metrics(on_step=True)["callback"]
            seen.append((float(found["global_step"]), float(found["consumed_samples"])))

    cfg = small.config("trainer.log_every_n_steps=3", "trainer.max_steps=5")
    environment.process_config(cfg)
    written = Written()
    trainer = NLPTrainer(strategy=NLPDDPStrategy(), enable_progress_bar=False, logger=written, **OmegaConf.to_container(cfg.trainer))
    module = Module(cfg, trainer)
    trainer.fit(module, datamodule=small.Data(cfg, trainer))
    assert list(written.rows) == [0, 3] == [s["step"] for s in module.seen]
    for row, logged in zip(written.rows.values(), module.seen, strict=True):
        names = {"reduced_train_loss": "loss", "lr": "lr", "gradient_norm": "grad", "parameter_norm": "param", "global_step": "step"}
        assert {name: row[name] for name in names} == pytest.approx({name: logged[short] for name, short in names.items()}, rel=1e-6)
    assert seen == [(step, 8 * (step + 1)) for step in range(5)]


def test_a_second_validation_is_of_its_own_batches() -> None:
    """(q) The original averages all validations so far."""
    found: list[float] = []

    class Module(small.Module):
        def on_validation_epoch_end(self) -> None:
            own = [float(x[0][0][0]) for x in self.validation_step_outputs]
            assert [length for _, length in self.validation_step_outputs] == [8, 8]
            super().on_validation_epoch_end()
            assert len(own) == 2
            assert float(self.trainer._results["on_validation_epoch_end.val_loss"].value) == pytest.approx(sum(own) / 2)
            found.append(sum(own) / 2)

    trainer, _ = small.train("trainer.val_check_interval=2", module=Module)
    assert len(found) == 2 and found[0] != found[1]
    assert float(trainer.callback_metrics["val_loss"]) == pytest.approx(found[1])


def test_a_test_logs_its_loss() -> None:
    """(q) The original's needs a hook that Lightning 2 does not have. The sets of both are the same here, and so is the mean over two batches."""
    cfg = small.config("trainer.limit_test_batches=2")
    environment.process_config(cfg)
    trainer = NLPTrainer(strategy=NLPDDPStrategy(), enable_progress_bar=False, **OmegaConf.to_container(cfg.trainer))
    data, module = small.Data(cfg, trainer), small.Module(cfg, trainer)
    (validated,) = trainer.validate(module, datamodule=data, verbose=False)
    (tested,) = trainer.test(module, datamodule=data, verbose=False)
    assert tested["test_loss"] == pytest.approx(validated["val_loss"], rel=1e-6) and tested["test_loss"] > 1


@pytest.mark.parametrize("devices", [1, 2])
def test_hooks_of_a_subclass_count(devices: int) -> None:
    """What they log is the mean over rows and ranks. (q) The original logs rank 0's."""

    class Module(small.Module):
        def model_fwd_calc_loss(self, batch: Any) -> Any:
            loss = super().model_fwd_calc_loss(batch)
            return 2 * loss, {"rewards": torch.arange(2.0, device=loss.device) + loss.detach()}

    first = plain()[0]["loss"]  # before ranks are laid out
    trainer, module = small.train("trainer.max_steps=1", f"trainer.devices={devices}", module=Module)
    assert module.seen[0]["loss"] == pytest.approx(2 * first, rel=1e-5)
    assert float(trainer.callback_metrics["rewards"]) == pytest.approx(
        first + 0.5, rel=1e-4
    )  # a vector, as with micro-batches of several rows


class NoInit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))


def module_without_trainer() -> Any:
    found = object.__new__(small.Module)
    nn.Module.__init__(found)
    return found


def test_a_module_that_nothing_fills_after_the_meta_device() -> None:
    with pytest.raises(
        NotImplementedError,
        match=r"NoInit has parameters that were made on the meta device.*override init_weights\(module, device\) in Module",
    ):
        module_without_trainer().init_weights(NoInit())
    linear = nn.Linear(4, 4)
    module_without_trainer().init_weights(linear)
    assert linear.bias.eq(0).all() and linear.weight.std() < 0.1


def test_a_batch_with_too_few_rows() -> None:
    class Short(small.Module):
        def get_batch_iterator(self, batch: Any) -> Any:
            return super().get_batch_iterator({name: rows[:3] for name, rows in batch.items()})

    with pytest.raises(ValueError, match=r"3 rows of input_ids, and a step needs 8 on each.*data.micro_batch_size=1"):
        small.train(module=Short)


def test_as_many_programs_for_many_micro_batches_as_for_few() -> None:
    """The number of a micro-batch is in none of them."""

    class Few(small.Module):
        def get_num_microbatches(self) -> int:
            return 4

    made = []
    for module in (Few, small.Module):  # 4 of 8, and all
        before = metrics.COUNTERS.get("UncachedCompile", 0)
        with session.opened():
            small.train(module=module)
        made.append(metrics.COUNTERS.get("UncachedCompile", 0) - before)
    assert made[1] <= made[0] + 1, made


@pytest.mark.parametrize("device", ["cpu", "xla"])
def test_micro_batches_have_memory_of_their_own(device: str) -> None:
    batch = {"ids": torch.arange(12).reshape(6, 2).to(device), "mask": torch.ones(6, 2).to(device)}
    parts = list(MicroBatches.cut(batch, 2, torch.device("xla:0")))
    assert len(parts) == 3 and [part["ids"].tolist() for part in parts] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8, 9], [10, 11]]]
    assert all(part["mask"].device.type == "xla" and not part["ids"].storage_offset() for part in parts)
    parts[0]["ids"].zero_()
    assert batch["ids"].flatten().tolist() == list(range(12)) and parts[1]["ids"].flatten().tolist() == [4, 5, 6, 7]


def test_build_model_must_be_there() -> None:
    from nxd_jax.training.lightning_modules.model.base import BaseModelModule

    with pytest.raises(NotImplementedError, match=r"BaseModelModule must override build_model\(\)"):
        small.train(module=BaseModelModule)


def test_a_schedule_needs_the_number_of_steps() -> None:
    with pytest.raises(Exception, match=r"trainer.max_steps=-1: model.optim.sched needs the number of steps"):
        small.train("trainer.max_steps=-1", "trainer.max_epochs=1")


def test_some_schedules_take_a_step_each_epoch() -> None:
    """As in NeMo: eight steps are an epoch of these rows."""

    class Halving(small.Module):
        def __init__(self, cfg: Any, trainer: Any) -> None:
            cfg.model.optim.sched = {"name": "ExponentialLR", "gamma": 0.5}
            super().__init__(cfg, trainer)

    _, module = small.train("trainer.max_steps=18", module=Halving)
    assert [step["lr"] for step in module.seen] == pytest.approx([1e-2] * 8 + [5e-3] * 8 + [2.5e-3] * 2)


def test_master_weights_without_zero1_are_said_to_be_off(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "nxd_jax"):
        _, module = small.train(*MIXED, "distributed_strategy.zero1=False", "trainer.max_steps=1")
    assert "distributed_strategy.zero1 is False" in caplog.text
    assert module.nxd_config["mixed_precision_config"]["use_master_weights"] is False
