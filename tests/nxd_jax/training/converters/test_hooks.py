"""Subclasses of `CheckpointConverterBase`, as users write them: the original's for Mixtral, other names, other ways to load and to share out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from neuronx_distributed.scripts.checkpoint_converter import CheckpointConverterBase

from nxd_jax.training.converters.base import CheckpointConverterNxDTMixtral
from tests.nxd_jax.training.converters import jobs

MHA = {"num_key_value_heads": 8}
KINDS = (("gate_proj", "w1"), ("down_proj", "w2"), ("up_proj", "w3"))


class Stacks(CheckpointConverterBase):
    """Stacks experts as the original's script for Mixtral does: as Hugging Face has them, which is not as modules do."""

    gate_up_proj_partition_dim = 2
    down_proj_partition_dim = 1
    moe = "mlp.moe"

    def pre_process_full_state_before_tp_conversion(self, state_dict: Any, args: Any) -> Any:
        config = json.loads(Path(args.config).read_text())
        for n in range(config["num_hidden_layers"]):
            theirs, ours = f"model.layers.{n}.block_sparse_moe", f"model.layers.{n}.{self.moe}"
            state_dict[f"{ours}.router.linear_router.weight"] = state_dict.pop(f"{theirs}.gate.weight")
            for name, w in KINDS:
                rows = [state_dict.pop(f"{theirs}.experts.{j}.{w}.weight") for j in range(config["num_local_experts"])]
                state_dict[f"{ours}.expert_mlps.mlp_op.{name}.weight"] = torch.stack(rows)
        return state_dict

    def post_process_full_state_after_tp_conversion(self, state_dict: Any, args: Any) -> Any:
        config = json.loads(Path(args.config).read_text())
        for n in range(config["num_hidden_layers"]):
            theirs, ours = f"model.layers.{n}.block_sparse_moe", f"model.layers.{n}.{self.moe}"
            state_dict[f"{theirs}.gate.weight"] = state_dict.pop(f"{ours}.router.linear_router.weight")
            for name, w in KINDS:
                for j, row in enumerate(torch.unbind(state_dict.pop(f"{ours}.expert_mlps.mlp_op.{name}.weight"))):
                    state_dict[f"{theirs}.experts.{j}.{w}.weight"] = row
        return state_dict


class StacksForHf(Stacks):
    moe = "mlp"


@pytest.mark.parametrize(("kind", "style"), [(Stacks, "megatron"), (StacksForHf, "hf")])
def test_the_originals_script_for_mixtral(kind: Any, style: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Files as the model holds them, whatever the hook gives, with a warning; and back."""
    hub = jobs.hub(tmp_path / "hub", **jobs.EXPERTS, **MHA)
    flags = f"--tp_size 2 --pp_size 2 --ep_size 2 --model_style {style} --config {hub}/config.json"
    hooked = jobs.into(hub, tmp_path / "hooked", flags, kind())
    assert "gate_proj.weight" in caplog.text and "transposed, as the model holds experts the other way round" in caplog.text
    plain = jobs.into(hub, tmp_path / "plain", flags, CheckpointConverterNxDTMixtral())
    for e in range(2):
        for t in range(2):
            for p in range(2):
                jobs.same(jobs.rank(hooked, t, p, e, experts=True), jobs.rank(plain, t, p, e, experts=True))
    back = jobs.back(hooked, tmp_path / "back", f"--model_style {style} --config {hub}/config.json", kind())
    jobs.same(jobs.weights(back), jobs.weights(hub))


class Adds(CheckpointConverterBase):
    """A model with a weight and a gated module of its own, and with names of its own for Hugging Face."""

    def load_full_state(self, args: Any) -> Any:
        found = torch.load(args.input_dir)
        return {name.removeprefix("wrapped."): t for name, t in found["deep"]["weights"].items()}

    def pre_process_full_state_before_tp_conversion(self, state_dict: Any, args: Any) -> Any:
        state_dict["model.layers.1.extra.gate_proj.weight"] = torch.arange(32.0).reshape(8, 4)
        state_dict["model.layers.1.extra.up_proj.weight"] = -torch.arange(32.0).reshape(8, 4)
        state_dict["model.layers.1.extra.scale"] = torch.tensor([3.0])
        state_dict["model.layers.1.extra.wide.weight"] = torch.arange(8.0).reshape(2, 4)
        return state_dict

    def post_process_full_state_after_tp_conversion(self, state_dict: Any, args: Any) -> Any:
        assert args.tp_size == 2
        return {f"theirs.{name}": t for name, t in state_dict.items()}

    def get_partition_dim(self, name: str) -> int:
        return 1 if "wide" in name else super().get_partition_dim(name)


def test_names_of_ones_own(tmp_path: Path) -> None:
    hub = jobs.hub(tmp_path / "hub", **MHA)
    torch.save({"deep": {"weights": {f"wrapped.{k}": v for k, v in jobs.weights(hub).items()}}}, tmp_path / "odd.pt")
    nxdt = jobs.into(tmp_path / "odd.pt", tmp_path / "nxdt", f"--tp_size 2 --pp_size 2 --config {hub}/config.json", Adds())
    found = jobs.rank(nxdt, 1, 0)
    want = torch.cat([torch.arange(32.0).reshape(8, 4)[4:], -torch.arange(32.0).reshape(8, 4)[4:]])
    assert torch.equal(found["model.layers.1.extra.gate_up_proj.weight"], want)
    assert torch.equal(found["model.layers.1.extra.wide.weight"], torch.tensor([[2.0, 3.0], [6.0, 7.0]]))
    assert torch.equal(found["model.layers.1.extra.scale"], torch.tensor([3.0]))
    back = jobs.weights(jobs.back(nxdt, tmp_path / "back", f"--config {hub}/config.json", Adds()))
    assert torch.equal(back.pop("theirs.model.layers.1.extra.gate_proj.weight"), torch.arange(32.0).reshape(8, 4))
    extra = [name for name in back if "extra" in name]
    assert len(extra) == 3
    jobs.same({k.removeprefix("theirs."): v for k, v in back.items() if k not in extra}, jobs.weights(hub))


def test_what_a_hook_cannot_do(tmp_path: Path) -> None:
    class Old(CheckpointConverterBase):
        def merge_tp_checkpoints(self, args: Any) -> Any: ...

        def save_full(self, args: Any, full_state: Any) -> None: ...

    with pytest.raises(
        NotImplementedError, match="Old overrides merge_tp_checkpoints, save_full, which nothing calls here: a subclass may override"
    ):
        jobs.into(tmp_path, tmp_path, "", Old())

    class Nowhere(CheckpointConverterBase):
        def pre_process_full_state_before_tp_conversion(self, state_dict: Any, args: Any) -> Any:
            return state_dict | {"vision.weight": torch.zeros(2)}

    hub = jobs.hub(tmp_path / "hub", **MHA)
    with pytest.raises(ValueError, match="vision.weight is in no layer, and which of 2 pipeline stages has it is not known"):
        jobs.into(hub, tmp_path / "out", "--pp_size 2", Nowhere())
    jobs.into(hub, tmp_path / "out", "", Nowhere())

    class Odd(CheckpointConverterBase):
        def pre_process_full_state_before_tp_conversion(self, state_dict: Any, args: Any) -> Any:
            return state_dict | {f"model.layers.0.odd.{k}_proj.weight": torch.zeros(2, 2) for k in ("gate", "up")}

        def get_partition_dim(self, name: str) -> int:
            raise AssertionError(name)

    with pytest.raises(ValueError, match="get_partition_dim must say along which dim ranks share out gate and up projections"):
        jobs.into(hub, tmp_path / "odd", "", Odd())


def test_a_hook_that_loses_a_tensor(tmp_path: Path) -> None:
    class Loses(CheckpointConverterBase):
        def pre_process_full_state_before_tp_conversion(self, state_dict: Any, args: Any) -> Any:
            return {name: t for name, t in state_dict.items() if args.lost not in name} | {"model.layers.0.extra": torch.zeros(1)}

    hub = jobs.hub(tmp_path / "hub", **MHA)
    for lost in ("layers.1.mlp.up_proj", "layers.1.mlp.", "layers.1.self_attn.k_proj"):
        args = Loses().get_arg_parser().parse_args(f"--convert_from_full_state --input_dir {hub} --output_dir {tmp_path}/out".split())
        args.lost = lost
        with pytest.raises(ValueError, match=f"missing: .*model.{lost}"):
            Loses().run(args)


def test_tied_embeddings(tmp_path: Path) -> None:
    class Keeps(CheckpointConverterBase):
        def pre_process_full_state_before_tp_conversion(self, state_dict: Any, args: Any) -> Any:
            return state_dict | {"lm_head.weight": state_dict["model.embed_tokens.weight"]}

    hub = jobs.hub(tmp_path / "hub", **MHA, tie_word_embeddings=True)
    nxdt = jobs.into(hub, tmp_path / "nxdt", "--tp_size 2 --pp_size 2", Keeps())
    plain = jobs.into(hub, tmp_path / "plain", "--tp_size 2 --pp_size 2")
    jobs.same(jobs.rank(nxdt, 1, 1), jobs.rank(plain, 1, 1))


def test_flags_of_ones_own(tmp_path: Path) -> None:
    class More(CheckpointConverterBase):
        def get_arg_parser(self) -> Any:
            found = super().get_arg_parser()
            found.add_argument("--mine", type=int)
            return found

    assert More().get_arg_parser().parse_args(["--output_dir", "x", "--mine", "3"]).mine == 3
