"""The stores that Anarchon speaks to: one module a store, each behind the port `anarchon_server.core.store`."""
