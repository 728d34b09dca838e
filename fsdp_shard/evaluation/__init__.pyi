from .config import EvaluateSettings as EvaluateSettings, check_evaluation as check_evaluation, check_text as check_text
from .perplexity import settle_windows as settle_windows
from .registry import EVALUATIONS as EVALUATIONS
