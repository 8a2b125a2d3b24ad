"""How a token is written in logprobs: its bytes, and a name for it that JSON can hold.

A token of a byte-level vocabulary may be half a character. Its bytes are exact all the same, so that those of a completion's
tokens are its text; its name is the text if the bytes are one, otherwise `bytes:\\xe2\\x82`, as OpenAI wrote it. Ids that no
token has, and special tokens, are spelled as the vocabulary spells them (nothing; `</s>`).
"""

from __future__ import annotations

import re
from typing import Final

from tokenizers import Tokenizer

_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-F]{2})>")


class Spelling:
    """The bytes of each token of a vocabulary; what kind it is is found out by asking it for a letter."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = {token_id: token.content for token_id, token in tokenizer.get_added_tokens_decoder().items()}
        self._has_byte_tokens = _decodes(tokenizer, "<0x41>", "A")
        self._byte_of = _bytes_of_alphabet() if _decodes(tokenizer, "Ġ", " ") else {}

    def bytes_of(self, token_id: int) -> bytes:
        """The token's own bytes."""
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_of:
            return b"".join([self._byte_of.get(character) or character.encode() for character in token])
        if self._has_byte_tokens and (byte := _BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(byte[1])
        return token.replace("▁", " ").encode()

    def name_of(self, token_id: int) -> str:
        """The token as text, or its bytes spelled out."""
        spelled = self.bytes_of(token_id)
        try:
            return spelled.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join([f"\\x{byte:02x}" for byte in spelled])


def _decodes(tokenizer: Tokenizer, token: str, text: str) -> bool:
    token_id = tokenizer.token_to_id(token)
    return token_id is not None and tokenizer.decode([token_id]) == text


def _bytes_of_alphabet() -> dict[str, bytes]:
    """GPT-2's printable stand-in for each byte -> the byte: itself where it is printable, else the next from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    stand_ins = [*((byte, byte) for byte in printable), *((256 + i, byte) for i, byte in enumerate(others))]
    return {chr(character): bytes([byte]) for character, byte in stand_ins}
