"""Whose CPU time is whose: what this process publishes is the control plane's, the rest of it the simulated agents'."""

import os

import psutil
import pytest

from benchmarks import push_cpu


def test_what_was_published_is_not_the_agents():
    before, after = {"agents": 10.0, "web process": 1.0}, {"agents": 14.0, "web process": 1.5}
    assert push_cpu.of_round(before, after, 1.0) == {"agents": 3.0, "web process": 0.5, "publisher": 1.0}


def test_figures_are_for_one_agent_and_compare_what_both_sides_do_in_place_of_each_other():
    ours = push_cpu.per_agent_us([{"cpu": {"agents": 3.0, "publisher": 1.0, "database": 2.0}, "acked": [0.1] * 10}])
    assert ours == pytest.approx({"agents": 300_000, "publisher": 100_000, "database": 200_000})
    peer = {"agents": 100_000.0, "publisher": 300_000.0, "web process": 700_000.0, "database": 500_000.0}
    said = push_cpu.lines(ours, peer)
    assert "simulating the agent is 50 % of all" in said[0]
    assert said[2].startswith("the peer's control plane takes 10.0x") and said[2].endswith("5.0x")


def test_a_number_of_a_process_on_another_machine_is_nothing_here():
    assert push_cpu._process(os.getpid(), ("no such server",)) is None
    assert push_cpu._process(os.getpid(), (psutil.Process().name(),)).pid == os.getpid()
