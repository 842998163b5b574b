"""Offers of capacity: what rows of price lists are made of, what meets a requirement, and why the others do not."""

from __future__ import annotations

import json
from datetime import date
from io import StringIO
from pathlib import Path
from random import Random
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from hypothesis import given
from hypothesis import strategies as st

from controlplane.lab.kinds import parse
from controlplane.lab.offer_list import read_offers, words_of
from controlplane.lab.offers import Requirement, offers, refusals, requirement_of, text
from controlplane.lab.traces import TraceError

HEADER = "Cloud,GPU Type,GPU Arch,GPUs,GPU RAM,vCPUs,RAM,On-demand,Per-GPU,Spot,Name"
ROWS = (
    "North,A100 (80 GB),Ampere,8,640,96,1152,40.97,5.12,,n8",
    "North,A100 (40 GB),Ampere,8,320,96,1152,32.77,4.10,9.83,n8-40",
    "South,A100 (80 GB),Ampere,1,80,20-26,120-150,1.55,1.55,,s1",
    "South,A100 (80 GB),Ampere,8,80,200-240,1200-1600,12.40,1.55,,s8",
    "East,A10 (24 GB),Ampere,2,48,12,56,,1.70868,,E MEDIUM",
    "East,A10G (24 GB),Ampere,4,96,48,192,5.67,1.42,1.74,e4",
    "West,Nvidia A100,Ampere,2,160GB,0,0,$6,$4,,w2",
    "West,Nvidia A100,Ampere,2,160GB,0,0,$6,$4,,w2",
    "Old,RTX A6000 (48 GB),Ampere,many,48,1,1,1.00,1.00,,broken",
)
MB = 1_000_000
NANO = 1_000_000_000


def listing(*rows: str, header: str = HEADER) -> bytes:
    return "\r\n".join([header, *(rows or ROWS)]).encode()


def asked(folder: Path, *arguments: str, content: bytes | None = None) -> dict[str, Any]:
    path = folder / "offers.csv"
    path.write_bytes(content or listing())
    return offers(parse("offers", [f"--offers={path}", *arguments]))


def names(answer: dict[str, Any]) -> list[str]:
    return [row["name"] for row in answer["feasible"]]


def test_the_cheapest_that_will_do_comes_first_with_the_price_of_whole_machines(tmp_path):
    answer = asked(tmp_path, "--gpu=A100 (80 GB)", "--count=8", "--hours=10")
    # Of equal sums the fewest machines come first.
    assert names(answer) == ["s8", "s1", "w2", "n8"]
    second = answer["feasible"][1]
    found = second["machines"], second["machine_hour_nanos"], second["hour_nanos"]
    assert found == (8, 1_550_000_000, 12_400_000_000)
    whole = asked(tmp_path, "--gpu=a100", "--memory-gb=80", "--count=6", "--hours=10", "--one-node")
    assert names(whole) == ["s8", "n8"]
    # Six are needed: the machine of eight is paid as a whole.
    assert whole["feasible"][0]["spare_gpus"] == 2 and whole["feasible"][0]["total_nanos"] == 124 * NANO


def test_every_refusal_has_all_its_reasons(tmp_path):
    answer = asked(tmp_path, "--gpu=A100", "--memory-gb=80", "--count=8", "--one-node")
    reasons = {row["name"]: row["reasons"] for row in answer["refused"]}
    assert reasons["n8-40"] == ["a GPU has 40 GB, 80 are needed"]
    assert reasons["s1"] == ["a machine has 1 GPU, 8 are needed in one"]
    assert len(reasons["E MEDIUM"]) == 4 and "no on-demand price" in reasons["E MEDIUM"][-1]
    assert "its GPU is A10G (24 GB)" in reasons["e4"]
    assert answer["listed"] == len(answer["feasible"]) + len(answer["refused"])


def test_rows_are_odd_and_that_is_told(tmp_path):
    found = read_offers(listing())
    by_name = {offer.name: offer for offer in found.offers}
    assert [(bad.line, "number of GPUs" in bad.reason) for bad in found.refused] == [(10, True)]
    assert by_name["w2"].lines == (8, 9) and by_name["w2"].memory_gb == 80 and by_name["w2"].on_demand_nanos == 6 * NANO
    assert "listed 2 times, alike" in by_name["w2"].notes
    assert any("machine's price is 3.00 for each" in note for note in by_name["w2"].notes)
    assert any("lists 80 GB for 8 GPUs" in note for note in by_name["s8"].notes)
    assert any("20-26 vCPUs, 120-150 GB" in note for note in by_name["s1"].notes)
    # Its only price is in the column of one GPU and may be that of both.
    assert by_name["E MEDIUM"].on_demand_nanos is None and by_name["E MEDIUM"].per_gpu_nanos == 1_708_680_000


def test_a_row_of_several_shapes_is_several_offers_priced_by_the_gpu():
    found = read_offers(listing('Any,L4 (24 GB),Lovelace,"1, 2, 4",24,8,32,,0.80,,flex'))
    assert [(offer.gpus, offer.on_demand_nanos) for offer in found.offers] == [
        (1, 800_000_000), (2, 1_600_000_000), (4, 3_200_000_000),
    ]  # fmt: skip
    unpriced = read_offers(listing("Any,L4 (24 GB),Lovelace,1/2,24,8,32,0.80,,,flex"))
    assert [offer.on_demand_nanos for offer in unpriced.offers] == [None, None]


def test_spot_prices_count_only_where_they_are_allowed(tmp_path):
    plain = asked(tmp_path, "--gpu=A10G", "--count=4")
    spot = asked(tmp_path, "--gpu=A10G", "--count=4", "--spot")
    assert plain["feasible"][0]["price"] == "on demand" and plain["feasible"][0]["machine_hour_nanos"] == 5_670_000_000
    assert spot["feasible"][0]["price"] == "spot" and spot["feasible"][0]["machine_hour_nanos"] == 1_740_000_000


def test_what_the_list_does_not_say_counts_against_the_offer(tmp_path):
    header = f"{HEADER},Region,Available from"
    rows = (
        "A,L4 (24 GB),x,1,24,1,1,1.00,1.00,,here,eu-1,2026-11-01",
        "A,L4 (24 GB),x,1,24,1,1,0.90,0.90,,late,eu-1,2027-01-01",
        "A,L4 (24 GB),x,1,24,1,1,0.80,0.80,,away,us-1,2026-11-01",
        "A,L4 (24 GB),x,1,24,1,1,0.70,0.70,,silent,,",
    )  # fmt: skip
    answer = asked(tmp_path, "--gpu=L4", "--count=1", "--region=EU-1", "--start-by=2026-12-01",
                   content=listing(*rows, header=header))  # fmt: skip
    reasons = {row["name"]: row["reasons"] for row in answer["refused"]}
    assert names(answer) == ["here"]
    assert reasons["late"] == ["it can start on 2027-01-01, after 2026-12-01"] and reasons["away"] == ["it is in us-1"]
    assert reasons["silent"] == ["the list does not say its region", "the list does not say when it can start"]


def test_a_measured_requirement_says_how_many(tmp_path):
    path = tmp_path / "capacity.json"
    path.write_text(json.dumps({"needed_slots": 6, "with_one_failed": 7}))
    answer = asked(tmp_path, "--gpu=A100", f"--requirement={path}", "--gpus-per-slot=2")
    assert answer["requirement"]["count"] == 14 and "7 slots that can lose one" in answer["requirement"]["measured_by"]
    path.write_text(json.dumps({"needed_slots": None, "with_one_failed": None}))
    with pytest.raises(ValueError, match="no number of slots"):
        asked(tmp_path, "--gpu=A100", f"--requirement={path}")


@pytest.mark.parametrize(
    ("asked_for", "offered", "is_it"),
    [
        ("A100", "A100 (80 GB)", True), ("a100 (80 gb)", "Nvidia A100 (80GB)", True), ("A10", "A10G (24 GB)", False),
        ("A100 (80 GB)", "A100 (40 GB)", False), ("H100", "H100 PCIe (80GB)", True),
        ("H100 PCIe", "H100 (80 GB)", False),
        ("A6000", "RTX A6000 (48 GB)", True), ("V100-32", "V100 (32 GB)", False),
    ],
)  # fmt: skip
def test_types_are_compared_by_their_words(asked_for, offered, is_it):
    (offer,) = read_offers(listing(f"C,{offered},x,1,,1,1,1.00,1.00,,n")).offers
    assert (not refusals(offer, Requirement(1, asked_for))) is is_it


def test_memory_stands_in_the_name_or_is_shared_out():
    assert words_of("NVIDIA RTX A6000 (48 GB)") == (frozenset({"rtx", "a6000"}), 48.0)
    (offer,) = read_offers(listing("C,A40,x,8,384,1,1,1.00,1.00,,n")).offers
    assert offer.memory_gb == 48


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"a,b\r\n1,2\r\n", "no column cloud"), (HEADER.encode(), "no usable row"), (b"\xff\xfe", "UTF-8"),
        (listing("C,A40,x,0,48,1,1,1.00,1.00,,n"), "1 to 1024 GPUs"),
        (listing("C,A40,x,1,48,1,1,-1.00,1.00,,n"), "is no price"),
        (listing("C,A40,x,1,48,1,1,cheap,1.00,,n"), "cheap"),
    ],
)  # fmt: skip
def test_a_list_that_cannot_be_used_says_why(content, said):
    with pytest.raises(TraceError, match=said):
        read_offers(content)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--count=1"], "--gpu TYPE"), (["--gpu=A40"], "how many"), (["--gpu=A40", "--count=0"], "--count is 1"),
        (["--gpu=A40", "--count=1", "--hours=0"], "--hours 1"),
    ],
)  # fmt: skip
def test_a_requirement_that_makes_no_sense_says_why(tmp_path, arguments, said):
    with pytest.raises(ValueError, match=said):
        requirement_of(parse("offers", ["--offers=x.csv", *arguments]))


offered = st.builds(
    lambda kind, gpus, cents, spot: f"C,{kind},x,{gpus},,1,1,{cents},,{spot},n",
    st.sampled_from(["A100 (80 GB)", "A100 (40 GB)", "H100 (80 GB)", "A10"]), st.integers(1, 8),
    st.sampled_from(["", "1.00", "2.50", "31.37"]), st.sampled_from(["", "0.50", "9.99"]),
)  # fmt: skip


@given(st.lists(offered, min_size=1, max_size=12), st.integers(1, 16), st.booleans(), st.booleans(), st.randoms())
def test_each_offer_is_either_refused_with_a_reason_or_stands_by_its_price(rows, count, one_node, spot, rng: Random):
    wanted = Requirement(count, "A100", one_node=one_node, spot=spot, hours=5)
    listed = read_offers(listing(*rows)).offers
    found = [(offer, refusals(offer, wanted)) for offer in listed]
    for offer, reasons in found:
        price = [offer.on_demand_nanos, offer.spot_nanos if spot else None]
        fits = "a100" in offer.words and (not one_node or offer.gpus >= count)
        assert bool(reasons) is not (fits and any(one is not None for one in price)), (offer, reasons)
    rng.shuffle(rows)
    again = {offer.identity: bool(refusals(offer, wanted)) for offer in read_offers(listing(*rows)).offers}
    assert again == {offer.identity: bool(reasons) for offer, reasons in found}


def test_the_command_prints_a_table_and_names_what_it_left_out(tmp_path):
    path, out = tmp_path / "offers.csv", StringIO()
    path.write_bytes(listing())
    call_command("lab", "offers", "--offers", str(path), "--gpu", "A100 (80 GB)", "--count", "8", stdout=out)
    said = out.getvalue()
    assert "8 x A100 (80 GB), in one machine or several, for 730 h, on demand" in said
    assert "nothing is reserved" in said and "line 10 was left out" in said and "its GPU is A10G" in said
    with pytest.raises(CommandError, match="how many") as error:
        call_command("lab", "offers", "--offers", str(path), "--gpu", "A100")
    assert error.value.returncode == 2


def test_an_answer_of_nothing_that_fits_says_so(tmp_path):
    answer = asked(tmp_path, "--gpu=B200", "--count=1", "--start-by=2026-12-01")
    assert answer["feasible"] == [] and answer["requirement"]["start_by"] == date(2026, 12, 1).isoformat()
    assert "0 of 7 offers meet it" in text(answer)
