"""How messages look on the wire: four bytes of length, then one JSON object in UTF-8; and how a secret is proved.

A message is a dict with its ``"kind"``. Nothing that is received is ever executed: no pickle, no names of code. The secret keeps
others out at the door; what follows is neither signed nor encrypted.
"""

import hashlib
import hmac
import json
import secrets
import struct
from collections.abc import Iterator
from typing import Any

from lockstep._errors import OptionError

__all__ = [
    "FIRST_BYTES",
    "MAX_BYTES",
    "PROTOCOL",
    "FrameDecoder",
    "ProtocolError",
    "encode",
    "new_nonce",
    "plain",
    "proof",
    "proves",
]

PROTOCOL = 1
MAX_BYTES = 16 * 2**20
FIRST_BYTES = 2**16  # Of a message from somebody who is not known yet.

_LENGTH = struct.Struct(">I")


class ProtocolError(Exception):
    """What arrived is no message of this protocol."""


def encode(message: dict[str, Any], limit: int = MAX_BYTES) -> bytes:
    """A message as bytes.

    Raises:
        OptionError: it holds what JSON cannot express, or is larger than ``limit``.
    """
    text = _text(message)
    if len(text) > limit:
        raise OptionError(f"{len(text):,} bytes are too many for one message to other workers: at most {limit:,}.")
    return _LENGTH.pack(len(text)) + text


def plain(value: Any) -> Any:
    """``value`` as it comes back from the wire: tuples are lists then, and keys are strings; OptionError as in :func:`encode`."""
    return json.loads(_text(value))


def _text(value: Any) -> bytes:
    try:
        return json.dumps(value, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise OptionError(f"Only values of JSON can be sent to other workers: {error}.") from None


class FrameDecoder:
    """Cuts a stream of bytes into messages.

    Args:
        limit: bytes of a message; more are refused before they are read.
    """

    def __init__(self, limit: int = MAX_BYTES) -> None:
        self.limit = limit
        self._bytes = bytearray()

    def feed(self, received: bytes) -> Iterator[dict[str, Any]]:
        """Messages that are complete now; ProtocolError where something else comes."""
        self._bytes += received
        while len(self._bytes) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._bytes)
            if length > self.limit:
                raise ProtocolError(
                    f"{bytes(self._bytes[:16])!r} is no beginning of a message of at most {self.limit:,} bytes"
                )
            end = _LENGTH.size + length
            if len(self._bytes) < end:
                return
            message = _decode(bytes(self._bytes[_LENGTH.size : end]))
            del self._bytes[:end]
            yield message


def _decode(text: bytes) -> dict[str, Any]:
    try:
        message = json.loads(text)
    except (ValueError, RecursionError):
        raise ProtocolError(f"{text[:16]!r} is not JSON") from None
    if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
        raise ProtocolError(f"{text[:16]!r} is no object with a kind")
    return message


def new_nonce() -> str:
    """A number that was never used before."""
    return secrets.token_hex(16)


def proof(secret: bytes, role: str, *nonces: str) -> str:
    """Shows that who answers ``nonces`` knows the secret, without telling it (HMAC-SHA-256).

    Args:
        secret: what both sides know.
        role: ``"chief"`` or ``"worker"``, so that an answer cannot be sent back as one's own.
        nonces: of both sides.
    """
    return hmac.new(secret, _raw("|".join((f"lockstep {PROTOCOL}", role, *nonces))), hashlib.sha256).hexdigest()


def proves(given: object, secret: bytes, role: str, *nonces: str) -> bool:
    """Whether ``given`` is the proof that is expected; takes the same time for every wrong one."""
    return isinstance(given, str) and hmac.compare_digest(_raw(given), _raw(proof(secret, role, *nonces)))


def _raw(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")  # Strangers may send any text.
