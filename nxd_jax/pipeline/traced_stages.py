"""A model's stages by tracing: symbolically (`trace`), or by running it without values (`capture`) where that cannot be done."""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from nxd_jax.pipeline import capture, layer_nodes, partition, read_tensors, stages, trace
from nxd_jax.pipeline.traced_state import TracedState
from nxd_jax.tensor_parallel import parallel_groups
from nxd_jax.utils.model_utils import is_hf_pretrained_model

logger = logging.getLogger("nxd_jax")


def modes(model: nn.Module) -> str:
    """Which modules of a model are in training mode: a digit for each."""
    return "".join("01"[module.training] for module in model.modules())


class TracedStages:
    """The stages of a model for each way in which it computes: which modules are training and, where it is traced by running it, each shape of its inputs.

    transformers' models are traced by running them, unless a `tracer_cls` is given; so are models that symbolic tracing refuses.

    Args:
        model: the whole model.
        layer_cls: the class of its repeated layer.
        leaves: names of modules that are kept whole (`leaf_modules`).
        options: of the symbolic tracer (`trace.trace_model`).

    Attributes:
        traced: the model as it was traced first; None before, and if its inputs have to be known for that.
        input_names: what it is given.
        by_running: whether it is traced by running it.
        cuts: the layers after which a stage ends.
    """

    def __init__(self, model: nn.Module, layer_cls: type[nn.Module], leaves: Sequence[str], options: Mapping[str, Any]):
        self.model = model
        self.layer_cls = layer_cls
        self.leaves = list(leaves)
        self.options = dict(options)
        self.traced: fx.GraphModule | None = None
        self.input_names: list[str] | None = None
        self.by_running = False
        self.cuts: list[str] = []
        self.found: dict[Any, stages.Stages] = {}
        self._constants: dict[str, Any] = {}
        self._specs: capture.Specs = {}
        self._refused: Exception | None = None
        self._first: stages.Stages | None = None
        self._first_key: Any = None

    # -- tracing --------------------------------------------------------------------------------------

    def trace(self, args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None, input_names: Sequence[str] | None) -> None:
        """Trace the model. args, kwargs: examples of its inputs; or their names.

        Raises ValueError for wrong names, RuntimeError for a model that cannot be traced. Without examples, a model that is traced by running it may need
        the first batch.
        """
        self._trace(args, kwargs, input_names)
        self._first_key = self._key(self._specs)

    def _trace(self, args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None, input_names: Sequence[str] | None) -> None:
        self._constants = trace.constants_of(self.model, input_names, args, kwargs)
        if is_hf_pretrained_model(self.model) and "use_cache" in self._constants:
            self._constants["use_cache"] = False
        parameters = inspect.signature(self.model.forward).parameters.values()
        self.input_names = [p.name for p in parameters if p.name not in self._constants and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        self.by_running = self.options.get("tracer_cls") is None and is_hf_pretrained_model(self.model)
        if not self.by_running:
            try:
                self.traced = self._symbolic()
                return
            except RuntimeError as error:
                self._refused, self.by_running = error, True
        given = dict(inspect.signature(self.model.forward).bind_partial(*args or (), **kwargs or {}).arguments)
        if any(isinstance(value, torch.Tensor) for value in given.values()):
            self._specs = capture.specs_of({name: given.get(name) for name in self.input_names})
            self.traced = self._captured(self._specs)
            return
        self._specs = self._likely()
        try:
            self.traced = self._captured(self._specs)
        except RuntimeError as error:
            logger.info("%s is traced when the first batch is there: %s", type(self.model).__name__, error)

    def _symbolic(self) -> fx.GraphModule:
        return trace.trace_model(self.model, input_names=self.input_names, leaf_modules=self.leaves, **self.options)

    def _captured(self, specs: capture.Specs) -> fx.GraphModule:
        layers = [name for name, module in self.model.named_modules() if isinstance(module, self.layer_cls)]
        functions = [*(self.options.get("autowrap_functions") or ()), *(self.options.get("autowrap_modules") or ())]
        try:
            return capture.capture(self.model, specs, self._constants, layers, self.cuts, self.leaves, functions)
        except RuntimeError as error:
            if self._refused is not None:
                error.add_note(f"before that: {self._refused}")
            raise

    def _likely(self) -> capture.Specs:
        """Inputs as a language model has them: token ids and the like."""
        return {name: capture.Spec((1, 8 * parallel_groups.size("tp")), torch.int64) for name in self.input_names or ()}

    def of_copy(self, model: nn.Module) -> TracedStages:
        """A copy of the model cut after the same layers. It is traced anew."""
        new = copy.copy(self)
        new.model, new.cuts, new.found, new._first = model, list(self.cuts), {}, None
        if self.traced is not None:
            new.traced = new._marked(new._captured(self._specs) if self.by_running else new._symbolic())
            new._first_key = new._key(self._specs)
        return new

    # -- cutting --------------------------------------------------------------------------------------

    def cut(self, layer: str) -> None:
        """Let a stage end with a layer. RuntimeError for one that the model does not have, AssertionError for a second cut there."""
        if self.by_running and layer not in self.cuts:
            known = dict(self.model.named_modules())
            if layer not in known or not layer:
                raise RuntimeError(
                    f"the model has no layer {layer!r} to cut after; its layers are {', '.join(name for name in known if name)}"
                )
            if self.traced is not None and not any(node.target == layer for node in self.traced.graph.nodes):
                self.cuts.append(layer)
                try:
                    self.traced = self._marked(self._captured(self._specs))
                except BaseException:
                    self.cuts.pop()
                    raise
                return
        if self.traced is not None:
            partition.cut_after(self.traced, layer)
        elif layer in self.cuts:
            raise AssertionError(f"the model is cut after {layer!r} already")
        self.cuts.append(layer)

    def _marked(self, traced: fx.GraphModule) -> fx.GraphModule:
        for name in self.cuts:
            partition.cut_after(traced, name)
        return traced

    # -- stages ---------------------------------------------------------------------------------------

    def first(self) -> stages.Stages | None:
        """The stages of the model as it was traced first; None if that needs a batch."""
        if self.traced is None:
            return None
        if self._first is None:
            self._first = self.found[self._first_key] = self._stages_of(self.traced)
        return self._first

    def of(self, micro_batch: Mapping[str, Any], made: Callable[[stages.Stages], None], alone: bool = True) -> stages.Stages:
        """The stages for inputs like these, as the model computes now. made: called with stages that are new; alone: no other process has a part of them.

        Raises RuntimeError if modules of the model have been replaced since it was traced, and it is not alone.
        """
        specs = capture.specs_of(micro_batch)
        key = self._key(specs)
        known = self.found.get(key)
        replaced = known is not None and not known.are_of(self.model)
        if replaced and not alone:
            raise RuntimeError(
                f"layers of {type(self.model).__name__} have been replaced since it was cut, and other processes have their stages still: replace them before "
                "NxDPPModel, or run all ranks in one process (nxd-run)"
            )
        if known is None or replaced:
            traced = self._captured(specs) if self.by_running else self._symbolic()
            new = self._stages_of(self._marked(traced))
            made(new)
            if replaced:
                self.found.clear()
            if replaced or self.traced is None:
                self.found[key], self.traced, self._specs, self._first = new, traced, specs, new
            else:
                self.found[key] = new
        found = self.found[key]
        if found.state is not None:
            found.state.warn_of_changes()
        return found

    def _key(self, specs: capture.Specs) -> Any:
        """What is part of what is traced."""
        mode = modes(self.model)
        if not self.by_running:
            return mode
        autocast = torch.get_autocast_dtype("xla") if torch.is_autocast_enabled("xla") else None
        return mode, autocast, repr(sorted(specs.items()))

    def _stages_of(self, traced: fx.GraphModule) -> stages.Stages:
        stage_of = partition.stage_numbers(traced)
        (capture if self.by_running else trace).check_writes(traced, stage_of)
        partitioned = partition.partition_traced_model(traced)
        read_tensors.give(partitioned, self.model)
        found = stages.of_traced(partitioned)
        found.called = self._called(traced)
        found.state = TracedState(self.model, found.called, hooked=self.by_running)
        if len(found) <= len(self.cuts):
            raise ValueError(
                f"{len(self.cuts)} cuts ({', '.join(self.cuts)}) make {len(found)} stages: the model computes nothing after one of these layers. Cut before "
                "its last layer, and only after layers that it calls"
            )
        return found

    def _called(self, traced: fx.GraphModule) -> dict[str, nn.Module]:
        """Modules that are nodes of a graph, by the name under which the model has them."""
        names = dict.fromkeys(str(node.target) for node in traced.graph.nodes if node.op == "call_module")
        own = dict(self.model.named_modules(remove_duplicate=False))
        return {name: module for name in names if own.get(name) is (module := layer_nodes.layer_of(traced.get_submodule(name)))}
