"""The file of OpenID providers: what is read, and mistakes by name."""

import pytest

from controlplane.access.provider_file import BadProviders, OpenIdProvider, read_providers

GOOD = {"id": "work", "name": "Work", "issuer": "https://login.example.com/", "client_id": "flexband"}


def write(tmp_path, entries):
    secret = tmp_path / "secret"
    secret.write_text("s3cret\n")
    lines = []
    for entry in entries:
        given = {"client_secret_file": str(secret), **entry}
        lines += [f"{'-' if at == 0 else ' '} {name}: {value}" for at, (name, value) in enumerate(given.items())]
    path = tmp_path / "providers.yml"
    path.write_text("\n".join(lines))
    return str(path)


def test_no_file_no_providers():
    assert read_providers("") == ()


def test_entries_with_secrets_from_files(tmp_path):
    path = write(tmp_path, [GOOD, {**GOOD, "id": "other", "new_members": "viewer"}])
    first, second = read_providers(path)
    assert first == OpenIdProvider("work", "Work", "https://login.example.com", "flexband", "s3cret")
    assert second.new_members == "viewer"


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ([{**GOOD, "new_members": "admin"}], "new_members"),
        ([{**GOOD, "new_members": "tenant"}], "new_members"),
        ([{**GOOD, "id": "Bad Id"}], "lower-case"),
        ([{**GOOD, "issuer": "login.example.com"}], "issuer"),
        ([{**GOOD, "name": ""}], "give name"),
        ([{**GOOD, "colour": "red"}], "there is no colour"),
        ([GOOD, GOOD], "twice"),
    ],
)
def test_mistakes(tmp_path, entries, said):
    with pytest.raises(BadProviders, match=said):
        read_providers(write(tmp_path, entries))
