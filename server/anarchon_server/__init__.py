"""The Anarchon sidecar: slot computation, claims, leases and takeover beside an application."""
