"""The entry point of vLLM's group ``vllm.general_plugins``.

vLLM calls :func:`activate` in every process that it starts, some of them twice. Without the environment
variable, nothing is imported and nothing happens.
"""

import os

VARIABLE = "ATTNLAB_CAPTURE"
NAME = "attnlab"  # of the entry point; VLLM_PLUGINS must have it if that is set


def activate() -> None:
    """Start the capture if ``ATTNLAB_CAPTURE`` has its settings; never raise."""
    settings = os.environ.get(VARIABLE)
    if not settings:
        return
    try:
        from attnlab.serving.start import start

        start(settings)
    except Exception as error:  # the server must start in any case
        import logging

        text = " ".join(str(error).split())
        log = logging.getLogger("attnlab.serving")
        log.warning("attnlab captures nothing: %s: %s", type(error).__name__, text)
