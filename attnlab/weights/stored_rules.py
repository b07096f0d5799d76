"""StoredRead: a rule about caches with a scale per token and head: they are read in a wrong way."""

import dataclasses
from dataclasses import dataclass

from attnlab.weights.plan import Plan
from attnlab.weights.rule import Rule
from attnlab.weights.stored_cache import misread


@dataclass(frozen=True, slots=True)
class StoredRead(Rule):
    """The kernel decodes the cache with a wrong read of :mod:`attnlab.lab.argument_reads`, by its name."""

    name: str

    def apply(self, plan: Plan) -> Plan:
        stored = plan.setup.stored
        if stored is None:
            return plan
        key, gain = misread(stored, self.name)
        setup = dataclasses.replace(plan.setup, key=key.to(plan.setup.device))
        return plan.change(setup=setup, value_gain=gain.to(setup.device)[:, setup.kv_head].T)

    @property
    def text(self) -> str:
        return f"wrong read of the cache: {self.name.replace('_', ' ')}"
