"""A router gives no work to a node whose token ids mean something else than its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models

from proto import baton_pb2 as pb
from router.events import LeftOut, NodeListed, NodeMissed, SessionUp
from router.text import ModelText
from runtime.tokenizer_digest import UNKNOWN, tokenizer_digest
from tests.router.core_world import CoreWorld, node_entry, ref
from tests.router.tiny_model import write_model_text

LEFT_OUT = "left out for another tokenizer than the router's: 1"


def entry(name: str, tokenizer: str, address: str = "") -> pb.NodeEntry:
    """Of a mixed node that tells this digest."""
    told = node_entry(name, pb.ROLE_MIXED, address=address)
    told.tokenizer = tokenizer
    return told


@pytest.mark.covers("R24")
def test_a_node_with_another_tokenizer_is_never_dialed_and_both_are_said() -> None:
    world = CoreWorld(tokenizer="ours")
    actions = world.feed(NodeListed(entry("m1", "theirs")))
    assert [type(each) for each in actions] == [LeftOut] and not world.dialed
    assert world.core.missing()[-1] == LEFT_OUT
    assert not world.feed(NodeListed(entry("m1", "theirs"))), "said once"
    world.feed(NodeListed(entry("m1", "theirs", address="host:moved")))
    assert not world.dialed, "nor at another address"
    world.join(entry("m2", "ours"))
    assert world.dialed == ["m2"] and world.core.missing() == []
    world.submit("a")
    assert world.dispatches("a")[0][0] == "m2"
    world.feed(NodeMissed(ref("m2")))
    world.feed(NodeMissed(ref("m1")))
    assert [node.ref.name for node, _ in world.core.nodes()] == ["m2"], "who is left out is forgotten with its entry"


@pytest.mark.covers("R24")
@pytest.mark.parametrize(("ours", "theirs"), [("", "theirs"), ("ours", ""), ("", ""), ("same", "same")])
def test_what_is_not_known_differs_from_nothing(ours: str, theirs: str) -> None:
    """A node without the file, and one of a version that told no digest."""
    world = CoreWorld(tokenizer=ours)
    world.feed(NodeListed(entry("m1", theirs)))
    world.feed(SessionUp(ref("m1")))
    assert world.dialed == ["m1"] and world.core.missing() == []


def changed(directory: Path, change: Any) -> str:
    """The digest after a change of what tokenizer.json holds."""
    path = directory / "tokenizer.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content, indent=3))
    return tokenizer_digest(directory)


@pytest.mark.covers("R24")
def test_only_which_token_each_id_is_counts(tmp_path: Path) -> None:
    before = tokenizer_digest(write_model_text(tmp_path))
    assert len(before) == 64 and before == ModelText(tmp_path).tokenizer_digest
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert tokenizer_digest(tmp_path) == before, "a template is the router's alone"
    assert changed(tmp_path, lambda file: file["model"].update(merges=[])) == before
    assert changed(tmp_path, lambda file: file.update(truncation=None, version="2.0")) == before

    def swap(file: dict[str, Any]) -> None:
        vocabulary = file["model"]["vocab"]
        vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]

    assert changed(tmp_path, swap) != before
    assert changed(tmp_path, swap) == before
    token = {"id": 300, "content": "<tool>", "special": True}
    assert changed(tmp_path, lambda file: file["added_tokens"].append(token)) != before


@pytest.mark.covers("R24")
def test_vocabularies_of_every_kind_have_a_digest_and_what_is_none_has_not(tmp_path: Path) -> None:
    pieces = [("<unk>", 0.0), ("a", -1.0), ("b", -2.0)]
    found = set()
    for model in (
        models.Unigram(pieces, 0, False),
        models.WordLevel({"a": 0, "b": 1}, "a"),
        models.WordPiece({"c": 0}),
    ):
        Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
        found.add(tokenizer_digest(tmp_path))
    assert len(found) == 3 and UNKNOWN not in found
    for text in ("", "[]", "{}", '{"model": {"vocab": 3}}', '{"model": {"vocab": [1]}}', "[" * 100_000, "\udcff"):
        (tmp_path / "tokenizer.json").write_text(text, errors="surrogateescape")
        assert tokenizer_digest(tmp_path) == UNKNOWN
    assert tokenizer_digest(tmp_path / "nowhere") == UNKNOWN
