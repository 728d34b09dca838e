from .config import PlannedDispatchConfig as PlannedDispatchConfig, PlanSettings as PlanSettings
from .memory import MemoryPlan as MemoryPlan, PlannedRun as PlannedRun, plan_memory as plan_memory
from .planned_run import RunPlan as RunPlan, check_plan as check_plan, plan_run as plan_run
from .step_trace import StepTrace as StepTrace, trace_step as trace_step
