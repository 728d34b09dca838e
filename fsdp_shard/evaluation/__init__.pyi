from .config import EvaluateSettings as EvaluateSettings, check_text as check_text
from .evaluation_run import check_evaluation as check_evaluation, run_evaluation as run_evaluation
from .harness_model import wrap_for_harness as wrap_for_harness
from .model_card.card_subject import CardSubject as CardSubject, read_subject as read_subject
from .model_card.card_text import is_card_of as is_card_of, make_card as make_card
from .model_card.shown_paths import shown_setting as shown_setting
from .report.report_command import ReportFiles as ReportFiles, report_runs as report_runs
