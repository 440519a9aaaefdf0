"""Look inside: the graph that a script records, its HLO, its collectives, the memory of a core, what it costs, why it compiled again,
which modules are played.

from nxd_jax import inspect

step = inspect.look()          # the last executed step; also inspect.look(model, x), inspect.look(run) of an abstract run
print(step)                    # memory, operations and collectives in a few lines
step.collectives               # a table: prints, shows in a notebook, .to_pandas(), .save("file.json")
inspect.why()                  # why the last program that was compiled again was
inspect.replay()               # which modules are played from recordings, and why others are not
inspect.schedule("zbv", stages=8, microbatches=32)  # what a pipeline schedule costs, without any model
inspect.experts(model)         # how busy the experts of MoE layers are, by layer and step
inspect.pipeline(model)        # a step of a pipeline, measured: with inspect.pipeline(model) as step: model.run_train(**batch)
"""

from nxd_jax.inspect.collectives import Collective
from nxd_jax.inspect.costs import Cost, Costs
from nxd_jax.inspect.differences import Difference
from nxd_jax.inspect.experts import ExpertTable, LayerOfExperts, experts
from nxd_jax.inspect.hlo import HloLine, HloText
from nxd_jax.inspect.inspection import Inspection
from nxd_jax.inspect.looking import compare, look
from nxd_jax.inspect.memory import Held, Memory
from nxd_jax.inspect.nodes import Node
from nxd_jax.inspect.pictures import memory_picture, sharding_picture, topology_picture
from nxd_jax.inspect.pictures.experts import experts_picture
from nxd_jax.inspect.pictures.schedule import schedule_picture
from nxd_jax.inspect.pictures.timeline import timeline_picture
from nxd_jax.inspect.pipeline_inspection import PipelineInspection
from nxd_jax.inspect.profiling import Profile, profile
from nxd_jax.inspect.recompiles import Compiled, recompiles, why
from nxd_jax.inspect.replay import PlayedModule, replay
from nxd_jax.inspect.report import Report
from nxd_jax.inspect.schedules import RankOfSchedule, ScheduleTable, schedule
from nxd_jax.inspect.statistics import Statistics, statistics
from nxd_jax.inspect.tables import Column, Table
from nxd_jax.inspect.timeline import pipeline
from nxd_jax.inspect.timeline_measured import RankOfStep, StageOfStep, TaskOfStep
from nxd_jax.inspect.timeline_step import PipelineStep
from nxd_jax.inspect.traffic import Traffic

__all__ = [
    "Collective",
    "Column",
    "Compiled",
    "Cost",
    "Costs",
    "Difference",
    "ExpertTable",
    "Held",
    "HloLine",
    "HloText",
    "Inspection",
    "LayerOfExperts",
    "Memory",
    "Node",
    "PipelineInspection",
    "PipelineStep",
    "PlayedModule",
    "Profile",
    "RankOfSchedule",
    "RankOfStep",
    "Report",
    "ScheduleTable",
    "StageOfStep",
    "Statistics",
    "Table",
    "TaskOfStep",
    "Traffic",
    "compare",
    "experts",
    "experts_picture",
    "look",
    "memory_picture",
    "pipeline",
    "profile",
    "recompiles",
    "replay",
    "schedule",
    "schedule_picture",
    "sharding_picture",
    "statistics",
    "timeline_picture",
    "topology_picture",
    "why",
]
