from .config import PlannedDispatchConfig as PlannedDispatchConfig, PlanSettings as PlanSettings
from .memory import MemoryPlan as MemoryPlan, PlannedRun as PlannedRun, plan_memory as plan_memory
from .report import figures as figures, plan_report as plan_report
from .resumed_model import planned_model as planned_model
