"""Pure: What reading what others wrote can end in."""

from typing import Final

import msgspec

UNREADABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What msgspec raises on bytes; too deep a nesting ends in the last, before any signature."""
