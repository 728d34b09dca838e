from .config import EvaluateSettings as EvaluateSettings, check_text as check_text
from .evaluation_run import check_evaluation as check_evaluation, run_evaluation as run_evaluation
from .report.report_command import ReportFiles as ReportFiles, report_runs as report_runs
