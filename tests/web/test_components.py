"""Tags and includes: states are told by word and shape, text is escaped, unknown never looks healthy."""

import pytest
from django import forms
from django.contrib.auth.models import AnonymousUser
from django.template import Context, RequestContext, Template, TemplateSyntaxError
from django.test import RequestFactory

from controlplane.web.pagination import Page


def render(source: str, **context) -> str:
    return Template("{% load flexband %}" + source).render(Context(context))


@pytest.mark.parametrize("state", ["ok", "risk", "bad", "unknown", "neutral"])
def test_chip_has_shape_and_word(state):
    html = render("{% chip state word %}", state=state, word="Word <b>")
    assert f'class="chip {state}"' in html
    assert "<svg" in html
    assert "Word &lt;b&gt;" in html


@pytest.mark.parametrize("state", ["", None, "green", "OK"])
def test_a_state_nobody_knows_shows_as_unknown(state):
    assert 'class="chip unknown"' in render('{% chip state "x" %}', state=state)


def test_meter_without_a_value_is_unknown_and_a_dash():
    html = render('{% meter none "ok" "Budget left" "0" %}', none=None)
    assert "meter unknown" in html
    assert "—" in html
    assert "used" not in html


@pytest.mark.parametrize(
    ("settled", "limit", "forecast", "state"),
    [
        (10, 100, 50, "ok"),
        (10, 100, 120, "risk"),
        (100, 100, 100, "bad"),
        (None, 100, None, "unknown"),
        (5, 0, None, "unknown"),
    ],
)
def test_budget_bar_grades_by_its_numbers(settled, limit, forecast, state):
    html = render("{% budget_bar s l 0 f %}", s=settled, l=limit, f=forecast)
    assert f'class="budget {state}"' in html
    assert ('class="limit"' in html) == (state == "risk")


def test_budget_bar_never_leaves_its_track():
    html = render("{% budget_bar s l h %}", s=90, l=100, h=50)
    assert "--from:90%;--v:10%" in html


def test_panel_puts_slots_where_they_belong():
    html = render(
        '{% panel title=title id="q" meta="m" flush=True %}body{% actions %}<a>act</a>{% endactions %}'
        "{% foot %}proof{% endfoot %}{% endpanel %}",
        title="A & B",
    )
    assert '<h2 id="q-title">A &amp; B</h2>' in html
    assert html.index("<a>act</a>") < html.index('class="panel-body flush"') < html.index("body")
    assert '<footer class="panel-foot">proof</footer>' in html
    assert html.count("act</a>") == 1


def test_nested_panels_keep_their_own_slots():
    html = render(
        '{% panel title="out" %}{% foot %}of out{% endfoot %}'
        '{% panel title="in" %}{% foot %}of in{% endfoot %}x{% endpanel %}{% endpanel %}'
    )
    assert html.index("of in") < html.index("of out")
    assert html.count("of in") == html.count("of out") == 1


@pytest.mark.parametrize(("state", "sign"), [("loading", 'aria-busy="true"'), ("error", "Failed"), ("stale", "Stale")])
def test_panel_states_are_told(state, sign):
    html = render('{% panel title="t" state=state %}{% endpanel %}', state=state)
    assert sign in html
    assert f"is-{state}" in html


def test_panel_refuses_an_option_it_does_not_know():
    with pytest.raises(TemplateSyntaxError, match="panel takes"):
        render('{% panel titel="x" %}{% endpanel %}')


class Example(forms.Form):
    amount = forms.DecimalField(label="Monthly budget, EUR", help_text="For example 12000.00", min_value=10)
    note = forms.CharField(required=False)


def test_field_ties_label_hint_and_error_to_its_input():
    form = Example({"amount": "3"})
    html = render('{% include "components/field.html" with field=form.amount unit="EUR" %}', form=form)
    assert '<label for="id_amount">Monthly budget, EUR</label>' in html
    assert 'id="id_amount_helptext"' in html
    assert 'id="id_amount_error"' in html
    assert 'aria-invalid="true"' in html
    assert 'value="3"' in html
    assert "<span>EUR</span>" in html


def test_error_summary_links_to_the_field():
    form = Example({"amount": "3"})
    html = render('{% include "components/error_summary.html" %}', form=form)
    assert 'href="#id_amount"' in html
    assert form.errors["amount"][0] in html
    assert render('{% include "components/error_summary.html" %}', form=Example({"amount": "30"})).strip() == ""


def test_before_and_after_are_said_not_only_struck():
    html = render('{% include "components/before_after.html" with before=none after="4" %}', none=None)
    assert "before </span>—</del>" in html
    assert "after </span>4</ins>" in html


def test_pager_keeps_the_other_parameters():
    request = RequestFactory().get("/x/", {"state": "open", "cursor": "old"})
    request.user = AnonymousUser()
    source = '{% include "components/pager.html" %}'
    html = Template(source).render(RequestContext(request, {"page": Page([1, 2], "NEXT", None)}))
    assert "state=open&amp;cursor=NEXT" in html or "cursor=NEXT&amp;state=open" in html
    assert "Newer" not in html


def test_chart_carries_text_and_data():
    figure = {"data": [{"y": [1], "name": "</script>"}], "layout": {"height": 180}}
    html = render('{% chart "burn" figure "Burn near one" csv_url="/x.csv" %}', figure=figure)
    assert 'data-chart="burn"' in html
    assert 'aria-label="Burn near one"' in html
    assert "--h:180px" in html
    assert html.count("</script>") == 1
