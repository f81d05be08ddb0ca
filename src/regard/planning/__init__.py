"""Plan a training before it runs: memory, time, communication and cost, on one GPU or a thousand.

    plan = make_plan(load("wmt14-en-de-big"), HARDWARE["h100"], gpus=16)
    plan.memory, plan.chosen.tokens_per_second

`hardware` is the table of constants, `trace` runs a step without data, `speed` models kernels and collectives.
"""

from regard.planning.hardware import HARDWARE, Hardware
from regard.planning.plan import Plan, RankMemory, ScalingPoint, fits, make_plan

__all__ = ["HARDWARE", "Hardware", "Plan", "RankMemory", "ScalingPoint", "fits", "make_plan"]
