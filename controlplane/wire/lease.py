"""What an agent asks for between reports when a tenant's lease does not cover a request. Golden files pin the bytes."""

from msgspec import Struct

from controlplane.wire.report import Exhausted, Lease, LeaseSpend


class LeaseRequest(Struct, frozen=True):
    """Asks between reports: the tenant and the least that would let the largest waiting request pass.

    `waiting_nanos` is the sum of the bounds of all that wait for this lease. `job` is the UUID of the job whose request
    is in need: what that job has reserved comes first.
    """

    tenant_id: int
    need_nanos: int
    spends: list[LeaseSpend] = []
    waiting_nanos: int = 0
    job: str = ""


class LeaseAnswer(Struct, frozen=True):
    """Every open lease of the agent, and why the tenant asked for has none."""

    leases: list[Lease]
    exhausted: list[Exhausted] = []
