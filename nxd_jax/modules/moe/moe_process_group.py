"""`neuronx_distributed.modules.moe.moe_process_group`: groups of experts for inference, where prefill and decode divide the same ranks differently.

"cte" (context encoding) is prefill, "tkg" (token generation) is decode. Training uses the tensor- and expert-parallel groups of `parallel_state`.
"""

from __future__ import annotations

from typing import Any

from nxd_jax.tensor_parallel import parallel_groups

_PHASES = {True: "cte", False: "tkg"}
_HOW = "moe_process_group.init_tensor_expert_parallel_moe_process_groups(tkg_tp_degree, tkg_ep_degree, cte_tp_degree, cte_ep_degree)"


def init_tensor_expert_parallel_moe_process_groups(tkg_tp_degree: int, tkg_ep_degree: int, cte_tp_degree: int, cte_ep_degree: int) -> None:
    """Divide the ranks twice: into tensor- and expert-parallel groups for decode, and for prefill.

    Tensor-parallel groups are neighbours, expert-parallel ones every tp-th rank. Sizes above the world size count as the world size. Which cores make a
    logical one (LNC) does not matter here. Groups of the same sizes stay, so every layer may ask for them.

    Raises RuntimeError for sizes that do not divide the world, and if there are groups of other sizes.
    """
    _init("tkg", tkg_tp_degree, tkg_ep_degree)
    _init("cte", cte_tp_degree, cte_ep_degree)


def get_moe_tp_ep_group(prefill: bool = True) -> Any:
    """The tensor-parallel group of experts of this rank, for prefill or decode. Raises RuntimeError before it is set up."""
    return _group(prefill, "tp")


def get_moe_ep_group(prefill: bool = True) -> Any:
    """The expert-parallel group of this rank, for prefill or decode. Raises RuntimeError before it is set up."""
    return _group(prefill, "ep")


def destroy_moe_model_parallel() -> None:
    """Forget the groups, so that others can be set up."""
    for phase in _PHASES.values():
        for kind in ("tp", "ep"):
            parallel_groups.forget(_name(phase, kind))


def _name(phase: str, kind: str) -> str:
    return f"moe_{phase}_{kind}"


def _init(phase: str, tp: int, ep: int) -> None:
    wanted = parallel_groups.plan(tensor=tp, expert=ep).lists
    for kind in ("tp", "ep"):
        name = _name(phase, kind)
        if not parallel_groups.is_defined(name):
            parallel_groups.define(name, wanted[kind])
        elif (there := parallel_groups.current().groups[name]._mesh) != wanted[kind]:
            raise RuntimeError(
                f"the {kind} groups of experts for {phase} have {len(there[0])} ranks, {len(wanted[kind][0])} were asked for: all layers use the same "
                "groups; call moe_process_group.destroy_moe_model_parallel() before making others"
            )


def _group(prefill: bool, kind: str) -> Any:
    name = _name(_PHASES[bool(prefill)], kind)
    if not parallel_groups.is_defined(name):
        raise RuntimeError(f"the {kind} groups of experts for {_PHASES[bool(prefill)]} are not initialized: call {_HOW} first")
    return parallel_groups.current().groups[name]
