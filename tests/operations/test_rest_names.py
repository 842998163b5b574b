"""One thing has one name in REST: a client that knows it from one noun finds it at every other."""

from drf_spectacular.generators import SchemaGenerator


def names(node, found=None) -> set[str]:
    """Every property and parameter of a schema."""
    found = set() if found is None else found
    if isinstance(node, dict):
        found |= set(node.get("properties", {})) if isinstance(node.get("properties"), dict) else set()
        if "in" in node and "name" in node:
            found.add(node["name"])
        for value in node.values():
            names(value, found)
    elif isinstance(node, list):
        for value in node:
            names(value, found)
    return found


def test_a_workload_class_has_one_name(db):
    found = names(SchemaGenerator().get_schema(request=None, public=True))
    assert "workload_class" in found and "tenant" in found
    assert not {name for name in found if name in ("class_slug", "klass", "class_name")}
