"""Small models of transformers, and the same with parallel layers: losses and every gradient side by side."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch_xla.core.xla_model as xm
import transformers
from torch import nn

from nxd_jax.parallel_layers import parallel_state
from nxd_jax.tensor_parallel import grads
from nxd_jax.training.models.hf_models import hf_weights
from nxd_jax.utils.batch_utils import get_batch_on_this_context_parallel_rank

VOCAB, SEQ, ROWS = 64, 16, 2
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
}


@dataclasses.dataclass(frozen=True)
class Case:
    """world, tp, cp, ep: ranks. options: attributes of the models with parallel layers. config: of the configuration."""

    world: int = 1
    tp: int = 1
    cp: int = 1
    ep: int = 1
    heads: int = 4
    kv: int = 2
    ignored: int = 0
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    config: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        said = [f"{k}={v if isinstance(v, (int, float, str)) else '..'}" for k, v in (self.options | self.config).items()]
        return f"{self.world}:tp{self.tp}-cp{self.cp}-ep{self.ep}-{self.heads}x{self.kv}-ignored{self.ignored}-{'-'.join(said)}"

    @property
    def sp(self) -> bool:
        return bool(self.options.get("sequence_parallel_enabled"))


def configuration(kind: type[Any], case: Case) -> Any:
    """A configuration of transformers."""
    sizes = {"hidden_size": 8 * case.heads, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": VOCAB}
    heads = {"num_attention_heads": case.heads, "num_key_value_heads": case.kv}
    return kind(**{**sizes, **heads, "pad_token_id": None, "max_position_embeddings": 64, "attn_implementation": "eager", **case.config})


def reference(model: type[nn.Module], config: Any) -> nn.Module:
    """The model of transformers, with biases that are not zero."""
    made = model(config)
    for name, parameter in made.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=0.1)
    return made


def ours(model: type[nn.Module], case: Case, config: Any, weights: nn.Module) -> nn.Module:
    """The model with parallel layers, with the same weights."""
    for name, value in case.options.items():
        setattr(config, name, value)
    made = model(config)
    hf_weights.load_hf_weights(made, weights.state_dict())
    return made.to("xla")


def batch(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, labels) of all data-parallel ranks; the last `ignored` labels of each row do not count."""
    ids = torch.randint(0, VOCAB, (parallel_state.get_data_parallel_size() * ROWS, SEQ))
    labels = ids.clone()
    if case.ignored:
        labels[:, -case.ignored :] = -100
    return ids, labels


def step(model: nn.Module, case: Case, ids: torch.Tensor, labels: torch.Tensor) -> float:
    """Forward and backward of each data-parallel rank's own rows, gradients reduced; returns the mean loss."""
    dp, rank = parallel_state.get_data_parallel_size(), parallel_state.get_data_parallel_rank()
    own = {name: x.to("xla")[rank * ROWS : (rank + 1) * ROWS] for name, x in (("input_ids", ids), ("labels", labels))}
    loss = model(**get_batch_on_this_context_parallel_rank(own))[0]
    loss.backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    if case.cp > 1:
        grads.allreduce_context_parallel_gradients(optimizer)
    if case.sp:
        grads.allreduce_sequence_parallel_gradients(optimizer)
    grads.average_over_data_parallel_ranks(model.parameters())
    mean = xm.all_reduce("sum", loss.detach(), 1 / dp, groups=parallel_state.get_data_parallel_group(as_list=True))
    return xm.all_reduce("sum", mean, 1 / case.cp, groups=parallel_state.get_context_model_parallel_group(as_list=True)).item()


def check_gradients(model: nn.Module, want: nn.Module, rtol: float = 1e-4) -> None:
    """Every gradient is that of transformers' model."""
    found = hf_weights.to_hf_weights(model, grads=True)
    expected = {name: p.grad for name, p in want.named_parameters()}
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        scale = grad.abs().max().item()
        torch.testing.assert_close(found[name], grad, rtol=rtol, atol=1e-6 + 1e-5 * scale, msg=lambda m, n=name: f"{n}: {m}")


def llama(case: Case) -> tuple[nn.Module, Any]:
    config = configuration(transformers.LlamaConfig, case)
    return reference(transformers.LlamaForCausalLM, config), config
