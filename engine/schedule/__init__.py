"""Which rows run next: queue, cost, plan, scheduler. Knows blocks and lengths; no tensors, no text."""

from .cost import CostModel, ProgramCost
from .plan import Segment, StepPlan
from .queue import order_of
from .scheduler import Scheduler

__all__ = ["CostModel", "ProgramCost", "Scheduler", "Segment", "StepPlan", "order_of"]
