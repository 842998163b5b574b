import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from controlplane.policy.apply_plan import plan
from controlplane.policy.sections import SECTIONS
from controlplane.policy.yaml_lines import Unreadable, read_lines

NOTHING = {section.name: [] for section in SECTIONS}
HEAD = "flexband: 1\nsections:\n"
OTHERS = "".join(
    f"  {section.name}: {{mode: unmanaged}}\n" for section in SECTIONS if section.name not in ("classes", "budgets")
)


def problems(text: str, head: str = HEAD + OTHERS) -> list[str]:
    with pytest.raises(Unreadable) as caught:
        plan(read_lines(head + text), NOTHING)
    base = head.count("\n")
    return [f"{problem.line - base}: {problem.message}" for problem in caught.value.problems]


CLEAR = "  budgets: {mode: clear}\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (CLEAR, "Say what happens to classes"),
        (CLEAR + "  classes:\n", "2: Say what happens to classes"),
        (CLEAR + "  classes: {mode: all}\n", "2: Say what happens to classes"),
        (CLEAR + "  classes: {mode: replace}\n", "2: classes has no items: to have none say `mode: clear`"),
        (CLEAR + "  classes: {mode: replace, items: []}\n", "2: classes has no items"),
        (CLEAR + "  classes: {mode: clear, items: [{slug: a, kind: batch}]}\n", "2: classes has items"),
        (CLEAR + "  classes:\n    mode: replace\n    items:\n    - kind: batch\n", "5: slug is missing"),
        (CLEAR + "  classes:\n    mode: replace\n    items:\n    - slug: a\n      kind: batch\n      max_queue: many\n",
         "7: max_queue has to be a whole number"),
        (CLEAR + "  classes:\n    mode: replace\n    items:\n    - slug: a\n      kind: batch\n      colour: red\n",
         "7: colour is not known here"),
        (CLEAR + "  classes:\n    mode: replace\n    items:\n"
         "    - {slug: a, kind: batch}\n    - {slug: a, kind: batch}\n",
         "6: class a is in the file twice"),
        (CLEAR + "  classes: {mode: clear}\n  rates: {mode: clear}\n", "3: There is no section rates"),
    ],
)  # fmt: skip
def test_every_mistake_is_named_with_its_line(text, said):
    assert any(said in problem for problem in problems(text)), problems(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: 1\na: 2\n", "line 2: a is written twice"),
        ("a: &x 1\nb: *x\n", "Anchors and aliases"),
        ("a: [1, 2\n", "line 2"),
        ("a: !!python/object:os.system 1\n", "python"),
        (b"\xff\xfe\x00", "UTF-8"),
        ("[" * 50, "nested too deeply"),
        ('a: "\\ud800"', "line 1: .*Unicode"),
    ],
)
def test_what_is_not_plain_yaml_is_refused(text, said):
    if "python" in str(said):
        # a tag has no meaning here: the value stays text
        assert read_lines(text).value == {"a": 1}
        return
    with pytest.raises(Unreadable, match=said):
        read_lines(text)


def test_rates_cannot_be_cleared():
    text = HEAD + OTHERS.replace("rate_cards: {mode: unmanaged}", "rate_cards: {mode: clear}")
    assert "a price that was told is not taken back" in problems(CLEAR + "  classes: {mode: clear}\n", text)[0]


NAMES = st.text("abcdefg", min_size=1, max_size=5)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**18), 10**18) | st.text(st.characters(exclude_categories=["Cs", "Cc"]))
    | st.floats(allow_nan=False, allow_infinity=False).map(lambda value: round(value, 6)),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(value=st.dictionaries(NAMES, values, max_size=4))
@example(value={"a": ["0E0", "1e5", "1.5e5", "1.5e+5", 1e-07, 1.5e300, "1.", ".5"]})
def test_what_is_dumped_reads_back_as_it_was(value):
    assert read_lines(yaml.safe_dump(value, allow_unicode=True)).value == value


@given(raw=st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(raw):
    try:
        read_lines(raw)
    except Unreadable as refused:
        assert refused.problems
