"""Run every op of a kernel library on hostile cases and report what each op computes wrongly."""

from attnlab.checker.case_check import check_case
from attnlab.checker.finding import KINDS, OBSERVATIONS, Finding
from attnlab.checker.library import Report, check_library

__all__ = ["KINDS", "OBSERVATIONS", "Finding", "Report", "check_case", "check_library"]
