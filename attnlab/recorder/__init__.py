"""Record the attention calls of a running program, and read calls that other tools recorded.

- :mod:`attnlab.recorder.capture`: the recording. Ops are wrapped where they are defined
  (:mod:`attnlab.recorder.patches`), tensors are copied before and after the call
  (:mod:`attnlab.recorder.snapshot`).
- :mod:`attnlab.recorder.ops`: the ops that are known.
- :mod:`attnlab.recorder.arguments`: how arguments are read.
"""
