"""Client windows of ServeGen: as many requests as the rate says, with the shape of their gaps, the same for a seed."""

from __future__ import annotations

import numpy as np
import pytest

from controlplane.lab.arguments import read_trace_use
from controlplane.lab.scenario import TraceUse, load
from controlplane.lab.servegen import WINDOW_US, expand, has_windows
from controlplane.lab.traces import TraceError

HEADER = "client_id,window_start_s,rate_rps,cv,distribution,param_shape,param_scale"


def windows(folder, *rows: str):
    path = folder / "windows.csv"
    path.write_text("\n".join([HEADER, *rows]) + "\n")
    return path


def test_each_window_has_the_requests_of_its_rate(tmp_path):
    path = windows(tmp_path, "0,1200,0.5,1,Gamma,1.0,2.0", "7,1800,0.1,1,Weibull,0.6,0.1", "0,1800,0.25,1,Gamma,3.0,1")
    trace = expand(path, seed=1)
    assert len(trace.requests) == 300 + 60 + 150 and trace.requests[0].at_us == 0
    assert {request.tenant for request in trace.requests} == {"client-0", "client-7"}
    assert trace.length_us < 2 * WINDOW_US and has_windows(path)
    assert [request.at_us for request in trace.requests] == sorted(request.at_us for request in trace.requests)


def test_a_seed_draws_the_same_and_a_cut_holds_the_same_requests(tmp_path):
    path = windows(tmp_path, "0,0,0.5,1,Gamma,1.0,2.0", "1,600,0.5,1,Gamma,1.0,2.0", "1,1200,0.5,1,Gamma,1.0,2.0")
    first, again, other = (expand(path, seed=seed).requests for seed in (1, 1, 2))
    assert first == again != other
    part = expand(path, seed=1, from_us=WINDOW_US, until_us=2 * WINDOW_US).requests
    whole = [one for one in first if one.tenant == "client-1"][: len(part)]
    assert [(one.prompt_tokens, one.output_tokens) for one in part] == [
        (one.prompt_tokens, one.output_tokens) for one in whole
    ]


@pytest.mark.parametrize(("shape", "least", "most"), [(0.05, 2.5, 9.0), (1.0, 0.9, 1.1), (8.0, 0.3, 0.4)])
def test_gaps_vary_as_the_shape_says(tmp_path, shape, least, most):
    path = windows(tmp_path, f"0,0,5,1,Gamma,{shape},1")
    gaps = np.diff([request.at_us for request in expand(path, seed=4).requests])
    assert least < gaps.std() / gaps.mean() < most, "a gamma distribution varies by 1 / sqrt(shape)"


def test_windows_are_a_trace_like_any_other(tmp_path):
    path = windows(tmp_path, "0,0,0.5,1,Gamma,1.0,2.0", "3,0,0.2,1,Gamma,1.0,2.0", "3,600,0.2,1,Pareto,1,1", "x")
    given = load([read_trace_use(f"{path}:class=interactive:for_h=0.05:rate=2")], seed=3)
    assert given.workload.tenants == ("client-0", "client-3") and 100 < len(given.workload) < 160
    assert [bad.line for bad in given.refused["windows.csv"]] == [4, 5]
    assert given.workload.at_us[-1] <= 0.05 * 3.6e9 / 2


def test_any_trace_can_be_cut(tmp_path):
    path = tmp_path / "own.jsonl"
    path.write_text(
        "".join(
            f'{{"at":"2026-10-01T00:{minute:02}:00Z","prompt_tokens":{minute + 1},"output_tokens":2}}\n'
            for minute in range(30)
        )
    )
    work = load([TraceUse(path, "interactive", from_h=1 / 6, for_h=1 / 6)]).workload
    assert work.prompt == list(range(11, 21)) and work.at_us[0] == 0


def test_what_cannot_be_expanded_says_why(tmp_path):
    with pytest.raises(TraceError, match="no usable line; line 2"):
        expand(windows(tmp_path, "0,0,-1,1,Gamma,1,1"), seed=0)
    with pytest.raises(TraceError, match="no request in that time"):
        expand(windows(tmp_path, "0,0,1,1,Gamma,1,1"), seed=0, from_us=10 * WINDOW_US)
    with pytest.raises(TraceError, match="cut it with"):
        expand(windows(tmp_path, "0,0,5000,1,Gamma,1,1"), seed=0)
    with pytest.raises(ValueError, match="tokens=poems"):
        expand(windows(tmp_path, "0,0,1,1,Gamma,1,1"), seed=0, tokens="poems")
