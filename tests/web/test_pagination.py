"""Keyset pages over real rows: every row once, forward and back, with equal keys and rows that arrive between."""

import pytest
from django.contrib.auth.models import Group
from django.db.models import Value

from controlplane.web.pagination import BadCursor, keyset_page

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
