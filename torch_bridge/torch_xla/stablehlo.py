"""`torch_xla.stablehlo`: programs of `torch.export` as StableHLO, in memory."""

from __future__ import annotations

import io
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from torch_bridge.runtime import backend

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "StableHLOExportOptions",
    "StableHLOGraphModule",
    "exported_program_to_stablehlo",
    "save_as_stablehlo",
    "save_torch_model_as_stablehlo",
]


@dataclass
class StableHLOExportOptions:
    """`stablehlo.StableHLOExportOptions`. The tracing arguments take the place of the program's example inputs; the others are accepted."""

    include_human_readable_text: bool = True
    override_tracing_arguments: tuple[Any, ...] | None = None
    override_tracing_kwargs: Mapping[str, Any] | None = None
    save_weights: bool = True
    inline_all_constant: bool = True
    export_weights: bool = True
    custom_ops_allowed_in_graph: set[str] = field(default_factory=set)
    export_node_metadata: bool = False


class StableHLOGraphModule:
    """`stablehlo.StableHLOGraphModule`: a program, called with the module's inputs (CPU or xla tensors); results are on xla.

    Arguments of its StableHLO are the parameters, then the buffers, then the inputs, without those that nothing reads.
    """

    def __init__(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]):
        backend.ensure()
        from torch_bridge.export import graph_capture, hlo_text

        self._graph = graph_capture.capture(module, *args, **kwargs)
        self._module = module
        self._tensors = {name: t.detach().to("xla") for name, t in (*module.named_parameters(), *module.named_buffers())}
        self._lowered = hlo_text.lower(self._graph.graph, self._graph, "main")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the module gives."""
        return self.evaluate("forward", args, kwargs)

    def evaluate(self, method_name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> Any:
        """`evaluate`: the only method is "forward"."""
        _check_method(method_name)
        on_xla = torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.to("xla"), (tuple(args), dict(kwargs or {})))
        from torch_bridge.export import stand_ins

        named = {**dict(self._module.named_parameters()), **dict(self._module.named_buffers())}
        with torch.no_grad(), stand_ins.replaced(self._module, named, self._tensors) as now:
            found = self._module(*on_xla[0], **on_xla[1])
        self._tensors = {name: now[name] for name in self._tensors}
        return found

    def get_stablehlo_text(self, method_name: str | None = None) -> str:
        """The program as MLIR text."""
        _check_method(method_name)
        return str(self._lowered.as_text())

    def get_stablehlo_bytecode(self, method_name: str | None = None) -> bytes:
        """The program as MLIR bytecode."""
        _check_method(method_name)
        buffer = io.BytesIO()
        self._lowered.compiler_ir(dialect="stablehlo").operation.write_bytecode(buffer)
        return buffer.getvalue()

    def save(self, directory_path: object, options: StableHLOExportOptions | None = None) -> None:
        """Raises NotImplementedError."""
        _no_files("StableHLOGraphModule.save")

    @classmethod
    def load(cls, directory_path: object) -> StableHLOGraphModule:
        """Raises NotImplementedError."""
        _no_files("StableHLOGraphModule.load")


def exported_program_to_stablehlo(
    exported_model: torch.export.ExportedProgram, options: StableHLOExportOptions | None = None
) -> StableHLOGraphModule:
    """`stablehlo.exported_program_to_stablehlo`: a program of `torch.export.export`, with its weights.

    Text and bytecode have the sizes of the example inputs, which is warned of where the program has dims that vary; calls take any of its sizes.
    Raises ValueError for one without example inputs, RuntimeError for one that reads values.
    """
    options = options or StableHLOExportOptions()
    if options.override_tracing_arguments is not None:
        args, kwargs = tuple(options.override_tracing_arguments), dict(options.override_tracing_kwargs or {})
    elif exported_model.example_inputs is not None:
        args, kwargs = exported_model.example_inputs
        if exported_model.range_constraints:
            warnings.warn(
                "the program has dims that vary (dynamic_shapes); its StableHLO has the sizes of the example inputs. Make one for each size: "
                "StableHLOExportOptions(override_tracing_arguments=...)",
                stacklevel=2,
            )
    else:
        raise ValueError("the program has no example inputs: give StableHLOExportOptions(override_tracing_arguments=...)")
    return StableHLOGraphModule(_on_xla(exported_model.module()), args, kwargs)


def _on_xla(module: Any) -> torch.nn.Module:
    """An exported graph that makes its tensors on xla, where its inputs will be; its constants are buffers."""
    held = {name for name, _ in (*module.named_parameters(), *module.named_buffers())}
    for node in module.graph.nodes:
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": torch.device("xla")}
        constant = getattr(module, node.target, None) if node.op == "get_attr" and node.target not in held else None
        if isinstance(constant, torch.Tensor):
            delattr(module, node.target)
            module.register_buffer(node.target, constant, persistent=False)
            held.add(node.target)
    module.recompile()
    return module


def save_as_stablehlo(exported_model: object, stablehlo_dir: object, options: StableHLOExportOptions | None = None) -> None:
    """`stablehlo.save_as_stablehlo`: raises NotImplementedError."""
    _no_files("save_as_stablehlo")


def save_torch_model_as_stablehlo(torchmodel: object, args: object, path: object, options: StableHLOExportOptions | None = None) -> None:
    """`stablehlo.save_torch_model_as_stablehlo`: raises NotImplementedError."""
    _no_files("save_torch_model_as_stablehlo")


def _check_method(name: str | None) -> None:
    if name not in (None, "forward"):
        raise ValueError(f"a StableHLO program has the method 'forward', got {name!r}")


def _no_files(name: str) -> NoReturn:
    raise NotImplementedError(
        f"torch_xla.stablehlo.{name}: folders of torch_xla are neither written nor read. exported_program_to_stablehlo(program) gives the text and the "
        "bytecode; torch.jit.save(torch_neuronx.trace(model, inputs), path) writes a file with StableHLO and weights, which torch.jit.load reads"
    )
