"""Tab completion of `nxdt-train` in a shell: options, files, and the keys of the file that stands before.

eval "$(nxdt-train --completion bash)"        # in ~/.bashrc; --completion zsh in ~/.zshrc
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

SHELLS = ("bash", "zsh")

_BASH = """\
_nxdt_train() {
  local IFS=$'\\n'
  local line=${COMP_LINE:0:COMP_POINT}
  local current=${line##*[[:space:]]}
  COMPREPLY=($(nxdt-train --complete "$line" 2>/dev/null))
  # bash takes "=" for the end of a word: what stands before it is not repeated
  if [[ $current == *=* ]]; then COMPREPLY=("${COMPREPLY[@]#"${current%=*}="}"); fi
  if [[ ${#COMPREPLY[@]} -eq 1 && ( ${COMPREPLY[0]} == *= || ${COMPREPLY[0]} == *. ) ]]; then compopt -o nospace; fi
}
complete -o default -F _nxdt_train nxdt-train
"""
_ZSH = "autoload -U +X bashcompinit && bashcompinit\n"


def script(shell: str) -> str:
    """What a shell reads to complete. Raises ValueError for other shells."""
    if shell not in SHELLS:
        raise ValueError(f"--completion {shell}: must be one of {', '.join(SHELLS)}")
    return _BASH if shell == "bash" else _ZSH + _BASH


def complete(line: str, options: Sequence[str]) -> list[str]:
    """What the last word of a line may become. options: of the command."""
    words = line.split()[1:]
    current = "" if line[-1:].isspace() or not words else words.pop()
    if current.startswith("-"):
        return [option for option in options if option.startswith(current)]
    file = next((Path(word) for word in words if word.endswith(".yaml") and Path(word).is_file()), None)
    if file is None:
        return []
    key, equals, value = current.partition("=")
    tree = _read(file)
    if equals:
        return [f"{key}={found}" for found in _values(tree, key.lstrip("+")) if found.startswith(value)]
    return sorted(set(_keys(tree, key)))


def _read(file: Path) -> Any:
    try:
        return yaml.safe_load(file.read_text())
    except (OSError, yaml.YAMLError):
        return {}


def _keys(tree: Any, typed: str) -> Iterator[str]:
    """The keys one level below what is typed: `section.` or `section.key=`."""
    before, _, last = typed.rpartition(".")
    at = _at(tree, before)
    for name, value in at.items() if isinstance(at, dict) else ():
        if str(name).startswith(last):
            yield f"{before + '.' if before else ''}{name}" + ("." if isinstance(value, dict) else "=")


def _values(tree: Any, key: str) -> list[str]:
    """What a key is in the file, and for switches the other value."""
    value = _at(tree, key)
    if isinstance(value, bool):
        return ["True", "False"]
    return [] if value is None or isinstance(value, (dict, list)) else [str(value)]


def _at(tree: Any, path: str) -> Any:
    for part in path.split(".") if path else ():
        if not isinstance(tree, dict) or part not in tree:
            return None
        tree = tree[part]
    return tree
