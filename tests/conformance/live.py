from tests.conformance.player import Player


class LivePlayer(Player):
    pass
