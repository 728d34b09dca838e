from .config import (
    PlannedLaunchConfig as PlannedLaunchConfig,
    PlanSettings as PlanSettings,
)
from .devices import AutoDeviceConfig as AutoDeviceConfig, DeviceConfig as DeviceConfig
from .generation_plan import plan_generation as plan_generation
from .memory import plan_memory as plan_memory
from .memory_plan import HostMemory as HostMemory, MemoryPlan as MemoryPlan
from .plan_command import check_plan as check_plan, plan_run as plan_run
from .plan_result import PlanResult as PlanResult, chosen_settings as chosen_settings, switched_off as switched_off
from .planned_run import PlannedRun as PlannedRun
from .search.advice import Fitting as Fitting, advise as advise
from .search.advice_report import advice_lines as advice_lines
from .search.planner import Planner as Planner
from .trace.step_trace import StepTrace as StepTrace, trace_step as trace_step
