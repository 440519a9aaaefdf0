"""The configuration of a training run: checked, and with every default filled in."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from nxd_jax._flags import flag

Options = dict[str, Any]

_NUMBERS = (int, float)
_PRECISION = ("use_master_weights", "use_fp32_grad_acc", "use_master_weights_in_ckpt")


def sizes(**given: Any) -> None:
    """Raise ValueError for a parallel size that is no positive integer."""
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a positive integer, got {value!r}")


def optimizer(given: Options | None) -> Options:
    """`optimizer_config`: zero_one_enabled (False), grad_clipping (True), max_grad_norm (1.0 with clipping; without it None is allowed, too)."""
    clips = not isinstance(given, dict) or bool(given.get("grad_clipping", True))
    allowed = {"zero_one_enabled": bool, "grad_clipping": bool, "max_grad_norm": _NUMBERS if clips else (*_NUMBERS, type(None))}
    found = {"zero_one_enabled": False, "grad_clipping": True, **_checked("optimizer_config", given, allowed)}
    if found["grad_clipping"]:
        found.setdefault("max_grad_norm", 1.0)
    limit = found.get("max_grad_norm")
    if limit is not None and not limit > 0:
        raise ValueError(f"optimizer_config['max_grad_norm'] must be above 0, got {limit!r}; grad_clipping=False turns clipping off")
    return found


def mixed_precision(given: Options | None, zero1: bool) -> Options:
    """`mixed_precision_config`: use_master_weights and use_fp32_grad_acc (as ZeRO-1 is), use_master_weights_in_ckpt (False).

    All three need ZeRO-1, which `check_precision` sees to when the optimizer is made.
    """
    return {
        "use_master_weights": zero1,
        "use_fp32_grad_acc": zero1,
        "use_master_weights_in_ckpt": False,
        **_checked("mixed_precision_config", given, dict.fromkeys(_PRECISION, bool)),
    }


def check_precision(nxd_config: Options) -> None:
    """Raise RuntimeError for precision options that need ZeRO-1, without it."""
    for name in _PRECISION:
        if (nxd_config.get("mixed_precision_config") or {}).get(name) and not nxd_config["optimizer_config"]["zero_one_enabled"]:
            raise RuntimeError(
                f"ZeRO-1 optimizer is not enabled, while `{name}` is True. Set optimizer_config={{'zero_one_enabled': True}}, or "
                f"mixed_precision_config={{'{name}': False}}"
            )


def model_init(given: Options | None, sequential_move_factor: int) -> Options:
    """`model_init_config`: sequential_move_factor (11), meta_device_init (False), param_init_fn (None; required for the meta device)."""
    allowed = {"sequential_move_factor": int, "meta_device_init": bool, "param_init_fn": (Callable, type(None))}
    found = {
        "sequential_move_factor": sequential_move_factor,
        "meta_device_init": False,
        "param_init_fn": None,
        **_checked("model_init_config", given, allowed),
    }
    sizes(**{"model_init_config['sequential_move_factor']": found["sequential_move_factor"]})
    if found["meta_device_init"] and found["param_init_fn"] is None:
        raise ValueError(
            "param_init_fn must be provided when meta_device_init is True: a function of (module, device) that fills the module's own parameters "
            "(init_weight_cpu() of parallel layers, reset_parameters() of torch's)"
        )
    return found


def activation_checkpoint(given: object) -> Any:
    """`activation_checkpoint_config`: None, "full", a class of modules or several. Raises ValueError or TypeError for anything else.

    Any class will do (a mixin, say): whether the model has modules of it is seen when the model is made.
    """
    if given is None or given == "full":
        return given
    if isinstance(given, str):
        raise ValueError(
            f"activation_checkpoint_config={given!r} is unknown: give 'full', None, a module class or a tuple of module classes"
        )
    classes = given if isinstance(given, (list, tuple, set)) else [given]
    if not classes or not all(inspect.isclass(c) for c in classes):
        raise TypeError(f"activation_checkpoint_config must be 'full', None, a torch.nn.Module class or several, got {given!r}")
    return given


def pipeline(given: object) -> Any:
    """`pipeline_config`: a dict or None, also for several stages: the model says what it needs when it is made."""
    if given is not None and not isinstance(given, dict):
        raise AssertionError(f"pipeline_config must be a dict., got {given!r}")
    return given


def _checked(name: str, given: object, allowed: dict[str, Any]) -> Options:
    """A copy of a dict whose keys and types are allowed, with bools for flags. Raises AssertionError, ValueError or TypeError naming the key."""
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise AssertionError(f"{name} must be a dict., got {given!r}")
    found = dict(given)
    for key, value in given.items():
        if key not in allowed:
            raise ValueError(f"{name} has an unknown key {key!r}; it takes {', '.join(allowed)}")
        kind = allowed[key]
        if kind is bool:
            found[key] = flag(f"{name}[{key!r}]", value)
        elif isinstance(value, bool) or not isinstance(value, kind):
            raise TypeError(f"{name}[{key!r}] must be {_kind(kind)}, got {value!r}")
    return found


def _kind(kind: object) -> str:
    if isinstance(kind, Sequence):
        return " or ".join(_kind(k) for k in kind)
    return {int: "an integer", float: "a float", type(None): "None", Callable: "a function"}[kind]
