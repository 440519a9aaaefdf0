"""A model of traced programs that share weights and states, chosen by the shapes of a call's inputs."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from nxd_jax.trace import resharding
from nxd_jax.trace.model_builder_utils import ModelParamInfo, TraceArtifacts
from nxd_jax.trace.nxd_model.base_nxd_model import BaseNxDModel, StateInitializer
from torch_bridge import _compat
from torch_bridge.aot import facts, files, script_files
from torch_bridge.aot.model import Model, Program
from torch_bridge.mesh import world

KIND = "NxDModel"
METADATA = "nxd_torchscript_metadata.json"
FORWARD_MODES = ("default", "ranked", "ranked_to_cpu", "async")


class NxDModel(torch.nn.Module, BaseNxDModel):
    """`neuronx_distributed.NxDModel`: made by `ModelBuilder.compile` or `NxDModel.load`; `set_weights`, `to_neuron`, then call it with CPU tensors.

    world_size: the ranks that programs were traced for. start_rank, local_ranks_size: those of this process, default all; under torchrun they are the job's.
    state_initializer: what states there are, and zeros for them; default, from the programs (None if they have no states). What states begin with the
    programs say. layout_transformer: accepted (XLA lays weights out).
    """

    def __init__(
        self,
        world_size: int,
        start_rank: int | None = None,
        local_ranks_size: int | None = None,
        state_initializer: StateInitializer | None = None,
        layout_transformer: Any = None,
    ):
        super().__init__()
        self.world_size = world_size
        self.start_rank, self.local_ranks_size = _own_ranks(world_size, start_rank, local_ranks_size)
        self.state_initializer = state_initializer
        self._own_initializer = False
        self.layout_transformer = layout_transformer
        self.model_params: tuple[ModelParamInfo, ...] = ()
        self.loaded_on_neuron = False
        self._routes: dict[_Route, list[str]] = {}
        self._names: tuple[str, ...] = ()
        self._model = Model()
        self._loaded: list[dict[str, torch.Tensor]] | None = None

    # -- programs ------------------------------------------------------------------------------------

    def add(self, key: str, trace_artifacts: TraceArtifacts, compilation_artifacts: Any = None) -> NxDModel:
        """Add a traced program under a tag. Raises AssertionError if its forward has other parameters than those that are there, or weights do not fit."""
        self._add(key, trace_artifacts.program, trace_artifacts.model_params)
        return self

    def _add(self, key: str, program: Program, params: Sequence[ModelParamInfo]) -> None:
        if self.model_params and tuple(params) != self.model_params:
            raise AssertionError(
                f"{key!r} was traced from forward({_named(params)}), the programs before from forward({_named(self.model_params)}): all must have the same"
            )
        if program.facts.ranks.size != self.world_size:
            raise AssertionError(f"{key!r} was traced for {program.facts.ranks.size} ranks, and the model has world_size {self.world_size}")
        try:
            self._model.add(key, program)
        except ValueError as error:
            raise AssertionError(str(error)) from None
        self.model_params = tuple(params)
        self._names = tuple(p.param_name for p in params)
        if self._model.states and (self.state_initializer is None or self._own_initializer):
            shapes = {name: list(held.shape) for name, held in self._model.states.items()}
            dtypes = {name: held.dtype for name, held in self._model.states.items()}
            self.state_initializer, self._own_initializer = StateInitializer(shapes, dtypes, self.local_ranks_size), True
        self._routes.setdefault(_route((t.name for t in program.facts.inputs), (t.shape for t in program.facts.inputs)), []).append(key)

    def get_available_keys(self) -> set[str]:
        """The tags."""
        return set(self._model.programs)

    def get_neff(self, key: str) -> bytes:
        """The serialized program of a tag: StableHLO as `jax.export` writes it, where the original has a NEFF. Raises KeyError for an unknown tag."""
        return self._program(key).forms.for_all_ranks

    def get_metaneff(self, key: str) -> dict[str, Any]:
        """The facts of a tag's program, as JSON values (the original: a protobuf). Raises KeyError for an unknown tag."""
        return facts.to_json(self._program(key).facts)

    def get_hlo(self, key: str) -> str:
        """The StableHLO of a tag's program, as text (the original: a protobuf). Raises KeyError for an unknown tag."""
        from jax import export

        return str(export.deserialize(bytearray(self.get_neff(key))).mlir_module())

    @property
    def input_shape_map(self) -> dict[str, list[str]]:
        """Tags by the names and shapes of inputs that they take, as in "(x: [2, 16])"."""
        return {_text(route): list(tags) for route, tags in self._routes.items()}

    def _program(self, key: str) -> Program:
        if key not in self._model.programs:
            raise KeyError(f"no program has tag {key!r}: there are {', '.join(sorted(self._model.programs)) or 'none'}")
        return self._model.programs[key]

    # -- weights and states --------------------------------------------------------------------------

    def set_weights(self, sharded_checkpoint: list[dict[str, torch.Tensor]]) -> None:
        """Give each rank its weights (`shard_checkpoint`'s dicts); weights cut for another number of ranks are joined and cut again.

        Raises ValueError when the model is on its devices already (`replace_weights`), for missing names and for shapes that do not fit.
        """
        if self.loaded_on_neuron:
            raise ValueError("set_weights is for a model that is not on its devices yet: call replace_weights(...)")
        self._set(sharded_checkpoint)

    def _set(self, given: Sequence[Mapping[str, torch.Tensor]]) -> None:
        here = range(self.start_rank, self.start_rank + self.local_ranks_size)
        own = resharding.suited(given, self._model.weights, self.world_size, here)
        self._check_ranks()
        self._model.set_weights(own)

    @property
    def weights(self) -> list[dict[str, torch.Tensor]]:
        """Each rank's weights as they are on the devices, as new CPU tensors; none before `set_weights`."""
        return self._model.held()

    def to_neuron(self) -> None:
        """Compile for the devices there are and let states begin; later calls do nothing. Raises RuntimeError without weights."""
        if self.loaded_on_neuron:
            return
        self._check_ranks()
        if self._loaded is not None and not self._model.has_weights:
            with self._model.compiling():
                self._set(self._loaded)
        self._loaded = None
        self._model.start()
        self.loaded_on_neuron = True

    def replace_weights(self, sharded_checkpoint: list[dict[str, torch.Tensor]]) -> None:
        """Other weights for a model that is on its devices, whose states begin anew. If they do not fit, it stays as it is."""
        self._set(sharded_checkpoint)
        self.loaded_on_neuron = False
        self.to_neuron()

    def read_from_neuron_buffer(self, buffer_key: str, rank: int) -> torch.Tensor:
        """A rank's values of a weight or state, as a CPU tensor. Raises AssertionError before to_neuron, KeyError for an unknown name."""
        self._check_loaded()
        return self._model.read(buffer_key, rank)

    def write_to_neuron_buffer(self, tensor: torch.Tensor, buffer_key: str, rank: int) -> None:
        """Set a rank's values of a weight or state; of a weight that all ranks share, everyone's. `save(save_weights=True)` saves a weight as it is then.

        Raises AssertionError before to_neuron, KeyError for an unknown name or another shape.
        """
        self._check_loaded()
        self._model.write(buffer_key, rank, tensor)

    def _check_loaded(self) -> None:
        if not self.loaded_on_neuron:
            raise AssertionError("the model is not on its devices yet: call set_weights(...) and to_neuron() first")

    def _check_ranks(self) -> None:
        hosted = self._model.where.hosted
        own = tuple(range(self.start_rank, self.start_rank + self.local_ranks_size))
        if hosted != own:
            raise ValueError(
                f"start_rank {self.start_rank} and local_ranks_size {self.local_ranks_size} name ranks {list(own)}, and this process computes for "
                f"{list(hosted)}: leave both out, or start as many processes with torchrun as the ranks need"
            )

    # -- calls ---------------------------------------------------------------------------------------

    def router(self, inputs: Sequence[torch.Tensor], arg_names: Sequence[str]) -> list[str]:
        """The tags of the programs for inputs of these names and shapes. Raises KeyError, naming the routes there are."""
        route = _route(arg_names, (t.shape for t in inputs))
        tags = self._routes.get(route)
        if tags is None:
            known = "; ".join(f"{_text(r)} -> {', '.join(tags)}" for r, tags in self._routes.items())
            raise KeyError(f"no program was traced for inputs {_text(route)}: there are {known}")
        return tags

    def forward(self, *args: Any, model_name: str | None = None, forward_mode: str = "default", **kwargs: Any) -> Any:
        """Run the program that was traced for inputs of these names and shapes.

        model_name: its tag, needed where several have the same inputs. forward_mode: "default": every rank gets the inputs, and rank 0's results come back as
        CPU tensors in the structure that forward returned; "ranked": each input is a list with a tensor for each rank, results are [result][rank], left on the
        device (`.cpu()` brings them); "ranked_to_cpu": the same as CPU tensors; "async": as "ranked" (nothing waits for the device before `.cpu()`).

        Raises RuntimeError before to_neuron, KeyError for shapes without a program, AssertionError for an unknown keyword, mode or ambiguous inputs.
        """
        if not self.loaded_on_neuron:
            raise RuntimeError("the model is not initialised: call set_weights(...) and to_neuron() first")
        if forward_mode not in FORWARD_MODES:
            raise AssertionError(f"forward_mode must be one of {', '.join(FORWARD_MODES)}, got {forward_mode!r}")
        names, inputs = self._ordered(args, kwargs)
        ranked = forward_mode != "default"
        if ranked:
            _check_ranked(names, inputs, self.local_ranks_size)
        tag = self._chosen(self.router([x[0] for x in inputs] if ranked else inputs, names), model_name)
        arrays = self._model.run(tag, inputs, ranked)
        if not ranked:
            results = self._model.results(tag, arrays, self.start_rank)
            return facts.build(self._model.programs[tag].facts.outs, results)
        there = self._model.on_device(tag, arrays)
        return [[t.cpu() for t in ranks] for ranks in there] if forward_mode == "ranked_to_cpu" else there

    def _ordered(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[str], list[Any]]:
        """Inputs in the order of forward's parameters, with their names."""
        known = self._names
        unknown = [k for k in kwargs if k not in known]
        if unknown:
            raise AssertionError(f"forward has no parameter {', '.join(unknown)}: it takes {', '.join(known)}")
        if len(args) > len(known):
            raise AssertionError(f"forward takes {len(known)} inputs ({', '.join(known)}), got {len(args)}")
        given = dict(zip(known, args, strict=False))
        twice = [k for k in kwargs if k in given]
        if twice:
            raise AssertionError(f"{', '.join(twice)} is given by position and by name")
        given.update(kwargs)
        names = [n for n in known if given.get(n) is not None]
        return names, [given[n] for n in names]

    def _chosen(self, tags: Sequence[str], model_name: str | None) -> str:
        if model_name is None:
            if len(tags) > 1:
                raise AssertionError(f"{len(tags)} programs take these inputs: say which with model_name, one of {', '.join(tags)}")
            return tags[0]
        if model_name not in tags:
            raise AssertionError(f"model_name {model_name!r} does not take these inputs: {', '.join(tags)} does")
        return model_name

    # -- files ---------------------------------------------------------------------------------------

    def save(self, path_to_save: str, save_weights: bool = False) -> None:
        """Write the model to a file that a process without its code opens. save_weights: with its weights (those set last). Raises ValueError without any."""
        self._write(path_to_save, save_weights, {})

    def _write(self, path: str, save_weights: bool, more: Mapping[str, Any]) -> None:
        weights = None
        if save_weights:
            if not self._model.has_weights and self._loaded is None:
                raise ValueError("save_weights=True needs weights: call set_weights(...) first")
            if self.local_ranks_size != self.world_size:
                raise ValueError(
                    f"this process has the weights of {self.local_ranks_size} ranks out of {self.world_size}: save without weights"
                )
            weights = self.weights or self._loaded
        extra = {"world_size": self.world_size, "params": [[p.param_name, p.is_positional] for p in self.model_params]}
        texts = {METADATA: json.dumps({"format": "nxd_jax", "version": files.VERSION})}
        files.save(path, KIND, self._model.programs, weights, extra, {**more, **texts})

    @classmethod
    def load(cls, path_to_model: str, start_rank: int | None = None, local_ranks_size: int | None = None) -> NxDModel:
        """A model from a file that `save` wrote; `to_neuron()` makes it ready, after `set_weights(...)` if the file has no weights.

        A TorchScript file that nothing here wrote comes back as the ScriptModule that it is, with a warning. Raises FileNotFoundError, ValueError for a damaged
        file or one of another kind, AssertionError for start_rank without local_ranks_size.
        """
        if script_files.is_plain_script(path_to_model, METADATA):
            warnings.warn(
                f"{path_to_model} has no {METADATA}: it is loaded as the plain ScriptModule that it is, no NxDModel", stacklevel=2
            )
            with _compat.torchscript():
                script: Any = torch.jit.load(path_to_model)
            return script
        with files.opened(path_to_model) as opened:
            if opened.kind != KIND:
                raise ValueError(f"{path_to_model} holds a model that {opened.kind} made, no NxDModel: load it with torch.jit.load")
            return cls._of(opened, start_rank, local_ranks_size)

    @classmethod
    def _of(cls, opened: files.Opened, start_rank: int | None = None, local_ranks_size: int | None = None) -> NxDModel:
        model = cls(int(opened.extra["world_size"]), start_rank, local_ranks_size)
        params = [ModelParamInfo(name, positional) for name, positional in opened.extra["params"]]
        for tag, program in opened.programs.items():
            model._add(tag, program, params)
        if opened.ranks:
            model._loaded = opened.weights(range(model.start_rank, model.start_rank + model.local_ranks_size))
        return model


_Route = tuple[tuple[str, ...], tuple[tuple[int, ...], ...]]
"""Names and shapes of inputs."""


def _route(names: Iterable[str], shapes: Iterable[tuple[int, ...]]) -> _Route:
    return tuple(names), tuple(shapes)


def _text(route: _Route) -> str:
    return facts.route(zip(*route, strict=True))


def _own_ranks(world_size: int, start: int | None, count: int | None) -> tuple[int, int]:
    if start is None:
        if count not in (None, world_size):
            raise AssertionError(f"local_ranks_size={count} needs start_rank, the first rank of this process")
        now = world.current()
        if now.processes > 1 and now.size == world_size:
            return now.hosted[0], len(now.hosted)
        return 0, world_size
    if count is None:
        raise AssertionError(f"start_rank={start} needs local_ranks_size, the ranks of this process")
    if start < 0 or count < 1 or start + count > world_size:
        raise AssertionError(f"ranks {start} to {start + count - 1} are not among the {world_size} of world_size")
    return start, count


def _check_ranked(names: Sequence[str], inputs: Sequence[Any], ranks: int) -> None:
    for name, x in zip(names, inputs, strict=True):
        if not isinstance(x, (list, tuple)) or len(x) != ranks:
            found = f"{len(x)} tensors" if isinstance(x, (list, tuple)) else type(x).__name__
            raise AssertionError(f"{name} must be a list with a tensor for each of {ranks} ranks in this forward_mode, got {found}")


def _named(params: Sequence[ModelParamInfo]) -> str:
    return ", ".join(p.param_name for p in params)
