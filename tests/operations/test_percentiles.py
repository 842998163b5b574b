"""A percentile of several is that of their samples together: a mean of percentiles is none of anything."""

import ast
import re

from controlplane.core.histogram import Histogram, WindowHistogram
from tests.operations.source_text import parsed

MEANS = {"Avg", "StdDev", "average", "fmean", "mean", "median", "nanmean", "Sum", "sum"}
PERCENTILE = re.compile(r"(?<![a-z0-9])(p\d\d|median|quantile|percentile)", re.IGNORECASE)
IN_SQL = re.compile(r"\b(avg|sum)\s*\(\s*[\w.\"]*(p\d\d|quantile|percentile)", re.IGNORECASE)


def test_histograms_are_merged_and_have_no_mean():
    for kind in (Histogram, WindowHistogram):
        assert hasattr(kind, "merge") and hasattr(kind, "quantile_us")
        assert not {"mean", "average", "__add__", "__truediv__", "__float__", "__int__"} & set(dir(kind)), kind


def test_nobody_averages_or_adds_up_percentiles():
    found = []
    for path, tree in parsed().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                name = getattr(node.func, "id", getattr(node.func, "attr", ""))
                if name in MEANS and any(PERCENTILE.search(ast.unparse(one)) for one in node.args):
                    found.append(f"{path}:{node.lineno}")
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and IN_SQL.search(node.value):
                found.append(f"{path}:{node.lineno}")
    assert found == []
