"""Triton's blocks of a stored revision, as files to download: for pages and REST alike."""

from dataclasses import dataclass

from django.http import Http404, HttpResponse

from controlplane.policy.configuration import Configuration
from controlplane.policy.models import Revision
from controlplane.policy.triton import config_blocks

ID_DIGITS = 9


@dataclass(frozen=True)
class TritonLink:
    """A pool whose blocks may be downloaded."""

    pool: str
    slots: int


def triton_links(content: Configuration) -> list[TritonLink]:
    """The pools of a revision that have slots to run something on."""
    return [
        TritonLink(slug, len(document.pool.slots))
        for slug, document in sorted(content.pools.items())
        if document.pool.slots
    ]


def triton_file(revision: Revision, pool: str, *, agent: str = "") -> HttpResponse:
    """The blocks as a text file; `agent` is an agent's id, or empty for the whole pool. Raises Http404."""
    document = Configuration.from_json(revision.configuration).pools.get(pool)
    if document is None:
        raise Http404("The revision has no such pool.")
    if agent and not (agent.isdecimal() and len(agent) <= ID_DIGITS):
        raise Http404("An agent is named by its number.")
    try:
        text = config_blocks(document, revision=revision.number, agent_id=int(agent) if agent else None)
    except ValueError as error:
        raise Http404(f"There is nothing to write: {error}.") from None
    response = HttpResponse(text, content_type="text/plain; charset=utf-8")
    name = f"{pool}-r{revision.number}{f'-agent{agent}' if agent else ''}.config.pbtxt"
    response["Content-Disposition"] = f'attachment; filename="{name}"'
    return response
