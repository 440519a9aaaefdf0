"""Parameters and buffers that a model reads between its layers (`x * self.scale`): the stages that read them have them, as they have those of layers."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any

from torch import fx, nn


class _Some(MutableMapping[str, Any]):
    """Some entries of a table of a module: the table's own."""

    def __init__(self, table: dict[str, Any]):
        self.table = table
        self.names: list[str] = []

    def __getitem__(self, name: str) -> Any:
        if name not in self.names:
            raise KeyError(name)
        return self.table[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self.table[name] = value

    def __delitem__(self, name: str) -> None:
        del self.table[name]

    def __iter__(self) -> Iterator[str]:
        return (name for name in self.names if name in self.table)

    def __len__(self) -> int:
        return len(list(iter(self)))


class Tensors(nn.Module):
    """Some parameters and buffers of another module: those that it has now, also after somebody gave it others."""

    def __init__(self, owner: nn.Module):
        super().__init__()
        self.__dict__["_parameters"] = _Some(owner._parameters)
        self.__dict__["_buffers"] = _Some(owner._buffers)

    def show(self, name: str) -> None:
        """Have one more of them."""
        table: Any = next(t for t in (self._parameters, self._buffers) if name in t.table)  # type: ignore[attr-defined]
        if name not in table.names:
            table.names.append(name)


def give(partitioned: fx.GraphModule, model: nn.Module) -> None:
    """Let each stage read the tensors of the model itself that it takes as arguments now.

    partitioned: what `partition.partition_traced_model` made of the model. Constants, which the model does not own, stay arguments.
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
    shown = stage._modules[child]
    assert isinstance(shown, Tensors)
    shown.show(name)
    first = next(n for n in stage.graph.nodes if n.op != "placeholder")
    with stage.graph.inserting_before(first):
        node.replace_all_uses_with(stage.graph.get_attr(f"{child}.{name}"))
    stage.graph.erase_node(node)
