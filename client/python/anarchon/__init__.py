"""The Anarchon client: the public names, nothing else. It may import the standard library, grpc and protobuf."""
