"""Whether two model directories have the same tokens: what routers and nodes must agree in, since only ids go between them.

A router turns text into ids and back by its own directory, nodes compute by theirs, and neither would notice that an id means
something else there: the text is wrong in silence. So a node tells the digest with its entry, and a router leaves out a node whose
digest is another. It is of which token each id is, and of nothing else: the same file saved anew by another version of its library
has the same one, and so has a directory with another chat template, other stop tokens or sampling defaults, which are the router's
business alone. Not here: comparing two of them (router/nodes.py).
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Final

UNKNOWN: Final = ""  # differs from nothing: without the file, of an unknown kind, or a node of before


def tokenizer_digest(model_dir: Path) -> str:
    """Hex SHA-256 over which token each id is, by `tokenizer.json`; UNKNOWN where that cannot be told."""
    try:
        content = json.loads((model_dir / "tokenizer.json").read_bytes())
        vocabulary = content["model"]["vocab"]
        if isinstance(vocabulary, dict):
            pairs = {(int(token_id), str(token)) for token, token_id in vocabulary.items()}
        else:  # Unigram's: a token and its score, in the order of ids
            pairs = {(token_id, str(token)) for token_id, (token, _) in enumerate(vocabulary)}
        pairs |= {(int(token["id"]), str(token["content"])) for token in content.get("added_tokens") or ()}
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return UNKNOWN
    return hashlib.sha256(json.dumps(sorted(pairs)).encode()).hexdigest()
