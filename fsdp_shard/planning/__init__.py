"""Memory and time estimates of a run, computed from configs alone.

From the top down:

    plan_command      the command: settings in, `PlanResult` out
    single_plan       the run as configured; search/searched_plan: the best of many (`search=true`)
    search/planner    plans one model with many settings; advice and pareto_front search through it
    memory            the memory of each rank (`MemoryPlan`)
    step/             one training step, point by point: recording/ measures a micro-batch on fake tensors, simulators/
                      replay it with the memory of a wrapper
    costs/            FLOPs, communication and time of a step
    trace/            the real step on fake tensors (`trace=true`); measured/: a plan against its run (`plan RUN`)

A `PlannedRun` is the input: the settings that memory and time depend on.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
