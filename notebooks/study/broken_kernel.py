"""Notebook 10: faults that are planted in a copy of vLLM's Triton source at run time.

Nothing of vLLM is part of attnlab: the text is read from an installed vLLM, a wheel, an sdist or a checkout.
"""

import dataclasses
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from matplotlib.figure import Figure

from attnlab.case.case import Case
from attnlab.case.errors import Unavailable, Unsupported
from attnlab.case.ops import RELEASES
from attnlab.diagnosis.diagnose import diagnose
from attnlab.kernels.vllm.source import Source, find_source
from attnlab.lab.lab import Lab
from attnlab.weights.conclude import xray
from attnlab.weights.xray import XRay, key_columns, law_points, predict_case, slot_values


@dataclass(frozen=True, slots=True, kw_only=True)
class PlantedFault:
    """A change of one expression: of ``module``, ``before`` becomes ``after``; ``text`` says what changes."""

    module: str
    before: str
    after: str
    text: str


PLANTED: Mapping[str, PlantedFault] = {
    "late start": PlantedFault(
        module="prefix_prefill",
        before="0, cur_batch_ctx_len, BLOCK_SIZE, loop_unroll_factor",
        after="BLOCK_SIZE, cur_batch_ctx_len, BLOCK_SIZE, loop_unroll_factor",
        text="the loop over the context starts with the second tile",
    ),
    "two bases": PlantedFault(
        module="prefix_prefill",
        before="input_precision=IN_PRECISION)\n        qk *= sm_scale\n",
        after="input_precision=IN_PRECISION)\n        qk *= sm_scale * 1.4426950408889634\n",
        text="the loop over the new tokens scales for exp2, and calls exp",
    ),
    "wrong values": PlantedFault(
        module="chunked_prefill_paged_decode",
        before="kv_head_idx * stride_v_cache_1",
        after="0 * stride_v_cache_1",
        text="the decode kernel leaves out the KV head in the address of V",
    ),
}


def vllm_source(path: str | None) -> Source:
    """Return the vLLM at ``path``, or the installed one, in which every fault of PLANTED can be planted."""
    return editable_source(path, PLANTED)


def editable_source(path: str | None, faults: Mapping[str, PlantedFault]) -> Source:
    """Return the vLLM at ``path``, or the installed one; raise Unavailable if it is not the text to edit."""
    source = find_source(path or None)
    for name, fault in faults.items():
        try:
            _check_has(source.op_file(fault.module).read_text(), fault, name, source)
        except Unsupported as error:
            raise Unavailable(str(error)) from error
    return source


def _check_has(text: str, fault: PlantedFault, name: str, source: Source) -> None:
    """Raise Unavailable if a text has not what a fault changes."""
    if fault.before not in text:
        raise Unavailable(f"vLLM {source.version} has no text for the fault {name!r} to change")


def plant(source: Source, name: str, folder: Path) -> Path:
    """Write a copy of the attention ops of a vLLM with a fault of PLANTED; see :func:`plant_fault`."""
    return plant_fault(source, PLANTED[name], name, folder)


def plant_fault(source: Source, fault: PlantedFault, name: str, folder: Path) -> Path:
    """Write a copy of the attention ops of a vLLM with one fault, and return its folder, for a Lab.

    Raises Unavailable if the text of the release has not what the fault changes.
    """
    root = folder / name.replace(" ", "-")
    for ops in source.ops_folders:
        shutil.copytree(source.root / ops, root / ops, ignore=shutil.ignore_patterns("__pycache__"))
    (root / "PKG-INFO").write_text(f"Name: vllm\nVersion: {source.version}\n")
    file = find_source(root).op_file(fault.module)
    text = file.read_text()
    _check_has(text, fault, name, source)
    file.write_text(text.replace(fault.before, fault.after))
    return root


def rule_of(name: str) -> str | None:
    """Return the rule that an X-ray finds for a fault in the installed vLLM, on one head of one sequence.

    None if it finds none; raises Unavailable without a vLLM.
    """
    with tempfile.TemporaryDirectory() as folder:
        source = vllm_source(None)
        case = Case(
            op="context_attention_fwd",
            num_heads=1,
            head_size=64,
            query_lens=(3,),
            ctx_lens=(70,),
            distribution="normal",
            stage="sound",
            platform="sm_90",
            backend="vllm",
            release=source.rules or RELEASES[-1],
        )
        lab = Lab(source=plant(source, name, Path(folder)), device="cpu")
        found = xray(case, lab=lab, confirm=False).description
    return None if found is None else found.text


def is_available() -> bool:
    """Answer whether a vLLM is installed whose text the faults change."""
    try:
        vllm_source(None)
    except (Unavailable, Unsupported):
        return False
    return True


def named_by_catalogue(lab: Lab, case: Case) -> str:
    """Return the defect of the catalogue that explains the output of a Case, or "none"."""
    found = diagnose(case, lab.output(case), lab=lab, propose=False)
    return "none" if found.cause is None else found.cause.name


def left_unexplained(lab: Lab, case: Case, found: XRay) -> tuple[float, float]:
    """Return the largest error of a Case against the reference, and against what an X-ray's rule predicts.

    Raises Unavailable if the X-ray has no rule.
    """
    if found.description is None:
        raise Unavailable(f"the X-ray is {found.status}: it has no rule")
    output = lab.output(case).double()
    errors = (output - lab.reference(case), output - predict_case(found.description, case, lab))
    right, predicted = (float(error.abs().max()) for error in errors)
    return right, predicted


def with_values_of(lab: Lab, found: XRay, kv_head: int) -> torch.Tensor:
    """Return the output of measured weights with the values of one KV head, [rows, heads, head_size]."""
    assert found.case is not None
    setup = dataclasses.replace(found.setup, call=lab.call(found.case))
    values = slot_values(setup)[:, kv_head]
    return found.weights @ values.nan_to_num(0.0)


def plot_weights_of(found: XRay) -> Figure:
    """Draw the weights of the sequence and the head with the largest difference."""
    from attnlab.show.plots import plot_xray

    return plot_xray(key_columns(found), law_points(found))
