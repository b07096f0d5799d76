"""The study of vLLM #28490: claims, engine recordings, the overview, and what its notebooks share."""

from importlib import import_module
from typing import Any

_MODULES = {  # the public names of each module
    "attnlab.show.plots": "plot_blocks plot_seq_error",
    "study.plots": "plot_fits plot_formats plot_merge plot_sizes plot_story",
    "study.broken_kernel": "PLANTED left_unexplained named_by_catalogue plant "
    "plot_weights_of vllm_source with_values_of",
    "study.claims": "judge_claims",
    "study.engine_batch": "compare_fills engine_case engine_run rounding_step",
    "study.failing_test": "FAULT REPAIR call_errors case_of_call example_kernel run_failing_test",
    "study.html_table": "table",
    "attnlab.mla.faults": "faults_of",
    "study.mla_chain": "MLA_EDITS edited_ops mla_panel mla_source run_faults",
    "study.head_tiles": "HEAD_TILE_EVENTS HEAD_TILE_IMPACT HEAD_TILE_REPAIR predicted_heads "
    "tile_case tile_lab tile_source upstream_text wrong_heads",
    "study.hypotheses": "predict table_of",
    "study.incident": "post_mortem pull_request",
    "study.kernels": "fp8_values real_kernels",
    "study.mutants": "is_full_size mutant nine_mutants",
    "study.overview": "read_chapters",
    "study.timeline_plot": "plot_timeline",
    "study.predictions": "decode_contract decodes_on_rocm missing_token_bound "
    "on_int64 outcomes predict_chapters predict_claims predict_stages predict_status read_as_int32 "
    "tail_reaches_output",
    "study.production": "EngineRun record_engine separate_cache_writes",
    "study.rocm_device": "SWAPPED_LANES emulated",
    "study.set_up": "by_verdict case_from conclude describe_figures plain_text "
    "round_trips stage_stories",
}
_PUBLIC = {name: module for module, names in _MODULES.items() for name in names.split()}
__all__ = list(_PUBLIC)


def __getattr__(name: str) -> Any:
    """Load a public name at its first use, so that a notebook pays only for what it asks for."""
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)
