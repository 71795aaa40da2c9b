"""The generated stubs of the protocol `anarchon.v1`; made by `make proto`, never edited."""
