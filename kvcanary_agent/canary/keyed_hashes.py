"""Token ids, and what follows from them, for reports that leave the process."""

from __future__ import annotations

import hashlib
import secrets


class KeyedHashes:
    """Short hashes under a key of this process: equal values look equal, and nobody learns more."""

    def __init__(self, reveal_tokens: bool) -> None:
        """Draw the key.

        Args:
            reveal_tokens: Token ids are shown in clear.
        """
        self._reveal_tokens = reveal_tokens
        self._token_key = secrets.token_bytes(16)

    def show_hash(self, value: int) -> str:
        """A chain, fingerprint or digest for a report: hashed with this process's key, as it follows from tokens."""
        return f"hash:{self.keyed(value.to_bytes(8, 'little', signed=True))}"

    def show_token(self, token: int) -> str:
        """A token id for a report: hashed with this process's key, unless tokens are to be revealed."""
        if token < 0:
            return "none"
        if self._reveal_tokens:
            return str(token)
        return f"hash:{self.keyed(token.to_bytes(8, 'little'))}"

    def keyed(self, data: bytes) -> str:
        """A short hash that only this process could have made."""
        return hashlib.blake2b(data, digest_size=4, key=self._token_key).hexdigest()
