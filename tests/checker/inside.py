"""What must hold inside an engine after every step, whatever has happened."""

from __future__ import annotations

from anarchon_server.core.engine import Engine

OF_HOLDS = frozenset({"trust", "timeout", "grace", "hand", "give_back", "stop"})
"""The timers of an attempt that is held here: their handlers take the hold for granted."""


def timers_of_nothing(engine: Engine) -> list[tuple[object, ...]]:
    """The timers of attempts that are not held any more: each would end the engine when it is due."""
    held = engine._holding._holds
    return [key for key in engine._context.timers._at if key[0] in OF_HOLDS and key[1] not in held]
