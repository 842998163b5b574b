"""CSV: what a spreadsheet would run is neutralised, numbers stay numbers, the rest is RFC 4180."""

import csv
import io
from datetime import UTC, date, datetime
from decimal import Decimal
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.tenants.models import Tenant
from controlplane.web.exports import (
    BATCH_ROWS,
    FIRST_ROWS,
    CsvResponse,
    cell,
    csv_chunks,
    decimal_of_nanos,
    in_batches,
    in_present_order,
    neutral,
)
from tests import factories


@pytest.mark.parametrize("start", ["=", "+", "-", "@", "\t", "\r", "\n"])
def test_text_that_starts_like_a_formula_is_neutralised(start):
    assert cell(f"{start}cmd|' /C calc'!A0") == f"'{start}cmd|' /C calc'!A0"


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (-5, "-5"),
        (Decimal("-1289.520000000"), "-1289.520000000"),
        (-0.25, "-0.25"),
        (1e-7, "0.0000001"),
        (None, ""),
        (True, "true"),
        ("acme", "acme"),
        ("a=b", "a=b"),
        (date(2026, 10, 25), "2026-10-25"),
        (datetime(2026, 10, 25, 1, tzinfo=UTC), "2026-10-25T01:00:00Z"),
        (UUID(int=1), "00000000-0000-0000-0000-000000000001"),
    ],
)
def test_values(value, written):
    assert cell(value) == written


@pytest.mark.parametrize("value", [float("nan"), float("inf"), Decimal("NaN")])
def test_no_number_is_refused(value):
    with pytest.raises(ValueError, match="write None"):
        cell(value)


def test_an_instant_without_zone_is_refused():
    with pytest.raises(ValueError, match="needs its zone"):
        cell(datetime(2026, 10, 25))


@pytest.mark.parametrize(
    ("nanos", "written"),
    [(0, "0"), (1_500_000_000, "1.5"), (-1, "-0.000000001"), (10**20, "100000000000"), (-(2 * 10**9), "-2")],
)
def test_nanos_are_exact(nanos, written):
    assert cell(decimal_of_nanos(nanos)) == written


@given(st.integers(-(2**63), 2**63 - 1))
def test_every_amount_reads_back(nanos):
    assert Decimal(cell(decimal_of_nanos(nanos))) * 10**9 == nanos


@settings(max_examples=60)
@given(st.lists(st.tuples(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")), st.integers())))
def test_file_reads_back(rows):
    content = b"".join(csv_chunks(["name", "n"], rows)).decode()
    read = list(csv.reader(io.StringIO(content, newline="")))
    assert read == [["name", "n"], *[[neutral(text), str(n)] for text, n in rows]]


def test_lines_end_with_crlf_and_quotes_are_doubled():
    assert b"".join(csv_chunks(["a", "b"], [('say "x", y', 1)])) == b'a,b\r\n"say ""x"", y",1\r\n'


def test_a_row_of_another_width_is_refused():
    with pytest.raises(ValueError, match="row 2 has 1 cells, the header has 2"):
        list(csv_chunks(["a", "b"], [(1, 2), (1,)]))


def test_rows_are_streamed_in_pieces():
    drawn = []

    def rows():
        for n in range(50_000):
            drawn.append(n)
            yield (n, "x" * 20)

    chunks = csv_chunks(["n", "t"], rows())
    next(chunks)
    assert len(drawn) < 10_000


def test_response_for_wsgi():
    response = CsvResponse("lines, October/2026.csv", ["n"], [(1,), (2,)])
    assert response.getvalue() == b"n\r\n1\r\n2\r\n"
    assert response.headers["Content-Disposition"] == 'attachment; filename="lines--October-2026.csv"'
    assert response.headers["Content-Type"].startswith("text/csv")


async def test_response_for_asgi_pulls_piece_by_piece():
    response = CsvResponse("x.csv", ["n", "t"], ((n, "y" * 50) for n in range(5_000)))
    pieces = [piece async for piece in response]
    assert len(pieces) > 2
    assert b"".join(pieces).count(b"\r\n") == 5_001


@pytest.fixture
def tenants(db):
    factories.tenant("t00000")
    row = {"name": "n", "classes": [], "created_at": factories.NOW, "updated_at": factories.NOW}
    Tenant.objects.bulk_create(
        Tenant(slug=f"t{n:05}", weight=n % 7 + 1, **row) for n in range(1, FIRST_ROWS + BATCH_ROWS + 50)
    )
    return Tenant.objects.all()


@pytest.mark.parametrize("order", [("slug", "id"), ("-weight", "id")])
def test_every_row_is_in_one_batch_in_order(tenants, order):
    wanted = [row.pk for row in tenants.order_by(*order)]
    for batches in (in_batches(tenants, order), in_present_order(tenants, order, tenants)):
        found = [[row.pk for row in batch] for batch in batches]
        assert [pk for batch in found for pk in batch] == wanted
        assert [len(batch) for batch in found] == [FIRST_ROWS, BATCH_ROWS, 50]


def test_the_first_bytes_wait_for_a_first_page_alone(tenants, django_assert_num_queries):
    with django_assert_num_queries(1) as asked:
        batches = in_batches(tenants, ("slug", "id"))
        assert len(next(batches)) == FIRST_ROWS
    assert f"LIMIT {FIRST_ROWS + 1}" in asked[0]["sql"] and "DECLARE" not in asked[0]["sql"]


def test_a_row_that_moves_while_it_is_read_is_in_it_once(tenants):
    batches = in_present_order(tenants, ("weight", "id"), tenants)
    seen = [row.pk for row in next(batches)]
    gone = tenants.order_by("-weight", "-id").first()
    Tenant.objects.filter(pk=seen[0]).update(weight=99)
    Tenant.objects.filter(pk=gone.pk).delete()
    seen += [row.pk for batch in batches for row in batch]
    assert len(seen) == len(set(seen)) == tenants.count() and gone.pk not in seen


def test_no_rows_are_no_batches(db):
    assert list(in_batches(Tenant.objects.all(), ("slug",))) == []
    assert list(in_present_order(Tenant.objects.all(), ("slug",), Tenant.objects.all())) == []
