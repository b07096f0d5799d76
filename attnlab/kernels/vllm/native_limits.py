"""What vLLM's ops cannot run natively on a GPU, stated before anything is allocated."""

import torch

from attnlab.case.case import Case
from attnlab.case.fields import refuse
from attnlab.case.platforms import PLATFORMS
from attnlab.tensors.formats import FORMATS, read_format

_FNUZ = (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


def check_fp8_format(case: Case) -> None:
    """Raise InvalidCase if the Case has numbers in AMD's FP8 format and the GPU is of another vendor.

    Triton compiles the format for AMD GPUs of the series gfx94 alone.
    """
    if torch.version.hip is not None:
        return
    e4m3 = case.machine.fp8_e4m3
    used = {read_format(case.kv_cache_dtype, FORMATS[case.dtype].dtype, e4m3).dtype}
    if case.argument.has_fp8:
        used.add(FORMATS[e4m3].dtype)
    if used & set(_FNUZ):
        others = [one.name for one in PLATFORMS.values() if one.fp8_e4m3 != e4m3]
        refuse("platform", f"one of {', '.join(others)} with FP8 on this GPU", case.platform)
