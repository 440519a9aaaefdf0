"""Parallelism without NxD's names: groups of ranks, regions, layers, gradients. `parallel_layers` and `modules` give it the names that scripts import."""

import pathlib

from torch_bridge import source

source.add_library(str(pathlib.Path(__file__).parents[1]))
