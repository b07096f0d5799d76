"""Notebook 11: the chain of MLA, with faults planted in a copy of vLLM's Triton source at run time.

Nothing of vLLM is part of attnlab: the text is read from an installed vLLM, a wheel, an sdist or a checkout.
"""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from attnlab.case.errors import Unavailable, Unsupported
from attnlab.kernels.vllm.source import Source, find_source
from attnlab.mla.mla_case import MlaCase
from attnlab.mla.partial import VllmOps
from attnlab.mla.run import MlaResult, run_path
from study.broken_kernel import PlantedFault, editable_source, plant_fault

if TYPE_CHECKING:
    from study.fault_panel import MlaPanel

_SUMS = """\
    p_se = tl.exp(p_lse)
    s_se = tl.exp(s_lse)
    out_se = p_se + s_se

    if OUTPUT_LSE:
        out_lse = tl.log(out_se) + max_lse
"""
# By the name of the fault that explains it.
MLA_EDITS: Mapping[str, PlantedFault] = {
    "merge_base_2": PlantedFault(
        module="triton_merge_attn_states",
        before=_SUMS,
        after=_SUMS.replace("tl.exp(", "tl.exp2(").replace("tl.log(", "tl.log2("),
        text="the merge takes powers of 2 of an LSE with base e",
    ),
    "weights_exchanged": PlantedFault(
        module="triton_merge_attn_states",
        before="    p_scale = p_se / out_se\n    s_scale = s_se / out_se\n",
        after="    p_scale = s_se / out_se\n    s_scale = p_se / out_se\n",
        text="the merge multiplies each part by the weight of the other",
    ),
    "both_empty_as_nan": PlantedFault(
        module="triton_merge_attn_states",
        before='    out = tl.where(max_lse == float("-inf"), 0.0, out)\n',
        after="",
        text="the merge of two empty parts stays 0 / 0, as before 0.27",
    ),
    "page_as_slot": PlantedFault(
        module="triton_decode_attention",
        before="kv_page_number * stride_buf_kpbs + (offs_n % PAGE_SIZE) * stride_buf_kbs",
        after="kv_page_number * stride_buf_kbs + (offs_n % PAGE_SIZE) * stride_buf_kbs",
        text="the decode kernel takes an entry of the block table as a slot",
    ),
}


def mla_source(path: str | None) -> Source:
    """Return the vLLM at ``path``, or the installed one; raise Unavailable without the text to edit."""
    return editable_source(path, MLA_EDITS)


def edited_ops(source: Source, name: str, folder: Path, case: MlaCase) -> VllmOps:
    """Return the ops of a copy of a vLLM with a fault of MLA_EDITS, under Triton's interpreter."""
    edited = find_source(plant_fault(source, MLA_EDITS[name], name, folder))
    return VllmOps(source=edited, platform=case.machine)


def run_faults(
    case: MlaCase, names: Sequence[str], ops: VllmOps | None = None
) -> dict[str, MlaResult]:
    """Return the result of a case with each of some faults planted in the steps between the ops."""
    return {name: run_path(case, ops, name) for name in names}


def mla_panel(cases: Mapping[str, MlaCase]) -> "MlaPanel":
    """Return a panel with a toggle for each case and each of its faults."""
    from study.fault_panel import MlaPanel

    return MlaPanel(dict(cases))


def cause_of_edit(name: str) -> tuple[str | None, str | None]:
    """Return the first wrong step and the cause of an edit of the installed vLLM.

    Raises Unavailable without a vLLM.
    """
    source, case = (
        mla_source(None),
        MlaCase(num_heads=1, query_lens=(2,), ctx_lens=(40,), chunk_rows=16),
    )
    with tempfile.TemporaryDirectory() as folder:
        found = run_path(case, edited_ops(source, name, Path(folder), case))
    return found.first_wrong, found.cause


def predicted_cause() -> dict[str, str | None]:
    """Return the first wrong step and the cause of a merge with exchanged weights, for the case above.

    40 tokens of context are three chunks of at most 16. The first is copied, so the first merge is that of
    the second.
    """
    if not is_mla_available():
        return {"step": None, "cause": None}
    return {"step": "merge chunk 1", "cause": "weights_exchanged"}


def is_mla_available() -> bool:
    """Answer whether a vLLM is installed whose text the faults change."""
    try:
        mla_source(None)
    except (Unavailable, Unsupported):
        return False
    return True
