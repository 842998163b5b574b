"""Short names that would hide a page of the product."""

from django.core.exceptions import ValidationError

RESERVED = frozenset({"new", "reads", "enrol"})


def check_slug(slug: str) -> None:
    """Raises ValidationError on `slug` for a name that is an address of the product."""
    if slug in RESERVED:
        raise ValidationError({"slug": f"{slug} is an address of the product: choose another name."})
