"""What a compiled program exchanges with the host, and the memory that it reuses, read from its text."""

import re

# S(5) is the memory of the host, for TPUs.
_HOST = re.compile(r" (infeed|outfeed|send|recv|host-compute)\(|custom_call_target=\"([^\"]*callback[^\"]*)\"|(S\(5\))")
_ALIASES = re.compile(r"\binput_output_alias=\{((?:\s*\{[\d, ]*\}: \([^)]*\),?)*)")


def host_instructions(text: str) -> list[str]:
    """Return the names of instructions, callbacks and memories."""
    return ["".join(found) for found in _HOST.findall(text)]


def donated(text: str) -> int:
    """Return the number of arguments whose memory the results reuse."""
    aliases = _ALIASES.search(text)
    return aliases[1].count("-alias)") if aliases else 0
