"""Agents' folders of another database are set aside whole, those of this one stay."""

import msgspec

from controlplane.agent.identity import IDENTITY_FILE, StoredIdentity
from controlplane.demo.agent_folders import agents_here, set_aside_strangers


def enrolled_folder(folder, agent: str):
    folder.mkdir(parents=True)
    stored = StoredIdentity(agent, 1, "chat-70b", "installation", {}, "http://127.0.0.1:8000")
    (folder / IDENTITY_FILE).write_bytes(msgspec.json.encode(stored))
    (folder / "spool").mkdir()
    (folder / "spool" / "1.journal").write_text(agent)
    return folder


def test_only_agents_that_the_database_does_not_know_are_set_aside_with_their_records(tmp_path):
    agents = tmp_path / "agents"
    known, stranger = enrolled_folder(agents / "gpu-1", "a"), enrolled_folder(agents / "gpu-2", "b")
    (agents / "gpu-3").mkdir()
    (moved,) = set_aside_strangers(agents, {"gpu-1": "a", "gpu-2": "c"})
    assert known.exists() and not stranger.exists() and (agents / "gpu-3").exists()
    assert moved == tmp_path / "agents-of-another-database" / "gpu-2-1"
    assert (moved / "spool" / "1.journal").read_text() == "b"
    enrolled_folder(agents / "gpu-2", "d")
    assert [folder.name for folder in set_aside_strangers(agents, {"gpu-1": "a"})] == ["gpu-2-2"]
    assert set_aside_strangers(agents, {"gpu-1": "a"}) == []


def test_agents_that_are_here_are_told_by_their_folders(tmp_path):
    agents = tmp_path / "agents"
    assert agents_here(agents) == {}
    enrolled_folder(agents / "gpu-1", "a")
    (agents / "gpu-2").mkdir()
    (enrolled_folder(agents / "gpu-3", "c") / IDENTITY_FILE).write_bytes(b"{")
    assert agents_here(agents) == {"gpu-1": "a"}


def test_no_folder_at_all_and_an_unreadable_identity(tmp_path):
    assert set_aside_strangers(tmp_path / "agents", {}) == []
    folder = enrolled_folder(tmp_path / "agents" / "gpu-1", "a")
    (folder / IDENTITY_FILE).write_bytes(b"{")
    assert len(set_aside_strangers(tmp_path / "agents", {"gpu-1": "a"})) == 1
