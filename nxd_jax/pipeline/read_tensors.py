"""Parameters and buffers that a model reads between its layers (`x * self.scale`): the stages that read them have them, as they have those of layers."""

from __future__ import annotations

from torch import fx, nn


class Tensors(nn.Module):
    """The parameters and buffers of another module, without its children: those that it has now, also after somebody gave it others."""

    def __init__(self, owner: nn.Module):
        super().__init__()
        self.__dict__.update({name: owner.__dict__[name] for name in ("_parameters", "_buffers", "_non_persistent_buffers_set")})


def give(partitioned: fx.GraphModule, model: nn.Module) -> None:
    """Let each stage read the tensors of the model itself that it takes as arguments now.

    partitioned: what `partition.partition_traced_model` made of the model. Constants, which the model does not own, stay arguments. A stage gets all tensors
    that one module has directly (guards of `torch_bridge.replay` want its own tables), so those that another stage reads are copies there.
    """
    for call in [node for node in partitioned.graph.nodes if node.op == "call_module"]:
        stage = partitioned.get_submodule(str(call.target))
        assert isinstance(stage, fx.GraphModule)
        inputs = [node for node in stage.graph.nodes if node.op == "placeholder"]
        owned = [_owned(arg, model) for arg in call.args]
        for node, path in zip(inputs, owned, strict=True):
            if path is not None:
                _read(stage, node, path, model)
        call.args = tuple(arg for arg, path in zip(call.args, owned, strict=True) if path is None)
        stage.recompile()
    for node in [node for node in partitioned.graph.nodes if node.op == "get_attr" and not node.users]:
        partitioned.graph.erase_node(node)
    partitioned.recompile()


def _owned(arg: object, model: nn.Module) -> str | None:
    """The name of the model's parameter or buffer that an argument is, if it is one."""
    if not isinstance(arg, fx.Node) or arg.op != "get_attr":
        return None
    path, _, name = str(arg.target).rpartition(".")
    try:
        owner = model.get_submodule(path)
    except AttributeError:
        return None
    return str(arg.target) if name in owner._parameters or name in owner._buffers else None


def _read(stage: fx.GraphModule, node: fx.Node, path: str, model: nn.Module) -> None:
    """Put a read of a tensor in the place of an argument."""
    owner, _, name = path.rpartition(".")
    child = f"tensors_of_{owner.replace('.', '_') or 'model'}"
    if child not in stage._modules:
        stage.add_module(child, Tensors(model.get_submodule(owner)))
    first = next(n for n in stage.graph.nodes if n.op != "placeholder")
    with stage.graph.inserting_before(first):
        node.replace_all_uses_with(stage.graph.get_attr(f"{child}.{name}"))
    stage.graph.erase_node(node)
