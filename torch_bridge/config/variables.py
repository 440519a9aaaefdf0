"""The environment variables of Neuron, torch_xla and this project, as data: what each means and what is done about it here.

`python -m torch_bridge.config.variables > docs/reference/environment.md` writes the page for users. `environment.check` applies the table.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

HONOUR, ACCEPT, WARN = "honour", "accept", "warn"
"""What is done about a variable: act on it; take it and do nothing, for nothing here depends on it; say that it has no effect."""


@dataclass(frozen=True)
class Kind:
    """What values a variable may have. allowed: in words. parse: the Python value of a text, ValueError if it is not one."""

    allowed: str
    parse: Callable[[str], Any]


@dataclass(frozen=True)
class Variable:
    """One row. default: in words. kind: None if any text will do (or if `where` checks it). where: the module that acts on it."""

    name: str
    rule: str
    meaning: str
    default: str = "unset"
    kind: Kind | None = None
    where: str = ""

    def parse(self, text: str) -> Any:
        """The value that a text stands for; ValueError with the name, the text and what is allowed. Empty counts as unset: None."""
        text = text.strip()
        if not text or self.kind is None:
            return text or None
        try:
            return self.kind.parse(text)
        except (ValueError, KeyError):
            raise ValueError(f"{self.name}={text!r}: must be {self.kind.allowed} ({self.meaning})") from None

    def now(self) -> Any:
        """What the environment says at this moment; None where it says nothing. ValueError as in `parse`."""
        return self.parse(os.environ.get(self.name, ""))


# -- kinds of values ------------------------------------------------------------------------------


def _as_flag(text: str) -> bool:
    return {"0": False, "false": False, "no": False, "off": False, "1": True, "true": True, "yes": True, "on": True}[text.lower()]


FLAG = Kind("0 or 1 (or false, true)", _as_flag)
REPLAYED = Kind("0, 1 (or false, true), auto or all", lambda text: text.lower() if text.lower() in ("auto", "all") else _as_flag(text))


def count(lowest: int) -> Kind:
    """A whole number of at least `lowest`."""

    def parse(text: str) -> int:
        number = int(text)
        if number < lowest:
            raise ValueError(text)
        return number

    return Kind(f"a whole number of at least {lowest}", parse)


def one_of(*choices: str) -> Kind:
    """One of some words, in any case; its value is the word as written here."""
    words = {c.lower(): c for c in choices}
    return Kind(f"one of {', '.join(choices)}", lambda text: words[text.lower()])


def _as_cores(text: str) -> tuple[int, ...]:
    ids: list[int] = []
    for part in text.split(","):
        low, _, high = part.strip().partition("-")
        ids += range(int(low), int(high or low) + 1)
    if not ids or ids != list(range(ids[0], ids[0] + len(ids))):
        raise ValueError(text)
    return tuple(ids)


def _as_counts(text: str) -> tuple[int, ...]:
    counts = tuple(map(int, text.split(",")))
    if min(counts) < 1:
        raise ValueError(text)
    return counts


COUNTS = Kind("numbers of devices, one for each process, such as 32 or 32,32", _as_counts)
CORES = Kind("core numbers that increase without gaps, such as 3, 0-3 or 3,4,5", _as_cores)

PLATFORMS = ("inf2", "trn1", "trn1n", "trn2")
"""The chips that can be emulated, as NEURON_PLATFORM_TARGET_OVERRIDE names them."""

# -- the table ------------------------------------------------------------------------------------


def _accepted(meaning: str, *names: str) -> list[Variable]:
    """Variables of one subject that nothing here depends on."""
    return [Variable(name, ACCEPT, meaning) for name in names]


_LAYOUT = [
    Variable("NEURON_RT_NUM_CORES", HONOUR, "how many cores, and so ranks, a plain `python` script has", "0: one rank", count(0), "world"),
    Variable(
        "NEURON_RT_VISIBLE_CORES",
        HONOUR,
        "which cores a plain `python` script has; wins over NEURON_RT_NUM_CORES",
        kind=CORES,
        where="world",
    ),
    Variable(
        "XLA_USE_SPMD",
        HONOUR,
        "`xr.use_spmd()` when the script first asks for a device, how many there are, or for a mesh",
        "0",
        FLAG,
        "torch_bridge.torch_xla._spmd_variable",
    ),
    Variable("NEURON_LOGICAL_NC_CONFIG", HONOUR, "physical cores per logical core", "2 on Trn2", one_of("1", "2"), "nxd_jax.topology"),
    Variable(
        "NEURON_RT_VIRTUAL_CORE_SIZE", HONOUR, "older name of NEURON_LOGICAL_NC_CONFIG", kind=one_of("1", "2"), where="nxd_jax.topology"
    ),
    Variable(
        "NEURON_PLATFORM_TARGET_OVERRIDE",
        HONOUR,
        "the chip that is emulated",
        "trn1",
        one_of(*PLATFORMS),
        "nxd_jax.topology",
    ),
    Variable(
        "NEURON_PJRT_PROCESSES_NUM_DEVICES",
        HONOUR,
        "how many devices, and so ranks, a plain `python` script has, if no variable above says it; several processes must be started with `torchrun`",
        kind=COUNTS,
        where="world",
    ),
    Variable(
        "NEURON_PJRT_PROCESS_INDEX", HONOUR, "which of those processes this one is; not needed under `torchrun`", "0", count(0), "world"
    ),
    Variable("NEURONCORE_NUM_DEVICES", HONOUR, "ranks that `xmp.spawn` starts", kind=count(1), where="xla_multiprocessing"),
    Variable("PJRT_DEVICE", HONOUR, "the kind of device that scripts are told they run on", "NEURON", where="runtime"),
    Variable("NXD_CPU_MODE", HONOUR, "NxD's helpers use the CPU device", "0", count(0), "nxd_jax.utils"),
]

_PRECISION = [
    Variable(
        "NEURON_RT_STOCHASTIC_ROUNDING_EN", HONOUR, "values are rounded to bfloat16 and float16 stochastically", "0", FLAG, "rounding"
    ),
    Variable("NEURON_RT_STOCHASTIC_ROUNDING_SEED", HONOUR, "seed of stochastic rounding", "0", count(0), "stochastic_rounding"),
    Variable("XLA_USE_BF16", HONOUR, "float32 and float64 tensors are bfloat16 on the device (deprecated)", "0", FLAG, "device_formats"),
    Variable(
        "XLA_DOWNCAST_BF16", HONOUR, "float32 tensors are bfloat16 on the device, float64 ones float32 (deprecated)", "0", FLAG, "downcast"
    ),
    Variable("XLA_USE_32BIT_LONG", WARN, "int64 tensors are int32 on the device: here they stay int64, as in eager torch", "0", FLAG),
]

_COMPILER = [
    Variable("NEURON_CC_FLAGS", HONOUR, "compiler flags, see below", "empty", where="compiler_flags"),
    Variable("NEURON_COMPILE_CACHE_URL", HONOUR, "a folder that keeps compiled programs; `--cache_dir` wins over it", where="xla_cache"),
    Variable(
        "NEURON_NUM_RECENT_MODELS_TO_KEEP",
        HONOUR,
        "how many compiled graphs are kept in memory; the one unused for longest goes first",
        "512",
        count(1),
        "executor",
    ),
    Variable("NEURON_EXTRACT_GRAPHS_ONLY", HONOUR, "graphs are compiled and not run; all results are zero", "0", FLAG, "program"),
    Variable(
        "XLA_DUMP_POST_OPTIMIZATIONS",
        HONOUR,
        "`torch_xla._XLAC._get_xla_tensors_hlo` gives what XLA made of a graph",
        "0",
        FLAG,
        "torch_bridge.torch_xla._XLAC",
    ),
    Variable("XLA_ENABLE_PARAM_ALIASING", HONOUR, "updated weights take over the memory of the old ones (donation)", "1", FLAG, "executor"),
    Variable(
        "XLA_FLAGS",
        HONOUR,
        "passed to XLA. Flags that only Neuron's compiler knows are dropped, with a warning. With `--xla_dump_to` and the like every program is compiled, "
        "also if a cache on disk has it, since XLA dumps only what it compiles",
        where="environment",
    ),
    *_accepted(
        "choice between implementations of the same mathematics",
        "NEURON_FUSE_SOFTMAX",
        "NEURON_CUSTOM_SILU",
        "XLA_DISABLE_FUNCTIONALIZATION",
    ),
    Variable(
        "NEURON_PARALLEL_COMPILE_DUMP_RESULTS",
        HONOUR,
        "`neuron_parallel_compile` writes neuron_parallel_compile_report.json",
        "0",
        FLAG,
        "nxd_jax.parallel_compile",
    ),
    Variable(
        "NEURON_IGNORE_TRAINING_SCRIPT_ERROR_AND_COMPILE",
        HONOUR,
        "`neuron_parallel_compile` succeeds if all graphs that the script reached are compiled, even if the script failed",
        "0",
        FLAG,
        "nxd_jax.parallel_compile",
    ),
    *_accepted(
        "retries of `neuron_parallel_compile`: a graph that failed to compile would fail again", "NEURON_PARALLEL_COMPILE_MAX_RETRIES"
    ),
]

_DEBUGGING = [
    Variable(
        "NEURON_FRAMEWORK_DEBUG",
        HONOUR,
        "write every compiled graph and its HLO to `MODULE_<hash>/`. Caches on disk are not read then, so that module names and lines are this script's",
        "0",
        FLAG,
        "environment",
    ),
    Variable(
        "NEURON_DUMP_DIR",
        HONOUR,
        "added by nxd_jax: the folder that NEURON_FRAMEWORK_DEBUG writes to",
        "current directory",
        where="environment",
    ),
    Variable(
        "NEURON_USE_EAGER_DEBUG_MODE",
        HONOUR,
        "every op runs by itself, so an error shows at its line (slow); indices are checked, as with NXD_JAX_CHECK_INDICES",
        "0",
        FLAG,
        "debug_modes",
    ),
    Variable("NEURON_LAUNCH_BLOCKING", HONOUR, "wait for every execution to finish", "0", FLAG, "executor"),
    Variable(
        "XLA_METRICS_FILE",
        HONOUR,
        "every step appends `met.metrics_report()` to this file (STDOUT and STDERR: is written there), in the first process of a machine",
        where="debug_modes",
    ),
    Variable("NEURON_FAIL_ON_NAN", HONOUR, "a NaN among the results of an execution raises FloatingPointError", "0", FLAG, "debug_modes"),
    Variable(
        "NXD_JAX_CHECK_INDICES",
        HONOUR,
        "added by nxd_jax: an index out of range (embedding, gather, scatter, index, targets of a loss, ...), and a mask with another number of values than it "
        "selects places, raise IndexError with op, line and rank, after the execution; otherwise the device clamps the index, as the hardware does, or repeats "
        "values",
        "0",
        FLAG,
        "debug_modes",
    ),
    Variable(
        "NXD_JAX_VERIFY",
        HONOUR,
        "added by nxd_jax: what every pass makes of a recorded step is checked while a program is compiled; what breaks a rule raises VerificationError, which "
        "names the pass, the op and its line. For those who change passes, and for reports of wrong results",
        "0",
        FLAG,
        "debug_modes",
    ),
    Variable(
        "NEURON_RT_NUMERICAL_ERRORS_VERBOSITY",
        HONOUR,
        "`critical` does what NEURON_FAIL_ON_NAN=1 does",
        "none",
        one_of("none", "critical"),
        "debug_modes",
    ),
    Variable(
        "NEURON_RT_LOG_LEVEL",
        HONOUR,
        "level of the logger `torch_bridge`; it writes to stderr if no handler is set up",
        "as Python's logging",
        one_of("ERROR", "WARN", "WARNING", "INFO", "DEBUG", "TRACE"),
        "environment",
    ),
    *_accepted(
        "logs of the Neuron runtime",
        "NEURON_RT_LOG_LEVEL_TDRV",
        "NEURON_RT_LOG_LEVEL_NMGR",
        "NEURON_RT_LOG_LEVEL_NRT",
        "NEURON_RT_LOG_LOCATION",
    ),
    *_accepted("source lines are always in the HLO", "XLA_IR_DEBUG", "XLA_HLO_DEBUG"),
    *_accepted("snapshots of the device's inputs (torch 1.13)", "NEURON_DUMP_HLO_SNAPSHOT", "NEURON_NC0_ONLY_SNAPSHOT"),
    *_accepted(
        "profiling of the hardware: use `torch_xla.debug.profiler`",
        "NEURON_PROFILE",
        "NEURON_RT_INSPECT_ENABLE",
        "NEURON_RT_INSPECT_OUTPUT_DIR",
        "NEURON_RT_INSPECT_DEVICE_PROFILE",
        "NEURON_RT_INSPECT_SYSTEM_PROFILE",
        "NEURON_RT_ENABLE_DGE_NOTIFICATIONS",
    ),
]

_RUNTIME = [
    *_accepted(
        "settings of the hardware's runtime",
        "NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS",
        "NEURON_RT_EXEC_TIMEOUT",
        "NEURON_RT_VALIDATE_HASH",
        "NEURON_RT_ALLOW_LEGACY_NEFF",
        "NEURON_RT_MULTI_INSTANCE_SHARED_WEIGHTS",
        "NEURON_RT_ONE_TMPBUF_PAGE_SIZE_MB",
        "NEURON_SCRATCHPAD_PAGE_SIZE",
        "NEURON_RT_CONTIGUOUS_SCRATCHPAD",
        "NEURON_RT_DBG_CC_DMA_PACKET_SIZE",
        "NEURON_RT_DBG_DMA_PACKETIZATION_SIZE",
        "NEURON_TRANSFER_WITH_STATIC_RING_OPS",
        "NEURON_TRANSFER_ALL_PARAMETERS_WITH_STATIC_RING",
        "NEURON_COMBINE_KV_ALLOCATIONS",
    ),
    *_accepted(
        "settings of the network between nodes",
        "NEURON_RT_ROOT_COMM_ID",
        "NEURON_RT_LOW_LATENCY_TASKS_CPU_AFFINITY",
        "NEURON_RT_ONE_THREAD_PER_CORE",
        "NEURON_RT_RANKS_PER_NETWORK_PROXY",
        "NEURON_SKIP_EFA_AFFINITY",
        "FI_PROVIDER",
        "FI_EFA_USE_DEVICE_RDMA",
        "FI_EFA_FORK_SAFE",
    ),
    *_accepted(
        "how instances form an UltraServer",
        "NEURON_RT_ULTRASERVER_MODE",
        "NEURON_RT_ULTRASERVER_SERVER_ID",
        "NEURON_RT_ULTRASERVER_NODE_ID",
        "NEURON_GLOBAL_TOPOID",
        "NEURON_GLOBAL_TOPOID0_HOST",
        "NEURON_ULTRASERVER_NODE_CONFIG",
    ),
    *_accepted(
        "when gradients and weights are exchanged: XLA schedules its own collectives",
        "BUCKET_CAP_MB",
        "ALLREDUCE_GRADIENTS_BUCKET_SIZE_MB",
        "COLLECTIVE_BUCKETSIZE_IN_MB",
        "NEURON_EXPERIMENTAL_COMPRESS_RG",
        "NEURON_MICS_PARTITION_GROUP_SIZE",
        "NEURON_FSDP",
        "NEURON_FSDP_CC_MULTISTREAM",
        "NEURON_NXD_FSDP_CC_MULTISTREAM",
        "NEURON_FSDP_NUM_LAYER_EARLY_AG_SHIFT",
        "NEURON_FSDP_NUM_LAYER_LATE_RS_SHIFT",
    ),
    *_accepted(
        "settings of Neuron's plug-in for JAX",
        "NEURON_FORCE_PJRT_PLUGIN_REGISTRATION",
        "NEURON_RUN_TRIVIAL_COMPUTATION_ON_CPU",
    ),
    *_accepted(
        "tuning of the host process",
        "XLA_USE_DUMMY_STORE",
        "TORCH_DIST_INIT_BARRIER",
        "XLA_TRANSFER_SEED_ASYNC",
        "XLA_HANDLE_SPECIAL_SCALAR",
        "XLA_DENSE_GATHER_FACTOR",
        "MALLOC_ARENA_MAX",
    ),
    *_accepted(
        "settings of TorchNeuron, another backend",
        *(
            f"TORCH_NEURONX_{name}"
            for name in (
                "DEBUG_DIR",
                "PRESERVE_COMPILATION_ARTIFACTS",
                "DISABLE_FALLBACK_EXECUTION",
                "DYNAMO_DISABLE_CPU_AUTOCOPY",
                "FALLBACK_ONLY_FOR_UNIMPLEMENTED_OPS",
                "ENABLE_STACK_TRACE",
                "DISABLE_NEFF_CACHE",
                "NEFF_CACHE_DIR",
                "LOG_LEVEL",
                "METRICS_DIR",
                "ENABLE_HOST_CC",
                "ENABLE_ASYNC_NRT",
            )
        ),
    ),
]

_OWN = [
    Variable(
        "NXD_JAX_INSTANCE",
        HONOUR,
        "the instance that is emulated, such as trn1.32xlarge; `nxd-run --instance` sets it",
        "the smallest of the chip's family that has the cores",
        where="nxd_jax.topology",
    ),
    Variable("NXD_JAX_NNODES", HONOUR, "how many such instances there are; `nxd-run --nnodes` sets it", "1", where="nxd_jax.topology"),
    Variable(
        "NXD_JAX_PEER_TIMEOUT",
        HONOUR,
        "seconds without a heartbeat of JAX's runtime after which a process of several is lost, and the others end (docs/reference/processes.md)",
        "40",
        count(5),
        "watch",
    ),
    Variable(
        "NXD_JAX_STRICT_RANKS",
        HONOUR,
        "1: a number of rank 0 that all ranks would use in tensor work is an error, not a warning (docs/reference/ranks.md)",
        "0",
        where="rank_numbers",
    ),
    Variable(
        "NXD_JAX_STRICT_REPLICAS",
        HONOUR,
        "1: an update that differs among ranks that share a parameter is an error, not a warning (docs/reference/ranks.md)",
        "0",
        where="check_replicas",
    ),
    Variable(
        "NXD_JAX_INDEPENDENT_DRAWS",
        HONOUR,
        "1: ranks of one process draw different random numbers (dropout masks, say) along the mesh axes that a value varies over; 0: equal seeds give "
        "equal numbers on all ranks, as in separate processes (docs/explanation/random_numbers.md)",
        "0",
        FLAG,
        "random_state",
    ),
    Variable(
        "NXD_JAX_REPLAY",
        HONOUR,
        "auto: play modules that are moved to xla from recordings once they have been called a few times, and models of `initialize_parallel_model`; all: both "
        "from their first calls on; 1: those models alone; 0: record everything op by op (docs/how-to/play_modules.md)",
        "auto",
        REPLAYED,
        "replay_policy",
    ),
    Variable(
        "NXD_JAX_FUSED_OPTIMIZERS",
        HONOUR,
        "1: record a step of torch's SGD, Adam, AdamW, Adagrad or Adafactor as one op, with torch's numbers; 0: op by op",
        "1",
        FLAG,
        "fused_step",
    ),
    Variable(
        "NXD_JAX_FOLD",
        HONOUR,
        "from how many equal layers in a row on a program computes them as one loop over stacked weights; 0: never",
        "12",
        count(0),
        "fold_repeats",
    ),
    Variable(
        "NXD_JAX_SPECULATE",
        HONOUR,
        "MiB of weights and optimizer states up to which the program of a training step starts before all of the step is recorded, with what it is expected to "
        "take; if it takes something else, its results are dropped and it runs again; 0: never",
        "4",
        count(0),
        "debug_modes",
    ),
    Variable(
        "NXD_JAX_COLD_SHAPES",
        HONOUR,
        "1: where a program has been compiled for three shapes, others run in eager torch on the CPU twice before they are compiled (a text that grows, "
        "batches padded to their longest sentence); 0: each is compiled at once. Only on one CPU device",
        "1",
        FLAG,
        "debug_modes",
    ),
    Variable(
        "NXD_JAX_TORCH_KERNELS",
        HONOUR,
        "1: on one CPU device, what XLA's own code for CPUs is slow at (products of a mixture of experts, grouped convolutions) is computed "
        "by kernels of torch, which the compiled program calls; 0: everything is XLA's",
        "1",
        FLAG,
        "debug_modes",
    ),
    Variable(
        "NXD_JAX_KEEP_FREED_MEMORY",
        HONOUR,
        "1: the process keeps memory that a step has freed for the next one, which on CPUs saves a sixth of a step's CPU time: in a heap of each "
        "thread, or in one for all where much is allocated when JAX starts or compiled programs are kept on disk; 0: "
        "glibc gives it back. Has no effect where glibc's own variables or another allocator are set",
        "1",
        FLAG,
        "torch_bridge.config.freed_memory",
    ),
    Variable(
        "NXD_JAX_EXECUTABLES",
        HONOUR,
        "1: keep executables in the cache folder under a key made of the recorded graph, too, so that a second start does not trace; 0: under JAX's key, "
        "made of the HLO, alone",
        "1",
        FLAG,
        "executable_cache",
    ),
    Variable(
        "NXD_JAX_COMPILE_WORKERS",
        HONOUR,
        "how many graphs `neuron_parallel_compile` compiles at a time in each process; each needs memory; 1: one after the other",
        "the cores, at most 8",
        count(1),
        "torch_bridge.compiler.background_compile",
    ),
    Variable(
        "NXD_JAX_CHECKPOINT_FORMAT",
        HONOUR,
        "what `nxd.save_checkpoint` writes: nxd: full arrays, for any layout of ranks; original: the files that NxD itself reads, one for each rank "
        "(docs/how-to/checkpoints.md)",
        "nxd",
        one_of("nxd", "original"),
        "nxd_jax.trainer.checkpoint",
    ),
    Variable(
        "NXD_JAX_CHECKPOINT_CHECKSUMS",
        HONOUR,
        "1: arrays in checkpoints have checksums, and every load checks them, for about a second of CPU time for each GB, and memory for half of what a "
        "process writes while it does; 0: they have none",
        "1",
        FLAG,
        "nxd_jax.checkpoint.chunk_sums",
    ),
    Variable(
        "NXD_JAX_FP8_MAX",
        HONOUR,
        "the largest number that quantization to float8_e4m3fn makes: 240 fits Neuron's format, 448 is that of OCP and GPUs (docs/how-to/quantize.md)",
        "240",
        one_of("240", "448"),
        "nxd_jax.quantization.quantization_config",
    ),
    Variable("NXD_JAX_TOP", HONOUR, "tell `nxd-top` what this process does (docs/reference/nxd_top.md)", "1", FLAG, "publisher"),
    Variable(
        "NXD_JAX_TOP_DIR",
        HONOUR,
        "the folder where processes and `nxd-top` meet",
        "`$XDG_RUNTIME_DIR/nxd_jax`, else `nxd_jax-<uid>` among temporary files",
        where="publisher",
    ),
]

SECTIONS = {
    "Cores and ranks": _LAYOUT,
    "Precision": _PRECISION,
    "Compiling": _COMPILER,
    "Finding bugs": _DEBUGGING,
    "Added by nxd_jax": _OWN,
    "Runtime and network": _RUNTIME,
}
"""All variables by subject."""

VARIABLES: dict[str, Variable] = {v.name: v for rows in SECTIONS.values() for v in rows}
"""All variables by name."""

# -- the page -------------------------------------------------------------------------------------

_HEAD = """# Environment variables

Every variable of Neuron and torch_xla, and what it does here. `python -m torch_bridge.config.variables > docs/reference/environment.md` writes this page.

| rule | meaning |
| --- | --- |
| honour | acted on. A value that is not allowed raises `ValueError` |
| warn | has no effect here, and a warning says so |
| no effect | accepted in silence, because nothing here depends on it |

When variables are read:

| variables | read |
| --- | --- |
| *Cores and ranks* | when the script first asks about ranks |
| *Precision*, and `--auto-cast` in `NEURON_CC_FLAGS` | at every execution |
| *Added by nxd_jax* | when they are first needed, most of them when the first `xla` tensor is made |
| all others | when the first `xla` tensor is made; a script may set them after its imports |

A variable whose name starts with `NEURON_` and that is not listed here is named in a warning, together with the closest name that is listed.
A cell of *values* that is empty stands for any text, or for values that are checked where they are used.
"""


def _table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    lines = [" | ".join(cells) for cells in (header, ("---",) * len(header), *rows)]
    return [f"| {line} |" for line in lines]


def _without_effect(accepted: Iterable[tuple[str, str]]) -> list[str]:
    """A table of what is accepted, a row for each subject; nothing if there is none. accepted: pairs of name and subject."""
    names: dict[str, list[str]] = {}
    for name, subject in accepted:
        names.setdefault(subject, []).append(name)
    return ["No effect:", "", *_table(("subject", "names"), ((s, ", ".join(n)) for s, n in names.items())), ""] if names else []


def _values(flag: Any) -> str:
    return flag.kind.allowed if flag.kind else "" if flag.takes_value else "takes no value"


def page() -> str:
    """The text of docs/reference/environment.md."""
    from torch_bridge.config import compiler_flags

    lines = [_HEAD]
    for title, variables in SECTIONS.items():
        lines += [f"## {title}", ""]
        rows = [(f"`{v.name}`", v.rule, v.meaning, v.default, v.kind.allowed if v.kind else "") for v in variables if v.rule != ACCEPT]
        if rows:
            lines += [*_table(("variable", "rule", "meaning", "default", "values"), rows), ""]
        lines += _without_effect((f"`{v.name}`", v.meaning) for v in variables if v.rule == ACCEPT)
    flags = [(" ".join(f"`{n}`" for n in f.names), f) for f in compiler_flags.FLAGS]
    honoured = [(names, f.rule, f.meaning, _values(f)) for names, f in flags if f.rule != ACCEPT]
    lines += [
        "## NEURON_CC_FLAGS",
        "",
        "Flags that start with `--internal-` have no effect either. An unknown flag is named in a warning.",
        "",
    ]
    lines += [*_table(("flag", "rule", "meaning", "values"), honoured), ""]
    lines += _without_effect((names, f"{f.meaning} ({_values(f)})" if _values(f) else f.meaning) for names, f in flags if f.rule == ACCEPT)
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(page())
