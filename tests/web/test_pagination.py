"""Keyset pages over real rows: every row once, forward and back, with equal keys and rows that arrive between."""

from datetime import timedelta

import pytest
from django.contrib.auth.models import Group
from django.db import transaction
from django.db.models import Value
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from controlplane.tenants.models import ApiKey
from controlplane.web.pagination import BadCursor, keyset_page, sorted_page
from tests import factories

ORDER = ("-name", "id")


@pytest.fixture
def groups(db):
    return [Group.objects.create(name=f"g{n:02d}") for n in range(11)]


def walk(queryset, order, limit):
    cursor, seen = None, []
    while True:
        page = keyset_page(queryset, order, cursor=cursor, limit=limit)
        seen.append([row.pk for row in page.rows])
        if page.next_cursor is None:
            return seen, page
        cursor = page.next_cursor


@pytest.mark.parametrize("limit", [1, 3, 11, 50])
def test_every_row_once_forward(groups, limit):
    pages, _ = walk(Group.objects.all(), ORDER, limit)
    assert [pk for page in pages for pk in page] == [g.pk for g in reversed(groups)]


def test_back_again(groups):
    pages, last = walk(Group.objects.all(), ORDER, 4)
    back = keyset_page(Group.objects.all(), ORDER, cursor=last.previous_cursor, limit=4)
    assert [row.pk for row in back.rows] == pages[-2]
    first = keyset_page(Group.objects.all(), ORDER, cursor=back.previous_cursor, limit=4)
    assert [row.pk for row in first.rows] == pages[0]
    assert first.previous_cursor is None
    assert first.next_cursor is not None


def test_equal_keys_are_told_apart_by_the_next_column(groups):
    rows = Group.objects.annotate(kind=Value(1)).values("kind", "id")
    first = keyset_page(rows, ("kind", "-id"), cursor=None, limit=6)
    second = keyset_page(rows, ("kind", "-id"), cursor=first.next_cursor, limit=6)
    ids = [row["id"] for row in [*first.rows, *second.rows]]
    assert ids == sorted((g.pk for g in groups), reverse=True)


def test_a_row_that_arrives_between_pages_moves_nothing(groups):
    first = keyset_page(Group.objects.all(), ORDER, cursor=None, limit=4)
    Group.objects.create(name="zz-new")
    second = keyset_page(Group.objects.all(), ORDER, cursor=first.next_cursor, limit=4)
    assert not {r.pk for r in first.rows} & {r.pk for r in second.rows}
    assert [r.name for r in second.rows] == ["g06", "g05", "g04", "g03"]


def made_keys(used):
    """A key for each instant, None for one that was never used."""
    tenant = factories.tenant()
    for number, minutes in enumerate(used):
        ApiKey.objects.create(
            public_id=f"key_{number}", tenant=tenant, name=f"k{number % 3}", prefix=f"p{number}",
            secret_hash=f"{number}", default_class="chat", created_at=factories.NOW,
            last_used_at=None if minutes is None else factories.NOW + timedelta(minutes=minutes),
        )  # fmt: skip


ORDERS = [("last_used_at", "id"), ("-last_used_at", "-id"), ("name", "-last_used_at", "id"), ("tenant__slug", "-id")]


@pytest.mark.parametrize("order", ORDERS)
@given(used=st.lists(st.none() | st.integers(0, 3), min_size=1, max_size=12), limit=st.integers(1, 5))
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_columns_that_may_be_null_are_walked_both_ways(db, order, used, limit):
    with transaction.atomic():
        made_keys(used)
        rows = ApiKey.objects.select_related("tenant")
        pages, last = walk(rows, order, limit)
        assert [pk for page in pages for pk in page] == [row.pk for row in rows.order_by(*order)]
        back, cursor = [pages[-1]], last.previous_cursor
        while cursor is not None:
            page = keyset_page(rows, order, cursor=cursor, limit=limit)
            if page.rows:
                back.insert(0, [row.pk for row in page.rows])
            cursor = page.previous_cursor
        assert [pk for page in back for pk in page] == [pk for page in pages for pk in page]
        transaction.set_rollback(True)


@given(keys=st.sets(st.tuples(st.integers(-5, 5), st.text("ab", max_size=2))), limit=st.integers(1, 5))
def test_rows_in_memory_are_walked_both_ways(keys, limit):
    rows = sorted(keys)
    seen, page = [], sorted_page(rows, tuple, cursor=None, limit=limit)
    first = page.rows
    assert page.previous_cursor is None
    while True:
        seen += page.rows
        if page.next_cursor is None:
            break
        page = sorted_page(rows, tuple, cursor=page.next_cursor, limit=limit)
    assert seen == rows
    while page.previous_cursor is not None:
        page = sorted_page(rows, tuple, cursor=page.previous_cursor, limit=limit)
    assert page.rows[:1] == first[:1]


def test_a_cursor_of_elsewhere_is_refused_in_memory():
    rows = [(1, "a"), (2, "b")]
    other = sorted_page(["x", "y"], lambda row: (row, 1), cursor=None, limit=1).next_cursor
    with pytest.raises(BadCursor):
        sorted_page(rows, tuple, cursor=other)


@pytest.mark.parametrize(
    "cursor", ["x", "!!!", "W10", "e30", "WyJhZnRlciJd", "A" * 2_000, "WyJhZnRlciIseyJ6IjoxfSwyXQ"]
)
def test_a_foreign_cursor_is_refused(groups, cursor):
    with pytest.raises(BadCursor):
        keyset_page(Group.objects.all(), ORDER, cursor=cursor, limit=4)


def test_a_cursor_of_another_list_is_refused(groups):
    other = keyset_page(Group.objects.all(), ("id",), cursor=None, limit=4)
    with pytest.raises(BadCursor, match="does not belong"):
        keyset_page(Group.objects.all(), ORDER, cursor=other.next_cursor, limit=4)


def test_one_query_per_page(groups, django_assert_num_queries):
    with django_assert_num_queries(1):
        keyset_page(Group.objects.all(), ORDER, cursor=None, limit=4)


def test_nothing_at_all(db):
    page = keyset_page(Group.objects.none(), ORDER, cursor=None)
    assert (page.rows, page.next_cursor, page.previous_cursor) == ([], None, None)
