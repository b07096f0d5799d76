"""Adapting the text of csrc/rocm's attention, so that a C++ compiler for the CPU takes it.

What HIP adds to C++ is put into words that the headers in ``cpp/`` define. Nothing that computes is
changed but AMD's assembler text, and every line keeps its number. A text that does not have what is
expected of it is refused: then a release has changed, and someone has to look.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from attnlab.case.errors import Unavailable

FOLDER = "csrc/rocm"
SINGLE = "attention.cu"  # kernels and host code in one file, up to 0.2x
KERNELS = "attention_kernels.cuh"
DISPATCH = "attention_dispatch.cu"
ENTRIES = re.compile(r"attention_paged_attn_\w+\.cu")
HOST_BEGINS = "#define LAUNCH_CUSTOM_ATTENTION_MFMA16"  # everything behind it is the host's


@dataclass(frozen=True, slots=True, kw_only=True)
class Adaptation:
    """One change of the text: what it is about, what is looked for, what stands there instead, and why.

    ``least``: how often it must be there, or the text is not the one that is expected.
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
        why="the headers in cpp/ stand for those of torch, HIP and vLLM",
        least=2,
    ),
    Adaptation(
        what="pragma once",
        pattern=r"(?m)^#pragma once$",
        replacement="",
        why="the text is compiled as a file of its own",
        least=0,
    ),
    Adaptation(
        what="assertions that always fail",
        pattern=r"static_assert\(false,",
        replacement="static_assert(!sizeof(T),",
        why="g++ 12 takes a false that does not depend on T for an error in a branch that is never made",
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
        why="shared memory belongs to a block, which C++ has no word for",
        least=6,
    ),
    Adaptation(
        what="assembler: v_…_dpp row_ror",
        pattern=_DPP,
        replacement=r"\4 = attnlab::\1_row_ror(\4, \2);\3\5",
        why="AMD's assembler: maximum or sum with the value of another lane of the row",
        least=8,
    ),
    Adaptation(
        what="lanes that skip a matrix instruction",
        pattern=_SKIP,
        replacement=r"if (vglobal_fetch_start >= seq_len) {\1attnlab::clear(\6);\2}\3else if (\4) {\5\6 =",
        why="some lanes skip a matrix instruction that needs all 64, whether they are active or not; what "
        "their registers hold is up to AMD's compiler: here they hold zeros, which is what is meant",
        least=0,
    ),
    Adaptation(
        what="launches of the attention kernels",
        pattern=_ATTENTION,
        replacement=r'attnlab::launch("\1",\2 {attnlab::type<T>, attnlab::type<KVT>, KV_DTYPE, '
        r"attnlab::type<OUTT>, \3})\4(\5, \6, ",
        why="a launch is a call of the emulated device; the kernel is found by its name and arguments",
        least=2,
    ),
    Adaptation(
        what="launches of the reduce kernel",
        pattern=_REDUCTION,
        replacement=r'attnlab::launch("\1", {attnlab::type<T>, attnlab::type<OUTT>, \2})\3(\4, \5, ',
        why="the same",
        least=1,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Texts:
    """The adapted text of a release: for the kernels, and for the host code (which needs all of it)."""

    kernels: str
    host: str


def has_source(root: Path) -> bool:
    """Answer whether a vLLM at ``root`` comes with csrc/rocm's attention."""
    return any((root / FOLDER / name).is_file() for name in (SINGLE, KERNELS))


def adapted(root: Path) -> Texts:
    """Return the adapted text of the vLLM at ``root``.

    Raises Unavailable where it has no csrc/rocm attention, or one that the adaptations do not fit.
    """
    folder = root / FOLDER
    if (folder / SINGLE).is_file():
        whole = adapt(SINGLE, (folder / SINGLE).read_text())
        return Texts(kernels=_kernels(SINGLE, whole), host=whole)
    if not (folder / KERNELS).is_file():
        raise Unavailable(
            f"{root} has no {FOLDER}/{SINGLE} and no {FOLDER}/{KERNELS}: take an sdist or a checkout of "
            "vLLM, a wheel comes without; attnlab fetch --sdist 0.33.0 gets one"
        )
    whole = adapt(KERNELS, (folder / KERNELS).read_text())
    entries = sorted(p for p in folder.iterdir() if ENTRIES.fullmatch(p.name))
    if not entries or not (folder / DISPATCH).is_file():
        raise Unavailable(f"{FOLDER} is not as expected: {KERNELS} without {DISPATCH} and entries")
    rest = [_without_includes(path) for path in (*entries, folder / DISPATCH)]
    return Texts(kernels=_kernels(KERNELS, whole), host="\n".join([whole, *rest]))


def adapt(name: str, text: str) -> str:
    """Return a file's text with every adaptation made, each of its lines where it was.

    Raises Unavailable where something that is expected is not there.
    """
    lines = text.count("\n")
    for change in ADAPTATIONS:
        text, times = re.subn(change.pattern, change.replacement, text)
        if times < change.least:
            raise Unavailable(
                f"{FOLDER}/{name} is not as expected: {change.what} are there {times} times in the form "
                f"that the lab knows, expected {change.least} or more"
            )
    if text.count("\n") != lines:
        raise AssertionError(f"an adaptation of {name} moved lines")
    left = re.search(r"<<<|\basm\b|__shared__", text)
    if left is not None:
        line = text.count("\n", 0, left.start()) + 1
        raise Unavailable(
            f"{FOLDER}/{name} is not as expected: line {line} has {left[0]!r} in a form that no "
            "adaptation knows"
        )
    return f'#line 1 "{FOLDER}/{name}"\n{text}'


def _kernels(name: str, text: str) -> str:
    """Return the part of an adapted text that is compiled for the device."""
    kernels, mark, _ = text.partition(HOST_BEGINS)
    if not mark:
        raise Unavailable(f"{FOLDER}/{name} is not as expected: it has no {HOST_BEGINS!r}")
    return kernels


def _without_includes(path: Path) -> str:
    text = re.sub(r"(?m)^#include .*$", "", path.read_text())
    return f'#line 1 "{FOLDER}/{path.name}"\n{text}'


def times_adapted(root: Path) -> list[tuple[Adaptation, int]]:
    """Return each adaptation and how often the vLLM at ``root`` needs it, those that it needs."""
    folder = root / FOLDER
    file = next((folder / n for n in (SINGLE, KERNELS) if (folder / n).is_file()), None)
    if file is None:
        raise Unavailable(f"{root} has no {FOLDER} attention")
    text = file.read_text()
    counts = [(change, len(re.findall(change.pattern, text))) for change in ADAPTATIONS]
    return [(change, times) for change, times in counts if times]
