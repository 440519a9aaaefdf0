"""A traced model that is called like the module: positional tensors in, its results out. What `torch_neuronx.trace` returns."""

from __future__ import annotations

import functools
import inspect
import io
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from torch_bridge import _compat
from torch_bridge.aot import exporting, facts, files, tracing
from torch_bridge.aot.model import Model, Program, same

KIND = "traced module"


class Inputs:
    """How the tensors of a call are told apart: the structure of the example inputs. names: of forward's parameters in order, as far as they are known."""

    def __init__(self, tree: facts.Tree, names: Sequence[str] = ()):
        self.tree = tree
        self.names = tuple(names)

    @functools.cached_property
    def _text(self) -> str:
        """The structure for comparison: there 3 is not 3.0, and True is not 1, as results would have another dtype."""
        return json.dumps(self.tree)

    @classmethod
    def of(cls, example: Sequence[Any], names: Sequence[str] = ()) -> tuple[Inputs, list[torch.Tensor]]:
        """The structure of inputs, and the tensors in it. Raises ValueError for anything but tensors in tuples, lists and dicts."""
        found: list[torch.Tensor] = []

        def index(x: Any) -> int | None:
            if not isinstance(x, torch.Tensor):
                return None
            found.append(x)
            return len(found) - 1

        return cls(facts.tree_of(tuple(example), index, "a traced forward is given"), names), found

    def positional(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """The inputs of a call in the order of forward's parameters. Raises TypeError for keywords that do not fit."""
        if not kwargs:
            return tuple(args)
        wanted = self.names[len(args) : len(self.tree["tuple"])]
        if set(wanted) != kwargs.keys():
            known = ", ".join(self.names[: len(self.tree["tuple"])]) or "positional ones only"
            raise TypeError(f"the model was traced with inputs {known}; got {len(args)} by position, and {', '.join(kwargs)} by keyword")
        return (*args, *(kwargs[name] for name in wanted))

    def flat(self, args: Sequence[Any]) -> list[torch.Tensor]:
        """The tensors of a call; dicts may have their keys in another order. Raises ValueError if its structure is not that of the example."""
        inputs, found = Inputs.of(_in_order(tuple(args), self.tree))
        if inputs._text != self._text:
            raise ValueError(f"the model was traced with inputs {_shown(self.tree)}, got {_shown(inputs.tree)}")
        return found


def _in_order(structure: Any, tree: facts.Tree) -> Any:
    """A structure with the keys of its dicts in a tree's order, where they are the same ones."""
    ((kind, content),) = tree.items()
    if kind == "dict" and isinstance(structure, dict) and structure.keys() == {key for key, _ in content}:
        return {key: _in_order(structure[key], value) for key, value in content}
    if kind in ("tuple", "list") and isinstance(structure, (tuple, list)) and len(structure) == len(content):
        parts = [_in_order(x, of) for x, of in zip(structure, content, strict=True)]
        return tuple(parts) if isinstance(structure, tuple) else parts
    return structure


def _shown(tree: facts.Tree) -> str:
    ((kind, content),) = tree.items()
    if kind == "tensor":
        return "tensor"
    if kind == "value":
        return repr(content)
    if kind == "dict":
        return "{" + ", ".join(f"{key!r}: {_shown(value)}" for key, value in content) + "}"
    inner = ", ".join(_shown(x) for x in content)
    return f"({inner})" if kind == "tuple" else f"[{inner}]"


def as_module(func: object) -> torch.nn.Module:
    """A module as it is, a function as a module. Raises ValueError for anything else, and for a module that is or has a traced one."""
    if isinstance(func, torch.nn.Module):
        traced = [name for name, m in func.named_modules() if isinstance(m, TracedModule)]
        if traced:
            raise ValueError(
                f"{traced[0] or 'the model'} is traced already, and its code is not there: trace the module that it was made of"
            )
        return func
    if not callable(func):
        raise ValueError(f"func must be an nn.Module or a function, got {type(func).__name__}")
    module = torch.nn.Module()
    module.forward = func
    return module


def as_tuple(example: object) -> tuple[Any, ...]:
    """Example inputs as positional arguments: a tensor is the only one."""
    return tuple(example) if isinstance(example, (tuple, list)) else (example,)


def tag_of(bucket: int) -> str:
    """The tag of a bucket's program."""
    return f"bucket{bucket}"


def trace_program(
    module: torch.nn.Module,
    example: Sequence[Any],
    aliases: Mapping[torch.Tensor, int] | None = None,
    describe: tracing.Describe = tracing.of_no_cuts,
) -> tuple[Program, Inputs]:
    """The program of `module(*example)` for the ranks of the world. aliases: parameters and buffers, and which tensor of the result is each one's new value."""
    inputs, tensors = Inputs.of(example, parameter_names(module.forward))
    if not tensors:
        raise ValueError("a trace needs at least one example tensor")
    names = [f"input_{i}" for i in range(len(tensors))]
    with torch.no_grad():
        traced = tracing.trace(module, tuple(example), {}, names, named_aliases(module, aliases or {}), describe)
        return Program(traced.facts, exporting.export_forms(traced), traced.initial), inputs


def parameter_names(forward: Callable[..., Any]) -> list[str]:
    """The parameters that a function takes by position or keyword, in order; none if that is not known."""
    try:
        params = inspect.signature(forward).parameters.values()
    except (TypeError, ValueError):  # of builtins
        return []
    by_both = itertools.takewhile(lambda p: p.kind is p.POSITIONAL_OR_KEYWORD, params)
    return [p.name for p in by_both]


def with_more(
    weights: dict[str, torch.Tensor], more: Mapping[str, torch.Tensor], module: torch.nn.Module, bucket: int
) -> dict[str, torch.Tensor]:
    """The weights of the buckets before and of another one. module: of that bucket; buffers that its state dict does not hold are the bucket's own affair.

    Raises ValueError for other values under a name that is there: buckets share weights by name.
    """
    saved = set(module.state_dict(keep_vars=True))
    common = [name for name in more if name in saved and name in weights]
    differing = [n for n in common if weights[n] is not more[n] and not same(weights[n], more[n])]
    if differing:
        raise ValueError(
            f"{', '.join(differing[:8])} of bucket {bucket} has other values than in the buckets before, and buckets share weights by name: have the function "
            "that makes the module give it the same weights each time (torch.manual_seed, or load_state_dict)"
        )
    return {**more, **weights}


def kept(weights: Sequence[Mapping[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
    """Copies of ranks' weights as CPU tensors, which stay as they are when the module's change. What several ranks share is copied once."""
    copies: dict[int, torch.Tensor] = {}
    for own in weights:
        for t in own.values():
            if id(t) not in copies:
                copies[id(t)] = t.detach().to("cpu", copy=True)
    return [{name: copies[id(t)] for name, t in own.items()} for own in weights]


def tied_names(module: torch.nn.Module) -> dict[str, str]:
    """The further names of parameters and buffers that a module has under several, and their first ones, by which traced programs know them."""
    found = {}
    for of in (module.named_parameters, module.named_buffers):
        first = {id(t): name for name, t in of()}
        found.update({name: first[id(t)] for name, t in of(remove_duplicate=False) if name != first[id(t)]})
    return found


def by_first_names(weights: Mapping[str, torch.Tensor], tied: Mapping[str, str]) -> dict[str, torch.Tensor]:
    """Weights without further names of tied ones. Raises ValueError for values under both names that differ."""
    found = {name: t for name, t in weights.items() if name not in tied}
    for name in weights.keys() & tied.keys():
        if not torch.equal(found.setdefault(tied[name], weights[name]), weights[name]):
            raise ValueError(
                f"{name} is {tied[name]} in the traced model, a tied weight, and they are given other values: trace the model anew"
            )
    return found


def named_aliases(module: torch.nn.Module, aliases: Mapping[torch.Tensor, int]) -> dict[int, str]:
    """By index of the result: the name of the parameter or buffer that it updates. Raises ValueError for a tensor that the module does not have."""
    names = {id(t): name for name, t in [*module.named_buffers(), *module.named_parameters()]}
    found = {}
    for t, index in aliases.items():
        if id(t) not in names:
            raise ValueError(
                f"result {index} is to update a tensor of shape {list(t.shape)} that is no parameter or buffer of the module: register it"
            )
        found[int(index)] = names[id(t)]
    return found


class Buckets:
    """Chooses a program for a call: a function in TorchScript from (tensors, *constants) to (tensors, index)."""

    def __init__(self, kernel: Callable[..., Any], constants: Sequence[Any] = ()):
        self.kernel = kernel
        self.constants = tuple(constants)

    def __deepcopy__(self, memo: dict[int, Any]) -> Buckets:
        """Itself: nothing of it changes, and TorchScript functions cannot be copied."""
        return self

    def choose(self, tensors: list[torch.Tensor]) -> tuple[list[torch.Tensor], int]:
        """The tensors as a bucket takes them, and its number."""
        found, index = self.kernel(tensors, *self.constants)
        return list(found), int(index)

    def to_json(self) -> dict[str, Any]:
        """As plain values. Raises ValueError for a kernel that is not in TorchScript, or other constants than tensors, numbers and texts."""
        if not isinstance(self.kernel, (torch.jit.ScriptFunction, torch.jit.ScriptModule)):
            raise ValueError(f"the bucket kernel is {type(self.kernel).__name__}: to save the model it must be a torch.jit.script function")
        buffer = io.BytesIO()
        with _compat.torchscript():
            torch.jit.save(self.kernel, buffer)
        return {"kernel": buffer.getvalue().hex(), "constants": [_constant(c) for c in self.constants]}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Buckets:
        """The other way."""
        with _compat.torchscript():
            kernel = torch.jit.load(io.BytesIO(bytes.fromhex(found["kernel"])))
        return cls(kernel, [_from_constant(c) for c in found["constants"]])


def _constant(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return {"tensor": x.tolist(), "dtype": str(x.dtype).removeprefix("torch.")}
    if isinstance(x, (list, tuple)):
        return {"list": [_constant(y) for y in x]}
    if x is None or isinstance(x, (bool, int, float, str)):
        return {"value": x}
    raise ValueError(f"bucket_kernel_constant_args may be tensors, numbers, texts and lists of these, got {type(x).__name__}")


def _from_constant(found: Mapping[str, Any]) -> Any:
    if "tensor" in found:
        return torch.tensor(found["tensor"], dtype=getattr(torch, found["dtype"]))
    return [_from_constant(y) for y in found["list"]] if "list" in found else found["value"]


class TracedModule(torch.nn.Module):
    """Programs of one module, called with its positional inputs as CPU tensors; rank 0's results come back, in the structure that forward returned.

    `torch.jit.save` writes it (`save`) and `torch.jit.load` reads it again. inputs: of the programs. buckets: chooses among several. kind: who loads it.
    tied: further names of weights (`tied_names`).
    """

    original_name = "TracedModule"

    def __init__(
        self,
        programs: Mapping[str, Program],
        inputs: Inputs,
        weights: list[dict[str, torch.Tensor]],
        buckets: Buckets | None = None,
        kind: str = KIND,
        tied: Mapping[str, str] | None = None,
    ):
        super().__init__()
        self.programs = Model()
        for tag, program in programs.items():
            self.programs.add(tag, program)
        self._inputs = inputs
        self.buckets = buckets
        self.weights = weights
        self._kind = kind
        self.tied = dict(tied or {})
        self.dynamic_batch = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run it. Raises ValueError for inputs of another structure or shape than were traced, TypeError for keywords that forward does not have."""
        tensors = self._inputs.flat(self.positional(args, kwargs))
        if self.dynamic_batch:
            return self._in_batches(tensors)
        tag = tag_of(0)
        if self.buckets is not None:
            tensors, bucket = self.buckets.choose(tensors)
            tag = tag_of(bucket)
            if tag not in self.programs.programs:
                raise ValueError(f"the bucket kernel chose bucket {bucket}, and there are buckets 0 to {len(self.programs.programs) - 1}")
        return facts.build(self.programs.programs[tag].facts.outs, self._run(tag, tensors))

    def positional(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """The inputs of a call in the order of forward's parameters."""
        return self._inputs.positional(args, kwargs)

    def _run(self, tag: str, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        self._check(tensors, self.programs.programs[tag])
        self.load()
        return self.programs.results(tag, self.programs.run(tag, tensors), 0)

    def _check(self, tensors: Sequence[torch.Tensor], program: Program) -> None:
        wanted = [(list(t.shape), t.dtype) for t in program.facts.inputs]
        given = [(list(t.shape), t.dtype) for t in tensors]
        if given != wanted:
            fit = "cast" if [shape for shape, _ in given] == [shape for shape, _ in wanted] else "pad"
            more = "; torch_neuronx.dynamic_batch(model) lets the first dim differ" if self._may_differ(tensors, program) else ""
            raise ValueError(
                f"the model was traced for inputs {_kinds(wanted)}, got {_kinds(given)}: {fit} them, or trace the model for these{more}"
            )

    def _may_differ(self, tensors: Sequence[torch.Tensor], program: Program) -> bool:
        return len(tensors) == len(program.facts.inputs) and all(
            t.dim() and tuple(t.shape[1:]) == of.shape[1:] and t.dtype == of.dtype
            for t, of in zip(tensors, program.facts.inputs, strict=True)
        )

    def _in_batches(self, tensors: list[torch.Tensor]) -> Any:
        """Rows in batches of the size that was traced; the last one is filled up with copies of the first row, whose results are dropped.

        Raises ValueError for rows that do not fill the last batch where the model has states, which those copies would reach.
        """
        program = self.programs.programs[tag_of(0)]
        if not self._may_differ(tensors, program):
            self._check(tensors, program)
        counts, batch = {t.shape[0] for t in tensors}, program.facts.inputs[0].shape[0]
        if len(counts) > 1 or 0 in counts:
            raise ValueError(
                f"dynamic_batch needs inputs of the same number of rows, at least one, got {', '.join(str(list(t.shape)) for t in tensors)}"
            )
        for t in program.facts.results:
            if not t.shape or t.shape[0] != batch:
                raise ValueError(
                    f"dynamic_batch needs results with the batch as dim 0, {batch} rows here, and the model returns one of shape {list(t.shape)}"
                )
        (rows,) = counts
        if rows % batch and program.facts.states:
            raise ValueError(
                f"dynamic_batch got {rows} rows, and the model was traced for {batch} and keeps {', '.join(t.name for t in program.facts.states)} from call to "
                f"call: what fills up the last batch would count there. Pass a multiple of {batch} rows, or trace the model for these"
            )
        found = []
        for start in range(0, rows, batch):
            part = [t[start : start + batch] for t in tensors]
            lacking = batch - part[0].shape[0]
            found.append(self._run(tag_of(0), [torch.cat([t, t[:1].expand(lacking, *t.shape[1:])]) if lacking else t for t in part]))
        joined = [torch.cat(parts)[:rows] for parts in zip(*found, strict=True)]
        return facts.build(program.facts.outs, joined)

    def traced_sizes(self, dim: int) -> list[int]:
        """Along a dim, the sizes of the inputs that have it, as they were traced; none where there are buckets."""
        inputs = self.programs.programs[tag_of(0)].facts.inputs if self.buckets is None else ()
        return [t.shape[dim] for t in inputs if len(t.shape) > dim]

    def load(self) -> None:
        """Put weights on the device and compile, if that has not happened yet."""
        if not self.programs.started:
            self.programs.begin(self.weights)

    def replace_weights(self, weights: list[dict[str, torch.Tensor]]) -> None:
        """Other weights for each rank, by the names of the module's state dict; those that are not named stay. States stay.

        Raises ValueError for weights that do not fit.
        """
        self.programs.check_weights(weights)
        new = [{**old, **given} for old, given in zip(self.weights, kept(weights), strict=True)]
        if self.programs.started:
            self.programs.set_weights([new[rank] for rank in self.programs.where.hosted])
        self.weights = new

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:  # type: ignore[override]
        """Rank 0's weights, CPU tensors; tied ones under all their names."""
        own = self.weights[0]
        return own | {name: own[first] for name, first in self.tied.items() if first in own}

    def save(self, f: Any, _extra_files: dict[str, Any] | None = None) -> None:
        """What `torch.jit.save` calls."""
        files.save(f, self._kind, self.programs.programs, self.weights, self._extra(), _extra_files)

    def save_to_buffer(self, _extra_files: dict[str, Any] | None = None) -> bytes:
        """What `torch.jit.save` calls for a buffer."""
        return files.in_memory(lambda path: self.save(path, _extra_files))

    def save_rank(self, f: Any, rank: int, weights: dict[str, torch.Tensor]) -> None:
        """Write a file with the programs, and one rank's weights alone."""
        files.save(f, self._kind, self.programs.programs, [weights], self._extra() | {"rank": rank})

    def _extra(self) -> dict[str, Any]:
        buckets = None if self.buckets is None else self.buckets.to_json()
        return {
            "inputs": self._inputs.tree,
            "names": self._inputs.names,
            "buckets": buckets,
            "dynamic": self.dynamic_batch,
            "tied": self.tied,
        }


def _kinds(found: Sequence[tuple[list[int], torch.dtype]]) -> str:
    return ", ".join(f"{str(dtype).removeprefix('torch.')} {shape}" for shape, dtype in found)


def loaded(opened: files.Opened) -> TracedModule:
    """What `torch.jit.load` gives for the file of a traced module."""
    buckets = opened.extra["buckets"]
    weights = opened.weights(range(opened.ranks))
    module = TracedModule(
        opened.programs,
        Inputs(opened.extra["inputs"], opened.extra.get("names", ())),
        weights,
        None if buckets is None else Buckets.from_json(buckets),
        opened.kind,
        opened.extra.get("tied"),
    )
    module.dynamic_batch = bool(opened.extra["dynamic"])
    return module
