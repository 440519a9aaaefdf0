"""`neuronx_distributed.scripts.yaml_converter`: the sizes of a YAML file of NxD Training as a config.json."""

import json
from pathlib import Path

from nxd_jax.training.config import loading
from nxd_jax.training.converters.setting import of_megatron


def convert_yaml_to_json(yaml_path: str, filename: str = "yaml_config.json") -> str:
    """`yaml_converter.convert_yaml_to_json`: write what `model` of a file for Megatron says; returns `filename`.

    Raises ValueError naming sizes that are missing.
    """
    Path(filename).write_text(json.dumps(of_megatron(loading.plain(loading.load(yaml_path))["model"]), indent=2) + "\n")
    return filename


__all__ = ["convert_yaml_to_json"]
