"""What each op and kernel requires, which kernels vLLM runs, and where a call violates their contracts.

- :mod:`.target`: the platform, release and settings that a call runs with; names of the kernels.
- :mod:`.contract`: the record of what one kernel requires and does.
- :mod:`.kernel_contracts`: the table of these records.
- :mod:`.dispatch`: which kernels vLLM runs for a Case, and why.
- :mod:`.rows`: which sequences a kernel serves, which rows it writes, how many positions it reads.
- :mod:`.slot_states`: which cache slots a kernel reads, and what each slot is to its reader.
- :mod:`.slot_map`: the same for every slot of a cache, for plots.
- :mod:`.violation`: the record of a violation. :mod:`.violations`: the search for violations.

The first four modules import no torch.
"""
