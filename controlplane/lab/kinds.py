"""The questions that the lab answers, by name."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from controlplane.lab import batching, effect, interference, offers, replay, variants


class Kind(NamedTuple):
    """One question: its arguments, its answer, and the answer in words. `runs`: about how many runs are told of."""

    help: str
    add_arguments: Callable[[ArgumentParser], None]
    ask: Callable[[Mapping[str, Any]], dict[str, Any]]
    text: Callable[[Mapping[str, Any]], str]
    runs: int


KINDS: Final = {
    "replay": Kind("traces and jobs through a policy, or through two side by side",
                   replay.add_arguments, replay.replay, replay.text, 2),
    "batching": Kind("sizes and waits of batches of one-shot work, on a service-time curve",
                     batching.add_arguments, batching.sweep, batching.text, 1),
    "interference": Kind("interactive alone, batch alone, both; and whether to buy",
                         interference.add_arguments, interference.interference, interference.text, 42),
    "overload": Kind("the fleet smaller, broken or late, requests larger, a giant tenant, clients that try again",
                     variants.add_overload_arguments, variants.overload, variants.text, 8),
    "designs": Kind("the three isolation designs and strict priority on one load",
                    variants.add_arguments, variants.designs, variants.text, 30),
    "capacity": Kind("slots that a forecast needs, and what breaks first with fewer",
                     variants.add_arguments, variants.capacity, variants.capacity_text, 10),
    "effect": Kind("a recorded load through the policy in force and through a draft, with charges",
                   effect.add_arguments, effect.effect, effect.text, 1),
    "offers": Kind("machines for hire that meet a measured requirement, the cheapest first",
                   offers.add_arguments, offers.offers, offers.text, 1),
}  # fmt: skip


def parse(kind: str, arguments: list[str]) -> dict[str, Any]:
    """Options of a question from its arguments. Raises ValueError that says which is wrong."""
    return parsed(KINDS[kind].add_arguments, kind, arguments)


def parsed(add_arguments: Callable[[ArgumentParser], None], kind: str, arguments: list[str]) -> dict[str, Any]:
    """The same of what is no kind of experiment."""
    parser = ArgumentParser(prog=f"lab {kind}", add_help=False, exit_on_error=False, allow_abbrev=False)
    add_arguments(parser)

    def refuse(message: str) -> Any:
        raise ValueError(message)

    parser.error = refuse  # type: ignore[method-assign]
    try:
        return vars(parser.parse_args(arguments))
    except Exception as error:
        raise ValueError(str(error)) from None
