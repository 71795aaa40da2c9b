"""The sidecar's gRPC side: the protocol's services, in front of the loop and the store."""
