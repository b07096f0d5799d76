"""Adapt the source of csrc/rocm's attention for a C++ compiler for the CPU.

HIP's extensions of C++ are replaced by names that the headers in ``cpp/`` define. Code that computes is
unchanged, except AMD's inline assembler, and every line keeps its number. A source that lacks an expected
pattern is rejected: the release has changed and the adaptations must be reviewed.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from attnlab.case.errors import Unavailable

FOLDER = "csrc/rocm"
SINGLE = "attention.cu"  # kernels and host code in one file (older releases)
KERNELS = "attention_kernels.cuh"
DISPATCH = "attention_dispatch.cu"
ENTRIES = re.compile(r"attention_paged_attn_\w+\.cu")
HOST_BEGINS = "#define LAUNCH_CUSTOM_ATTENTION_MFMA16"  # everything after it is host code


@dataclass(frozen=True, slots=True, kw_only=True)
class Adaptation:
    """One change of the source text.

    - ``what``, ``why``: its subject and its reason, as text.
    - ``pattern``, ``replacement``: for re.sub.
    - ``least``: the least number of matches; a source with fewer is rejected.
    """

    what: str
    pattern: str
    replacement: str
    why: str
    least: int


_VECTOR_ZERO = r"(\b\w+(?:\[[^\]\n]*\]|\.\w+)+) = \{0\};"
_DPP = (
    r'asm\("v_nop\\n v_nop\\n (v_\w+_f32_dpp) %0, %1, %2 row_ror:(\d+)"(\s*): "=v"\(([^)]*)\)(\s*)'
    r': "v"\(\4\), "v"\(\4\)\);'
)
_ON = r"([^;<>]*)>([\s\\]*)<<<(\w+), (\w+), 0, stream>>>\("
_ATTENTION = r"(paged_attention_ll4mi_QKV_\w+_kernel)<([\s\\]*)T, KVT, KV_DTYPE, OUTT, " + _ON
_REDUCTION = r"(paged_attention_ll4mi_reduce_kernel)<T, OUTT, " + _ON
_SKIP = (
    r"if \(vglobal_fetch_start >= seq_len\) \{(\s*)continue;(\s*)\}(\s*)"
    r"if \((vglobal_fetch_start \+\s*CONTIGUOUS_KV_ELEMS_16B_LOAD >\s*seq_len)\) \{(\s*)(\S+) ="
)
ADAPTATIONS = (
    Adaptation(
        what="includes",
        pattern=r"(?m)^#include .*$",
        replacement="",
        why="the headers in cpp/ replace those of torch, HIP and vLLM",
        least=2,
    ),
    Adaptation(
        what="pragma once",
        pattern=r"(?m)^#pragma once$",
        replacement="",
        why="the text is compiled as a main file",
        least=0,
    ),
    Adaptation(
        what="assertions that always fail",
        pattern=r"static_assert\(false,",
        replacement="static_assert(!sizeof(T),",
        why="g++ 12 rejects static_assert(false) in a branch that is never instantiated",
        least=5,
    ),
    Adaptation(
        what="vectors set to {0}",
        pattern=_VECTOR_ZERO,
        replacement=r"attnlab::clear(\1);",
        why="g++ does not assign {0} to a vector",
        least=8,
    ),
    Adaptation(
        what="shared memory",
        pattern=r"__shared__ (\w+) (\w+)((?:\[[^\]\n]*\])*);",
        replacement=r"auto& \2 = attnlab::shared<\1\3>(__LINE__);",
        why="C++ has no keyword for memory shared by the threads of a block",
        least=6,
    ),
    Adaptation(
        what="assembler: v_…_dpp row_ror",
        pattern=_DPP,
        replacement=r"\4 = attnlab::\1_row_ror(\4, \2);\3\5",
        why="AMD assembler: maximum or sum with the value of another lane in the row",
        least=8,
    ),
    Adaptation(
        what="lanes that skip a matrix instruction",
        pattern=_SKIP,
        replacement=r"if (vglobal_fetch_start >= seq_len) {\1attnlab::clear(\6);\2}\3else if (\4) {\5\6 =",
        why="some lanes skip a matrix instruction that uses the registers of all 64 lanes, active or not; "
        "their contents depend on AMD's compiler; here they are zero, which the code intends",
        least=0,
    ),
    Adaptation(
        what="launches of the attention kernels",
        pattern=_ATTENTION,
        replacement=r'attnlab::launch("\1",\2 {attnlab::type<T>, attnlab::type<KVT>, KV_DTYPE, '
        r"attnlab::type<OUTT>, \3})\4(\5, \6, ",
        why="a launch calls the emulated device, which finds the kernel by name and template arguments",
        least=2,
    ),
    Adaptation(
        what="launches of the reduce kernel",
        pattern=_REDUCTION,
        replacement=r'attnlab::launch("\1", {attnlab::type<T>, attnlab::type<OUTT>, \2})\3(\4, \5, ',
        why="as for the attention kernels",
        least=1,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Texts:
    """The adapted source of a release: for the kernels, and for the host code (which includes both)."""

    kernels: str
    host: str


def has_source(root: Path) -> bool:
    """Return whether the vLLM at ``root`` contains csrc/rocm's attention."""
    return any((root / FOLDER / name).is_file() for name in (SINGLE, KERNELS))


def adapted(root: Path) -> Texts:
    """Return the adapted source of the vLLM at ``root``.

    Raises Unavailable if it has no csrc/rocm attention or the adaptations do not match it.
    """
    folder = root / FOLDER
    if (folder / SINGLE).is_file():
        whole = adapt(SINGLE, (folder / SINGLE).read_text())
        return Texts(kernels=_kernels(SINGLE, whole), host=whole)
    if not (folder / KERNELS).is_file():
        raise Unavailable(
            f"{root} has no {FOLDER}/{SINGLE} and no {FOLDER}/{KERNELS}: use an sdist or a checkout of "
            "vLLM (a wheel does not contain them); attnlab fetch --sdist 0.33.0 downloads one"
        )
    whole = adapt(KERNELS, (folder / KERNELS).read_text())
    entries = sorted(p for p in folder.iterdir() if ENTRIES.fullmatch(p.name))
    if not entries or not (folder / DISPATCH).is_file():
        raise Unavailable(f"{FOLDER} is not as expected: {KERNELS} without {DISPATCH} and entries")
    rest = [_without_includes(path) for path in (*entries, folder / DISPATCH)]
    return Texts(kernels=_kernels(KERNELS, whole), host="\n".join([whole, *rest]))


def adapt(name: str, text: str) -> str:
    """Return a file's text with all adaptations applied; line numbers do not change.

    Raises Unavailable if an expected pattern is missing.
    """
    lines = text.count("\n")
    for change in ADAPTATIONS:
        text, times = re.subn(change.pattern, change.replacement, text)
        if times < change.least:
            raise Unavailable(
                f"{FOLDER}/{name} is not as expected: found {change.what} {times} times in the known form, "
                f"expected at least {change.least}"
            )
    if text.count("\n") != lines:
        raise AssertionError(f"an adaptation of {name} moved lines")
    left = re.search(r"<<<|\basm\b|__shared__", text)
    if left is not None:
        line = text.count("\n", 0, left.start()) + 1
        raise Unavailable(
            f"{FOLDER}/{name} is not as expected: line {line} contains {left[0]!r} in an unknown form"
        )
    return f'#line 1 "{FOLDER}/{name}"\n{text}'


def _kernels(name: str, text: str) -> str:
    """Return the part of an adapted source that is compiled for the device."""
    kernels, mark, _ = text.partition(HOST_BEGINS)
    if not mark:
        raise Unavailable(f"{FOLDER}/{name} is not as expected: it has no {HOST_BEGINS!r}")
    return kernels


def _without_includes(path: Path) -> str:
    text = re.sub(r"(?m)^#include .*$", "", path.read_text())
    return f'#line 1 "{FOLDER}/{path.name}"\n{text}'


def times_adapted(root: Path) -> list[tuple[Adaptation, int]]:
    """Return the adaptations that the vLLM at ``root`` needs, each with its number of matches."""
    folder = root / FOLDER
    file = next((folder / n for n in (SINGLE, KERNELS) if (folder / n).is_file()), None)
    if file is None:
        raise Unavailable(f"{root} has no {FOLDER} attention")
    text = file.read_text()
    counts = [(change, len(re.findall(change.pattern, text))) for change in ADAPTATIONS]
    return [(change, times) for change, times in counts if times]
