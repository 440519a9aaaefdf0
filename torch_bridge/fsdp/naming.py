"""Names in sharded state dicts and their metadata, as torch_xla writes them, so that files go from one to the other.

A shard is registered on the wrapper of its unit as `_fsdp_shard.<original name>`, with `SEPARATOR` for each dot; the original name begins below the wrapper:
`_fsdp_wrapped_module._fpw_module.0.weight`, or `_fsdp_wrapped_module.flat_param_0`. torch_xla has a wrapper more than we do, `_fpw_module`, which it leaves
out of the names of modules.
"""

from __future__ import annotations

SEPARATOR = "_FSDP_SHARD_SEPARATOR_"
SHARD = "_fsdp_shard"
WRAPPED = "_fsdp_wrapped_module"
INNER = "_fpw_module"
FLAT = "flat_param_"


def joined(*parts: str) -> str:
    """A dotted path of the parts that are not empty."""
    return ".".join(part for part in parts if part)


def original(path: str) -> str:
    """What torch_xla calls the parameter at this path of the wrapped module."""
    return joined(WRAPPED, INNER, path)


def flat(number: int) -> str:
    """What torch_xla calls the flat parameter with this number in its unit."""
    return joined(WRAPPED, f"{FLAT}{number}")


def registered(original_name: str) -> str:
    """Under which name a wrapper registers the shard of such a parameter."""
    return joined(SHARD, original_name).replace(".", SEPARATOR)


def plain(name: str) -> str:
    """The name in the module without wrappers."""
    return ".".join(part for part in name.split(".") if part not in (WRAPPED, INNER))


def unit_and_shard(entry: str) -> tuple[str, str] | None:
    """(path of the unit, registered name) of an entry of a sharded state dict; None for what is not sharded."""
    parts = entry.split(".")
    at = next((k for k, part in enumerate(parts) if part.startswith(SHARD)), None)
    return None if at is None else (".".join(parts[:at]), ".".join(parts[at:]))
